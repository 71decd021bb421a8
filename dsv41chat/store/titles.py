"""Titles: the first line of the first user message, cut to a width in terminal cells."""

from __future__ import annotations

import unicodedata

TITLE_CELLS = 60


def cell_width(character: str) -> int:
    """Cells that one character takes: 2 if wide, 0 if it joins the one before it, else 1."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, cells: int) -> str:
    """`text` if it fits into `cells`, else its longest beginning that fits together with an ellipsis."""
    if sum(map(cell_width, text)) <= cells:
        return text
    kept, used = [], 0
    for character in text:
        used += cell_width(character)
        if used > cells - 1:
            break
        kept.append(character)
    return "".join(kept).rstrip() + "…"


def title_of(text: str, cells: int = TITLE_CELLS) -> str:
    """The title that a first message gives: its first line with anything in it, without control characters."""
    for line in text.splitlines():
        # A title is shown in lists and headers: nothing in it may move the cursor.
        line = "".join(" " if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") else c for c in line[:4000])
        line = " ".join(line.split())
        if line:
            return cut(line, cells)
    return ""
