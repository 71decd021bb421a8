"""The build menu: what is there, what fits, what is loaded; switch, inspect, add, remove."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from dsv41chat.engine.errors import EngineError, PackIncomplete
from dsv41chat.store import Store, StoreError
from dsv41chat.store.receipts import Receipts
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.render.wrap import crop_cells
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.screens.dialogs import AskScreen, LineScreen, Page, TextScreen
from dsv41chat.ui.spawn import Spawning
from dsv41chat.ui.turn_events import BuildRef
from dsv41chat.ui.units import size
from dsv41chat.ui.widgets.foot import Foot


@dataclass(frozen=True)
class Row:
    """A build as listed. view: None when its headers could not be read; problem: why, in words.

    measured: the last perplexity and selfcheck, as `Receipts.figures` gives them."""

    ref: Any
    view: Any
    bytes: int
    problem: str
    loaded: bool
    measured: dict[str, dict[str, Any]]


class BuildsScreen(Spawning, Page[str | None]):
    """Returns the name of the build to switch to, "" for the page of first steps, None when it was closed. cost: a sentence on
    what switching now means. add: ask for a folder at once.

    busy: an answer is running, so only names are shown: reading a build's headers would wait for it.
    """

    BINDINGS = [Binding("escape", "close", "Close", show=False)]
    LIST_KEYS = {"i": "info", "v": "verify", "a": "add", "x": "remove", "w": "welcome"}

    def __init__(self, host: EngineHost, store: Store, cost: str, busy: bool = False, add: bool = False):
        super().__init__()
        self._host, self._store, self._cost, self._busy = host, store, cost, busy
        self._rows: list[Row] = []
        self._add_at_once = add

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog dialog-full"):
            yield Static("Builds", classes="dialog-title")
            yield OptionList(id="list", markup=False, compact=True)
            yield Static("", markup=False, id="build-cost")
            yield Foot("enter switch", "a add", "i info", "v verify", "x remove (files stay)", "w first steps")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._reload()
        if self._add_at_once:
            self._add()

    def on_resize(self) -> None:
        self._show()

    def _reload(self) -> None:
        self.spawn(self._load(), "builds")

    async def _load(self) -> None:
        try:
            self._rows = await asyncio.to_thread(self._read)
        except (StoreError, EngineError, OSError) as error:
            self.notify(visible_line(str(error)), severity="error", markup=False)
            return
        self._show()

    def _read(self) -> list[Row]:
        rows, receipts = [], Receipts(self._host.settings.paths.state)
        for ref in self._host.builds():
            view, problem = None, ""
            try:
                if not self._busy or self._host.loaded(ref):
                    view = self._host.probe(ref)
            except (EngineError, OSError) as error:
                problem = str(error)
            measured = receipts.figures(view.fingerprint) if view is not None else {}
            rows.append(Row(ref, view, view.bytes if view is not None else 0, problem, self._host.loaded(ref), measured))
        return rows

    def _show(self) -> None:
        if not self.query(OptionList):
            # The page was closed while the folders were read.
            return
        options = self.query_one(OptionList)
        kept = options.highlighted
        options.clear_options()
        width = max(20, options.size.width - 4)
        options.add_options([Option(self._line(row, width), id=row.ref.name) for row in self._rows])
        loaded = next((index for index, row in enumerate(self._rows) if row.loaded), 0)
        if self._rows:
            options.highlighted = loaded if kept is None else min(kept, len(self._rows) - 1)
        self._show_cost()

    def _show_cost(self) -> None:
        """What Enter on this line costs; the build that is loaded costs nothing."""
        row = self._chosen()
        self.query_one("#build-cost", Static).update("" if row is None or row.loaded else visible_line(self._cost))

    def on_option_list_option_highlighted(self) -> None:
        self._show_cost()

    def _line(self, row: Row, width: int) -> Text:
        mark = "! " if row.problem else "> " if row.loaded else "  "
        # As wide as the longest name needs, up to a third: the figures are what the list is for.
        column = min(max(12, width // 3), max(2 + cell_len(visible_line(one.ref.name)) for one in self._rows))
        name = crop_cells(mark + visible_line(row.ref.name), column)
        name += " " * (column - cell_len(name) + 2)
        if row.problem:
            rest = visible_line(row.problem)
        elif row.view is None:
            rest = "size and fit when the answer has ended"
        else:
            admission = row.view.admission
            verdict = {"no": "does not fit"}.get(admission.verdict, admission.verdict) if admission is not None else ""
            parts = [size(row.bytes).rjust(7), verdict, "loaded" if row.loaded else "", row.view.family]
            if context := admission.context if admission is not None else row.view.context:
                parts.append(f"ctx {context:,}")
            if row.view.drafter:
                parts.append(f"draft {row.view.drafter}")
            if row.ref.embedded:
                parts.append("embedded")
            parts += [figure["short"] for figure in row.measured.values()]
            rest = "   ".join(part for part in parts if part)
        return Text(name + crop_cells(rest, width - cell_len(name)), no_wrap=True)

    def _chosen(self) -> Row | None:
        index = self.query_one(OptionList).highlighted
        return self._rows[index] if index is not None and index < len(self._rows) else None

    def on_option_list_option_selected(self) -> None:
        row = self._chosen()
        if row is None:
            return
        if row.problem:
            self.app.push_screen(TextScreen(row.ref.name, row.problem))
        else:
            self.dismiss(row.ref.name)

    def on_key(self, event) -> None:
        if event.key in self.LIST_KEYS:
            event.stop()
            getattr(self, f"_{self.LIST_KEYS[event.key]}")()

    def action_close(self) -> None:
        self.dismiss(None)

    def _welcome(self) -> None:
        self.dismiss("")

    def _info(self) -> None:
        row = self._chosen()
        if row is None:
            return
        lines = [("folder", str(row.ref.folder)), ("size", size(row.bytes))]
        if row.view is not None:
            lines += [
                ("family", row.view.family), ("fingerprint", row.view.fingerprint),
                ("resident", size(row.view.resident_bytes)), ("context", f"{row.view.context or 0:,}"), ("drafter", row.view.drafter or "none"),
            ]  # fmt: skip
            if (admission := row.view.admission) is not None:
                lines += [("fits", admission.verdict), ("admitted", f"{admission.context:,} tokens"), ("memory", admission.words)]
            lines += [(name, str(value)) for name, value in row.view.defaults.items()]
            lines += [(arm, figure["summary"]) for arm, figure in row.measured.items()] or [("measured", f"dsv41chat eval ppl {row.ref.name}")]
        if row.problem:
            lines.append(("problem", row.problem))
        self.app.push_screen(TextScreen(row.ref.name, "\n".join(f"{name:<12} {value}" for name, value in lines)))

    def _verify(self) -> None:
        row = self._chosen()
        if row is not None:
            self.spawn(self._verify_row(row), "verify")

    async def _verify_row(self, row: Row) -> None:
        """Reads the headers again, whatever was known about them."""
        try:
            view = await asyncio.to_thread(self._host.probe, row.ref)
            if not view.has_tokenizer:
                raise PackIncomplete(f"{row.ref.name} has no tokenizer.json, so it cannot chat.")
            await asyncio.to_thread(self._host.load_tokenizer, row.ref)
        except (EngineError, OSError) as error:
            self.app.push_screen(TextScreen(f"{row.ref.name}: damaged or incomplete", str(error)))
            return
        text = "Shards, shapes, config and tokenizer are complete.\nAll checksums: dsv41chat models verify " + row.ref.name + " --full"
        self.app.push_screen(TextScreen(row.ref.name, text))

    def _add(self) -> None:
        self.app.push_screen(LineScreen("Folder of a build (Tab completes)", complete=True), self._added)

    def _added(self, folder: str | None) -> None:
        if folder:
            self.spawn(self._register(Path(folder).expanduser()), "add")

    async def _register(self, path: Path) -> None:
        try:
            view = await asyncio.to_thread(self._host.probe, BuildRef(path.name, path))
            self._store.builds.add(path, family=view.family, fingerprint=view.fingerprint)
        except (EngineError, StoreError, OSError) as error:
            self.app.push_screen(TextScreen("This folder cannot be used", str(error)))
            return
        self._reload()

    def _remove(self) -> None:
        row = self._chosen()
        if row is None or not row.ref.registered:
            self.notify("Only builds that were added can be removed from the list.", markup=False)
            return
        question = f"Remove {row.ref.name} from the list? Its files stay where they are."
        self.app.push_screen(AskScreen(question, [("no", "keep"), ("yes", "remove")]), lambda answer: self._removed(row, answer))

    def _removed(self, row: Row, answer: str | None) -> None:
        if answer == "yes":
            try:
                self._store.builds.remove(row.ref.name)
            except StoreError as error:
                self.notify(visible_line(str(error)), severity="error", markup=False)
            self._reload()

