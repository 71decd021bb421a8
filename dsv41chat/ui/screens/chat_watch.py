"""The part of the chat screen for a conversation that another process writes in: what it adds appears here as well."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from dsv41chat.store import StoreError
from dsv41chat.ui.present import entry_of, update_entry
from dsv41chat.ui.render.entry import Entry

WATCH_S = 1.0
RUNNING = "being written in the other window"


@dataclass(frozen=True)
class News:
    """What the store holds now. stamp: tells whether anything is new; alive: the process that writes is still there."""

    stamp: tuple
    alive: bool
    conversation: Any
    messages: tuple
    forks: dict[str, tuple[int, int]]


class WatchActions:
    """Mixed into ChatScreen."""

    def init_watch(self) -> None:
        self._stamp: tuple = ()
        self._looking = self._told_gone = False
        self.set_interval(WATCH_S, self._watch)

    def watch_other(self, holder: int | None, newest: bool = True) -> None:
        """A conversation was opened. holder: the process that writes in it, None when that is this one or none.

        newest: the branch on the screen is the one that is written in.
        """
        self.holder, self._stamp, self._told_gone, self._on_newest = holder, (), False, newest

    def _watch(self) -> None:
        if self.holder is not None and self.conversation is not None and not self._looking:
            self._looking = True
            self.spawn(self._look(self.conversation.id), "watch")

    async def _look(self, conversation_id: str) -> None:
        try:
            news = await asyncio.to_thread(self._news, conversation_id)
        except StoreError:
            # A busy database: the next look is a second away.
            return
        finally:
            self._looking = False
        if self.holder is None or self.conversation is None or self.conversation.id != conversation_id:
            return
        if not news.alive and not self._told_gone:
            self._told_gone = True
            self.add_notice('No other process writes here any more. Palette: "Take over" goes on here.')
        if news.stamp == self._stamp:
            return
        # A reader who went to another branch stays there.
        follows = self.leaf_id == self._stamp[0] if self._stamp else self._on_newest
        self._stamp, self.conversation, self.forks = news.stamp, news.conversation, news.forks
        if follows:
            self.leaf_id = news.stamp[0]
            self._bring(news.messages)
            self.show_waiting()
        self.show_header()

    def _news(self, conversation_id: str) -> News:
        """Not on the event loop."""
        store = self.app.store
        conversation = store.conversation(conversation_id)
        holder = store.lock_holder(conversation_id)
        alive = holder is not None and not holder.here and holder.alive
        if conversation.leaf_id is None:
            return News((None,), alive, conversation, (), {})
        leaf = store.message(conversation.leaf_id)
        stamp = (leaf.id, leaf.state, len(leaf.text), len(leaf.thinking or ""), conversation.title)
        if stamp == self._stamp:
            return News(stamp, alive, conversation, (), {})
        return News(stamp, alive, conversation, tuple(store.path_to(leaf.id)), store.forks(conversation_id))

    def _bring(self, messages: tuple) -> None:
        """Makes the transcript show `messages`; what is shown already stays, and so does the place of the reader."""
        shown = [entry for entry in self.transcript.entries if entry.message is not None]
        same = 0
        for entry, message in zip(shown, messages):
            if entry.message != message and not self._goes_on(entry, message):
                break
            same += 1
        for entry in shown[same:]:
            self.transcript.drop(entry)
        for message in messages[same:]:
            entry = entry_of(message, self.branch_of(message.id))
            entry.thinking_view = self.thinking_view
            entry.running = message.state == "running"
            entry.state_note = RUNNING if entry.running else ""
            self.transcript.append(entry)

    def _goes_on(self, entry: Entry, message: Any) -> bool:
        """Adds what a message on the screen got since the last look. Returns False where it is not the same message grown."""
        thinking = message.thinking or ""
        if entry.key != message.id or not entry.running or not message.text.startswith(entry.text) or not thinking.startswith(entry.thinking):
            return False
        entry.feed("thinking", thinking[len(entry.thinking) :])
        entry.feed("answer", message.text[len(entry.text) :])
        if message.state != "running":
            entry.finish()
            entry.state_note = ""
        update_entry(entry, message)
        self.transcript.changed(entry)
        return True
