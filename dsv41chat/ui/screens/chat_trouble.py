"""The part of the chat screen for hard cases: the store refuses, or the context is full."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from textual.timer import Timer

from dsv41chat.engine.errors import EngineError
from dsv41chat.store import DATABASE, Store, StoreError
from dsv41chat.store.db import BUSY_S
from dsv41chat.store.titles import title_of
from dsv41chat.ui.present import update_entry
from dsv41chat.ui.render.entry import USER, Entry
from dsv41chat.ui.screens.dialogs import AskScreen
from dsv41chat.ui.turn_events import Failed, TurnRequest
from dsv41chat.ui.widgets.sidebar import Sidebar

log = logging.getLogger(__name__)

KEEP_SHARE = 0.6
ASK_S = 0.2  # between two looks whether a page has been closed
AGAIN_S, AGAIN_MOST_S = 5.0, 60.0  # until a disk that refused is tried again by itself: the first time, at most
REST_S = 1.0  # between two looks whether something still runs
AGAIN_BUSY_S = 0.1  # how long such a try waits for another process; the screen waits with it
SAVE_BUSY_S = 1.0  # the same, of a try that the user asked for
BACK = "take the message back into the composer"


class TroubleActions:
    """Mixed into ChatScreen."""

    def init_trouble(self) -> None:
        self._again: Timer | None = None

    # The store refuses --------------------------------------------------------------------------------------------------

    def continue_in_memory(self, failure: Failed, back: bool = False) -> None:
        """From now on the conversation on screen lives in memory only; the header says so and export is offered.

        back: the message that was refused is in the composer again.
        """
        app, reason = self.app, failure.message
        if app.store.path is None:
            return
        log.error("the store refused, going on in memory: %s", reason)
        memory = Store.memory()
        shown = [entry for entry in self.transcript.entries if entry.role != "notice"]
        messages = [entry.message for entry in shown if entry.message is not None]
        conversation = None
        if messages:
            last = shown[-1]
            if last.message is None and last.role != USER and failure.unstored is not None:
                # Under the id of the row that has a part of it, so that it can go back there.
                messages.append(failure.unstored)
                update_entry(last, failure.unstored)
                self.transcript.changed(last)
            first = replace(messages[0], parent_id=None)
            own = self.conversation
            settings = own.settings if own else {}
            conversation = memory.add_tree([first, *messages[1:]], title=own.title, settings=settings, keep_ids=True, wish=own.id)
        self._copy_builds(memory)
        app.use_store(memory, reason)
        self.conversation = conversation
        self.leaf_id = shown[-1].message.id if shown and shown[-1].message is not None else messages[-1].id if messages else None
        if conversation is not None:
            for item in self.queue:
                memory.queue_push(conversation.id, item.text)
        self.show_queue(memory.queued(conversation.id) if conversation is not None else [])
        send = "The message is back in the composer: Enter sends it.\n" if back else ""
        self.add_notice(
            f"Not saved: {reason}\n{send}Until the disk can be written again, which is tried now and then, the conversation goes on in memory only. "
            'Palette: "Save again" tries at once, Export keeps it.',
            error=True,
        )
        self.show_header()
        self.try_disk_later()

    def _copy_builds(self, memory: Store) -> None:
        try:
            for build in self.app.store.builds.list():
                memory.builds.add(build.folder, build.name, family=build.family, fingerprint=build.fingerprint)
        except StoreError:
            # Unreadable now; builds can still be named by their folder.
            return

    def action_save_again(self) -> None:
        """Opens the database again and brings the conversation there."""
        if self.app.store.path is not None:
            self.tell("Everything is saved already.")
            return
        if self.pump.running:
            self.tell("Stop the running answer first (esc).", "warning")
            return
        try:
            self._go_on_saved(self._open_disk(SAVE_BUSY_S))
        except StoreError as error:
            self.tell(f"Still not saved: {error}", "error")
            return
        self.tell("Saved.")

    def _open_disk(self, busy_s: float) -> Store:
        """The database, opened again. busy_s: how long its statements wait for another process. On any thread. Raises StoreError."""
        disk = Store.open(self.app.settings.paths.data, busy_s=busy_s)
        try:
            self.app.replace_disk(disk)
        except StoreError:
            disk.close()
            raise
        return disk

    def bring_to_disk(self, disk: Store) -> str | None:
        """Brings what was written in memory to a database that was opened for it; the id there of the conversation on screen, None without one.

        Raises StoreError; `disk` is closed then.
        """
        app, own, made = self.app, self.conversation, None
        try:
            if own is not None:
                app.store.set_leaf(own.id, self.leaf_id)
            # All or nothing: another try must find no half of this one. What is being written is part of it: a disk too full for the message
            # that it refused is not one that can be written again.
            with disk.db.write():
                taken = disk.take_in(app.store)
                self.take_drafts(disk, taken)
            if own is not None:
                made = taken[own.id]
                self.conversation = disk.conversation(made)
                if made != own.id:
                    # A copy has messages of its own: the one that is being edited is none of them.
                    self.end_edit()
            disk.db.wait(BUSY_S)
        except StoreError:
            disk.close()
            raise
        app.controller.last_conversation_id = made or taken.get(app.controller.last_conversation_id)
        app.use_store(disk, "")
        return made

    def _go_on_saved(self, disk: Store) -> None:
        """Brings what was written in memory to the disk and goes on there; what is read and written on the screen stays. Raises StoreError."""
        before = self.conversation
        made = self.bring_to_disk(disk)
        # What was written there meanwhile was kept in memory, if at all.
        self._newest_draft = self._stored_draft = None
        self._view = {}
        self.save_draft()
        self.show_header()
        self.query_one(Sidebar).reload(made)
        if made is None:
            return
        if made != before.id:
            self._open_soon(made)
            return
        try:
            disk.lock(made)
            # The same texts, under numbers of that store.
            self.queue = disk.queued(made)
        except StoreError as error:
            log.warning("the conversation is not locked yet: %s", error)
        self.spawn(self.refreshed(), "refresh")

    def try_disk_later(self, after_s: float | None = None) -> None:
        """Has the disk tried again by itself after so many seconds (None: AGAIN_S), and as long as it refuses after twice as many each time."""
        after_s = AGAIN_S if after_s is None else after_s
        if self._again is not None:
            self._again.stop()
        self._again = self.set_timer(after_s, lambda: self._try_disk(after_s))

    def _try_disk(self, after_s: float) -> None:
        if not self.app.unsaved:
            return
        if self._rests():
            self.spawn(self._save_by_itself(after_s), "disk")
        else:
            self._again = self.set_timer(REST_S, lambda: self._try_disk(after_s))

    def _rests(self) -> bool:
        """Whether nothing runs that reads or writes the store, and no page or dialog is open."""
        opening = any(worker.group == "open" and not worker.is_finished for worker in self.workers)
        return self.app.screen is self and not (self.pump.running or self.starting or self.app.leaving or opening)

    async def _save_by_itself(self, after_s: float) -> None:
        """What "Save again" does, unasked: silent where the disk still refuses. What waits for another process does so off the event loop."""
        memory = self.app.store
        try:
            # A file that is gone is not made anew: its disk may come back.
            disk = await asyncio.to_thread(self._open_disk, AGAIN_BUSY_S) if (self.app.settings.paths.data / DATABASE).exists() else None
            ready = disk is not None and self.app.store is memory and self._rests()
            if ready:
                self._go_on_saved(disk)
        except StoreError as error:
            log.info("still not saved: %s", error)
            self.try_disk_later(min(2 * after_s, AGAIN_MOST_S))
            return
        if ready:
            self.tell("Saved: the database can be written again.")
        elif disk is None:
            self.try_disk_later(min(2 * after_s, AGAIN_MOST_S))
        else:
            disk.close()
            self._try_disk(after_s)

    def saved_at_last(self) -> bool:
        """Before leaving: what went on in memory because the disk refused is tried once more. False if it would be lost."""
        if self.app.unsaved in ("", "memory") or not self.app.store.written():
            return True
        if self.pump.running:
            return False
        try:
            self.bring_to_disk(self._open_disk(SAVE_BUSY_S))
        except StoreError as error:
            log.error("not saved when leaving: %s", error)
            return False
        return True

    # The context is full ------------------------------------------------------------------------------------------------

    async def ask_context(self, path: list[Any]) -> None:
        """The prompt does not fit: what the user can do, each with what it costs.

        path: the messages that were to be answered. After a retry farther up the screen shows others behind them again.
        """
        engine = self.app.host.engine
        if engine is not None:
            # The turn failed before it could say so itself.
            self.status.context_limit = engine.context_limit
            self.show_status()
        question = next((message for message in reversed(path) if message.role == USER), None)
        last = self._entry(question.id) if question is not None else None
        leaf = self.leaf_id

        def over() -> bool:
            """Whether what is on screen by now is not what this is about."""
            return self.leaf_id != leaf or self.pump.running

        if last is not None and last.message is not None:
            try:
                own = await asyncio.to_thread(self.app.count_tokens, last.message.text, over)
            except EngineError:
                own = 0
            while self.app.screen is not self and not over():
                # Not over a page that was opened meanwhile.
                await asyncio.sleep(ASK_S)
            if over():
                return
            if own >= self.status.context_limit > 0:
                self._ask_message(last, own)
                return
        kept = self._suffix(path)
        choices = [("new", "start a new conversation with a summary that you write")]
        if kept is not None and len(kept) < len(path):
            gone = len(path) - len(kept)
            choices.append(("drop", f"copy without the {gone} oldest messages (the original stays) and answer there"))
        limit, most = self.status.context_limit, self._most_context()
        if most > limit:
            choices.append(("raise", f"raise the context from {limit:,} to {most:,} tokens and load the build again"))
        choices.append(("edit", BACK))
        self.app.push_screen(AskScreen("The context is full.", choices), lambda answer: self._context_chosen(answer, kept, last))

    def _ask_message(self, entry: Entry, own: int) -> None:
        """A message that no conversation could hold, however short."""
        limit, most = self.status.context_limit, self._most_context()
        choices = [("edit", f"{BACK} to shorten it (ctrl+G opens it in your editor)")]
        if most > own:
            choices.append(("raise", f"raise the context from {limit:,} to {most:,} tokens and load the build again"))
        question = f"This message alone has {own:,} tokens; the context holds {limit:,}.\nIt is saved; a new conversation would not help."
        self.app.push_screen(AskScreen(question, choices), lambda answer: self._context_chosen(answer, None, entry))

    def _entry(self, message_id: str) -> Entry | None:
        return next((entry for entry in self.transcript.entries if entry.key == message_id), None)

    def _take_back(self, entry: Entry | None, asked: bool) -> None:
        """A message that cannot be answered leaves the path, which every later message would share with it, and its text returns to where
        it was written. The row stays, as a branch; what is sent next stands beside it.

        asked: the user chose so. One that was answered once, in a larger context, only then returns, as an edit.
        """
        index = None if entry is None else self.transcript.index_of(entry)
        if index is None or entry.message is None or self.conversation is None or self.pump.running:
            return
        try:
            if self.app.store.children(entry.message.id):
                if asked:
                    self.begin_edit(entry)
                return
            if self._began_with(entry):
                self._begin_again(entry.message.text)
                return
            self.app.store.set_leaf(self.conversation.id, entry.message.parent_id)
        except StoreError as error:
            self.tell(str(error), "error")
            return
        self.leaf_id = entry.message.parent_id
        self.transcript.set_entries(self.transcript.entries[:index])
        self._status_of([one.message for one in self.transcript.entries if one.message is not None])
        self.end_edit()
        if self.composer.text:
            self.tell("The message is out of the conversation; up-arrow in the composer finds it.")
        else:
            # As a paste: a text of this size makes the composer slow.
            self.composer.take(entry.message.text)
            self.tell("The message is back in the composer and out of the conversation.")
        self.composer.focus()

    def _began_with(self, entry: Entry) -> bool:
        """Whether the conversation holds nothing but this message, and nothing else is being written: without it there is none."""
        c = self.conversation
        given = c.title != title_of(entry.message.text) or c.pinned or self.queue or self.composer.text
        return not given and [message.id for message in self.app.store.tree(c.id)] == [entry.message.id]

    def _begin_again(self, text: str) -> None:
        """The conversation goes (it can be brought back for a while), and its only message is what is written for a new one with its settings."""
        gone = self.conversation
        self.clear_conversation()
        self.new_settings = {name: value for name, value in gone.settings.items() if name not in ("origin", "build")}
        # As a paste: a text of this size makes the composer slow.
        self.composer.take(text)
        self.save_draft(now=True)
        if self._stored_draft == self._newest_draft:
            self.app.store.delete(gone.id)
            self.app.controller.last_conversation_id = None
        self.query_one(Sidebar).reload(None)
        self.show_header()
        self.tell("The message is back in the composer.")
        self.composer.focus()

    def _suffix(self, path: list[Any]) -> list[Any] | None:
        """The newest messages, from a user message on, that take about KEEP_SHARE of the context."""
        total = sum(len(message.text) for message in path) or 1
        tokens = max(self.status.context_limit, 1)
        # The prompt was at least as long as the context: with that, characters give a cautious share.
        room = total * KEEP_SHARE * min(1.0, tokens / max(self.status.context_used, tokens))
        kept = 0
        for index in range(len(path) - 1, -1, -1):
            kept += len(path[index].text)
            if path[index].role == "user" and index and kept + len(path[index - 1].text) > room:
                return path[index:]
        return path if path and path[0].role == "user" else None

    def _most_context(self) -> int:
        view = self.app.host.view
        return view.context or 0 if view is not None else 0

    def _context_chosen(self, answer: str | None, kept: list[Any] | None, last: Entry | None) -> None:
        if answer == "new":
            self.clear_conversation()
            self.composer.insert("Summary of our conversation so far: ")
            self.composer.focus()
        elif answer == "drop" and kept is not None:
            self._drop_oldest(kept)
        elif answer == "raise":
            self.app.apply_settings(replace(self.app.settings, engine=replace(self.app.settings.engine, context=self._most_context())))
            self.app.host.unload()
            cut = self._entry(self._continued) if self._continued is not None else None
            if cut is not None:
                self._continue(cut)
            else:
                self._regenerate(last)
        else:
            self._take_back(last, answer == "edit")

    def _drop_oldest(self, kept: list[Any]) -> None:
        try:
            first = replace(kept[0], parent_id=None)
            copy = self.app.store.add_tree([first, *kept[1:]], title=f"{self.conversation.title} (shortened)", settings=self.conversation.settings)
        except StoreError as error:
            self.tell(str(error), "error")
            return
        self.spawn(self._answer_in(copy.id), "open")

    async def _answer_in(self, conversation_id: str) -> None:
        if await self.open_conversation(conversation_id) and self.leaf_id is not None:
            self.start(TurnRequest(conversation_id, regenerate=self.leaf_id, build=self.app.build))
