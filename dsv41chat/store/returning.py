"""What was written in a store in memory, while the disk refused, comes back to the disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsv41chat.store import records
from dsv41chat.store.conversations import Conversations
from dsv41chat.store.drafts import Drafts
from dsv41chat.store.errors import Locked
from dsv41chat.store.records import Conversation, Message
from dsv41chat.store.tree import Tree, insert_message, message_row

if TYPE_CHECKING:
    from dsv41chat.store.store import Store

COPIED = "(saved again)"


class Returning(Conversations, Tree, Drafts):
    opened: float  # epoch seconds

    def written(self) -> list[Conversation]:
        """The conversations that were written to since this store was opened, in that order."""
        return [conversation for conversation in reversed(self.titles()) if conversation.updated >= self.opened]

    def take_in(self, other: Store) -> dict[str, str]:
        """Store what was written in `other` since that was opened; all conversations or none.

        What goes on from a conversation of this store, under the same ids, comes back into it: messages that are here stay, an answer that
        could not be written to its end gets the rest, the others are added; title, settings, leaf and queue are those of `other`. Where
        the conversation was deleted, is open in another process or says something else by now, it stays as it is beside a copy, whose
        title says so. Returns the id of each here by its id there. Raises StoreError.
        """
        with self.db.write():
            made = {conversation.id: self._take_in(conversation, other.tree(conversation.id)) for conversation in other.written()}
            for there, here in made.items():
                self._take_queue(here, [item.text for item in other.queued(there)])
            return made

    def _take_in(self, source: Conversation, messages: Sequence[Message]) -> str:
        own = self._row("SELECT deleted FROM conversations WHERE id = ?", [source.id])
        if own is not None and own["deleted"] is None and self._goes_on(source.id, messages):
            self._go_on(source, messages)
            return source.id
        title = source.title if own is None else f"{source.title} {COPIED}".strip()
        free = not self._stored(messages)
        made = self.add_tree(messages, title=title, settings=source.settings, leaf_id=source.leaf_id, keep_ids=free, wish=source.id)
        return made.id

    def _goes_on(self, conversation_id: str, messages: Sequence[Message]) -> bool:
        """Whether the messages can be put into the conversation: it may be written to, and has nothing else under their ids."""
        try:
            self._require_writable(conversation_id)
        except Locked:
            return False
        there = {message.id: message for message in messages}
        place = lambda message: (message.conversation_id, message.parent_id, message.role)
        return all(place(one) == place(there[one.id]) and _same_so_far(one, there[one.id]) for one in self._stored(messages))

    def _go_on(self, source: Conversation, messages: Sequence[Message]) -> None:
        here = {message.id: message for message in self._stored(messages)}
        with self.db.write() as db:
            for message in messages:
                row, kept = message_row(message, message.id, source.id, message.parent_id), here.get(message.id)
                if kept is None:
                    insert_message(db, row)
                    continue
                names = []
                if len(kept.text) + len(kept.thinking) < len(message.text) + len(message.thinking):
                    names = ["text", "thinking", "reasoning_ids", "body_ids", "updated"]
                if kept.state in ("running", "interrupted"):
                    # Only the other store knows how its answer ended.
                    names += ["state", "finish", "ids", "ids_hash", "usage", "timing"]
                if names:
                    columns = ", ".join(f"{name} = ?" for name in names)
                    db.execute(f"UPDATE messages SET {columns}, owner = NULL WHERE id = ?", [*(row[name] for name in names), message.id])
            values = [source.title, records.to_json(source.settings), source.leaf_id, source.updated, self.clock(), source.id]
            db.execute("UPDATE conversations SET title = ?, settings = ?, leaf_id = ?, updated = ?, used = ? WHERE id = ?", values)

    def _take_queue(self, conversation_id: str, texts: Sequence[str]) -> None:
        """What waited there already was sent, or waits, in the other store."""
        for item in self.queued(conversation_id):
            self.queue_remove(item.id)
        for text in texts:
            self.queue_push(conversation_id, text)


def _same_so_far(one: Message, other: Message) -> bool:
    """Whether one says what the other says, up to its end or beyond; a message that is no answer never grows."""
    if one.role != "assistant":
        return one.text == other.text
    short, long = sorted((one, other), key=lambda message: len(message.text) + len(message.thinking))
    return long.text.startswith(short.text) and long.thinking.startswith(short.thinking)
