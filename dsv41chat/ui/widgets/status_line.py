"""The lines around the transcript: header, status and keys. Each drops what does not fit, never wraps."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text
from textual.widget import Widget

from dsv41chat.ui.render.wrap import crop_cells
from dsv41chat.ui.sanitize import visible_line


class OneLine(Widget):
    """A widget of one row that is drawn from its own width."""

    DEFAULT_CSS = "OneLine { height: 1; width: 1fr; padding: 0 1; }"


class HeaderLine(OneLine):
    """Title at the left; build, effort and branch at the right."""

    def __init__(self, *, id: str | None = None):
        super().__init__(id=id)
        self._title, self._right = "", []

    def show(self, title: str, right: list[str]) -> None:
        self._title, self._right = visible_line(title), [visible_line(part) for part in right if part]
        self.refresh()

    def render(self) -> Text:
        width = self.size.width
        parts = list(self._right)
        while len(parts) > 1 and cell_len(" · ".join(parts)) > width // 2:
            parts.pop()
        right = crop_cells(" · ".join(parts), width // 2)
        left = crop_cells(self._title, width - cell_len(right) - 2)
        return Text(left + " " * (width - cell_len(left) - cell_len(right)) + right, no_wrap=True)


class StatusLine(OneLine):
    """Fields from most to least important; the last ones go first when the line is narrow."""

    COMPONENT_CLASSES = {"status--warning", "status--error", "status--frame"}

    def __init__(self, *, id: str | None = None):
        super().__init__(id=id)
        self._fields: list[tuple[str, str]] = [("idle", "")]

    def show(self, fields: list[tuple[str, str]]) -> None:
        if fields != self._fields:
            self._fields = fields
            self.refresh()

    def render(self) -> Text:
        width = self.size.width
        line = Text(no_wrap=True)
        for index, (text, style) in enumerate(self._fields):
            room = width - line.cell_len - (3 if index else 0)
            if cell_len(text) > room:
                if index == 0:
                    line.append(crop_cells(text, room))
                break
            if index:
                line.append(" │ ", self.get_component_rich_style("status--frame", partial=True))
            line.append(text, self.get_component_rich_style(f"status--{style}", partial=True) if style else "")
        return line


class KeyLine(OneLine):
    """The keys that matter where the focus is."""

    COMPONENT_CLASSES = {"keys--key"}

    def __init__(self, *, id: str | None = None):
        super().__init__(id=id)
        self._keys: list[tuple[str, str]] = []

    def show(self, keys: list[tuple[str, str]]) -> None:
        if keys != self._keys:
            self._keys = keys
            self.refresh()

    def render(self) -> Text:
        line = Text(no_wrap=True)
        for key, label in self._keys:
            text = f"{key} {label}"
            if line.cell_len + cell_len(text) + 3 > self.size.width:
                break
            if line:
                line.append("   ")
            line.append(key, self.get_component_rich_style("keys--key", partial=True))
            line.append(f" {label}")
        return line
