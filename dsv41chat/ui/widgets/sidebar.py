"""The conversations at the left: by day, newest first."""

from __future__ import annotations

import asyncio
from typing import Any

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.message import Message
from textual.widget import Widget
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from dsv41chat.store import StoreError
from dsv41chat.ui.present import age, day_group
from dsv41chat.ui.render.wrap import crop_cells
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.spawn import Spawning

SHOWN = 200


class Sidebar(Spawning, Widget):
    """A list of recent conversations; choosing one posts Chosen."""

    class Chosen(Message):
        def __init__(self, conversation_id: str):
            super().__init__()
            self.conversation_id = conversation_id

    def __init__(self, *, id: str | None = None):
        super().__init__(id=id)
        self.border_title = "Conversations"
        self._rows: list[Any] = []
        self._current: str | None = None

    def compose(self) -> ComposeResult:
        yield OptionList(id="sidebar-list", markup=False, compact=True)

    def reload(self, current: str | None) -> None:
        """Reads the list again; `current` is the conversation on screen."""
        self._current = current
        if self.display and self.is_mounted:
            self.spawn(self._load(), "sidebar")

    async def _load(self) -> None:
        try:
            self._rows = await asyncio.to_thread(self.app.store.list_conversations, None, SHOWN)
        except StoreError:
            # The list is a convenience here; what keeps the store from being read is said where it matters.
            return
        self._show()

    def _show(self) -> None:
        if not self.query(OptionList):
            # The screen was closed while the store was asked.
            return
        options = self.query_one(OptionList)
        options.clear_options()
        width = max(10, self.size.width - 2)  # the scrollbar of a long list
        group = ""
        made: list[Option | None] = []
        for row in self._rows:
            if (day := day_group(row.updated)) != group:
                group = day
                made.append(Option(Text(day, style="dim"), id=f"group-{day}", disabled=True))
            when = age(row.updated)
            mark = "> " if row.id == self._current else "  "
            room = width - cell_len(when) - 1
            title = crop_cells(mark + (visible_line(row.title) or "(empty)"), room)
            made.append(Option(Text(title + " " * (room - cell_len(title) + 1) + when, no_wrap=True), id=row.id))
        options.add_options(made)
        index = next((index for index, option in enumerate(made) if option.id == self._current), None)
        options.highlighted = index

    def on_resize(self) -> None:
        self._show()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Chosen(event.option.id))
