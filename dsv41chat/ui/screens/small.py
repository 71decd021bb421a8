"""What stands in for everything while the terminal is below the smallest size: what runs goes on, and can be stopped and left."""

from __future__ import annotations

import textwrap
import time
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import ModalScreen
from textual.widgets import Static

MIN_WIDTH, MIN_HEIGHT = 40, 10
REFRESH_S = 0.2
TWICE_S = 2.0


class TooSmallScreen(ModalScreen[None]):
    """chat: the chat screen below, or None while there is none. Notices have no room here, so the keys answer on the page itself."""

    # With the ids of the chat's own, so that the user's keymap moves them too.
    BINDINGS = [
        Binding("escape", "stop", show=False, priority=True, id="chat.stop"),
        Binding("ctrl+c", "interrupt", show=False, priority=True, id="chat.interrupt"),
        Binding("ctrl+q", "quit", show=False, priority=True, id="app.quit"),
    ]

    def __init__(self, chat: Any) -> None:
        super().__init__()
        self._chat = chat
        self._text = Static("", markup=False)
        self._asked = ""  # what another ctrl+Q does, once it has been said
        self._interrupted = -TWICE_S

    def compose(self) -> ComposeResult:
        yield self._text

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self.show)
        self.show()

    def on_resize(self) -> None:
        self.show()

    def on_screen_resume(self) -> None:
        """A page that came over this one is closed: perhaps the terminal has grown meanwhile."""
        if fits(self.app.size.width, self.app.size.height):
            self.app.pop_screen()

    def show(self) -> None:
        width, height = self.app.size
        size = textwrap.wrap(f"Terminal too small: {width}x{height}", max(1, width))
        needs = textwrap.wrap(f"dsv41chat needs {MIN_WIDTH}x{MIN_HEIGHT}.", max(1, width))
        note, keys = (textwrap.wrap(text, max(1, width)) for text in (self._note(), self._keys()))
        # What matters less goes first where there is no room for all of it.
        for part in (needs, note, size):
            if len(size) + len(needs) + len(note) + len(keys) > height:
                part.clear()
        self._text.update("\n".join(size + needs + note + keys))

    def _note(self) -> str:
        chat = self._chat
        if chat is None:
            return ""
        if chat.pump.running:
            status = chat.status
            return f"{'Stopping' if status.stopping else 'Generation continues'}: {status.thinking + status.answer} tok"
        return chat.status.phase if chat.switching else ""

    def _keys(self) -> str:
        if self._asked:
            return self._asked
        quits = f"{self._key('app.quit')} quits"
        if time.monotonic() - self._interrupted < TWICE_S:
            return f"{quits} (or {self._key('chat.interrupt')} again)"
        running = self._chat is not None and self._chat.pump.running
        loading = self._chat is not None and self._chat.switching
        stops = f"{self._key('chat.stop')} {'stops' if running else 'cancels loading'}, " if running or loading else ""
        return stops + quits

    def _key(self, name: str) -> str:
        return self.app.shown_key(name)

    def _stop(self) -> bool:
        """Stops what runs. Returns whether something does, or did a moment ago."""
        self._asked, chat = "", self._chat
        if chat is None:
            return False
        if chat.pump.running:
            chat.stop_turn()
            return True
        return chat.cancel_switch() or chat.just_stopped()

    def action_stop(self) -> None:
        self._stop()
        self.show()

    def action_interrupt(self) -> None:
        if not self._stop():
            if time.monotonic() - self._interrupted < TWICE_S:
                self.action_quit()
                return
            self._interrupted = time.monotonic()
        self.show()

    def action_quit(self) -> None:
        """Leaves at once where nothing would be lost, else with the second press."""
        doubt = self._chat.quit_doubt() if self._chat is not None else ""
        ends = {
            "unsaved": "quits and loses this conversation, which is not saved",
            "answer": "stops the answer and quits",
            "waiting": "quits; the message that waits is kept",
        }.get(doubt, "")
        asked = f"{self._key('app.quit')} again {ends}."
        if not ends or asked == self._asked:
            self.app.leave()
            return
        self._asked = asked
        self.show()


def fits(width: int, height: int) -> bool:
    """Whether the chat can be drawn in a terminal of this size."""
    return width >= MIN_WIDTH and height >= MIN_HEIGHT
