"""The key line at the foot of a page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from textual import events
from textual.widgets import Static

LINES, SHORT_LINES, SHORT = 3, 1, 16


def packed(items: Sequence[str], width: int, lines: int) -> str:
    """The items in at most so many lines of `width` cells: none is cut or broken, the last ones go when there is no room."""
    rows = [""]
    for item in items:
        joined = f"{rows[-1]}  {item}" if rows[-1] else item
        if cell_len(joined) <= width:
            rows[-1] = joined
        elif len(rows) < lines and cell_len(item) <= width:
            rows.append(item)
        else:
            break
    return "\n".join(rows)


class Foot(Static):
    """items: "key what it does", the most important first. On a low terminal the list above has the room."""

    def __init__(self, *items: str):
        super().__init__("", markup=False, classes="dialog-foot")
        self._items = items
        self._shown = ""

    def on_resize(self, event: events.Resize) -> None:
        shown = packed(self._items, event.size.width, SHORT_LINES if self.app.size.height < SHORT else LINES)
        if shown != self._shown:
            self._shown = shown
            self.update(shown)
