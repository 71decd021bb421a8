"""Cuts a growing text into finished blocks and a live tail, so that drawing costs depend on the tail only.

The cuts are a function of the text alone: however the text arrives, the same blocks come out (tests/ui/test_render.py).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from dsv41chat.ui.sanitize import visible

LIST_ITEMS = 20
CODE_LINES = 80  # colouring one piece must not hold the screen
TABLE_ROWS = 200
TABLE_PIECE = 24  # rows of a long table that are drawn together
TABLE_TAIL = 16
PLAIN_LINES = 60
TEXT_CHARS = 16_000
LINE_CHARS = 4_000

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})[ ]*(.*?)[ ]*$")
_FORMING_FENCE = re.compile(r"^ *(`{1,}|~{2,})[\w+#.-]*$")
_DELIMITER = re.compile(r"^\|(?: *:?-+:? *\|)+ *$")
_ROW_BAR = re.compile(r"(?<!\\)\|")
_ITEM = re.compile(r"^(?:[-*+]|(\d{1,9})[.)])(?: |$)")


@dataclass(frozen=True, eq=False)
class Table:
    """All lines of a long table, with its head and its delimiter row. shape: kept by what draws it, for all its pieces."""

    lines: tuple[str, ...]
    shape: dict = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Block:
    """One finished piece. Compared by identity: a block never changes, so it is the key of its drawing.

    kind: text (Markdown source), code (the lines between fences), plain, or table (some lines of a long one, `table`, of which the
    first is number `line`). number: 1-based count of code blocks in the text.
    head/foot: whether the fence opens/closes in this piece. indent: spaces that an enclosing list item gave it.
    start: number with which an ordered list that was cut goes on. tight: no blank line before it.
    """

    kind: str
    source: str
    info: str = ""
    number: int = 0
    indent: int = 0
    head: bool = True
    foot: bool = True
    start: int | None = None
    tight: bool = False
    table: Table | None = None
    line: int = 0


def _indent_of(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


class _Lines(ABC):
    """feed() text as it comes, finish() once; `blocks` only grows. What becomes of the lines is the subclass's: `_line` takes each whole one."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._lines: list[str] = []
        self._partial = ""
        self._held = ""
        self._finished = False

    def feed(self, text: str) -> None:
        """Takes the next characters. A carriage return at the end waits for what follows it."""
        text = self._held + text
        self._held = ""
        if text.endswith("\r"):
            text, self._held = text[:-1], "\r"
        if not text:
            return
        if "\t" in text:
            text = text.replace("\t", "    ")
        *complete, rest = (self._partial + visible(text)).split("\n")
        for line in complete:
            self._long_line(line)
        while len(rest) > LINE_CHARS:
            self._line(rest[:LINE_CHARS])
            rest = rest[LINE_CHARS:]
        self._partial = rest

    def finish(self) -> None:
        """Ends the text: the tail becomes the last block. Idempotent."""
        if self._finished:
            return
        self._finished = True
        if self._held:
            self._partial += visible(self._held)
            self._held = ""
        if self._partial:
            self._line(self._partial)
            self._partial = ""
        self._end()

    def _long_line(self, line: str) -> None:
        while len(line) > LINE_CHARS:
            self._line(line[:LINE_CHARS])
            line = line[LINE_CHARS:]
        self._line(line)

    @abstractmethod
    def _line(self, line: str) -> None:
        """Takes the next line, of at most LINE_CHARS."""

    @abstractmethod
    def _end(self) -> None:
        """Makes the last block of what is left."""


