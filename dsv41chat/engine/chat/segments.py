"""A prompt before it has ids: text, control tokens and verbatim ids, never mixed up.

Text is encoded without control tokens, so nothing that a person or a tool wrote can become one. Source: spec
chat_encoding, section 1.4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .markers import DSML, END_THINK, IMAGE, THINK
from .messages import MalformedConversation
from .tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Text:
    """Plain text. Neighbouring texts are encoded as one."""

    text: str


@dataclass(frozen=True)
class Special:
    """The control token of this spelling."""

    spelling: str


@dataclass(frozen=True)
class Ids:
    """Ids that are inserted as they are.

    sampled: the model chose them, so they may hold control ids (tool calls do). Others are an encoded text and may hold
    no control id except `images` image placeholders.
    """

    ids: tuple[int, ...]
    sampled: bool = False
    images: int = 0


Segment = Text | Special | Ids

_PROTOCOL = re.compile(f"({re.escape(DSML)}|{re.escape(THINK)}|{re.escape(END_THINK)})")


def protocol(text: str) -> list[Segment]:
    """Segments of a fixed protocol string, in which the tool and thinking markers are control tokens."""
    return [Special(part) if _PROTOCOL.fullmatch(part) else Text(part) for part in _PROTOCOL.split(text) if part]


def encode(segments: Iterable[Segment], tokenizer: ChatTokenizer) -> list[int]:
    """The ids of a rendered prompt.

    Raises PackIncomplete for a control token that the tokenizer lacks, MalformedConversation for verbatim ids of a text
    that hold a control id or an id the tokenizer does not have.
    """
    ids: list[int] = []
    text: list[str] = []

    def flush() -> None:
        if text:
            ids.extend(tokenizer.encode_text("".join(text)))
            text.clear()

    for segment in segments:
        if isinstance(segment, Text):
            text.append(segment.text)
            continue
        flush()
        if isinstance(segment, Special):
            ids.append(tokenizer.marker(segment.spelling))
        else:
            _check_verbatim(segment, tokenizer)
            ids.extend(segment.ids)
    flush()
    return ids


def _check_verbatim(segment: Ids, tokenizer: ChatTokenizer) -> None:
    bad = next((id for id in segment.ids if not 0 <= id < tokenizer.vocab_size), None)
    if bad is not None:
        raise MalformedConversation(f"stored id {bad} does not exist in this tokenizer", "the text was encoded for another model; encode it again")
    if segment.sampled:
        return
    control = [id for id in segment.ids if tokenizer.is_added(id)]
    image = tokenizer.find_marker(IMAGE)
    if len(control) != segment.images or any(id != image for id in control):
        raise MalformedConversation(f"stored ids of a text hold {len(control)} control ids", "encode the text again")
