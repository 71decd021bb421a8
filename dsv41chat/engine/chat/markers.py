"""Spellings of the control tokens, shared by both families.

Only spellings live here, never ids: a pack's own `added_tokens` say which of them exist and under which id
(`ChatTokenizer.marker`). The bars are U+FF5C FULLWIDTH VERTICAL LINE, the low lines U+2581.
"""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"  # v41 only
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"  # opens every tag of a tool call: <｜DSML｜... and </｜DSML｜...
REMINDER = "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"  # v41 only

# One short-output task each; the value is appended to the last user message (see encode.py).
TASKS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}

FAMILIES = ("v4", "v41")

# Markers that a model must not emit inside an answer. Sampling one ends the answer as EOS does. The v4 entries are what
# the v4 tokenizer spells at the places of v41's system and image markers.
DEFENSIVE = {
    "v41": (BOS, PAD, SYSTEM, USER, ASSISTANT, IMAGE),
    "v4": (BOS, PAD, "<｜place▁holder▁no▁799｜>", USER, ASSISTANT, "<｜image2｜>"),
}


def check_family(family: str) -> str:
    """The family itself, or ValueError for anything but v4 and v41."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}: expected one of {', '.join(FAMILIES)}")
    return family
