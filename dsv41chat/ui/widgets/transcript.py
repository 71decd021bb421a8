"""The transcript: one scrolling view that draws the visible lines of any number of messages.

There is no widget per message. Heights are estimated until a message comes into view; then its exact lines are made, and the
scroll position moves with them, so that the line under the reader's eye stays where it is.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip

from dsv41chat.ui.render.entry import ANSWER, NOTICE, USER, Entry, Renderer
from dsv41chat.ui.render.palette import Palette
from dsv41chat.ui.render.wrap import Line, copy_lines
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.widgets.transcript_layout import GUTTER, TranscriptLayout

SHIFT_CELLS = 8
DRAWN_STRIPS = 400


class Transcript(TranscriptLayout, can_focus=True):
    """Entries in, lines out."""

    ALLOW_SELECT = True
    COMPONENT_CLASSES = {f"transcript--{name}" for name in Palette.names()}

    class FollowChanged(Message):
        """The view left the end, came back to it, or something new stands below it."""

        def __init__(self, follow: bool, unseen: bool):
            super().__init__()
            self.follow, self.unseen = follow, unseen

    class SelectionMoved(Message):
        """Another message is selected."""

    def __init__(self, *, id: str | None = None):
        super().__init__(id=id)
        self.selected: int | None = None
        self._shift = 0
        self._query = ""
        self._base: Style | None = None
        self._current: tuple[int, int, int] | None = None

    # Content ------------------------------------------------------------------------------------------------------------

    def set_entries(self, entries: list[Entry]) -> None:
        """Shows another list of entries from its end."""
        self.entries = list(entries)
        self._forget_layout()
        self.selected = None
        self._current = None
        self._shift = 0
        self.follow, self.unseen = True, False
        self._measure_all()
        self._to_end()
        self.refresh()

    def append(self, *entries: Entry) -> None:
        for entry in entries:
            self.entries.append(entry)
            self._heights.append(entry.estimate(self._text_width()))
            self._tops.append(self._tops[-1] + self._heights[-1])
        self._grown(new=True)

    def changed(self, entry: Entry) -> None:
        """An entry got more text, another receipt, or was folded."""
        index = self.index_of(entry)
        if index is None:
            return
        first = 0
        if self._width and entry.opened:
            first = self._tops[index] + entry.lay_out(index > 0, self._text_width())
            if self.follow:
                self._draw_end(entry)
            self._set_height(index, entry.height)
        else:
            self._set_height(index, entry.estimate(self._text_width()))
        self._grown(first if index == len(self.entries) - 1 else 0, new=entry.running)

    def _draw_end(self, entry: Entry) -> None:
        """Makes the newest parts exact at once: they are in view, and a wrong guess would cost another pass."""
        renderer, rows = self._get_renderer(), self.size.height
        for number in range(len(entry.heights) - 1, -1, -1):
            if not entry.exact[number]:
                entry.heights[number], entry.exact[number] = len(renderer.lines(entry.part(number))), True
            rows -= entry.heights[number]
            if rows <= 0:
                break

    def drop(self, entry: Entry) -> None:
        index = self.index_of(entry)
        if index is not None:
            del self.entries[index], self._heights[index]
            if index == 0 and self.entries:
                # The first entry has no blank line above it.
                self.entries[0].width = 0
            self._rebuild_tops()
            self.selected = None if not self.entries else self.selected and min(self.selected, len(self.entries) - 1)
            self._grown()

    def index_of(self, entry: Entry) -> int | None:
        for index in range(len(self.entries) - 1, -1, -1):
            if self.entries[index] is entry:
                return index
        return None

    def _grown(self, first: int = 0, new: bool = False) -> None:
        """Something changed from row `first` on; what stands above it is drawn already. new: there is text to be told about."""
        if not self._width:
            return
        self._update_size()
        before = self.scroll_offset.y
        if self.follow:
            self._to_end()
        else:
            self._settle()
            if new and self._tops[-1] > self.scroll_offset.y + self.size.height:
                self.unseen = True
        if self.scroll_offset.y == before:
            first = max(first, before)
            self.refresh_lines(first, max(1, before + self.size.height - first))

    # Textual hooks ------------------------------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        width = self.scrollable_content_region.width
        if width and width != self._width:
            anchor = None if self.follow or not self._width else self._anchor()
            self._width = width
            self._renderer = None
            self._forget_layout()
            self._measure_all()
            if anchor is not None:
                self._restore(anchor)
        if self.follow:
            self._to_end()
        else:
            self._settle()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        if self._renderer is not None and self.is_mounted:
            renderer = Renderer(replace(self._renderer.options, palette=self._palette(), code_theme=self._code_theme()))
            if renderer.options != self._renderer.options:
                self._renderer = renderer
                self._strips.clear()
                self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if not self._moving:
            self.follow = new_value >= self.max_scroll_y
            if self.follow:
                self.unseen = False
            self._settle()

    def watch_follow(self) -> None:
        self.post_message(self.FollowChanged(self.follow, self.unseen))

    def watch_unseen(self) -> None:
        self.post_message(self.FollowChanged(self.follow, self.unseen))

    def on_focus(self) -> None:
        if self.selected is None and self.entries:
            self.select(self._last_message())
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    # Drawing ------------------------------------------------------------------------------------------------------------

    def _locate(self, y: int) -> tuple[int, int, int]:
        index = min(max(0, bisect_right(self._tops, y) - 1), len(self.entries) - 1)
        entry = self.entries[index]
        number, row = entry.locate(y - self._tops[index]) if entry.heights else (0, 0)
        return index, number, row

    def _line(self, y: int) -> tuple[int, Line] | None:
        """The entry and the line at the absolute row y, None below the end or before the entry was laid out."""
        if not self.entries or y < 0 or y >= self._tops[-1]:
            return None
        index, number, row = self._locate(y)
        entry = self.entries[index]
        if not entry.heights or entry.width != self._text_width():
            return None
        lines = self._get_renderer().lines(entry.part(number))
        return (index, lines[row]) if row < len(lines) else None

    def render_lines(self, crop: Region) -> list[Strip]:
        """The kept lines themselves, past the cache of styles: there is no border, and after a scroll nearly every line is one of before.

        A strip remembers its cuts and its bytes; a new one of the same text would make them again, a whole view of them for each new line.
        """
        if self._marked:
            return super().render_lines(crop)
        filters, background, width = self.get_line_filters(), self.background_colors[1], self.size.width
        first = crop.y + self.scroll_offset.y
        self._base = None
        strips = []
        for y, found in enumerate(self._rows(first, crop.height), first):
            strip = self._strip(found, y, width, marked=False)
            for line_filter in filters:
                strip = strip.apply_filter(line_filter, background)
            strips.append(strip)
        if crop.column_span != (0, width):
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips

    def _rows(self, first: int, count: int) -> list[tuple[int, Line] | None]:
        """What `_line` gives for `count` rows from the absolute row `first` on; each part is looked for once."""
        found: list[tuple[int, Line] | None] = []
        width = self._text_width()
        while len(found) < count:
            y = first + len(found)
            if not self._width or not self.entries or not 0 <= y < self._tops[-1]:
                found.append(None)
                continue
            index, number, row = self._locate(y)
            entry = self.entries[index]
            if not entry.heights or entry.width != width:
                found.append(None)
                continue
            room = max(1, min(count - len(found), entry.heights[number] - row))
            lines = self._get_renderer().lines(entry.part(number))[row : row + room]
            found += [(index, line) for line in lines] + [None] * (room - len(lines))
        return found

    @property
    def _marked(self) -> bool:
        """Whether lines are drawn with more than their text: a search, a selection, the message that the keys act on."""
        return self.has_focus or bool(self._query) or self.text_selection is not None

    def render_line(self, y: int) -> Strip:
        absolute = y + self.scroll_offset.y
        self._base = None
        return self._strip(self._line(absolute) if self._width else None, absolute, self.size.width, self._marked)

    def _strip(self, found: tuple[int, Line] | None, absolute: int, width: int, marked: bool) -> Strip:
        """The strip of a line at an absolute row, or of a row without one. marked: see `_marked`, which walks up the tree."""
        if found is None:
            if self._width and 0 <= absolute < self._tops[-1]:
                self.call_later(self._settle)
            return Strip.blank(width, self._base_style())
        index, line = found
        focused = marked and self.has_focus and index == self.selected
        plain = not focused and not self._query and not (line.scrolled and self._shift) and (not marked or self.text_selection is None)
        if plain and (known := self._strips.get((id(line), absolute))) is not None and known[0] is line:
            return known[1]
        base = self._base_style()
        gutter = Segment("▌ " if focused else "  ", self._get_renderer().options.palette.cursor if focused else base)
        strip = line.strip
        room = self._text_width()
        if line.scrolled:
            strip = self._crop(strip, room)
        strip = Strip([gutter, *strip])
        strip = self._highlight(strip, line, absolute)
        strip = strip.adjust_cell_length(width, base).apply_style(base).apply_offsets(self.scroll_offset.x, absolute)
        if plain:
            if len(self._strips) > DRAWN_STRIPS:
                self._strips.clear()
            # The line is kept with its strip: its id is its own as long as it lives.
            self._strips[id(line), absolute] = (line, strip)
        return strip

    def _base_style(self) -> Style:
        """The style of the widget; asked once for a view, because it walks up the tree, as long as all the rest of a line takes."""
        if self._base is None:
            self._base = self.rich_style
        return self._base

    def _crop(self, strip: Strip, room: int) -> Strip:
        """A long line of code or of a wide table: the part in view, with marks where it goes on."""
        mark = self._get_renderer().options.palette.frame
        length = strip.cell_length
        if self._shift:
            strip = strip.crop(min(self._shift, length), length)
            length = strip.cell_length
        if length > room:
            strip = Strip([*strip.crop(0, room - 1), Segment("›", mark)])
        return strip

    def _highlight(self, strip: Strip, line: Line, y: int) -> Strip:
        palette = self._get_renderer().options.palette
        lead = GUTTER + line.lead
        if self._query and line.text:
            folded, query = line.text.casefold(), self._query
            at = folded.find(query)
            while at >= 0:
                hit = self._current is not None and self._current[0] == y and self._current[1] == at
                strip = paint(strip, lead + at, lead + at + len(query), palette.current if hit else palette.match)
                at = folded.find(query, at + len(query))
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(y)) is not None:
            start, end = span
            end = lead + len(line.text) if end == -1 else end
            strip = paint(strip, start, end, self.screen.get_component_rich_style("screen--selection"))
        return strip

    # Mouse selection ----------------------------------------------------------------------------------------------------

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text as it was written: without wrapping, indentation, bars and rules."""
        first = selection.start.y if selection.start is not None else 0
        last = selection.end.y if selection.end is not None else self._tops[-1] - 1
        renderer, width = self._get_renderer(), self._text_width()
        pieces: list[tuple[str, str]] = []
        for y in range(max(0, first), min(last, self._tops[-1] - 1) + 1):
            index, _, _ = self._locate(y)
            entry = self.entries[index]
            if not entry.heights or entry.width != width:
                entry.lay_out(index > 0, width)
            found = self._line(y)
            if found is None:
                continue
            line = found[1]
            lead = GUTTER + line.lead
            shift = self._shift if line.scrolled else 0
            start = selection.start.x - lead + shift if selection.start is not None and y == first else 0
            end = selection.end.x - lead + shift if selection.end is not None and y == last else len(line.text)
            text = line.text[max(0, start) : max(0, end)]
            if not line.text and line.lead:
                continue
            pieces.append((line.joint, text))
        del renderer
        return copy_lines(pieces), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    # Moving about -------------------------------------------------------------------------------------------------------

    def _last_message(self) -> int | None:
        return next((index for index in range(len(self.entries) - 1, -1, -1) if self.entries[index].role != NOTICE), None)

    @property
    def selected_entry(self) -> Entry | None:
        return self.entries[self.selected] if self.selected is not None and self.selected < len(self.entries) else None

    def select(self, index: int | None) -> None:
        """Selects a message and brings it into view."""
        self.selected = index
        if index is not None:
            top, bottom = self._tops[index], self._tops[index + 1]
            if top < self.scroll_y or bottom - top > self.size.height:
                self.scroll_to(y=top, animate=False, force=True)
            elif bottom > self.scroll_y + self.size.height:
                self.scroll_to(y=bottom - self.size.height, animate=False, force=True)
        self.post_message(self.SelectionMoved())
        self.refresh()

    def select_by(self, step: int) -> None:
        """Moves the selection over messages; notices are passed over."""
        if not self.entries:
            return
        index = (self.selected if self.selected is not None else len(self.entries)) + step
        while 0 <= index < len(self.entries) and self.entries[index].role == NOTICE:
            index += step
        if 0 <= index < len(self.entries):
            self.select(index)
        elif step > 0:
            self.end()

    def select_edge(self, last: bool) -> None:
        indexes = [index for index, entry in enumerate(self.entries) if entry.role in (USER, ANSWER)]
        if indexes:
            self.select(indexes[-1 if last else 0])
        if last:
            self.end()

    def page(self, direction: int) -> None:
        """Scrolls by a screen with two lines of overlap."""
        self.scroll_to(y=self.scroll_y + direction * max(1, self.size.height - 2), animate=False, force=True)

    def home(self) -> None:
        self.scroll_to(y=0, animate=False, force=True)

    def shift(self, direction: int) -> None:
        """Moves long code lines and wide tables sideways."""
        self._shift = max(0, self._shift + direction * SHIFT_CELLS)
        self.refresh()

    def show_line(self, entry: Entry, occurrence: int) -> None:
        """Scrolls to the n-th place of the query in an entry and marks it."""
        index = self.index_of(entry)
        if index is None or not self._query:
            return
        width, renderer = self._text_width(), self._get_renderer()
        entry.lay_out(index > 0, width)
        seen = -1
        target = None
        y = 0
        for number in range(len(entry.heights)):
            lines = renderer.lines(entry.part(number))
            entry.heights[number], entry.exact[number] = len(lines), True
            for row, line in enumerate(lines):
                folded = line.text.casefold()
                at = folded.find(self._query)
                while at >= 0:
                    seen += 1
                    if seen <= occurrence:
                        target = (y + row, at)
                    at = folded.find(self._query, at + len(self._query))
            y += len(lines)
            if seen >= occurrence:
                # What stands below the place need not be exact, and may be a megabyte.
                break
        self._set_height(index, entry.height)
        self._update_size()
        self.selected = index
        self.follow = False
        row, at = target or (0, -1)
        self._move(max(0, self._tops[index] + row - self.size.height // 3))
        self._settle()
        self._current = (self._tops[index] + row, at, index)
        self.refresh()

    def highlight_query(self, query: str) -> None:
        """Marks every place of `query` (case does not count), as it is drawn; empty ends it."""
        self._query = visible_line(query).casefold()
        self._current = None
        self.refresh()


def paint(strip: Strip, start: int, end: int, style: Style) -> Strip:
    """The strip with characters start..end in another style."""
    segments: list[Segment] = []
    position = 0
    for text, old, control in strip:
        following = position + len(text)
        if following <= start or position >= end or control:
            segments.append(Segment(text, old, control))
        else:
            left, right = max(0, start - position), min(len(text), end - position)
            if left:
                segments.append(Segment(text[:left], old))
            segments.append(Segment(text[left:right], (old or Style()) + style))
            if right < len(text):
                segments.append(Segment(text[right:], old))
        position = following
    return Strip(segments, strip.cell_length)
