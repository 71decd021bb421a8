"""Breaking text into lines of a given number of terminal cells, with what each break removed, so that copies can be unwrapped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rich.cells import cell_len, split_graphemes
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

Run = tuple[str, Style]

_PIECES = re.compile(r" +|[^ ]+")
_NO_START = frozenset("、。，．：；？！）」』】》〉”’…,.:;?!)]}>％")
_NO_END = frozenset("（「『【《〈“‘([{<")


@dataclass(frozen=True, slots=True)
class Line:
    """One line on the screen.

    strip: what is drawn, without the gutter; wider than the view when `scrolled`. text: what a copy of the line gives.
    lead: characters of decoration in front of `text` (bullet, bar, indentation). joint: what stood between this line and the
    one before it: a line feed, or what a soft break removed.
    """

    strip: Strip
    text: str
    lead: int = 0
    joint: str = "\n"
    scrolled: bool = False


def _atoms(word: str) -> Iterable[tuple[str, int]]:
    """The unbreakable pieces of a word without spaces, with their cells: runs of narrow characters, single wide ones."""
    if word.isascii():
        yield word, len(word)
        return
    spans, _ = split_graphemes(word)
    text, width, open_end, narrow = "", 0, True, True
    for start, end, cells in spans:
        cluster = word[start:end]
        glued = open_end or cluster[0] in _NO_START or cells == 0 or (narrow and cells < 2)
        if not glued and text:
            yield text, width
            text, width = "", 0
        text += cluster
        width += cells
        narrow = cells < 2
        open_end = cluster[0] in _NO_END
    if text:
        yield text, width


def _fold(atom: str, width: int) -> Iterable[tuple[str, int]]:
    """A piece longer than a line, cut between characters."""
    if atom.isascii():
        for start in range(0, len(atom), width):
            part = atom[start : start + width]
            yield part, len(part)
        return
    spans, _ = split_graphemes(atom)
    first, cells_sum = 0, 0
    for start, _end, cells in spans:
        if cells_sum + cells > width and start > first:
            yield atom[first:start], cells_sum
            first, cells_sum = start, 0
        cells_sum += cells
    yield atom[first:], cells_sum


def break_line(text: str, width: int) -> list[tuple[int, int, str]]:
    """Cuts one logical line (no line feed) for `width` cells: a list of (start, end, joint with the piece before)."""
    width = max(1, width)
    if len(text) <= width and text.isascii():
        return [(0, len(text), "\n")]
    lines: list[tuple[int, int, str]] = []
    start, position, used = 0, 0, 0
    joint = "\n"
    pending = 0
    for match in _PIECES.finditer(text):
        piece = match[0]
        if piece[0] == " ":
            pending = len(piece)
            if not lines and match.start() == 0:
                position = match.end()
                if pending < width:
                    used = pending
                else:
                    start = position
                pending = 0
            continue
        for index, (atom, cells) in enumerate(_atoms(piece)):
            gap = pending if index == 0 else 0
            if used + gap + cells <= width:
                position += gap + len(atom)
                used += gap + cells
                pending = 0
                continue
            if used and (cells <= width or width - used - gap < 2):
                lines.append((start, position, joint))
                joint = text[position : position + gap]
                start = position = position + gap
                used = gap = 0
            pending = 0
            if cells <= width - used - gap:
                position += gap + len(atom)
                used += gap + cells
                continue
            room = width - used - gap
            position += gap
            used += gap
            first = True
            for part, part_cells in _folded(atom, room, width):
                if not first:
                    lines.append((start, position, joint))
                    joint, start, used = "", position, 0
                first = False
                position += len(part)
                used += part_cells
    lines.append((start, position if position > start else len(text), joint))
    return lines


def _folded(atom: str, room: int, width: int) -> Iterable[tuple[str, int]]:
    """A long piece, the first part for what is left of the line."""
    if room >= width:
        yield from _fold(atom, width)
        return
    head, cells = next(iter(_fold(atom, max(1, room))))
    yield head, cells
    if len(head) < len(atom):
        yield from _fold(atom[len(head) :], width)


def slice_runs(runs: list[Run], start: int, end: int) -> list[Segment]:
    """The segments of characters start..end of the concatenated runs."""
    segments = []
    offset = 0
    for text, style in runs:
        following = offset + len(text)
        if following > start and offset < end:
            segments.append(Segment(text[max(0, start - offset) : end - offset], style))
        if following >= end:
            break
        offset = following
    return segments


def wrap_runs(runs: list[Run], width: int, first: list[Run], rest: list[Run], joint: str = "\n") -> list[Line]:
    """Wraps styled runs of one logical line. first/rest: decoration in front of the first and of the following lines."""
    text = "".join(part for part, _ in runs)
    first_segments = [Segment(part, style) for part, style in first]
    rest_segments = [Segment(part, style) for part, style in rest]
    taken = max(sum(cell_len(part) for part, _ in first), sum(cell_len(part) for part, _ in rest))
    lines = []
    for index, (start, end, soft) in enumerate(break_line(text, width - taken)):
        decoration = rest_segments if index else first_segments
        segments = decoration + slice_runs(runs, start, end)
        lead = sum(len(segment.text) for segment in decoration)
        lines.append(Line(Strip(segments), text[start:end], lead, soft if index else joint))
    return lines


def plain_lines(source: str, width: int, style: Style, first: list[Run] | None = None) -> list[Line]:
    """Text as it is, one logical line per line feed."""
    decoration = first or []
    lines: list[Line] = []
    for row in source.split("\n"):
        lines.extend(wrap_runs([(row, style)], width, decoration, decoration))
    return lines


def crop_cells(text: str, width: int, mark: str = "…") -> str:
    """`text` in at most `width` cells, ending in `mark` where something was cut."""
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return text
    spans, _ = split_graphemes(text)
    kept, used = 0, 0
    for _start, end, cells in spans:
        if used + cells > width - cell_len(mark):
            break
        kept, used = end, used + cells
    return text[:kept] + mark


def copy_lines(lines: Iterable[tuple[str, str]]) -> str:
    """Joins (joint, text) pairs; the joint of the first is left out."""
    parts = []
    for index, (joint, text) in enumerate(lines):
        if index:
            parts.append(joint)
        parts.append(text)
    return "".join(parts)