class Splitter(_Lines):
    """Markdown. `tail` is what is not finished."""

    def __init__(self) -> None:
        super().__init__()
        self._chars = 0
        self._blank = False
        self._tight = False
        self._items = 0
        self._item_number: int | None = None
        self._start: int | None = None
        self._table: list[str] = []
        self._drawn_tail: list[Block] = []
        self._fence: tuple[str, int, int, str] | None = None
        self._head = True
        self._code_count = 0
        self._dedent = 0

    def _end(self) -> None:
        if self._fence:
            self._flush_code(foot=True)
            self._fence = None
        else:
            self._flush_text()

    @property
    def tail(self) -> Block | None:
        """The unfinished piece as a block of its own, or None. A line that may become a fence is left out until it is whole."""
        if self._finished:
            return None
        if self._fence:
            lines = self._lines + ([self._cut_indent(self._partial, self._fence[2])] if self._partial else [])
            if lines and _FORMING_FENCE.match(lines[-1]):
                lines = lines[:-1]
            return Block("code", "\n".join(lines), self._fence[3], self._code_count, self._fence[2], self._head, False, tight=self._tight)
        partial = "" if _FORMING_FENCE.match(self._partial) else self._partial
        source = "\n".join(self._lines + [partial] if partial else self._lines)
        if not source.strip():
            return None
        plain = source.lstrip().startswith("|")
        return Block("plain" if plain else "text", source, indent=self._dedent, start=self._start, tight=self._tight)

    @property
    def tails(self) -> list[Block]:
        """The unfinished piece as blocks. Of an open table all but the last are the very blocks of the last time: only new rows are drawn."""
        if self._finished or self._fence or not self._table or len(self._table) != len(self._lines):
            tail = self.tail
            return [tail] if tail else []
        while (start := len(self._drawn_tail) * TABLE_TAIL) + TABLE_TAIL <= len(self._lines):
            self._drawn_tail.append(self._tail_piece(self._lines[start : start + TABLE_TAIL], start))
        rest = self._lines[start:] + ([self._partial] if self._partial else [])
        return [*self._drawn_tail, self._tail_piece(rest, start)] if rest else list(self._drawn_tail)

    def _tail_piece(self, lines: list[str], start: int) -> Block:
        return Block("plain", "\n".join(lines), indent=self._dedent, tight=self._tight or start > 0)

    @staticmethod
    def _cut_indent(line: str, indent: int) -> str:
        return line[min(indent, _indent_of(line)) :]

    def _line(self, line: str) -> None:
        if self._fence:
            self._code_line(line)
            return
        opening = _FENCE.match(line)
        if opening and not (opening[2][0] == "`" and "`" in opening[3]):
            self._flush_text()
            self._fence = (opening[2][0], len(opening[2]), len(opening[1]), opening[3].split(" ")[0] if opening[3] else "")
            self._head = True
            self._code_count += 1
            self._tight = False
            return
        if not line.strip():
            self._blank = bool(self._lines)
            if self._lines:
                self._lines.append("")
            return
        indent = _indent_of(line)
        if self._dedent:
            if indent >= self._dedent:
                line = line[self._dedent :]
                indent -= self._dedent
            else:
                self._flush_text()
                self._dedent = 0
        item = _ITEM.match(line)
        if self._blank and not (self._items and indent >= 2):
            self._flush_text()
        elif item and self._items >= LIST_ITEMS:
            number = self._item_number
            self._flush_text()
            self._tight = True
            if number is not None and item[1]:
                self._start = number + 1
                self._item_number = number
        elif line.startswith("|") and len(self._table) >= TABLE_ROWS:
            head = self._table[:2]
            self._flush_text()
            self._lines, self._table = list(head), list(head)
        elif self._chars >= TEXT_CHARS:
            self._flush_text()
            self._tight = True
        self._blank = False
        if item:
            self._items += 1
            if item[1]:
                self._item_number = int(item[1]) if self._item_number is None else self._item_number + 1
        if line.startswith("|"):
            self._table.append(line)
        self._lines.append(line)
        self._chars += len(line) + 1

    def _code_line(self, line: str) -> None:
        character, length, indent, _ = self._fence
        stripped = line.strip()
        if len(stripped) >= length and stripped == character * len(stripped):
            self._flush_code(foot=True)
            self._fence = None
            self._dedent = indent
            return
        self._lines.append(self._cut_indent(line, indent))
        if len(self._lines) >= CODE_LINES:
            self._flush_code(foot=False)
            self._head, self._tight = False, True

    def _flush_code(self, foot: bool) -> None:
        _, _, indent, info = self._fence
        self.blocks.append(Block("code", "\n".join(self._lines), info, self._code_count, indent, self._head, foot, tight=self._tight))
        self._lines, self._tight, self._chars = [], False, 0

    def _flush_text(self) -> None:
        source = "\n".join(self._lines).rstrip()
        if source:
            self.blocks += self._pieces(source.split("\n")) or [Block("text", source, indent=self._dedent, start=self._start, tight=self._tight)]
            self._tight = False
        self._lines, self._table, self._drawn_tail = [], [], []
        self._chars = self._items = 0
        self._blank = False
        self._item_number = self._start = None

    def _pieces(self, lines: list[str]) -> list[Block]:
        """A long table as pieces that are drawn one by one, when they come into view; empty for anything else."""
        if len(lines) < 2 + 2 * TABLE_PIECE or len(self._table) != len(lines) or not _DELIMITER.match(lines[1]):
            return []
        if len({len(_ROW_BAR.findall(line.rstrip().rstrip("|"))) for line in lines[:2]}) > 1:
            # A head that does not fit its delimiter row is no table.
            return []
        table = Table(tuple(lines))
        starts = [0, *range(2 + TABLE_PIECE, len(lines), TABLE_PIECE)]
        return [
            Block("table", "\n".join(lines[start:end]), indent=self._dedent, tight=self._tight or start > 0, table=table, line=start)
            for start, end in zip(starts, [*starts[1:], len(lines)])
        ]


class PlainSplitter(_Lines):
    """Text that is shown as it is (user messages, thinking): pieces of a fixed number of lines."""

    def _end(self) -> None:
        while self._lines and not self._lines[-1].strip():
            self._lines.pop()
        if self._lines:
            self._flush()

    @property
    def tail(self) -> Block | None:
        if self._finished:
            return None
        lines = self._lines + [self._partial] if self._partial else self._lines
        return Block("plain", "\n".join(lines), tight=bool(self.blocks)) if lines else None

    @property
    def tails(self) -> list[Block]:
        tail = self.tail
        return [tail] if tail else []

    def _line(self, line: str) -> None:
        if not line and not self._lines and not self.blocks:
            return
        self._lines.append(line)
        if len(self._lines) >= PLAIN_LINES or sum(map(len, self._lines)) > TEXT_CHARS:
            self._flush()

    def _flush(self) -> None:
        self.blocks.append(Block("plain", "\n".join(self._lines), tight=bool(self.blocks)))
        self._lines = []
