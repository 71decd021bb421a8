"""Prompts and ends of sessions, for tests of one conversation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsv41chat.engine.chat.encode import encode_prompt
from dsv41chat.engine.chat.messages import Message, RenderOptions
from dsv41chat.engine.events import Done


def prompt(engine: Any, *turns: str | Done, thinking: bool = False) -> list[int]:
    """turns: texts, users' and assistants' by turns; a Done stands for its verbatim answer."""
    messages = []
    for i, turn in enumerate(turns):
        if isinstance(turn, Done):
            messages.append(Message("assistant", turn.text, reasoning_ids=turn.reasoning_ids, body_ids=turn.body_ids))
        else:
            messages.append(Message("assistant" if i % 2 else "user", turn))
    return encode_prompt(engine.tokenizer, engine.family, messages, RenderOptions(thinking=thinking))


def done(events: Iterable[Any]) -> Done:
    return list(events)[-1]
