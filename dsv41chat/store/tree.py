"""Messages as a tree: every message has a parent, an edit or a retry is a sibling, nothing is overwritten."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlite_utils import Database

from dsv41chat.store import records
from dsv41chat.store.errors import Ambiguous, Locked, NotFound
from dsv41chat.store.locks import is_alive
from dsv41chat.store.part import Part
from dsv41chat.store.records import Conversation, Message
from dsv41chat.store.titles import title_of

# A message and everything below it, as the right side of IN.
_BELOW = """(
    WITH RECURSIVE below(id) AS (
      SELECT id FROM messages WHERE id = ?
      UNION ALL SELECT m.id FROM messages m JOIN below ON m.parent_id = below.id
    )
    SELECT id FROM below
)"""


# Of a message m, its conversation c and what is being written there, d: without an answer, and written again or off the branch on screen.
TAKEN_BACK = """(
    m.role = 'user' AND (m.parent_id IS c.leaf_id OR m.id IS d.editing) AND NOT EXISTS (SELECT 1 FROM messages n WHERE n.parent_id = m.id)
)"""
COUNTED = f"m.role <> 'system' AND NOT {TAKEN_BACK}"
WITH_DRAFTS = "conversations c LEFT JOIN drafts d ON coalesce(d.conversation_id, '') = c.id"
OWN_MESSAGES = f"{WITH_DRAFTS} JOIN messages m ON m.conversation_id = c.id WHERE c.id = ?"


class Tree(Part):
    def add_message(
        self,
        conversation_id: str,
        parent_id: str | None,
        role: str,
        text: str,
        *,
        ids: Sequence[int] | None = None,
        meta: Mapping[str, Any] | None = None,
        queue_id: int | None = None,
        clear_draft: bool = False,
    ) -> Message:
        """Store a whole message below `parent_id` (None: at the root) and make it the leaf. Committed before it returns.

        ids: the text as it was encoded. queue_id, clear_draft: this text came from there; it leaves in the same transaction, so
        that it is never in two places and never in none. The first user message gives the conversation its title.
        Raises NotFound (conversation, or parent not in it), Locked (open in another process), ValueError (role).
        """
        if role not in records.ROLES:
            raise ValueError(f"role {role!r} is none of {', '.join(records.ROLES)}")
        text = records.storable(text)
        with self.db.write() as db:
            self._require_writable(conversation_id)
            self._require_parent(conversation_id, parent_id)
            now = self.clock()
            message_id = records.new_id(records.MESSAGE_DIGITS)
            insert_message(
                db,
                {
                    "id": message_id,
                    "conversation_id": conversation_id,
                    "parent_id": parent_id,
                    "role": role,
                    "text": text,
                    "ids": records.pack_ids(ids),
                    "state": "complete",
                    "meta": records.to_json(meta),
                    "created": now,
                },
            )
            if queue_id is not None:
                db.execute("DELETE FROM queue WHERE id = ?", [queue_id])
            if clear_draft:
                # The first message of a conversation was typed before there was one.
                db.execute(
                    "DELETE FROM drafts WHERE conversation_id = ? OR (conversation_id IS NULL AND rtrim(text, ?) = rtrim(?, ?))",
                    [conversation_id, " \r\n", text, " \r\n"],
                )
            if role == "user":
                db.execute("UPDATE conversations SET title = ? WHERE id = ? AND title = '' AND named = 0", [title_of(text), conversation_id])
            return self.message(message_id)

    def set_ids(self, message_id: str, ids: Sequence[int], meta: Mapping[str, Any]) -> None:
        """Keep how a text was encoded. meta: added to what the message has already. Raises NotFound."""
        with self.db.write() as db:
            kept = self.message(message_id).meta or {}
            values = [records.pack_ids(ids), records.to_json({**kept, **meta}), message_id]
            db.execute("UPDATE messages SET ids = ?, meta = ? WHERE id = ?", values)

    def message(self, ref: str, conversation_id: str | None = None) -> Message:
        """The message with this id or this unique beginning of one (>= 4 characters). Raises NotFound or Ambiguous."""
        rows = self._messages("id = ?", [ref])
        if not rows and len(ref) >= 4:
            rows = self._messages("id >= ? AND id < ?", [ref.lower(), ref.lower() + "g"])
        if conversation_id is not None:
            rows = [row for row in rows if row.conversation_id == conversation_id]
        if not rows:
            if self._row("SELECT 1 FROM conversations WHERE id = ?", [ref]):
                raise NotFound(f"{ref!r} is a conversation; the id of a message is wanted.", f"dsv41chat conversations show {ref} --tree")
            where = f" in conversation {conversation_id}" if conversation_id else ""
            raise NotFound(f"There is no message {ref!r}{where}.", "the id of a message: dsv41chat conversations show ID --tree")
        if len(rows) > 1:
            candidates = tuple((row.id, row.text[:60]) for row in rows)
            raise Ambiguous(f"{ref!r} fits {len(rows)} messages", "give more of the id", candidates)
        return rows[0]

    def path_to(self, message_id: str | None) -> list[Message]:
        """From the root to `message_id`; empty for None. Raises NotFound."""
        if message_id is None:
            return []
        path = self._messages(
            "seq IN (SELECT seq FROM above)",
            [message_id],
            before="""
            WITH RECURSIVE above(seq, parent_id) AS (
              SELECT seq, parent_id FROM messages WHERE id = ?
              UNION ALL SELECT m.seq, m.parent_id FROM messages m JOIN above ON m.id = above.parent_id
            )
            """,
        )
        if not path:
            raise NotFound(f"There is no message {message_id!r}.")
        return path

    def tree(self, conversation_id: str) -> list[Message]:
        """All messages of all branches in order of arrival; a parent comes before its children."""
        return self._messages("conversation_id = ?", [conversation_id])

    def taken_back(self, conversation_id: str) -> frozenset[str]:
        """Messages that are no part of the conversation for now: their text is back in the composer, or was taken out of it too."""
        rows = self._rows(f"SELECT m.id FROM {OWN_MESSAGES} AND {TAKEN_BACK}", [conversation_id])
        return frozenset(row["id"] for row in rows)

    def message_count(self, conversation_id: str) -> int:
        """The messages of all branches, as every list counts them: without the system text and without those that were taken back."""
        return self._row(f"SELECT count(*) AS n FROM {OWN_MESSAGES} AND {COUNTED}", [conversation_id])["n"]

    def shown_leaf(self, conversation_id: str, leaf_id: str | None = None) -> str | None:
        """Where the branch that ends in `leaf_id` (default: the one on screen) ends for a reader: before a message that was taken back."""
        leaf_id = leaf_id or self._conversation(conversation_id).leaf_id
        return self.message(leaf_id).parent_id if leaf_id in self.taken_back(conversation_id) else leaf_id

    def children(self, message_id: str) -> list[Message]:
        """The answers to, or follow-ups of, a message, oldest first."""
        return self._messages("parent_id = ?", [message_id])

    def roots(self, conversation_id: str) -> list[Message]:
        """The messages without a parent, oldest first."""
        return self._messages("conversation_id = ? AND parent_id IS NULL", [conversation_id])

    def siblings(self, message_id: str) -> list[Message]:
        """Every message with the same parent, the message itself included, oldest first."""
        message = self.message(message_id)
        return self.roots(message.conversation_id) if message.parent_id is None else self.children(message.parent_id)

    def forks(self, conversation_id: str) -> dict[str, tuple[int, int]]:
        """Messages that have siblings: id -> (place from 1, number of siblings), for the marks like 2/3."""
        rows = self._rows(
            """
            SELECT id, place, among FROM (
              SELECT id, row_number() OVER (PARTITION BY parent_id ORDER BY seq) AS place, count(*) OVER (PARTITION BY parent_id) AS among
              FROM messages WHERE conversation_id = ?
            ) WHERE among > 1
            """,
            [conversation_id],
        )
        return {row["id"]: (row["place"], row["among"]) for row in rows}

    def leaf_below(self, message_id: str) -> Message:
        """The leaf to show when a branch is entered at `message_id`: of those below it, the one looked at last."""
        row = self._row(
            f"""
            SELECT id FROM messages m WHERE id IN {_BELOW} AND NOT EXISTS (SELECT 1 FROM messages c WHERE c.parent_id = m.id)
            ORDER BY viewed DESC, seq DESC LIMIT 1
            """,
            [message_id],
        )
        if row is None:
            raise NotFound(f"There is no message {message_id!r}.")
        return self.message(row["id"])

    def set_leaf(self, conversation_id: str, message_id: str | None) -> None:
        """Remember which branch is on screen."""
        with self.db.write() as db:
            self._require_conversation(conversation_id)
            self._require_parent(conversation_id, message_id)
            now = self.clock()
            db.execute("UPDATE conversations SET leaf_id = ?, used = ? WHERE id = ?", [message_id, now, conversation_id])
            db.execute("UPDATE messages SET viewed = ? WHERE id = ?", [now, message_id])

    def delete_branch(self, message_id: str) -> int:
        """Remove a message and everything below it for good. Returns how many messages went.

        The leaf moves to a remaining sibling's branch, else to the parent. Raises Locked while an answer in it is being written.
        """
        with self.db.write() as db:
            message = self.message(message_id)
            self._require_writable(message.conversation_id)
            if self._row(f"SELECT 1 FROM messages WHERE id IN {_BELOW} AND state = 'running' LIMIT 1", [message_id]):
                raise Locked("an answer on this branch is being written", "stop it first")
            gone = db.execute(f"DELETE FROM messages WHERE id IN {_BELOW}", [message_id]).rowcount
            # The foreign key has set the leaf to NULL if it went too.
            if self._row("SELECT 1 FROM conversations WHERE id = ? AND leaf_id IS NULL", [message.conversation_id]):
                others = self.roots(message.conversation_id) if message.parent_id is None else self.children(message.parent_id)
                leaf = self.leaf_below(others[-1].id).id if others else message.parent_id
                db.execute("UPDATE conversations SET leaf_id = ? WHERE id = ?", [leaf, message.conversation_id])
        self._tell_deleted(message.conversation_id)
        return gone

    def prompt_history(self, conversation_id: str | None = None, limit: int = 200) -> list[str]:
        """User messages newest first, those of `conversation_id` before all others, each text once."""
        newest = "m.role = 'user' ORDER BY m.seq DESC LIMIT ?"
        own = self._rows(f"SELECT m.text FROM messages m WHERE m.conversation_id = ? AND {newest}", [conversation_id, limit])
        alive = "messages m JOIN conversations c ON c.id = m.conversation_id WHERE c.deleted IS NULL"
        others = self._rows(f"SELECT m.text FROM {alive} AND {newest}", [limit])
        return list(dict.fromkeys(row["text"] for row in own + others))[:limit]

    def fork(self, conversation_id: str, leaf_id: str | None = None, title: str | None = None) -> Conversation:
        """Copy the branch that ends in `leaf_id` (default: the one on screen) into a new conversation with the same settings."""
        with self.db.write():
            source = self._conversation(conversation_id)
            path = self.path_to(leaf_id or source.leaf_id)
            return self.add_tree(path, title=title or source.title, settings=source.settings)

    def add_tree(
        self,
        messages: Iterable[Message],
        *,
        title: str = "",
        settings: Mapping[str, Any] | None = None,
        leaf_id: str | None = None,
        keep_ids: bool = False,
        wish: str | None = None,
    ) -> Conversation:
        """Store messages of another conversation or store, parents before children, as a new conversation.

        leaf_id: id, among `messages`, of the new leaf; default the last one. keep_ids: message ids stay (for a store that does not
        have them). wish: id of the conversation, if it is free. Answers that were running become interrupted.
        Raises NotFound for a parent that is not among the messages.
        """
        with self.db.write() as db:
            conversation = self.new_conversation(title or None, settings, wish=wish)
            names: dict[str | None, str | None] = {None: None}
            for message in messages:
                if message.parent_id not in names:
                    raise NotFound(f"the parent {message.parent_id!r} of message {message.id!r} is not among the messages before it")
                names[message.id] = message.id if keep_ids else records.new_id(records.MESSAGE_DIGITS)
                insert_message(db, message_row(message, names[message.id], conversation.id, names[message.parent_id]))
            if leaf_id is not None:
                db.execute("UPDATE conversations SET leaf_id = ? WHERE id = ?", [names[leaf_id], conversation.id])
            if not title:
                db.execute("UPDATE conversations SET title = ? WHERE id = ?", [self._automatic_title(conversation.id), conversation.id])
            db.execute("UPDATE conversations SET updated = ?, used = ? WHERE id = ?", [conversation.created, conversation.created, conversation.id])
            return self._conversation(conversation.id)

    def add_conversations(self, exported: Iterable[Any]) -> list[tuple[Conversation, bool, bool]]:
        """Store conversations as they were exported (see `Exported` in ui/importing.py), all or none, with their times and title.

        Where any id is taken, by whatever message, that conversation gets new ids for all of its messages.
        Returns each as (what it became, whether its own id was taken, whether an id of its messages was).
        """
        made = []
        with self.db.write() as db:
            for one in exported:
                taken = bool(self._stored(one.messages))
                own_taken = self._row("SELECT 1 FROM conversations WHERE id = ?", [one.id]) is not None
                wish = None if taken else one.id
                key = self.add_tree(
                    one.messages, title=one.title, settings=one.settings, leaf_id=one.leaf, keep_ids=not taken, wish=wish
                ).id  # fmt: skip
                if one.leaf is None:
                    # Its messages were taken back.
                    db.execute("UPDATE conversations SET leaf_id = NULL WHERE id = ?", [key])
                named = bool(one.title) and one.title != self._automatic_title(key)
                values = [int(named), int(one.pinned), one.created, one.updated, self.clock(), key]
                db.execute("UPDATE conversations SET named = ?, pinned = ?, created = ?, updated = ?, used = ? WHERE id = ?", values)
                made.append((self._conversation(key), own_taken, taken))
        return made

    # -- parts

    def _stored(self, messages: Iterable[Message]) -> list[Message]:
        """The messages here that have the ids of these."""
        return self._messages("id IN (SELECT value FROM json_each(?))", [json.dumps([message.id for message in messages])])

    def _require_parent(self, conversation_id: str, parent_id: str | None) -> None:
        if parent_id is None:
            return
        if self._row("SELECT 1 FROM messages WHERE id = ? AND conversation_id = ?", [parent_id, conversation_id]) is None:
            raise NotFound(f"There is no message {parent_id!r} in conversation {conversation_id}.", "dsv41chat conversations show ID --tree")

    def _messages(self, where: str, params: Sequence[Any], before: str = "") -> list[Message]:
        rows = self._rows(f"{before} SELECT {records.MESSAGE_COLUMNS}, owner FROM messages WHERE {where} ORDER BY seq", params)
        if self.db.readonly:
            # Nobody can turn the answers of a dead process into interrupted ones here; show them as what they are.
            for row in rows:
                if row["state"] == "running" and not self._owner_alive(row["owner"]):
                    row["state"] = "interrupted"
        return [records.message(row) for row in rows]

    def _owner_alive(self, token: str | None) -> bool:
        row = self._row("SELECT * FROM processes WHERE token = ?", [token])
        return row is not None and is_alive(row, self.clock())


def message_row(message: Message, id: str, conversation_id: str, parent_id: str | None) -> dict[str, Any]:
    """The columns of a message that comes from another conversation or store. An answer that was running is interrupted."""
    return {
        "id": id,
        "conversation_id": conversation_id,
        "parent_id": parent_id,
        "role": message.role,
        "text": message.text,
        "thinking": message.thinking,
        "ids": message.ids_blob,
        "reasoning_ids": message.reasoning_blob,
        "body_ids": message.body_blob,
        "ids_hash": message.ids_hash,
        "state": "interrupted" if message.state == "running" else message.state,
        "finish": message.finish,
        "build_name": message.build_name,
        "build_fingerprint": message.build_fingerprint,
        "params": records.to_json(message.params),
        "usage": records.to_json(message.usage),
        "timing": records.to_json(message.timing),
        "meta": records.to_json(message.meta),
        "created": message.created,
        "updated": message.updated or message.created,
    }


def insert_message(db: Database, row: dict[str, Any]) -> None:
    """Insert a row of `messages` (with `created`) and make it the leaf of its conversation."""
    now = row["created"]
    db["messages"].insert({"updated": now, "viewed": now, **row})
    db.execute("UPDATE conversations SET leaf_id = ?, updated = ?, used = ? WHERE id = ?", [row["id"], now, now, row["conversation_id"]])
