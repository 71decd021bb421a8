"""Settings: every value with where it comes from and one sentence; changes apply at once and are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from dsv41chat.settings import KEYS, ROUTE_DEVICES, TURN_KEYS, Key, coerce, parse_text
from dsv41chat.ui import themes
from dsv41chat.ui.render.wrap import crop_cells
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.screens.dialogs import AskScreen, LineScreen, Page

ORIGINS = {"default": "default", "build": "build", "file": "file", "env": "environment", "flag": "command line", "conversation": "conversation"}
TABS = ("Conversation", "Interface", "Engine")
CONVERSATION_ROWS = (
    "system", "effort", "temperature", "top_p", "min_p", "top_k", "presence_penalty", "frequency_penalty", "seed", "max_tokens", "draft",
)  # fmt: skip
REWRITES = ("system", "effort")
SEED = Key("chat.seed", "int", None, "start of the random draws; random: another one each time", auto=False)


@dataclass(frozen=True)
class Row:
    """name: what is changed; key: its rules; value and origin as they count now; note: after the sentence."""

    name: str
    key: Key
    value: Any
    origin: str
    note: str = ""


class SettingsScreen(Page[None]):
    """The chat screen does the changes: change_option(name, value) for the conversation, change_key(name, value) for the rest."""

    BINDINGS = [
        Binding("escape", "close", "Close", show=False),
        Binding("tab,right", "tab(1)", "Next tab", show=False, priority=True),
        Binding("shift+tab,left", "tab(-1)", "Previous tab", show=False, priority=True),
        Binding("d", "default", "Restore the default", show=False),
    ]

    def __init__(self, chat: Any):
        super().__init__()
        self._chat = chat
        self._tab = 0
        self._rows: list[Row] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog dialog-full"):
            yield Static("", classes="dialog-title", id="settings-tabs", markup=False)
            yield OptionList(id="list", markup=False, compact=True)
            yield Static("", id="settings-help", markup=False)
            yield Static("enter change   d default   tab next page   esc closes", classes="dialog-foot")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self.refill()

    def on_resize(self) -> None:
        self.refill()

    def refill(self) -> None:
        """Reads the values again."""
        tabs = "  ".join(f"[{name}]" if number == self._tab else f" {name} " for number, name in enumerate(TABS))
        self.query_one("#settings-tabs", Static).update(tabs)
        self._rows = self._conversation_rows() if self._tab == 0 else self._key_rows()
        options = self.query_one(OptionList)
        kept = options.highlighted or 0
        options.clear_options()
        width = max(20, options.size.width - 4)
        options.add_options([Option(self._line(row, width)) for row in self._rows])
        options.highlighted = min(kept, len(self._rows) - 1)

    def _conversation_rows(self) -> list[Row]:
        values = self._chat.option_values()
        rows = []
        for name in CONVERSATION_ROWS:
            value, origin = values[name]
            key = SEED if name == "seed" else KEYS["chat.system" if name == "system" else TURN_KEYS[name]]
            rows.append(Row(name, key, value, origin, self._chat.rewrite_cost() if name in REWRITES else ""))
        return rows

    def _key_rows(self) -> list[Row]:
        sections = ("ui", "log") if self._tab == 1 else ("engine", "engram", "cache", "chat")
        settings = self._chat.app.settings
        rows = []
        for key in KEYS.values():
            if key.section in sections and not key.inert and not (key.section == "chat" and key.field in CONVERSATION_ROWS):
                note = "after reload" if key.section in ("engine", "engram") and key.name not in ("engine.model", "engine.draft") else ""
                rows.append(Row(key.name, key, settings.get(key.name), settings.origin(key.name), note))
        return rows

    def _line(self, row: Row, width: int) -> Text:
        column = min(24, width // 2)
        name, value, origin = crop_cells(row.name, column).ljust(column), _shown(row.value), ORIGINS[row.origin]
        room = width - column - 2 - (cell_len(origin) + 1 if width > 50 else 0)
        text = f"{name} {crop_cells(value, max(4, room))}"
        if width <= 50:
            return Text(text, no_wrap=True)
        return Text(text + " " * max(1, width - cell_len(text) - cell_len(origin)) + origin, no_wrap=True)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_index < len(self._rows):
            row = self._rows[event.option_index]
            doc = f"{row.key.doc} ({row.key.expected()})" if row.key.kind != "str" or row.key.choices else row.key.doc
            origin = "" if self.size.width > 54 else f" [{ORIGINS[row.origin]}]"
            self.query_one("#settings-help", Static).update(f"{doc}{origin}. {row.note}".strip())

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        row = self._rows[event.option_index]
        if row.key.kind == "bool":
            self._change(row, not row.value)
        elif names := row.key.choices or (themes.names() if row.name == "ui.theme" else ()):
            kind = self._chat.app.host.device_kind() if row.name == "engine.routes" else None
            choices = [(name, f"{'>' if name == row.value else ' '} {name}{_not_here(name, kind)}") for name in names]
            self.app.push_screen(AskScreen(row.name, choices), lambda name: name is not None and self._change(row, name))
        else:
            start = row.value if isinstance(row.value, str) else "" if row.value is None else _shown(row.value)
            page = LineScreen(f"{row.name}: {row.key.expected()}", start, check=lambda text: _wrong(row, text))
            self.app.push_screen(page, lambda text: text is not None and self._change(row, _value(row, text)))

    def _change(self, row: Row, value: Any) -> None:
        done = self._chat.change_option(row.name, value) if self._tab == 0 else self._chat.change_key(row.name, value)
        if done:
            self.refill()

    def action_default(self) -> None:
        index = self.query_one(OptionList).highlighted
        if index is not None:
            self._change(self._rows[index], None)

    def action_tab(self, step: int) -> None:
        self._tab = (self._tab + step) % len(TABS)
        self.query_one(OptionList).highlighted = None
        self.refill()

    def action_close(self) -> None:
        self.dismiss(None)


def _not_here(route: str, kind: str | None) -> str:
    """What a route that computes nothing on this kind of device is marked with. It may be set: the file may serve another machine."""
    if kind is None or route not in ROUTE_DEVICES or kind in ROUTE_DEVICES[route]:
        return ""
    return f"  not here: for {', '.join(ROUTE_DEVICES[route])}, this device is {kind}"


def _value(row: Row, text: str) -> Any:
    """The value that was typed. Raises ValueError with what would be one."""
    if row.name == "seed":
        return None if text.strip() in ("", "random") else int(text)
    return coerce(row.key, text) if row.key.kind == "str" else parse_text(row.key, text.strip())


def _wrong(row: Row, text: str) -> str:
    """What is wrong with what was typed; empty for nothing."""
    try:
        _value(row, text)
    except ValueError as error:
        wanted = "a whole number, or random" if row.name == "seed" else str(error)
        return f"{row.name} must be {wanted}, not {text.strip()!r}."
    return ""


def _shown(value: Any) -> str:
    if value is None:
        return "random"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "-"
    return visible_line(str(value)) or "-"
