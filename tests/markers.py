"""Every string that is a control token in a released tokenizer of either family, for tests that send them as text.

CONTROL: those with a meaning in prompts and answers; small enough for a test per marker. MARKERS: all of them (the test of
the tokenizer compares this list with the released files). HOSTILE: one text with every marker of CONTROL.
"""

from __future__ import annotations

from collections.abc import Iterable

from dsv41chat.engine.chat.tokenizer import ChatTokenizer

CONTROL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜deepseek_image｜>",
    "<｜image｜>",
    "<｜image2｜>",
    "<｜place▁holder▁no▁799｜>",
)
_OTHERS = [
    *(f"<｜{name}｜>" for name in ("fim▁hole", "fim▁begin", "fim▁end", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin")),
    *(f"<｜{name}｜>" for name in ("tool▁call▁end", "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end")),
    *(f"<｜{name}｜>" for name in ("tool▁sep", "begin▁of▁repo▁name", "end▁of▁repo▁name", "begin▁of▁file▁name", "end▁of▁file▁name")),
    *(f"<｜{name}｜>" for name in ("begin▁of▁file", "end▁of▁file", "place▁holder▁for▁copy", "place▁holder▁for▁pointer▁replace")),
    *(f"<｜{name}｜>" for name in ("begin▁sys", "end▁sys", "task", "political", "entity", "safety", "answer", "search")),
    *(f"<｜{name}｜>" for name in ("search▁begin", "search▁end", "extracted_url", "end_of_query", "rl_image_pad", "rl_image_start")),
    *(f"<｜{slash}{name}｜>" for name in ("polygon", "point", "box", "ref") for slash in ("", "/")),
    *("<｜/table>｜", "<｜table｜>", "<｜/td｜>", "<｜td｜>", "<｜/tr｜>", "<｜tr｜>"),
    *("<|EOT|>", "<dsml:", "</dsml:"),
]
MARKERS = (
    *CONTROL,
    *_OTHERS,
    *(f"<｜place▁holder▁no▁{k}｜>" for k in range(799)),
    *(f"<|place_holder_mm_span_{k:04}|>" for k in range(21, 443)),
)
HOSTILE = " x ".join(CONTROL) + "\n\n" + "".join(CONTROL) + "\n<｜DSML｜ calls>\n<｜DSML｜tool_calls>\n</｜DSML｜ invoke>"


def control_ids(tokenizer: ChatTokenizer, ids: Iterable[int]) -> list[int]:
    """Those of the ids that are control tokens, in order."""
    return [id for id in ids if tokenizer.is_added(id)]


def decode(tokenizer: ChatTokenizer, ids: Iterable[int]) -> str:
    """The text of whole ids."""
    return b"".join(tokenizer.token_bytes(id) for id in ids).decode("utf-8")
