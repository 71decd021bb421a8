"""The part of the chat screen that keeps what is being written: drafts, chips, and the line above the composer."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

from textual.widgets import Static

from dsv41chat.engine.errors import EngineError
from dsv41chat.store import Store, StoreError
from dsv41chat.ui.commands import hint
from dsv41chat.ui.messages import Completions
from dsv41chat.ui.render.wrap import crop_cells
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.widgets.foot import SHORT, SHORT_LINES, packed

DRAFT_S = 1.0


@dataclass
class Count:
    """The tokens of a chip. tokens: None until they are counted; stopped: nobody wants to know any more."""

    text: str
    tokens: int | None = None
    stopped: bool = False


class DraftActions:
    """Mixed into ChatScreen. Handlers go by their names: Textual collects `@on` only from its own classes."""

    def init_drafts(self) -> None:
        self._draft_timer: Any = None
        self._newest_draft: tuple | None = None
        # By conversation: the newest one of another does not make up for what this one's store still holds.
        self._newest_of: dict[str | None, tuple] = {}
        self._stored_draft: tuple | None = None
        self._draft_lock = threading.Lock()
        self._completing = self._completing_for = ""
        self._counts: dict[str, Count] = {}  # by the mark of their chip

    def on_completions(self, event: Completions) -> None:
        self._completing = "  ".join(event.found) or hint(self.composer.text)
        self._completing_for = self.composer.text
        self.show_label()

    def show_label(self) -> None:
        """The line above the composer: what is edited, what Tab offers, what the chips hold."""
        counted = {} if self._completing else {mark: count.tokens for mark, count in self._counts.items() if count.tokens is not None}
        chips = [f"{mark.strip('[]')}, {tokens:,} tokens" for mark, tokens in counted.items()]
        # For the moment after a stop Esc is still the one that stopped, and does not cancel.
        editing = [self.edit_label, "" if self.just_stopped() else "Esc cancels"] if self.edit_label else []
        parts = [part for part in (*editing, *self.reading_label(), self._completing, *chips) if part]
        line = self.query_one("#above", Static)
        # Two lines where there is room: the names of all commands do not fit into one of eighty columns.
        width = max(10, self.size.width - 4)
        items = [crop_cells(visible_line(item), width) for item in " · ".join(parts).split("  ") if item]
        line.update(packed(items, width, SHORT_LINES if self.size.height < SHORT else 2))
        line.display = bool(parts)

    def _count_chips(self) -> None:
        """Has the tokens of each chip in the composer counted, off the event loop, and of no other: what is gone from it is dropped."""
        chips = {mark: text for mark, text in self.composer.chips.items() if mark in self.composer.text and mark != text}
        for mark in [mark for mark, count in self._counts.items() if chips.get(mark) != count.text]:
            self._counts.pop(mark).stopped = True
        for mark, text in chips.items():
            if mark not in self._counts:
                self._counts[mark] = count = Count(text)
                self.spawn(self._count(count), "chips", exclusive=False)
        self._show_counts()

    async def _count(self, count: Count) -> None:
        try:
            count.tokens = await asyncio.to_thread(self.app.count_tokens, count.text, lambda: count.stopped)
        except EngineError:
            # Without a tokenizer there is no count; the text is sent all the same.
            return
        if not count.stopped:
            self._show_counts()

    def _show_counts(self) -> None:
        self.status.forecast = sum(count.tokens or 0 for count in self._counts.values())
        self.show_label()
        self.show_status()

    def on_draft_changed(self) -> None:
        text = self.composer.text
        if text != self._completing_for:
            offered, self._completing, self._completing_for = self._completing, hint(text), text
            if offered != self._completing or self.edit_label:
                self.show_label()
        if self.composer.chips or self._counts:
            self._count_chips()
        if self._draft_timer is None:
            self._draft_timer = self.set_timer(DRAFT_S, self.save_draft)

    def save_draft(self, now: bool = False) -> None:
        """Stores what is in the composer, so that it is there after any end of the program.

        A commit waits for the disk, so it happens in another thread, unless the program is leaving (`now`).
        """
        if self._draft_timer is not None:
            self._draft_timer.stop()
            self._draft_timer = None
        draft = self._draft()
        if draft is None:
            return
        # Leaving, it must be in the store: that another thread is to write it is not enough.
        if draft == (self._stored_draft if now else self._newest_draft):
            return
        self._newest_draft = self._newest_of[draft[0]] = draft
        if now:
            self._write_draft(draft)
        else:
            self.spawn(asyncio.to_thread(self._write_draft, draft), "draft", exclusive=False)

    def _draft(self) -> tuple | None:
        """What is in the composer, as (conversation, text, the message it is to replace, meta); None where it is not to be stored."""
        if self.readonly or self.app.readonly or not self.is_mounted:
            return None
        if self.starting and self.app.begin.view is not None:
            # What is typed until then goes into the conversation that opens; the draft without one is another text.
            return None
        key = self.conversation.id if self.conversation else None
        text = self.unread(self.composer.text)
        if key is None and self.held:
            # What waits for the build has no conversation to be queued in yet.
            text = f"{self.held}\n\n{text}".rstrip()
        chips = {mark: held for mark, held in self.composer.chips.items() if mark != held and mark in text}
        meta = {"chips": chips} if chips else None
        if text and self.editing and self.aside[0]:
            meta = {**(meta or {}), "aside": list(self.aside)}
        return key, text, self.editing if text else None, meta

    def _write_draft(self, draft: tuple) -> None:
        with self._draft_lock:
            key, text, editing, meta = draft
            if draft is not self._newest_of.get(key):
                # A newer one waits behind this.
                return
            try:
                self.app.store.save_draft(key, text, editing=editing, meta=meta)
                self._stored_draft = draft
            except StoreError as error:
                self.app.call_later(self.app.not_saved, error)

    def take_drafts(self, disk: Store, taken: dict[str, str]) -> None:
        """Stores what is, and was, being written where nothing could be stored. taken: the ids on the disk of conversations, by those in memory.

        Raises StoreError.
        """
        now = self._draft()
        drafts = self._newest_of if now is None else {**self._newest_of, now[0]: now}
        for key, text, editing, meta in drafts.values():
            if key is None or key in taken:
                there = taken.get(key)
                # A copy has messages of its own.
                disk.save_draft(there, text, editing=editing if there == key else None, meta=meta)

    def forget_first_draft(self) -> None:
        """What was written before there was a conversation is a message now."""
        self._newest_draft = self._newest_of[None] = draft = (None, "", None, None)
        self.spawn(asyncio.to_thread(self._write_draft, draft), "draft", exclusive=False)

    def keep_first_draft(self, draft: Any) -> None:
        """What an earlier run left where there is no conversation yet: a new one begins with it."""
        if draft is not None:
            self._newest_of[None] = (None, draft.text, None, draft.meta)

    def restore_first_draft(self) -> None:
        """What was being written where there is no conversation yet, when that was left for another."""
        _, text, _, meta = self._newest_of.get(None, (None, "", None, None))
        self.composer.reset("" if self.held else text)
        self.composer.chips.update((meta or {}).get("chips", {}) if self.composer.text else {})

    def renew_draft(self) -> None:
        """The stored draft went with the message that it became; what was typed meanwhile is stored again, soon."""
        if not self.composer.text:
            return
        if self._newest_draft is not None and self._newest_draft[0] is not None:
            self._newest_of.pop(self._newest_draft[0], None)
            self._newest_draft = self._stored_draft = None
        if self._draft_timer is None:
            self._draft_timer = self.set_timer(DRAFT_S, self.save_draft)

    def restore_draft(self, draft: Any, early: str = "", apart: bool = False) -> None:
        """The stored draft into the composer, and behind it what was typed before the program was ready.

        apart: the draft was another window's, so a blank line stands between the two.
        A draft that was to replace a message is an edit of it again, where that message is on the screen.
        """
        self.end_edit()
        self.aside = "", {}
        typed = dict(self.composer.chips) if early else {}
        self.composer.reset(draft.text if draft else "")
        if draft and draft.meta:
            self.composer.chips.update(draft.meta.get("chips", {}))
        if draft and draft.editing and not self.readonly:
            entry = next((entry for entry in self.transcript.entries if entry.key == draft.editing), None)
            if entry is not None:
                self.begin_edit(entry, keep_text=True)
                text, chips = (draft.meta or {}).get("aside", ("", {}))
                self.aside = text, chips
        if early:
            self.composer.insert(f"\n\n{early}" if apart and self.composer.text else early)
            self.composer.chips.update({mark: text for mark, text in typed.items() if mark not in self.composer.chips})
