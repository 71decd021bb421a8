"""The chat screen: layout, opening conversations, and what the keys do that concern the screen as a whole."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Static

from dsv41chat.engine.errors import EngineError
from dsv41chat.store import StoreError
from dsv41chat.ui.builds import card_line
from dsv41chat.ui.keymap import CHAT, COMPOSER, GLOBAL, TRANSCRIPT, bindings, shown_keys
from dsv41chat.ui.messages import Hint
from dsv41chat.ui.present import entry_of, notice, readonly_reason
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.screens.chat_drafts import DraftActions
from dsv41chat.ui.screens.chat_files import FileActions
from dsv41chat.ui.screens.chat_messages import MessageActions
from dsv41chat.ui.screens.chat_settings import SettingsActions
from dsv41chat.ui.screens.chat_tools import ToolActions
from dsv41chat.ui.screens.chat_trouble import TroubleActions
from dsv41chat.ui.screens.chat_turns import WAITING, TurnActions
from dsv41chat.ui.screens.chat_watch import WatchActions
from dsv41chat.ui.screens.dialogs import AskScreen, LineScreen, TextScreen
from dsv41chat.ui.spawn import Spawning
from dsv41chat.ui.turn_events import ConversationView
from dsv41chat.ui.widgets.composer import Composer
from dsv41chat.ui.widgets.find_bar import FindBar
from dsv41chat.ui.widgets.sidebar import Sidebar
from dsv41chat.ui.widgets.status_line import HeaderLine, KeyLine, StatusLine
from dsv41chat.ui.widgets.transcript import Transcript

WIDE, NORMAL, SIDEBAR_MIN = 120, 80, 90
MEMORY_S = 3.0
MANY_MESSAGES = 500


class ChatTranscript(Transcript):
    BINDINGS = bindings(TRANSCRIPT)


@dataclass
class Opened:
    """What is read from the store when a conversation is opened."""

    view: Any
    forks: dict[str, tuple[int, int]]
    history: list[str]
    draft: Any
    queue: list
    build: str


def _figures(messages: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    """(the usage of the newest answer that has one, or nothing; the texts behind it)."""
    known = next((n for n in reversed(range(len(messages))) if messages[n].role == "assistant" and messages[n].usage), None)
    if known is None:
        return {}, [message.text for message in messages]
    return messages[known].usage, [message.text for message in messages[known + 1 :]]


class ChatScreen(
    DraftActions, FileActions, TurnActions, MessageActions, ToolActions, SettingsActions, TroubleActions, WatchActions, Spawning, Screen
):  # fmt: skip
    """One conversation at a time; which one may change while the screen stays."""

    BINDINGS = bindings(CHAT) + bindings(GLOBAL)
    AUTO_FOCUS = "#composer"

    def __init__(self) -> None:
        super().__init__()
        self.conversation: Any = None
        self.leaf_id: str | None = None
        self.readonly = False
        self.holder: int | None = None  # the process that writes in this conversation while it is read-only here
        # Until what the command line asked for is on screen, Enter waits: its text belongs into that conversation.
        self.starting, self._send_early = True, False
        self.forks: dict[str, tuple[int, int]] = {}
        self._sidebar_wanted: bool | None = None
        self._header_build = ""
        self._view: dict = {}
        self.init_drafts()
        self.init_files()
        self.init_turns()
        self.init_messages()
        self.init_tools()
        self.init_settings()
        self.init_trouble()

    def compose(self) -> ComposeResult:
        yield HeaderLine(id="header")
        with Horizontal(id="middle"):
            yield Sidebar(id="sidebar")
            with Vertical(id="main"):
                yield ChatTranscript(id="transcript")
                yield Static("▁▁ new text below · ctrl+End ▁▁", id="badge", markup=False)
        yield Static("", id="queue", markup=False)
        yield Static("", id="above", markup=False)
        yield FindBar(id="find")
        yield Composer(burst_paste=self.app.settings.ui.burst_paste, id="composer")
        yield StatusLine(id="status")
        yield KeyLine(id="keys")

    @property
    def transcript(self) -> Transcript:
        return self.query_one("#transcript", Transcript)

    @property
    def composer(self) -> Composer:
        return self.query_one("#composer", Composer)

    def on_mount(self) -> None:
        self.transcript.configure(wrap_code=self.app.settings.ui.wrap_code, math=self.app.settings.ui.math)
        # A blinking caret is motion too, and the only cost of an idle screen.
        self.composer.cursor_blink = not self.app.settings.ui.reduced_motion
        self.show_header()
        self.show_status()
        self.show_keys()
        self.set_interval(MEMORY_S, self._look_at_memory)
        self.init_watch()
        if self.app.unsaved not in ("", "memory"):
            # It could not be opened at the start.
            self.try_disk_later()
        self.spawn(self.app.start_up(self), "open")

    # Opening ------------------------------------------------------------------------------------------------------------

    async def open_conversation(self, ref: str | ConversationView, leaf: str | None = None, message: str | None = None) -> bool:
        """Shows a stored conversation (a reference, or a view of it). message: select this one. Returns whether it was opened."""
        if self.pump.running:
            self.tell("Stop the running answer first (esc), then open another conversation.", "warning")
            return False
        try:
            opened = await asyncio.to_thread(self._read, ref, leaf)
        except StoreError as error:
            self.tell(str(error), "error")
            return False
        view = opened.view
        same = self.conversation is not None and self.conversation.id == view.conversation.id
        # Draft and queue belong to the process that writes.
        mine = view.holder is None and (not same or self.holder is not None)
        if not same:
            self._leave()
            self.forget_found()
        self.conversation, self.readonly, self.forks = view.conversation, view.readonly or self.app.readonly, opened.forks
        self.leaf_id = view.messages[-1].id if view.messages else None
        self.watch_other(view.holder, self.leaf_id == view.conversation.leaf_id)
        entries = [self.make_entry(item) for item in view.messages]
        queue = opened.queue if view.holder is None else []
        entries += self._opening_notices(view, queue)
        self.transcript.set_entries(entries)
        self._restore_view(view.conversation.view)
        self.composer.prompts = list(reversed(opened.history))
        if mine or not same:
            self.restore_draft(opened.draft if mine else None, self.composer.text if self.starting or same else "", apart=same)
        self.show_queue(queue)
        if not same:
            self._queued_loading = False
            if queue and not self.readonly:
                self.tell_queue()
        self._status_of(view.messages)
        self._header_build = opened.build
        self.show_header()
        self.query_one(Sidebar).reload(self.conversation.id)
        if message is not None:
            self.select_message(message)
        if len(entries) > MANY_MESSAGES:
            # A full collection would look at every message again, and stop the screen for a tenth of a second each time.
            gc.freeze()
        if not same:
            self.prepare()
        return True

    def _read(self, ref: str | ConversationView, leaf: str | None) -> Opened:
        store = self.app.store
        view = self.app.controller.open(ref, leaf=leaf) if isinstance(ref, str) else ref
        key = view.conversation.id
        try:
            build = self.app.host.resolve(self.app.build, view.conversation).name
        except EngineError:
            # Whoever sends a message is told.
            build = ""
        return Opened(view, store.forks(key), store.prompt_history(key), store.draft(key), store.queued(key), build)

    def make_entry(self, message: Any):
        entry = entry_of(message, self.branch_of(message.id))
        entry.thinking_view = self.thinking_view
        return entry

    def branch_of(self, message_id: str) -> str:
        place = self.forks.get(message_id)
        return f"{place[0]}/{place[1]}" if place else ""

    def _key(self, action: str) -> str:
        return self.app.shown_key(action)

    def _opening_notices(self, view: Any, queue: list) -> list:
        notices = []
        if self.readonly:
            remedy = ' When that process is gone: palette, "Take over".' if view.holder is not None else ""
            notices.append(notice(visible_line(readonly_reason(view.holder, self.app.store)) + remedy, error=True))
        return notices + self._waiting(view.messages[-1] if view.messages else None, queue)

    def _waiting(self, last: Any, queue: list) -> list:
        """The notice that says what of the branch is not answered, or not to its end, and what is not sent; in a list, empty for nothing.

        last: the last message of the branch. What can be done is said only where it can.
        """
        waiting, again = [], self._key("chat.regenerate")
        if last is not None and last.state == "interrupted":
            ways = "" if self.readonly else f" {again} answers again; Tab, then {self._key('message.edit')}, continues it."
            waiting.append(f"The last answer was interrupted; what had arrived is kept.{ways}")
        elif last is not None and last.role == "user" and last.id != self.editing and not self.readonly:
            waiting.append(f"Not answered: {again} answers it.")
        if queue and not self.readonly:
            waiting.append(f'{len(queue)} queued: {self._key("app.palette")}, "Send queued messages" sends {"it" if len(queue) == 1 else "them"}.')
        return [notice(" ".join(waiting), WAITING)] if waiting else []

    def show_waiting(self) -> None:
        """Says anew what waits at the end of the branch on screen: after a stop, an edit that was cancelled, another queue, news of a writer."""
        for entry in [entry for entry in self.transcript.entries if entry.key == WAITING]:
            self.transcript.drop(entry)
        last = next((entry.message for entry in reversed(self.transcript.entries) if entry.message is not None), None)
        if last is not None and last.id == self.leaf_id:
            for line in self._waiting(last, self.queue):
                self.transcript.append(line)

    def _status_of(self, messages: Sequence[Any]) -> None:
        """The context figures of the newest answer, until a turn brings its own."""
        usage = _figures(messages)[0]
        self.status.context_used = usage.get("context_used", 0)
        self.status.context_limit = usage.get("context_limit", self.status.context_limit)
        self.status.cached = None
        self.status.phase = "idle"
        self.show_status()
        self.count_context()

    def count_context(self) -> None:
        """Has counted what stands behind the newest answer with figures: its turn was killed, or failed, or has not begun."""
        usage, texts = _figures([entry.message for entry in self.transcript.entries if entry.message is not None])
        if not texts or self.app.host.engine is None or self.pump.running:
            return
        if not usage:
            texts.append(self.conversation.settings.get("system") or "")
        self.spawn(self._count_context(usage.get("context_used", 0), texts), "count")

    async def _count_context(self, known: int, texts: list[str]) -> None:
        leaf = self.leaf_id
        over = lambda: self.leaf_id != leaf or self.pump.running
        try:
            tokens = await asyncio.to_thread(lambda: sum(self.app.count_tokens(text, over) for text in texts))
        except EngineError:
            return
        if not over():
            self.status.context_used = known + tokens
            self.show_status()

    def save_view(self) -> None:
        """Stores scroll position, folds and marks of the conversation on screen."""
        if self.conversation is None or self.readonly:
            return
        entries = [entry for entry in self.transcript.entries if entry.message is not None]
        view = {
            "place": None if self.transcript.follow else self.transcript.place(),
            "folds": {entry.key: entry.thinking_view for entry in entries if entry.thinking and entry.thinking_view != self.thinking_view},
            "marks": [entry.key for entry in entries if entry.mark],
        }
        if view == self._view:
            return
        try:
            self.app.store.set_view(self.conversation.id, view)
            self._view = view
        except StoreError as error:
            self.app.not_saved(error)

    def _restore_view(self, view: dict) -> None:
        self._view = view
        folds, marks = view.get("folds", {}), set(view.get("marks", ()))
        for entry in self.transcript.entries:
            if entry.key in folds:
                entry.thinking_view = folds[entry.key]
            entry.mark = entry.key in marks
        if view.get("place"):
            self.transcript.go_to(*view["place"])

    def _leave(self) -> None:
        """Gives the conversation on screen back."""
        self.save_draft(now=True)
        self.save_view()
        if self.conversation is not None and not self.readonly:
            try:
                self.app.store.unlock(self.conversation.id)
            except StoreError:
                # The lock ends with this process anyway.
                pass

    def clear_conversation(self) -> None:
        """An empty screen for a conversation that does not exist yet."""
        self._leave()
        self.conversation, self.leaf_id, self.readonly, self.forks = None, None, self.app.readonly, {}
        self.watch_other(None)
        self.transcript.set_entries([])
        self.end_edit()
        self.restore_first_draft()
        self.show_queue([])
        self._status_of(())
        self.show_header()
        self.welcome()
        self.query_one(Sidebar).reload(None)

    def welcome(self) -> None:
        """The line of an empty conversation: which build will answer."""
        try:
            ref = self.app.host.resolve(self.app.build)
        except EngineError as error:
            self.transcript.append(notice(f"{error} {error.hint}".strip(), error=True))
            return
        self._header_build = ref.name
        self.show_header()
        about = card_line(ref.folder) or ("The small embedded model." if ref.embedded else "")
        line = f"{ref.name} answers. {about}".rstrip()
        if ref.embedded:
            line += " Add a real build: F2, or dsv41chat models add DIR"
        self.transcript.append(notice(visible_line(line), "welcome"))

    # Lines around the transcript ----------------------------------------------------------------------------------------

    def show_header(self) -> None:
        title = (self.conversation.title if self.conversation else "") or "New conversation"
        view = self.app.host.view
        name = view.name if view is not None else self._header_build
        right = [name]
        if view is not None or (self.conversation is not None and self.conversation.settings):
            # Before that the build's own default is not known.
            effort = self.app.controller.options(self._record(), view).effort
            right.append("" if effort == "off" else f"effort {effort}")
        if (entry := next((item for item in reversed(self.transcript.entries) if item.branch), None)) is not None:
            right.append(f"branch {entry.branch}")
        if self.readonly:
            right.insert(0, "read-only")
        if self.app.unsaved:
            right.insert(0, "not saved")
        self.query_one("#header", HeaderLine).show(title, right)

    def _look_at_memory(self) -> None:
        self.composer.rest_caret()
        self.status.memory = self.app.memory() if self.size.width >= WIDE else None
        self.show_status()

    def show_status(self) -> None:
        self.query_one("#status", StatusLine).show(self.status.fields())

    def show_keys(self) -> None:
        contexts = [TRANSCRIPT] if isinstance(self.focused, Transcript) else [COMPOSER, CHAT, GLOBAL]
        keys = shown_keys(self.app.user_keys, contexts)
        if isinstance(self.focused, Transcript):
            does = self.edit_does()
            keys = [(key, does if label == "edit" else label) for key, label in keys if label != "edit" or does]
        else:
            keys = [(key, label) for key, label in keys if label != "stop" or self.pump.running]
        self.query_one("#keys", KeyLine).show(keys)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        self.show_keys()

    @on(Transcript.SelectionMoved)
    def _selection_moved(self) -> None:
        self.show_keys()

    @on(Transcript.FollowChanged)
    def _follow_changed(self, event: Transcript.FollowChanged) -> None:
        self.query_one("#badge").display = not event.follow and self.transcript.unseen

    def tell(self, text: str, severity: str = "information") -> None:
        """A notice that goes away by itself."""
        self.notify(visible_line(text), severity=severity, markup=False, timeout=8 if severity == "error" else 4)

    def untell(self, text: str) -> None:
        """Takes a notice back that no longer holds."""
        for toast in [toast for toast in self.app._notifications if toast.message == text]:
            self.app._unnotify(toast)

    @on(Hint)
    def _hint(self, event: Hint) -> None:
        self.tell(event.text, event.severity)

    def show_text(self, title: str, text: str) -> None:
        self.app.push_screen(TextScreen(title, text))

    # Layout -------------------------------------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        self._place_sidebar(event.size.width)
        self.composer.styles.max_height = max(1, int(event.size.height * 0.4))

    def _place_sidebar(self, width: int) -> None:
        wanted = self._sidebar_wanted
        if wanted is None:
            setting = self.app.settings.ui.sidebar
            wanted = setting == "show" or (setting == "auto" and width >= WIDE)
        sidebar = self.query_one(Sidebar)
        shown = wanted and width >= SIDEBAR_MIN
        if shown != sidebar.display:
            sidebar.display = shown
            if shown:
                sidebar.reload(self.conversation.id if self.conversation else None)

    def action_sidebar(self) -> None:
        if self.size.width < SIDEBAR_MIN:
            self.tell(f"The sidebar needs {SIDEBAR_MIN} columns; ctrl+O lists conversations.")
            return
        self._sidebar_wanted = not self.query_one(Sidebar).display
        self._place_sidebar(self.size.width)

    @on(Sidebar.Chosen)
    def _sidebar_chosen(self, event: Sidebar.Chosen) -> None:
        self._open_soon(event.conversation_id)
        self.composer.focus()

    # Global actions -----------------------------------------------------------------------------------------------------

    def action_escape(self) -> None:
        """Stops what runs; else goes to the composer; from there ends what else is open."""
        if self.pump.running:
            self.stop_turn()
        elif self.focused is not self.composer and not self.query_one(FindBar).display:
            self.composer.focus()
        elif not (self.close_find() or self.cancel_reading() or self.cancel_switch() or self.just_stopped() or self.cancel_edit()):
            self.composer.focus()

    def action_interrupt(self) -> None:
        """ctrl+C: copy a selection, stop, clear the composer, or say how to quit; twice quits."""
        if selection := self.get_selected_text():
            self.copy_text(selection, "selection")
            self.clear_selection()
        elif isinstance(self.focused, Composer) and self.composer.selected_text:
            self.copy_text(self.composer.selected_text, "selection")
        elif self.pump.running:
            self.stop_turn()
        elif self.just_stopped():
            return
        elif self.composer.text:
            chips = dict(self.composer.chips)
            self.composer.reset()
            # Undo brings their marks back.
            self.composer.chips.update(chips)
            self.tell("Cleared; ctrl+Z brings it back.")
        elif time.monotonic() - self._interrupted < 2:
            self.app.leave()
        else:
            self._interrupted = time.monotonic()
            self.tell("ctrl+Q quits (or ctrl+C again).")

    _interrupted = -10.0

    def quit_doubt(self) -> str:
        """Why leaving is asked about first: unsaved, answer or waiting; empty where nothing would be lost."""
        if not self.saved_at_last():
            return "unsaved"
        if not self.app.settings.ui.confirm_quit:
            return ""
        if self.pump.running and self._finish is None:
            return "answer"
        return "waiting" if (self.held or self.queue) and self.switching else ""

    def action_quit_asking(self) -> None:
        doubt = self.quit_doubt()
        if doubt == "unsaved":
            question = f"This conversation is not saved: {self.app.unsaved}"
            choices = [("stay", "stay; the palette's Export writes it to another disk"), ("quit", "quit and lose it")]
            if not self.pump.running:
                choices.insert(0, ("save", "Save again, and quit if it is saved"))
            self.app.push_screen(AskScreen(question, choices), self._quit_unsaved)
        elif doubt:
            question = "An answer is running." if doubt == "answer" else "A message waits for the build. It is kept, and not sent."
            choices = [("quit", "stop the answer and quit" if doubt == "answer" else "quit"), ("stay", "keep running")]
            self.app.push_screen(AskScreen(question, choices), lambda answer: self.app.leave() if answer == "quit" else None)
        else:
            self.app.leave()

    def _quit_unsaved(self, answer: str | None) -> None:
        if answer == "save":
            self.action_quit_asking()
            if self.app.unsaved:
                self.tell("Still not saved.", "error")
        elif answer == "quit":
            self.app.leave()

    def action_new_conversation(self) -> None:
        if self.pump.running:
            self.tell("Stop the running answer first (esc).", "warning")
        else:
            self.clear_conversation()
            self.composer.focus()

    def action_conversations(self) -> None:
        from dsv41chat.ui.screens.conversations import ConversationsScreen

        current, apart = self.conversation.id if self.conversation else None, self.app.unsaved not in ("", "memory")
        page = ConversationsScreen(self.app.store, current, self._renamed_in_list, cached=self.app.cached_states, apart=apart)
        self.app.push_screen(page, self._list_closed)

    def _renamed_in_list(self, conversation_id: str) -> None:
        if self.conversation is not None and self.conversation.id == conversation_id:
            self.refresh_conversation()

    def _list_closed(self, result: tuple[str, ...] | None) -> None:
        if result is None:
            self.query_one(Sidebar).reload(self.conversation.id if self.conversation else None)
            return
        what, key = result[:2]
        if what == "open":
            self._open_soon(key)
        elif what == "message":
            self._found(result[1:])
        elif what == "new":
            self.action_new_conversation()
        elif what == "export":
            self.export(key)

    def _open_soon(self, ref: str, message: str | None = None) -> None:
        self.spawn(self.open_conversation(ref, message=message), "open")

    def action_recent(self, number: int) -> None:
        rows = self.app.store.list_conversations(None, 9)
        if number <= len(rows):
            self._open_soon(rows[number - 1].id)

    def action_redraw(self) -> None:
        self.app.refresh(repaint=True, layout=True)

    def action_page(self, direction: int) -> None:
        self.transcript.page(direction)

    def action_transcript_home(self) -> None:
        self.transcript.home()

    def action_transcript_end(self) -> None:
        self.transcript.end()

    def action_rename(self) -> None:
        if self.conversation is None:
            self.tell("Nothing to rename yet.")
            return
        self.app.push_screen(LineScreen("New title (empty: from the first message)", self.conversation.title), self._renamed)

    def _renamed(self, title: str | None) -> None:
        if title is None:
            return
        try:
            self.app.store.rename(self.conversation.id, title)
            self.conversation = self.app.store.conversation(self.conversation.id)
        except StoreError as error:
            self.tell(str(error), "error")
        self.show_header()
        self.query_one(Sidebar).reload(self.conversation.id)

    def send(self, text: str) -> None:
        """The composer is sent. text: exactly what the user sees in it, chips expanded."""
        if self.starting:
            self._send_early = True
            # What is typed until then belongs to the same message, on a line of its own.
            self.composer.insert("\n")
        elif self.send_when_read():
            self.composer.insert("\n")
        else:
            self.submit(text)

    def started(self, send: bool = False) -> None:
        """The start is over. send: the composer's text goes off at once."""
        self.starting = False
        if send or self._send_early:
            self.composer.submit()
