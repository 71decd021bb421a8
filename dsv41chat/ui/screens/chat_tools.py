"""The part of the chat screen that opens tools: find, search, help, details, editor, pager, forks.

Pages are imported where they are opened: the first frame does not wait for them.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import SuspendNotSupported

from dsv41chat.store import StoreError
from dsv41chat.store.files import write_private
from dsv41chat.ui.commands import CommandError
from dsv41chat.ui.details import details_text
from dsv41chat.ui.export import FORMATS
from dsv41chat.ui.inputs import read_text
from dsv41chat.ui.output import UsageError
from dsv41chat.ui.outside import run_outside
from dsv41chat.ui.render.entry import NOTICE, Entry
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.screens.dialogs import AskScreen, LineScreen
from dsv41chat.ui.widgets.find_bar import FindBar

if TYPE_CHECKING:
    from dsv41chat.store import Conversation
    from dsv41chat.ui.screens.export import ExportRequest

FIND_DELAY_S = 0.1
MAX_HITS = 10_000
RESTORABLE = 9


class ToolActions:
    """Mixed into ChatScreen. Handlers go by their names: Textual collects `@on` only from its own classes."""

    def init_tools(self) -> None:
        self._hits: list[tuple[Entry, int]] = []
        self._hit = -1
        self._query = ""
        self._find_timer = None

    # Find ---------------------------------------------------------------------------------------------------------------

    def action_find(self) -> None:
        self.query_one(FindBar).open()

    def on_find_bar_query(self, event: FindBar.Query) -> None:
        self._query = event.text
        if self._find_timer is not None:
            self._find_timer.stop()
        self._find_timer = self.set_timer(FIND_DELAY_S, self._find_now)

    def _find_now(self) -> None:
        if self._find_timer is not None:
            self._find_timer.stop()
            self._find_timer = None
        self._count_hits()
        self.transcript.highlight_query(self._query)
        self.query_one(FindBar).show_count(f"{len(self._hits)} found" if self._query else "")
        if self._hits:
            self._go(len(self._hits) - 1)

    def _count_hits(self) -> None:
        query = self._query.casefold()
        self._hits, self._hit = [], -1
        if query:
            for entry in self.transcript.entries:
                if entry.role == NOTICE:
                    continue
                count = entry.text.casefold().count(query)
                if entry.thinking and entry.thinking_view == "show":
                    count += entry.thinking.casefold().count(query)
                self._hits += [(entry, number) for number in range(count)]
                if len(self._hits) > MAX_HITS:
                    break

    def on_find_bar_step(self, event: FindBar.Step) -> None:
        if self._find_timer is not None:
            # Enter came before the pause after the last letter: what was found so far is of a shorter word.
            self._find_now()
            return
        self.action_find_step(event.direction)

    def action_find_step(self, direction: int) -> None:
        if self._query and (not self._hits or self.transcript.index_of(self._hits[0][0]) is None):
            # Another conversation or branch is on the screen now.
            self._count_hits()
        if not self._hits:
            self.tell("Nothing found." if self._query else "ctrl+F searches.")
            return
        self._go((self._hit + direction) % len(self._hits))

    def _go(self, number: int) -> None:
        self._hit = number
        entry, occurrence = self._hits[number]
        # n and N go on when the bar is closed and its marks are gone.
        self.transcript.highlight_query(self._query)
        self.transcript.show_line(entry, occurrence)
        self.query_one(FindBar).show_count(f"{number + 1} of {len(self._hits)}")

    def forget_found(self) -> None:
        """What was found in one conversation is nothing in another."""
        if not self.query_one(FindBar).display:
            self._query, self._hits, self._hit = "", [], -1
            self.transcript.highlight_query("")

    def close_find(self) -> bool:
        """Ends the search; the place that was found stays in view. Always back to the composer: what is typed next is text, and the letters
        of the transcript answer again and delete. Returns whether the bar was open."""
        bar = self.query_one(FindBar)
        self.transcript.highlight_query("")
        if not bar.display:
            return False
        bar.display = False
        self.composer.focus()
        return True

    def action_search_everywhere(self) -> None:
        from dsv41chat.ui.screens.search import SearchScreen

        self.app.push_screen(SearchScreen(self.app.store, self._query), self._found)

    def _found(self, place: tuple[str, str, str] | None) -> None:
        if place is not None:
            self.spawn(self._open_at(*place), "open")

    async def _open_at(self, conversation_id: str, message_id: str, query: str) -> None:
        """Opens a conversation at a message, on whatever branch it lies, and marks what was searched for."""
        try:
            leaf = await asyncio.to_thread(self.app.store.leaf_below, message_id)
        except StoreError as error:
            self.tell(str(error), "error")
            return
        if await self.open_conversation(conversation_id, leaf=leaf.id, message=message_id):
            self._mark_found(message_id, query)

    def _mark_found(self, message_id: str, query: str) -> None:
        """The place in a message that a search led to; n and N go on from it. A search for several words may have no place of its own."""
        entry = next((entry for entry in self.transcript.entries if entry.key == message_id), None)
        text = entry.text.casefold() if entry is not None else ""
        self._query = next((part for part in (query, *query.split()) if part and part.casefold() in text), "")
        self._count_hits()
        number = next((number for number, (one, _) in enumerate(self._hits) if one is entry), None)
        if number is not None:
            self._go(number)

    # Pages --------------------------------------------------------------------------------------------------------------

    def action_help(self) -> None:
        from dsv41chat.ui.screens.help import HelpScreen

        self.app.push_screen(HelpScreen(self.app.user_keys))

    def action_details(self) -> None:
        """Times, acceptance and reads of the selected or last answer."""
        selected = self.transcript.selected_entry if self.transcript.has_focus else None
        entry = selected if selected is not None and selected.message is not None and selected.message.role == "assistant" else None
        if entry is None:
            entry = next((one for one in reversed(self.transcript.entries) if one.message is not None and one.message.role == "assistant"), None)
        if entry is None:
            self.tell("No answer yet.")
            return
        finish = self._finish if self._finish is not None and self._finish.message is not None and self._finish.message.id == entry.key else None
        host = self.app.host
        text = details_text(entry.message, finish, host.table_stats(), host.states.stats(), host.device_memory())
        self.show_text("Turn details", text)

    # Editor and pager ---------------------------------------------------------------------------------------------------

    def action_external_editor(self) -> None:
        environment = self.app.surroundings
        command = environment.visual or environment.editor or "vi"
        text = self._outside(command, self.composer.expanded(), ".md")
        if text is not None:
            self.composer.reset(text.rstrip("\n"))

    def action_pager(self) -> None:
        entry = self.chosen_entry()
        if entry is not None:
            self._outside(self.app.surroundings.pager or "less", entry.text, ".md", safe=True)

    def _outside(self, command: str, text: str, suffix: str, safe: bool = False) -> str | None:
        """Runs a program of the user's on a private file with `text`. Returns what the file holds then, None if it failed."""
        from dsv41chat.ui.sanitize import visible

        handle, name = tempfile.mkstemp(prefix="dsv41chat-", suffix=suffix)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(visible(text) if safe else text)
            with self.app.suspend():
                code = run_outside([*shlex.split(command), name], sys.__stdin__.fileno())
            self.app.refresh(layout=True)
            if code != 0:
                self.tell(f"{command} ended with {code}; nothing was changed.", "warning")
                return None
            return Path(name).read_text("utf-8", errors="replace")
        except SuspendNotSupported:
            self.tell("This terminal cannot be left for another program.", "warning")
        except (OSError, ValueError) as error:
            self.tell(f"{command} could not be started: {error}", "error")
        finally:
            Path(name).unlink(missing_ok=True)
        return None

    # Conversation as a whole --------------------------------------------------------------------------------------------

    def action_fork(self) -> None:
        """Copies the branch on screen into a new conversation and opens it."""
        if self.conversation is None or self.leaf_id is None:
            self.tell("There is nothing to copy yet.")
            return
        if self.pump.running:
            self.tell("Stop the running answer first (esc).", "warning")
            return
        selected = self.transcript.selected_entry if self.transcript.has_focus else None
        leaf = selected.message.id if selected is not None and selected.message is not None else self.leaf_id
        try:
            copy = self.app.store.fork(self.conversation.id, leaf)
        except StoreError as error:
            self.tell(str(error), "error")
            return
        self._open_soon(copy.id)
        self.tell("This is the copy; the original stays as it was.")

    def action_delete_conversation(self) -> None:
        if self.conversation is None or not self._may_run():
            return
        days = self.app.settings.chat.keep_deleted_days
        question = f'Delete "{self.conversation.title}"? It can be restored for {days} days (ctrl+O, u).'
        self.app.push_screen(AskScreen(question, [("no", "keep"), ("yes", "delete")]), self._delete_if)

    def _delete_if(self, answer: str | None) -> None:
        if answer != "yes":
            return
        try:
            self.app.store.delete(self.conversation.id)
        except StoreError as error:
            self.tell(str(error), "error")
            return
        self.clear_conversation()

    def action_take_over(self) -> None:
        """Asks for the lock again; it is ours when the other process is dead."""
        if self.conversation is None or not self.readonly or self.app.readonly:
            self.tell("There is nothing to take over.")
            return
        self._open_soon(self.conversation.id)

    # Export -------------------------------------------------------------------------------------------------------------

    def action_export(self) -> None:
        self.export(self.conversation.id if self.conversation else None)

    def export(self, conversation_id: str | None) -> None:
        """Opens the export page of a conversation."""
        from dsv41chat.ui.screens.export import ExportScreen

        if conversation_id is None:
            self.tell("There is nothing to export yet.")
            return
        here = self.conversation is not None and conversation_id == self.conversation.id
        try:
            conversation = self.app.store.conversation(conversation_id)
            leaf = self.app.store.shown_leaf(conversation_id, self.leaf_id if here else None)
        except StoreError as error:
            self.tell(str(error), "error")
            return
        selected = self.transcript.selected_entry if here else None
        message = selected.message.id if selected is not None and selected.message is not None else None
        self.app.push_screen(ExportScreen(conversation, leaf, message), self._export_chosen)

    def _export_chosen(self, request: ExportRequest | None) -> None:
        if request is not None:
            self.spawn(self._export(request), "export", exclusive=False)

    async def _export(self, request: ExportRequest) -> None:
        from dsv41chat.ui.screens.export import compose_export, free_path

        try:
            text = await asyncio.to_thread(compose_export, self.app.store, request)
            if request.copy:
                self.copy_text(text, "export")
                return
            path = free_path(request.path)
            await asyncio.to_thread(write_private, path, text.encode("utf-8", "replace"))
        except (StoreError, OSError) as error:
            self.tell(str(error), "error")
            return
        self.tell(f"Written to {path}")

    def action_import(self) -> None:
        """Asks for a file of ours and opens what it holds."""
        if self.app.readonly:
            self.tell("Nothing can be stored here: this is read-only.", "warning")
            return
        self.app.push_screen(
            LineScreen("JSON export to import (Tab completes)", complete=True),
            lambda name: name and self.spawn(self._import(name), "import", exclusive=False),
        )

    async def _import(self, name: str) -> None:
        from dsv41chat.ui import importing

        def work() -> list[tuple[importing.Exported, Conversation, str]]:
            return importing.store(importing.read(read_text(name, name, limit=None), name), self.app.store)

        try:
            stored = await asyncio.to_thread(work)
        except (UsageError, StoreError) as error:
            self.tell(f"{error} {error.hint}".strip(), "error")
            return
        copies = sum(taken != "" for _, _, taken in stored)
        many = f"{len(stored)} conversations" if len(stored) > 1 else stored[0][1].title
        self.tell(f"Imported {many}" + (f"; {copies} came in as copies, their ids were taken" if copies else ""))
        await self.open_conversation(stored[0][1].id)

    def export_command(self, rest: str) -> None:
        """/export [FORMAT] [FILE]. Raises CommandError."""
        from dsv41chat.ui.screens.export import ExportRequest, file_name

        if self.conversation is None:
            raise CommandError("There is nothing to export yet.")
        if not rest:
            self.action_export()
            return
        first, _, name = rest.partition(" ")
        if first not in FORMATS:
            first, name = "md", rest
        path = Path(name.strip()).expanduser() if name.strip() else Path(file_name(self.conversation.title, first))
        request = ExportRequest(self.conversation, self.leaf_id, None, format=first, path=path)
        self.spawn(self._export(request), "export", exclusive=False)

    def action_undelete(self) -> None:
        """Chooses among the conversations that were deleted last."""
        try:
            gone = self.app.store.list_conversations(None, RESTORABLE, deleted=True)
        except StoreError as error:
            self.tell(str(error), "error")
            return
        if not gone:
            self.tell("No conversation was deleted.")
            return
        choices = [(row.id, f"{visible_line(row.title) or '(empty)'}, {row.messages} messages") for row in gone]
        self.app.push_screen(AskScreen("Restore which conversation?", choices), self._undelete)

    def _undelete(self, conversation_id: str | None) -> None:
        if conversation_id is None:
            return
        try:
            self.app.store.undelete(conversation_id)
        except StoreError as error:
            self.tell(str(error), "error")
            return
        self._open_soon(conversation_id)

    # Composer -----------------------------------------------------------------------------------------------------------

    def action_send(self) -> None:
        self.composer.submit()

    def action_newline(self) -> None:
        self.composer.insert("\n")
        self.composer.focus()

    def action_history(self) -> None:
        self.composer.recall(-1)
        self.composer.focus()

    def action_undo(self) -> None:
        self.composer.undo()
        self.composer.focus()

    def action_attach_file(self) -> None:
        self.app.push_screen(LineScreen("Text file to attach (Tab completes)", complete=True), self._attach_if)

    def _attach_if(self, name: str | None) -> None:
        if name:
            self.attach(name)
            self.composer.focus()

    def action_expand_paste(self) -> None:
        self.composer.expand_chips()

    def action_save_only(self) -> None:
        """Stores the edited text as a branch without an answer."""
        if self.editing is None:
            self.tell("Nothing is being edited; e on a message of yours begins.")
            return
        if not self._may_run():
            return
        try:
            old = self.app.store.message(self.editing)
            new = self.app.store.add_message(self.conversation.id, old.parent_id, "user", self.composer.expanded())
        except StoreError as error:
            self.tell(str(error), "error")
            return
        self.cancel_edit()
        self.spawn(self.open_conversation(self.conversation.id, leaf=new.id), "open")

    def action_mark(self) -> None:
        """Marks the selected message, for finding it again with the eye."""
        entry = self.chosen_entry()
        if entry is None or entry.message is None:
            return
        entry.mark = not entry.mark
        self.transcript.changed(entry)
        self.save_view()

    def action_toggle_mouse(self) -> None:
        self.tell("The mouse belongs to the " + ("program again." if self.app.toggle_mouse() else "terminal now."))
