"""One message of the transcript as a list of parts with heights, split and drawn only when somebody looks at it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment
from textual.strip import Strip

from dsv41chat.ui.render.palette import RenderOptions
from dsv41chat.ui.render.splitter import Block, PlainSplitter, Splitter
from dsv41chat.ui.render.wrap import Line, crop_cells, plain_lines, wrap_runs
from dsv41chat.ui.sanitize import visible, visible_line

CACHED_PARTS = 400
USER, ANSWER, NOTICE = "user", "answer", "notice"


@dataclass(frozen=True, eq=False)
class Part:
    """kind: gap, header, fold, thinking, body, receipt or note. block is None except for thinking and body."""

    kind: str
    block: Block | None = None
    text: str = ""
    right: str = ""
    style: str = "text"


GAP = Part("gap")


class Entry:
    """What the transcript shows of one message.

    key: unique in the transcript (the message id once it is stored). role: user, answer or notice. label: who speaks; clock:
    local time; branch: "2/3" or empty. text and thinking are the sources that copying gives. thinking_view: fold, show or hide.
    """

    def __init__(self, key: str, role: str, label: str = "", clock: str = "", text: str = "", thinking: str = "", *, style: str = "notice"):
        self.key, self.role, self.label, self.clock, self.style = key, role, label, clock, style
        self.branch = self.receipt = self.thinking_note = self.state_note = ""
        self.mark = False
        self.message = None
        self.running = False
        self.thinking_view = "fold"
        self._text, self._thinking = [text], [thinking]
        self._body: Splitter | PlainSplitter | None = None
        self._thoughts: PlainSplitter | None = None
        self._parts: list[Part] = []
        self._heads: dict[tuple, Part] = {}
        self._block_parts: dict[Block, Part] = {}
        self.heights: list[int] = []
        self.exact: list[bool] = []
        self.width = 0

    @property
    def text(self) -> str:
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0]

    @property
    def thinking(self) -> str:
        if len(self._thinking) > 1:
            self._thinking = ["".join(self._thinking)]
        return self._thinking[0]

    @property
    def opened(self) -> bool:
        return self._body is not None

    def feed(self, channel: str, text: str) -> None:
        """More streamed text. channel: thinking or answer."""
        self._open()
        if channel == "thinking":
            self._thinking.append(text)
            self._thoughts.feed(text)
        else:
            self._text.append(text)
            self._body.feed(text)

    def finish(self) -> None:
        """The text is complete: the tail becomes the last block."""
        self._open()
        self.running = False
        self._body.finish()
        self._thoughts.finish()

    def _open(self) -> None:
        if self._body is not None:
            return
        self._body = Splitter() if self.role == ANSWER else PlainSplitter()
        self._thoughts = PlainSplitter()
        self._body.feed(self.text)
        self._thoughts.feed(self.thinking)
        if not self.running:
            self._body.finish()
            self._thoughts.finish()

    def estimate(self, width: int) -> int:
        """Lines this entry will need, without reading it closely."""
        return 2 + bool(self.receipt) + bool(self.thinking) + estimate_lines(self.text, width)

    def _head(self, kind: str, text: str, right: str = "", style: str = "text") -> Part:
        identity = (kind, text, right, style)
        part = self._heads.get(identity)
        if part is None:
            for old in [key for key in self._heads if key[0] == kind]:
                del self._heads[old]
            part = self._heads[identity] = Part(kind, None, text, right, style)
        return part

    def _blocks(self, kind: str, splitter: Splitter | PlainSplitter, parts: list[Part], known: dict[Block, Part]) -> None:
        """Appends the finished blocks and the tail; a blank line between neighbours unless a rule separates them already.

        known: the parts of the last time; a block that is still there keeps its part, and with it its drawing.
        """
        previous: Block | None = None
        for block in [*splitter.blocks, *splitter.tails]:
            if previous is not None and not block.tight and (block.kind != "code" or previous.kind == "code"):
                parts.append(GAP)
            part = self._block_parts[block] = known.get(block) or Part(kind, block)
            parts.append(part)
            previous = block

    def parts(self, leading: bool) -> list[Part]:
        """All parts from top to bottom. leading: with the blank line that separates it from the entry above."""
        self._open()
        known, self._block_parts = self._block_parts, {}
        parts: list[Part] = [GAP] if leading else []
        if self.role == NOTICE:
            parts.append(self._head("note", self.text, style=self.style))
            return parts
        who = USER if self.role == USER else "model"
        label = f"* {self.label}" if self.mark else self.label
        parts.append(self._head("header", label, " ".join(filter(None, (self.branch, self.clock))), who))
        if self.thinking and self.thinking_view != "hide":
            unfolded = self.thinking_view == "show"
            note = f"thinking  {self.thinking_note}".rstrip()
            parts.append(self._head("fold", ("▾ " if unfolded else "▸ ") + note, "ctrl+T folds" if unfolded else "ctrl+T unfolds"))
            if unfolded:
                self._blocks("thinking", self._thoughts, parts, known)
                if self.text:
                    parts.append(GAP)
        self._blocks("body", self._body, parts, known)
        if self.state_note:
            parts.append(self._head("note", self.state_note, style="error" if self.style == "error" else "notice"))
        if self.receipt:
            parts.append(self._head("receipt", self.receipt))
        return parts

    def lay_out(self, leading: bool, width: int) -> int:
        """Renews the parts; heights that were known stay for parts that did not change. Returns the row where changes begin."""
        new = self.parts(leading)
        old = self._parts if self.width == width else []
        same = 0
        for before, after in zip(old, new):
            if before is not after:
                break
            same += 1
        self.width = width
        self._parts = new
        # A receipt or a note behind a changed tail keeps nothing; it is one line.
        self.heights = self.heights[:same] + [estimate_part(part, width) for part in new[same:]]
        self.exact = self.exact[:same] + [part.kind in ("gap", "header", "fold") for part in new[same:]]
        return sum(self.heights[:same])

    def part(self, index: int) -> Part:
        return self._parts[index]

    @property
    def height(self) -> int:
        return sum(self.heights)

    def locate(self, y: int) -> tuple[int, int]:
        """(part, line in it) of the entry's own line y."""
        for index, height in enumerate(self.heights):
            if y < height:
                return index, y
            y -= height
        return len(self.heights) - 1, 0

    def code_blocks(self) -> list[str]:
        """The texts between the fences, in order, exactly."""
        self._open()
        found: dict[int, list[str]] = {}
        tail = self._body.tail
        for block in [*self._body.blocks, *([tail] if tail else [])]:
            if block.kind == "code":
                found.setdefault(block.number, []).append(block.source)
        return ["\n".join(pieces) + "\n" for _, pieces in sorted(found.items())]


