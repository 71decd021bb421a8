"""The composer: a text area that sends on Enter, takes pastes whole and walks the prompt history."""

from __future__ import annotations

import re
import time

from rich.text import Text
from textual import events
from textual.document._document_navigator import DocumentNavigator
from textual.document._wrapped_document import WrappedDocument
from textual.widgets import TextArea

from dsv41chat.ui.commands import common, complete_path
from dsv41chat.ui.inputs import fenced, line_count
from dsv41chat.ui.keymap import COMPOSER, bindings
from dsv41chat.ui.messages import Completions, DraftChanged, Hint, RemoveQueued, TypedPaste
from dsv41chat.ui.sanitize import in_place, sendable, visible_line
from dsv41chat.ui.widgets.composer_document import PlainDocument, ShownDocument

BURST_GAP_S = 0.015
BURST_KEYS = 3
BLINK_S = 5.0
CHIP_BYTES = 8 * 1024
CHIP_LINE = 2_000
NEWLINE_KEYS = {"ctrl+j", "shift+enter", "alt+enter", "ctrl+enter"}

_AT_PATH = re.compile(r"(?:^|\s)@(\S*)$")
_CHIP = re.compile(r"\[(paste|file) (\d+): [^\]\n]*\]")


class Composer(TextArea):
    """text is what is shown; expanded() is what is sent. burst_paste: treat key bursts as paste; queued: waiting messages."""

    BINDINGS = bindings(COMPOSER)

    def __init__(self, *, burst_paste: bool = True, id: str | None = None):
        super().__init__(soft_wrap=True, show_line_numbers=False, tab_behavior="focus", compact=True, id=id, placeholder=PLACEHOLDER)
        self.burst_paste = burst_paste
        self.chips: dict[str, str] = {}
        self.prompts: list[str] = []
        self._place: int | None = None
        self._kept = ""
        self._last_key = time.monotonic()
        self._rested = False
        self._burst = 0
        self._chip_count = 0
        self._after_x = False
        self.queued = 0

    def _set_document(self, text: str, language: str | None) -> None:
        """Textual's, with a document that keeps every character, wrapped as it is drawn."""
        self.document = PlainDocument(text)
        self.wrapped_document = WrappedDocument(ShownDocument(self.document), tab_width=self.indent_width)
        self.navigator = DocumentNavigator(self.wrapped_document)
        self._build_highlight_map()
        self.move_cursor((0, 0))
        self._rewrap_and_refresh_virtual_size()

    def get_line(self, line_index: int) -> Text:
        """A line as it is drawn: nothing of it acts on the terminal."""
        return Text(in_place(self.document.get_line(line_index)), end="", no_wrap=True)

    # Sending ------------------------------------------------------------------------------------------------------------

    def expanded(self) -> str:
        """The text with every chip replaced by what it stands for."""
        return _CHIP.sub(lambda match: self.chips.get(match[0], match[0]), self.text)

    def submit(self) -> None:
        """Sends what is visible, at once: keys that wait behind this one must find the text gone, or they would go with it."""
        text = self.expanded().rstrip("\n")
        if not text.strip():
            self.post_message(Hint("Nothing to send yet: type a message first."))
            return
        self.screen.send(text)

    def reset(self, text: str = "") -> None:
        """Replaces everything; undo brings the old text back."""
        self.replace(text, (0, 0), self.document.end)
        self.move_cursor(self.document.end)
        self._place = None
        if not text:
            self.chips.clear()

    def put_before(self, text: str) -> None:
        """A sent text comes back: before what was typed since, a blank line between them."""
        self.reset(f"{text}\n\n{self.text}" if self.text else text)

    def remember(self, text: str) -> None:
        """Adds a sent message to the history."""
        if text and (not self.prompts or self.prompts[-1] != text):
            self.prompts.append(text)
        self._place = None

    def rest_caret(self) -> None:
        """The caret stands still while nobody types: its blinking is what an idle screen costs. The next key wakes it."""
        if self.cursor_blink and time.monotonic() - self._last_key > BLINK_S:
            self._rested, self.cursor_blink = True, False

    # Keys ---------------------------------------------------------------------------------------------------------------

    async def _on_key(self, event: events.Key) -> None:
        # When it was read from the terminal, not when a busy screen came round to it.
        now = event.time
        self._burst = self._burst + 1 if now - self._last_key < BURST_GAP_S else 0
        self._last_key = now
        if self._rested:
            self._rested, self.cursor_blink = False, True
        key = event.key
        after_x, self._after_x = self._after_x, False
        if key in NEWLINE_KEYS or key.endswith("+\r"):
            event.stop()
            event.prevent_default()
            self.insert("\n")
        elif key == "enter":
            event.stop()
            event.prevent_default()
            if self.burst_paste and self._burst >= BURST_KEYS:
                self.insert("\n")
            elif chip := self._chip_inside():
                self._show_chip(chip)
            else:
                self.submit()
        elif key == "delete" and not self.text and self.queued:
            event.stop()
            event.prevent_default()
            self.post_message(RemoveQueued())
        elif key == "ctrl+x" and self.selection.is_empty:
            # Waits for ctrl+E; with nothing selected there is nothing to cut.
            event.stop()
            event.prevent_default()
            self._after_x = True
        elif key == "ctrl+e" and after_x:
            event.stop()
            event.prevent_default()
            self.screen.action_external_editor()
        elif key == "tab" and self._complete():
            event.stop()
            event.prevent_default()
        elif key == "backspace" and (span := self._chip_before()):
            event.stop()
            event.prevent_default()
            self.delete(*span)
        elif key == "up" and self.cursor_location[0] == 0 and self._visual_row() == 0:
            event.stop()
            event.prevent_default()
            self.recall(-1)
        elif key == "down" and self._place is not None and self.cursor_location[0] == self.document.line_count - 1:
            event.stop()
            event.prevent_default()
            self.recall(1)
        elif await self._edits(key):
            event.stop()
            event.prevent_default()
        else:
            await super()._on_key(event)

    async def _edits(self, key: str) -> bool:
        """Runs what the key does in this field, if anything. At once: Textual does so when the key comes back from the screen, and what was
        typed behind it would be in the field by then."""
        for binding in self._bindings.key_to_bindings.get(key, ()):
            if not binding.priority and await self.app.run_action(binding.action, self):
                return True
        return False

    def _complete(self) -> bool:
        """Tab on a /command or an @path. Returns whether there was something to complete."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        if self.text.startswith("/") and not self.text.startswith("//") and row == 0 and self.document.line_count == 1:
            found, start = self.screen.complete_command(before), 0
        elif match := _AT_PATH.search(before):
            found, start = [f"@{path}" for path in complete_path(match[1])], match.start(1) - 1
            if found == [match[0].lstrip()] and not found[0].endswith("/"):
                self._attach_file(match[1], (row, start), (row, column))
                return True
        else:
            return False
        if found:
            self.replace(common(found), (row, start), (row, column))
        self.post_message(Completions(found if len(found) > 1 else []))
        return True

    def _attach_file(self, path: str, start: tuple[int, int], end: tuple[int, int]) -> None:
        self.delete(start, end)
        self.move_cursor(start)
        self.screen.attach(path, f"@{path}")

    def _visual_row(self) -> int:
        """The screen row of the cursor within its wrapped line."""
        return self.wrapped_document.location_to_offset(self.cursor_location).y

    def recall(self, step: int) -> None:
        """Walks through what was sent before; the text being written comes back at the end. With an empty composer the queue goes first."""
        if self._place is None:
            if not self.text and step < 0 and self.queued:
                # At once, as sending: it must not replace what the keys behind this one write.
                self.screen.recall_queued()
                return
            self._kept, self._place = self.text, len(self.prompts)
        place = self._place + step
        if place < 0 or not self.prompts:
            return
        if place >= len(self.prompts):
            self.reset(self._kept)
            return
        self.reset(self.prompts[place])
        self._place = place

    # Paste --------------------------------------------------------------------------------------------------------------

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        if isinstance(event, TypedPaste):
            self._last_key, self._burst = event.time, BURST_KEYS
        self.take(event.text)

    def take(self, text: str) -> None:
        """Inserts pasted text at the cursor; a big one becomes a chip."""
        text = sendable(text)
        if not text:
            return
        if len(text.encode("utf-8", "replace")) > CHIP_BYTES or max(map(len, text.split("\n"))) > CHIP_LINE:
            text = self.add_chip("paste", text)
        self.replace(text, *self.selection)

    def add_chip(self, kind: str, text: str, name: str = "") -> str:
        """Stores a text and returns the mark that stands for it. kind: paste, or file: its text is fenced under its name."""
        self._chip_count += 1
        mark = _mark(kind, self._chip_count, name, line_count(text))
        self.chips[mark] = fenced(name, text) if kind == "file" else text
        return mark

    def begin_chip(self, name: str) -> str:
        """A mark for a file that is being read; until it is, the mark stands for itself."""
        self._chip_count += 1
        mark = f"[file {self._chip_count}: {_chip_name(name)}, reading]"
        self.chips[mark] = mark
        return mark

    def finish_chip(self, mark: str, name: str, lines: int, text: str) -> None:
        """The file is read: another mark in the place of `mark`, where that still stands. text: fenced, as it is sent."""
        found = _CHIP.fullmatch(mark)
        if mark not in self.text or found is None:
            self.chips.pop(mark, None)
            return
        read = _mark("file", int(found[2]), name, lines)
        # Undo may bring the old mark back; it stands for the same.
        self.chips[read] = self.chips[mark] = text
        self._swap(mark, read)

    def drop_chip(self, mark: str, after: str, text: str) -> None:
        """The mark of a file that was not read goes, with the `after` behind it; `text` in its place."""
        self.chips.pop(mark, None)
        if mark.startswith(f"[file {self._chip_count}:"):
            self._chip_count -= 1
        self._swap(mark + after if mark + after in self.text else mark, text)

    def _swap(self, old: str, new: str) -> None:
        at = self.text.find(old)
        if at >= 0:
            locate = self.document.get_location_from_index
            self.replace(new, locate(at), locate(at + len(old)))

    def expand_chips(self) -> None:
        """Puts the texts of all chips in place."""
        self.reset(self.expanded())

    def _chip_spans(self) -> list[tuple[int, int, str]]:
        row = self.document.get_line(self.cursor_location[0])
        return [(match.start(), match.end(), match[0]) for match in _CHIP.finditer(row) if match[0] in self.chips]

    def _chip_before(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        row, column = self.cursor_location
        if not self.selection.is_empty:
            return None
        for start, end, _ in self._chip_spans():
            if start < column <= end:
                return (row, start), (row, end)
        return None

    def _chip_inside(self) -> str | None:
        column = self.cursor_location[1]
        return next((mark for start, end, mark in self._chip_spans() if start < column < end), None)

    def _show_chip(self, mark: str) -> None:
        self.screen.show_text(mark.strip("[]"), self.chips[mark])

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        self.post_message(DraftChanged())


def _mark(kind: str, number: int, name: str, lines: int) -> str:
    what = f"{_chip_name(name)}, " if name else ""
    return f"[{kind} {number}: {what}{lines:,} line{'s' if lines != 1 else ''}]"


def _chip_name(name: str) -> str:
    """A name inside a mark, which ends at the first closing bracket."""
    return visible_line(name).replace("]", ")")


PLACEHOLDER = "Ask anything. Enter sends, ctrl+J new line"
