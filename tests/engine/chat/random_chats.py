"""Seeded random text and well-formed random conversations of both families."""

from __future__ import annotations

import json
from random import Random

from dsv41chat.engine.chat.encode import Message, RenderOptions, ToolCall
from tests.markers import CONTROL

_WORDS = ["the", "Príliš", "x", "a b", "'s", "12345", "0.5", "日本", "🙂", "👩‍👩‍👧", "é", "e\u0301"]
_WORDS += [" ", "  ", "\n", "\n\n", "\r\n", "\t", "<", "</", ">", '"', "｜"]
_TOOLS = (
    {"name": "get_weather", "description": "Weather of a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "add", "parameters": {"type": "object"}},
    {"name": "now"},
    {"name": "late", "description": "měsíc", "parameters": None, "defer_loading": True},
)
_VALUES = ["", "text", 'q"\\ \n<b>', "</｜DSML｜ parameter>", "é日", 0, -1.5, True, None, [1, "é", {"k": []}], {"a": {}}]


def random_text(rng: Random, low: int = 0, high: int = 6) -> str:
    return "".join(rng.choice(CONTROL) if rng.random() < 0.1 else rng.choice(_WORDS) for _ in range(rng.randint(low, high)))


def random_unicode(rng: Random, length: int) -> str:
    """Any code points but surrogates: ASCII, Latin, the basic plane and beyond."""
    tops = (0x80, 0x250, 0x3000, 0x10000, 0x110000)
    points = (rng.randrange(rng.choice(tops)) for _ in range(length))
    return "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)


def random_calls(rng: Random) -> tuple[ToolCall, ...]:
    def arguments() -> str:
        if rng.random() < 0.2:
            return rng.choice(["{oops", "[1, 2]", '"text"', "", "null"])
        return json.dumps({rng.choice("abcé"): rng.choice(_VALUES) for _ in range(rng.randint(0, 3))}, ensure_ascii=rng.random() < 0.5)

    return tuple(ToolCall(f"c{k}", rng.choice(["get_weather", "add", "now"]), arguments()) for k in range(rng.randint(1, 3)))


def random_options(rng: Random, family: str) -> RenderOptions:
    return RenderOptions(
        thinking=rng.random() < 0.6,
        effort=rng.choice(["low", "high", "xhigh", "max"]),
        tools=tuple(rng.sample(_TOOLS, rng.randint(1, 4))) if rng.random() < 0.5 else (),
        tool_choice=rng.choice(["auto", "auto", "none", "required"]),
        response_format=rng.choice(["text", "text", "json_object", {"type": "object", "title": "é"}]),
    )


def random_conversation(rng: Random, family: str, options: RenderOptions) -> list[Message]:
    """Any order of roles that check_conversation allows, and a prefix at the end now and then."""
    messages: list[Message] = []

    def reminder() -> None:
        if rng.random() < 0.15 and not (messages and messages[-1].role == "latest_reminder"):
            messages.append(Message("latest_reminder", random_text(rng)))

    for _ in range(rng.randint(0, 2) if rng.random() < 0.5 else 0):
        messages.append(_system(rng, family))
    for _ in range(rng.randint(1, 4)):
        reminder()
        for _ in range(rng.choice([1, 1, 1, 2])):
            messages.append(Message("user", random_text(rng)))
        reminder()
        if rng.random() < 0.1:
            messages.append(_system(rng, family))
        if rng.random() < 0.8:
            messages.append(_answer(rng))
            calls = list(messages[-1].tool_calls)
            if calls:
                rng.shuffle(calls)
                messages += [Message("tool", random_text(rng), tool_call_id=call.id) for call in calls]
    if messages[-1].role != "assistant" and rng.random() < 0.2 and options.tool_choice != "required":
        messages.append(Message("assistant", random_text(rng), reasoning=rng.choice([None, random_text(rng)]), prefix=True))
    return messages


def _system(rng: Random, family: str) -> Message:
    tools = tuple(rng.sample(_TOOLS, 2)) if family == "v41" and rng.random() < 0.2 else ()
    return Message("system", random_text(rng), tools=tools)


def _answer(rng: Random) -> Message:
    calls = random_calls(rng) if rng.random() < 0.3 else ()
    return Message("assistant", random_text(rng), reasoning=rng.choice([None, "", random_text(rng)]), tool_calls=calls)
