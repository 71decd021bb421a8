"""The text of the composer, and the same text as it is drawn.

Textual's own document breaks lines wherever Unicode allows it (form feeds, U+2028 and others) and joins them with line feeds, so that
something else would be sent than was pasted; and it draws every character as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from textual.document._document import Document, EditResult, Location

from dsv41chat.ui.sanitize import in_place


class PlainDocument(Document):
    """Lines end at line feeds and nowhere else; CR LF and CR count as such."""

    def __init__(self, text: str):
        super().__init__("")
        self._newline = "\n"
        self._lines = _lines(text)

    def replace_range(self, start: Location, end: Location, text: str) -> EditResult:
        top, bottom = sorted((start, end))
        replaced = self.get_text_range(top, bottom)
        before = self._lines[top[0]][: top[1]] if top[0] < len(self._lines) else ""
        after = self._lines[bottom[0]][bottom[1] :] if bottom[0] < len(self._lines) else ""
        lines = _lines(text)
        lines[0] = before + lines[0]
        column = len(lines[-1])
        lines[-1] += after
        self._lines[top[0] : bottom[0] + 1] = lines
        return EditResult((top[0] + len(lines) - 1, column), replaced)


class ShownDocument(Sequence[str]):
    """A document to measure and to wrap: each character of its lines that could act on the terminal is a symbol, in its place.

    Everything else is asked of the document itself. Locations are the same in both.
    """

    def __init__(self, document: Document):
        self._document = document

    def __getattr__(self, name: str) -> Any:
        return getattr(self._document, name)

    @property
    def lines(self) -> Sequence[str]:
        return self

    def get_line(self, index: int) -> str:
        return in_place(self._document.get_line(index))

    def __len__(self) -> int:
        return self._document.line_count

    def __iter__(self) -> Iterator[str]:
        return map(in_place, self._document.lines)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        found = self._document.lines[index]
        return in_place(found) if isinstance(found, str) else [in_place(line) for line in found]


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
