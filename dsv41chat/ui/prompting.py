"""From stored messages to the engine's chat messages: verbatim ids where they are still valid, text otherwise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dsv41chat.engine.chat.encode import Message


def ids_hash(ids: Iterable[int]) -> str:
    """sha256 (hex) of the ids as little-endian uint32."""
    return hashlib.sha256(np.asarray(tuple(ids), dtype="<u4").tobytes()).hexdigest()


def chat_messages(
    system: str | None, path: Sequence[Any], tokenizer_sha256: str | None, *, continued: bool = False, last: str | None = None
) -> list[Message]:
    """The messages of a conversation path, for `encode_prompt`.

    path: store messages, root first. Stored ids are used only when they were made by the tokenizer of the loaded build
    (params or meta "tokenizer"): another build's ids mean other text. continued: the last message is an answer to go on with.
    last: a user text that is not stored yet.
    """
    from dsv41chat.engine.chat.encode import Message

    messages = [Message("system", system)] if system else []
    for i, row in enumerate(path):
        made_by = (row.params or {}).get("tokenizer") or (row.meta or {}).get("tokenizer")
        own = tokenizer_sha256 is not None and made_by == tokenizer_sha256
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
            messages.append(Message(row.role, row.text, content_ids=_ids(row.ids) if own and row.ids else None))
    if last is not None:
        messages.append(Message("user", last))
    return messages


def _ids(ids: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(int(i) for i in ids)
