"""From stored messages to the engine's chat messages: verbatim ids where they are still valid, text otherwise."""

from __future__ import annotations

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
    (params or meta "tokenizer"): another build's ids mean other text; those of a text, only when they spell it.
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
                    reasoning_ids=_ids(row.reasoning_ids) if own else None,
                    body_ids=_ids(row.body_ids) if own else None,
                )  # fmt: skip
            )
        else:
            ids = _ids(row.ids) if own else None
            messages.append(Message(row.role, row.text, content_ids=ids if ids and _spells(tokenizer, ids, row.text) else None))
    if last is not None:
        messages.append(Message("user", last))
    return messages


def _ids(ids: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(int(i) for i in ids)


def _spells(tokenizer: ChatTokenizer, ids: tuple[int, ...], text: str) -> bool:
    """Whether ids are a text, without a control id: an imported file may say otherwise, and the model must read what the person reads."""
    return not any(map(tokenizer.is_added, ids)) and b"".join(map(tokenizer.token_bytes, ids)) == text.encode("utf-8", "replace")
