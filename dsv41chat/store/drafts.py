"""What was typed and not sent yet: drafts and the queue. Both survive whatever ends the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsv41chat.store import records
from dsv41chat.store.errors import NotFound, QueueFull
from dsv41chat.store.part import Part
from dsv41chat.store.records import Draft, Queued

QUEUE_LIMIT = 5


class Drafts(Part):
    def save_draft(
        self, conversation_id: str | None, text: str, *, editing: str | None = None, meta: Mapping[str, Any] | None = None
    ) -> None:
        """Keep what stands in the composer; an empty text removes it. conversation_id None: before there is a conversation.

        editing: the message that the text is to replace. meta: chips and the like.
        """
        with self.db.write() as db:
            db.execute("DELETE FROM drafts WHERE conversation_id IS ?", [conversation_id])
            if text or meta:
                if conversation_id is not None:
                    self._require_conversation(conversation_id)
                db.execute(
                    "INSERT INTO drafts(conversation_id, text, editing, meta, updated) VALUES (?, ?, ?, ?, ?)",
                    [conversation_id, records.storable(text), editing, records.to_json(meta), self.clock()],
                )

    def draft(self, conversation_id: str | None) -> Draft | None:
        """What was typed there and not sent."""
        row = self._row("SELECT * FROM drafts WHERE conversation_id IS ?", [conversation_id])
        return None if row is None else Draft(row["text"], row["editing"], records.from_json(row["meta"]), row["updated"])

    def queue_push(self, conversation_id: str, text: str, meta: Mapping[str, Any] | None = None) -> Queued:
        """Store a message that waits for the running turn; the draft is cleared with it. Raises QueueFull at QUEUE_LIMIT."""
        with self.db.write() as db:
            self._require_conversation(conversation_id)
            if len(self.queued(conversation_id)) >= QUEUE_LIMIT:
                raise QueueFull(f"{QUEUE_LIMIT} messages wait already", "wait for the answer, or take one back")
            cursor = db.execute(
                "INSERT INTO queue(conversation_id, text, meta, created) VALUES (?, ?, ?, ?)",
                [conversation_id, records.storable(text), records.to_json(meta), self.clock()],
            )
            db.execute("DELETE FROM drafts WHERE conversation_id = ?", [conversation_id])
            return _queued(self._row("SELECT * FROM queue WHERE id = ?", [cursor.lastrowid]))

    def queued(self, conversation_id: str) -> list[Queued]:
        """Waiting messages, the next one first. `add_message(queue_id=...)` sends one."""
        return [_queued(row) for row in self._rows("SELECT * FROM queue WHERE conversation_id = ? ORDER BY id", [conversation_id])]

    def queue_take_last(self, conversation_id: str) -> Draft | None:
        """Take the newest waiting message back: it becomes the draft in the same transaction. None if nothing waits."""
        with self.db.write():
            waiting = self.queued(conversation_id)
            if not waiting:
                return None
            self.save_draft(conversation_id, waiting[-1].text, meta=waiting[-1].meta)
            self.queue_remove(waiting[-1].id)
            return self.draft(conversation_id)

    def queue_remove(self, queue_id: int) -> None:
        """Drop a waiting message. Raises NotFound."""
        with self.db.write() as db:
            if db.execute("DELETE FROM queue WHERE id = ?", [queue_id]).rowcount == 0:
                raise NotFound(f"no waiting message {queue_id}", "it was sent or removed")


def _queued(row: Mapping[str, Any]) -> Queued:
    return Queued(row["id"], row["conversation_id"], row["text"], records.from_json(row["meta"]), row["created"])
