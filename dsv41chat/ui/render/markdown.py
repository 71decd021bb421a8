"""Markdown blocks to lines: our own walk over the markdown-it tree, so that every line knows what a copy of it must give."""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from dsv41chat.ui.render.code import highlight
from dsv41chat.ui.render.formulas import show_formulas
from dsv41chat.ui.render.palette import RenderOptions
from dsv41chat.ui.render.splitter import Block, Table
from dsv41chat.ui.render.wrap import Line, Run, crop_cells, plain_lines, wrap_runs

BULLETS = "•◦▪"
MIN_COLUMN = 8
MAX_INDENT = 8
CHUNK_LINES = 12

_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_URL = re.compile(r"https?://[^\s<>\"'`]+[^\s<>\"'`.,;:!?)\]}]")
_BAR = re.compile(r"(?<!\\)\|")
_PLAIN_CELL = re.compile(r"(?:[^\W_]|[ .,;:+/()%='-])*")
_NO_OPTIONS = RenderOptions(80)
_BOLD, _ITALIC, _STRIKE = Style(bold=True), Style(italic=True), Style(strike=True)


def link_style(base: Style, address: str) -> Style:
    """`base` as a terminal hyperlink; only addresses a person would expect to open in a browser or mail program."""
    if urlsplit(address).scheme in ("http", "https", "mailto") and address.isprintable():
        return base + Style(link=address)
    return base


