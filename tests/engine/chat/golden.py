"""The encoding goldens as values of the engine's own types."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from dsv41chat.engine.chat.encode import Message, RenderOptions, ToolCall
from dsv41chat.engine.chat.markers import IMAGE

FOLDER = Path(__file__).parents[2] / "data" / "encoding"


@cache
def load(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def cases(name: str) -> list[dict]:
    return load(name)["cases"]


def message(raw: dict) -> Message:
    """n_images = k in a golden: the first k placeholder spellings in the content were made by the application."""
    content, images = raw["content"] or "", []
    for _ in range(raw.get("n_images", 0)):
        at = content.index(IMAGE)
        content = content[:at] + content[at + len(IMAGE) :]
        images.append(at)
    return Message(
        role=raw["role"],
        content=content,
        reasoning=raw.get("reasoning_content"),
        tool_calls=tuple(ToolCall(**call) for call in raw.get("tool_calls", ())),
        tool_call_id=raw.get("tool_call_id"),
        prefix=raw.get("prefix", False),
        tools=tuple(raw.get("tools", ())),
        images=tuple(images),
        task=raw.get("task"),
    )


def options(raw: dict) -> RenderOptions:
    return RenderOptions(
        thinking=raw.get("thinking", True),
        effort=raw.get("effort", raw.get("effort_level")) or "high",
        tools=tuple(raw.get("tools", ())),
        tool_choice=raw.get("tool_choice", "auto"),
        response_format=raw.get("schema", raw.get("response_format", "text")),
        keep_reasoning=not raw.get("drop", True),
    )
