"""Help: the keys that are bound now, by place, the slash commands, and where to read more."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from dsv41chat.ui.commands import COMMANDS, usage
from dsv41chat.ui.keymap import CHAT, COMPOSER, GLOBAL, KEYS, TRANSCRIPT, display
from dsv41chat.ui.screens.dialogs import Page

TOPICS = """First steps
  Type and press Enter. Esc stops. ctrl+P lists everything that can be done.
  The embedded model answers at once; F2 lists builds and adds folders.
Memory
  F2 says of each build whether it fits and how much context memory admits.
Conversations
  Everything is stored as it is written. An edit or a retry makes a branch; [ and ] switch.
Cache
  What was computed is kept: a chat opened tomorrow reads only what is new. dsv41chat cache stats; /pin keeps one.
Scripts
  dsv41chat --headless "question"    dsv41chat conversations list    dsv41chat doctor
Copying
  c copies a message, y a code block; drag selects. F8, Interface, mouse off: the terminal's own selection.
Pasting by script
  Keys that arrive in a burst count as a paste: pause 30 ms before Enter, or set burst_paste = false."""


class HelpScreen(Page[None]):
    """keymap: the user's own keys, by action id."""

    BINDINGS = [Binding("escape,q,f1", "close", "Close", show=False)]

    def __init__(self, keymap: Mapping[str, str]):
        super().__init__()
        self._keymap = keymap

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog dialog-full"):
            yield Static("Help", classes="dialog-title")
            with VerticalScroll():
                with Horizontal(id="help-columns"):
                    yield Static(self._column(COMPOSER, CHAT, GLOBAL), classes="help-column")
                    yield Static(self._column(TRANSCRIPT), classes="help-column")
                yield Static(Text("Slash commands, typed as a message (Tab completes)", "bold underline"))
                yield Static(self._commands(), id="help-commands")
                yield Static(TOPICS, markup=False)
            yield Static("esc closes   arrows scroll", classes="dialog-foot")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def _column(self, *contexts: str) -> Text:
        text = Text()
        for context in contexts:
            text.append(context.capitalize() + "\n", "bold underline")
            for key in KEYS:
                if key.context == context and (bound := self._keymap.get(key.id, key.key)) and not key.id.startswith("list.recent"):
                    text.append(display(bound).rjust(12) + "  ", "bold")
                    text.append(key.title + "\n")
            if context == CHAT:
                text.append("alt+1..9".rjust(12) + "  ", "bold")
                text.append("Recent conversations\n")
        return text

    def _commands(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for command in COMMANDS:
            table.add_row(Text("  " + usage(command), "bold"), Text(command.help))
        return table

    def action_close(self) -> None:
        self.dismiss(None)
