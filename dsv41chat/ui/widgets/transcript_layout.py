"""Where each message of the transcript lies: heights that are guessed until a message comes into view, and the scrolling that hides it.

The text under the reader's eye stays where it is when a guess is corrected, the width changes, or the theme does.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

from textual.geometry import Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from dsv41chat.ui.render.entry import Entry, Renderer
from dsv41chat.ui.render.palette import CODE_THEMES, Palette, RenderOptions
from dsv41chat.ui.render.wrap import Line

GUTTER = 2
RIGHT_MARGIN = 1
MAX_TEXT_CELLS = 120


class TranscriptLayout(ScrollView):
    """entries: what is shown, in order. `follow` is true while the view sticks to the end; unseen: something new stands below it."""

    follow: reactive[bool] = reactive(True)
    unseen: reactive[bool] = reactive(False)

    def __init__(self, *, id: str | None = None):
        super().__init__(id=id)
        self.entries: list[Entry] = []
        self._heights: list[int] = []
        self._tops: list[int] = [0]
        self._renderer: Renderer | None = None
        self._settings = RenderOptions(80)
        self._width = 0
        self._moving = False
        self._settling = False
        self._strips: dict[tuple[int, int], tuple[Line, Strip]] = {}

    def _text_width(self) -> int:
        return max(8, min(MAX_TEXT_CELLS, (self._width or 80) - GUTTER - RIGHT_MARGIN))

    def _rebuild_tops(self) -> None:
        self._tops = list(accumulate(self._heights, initial=0))

    def _set_height(self, index: int, height: int) -> None:
        if self._heights[index] == height:
            return
        self._heights[index] = height
        if index == len(self.entries) - 1:
            self._tops[-1] = self._tops[-2] + height
        else:
            self._rebuild_tops()

    def _forget_layout(self) -> None:
        for entry in self.entries:
            entry.width = 0
            entry.heights = []

    def _measure_all(self) -> None:
        width = self._text_width()
        self._heights = [entry.estimate(width) for entry in self.entries]
        self._rebuild_tops()
        if self._width:
            self._update_size()

    def _update_size(self) -> None:
        size = Size(self._width, self._tops[-1])
        old = self.virtual_size
        if size == old:
            return
        if size.width != old.width or not old.height or not self.show_vertical_scrollbar:
            self.virtual_size = size
            return
        # The plain assignment would lay the whole screen out again, twenty times a second while text streams in. Only the
        # scrollbar depends on the height.
        self.set_reactive(TranscriptLayout.virtual_size, size)
        bar = self.vertical_scrollbar
        bar.window_virtual_size, bar.window_size = size.height, self.size.height
        bar.refresh()

    def _move(self, y: float) -> None:
        """Scrolls without touching `follow`."""
        self._moving = True
        try:
            self.scroll_to(y=max(0, y), animate=False, force=True)
        finally:
            self._moving = False

    def _to_end(self) -> None:
        if not self._width:
            return
        for _ in range(8):
            self._move(max(0, self._tops[-1] - self.size.height))
            if not self._settle():
                break

    def end(self) -> None:
        """Goes to the end and follows it again."""
        self.follow, self.unseen = True, False
        self._to_end()
        self.refresh()

    def _settle(self) -> bool:
        """Makes the lines in view exact. Returns whether any height changed."""
        if self._settling or not self._width or not self.entries:
            return False
        self._settling = True
        changed = False
        try:
            renderer, width = self._get_renderer(), self._text_width()
            for _ in range(50):
                top = round(self.scroll_y)
                bottom = top + self.size.height
                delta = self._settle_once(renderer, width, top, bottom)
                if delta is None:
                    break
                changed = True
                self._update_size()
                if delta and not self.follow:
                    self._move(top + delta)
            if changed:
                self.refresh()
        finally:
            self._settling = False
        return changed

    def _settle_once(self, renderer: Renderer, width: int, top: int, bottom: int) -> int | None:
        """Fixes the first wrong height in view. Returns how far the text in view moved, None when all were right."""
        index = max(0, bisect_right(self._tops, top) - 1)
        while index < len(self.entries) and self._tops[index] < bottom:
            entry = self.entries[index]
            if not entry.opened or entry.width != width or not entry.heights:
                # Opened from its bottom edge when the view came from below, else from its top.
                before = self._heights[index]
                entry.lay_out(index > 0, width)
                self._set_height(index, entry.height)
                return self._heights[index] - before if self._tops[index] < top else 0
            y = self._tops[index]
            for number, height in enumerate(entry.heights):
                if y + height > top and y < bottom and not entry.exact[number]:
                    exact = len(renderer.lines(entry.part(number)))
                    entry.exact[number] = True
                    if exact != height:
                        entry.heights[number] = exact
                        self._set_height(index, entry.height)
                        return exact - height if y < top else 0
                y += height
                if y >= bottom:
                    break
            index += 1
        return None

    def _get_renderer(self) -> Renderer:
        if self._renderer is None:
            self._strips.clear()
            self._renderer = Renderer(replace(self._settings, width=self._text_width(), palette=self._palette(), code_theme=self._code_theme()))
        return self._renderer

    def _palette(self) -> Palette:
        return Palette(**{name: self.get_component_rich_style(f"transcript--{name}") for name in Palette.names()})

    def _code_theme(self) -> str:
        theme = self.app.current_theme
        kind = "dark" if theme.dark else "light"
        return CODE_THEMES[f"ansi-{kind}" if theme.ansi else kind]

    def configure(self, *, wrap_code: bool | None = None, math: str | None = None) -> None:
        """Changes how text is drawn; None leaves a setting as it is."""
        wrap = self._settings.wrap_code if wrap_code is None else wrap_code
        self._settings = replace(self._settings, wrap_code=wrap, math=math or self._settings.math)
        self._redraw_all()

    @property
    def wrap_code(self) -> bool:
        return self._settings.wrap_code

    def _redraw_all(self) -> None:
        """Everything must be drawn again: width, theme or a setting changed. The text at the top of the view stays there."""
        anchor = None if self.follow else self._anchor()
        self._renderer = None
        self._forget_layout()
        self._measure_all()
        if self.follow:
            self._to_end()
        elif anchor is not None:
            self._restore(anchor)
        self.refresh()

    def _anchor(self) -> tuple[int, int, int] | None:
        """(entry, part, characters of it above the view) of the first line in view."""
        if not self.entries or self._renderer is None:
            return None
        index, number, row = self._locate(round(self.scroll_y))
        entry = self.entries[index]
        if not entry.heights or not entry.opened:
            return index, 0, 0
        lines = self._renderer.lines(entry.part(number))
        return index, number, sum(len(line.text) + len(line.joint) for line in lines[:row])

    def _restore(self, anchor: tuple[int, int, int]) -> None:
        index, number, characters = anchor
        if index >= len(self.entries):
            return
        entry = self.entries[index]
        entry.lay_out(index > 0, self._text_width())
        number = min(number, len(entry.heights) - 1)
        lines = self._get_renderer().lines(entry.part(number))
        entry.heights[number], entry.exact[number] = len(lines), True
        self._set_height(index, entry.height)
        self._update_size()
        ends = list(accumulate(len(line.text) + len(line.joint) for line in lines))
        row = min(bisect_right(ends, characters), len(lines) - 1)
        self._move(self._tops[index] + sum(entry.heights[:number]) + row)
        self._settle()

    def place(self) -> tuple[str, int, int] | None:
        """(entry key, part, characters) of the text at the top of the view, for `go_to`."""
        anchor = self._anchor()
        return None if anchor is None else (self.entries[anchor[0]].key, anchor[1], anchor[2])

    def go_to(self, key: str, part: int, characters: int) -> None:
        """Brings the text that `place` named to the top of the view."""
        index = next((index for index, entry in enumerate(self.entries) if entry.key == key), None)
        if index is not None and self._width:
            self.follow = False
            self._restore((index, part, characters))
