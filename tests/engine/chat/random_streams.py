"""Seeded random answers: thinking, text, calls and damaged markup, as sampled ids."""

from __future__ import annotations

from random import Random

from dsv41chat.engine.chat.markers import DSML, END_THINK, THINK
from dsv41chat.engine.chat.segments import Segment, Special, Text, encode
from dsv41chat.engine.chat.tokenizer import ChatTokenizer
from dsv41chat.engine.chat.tools import calls_block
from tests.engine.chat.random_chats import random_calls, random_text

STARTS = ("reasoning", "content", "reasoning_continuation", "content_continuation", "tool")


def random_stream(rng: Random, tokenizer: ChatTokenizer, family: str, *, damage: bool) -> tuple[str, bool, list[int], str]:
    """(start, tools declared, ids, finish reason). damage: markup may be broken, and the end may be missing."""
    start = rng.choice(STARTS)
    parts: list[Segment] = []
    if start.startswith("reasoning"):
        parts += [Text(random_text(rng)), *([Special(END_THINK)] if rng.random() < 0.8 else [])]
    if start != "tool":
        parts.append(Text(random_text(rng)))
    if rng.random() < 0.6 or start == "tool":
        block = calls_block(family if rng.random() < 0.8 else "v4", random_calls(rng))
        parts += block[5:] if start == "tool" else block
        parts.append(Text(random_text(rng)))
    elif rng.random() < 0.1:
        parts += [Special(rng.choice([DSML, THINK])), Text(random_text(rng))]
    if damage:  # leave something out, put something in, cut
        for _ in range(rng.randint(0, 3)):
            at = rng.randrange(len(parts))
            if rng.random() < 0.5 and len(parts) > 1:
                del parts[at]
            else:
                parts.insert(at, rng.choice([Special(DSML), Special(THINK), Special(END_THINK), Text(random_text(rng)), Text(">"), Text("</")]))
    ids = encode(parts, tokenizer)
    if damage and rng.random() < 0.5:
        ids = ids[: rng.randint(0, len(ids))]
    return start, start == "tool" or rng.random() < 0.8, ids, rng.choice(["stop", "length"])
