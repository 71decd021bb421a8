"""The part of the chat screen that acts on messages: select, copy, fold, edit, regenerate, branches, find."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from dsv41chat.store import StoreError
from dsv41chat.ui.clipboard import copy as copy_to_clipboard
from dsv41chat.ui.present import notice
from dsv41chat.ui.render.entry import ANSWER, USER, Entry
from dsv41chat.ui.screens.dialogs import AskScreen
from dsv41chat.ui.turn_events import TurnRequest


def _unfinished(entry: Entry | None) -> bool:
    """Whether an answer can be gone on with."""
    return entry is not None and entry.message is not None and not (entry.message.state == "complete" and entry.message.finish == "stop")


@dataclass(frozen=True)
class Taken:
    """What was on the screen before a turn took some of it off. place: of the view, None at its end. retried: ctrl+R asks the same again.

    edited: the message that an edit was to replace. told: the notice about what went.
    """

    entries: list[Entry]
    selected: Entry | None
    place: tuple[str, int, int] | None
    retried: bool
    edited: Entry | None = None
    told: str = ""


class MessageActions:
    """Mixed into ChatScreen."""

    def init_messages(self) -> None:
        self.taken: Taken | None = None  # until something of the turn is stored
        self.editing: str | None = None
        # What was in the composer when an edit began, and its folded pastes; it comes back when the edit is sent or left.
        self.aside: tuple[str, dict[str, str]] = "", {}
        self.edit_label = ""
        self.thinking_view = self.app.settings.ui.thinking

    # Which message ------------------------------------------------------------------------------------------------------

    def _last(self, role: str) -> Entry | None:
        return next((entry for entry in reversed(self.transcript.entries) if entry.role == role), None)

    def chosen_entry(self, role: str = "") -> Entry | None:
        """The message that an action is about: the selected one where the keys are in the transcript, else the last one (of `role`)."""
        if self.focused is self.transcript:
            return self.transcript.selected_entry
        roles = (role,) if role else (USER, ANSWER)
        return next((entry for entry in reversed(self.transcript.entries) if entry.role in roles), None)

    def select_message(self, message_id: str) -> None:
        index = next((index for index, entry in enumerate(self.transcript.entries) if entry.key == message_id), None)
        if index is not None:
            self.transcript.focus()
            self.transcript.select(index)

    def action_select(self, step: int) -> None:
        self.transcript.focus()
        self.transcript.select_by(step)

    def action_select_edge(self, last: bool) -> None:
        self.transcript.focus()
        self.transcript.select_edge(last)

    def action_shift(self, direction: int) -> None:
        self.transcript.shift(direction)

    # View ---------------------------------------------------------------------------------------------------------------

    def action_toggle_thinking(self) -> None:
        self._toggle(next((entry for entry in reversed(self.transcript.entries) if entry.thinking), None))

    def action_fold_selected(self) -> None:
        self._toggle(self.chosen_entry(ANSWER))

    def _toggle(self, entry: Entry | None) -> None:
        if entry is None or not entry.thinking:
            self.tell("No thinking to unfold.")
            return
        entry.thinking_view = "fold" if entry.thinking_view == "show" else "show"
        self.transcript.changed(entry)

    def action_thinking_all(self, view: str) -> None:
        self.thinking_view = view
        for entry in self.transcript.entries:
            entry.thinking_view = view
        self.transcript.configure()

    def action_wrap_code(self) -> None:
        self.transcript.configure(wrap_code=not self.transcript.wrap_code)

    # Copy ---------------------------------------------------------------------------------------------------------------

    def copy_text(self, text: str, what: str) -> None:
        """To the clipboard by whatever route works; says which."""
        self.spawn(self._copy(text, what), "copy", exclusive=False)

    async def _copy(self, text: str, what: str) -> None:
        route = await copy_to_clipboard(text, self.app)
        self.tell(f"{what}, {len(text):,} characters: {route}")

    def action_copy_message(self) -> None:
        entry = self.chosen_entry()
        if entry is not None:
            self.copy_text(entry.text, "message")

    def action_copy_code(self) -> None:
        entry = self.chosen_entry(ANSWER)
        blocks = entry.code_blocks() if entry is not None and entry.role == ANSWER else []
        if not blocks:
            self.tell("No code block in this message.")
        elif len(blocks) == 1:
            self.copy_text(blocks[0], "code")
        else:
            firsts = [(block.strip().splitlines() or [""])[0] for block in blocks]
            choices = [(str(number), f"[{number + 1}] {first}") for number, first in enumerate(firsts)]
            self.app.push_screen(AskScreen("Which code block?", choices), lambda name: name is not None and self.copy_text(blocks[int(name)], "code"))

    # Edit and regenerate ------------------------------------------------------------------------------------------------

    def _may_run(self) -> bool:
        if self.pump.running:
            self.tell("Stop the running answer first (esc).", "warning")
        elif self.readonly:
            self.tell("This conversation is read-only here.", "warning")
        elif self.switching:
            self.tell("A build is being loaded; esc cancels.", "warning")
        else:
            return True
        return False

    def action_regenerate(self) -> None:
        """One more answer to the last question."""
        entry = next((entry for entry in reversed(self.transcript.entries) if entry.message is not None), None)
        self._regenerate(entry)

    def action_regenerate_selected(self) -> None:
        self._regenerate(self.chosen_entry())

    def _regenerate(self, entry: Entry | None) -> None:
        if entry is None or entry.message is None:
            self.tell("There is nothing to answer again yet.")
        elif self._may_run():
            self._drop_from(entry, keep=entry.role == USER)
            self.start(TurnRequest(self.conversation.id, regenerate=entry.message.id, build=self.app.build))

    def action_continue_answer(self) -> None:
        entry = self.transcript.selected_entry if self.transcript.has_focus else None
        self._continue(entry if entry is not None and entry.role == ANSWER else self._last(ANSWER))

    def _continue(self, entry: Entry | None) -> None:
        if entry is None or entry.message is None:
            self.tell("There is nothing to continue yet.")
        elif not _unfinished(entry):
            self.tell("This answer is complete; there is nothing to continue.")
        elif self._may_run():
            kept = entry.message
            self._drop_from(entry, keep=False)
            self.start(TurnRequest(self.conversation.id, continue_from=kept.id, build=self.app.build))
            self._answer.feed("thinking", kept.thinking or "")
            self._answer.feed("answer", kept.text)
            self.transcript.changed(self._answer)

    def _drop_from(self, entry: Entry, keep: bool) -> None:
        """Takes what follows (and, unless kept, the entry itself) off the screen; it stays stored as a branch."""
        shown, index = self.transcript, self.transcript.index_of(entry)
        entries = shown.entries[: index + 1 if keep else index]
        gone = len([one for one in shown.entries[len(entries) :] if one.message is not None])
        hidden = gone - (not keep)
        told = f"{hidden} later message{'s stay' if hidden > 1 else ' stays'} on the other branch; [ and ] switch." if hidden > 0 else ""
        place = None if shown.follow else shown.place()
        edited = entry if entry.role == USER and not keep else None
        self.taken = Taken(list(shown.entries), shown.selected_entry, place, gone <= 1 and edited is None, edited, told)
        shown.set_entries(entries)
        if told:
            self.tell(told)

    def bring_back(self, taken: Taken, failed: bool) -> None:
        """A turn has stored nothing: what it took off the screen stands there again, and what is sent next goes on from there."""
        shown, here = self.transcript, self.transcript.selected_entry
        # The line about an earlier failure makes room for that about this one.
        shown.set_entries([entry for entry in taken.entries if not (failed and entry is self.failure_line)])
        places = [index for one in (here, taken.selected) if one is not None and (index := shown.index_of(one)) is not None]
        if places:
            shown.selected = places[0]
        elif shown.has_focus:
            shown.select_edge(True)
        if taken.place is not None and not failed:
            shown.go_to(*taken.place)
        self.untell(taken.told)

    def edit_does(self) -> str:
        """What the edit key does with the selected message, in a word; empty for nothing."""
        entry = self.transcript.selected_entry
        if entry is None or entry.message is None or self.readonly or self.pump.running:
            return ""
        if entry.role == ANSWER:
            return "continue" if _unfinished(entry) else ""
        return "edit"

    def action_edit_message(self) -> None:
        entry = self.chosen_entry(USER)
        if entry is None or entry.message is None or not self._may_run():
            return
        if entry.role == ANSWER:
            self._continue(entry)
        else:
            self.begin_edit(entry)

    def begin_edit(self, entry: Entry, keep_text: bool = False) -> None:
        """Puts a message of the user into the composer; sending makes a branch. What is there is put aside."""
        if self.editing is None and not keep_text:
            self.aside = self.composer.text, dict(self.composer.chips)
        self.editing = entry.message.id
        number = [one for one in self.transcript.entries if one.message is not None].index(entry) + 1
        self.edit_label = f"editing message {number} · Enter creates a branch"
        self.show_label()
        if not keep_text:
            self.composer.reset(entry.text)
        self.composer.focus()

    def cancel_edit(self) -> bool:
        if self.editing is None:
            return False
        self.end_edit()
        self.composer.reset()
        self._take_aside()
        self.show_waiting()
        return True

    def _take_aside(self) -> None:
        """The draft that an edit had taken the place of."""
        text, chips = self.aside
        self.aside = "", {}
        if text:
            self.composer.reset(text)
            self.composer.chips.update(chips)

    def end_edit(self) -> None:
        """What is sent next is a new message again."""
        if self.editing is not None:
            self.editing = None
            self.edit_label = ""
            self.show_label()

    def send_edit(self, text: str) -> None:
        """The edited text as a sibling; unchanged text is one more answer."""
        entry = next((one for one in self.transcript.entries if one.key == self.editing), None)
        request = self.app.controller.edit_request(self.editing, text)
        self.end_edit()
        self.composer.remember(text)
        self.composer.reset()
        self._take_aside()
        unchanged = request.regenerate is not None
        if entry is not None:
            self._drop_from(entry, keep=unchanged)
        self.start(request, None if unchanged else text)

    # Branches -----------------------------------------------------------------------------------------------------------

    async def refreshed(self) -> None:
        """After a turn: the record and the branch marks on screen, read off the event loop."""
        conversation, store = self.conversation, self.app.store
        if conversation is None:
            return
        try:
            record, forks = await asyncio.to_thread(lambda: (store.conversation(conversation.id), store.forks(conversation.id)))
        except StoreError as error:
            self.tell(str(error), "error")
            return
        if self.conversation is None or self.conversation.id != record.id:
            return
        self.conversation, self.forks = record, forks
        for entry in self.transcript.entries:
            if entry.message is not None and entry.branch != (branch := self.branch_of(entry.message.id)):
                entry.branch = branch
                self.transcript.changed(entry)
        self.show_header()

    def refresh_conversation(self) -> None:
        """After a small change of the record itself (settings, title)."""
        try:
            self.conversation = self.app.store.conversation(self.conversation.id)
        except StoreError as error:
            self.tell(str(error), "error")
        self.show_header()

    def _branching(self) -> Entry | None:
        """The selected message; where none is selected, the one that the header names: the last with branches."""
        selected = self.transcript.selected_entry
        if selected is not None and self.focused is self.transcript:
            return selected
        return next((entry for entry in reversed(self.transcript.entries) if entry.branch), None)

    def action_sibling(self, step: int) -> None:
        entry = self._branching()
        if self.pump.running:
            self.tell("Stop the running answer first (esc).", "warning")
            return
        # Asked of the store: the mark on screen comes a moment after the turn.
        siblings = self.app.store.siblings(entry.message.id) if entry is not None and entry.message is not None else []
        if len(siblings) < 2:
            self.tell("No other branch at this message.")
            return
        place = [one.id for one in siblings].index(entry.message.id) + step
        if 0 <= place < len(siblings):
            self._show_branch(siblings[place], entry)
        else:
            self.tell("This is the " + ("last" if step > 0 else "first") + " branch.")

    def _show_branch(self, message: Any, left: Entry) -> None:
        index = self.transcript.index_of(left)
        hidden = len([one for one in self.transcript.entries[index + 1 :] if one.message is not None])
        leaf = self.app.store.leaf_below(message.id)
        if not (self.readonly or self.app.readonly):
            self.app.store.set_leaf(self.conversation.id, leaf.id)
        self.spawn(self._switched(leaf.id, message.id, hidden, left.branch), "open")

    async def _switched(self, leaf: str, message: str, hidden: int, old: str) -> None:
        if await self.open_conversation(self.conversation.id, leaf=leaf, message=message) and hidden:
            self.tell(f"{hidden} later message{'s live' if hidden > 1 else ' lives'} on branch {old}; [ and ] return there.")

    def action_branches(self) -> None:
        entry = self._branching()
        if entry is None or not entry.branch:
            self.tell("No other branch at this message.")
            return
        siblings = self.app.store.siblings(entry.message.id)
        here = entry.message.id
        choices = [
            (one.id, f"{'>' if one.id == here else ' '} {number}  {(one.text.strip().splitlines() or ['(empty)'])[0][:60]}")
            for number, one in enumerate(siblings, 1)
        ]
        chosen = {one.id: one for one in siblings}
        self.app.push_screen(
            AskScreen("Branches here", choices), lambda name: name in chosen and name != here and self._show_branch(chosen[name], entry)
        )

    def action_delete_branch(self) -> None:
        entry = self.chosen_entry()
        if entry is None or entry.message is None or not self._may_run():
            return
        choices = [("no", "keep"), ("yes", "delete this message and all below it for good")]
        self.app.push_screen(AskScreen("Delete this branch?", choices), lambda answer: answer == "yes" and self._delete_branch(entry.message.id))

    def _delete_branch(self, message_id: str) -> None:
        try:
            self.app.store.delete_branch(message_id)
        except StoreError as error:
            self.tell(str(error), "error")
            return
        self.spawn(self.open_conversation(self.conversation.id), "open")

    def add_notice(self, text: str, error: bool = False) -> None:
        """A line of the program's own at the end of the transcript; said as well where the view is elsewhere."""
        self.transcript.append(notice(text, error=error))
        if not self.transcript.follow:
            self.tell(text.partition("\n")[0], "error" if error else "information")
