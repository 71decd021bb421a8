"""One line of input, drawn so that nothing in its text acts on the terminal. Its value stays what was typed or pasted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.command import CommandInput, CommandPalette
from textual.widget import Widget
from textual.widgets import Input

from dsv41chat.ui.sanitize import in_place, sendable


def shown(value: str) -> str:
    """The value as it is drawn: as many characters, each that could act on the terminal or end the line as a symbol."""
    return in_place(value).replace("\n", "\u2424").replace("\t", " ")


class Drawn:
    """Mixed into an Input. Textual's draws each character as it is, and measures without those that it draws without width."""

    @property
    def _value(self) -> Text:
        return Text(shown(self.value), no_wrap=True, overflow="ignore", end="")

    def _position_to_cell(self, position: int) -> int:
        return cell_len(shown(self.value[:position]))

    def _cell_offset_to_index(self, offset: int) -> int:
        """The character at a cell of the line, for the mouse."""
        cell = offset + self.scroll_offset.x
        ends = accumulate(map(cell_len, shown(self.value)))
        return next((index for index, end in enumerate(ends) if cell < end), len(self.value))

    def _on_paste(self, event: events.Paste) -> None:
        """The first line, cleaned as in the composer; Textual's would end it at form feeds and U+2028 too."""
        event.stop()
        event.prevent_default()
        self.replace(sendable(event.text).split("\n")[0], *self.selection)


class Field(Drawn, Input):
    """The input line of every page."""


class CommandField(Drawn, CommandInput):
    """The input line of the palette."""


class CommandPage(CommandPalette):
    """Textual's command palette with a line of ours."""

    def compose(self) -> ComposeResult:
        return self._replaced(super().compose())

    @staticmethod
    def _replaced(widgets: ComposeResult) -> Iterator[Widget]:
        for widget in widgets:
            if isinstance(widget, CommandInput):
                widget = CommandField(placeholder=widget.placeholder, select_on_focus=widget.select_on_focus)
            yield widget
