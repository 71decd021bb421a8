"""First steps: a page for somebody without a build of their own. What there is to do, and what this machine could hold."""

from __future__ import annotations

import asyncio

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from dsv41chat.engine.errors import EngineError
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.sanitize import visible, visible_line
from dsv41chat.ui.screens.dialogs import Page
from dsv41chat.ui.spawn import Spawning

CHOICES = (
    ("add", "1  I have a build on disk: choose its folder"),
    ("convert", "2  I have an original checkpoint: the command that converts it, sizes"),
    ("look", "3  Look around first: the embedded model is small, and its answers are real"),
)


class WelcomeScreen(Spawning, Page[str | None]):
    """Returns "add", "convert" or None. problem: why nothing can be loaded here, in one line."""

    BINDINGS = [Binding("escape", "close", "Close", show=False), *(Binding(str(n), f"choose({n - 1})", show=False) for n in (1, 2, 3))]

    def __init__(self, host: EngineHost, problem: str | None = None):
        super().__init__()
        self._host, self._problem = host, problem

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog dialog-page"):
            yield Static("Welcome. First steps", classes="dialog-title")
            if self._problem:
                yield Static(visible_line(self._problem) + "\nReading, searching and exporting work without one.", markup=False)
            yield OptionList(*(Option(label, id=name) for name, label in CHOICES), markup=False, compact=True)
            yield Static("Looking at this machine ..." if not self._problem else "", id="machine", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        if not self._problem:
            self.spawn(self._look(), "machine")

    async def _look(self) -> None:
        """The builds that fit, one after the other: each waits for its turn on the engine's thread."""
        fitting: list[str] = []
        try:
            text = await asyncio.to_thread(self._host.machine)
            for name, recipe in self._host.PUBLISHED:
                if found := await asyncio.to_thread(self._host.published, name, recipe):
                    fitting.append(found)
                listed = ", ".join(fitting) or "none of the published ones"
                for line in self.query("#machine").results(Static):
                    line.update(visible(f"{text}\nFits: {listed} (dsv41chat models fits)"))
        except (EngineError, RuntimeError):
            # No back end, or the program is leaving: the page is useful without these lines.
            return

    def action_choose(self, number: int) -> None:
        name = CHOICES[number][0]
        self.dismiss(None if name == "look" else name)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(None if event.option.id == "look" else event.option.id)

    def action_close(self) -> None:
        self.dismiss(None)


CONVERT = """\
A release as published (fp8 and fp4) loads as it is: choice 1. Smaller forms are made from it, layer by layer, with \
at most 1 GiB of memory; the command says how much disk it needs and asks before it writes.

  dsv41chat models convert SRC DST --recipe mixed-4_8     experts in 4 bits, the rest in 8
  dsv41chat models convert SRC DST --recipe mixed-2.4     about 2.4 bits a weight
  dsv41chat models convert SRC DST --recipe native        lossless

It goes on after a stop with --resume. `dsv41chat models fits` lists what each needs and what of it fits here.
Nothing is ever downloaded."""