def render_block(block: Block, options: RenderOptions) -> list[Line]:
    """All lines of one block, without blank lines around it."""
    if block.kind == "plain":
        return plain_lines(block.source, options.width, options.palette.text)
    indent = min(block.indent, MAX_INDENT, options.width // 4)
    prefix = [(" " * indent, Style())] if indent else []
    if block.kind == "code":
        return code_lines(block, options, prefix)
    if block.kind == "table":
        return table_piece(block, options, prefix)
    source = show_formulas(block.source) if options.math == "unicode" else block.source
    return _Walk(options, block.start).blocks(SyntaxTreeNode(_PARSER.parse(source)).children, prefix, prefix)


def code_lines(block: Block, options: RenderOptions, prefix: list[Run]) -> list[Line]:
    """A code block: a rule with language and number above, a rule below, nothing at the sides."""
    palette = options.palette
    room = max(8, options.width - sum(cell_len(text) for text, _ in prefix))
    segments = [Segment(text, style) for text, style in prefix]
    lead = sum(len(text) for text, _ in prefix)
    lines: list[Line] = []
    if block.head:
        name = crop_cells(block.info, room - 14)
        label = f" {name} " if name else ""
        number = f" [{block.number}] " if block.number else ""
        fill = max(0, room - 4 - cell_len(label) - len(number))
        rule = f"┌─{label}{'─' * fill}{number}─┐"
        lines.append(Line(Strip([*segments, Segment(rule, palette.frame)]), "", lead + len(rule)))
    if block.source:
        if block.foot:
            lines.extend(_code_piece(block.source, block.info, options, tuple(prefix)))
        else:
            # It still grows: all but its last lines are the very lines of the last time, so neither they nor their strips are made again.
            # A text that spans several pieces may change its colour when the block is complete.
            rows = block.source.split("\n")
            for start in range(0, len(rows), CHUNK_LINES):
                lines.extend(_code_piece("\n".join(rows[start : start + CHUNK_LINES]), block.info, options, tuple(prefix)))
    elif block.head and block.foot:
        lines.append(Line(Strip(segments), "", lead))
    if block.foot:
        rule = f"└{'─' * (room - 2)}┘"
        lines.append(Line(Strip([*segments, Segment(rule, palette.frame)]), "", lead + len(rule)))
    return lines


@lru_cache(maxsize=128)
def _code_piece(source: str, info: str, options: RenderOptions, prefix: tuple[Run, ...]) -> tuple[Line, ...]:
    """The lines of some code, without rules."""
    palette = options.palette
    segments = [Segment(text, style) for text, style in prefix]
    lead = sum(len(text) for text, _ in prefix)
    lines: list[Line] = []
    for runs in highlight(source, info, options.code_theme, palette.code):
        if options.wrap_code:
            lines.extend(wrap_runs(runs, options.width, list(prefix), [*prefix, ("↪ ", palette.frame)]))
        else:
            text = "".join(part for part, _ in runs)
            strip = Strip([*segments, *(Segment(part, style) for part, style in runs)])
            lines.append(Line(strip, text, lead, scrolled=True))
    return tuple(lines)


class _Walk:
    """first/rest are the decorations in front of the first line of a node and of all its other lines."""

    def __init__(self, options: RenderOptions, start: int | None):
        self.options = options
        self.palette = options.palette
        self.start = start

    def blocks(self, nodes: list[SyntaxTreeNode], first: list[Run], rest: list[Run], tight: bool = False, depth: int = 0) -> list[Line]:
        lines: list[Line] = []
        for index, node in enumerate(nodes):
            if index and not tight:
                lines.append(self.blank(rest))
            lines.extend(self.block(node, first if index == 0 else rest, rest, depth))
        return lines

    def blank(self, decoration: list[Run]) -> Line:
        segments = [Segment(text, style) for text, style in decoration]
        return Line(Strip(segments), "", sum(len(text) for text, _ in decoration))

    def block(self, node: SyntaxTreeNode, first: list[Run], rest: list[Run], depth: int) -> list[Line]:
        kind = node.type
        if kind == "paragraph":
            return self.inline_lines(node, self.palette.text, first, rest)
        if kind == "heading":
            style = self.palette.heading
            if node.tag == "h1":
                style += Style(underline=True)
            return self.inline_lines(node, style, first, rest)
        if kind in ("bullet_list", "ordered_list"):
            return self.list_lines(node, first, rest, depth)
        if kind == "blockquote":
            bar = [("▌ ", self.palette.quote)]
            return self.blocks(node.children, first + bar, rest + bar, depth=depth)
        if kind in ("fence", "code_block"):
            info = node.info.split(" ")[0] if node.info else ""
            block = Block("code", node.content.rstrip("\n"), info)
            lines = code_lines(block, self.options, rest)
            return [self.with_first(lines[0], first, rest), *lines[1:]]
        if kind == "table":
            return self.table_lines(node, first, rest)
        if kind == "hr":
            room = max(3, self.options.width - sum(cell_len(text) for text, _ in first))
            return [Line(Strip([*(Segment(*run) for run in first), Segment("─" * min(room, 40), self.palette.frame)]), "---", 0)]
        return plain_lines(node.content if hasattr(node, "content") else "", self.options.width, self.palette.text, rest)

    @staticmethod
    def with_first(line: Line, first: list[Run], rest: list[Run]) -> Line:
        """The same line behind the first-line decoration (a code block directly after a bullet)."""
        segments = list(line.strip)[len(rest) :]
        return Line(Strip([*(Segment(*run) for run in first), *segments]), line.text, line.lead, line.joint, line.scrolled)

    def list_lines(self, node: SyntaxTreeNode, first: list[Run], rest: list[Run], depth: int) -> list[Line]:
        number = None
        if node.type == "ordered_list":
            number = int(node.attrs.get("start", 1))
            if self.start is not None and depth == 0:
                number, self.start = self.start, None
        last = (number or 0) + len(node.children) - 1
        tight = all(child.hidden for item in node.children for child in item.children if child.type == "paragraph")
        lines: list[Line] = []
        for index, item in enumerate(node.children):
            if number is None:
                mark = f"{BULLETS[depth % len(BULLETS)]} "
            else:
                mark = f"{number + index}. ".rjust(len(str(last)) + 2)
            if index and not tight:
                lines.append(self.blank(rest))
            head = (first if index == 0 else rest) + [(mark, self.palette.marker)]
            follow = rest + [(" " * len(mark), Style())]
            if item.children:
                lines.extend(self.blocks(item.children, head, follow, tight, depth + 1))
            else:
                lines.append(self.blank(head))
        return lines

    def inline_lines(self, node: SyntaxTreeNode, style: Style, first: list[Run], rest: list[Run]) -> list[Line]:
        rows = self.inline(node, style)
        lines: list[Line] = []
        for index, runs in enumerate(rows):
            lines.extend(wrap_runs(runs, self.options.width, first if index == 0 else rest, rest))
        return lines

    def inline(self, node: SyntaxTreeNode, style: Style) -> list[list[Run]]:
        """The runs of each logical line (hard breaks end one)."""
        rows: list[list[Run]] = [[]]
        for child in node.children:
            self._inline(child, style, rows)
        return rows

    def _inline(self, node: SyntaxTreeNode, style: Style, rows: list[list[Run]]) -> None:
        kind = node.type
        if kind == "text":
            self._text(node.content, style, rows[-1])
        elif kind == "softbreak":
            rows[-1].append((" ", style))
        elif kind == "hardbreak":
            rows.append([])
        elif kind == "code_inline":
            rows[-1].append((node.content, self.palette.inline_code))
        elif kind == "strong":
            self._children(node, style + _BOLD, rows)
        elif kind == "em":
            self._children(node, style + _ITALIC, rows)
        elif kind == "s":
            self._children(node, style + _STRIKE, rows)
        elif kind == "link":
            address = str(node.attrs.get("href", ""))
            self._children(node, link_style(style + self.palette.link, address), rows)
        elif kind == "image":
            rows[-1].append((f"[image: {node.content}] {node.attrs.get('src', '')}", self.palette.dim))
        elif node.children:
            self._children(node, style, rows)
        elif getattr(node, "content", ""):
            rows[-1].append((node.content, style))

    def _children(self, node: SyntaxTreeNode, style: Style, rows: list[list[Run]]) -> None:
        for child in node.children:
            self._inline(child, style, rows)

    def _text(self, content: str, style: Style, row: list[Run]) -> None:
        position = 0
        if "://" in content:
            for match in _URL.finditer(content):
                if match.start() > position:
                    row.append((content[position : match.start()], style))
                row.append((match[0], link_style(style + self.palette.link, match[0])))
                position = match.end()
        if position < len(content):
            row.append((content[position:], style))

    def table_lines(self, node: SyntaxTreeNode, first: list[Run], rest: list[Run]) -> list[Line]:
        rows: list[list[list[Run]]] = []
        aligns: list[str] = []
        for section in node.children:
            for row in section.children:
                cells = []
                for cell in row.children:
                    style = self.palette.text + _BOLD if cell.type == "th" else self.palette.text
                    cells.append(self.cell(cell, style))
                    if section.type == "thead":
                        aligns.append(str(cell.attrs.get("style", "")).removeprefix("text-align:"))
                rows.append(cells)
        columns = max(len(row) for row in rows)
        rows = [row + [[]] * (columns - len(row)) for row in rows]
        natural = [max([1, *(sum(cell_len(text) for text, _ in row[column]) for row in rows)]) for column in range(columns)]
        return draw_table(rows, natural, aligns, self.options, first, rest)

    def cell(self, node: SyntaxTreeNode, style: Style) -> list[Run]:
        return [run for line in self.inline(node, style) for run in line]


def draw_table(
    rows: list[list[list[Run]]], natural: list[int], aligns: list[str], options: RenderOptions, first: list[Run], rest: list[Run], head: bool = True
) -> list[Line]:
    """Rows of a table in columns. natural: cells that each column needs at most. head: the first row is the head, with a rule below."""
    room = options.width - sum(cell_len(text) for text, _ in rest) - 3 * (len(natural) - 1)
    widths = _column_widths(natural, room)
    scrolled = widths is None
    widths = natural if widths is None else widths
    lines: list[Line] = []
    frame = options.palette.frame
    for index, row in enumerate(rows):
        cells = [wrap_runs(runs, width, [], []) for runs, width in zip(row, widths)]
        for level in range(max(len(cell) for cell in cells)):
            decoration = first if not lines else rest
            segments = [Segment(text, style) for text, style in decoration]
            lead = sum(len(text) for text, _ in decoration)
            for column, (cell, width) in enumerate(zip(cells, widths)):
                if column:
                    segments.append(Segment(" │ ", frame))
                strip = cell[level].strip if level < len(cell) else Strip([])
                padding = width - strip.cell_length
                align = aligns[column] if column < len(aligns) else ""
                left = padding if align == "right" else padding // 2 if align == "center" else 0
                segments += [Segment(" " * left), *strip, Segment(" " * (padding - left))] if padding else [*strip]
            shown = "".join(segment.text for segment in segments)[lead:].rstrip()
            lines.append(Line(Strip(segments), shown, lead, scrolled=scrolled))
        if head and index == 0:
            rule = "─┼─".join("─" * width for width in widths)
            segments = [Segment(text, style) for text, style in rest]
            lead = sum(len(text) for text, _ in rest)
            lines.append(Line(Strip([*segments, Segment(rule, frame)]), rule, lead, scrolled=scrolled))
    return lines


def table_piece(block: Block, options: RenderOptions, prefix: list[Run]) -> list[Line]:
    """Some rows of a long table, in the columns of the whole."""
    walk = _Walk(options, None)
    aligns, natural, parsed = _shape(block.table, options.math)
    rows = []
    for number in range(block.line, block.line + block.source.count("\n") + 1):
        if number == 1:
            # The delimiter row: the rule stands for it.
            continue
        style = options.palette.text if number else options.palette.text + _BOLD
        rows.append([walk.cell(cell, style) if isinstance(cell, SyntaxTreeNode) else [(cell, style)] for cell in parsed[number]])
    return draw_table(rows, natural, aligns, options, prefix, prefix, head=block.line == 0)


def _shape(table: Table, math: str) -> tuple[list[str], list[int], list[list[str | SyntaxTreeNode]]]:
    """(aligns, natural widths, cells of each line) of a long table; read once for all its pieces."""
    found = table.shape.get(math)
    if found is None:
        aligns = [_align(cell) for cell in _split_row(table.lines[1])]
        parsed = [[_parse_cell(cell, math) for cell in (_split_row(line) + [""] * len(aligns))[: len(aligns)]] for line in table.lines]
        natural = [max([1, *(_cell_width(row[column]) for number, row in enumerate(parsed) if number != 1)]) for column in range(len(aligns))]
        found = table.shape[math] = (aligns, natural, parsed)
    return found


def _split_row(line: str) -> list[str]:
    """The cells of a row that begins with a bar; a bar behind a backslash is text."""
    cells = [cell.replace("\\|", "|").strip() for cell in _BAR.split(line.strip())[1:]]
    return cells[:-1] if cells and not cells[-1] else cells


def _align(delimiter: str) -> str:
    left, right = delimiter.startswith(":"), delimiter.endswith(":")
    return "center" if left and right else "right" if right else "left" if left else ""


def _parse_cell(source: str, math: str) -> str | SyntaxTreeNode:
    """The tree of a cell, or its text where that holds no markup."""
    if _PLAIN_CELL.fullmatch(source) and "://" not in source:
        return source
    return SyntaxTreeNode(_PARSER.parseInline(show_formulas(source) if math == "unicode" else source)).children[0]


def _cell_width(cell: str | SyntaxTreeNode) -> int:
    if isinstance(cell, str):
        return cell_len(cell)
    return sum(cell_len(text) for text, _ in _Walk(_NO_OPTIONS, None).cell(cell, Style()))


def _column_widths(natural: list[int], room: int) -> list[int] | None:
    """Widths that fit into `room`, taken from the widest columns first; None when one that needs more would get under 8."""
    widths = list(natural)
    excess = sum(widths) - room
    while excess > 0:
        widest = max(widths)
        if widest <= MIN_COLUMN:
            return None
        second = max([width for width in widths if width < widest], default=MIN_COLUMN)
        members = [index for index, width in enumerate(widths) if width == widest]
        step = min(widest - max(second, MIN_COLUMN), -(-excess // len(members)))
        for index in members:
            cut = min(step, excess)
            widths[index] -= cut
            excess -= cut
    return widths
