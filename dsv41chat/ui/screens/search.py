"""Search in the text of all conversations, grouped by conversation."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from dsv41chat.store import SearchHit, Store, StoreError
from dsv41chat.store.search import Place
from dsv41chat.ui.present import age
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.screens.dialogs import Page
from dsv41chat.ui.spawn import Spawning
from dsv41chat.ui.widgets.field import Field

DELAY_S = 0.150
MORE = "more"


def hit_line(hit: SearchHit, indent: str = "  ") -> Text:
    """Who, when, and a line of context with the match marked."""
    line = Text(f"{indent}{'you' if hit.role == 'user' else 'answer'} {age(hit.created)}  ", no_wrap=True, overflow="ellipsis", style="dim")
    excerpt = Text(visible_line(hit.excerpt))
    excerpt.stylize("reverse", hit.start, hit.end)
    return line.append_text(excerpt)


class SearchScreen(Spawning, Page[tuple[str, str, str] | None]):
    """Returns (conversation id, message id, query) of the chosen place, None when it was closed."""

    BINDINGS = [Binding("escape", "close", "Close", show=False), Binding("down", "to_list", "To the list", show=False)]

    def __init__(self, store: Store, query: str = ""):
        super().__init__()
        self._store, self._query = store, query
        self._hits: list[SearchHit] = []
        self._next: Place | None = None
        self._cancel = threading.Event()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog dialog-full"):
            yield Static("Search everywhere", classes="dialog-title", id="search-title")
            yield Field(self._query, placeholder="words of any message", compact=True)
            yield OptionList(id="list", markup=False, compact=True)
            yield Static("enter opens the message   esc closes", classes="dialog-foot")

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        if self._query:
            self._search()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._query = event.value
        self._search()

    def _search(self) -> None:
        self._cancel.set()
        self._cancel = threading.Event()
        self.spawn(self._find(self._query, None, self._cancel), "search")

    async def _find(self, query: str, before: Place | None, cancel: threading.Event) -> None:
        if before is None:
            await asyncio.sleep(DELAY_S)
            self._hits = []
        loop = asyncio.get_running_loop()
        say = self._say
        searching = lambda: loop.call_soon_threadsafe(say, "Search everywhere  (searching the whole text, esc ends it)")
        try:
            page = await asyncio.to_thread(self._store.search, query, before=before, cancel=cancel.is_set, on_scan=searching)
        except StoreError as error:
            say(visible_line(str(error)))
            return
        if cancel.is_set():
            return
        kept = len(self._hits)
        self._hits += page.hits
        self._next = page.next
        say(f"Search everywhere  ({len(self._hits)}{'+' if page.next else ''})")
        self._show(kept if before is not None else 0)

    def _say(self, text: str) -> None:
        for title in self.query("#search-title").results(Static):
            title.update(text)

    def _show(self, highlight: int) -> None:
        options: list[Option] = []
        groups: dict[str, list[tuple[int, Any]]] = {}
        for number, hit in enumerate(self._hits):
            groups.setdefault(hit.conversation_id, []).append((number, hit))
        for hits in groups.values():
            options.append(Option(Text(visible_line(hits[0][1].title) or "(empty)", style="bold"), disabled=True))
            for number, hit in hits:
                options.append(Option(hit_line(hit), id=str(number)))
        if self._next is not None:
            options.append(Option("  more …", id=MORE))
        if not self.query(OptionList):
            # The page was closed while the store was asked.
            return
        listing = self.query_one(OptionList)
        listing.clear_options()
        listing.add_options(options)
        index = next((index for index, option in enumerate(options) if option.id == str(highlight)), None)
        listing.highlighted = index

    def on_input_submitted(self) -> None:
        if self._hits:
            self._choose(0)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option.id == MORE:
            self.spawn(self._find(self._query, self._next, self._cancel), "search")
        else:
            self._choose(int(event.option.id))

    def _choose(self, number: int) -> None:
        hit = self._hits[number]
        self.dismiss((hit.conversation_id, hit.message_id, self._query.strip()))

    def action_to_list(self) -> None:
        self.query_one(OptionList).focus()

    def action_close(self) -> None:
        self._cancel.set()
        self.dismiss(None)
