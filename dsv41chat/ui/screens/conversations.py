"""The list of conversations: filter by title at once, then by text; open, rename, pin, delete, restore, export."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from dsv41chat.store import SearchHit, Store, StoreError
from dsv41chat.ui.present import age
from dsv41chat.ui.render.wrap import crop_cells
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.screens.dialogs import AskScreen, LineScreen, Page, TextScreen
from dsv41chat.ui.screens.search import hit_line
from dsv41chat.ui.spawn import Spawning
from dsv41chat.ui.units import size
from dsv41chat.ui.widgets.field import Field
from dsv41chat.ui.widgets.foot import Foot

FULL_TEXT_DELAY_S = 0.150
PREVIEWED = 6
HITS_EACH = 3  # lines of context under a conversation
FOOT = (
    "enter open", "/ filter", "n new", "r rename", "p pin", "e export", "d delete", "u undo", "tab preview", "s sort", "b build",
)  # fmt: skip
APART = "Only those in memory. All others are on the disk, and in this list again when it can be written."
SORTS = ("recent", "title", "created", "size")


class _Rows(OptionList):
    """The list, which gives / to the filter at once: the keys behind it may wait already, and go to whatever has the focus by then."""

    def _forward_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key) and event.key == "slash":
            self.screen.set_focus(self.screen.query_one(Input))
        else:
            super()._forward_event(event)


class ConversationsScreen(Spawning, Page[tuple[str, ...] | None]):
    """Returns ("open", id), ("message", id, message id, query), ("new", ""), ("export", id) or None.

    A filter shows the newest places in the text under each conversation; choosing one opens its message. cached: bytes of stored
    states per conversation, for this build. renamed: told of each conversation with another title. apart: the store is in memory because
    the disk refused, and the conversations of the disk are not in it.
    """

    BINDINGS = [
        Binding("escape", "close", "Close", show=False),
        Binding("down", "to_list", "To the list", show=False),
        Binding("tab", "preview", "Preview", show=False, priority=True),
    ]
    LIST_KEYS = {
        "n": "new", "r": "rename", "p": "pin", "e": "export", "d": "delete", "delete": "delete", "u": "undelete", "s": "next_sort",
        "b": "by_build",
    }  # fmt: skip

    def __init__(self, store: Store, current: str | None, renamed: Callable[[str], None], *, cached: Callable[[], dict[str, int]], apart: bool):
        super().__init__()
        self._apart = apart
        self._store, self._current, self._tell_renamed, self._read_cached = store, current, renamed, cached
        self._query = ""
        self._cached: dict[str, int] = {}
        self._rows: list[Any] = []
        self._hits: dict[str, list[SearchHit]] = {}
        self._order = 0
        self._build: str | None = None
        self._deleted: list[str] = []
        self._early: list[events.Key] | None = []  # keys that came before there was a list; None once there is one
        self._known = 0  # what the lines answer of the filter: 1 by titles, 2 by the text too
        self._enter = False  # Enter came in the filter before the lines answered it

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog dialog-full"):
            with Horizontal(classes="dialog-bar"):
                yield Static("Conversations", id="list-title", markup=False)
                yield Static("", id="list-sort", markup=False)
            if self._apart:
                yield Static(APART, classes="dialog-foot")
            yield Field(self._query, placeholder="/ filters by title and text", id="list-filter", compact=True)
            yield _Rows(id="list", markup=False, compact=True)
            yield Foot(*FOOT)

    def on_mount(self) -> None:
        # Not by focus(), which takes its turn behind the keys that wait.
        self.set_focus(self.query_one(Input if self._query else OptionList))
        early, self._early = self._early or [], None
        for key in early:
            (self.focused or self)._forward_event(key)
        self._reload()
        self.spawn(self._look_at_states(), "states")

    def _forward_event(self, event: events.Event) -> None:
        """Keys typed behind the one that opens the page are for its list, which may not be there yet."""
        if isinstance(event, events.Key) and self._early is not None:
            self._early.append(event)
        else:
            super()._forward_event(event)

    def on_resize(self) -> None:
        self._show()

    # Rows ---------------------------------------------------------------------------------------------------------------

    def _reload(self) -> None:
        self.spawn(self._load(), "list")

    async def _look_at_states(self) -> None:
        self._cached = await asyncio.to_thread(self._read_cached)
        self._show()

    async def _load(self) -> None:
        """Titles first; after a pause the text too, unless another key came."""
        query, sort, build = self._query.strip(), SORTS[self._order], self._build
        find = lambda **options: self._store.list_conversations(query or None, 1000, sort=sort, build=build, pinned_first=True, **options)
        try:
            self._rows, self._hits = await asyncio.to_thread(find, titles_only=True), {}
            self._answered(1 if query else 2)
            if query:
                await asyncio.sleep(FULL_TEXT_DELAY_S)
                rows = await asyncio.to_thread(find)
                hits = (await asyncio.to_thread(self._store.search, query)).hits
                self._rows, self._hits = rows, _by_conversation(hits)
                self._answered(2)
        except StoreError as error:
            self.notify(visible_line(str(error)), severity="error", markup=False)

    def _answered(self, known: int) -> None:
        """Shows what the filter found; an Enter that came before it opens the first line now."""
        self._known = known
        self._show()
        self._open_if_found()

    def _show(self) -> None:
        if not self.query(OptionList):
            # The page was closed while the store was asked.
            return
        options = self.query_one(OptionList)
        kept = self._chosen()
        options.clear_options()
        width = max(20, options.size.width - 4)
        made = []
        for row in self._rows:
            made.append(Option(self._row(row, width), id=row.id))
            made += [Option(hit_line(hit, "    "), id=f"{row.id}/{hit.message_id}") for hit in self._hits.get(row.id, ())]
        options.add_options(made)
        ids = [option.id for option in made]
        wanted = next((one for one in (kept, kept and kept.partition("/")[0], self._current) if one in ids), None)
        options.highlighted = (ids.index(wanted) if wanted is not None else 0) if ids else None
        self.query_one("#list-title", Static).update(f"Conversations  ({len(self._rows)})")
        build = self._build or "any"
        self.query_one("#list-sort", Static).update(f"sort: {SORTS[self._order]}   build: {visible_line(build)}")

    def _row(self, row: Any, width: int) -> Text:
        right = [f"{row.messages} msg", age(row.updated).rjust(9)] if width >= 50 else [age(row.updated)]
        if width >= 60:
            right.insert(1, f"{row.context_used / 1000:5.1f}k ctx" if row.context_used else "         ")
        if width >= 70:
            stored = self._cached.get(row.id)
            right.insert(2, f"cached {size(stored)}".ljust(14) if stored else "-".ljust(14))
        if width >= 96:
            right.insert(3, crop_cells(visible_line(row.build_name or "-"), 22).ljust(22))
        tail = "  ".join(right)
        room = width - cell_len(tail) - 4
        mark = "* " if row.pinned else "  "
        title = crop_cells(mark + (visible_line(row.title) or "(empty)"), room)
        return Text(title + " " * (room - cell_len(title) + 2) + tail, no_wrap=True, overflow="ellipsis")

    def _highlighted(self) -> str | None:
        """The conversation of the highlighted line."""
        chosen = self._chosen()
        return chosen and chosen.partition("/")[0]

    def _chosen(self) -> str | None:
        """The highlighted line: a conversation, or a conversation, a slash and one of its messages."""
        options = self.query_one(OptionList)
        if options.highlighted is None or options.highlighted >= options.option_count:
            return None
        return options.get_option_at_index(options.highlighted).id

    # Keys ---------------------------------------------------------------------------------------------------------------

    def on_input_changed(self, event: Input.Changed) -> None:
        self._query, self._known, self._enter = event.value, 0, False
        self._reload()

    def on_input_submitted(self) -> None:
        self._enter = True
        self._open_if_found()

    def _open_if_found(self) -> None:
        """What Enter in the filter opens must answer to the whole filter: with no such title the text is waited for."""
        if self._enter and (self._known == 2 or self._known == 1 and self._rows):
            self._enter = False
            if chosen := self._chosen():
                self._open(chosen)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._open(event.option.id)

    def _open(self, chosen: str) -> None:
        """Opens a place in the text; or a conversation, at its newest place when only its text answers to the filter."""
        conversation_id, _, message_id = chosen.partition("/")
        row, query = self._row_of(conversation_id), self._query.strip()
        if not message_id and query and row is not None and query.casefold() not in row.title.casefold():
            try:
                hits = self._hits.get(conversation_id) or self._store.search(query, limit=1, conversation_id=conversation_id).hits
            except StoreError:
                hits = ()
            message_id = hits[0].message_id if hits else ""
        self.dismiss(("message", conversation_id, message_id, query) if message_id else ("open", conversation_id))

    def on_key(self, event) -> None:
        if isinstance(self.focused, OptionList) and event.key in self.LIST_KEYS:
            event.stop()
            getattr(self, f"_{self.LIST_KEYS[event.key]}")()

    def action_close(self) -> None:
        self.dismiss(None)

    def action_to_list(self) -> None:
        self.query_one(OptionList).focus()

    def action_preview(self) -> None:
        """The last messages of the highlighted conversation, without opening it."""
        row = self._row_of(self._highlighted())
        if row is None or row.leaf_id is None:
            return
        try:
            path = self._store.path_to(row.leaf_id)
        except StoreError as error:
            self.notify(visible_line(str(error)), severity="error", markup=False)
            return
        who = lambda one: "you" if one.role == "user" else one.build_name or ("answer" if one.role == "assistant" else one.role)
        parts = [f"{who(one)}\n{one.text}" for one in path[-PREVIEWED:]]
        self.app.push_screen(TextScreen(row.title, "\n\n".join(parts)))

    def _new(self) -> None:
        self.dismiss(("new", ""))

    def _export(self) -> None:
        if chosen := self._highlighted():
            self.dismiss(("export", chosen))

    def _next_sort(self) -> None:
        self._order = (self._order + 1) % len(SORTS)
        self._reload()

    def _by_build(self) -> None:
        """Walks through the builds of the list, then back to any."""
        names = sorted({row.build_name for row in self._store.list_conversations(None, 1000) if row.build_name})
        self._build = next(iter(names), None) if self._build is None else next((name for name in names if name > self._build), None)
        self._reload()

    def _pin(self) -> None:
        if row := self._row_of(self._highlighted()):
            self._try(self._store.pin, row.id, not row.pinned)

    def _rename(self) -> None:
        if row := self._row_of(self._highlighted()):
            self.app.push_screen(LineScreen("New title (empty: from the first message)", row.title), lambda title: self._renamed(row.id, title))

    def _renamed(self, conversation_id: str, title: str | None) -> None:
        if title is not None and self._try(self._store.rename, conversation_id, title):
            self._tell_renamed(conversation_id)

    def _delete(self) -> None:
        if row := self._row_of(self._highlighted()):
            question = f'Delete "{row.title}"? It can be restored for some time (u).'
            self.app.push_screen(AskScreen(question, [("yes", "delete"), ("no", "keep")]), lambda answer: self._deleted_if(row.id, answer))

    def _deleted_if(self, conversation_id: str, answer: str | None) -> None:
        if answer == "yes" and self._try(self._store.delete, conversation_id):
            self._deleted.append(conversation_id)

    def _undelete(self) -> None:
        if not self._deleted:
            found = self._store.list_conversations(None, 1, deleted=True)
            self._deleted = [row.id for row in found]
        if self._deleted:
            self._try(self._store.undelete, self._deleted.pop())

    def _row_of(self, conversation_id: str | None) -> Any:
        return next((row for row in self._rows if row.id == conversation_id), None)

    def _try(self, action, *args) -> bool:
        try:
            action(*args)
        except StoreError as error:
            self.notify(visible_line(str(error)), severity="error", markup=False)
            return False
        self._reload()
        return True


def _by_conversation(hits: Iterable[SearchHit]) -> dict[str, list[SearchHit]]:
    """The newest places of each conversation."""
    found: dict[str, list[SearchHit]] = {}
    for hit in hits:
        of_one = found.setdefault(hit.conversation_id, [])
        if len(of_one) < HITS_EACH:
            of_one.append(hit)
    return found
