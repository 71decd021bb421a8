"""From stored messages to the engine's chat messages: verbatim ids where they are still valid, text otherwise."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dsv41chat.engine.chat.encode import Message
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer


def ids_hash(ids: Iterable[int]) -> str:
    """sha256 (hex) of the ids as little-endian uint32."""
    return hashlib.sha256(np.asarray(tuple(ids), dtype="<u4").tobytes()).hexdigest()


def chat_messages(
    system: str | None, path: Sequence[Any], tokenizer: ChatTokenizer, *, continued: bool = False, last: str | None = None
) -> list[Message]:
    """The messages of a conversation path, for `encode_prompt`.

    path: store messages, root first. Stored ids are used only when they were made by the tokenizer of the loaded build
    (params or meta "tokenizer"): another build's ids mean other text; and only when they spell what is stored beside them.
    continued: the last message is an answer to go on with.
    last: a user text that is not stored yet.
    """
    from dsv41chat.engine.chat.encode import Message

    messages = [Message("system", system)] if system else []
    for i, row in enumerate(path):
        made_by = (row.params or {}).get("tokenizer") or (row.meta or {}).get("tokenizer")
        own = made_by == tokenizer.sha256
        if row.role == "assistant":
            messages.append(
                Message(
                    "assistant",
                    row.text,
                    reasoning=row.thinking or None,
                    prefix=continued and i == len(path) - 1,
                    reasoning_ids=_spelling(tokenizer, row.reasoning_ids, row.thinking, sampled=True) if own else None,
                    body_ids=_spelling(tokenizer, row.body_ids, row.text, sampled=True, cut=row.finish == "stop_string") if own else None,
                )  # fmt: skip
            )
        else:
            messages.append(Message(row.role, row.text, content_ids=(_spelling(tokenizer, row.ids, row.text) or None) if own else None))
    if last is not None:
        messages.append(Message("user", last))
    return messages


def _spelling(tokenizer: ChatTokenizer, ids: Iterable[int] | None, text: str, *, sampled: bool = False, cut: bool = False) -> tuple[int, ...] | None:
    """The ids if they are this text, without a control id; else None, so that the text is encoded again.

    An imported file may say anything: no control id may come from it, and the model must read what the person reads.
    sampled: ids of an answer, which holds what is never shown: line breaks at its ends and half a character at the end.
    cut: a stop text, and what came with it, may follow.
    """
    if ids is None:
        return None
    ids = tuple(int(id) for id in ids)
    pieces = [tokenizer.token_bytes(id) for id in ids]
    if not all(pieces) or any(map(tokenizer.is_added, ids)):
        return None
    if not sampled:
        return ids if b"".join(pieces) == text.encode("utf-8", "replace") else None
    said = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces)).strip("\n")
    text = text.strip("\n")
    return ids if said == text or cut and said.startswith(text) else None