def estimate_lines(text: str, width: int) -> int:
    return text.count("\n") + len(text) // max(1, width) + 1


def estimate_part(part: Part, width: int) -> int:
    if part.block is None:
        return 1 if part.kind != "note" else estimate_lines(part.text, width)
    if part.block.kind == "table":
        # Its delimiter row is drawn as a rule; cells that wrap are found when it is drawn.
        return part.block.source.count("\n") + 1
    rules = part.block.head + part.block.foot if part.block.kind == "code" else 0
    return estimate_lines(part.block.source, width) + rules


def _halves(figure: str) -> list[str]:
    """A figure with a comma that is too long for a line, as two."""
    first, comma, rest = figure.rpartition(", ")
    return [f"{first},", rest] if comma else [figure]


class Renderer:
    """Draws parts for one set of options and remembers the last ones. Replace it when width, theme or settings change."""

    def __init__(self, options: RenderOptions):
        self.options = options
        self._cache: OrderedDict[Part, list[Line]] = OrderedDict()

    def lines(self, part: Part) -> list[Line]:
        lines = self._cache.get(part)
        if lines is None:
            lines = self._cache[part] = self._draw(part)
            if len(self._cache) > CACHED_PARTS:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(part)
        return lines

    def _draw(self, part: Part) -> list[Line]:
        options, palette = self.options, self.options.palette
        if part.kind == "gap":
            return [Line(Strip([]), "")]
        if part.kind == "header":
            return [self._two_sided(visible_line(part.text), part.right, getattr(palette, part.style), palette.dim)]
        if part.kind == "fold":
            return [self._two_sided(part.text, part.right, palette.thinking, palette.dim)]
        if part.kind == "receipt":
            figures = visible_line(part.text).split(" · ")
            narrow = [piece for figure in figures for piece in (_halves(figure) if cell_len(figure) > self.options.width else [figure])]
            return self._figures(narrow)
        if part.kind == "note":
            return plain_lines(visible(part.text), options.width, getattr(palette, part.style))
        if part.kind == "thinking":
            return plain_lines(part.block.source, options.width, palette.thinking, [("│ ", palette.frame)])
        if part.block.kind == "plain":
            return plain_lines(part.block.source, options.width, palette.text)
        # The parser and the colours of code are loaded when something needs them, not before the first frame.
        from dsv41chat.ui.render.markdown import render_block

        return render_block(part.block, options) or [Line(Strip([]), "")]

    def _figures(self, figures: list[str]) -> list[Line]:
        """A row of figures, broken between them only."""
        rows = [figures[0]]
        for figure in figures[1:]:
            longer = f"{rows[-1]} · {figure}"
            if cell_len(longer) <= self.options.width:
                rows[-1] = longer
            else:
                rows.append(figure)
        style = self.options.palette.receipt
        return [line for row in rows for line in wrap_runs([(row, style)], self.options.width, [], [])]

    def _two_sided(self, left: str, right: str, style, right_style) -> Line:
        """One line with something at each end; the right end goes first when there is no room for both."""
        width = self.options.width
        room = width - cell_len(right) - 2
        if right and room >= min(cell_len(left), 12):
            left = crop_cells(left, room)
            gap = width - cell_len(left) - cell_len(right)
            return Line(Strip([Segment(left, style), Segment(" " * gap + right, right_style)]), left)
        left = crop_cells(left, width)
        return Line(Strip([Segment(left, style)]), left)
