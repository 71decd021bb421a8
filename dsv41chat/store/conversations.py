"""Conversations: made, found, listed, renamed, deleted and purged. Their messages are in tree.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dsv41chat.store import records
from dsv41chat.store.errors import Ambiguous, NotFound
from dsv41chat.store.part import Part, lock_name
from dsv41chat.store.records import Conversation, ConversationSummary
from dsv41chat.store.titles import title_of
from dsv41chat.store.tree import COUNTED, WITH_DRAFTS

MIN_PREFIX = 4
DAY_S = 86_400.0
MERGE_PAGES = 2000  # of the index per step of a purge, some tens of milliseconds
_ORDERS = {
    "recent": "c.updated DESC",
    "title": "c.title COLLATE NOCASE",
    "created": "c.created DESC",
    "size": "messages DESC, c.updated DESC",
}


class Conversations(Part):
    def new_conversation(self, title: str | None = None, settings: Mapping[str, Any] | None = None, *, wish: str | None = None) -> Conversation:
        """An empty conversation. Without `title` the first user message gives it one. wish: its id, if no other has that."""
        with self.db.write() as db:
            conversation_id = self._free_id(wish)
            now = self.clock()
            row = {"id": conversation_id, "title": records.storable(title or ""), "named": int(bool(title))}
            db["conversations"].insert({**row, "settings": records.to_json(settings or {}), "created": now, "updated": now, "used": now})
            return self._conversation(conversation_id)

    def conversation(self, ref: str, *, deleted: bool = False) -> Conversation:
        """The conversation with this id, this exact title, or this unique beginning of an id (>= 4 characters).

        deleted: look among the deleted ones instead. Raises NotFound or Ambiguous.
        """
        alive = f"deleted IS {'NOT NULL' if deleted else 'NULL'}"
        select = f"SELECT * FROM conversations WHERE {alive} AND"
        start = ref.lower()
        found = self._rows(f"{select} id = ?", [start])
        if not found and ref:
            found = self._rows(f"{select} title = ? ORDER BY used DESC", [ref])
        if not found and len(ref) >= MIN_PREFIX:
            # "g" comes after every hex digit.
            found = self._rows(f"{select} id >= ? AND id < ? ORDER BY used DESC", [start, start + "g"])
        if not found:
            what = "deleted conversation" if deleted else "conversation"
            hint = "dsv41chat conversations list" + (" --archived" if deleted else "")
            raise NotFound(f"There is no {what} {ref!r}.", hint)
        if len(found) > 1:
            candidates = tuple((row["id"], row["title"]) for row in found)
            names = ", ".join(f"{key} {title!r}" for key, title in candidates[:5])
            raise Ambiguous(f"{ref!r} fits {len(found)} conversations: {names}", "give more of the id", candidates)
        return records.conversation(found[0])

    def last_conversation(self) -> Conversation | None:
        """The conversation that was used last, None if there is none."""
        row = self._row("SELECT * FROM conversations WHERE deleted IS NULL ORDER BY used DESC, rowid DESC LIMIT 1")
        return None if row is None else records.conversation(row)

    def list_conversations(
        self,
        search: str | None = None,
        limit: int | None = None,
        *,
        offset: int = 0,
        titles_only: bool = False,
        build: str | None = None,
        deleted: bool = False,
        sort: str = "recent",
        pinned_first: bool = False,
    ) -> list[ConversationSummary]:
        """Lines of the list, newest first.

        search: part of the title, whatever its case, or (unless titles_only) words of any message. build: name of the build of
        the newest answer. deleted: the deleted ones instead. sort: recent, title, created or size. Messages are counted as in `message_count`.
        """
        where, params = [f"c.deleted IS {'NOT NULL' if deleted else 'NULL'}"], []
        if search:
            chosen = self._matching(search, titles_only)
            if not chosen:
                return []
            where.append("c.id IN (SELECT value FROM json_each(?))")
            params.append(json.dumps(chosen))
        if build is not None:
            where.append("a.build_name = ?")
            params.append(build)
        order = ("c.pinned DESC, " if pinned_first else "") + _ORDERS[sort] + ", c.rowid DESC"
        rows = self._rows(
            f"""
            SELECT c.*, a.usage, a.build_name, a.build_fingerprint,
              (SELECT count(*) FROM messages m WHERE m.conversation_id = c.id AND {COUNTED}) AS messages
            FROM {WITH_DRAFTS} LEFT JOIN messages a ON a.seq =
              (SELECT max(seq) FROM messages m WHERE m.conversation_id = c.id AND m.role = 'assistant')
            WHERE {" AND ".join(where)} ORDER BY {order} LIMIT ? OFFSET ?
            """,
            [*params, -1 if limit is None else limit, offset],
        )
        return [_summary(row) for row in rows]

    def titles(self, *, deleted: bool = False) -> list[Conversation]:
        """Every conversation, newest first as in the list, without a look at the messages: damage there does not hide it."""
        alive = f"deleted IS {'NOT NULL' if deleted else 'NULL'}"
        return [records.conversation(row) for row in self._rows(f"SELECT * FROM conversations WHERE {alive} ORDER BY updated DESC, rowid DESC")]

    def rename(self, conversation_id: str, title: str) -> None:
        """Give a title. An empty one brings back the automatic title."""
        title = records.storable(title.strip())
        with self.db.write() as db:
            self._require_conversation(conversation_id)
            db.execute(
                "UPDATE conversations SET title = ?, named = ? WHERE id = ?",
                [title or self._automatic_title(conversation_id), int(bool(title)), conversation_id],
            )

    def pin(self, conversation_id: str, pinned: bool = True) -> None:
        """Keep a conversation at the top of the list, or no longer."""
        self._set(conversation_id, "pinned", int(pinned))

    def set_settings(self, conversation_id: str, settings: Mapping[str, Any]) -> None:
        """Replace what the conversation keeps for itself (sampling, effort, system)."""
        self._set(conversation_id, "settings", records.to_json(settings))

    def set_view(self, conversation_id: str, view: Mapping[str, Any]) -> None:
        """Remember the state of the screen (scroll position, folds)."""
        self._set(conversation_id, "view", records.to_json(view))

    def touch(self, conversation_id: str) -> None:
        """The conversation was opened: `last_conversation` is this one now."""
        self._set(conversation_id, "used", self.clock())

    def delete(self, *conversation_ids: str) -> None:
        """Take conversations out of every list; `undelete` brings them back until `purge`. All or none.

        Raises NotFound, or Locked if another process has one open.
        """
        with self.db.write() as db:
            for conversation_id in conversation_ids:
                self._require_writable(conversation_id)
                db.execute("UPDATE conversations SET deleted = ? WHERE id = ? AND deleted IS NULL", [self.clock(), conversation_id])
        self._tell_deleted(*conversation_ids)

    def undelete(self, conversation_id: str) -> None:
        """Bring a deleted conversation back."""
        self._set(conversation_id, "deleted", None)

    def purge(self, *conversation_ids: str) -> None:
        """Remove conversations for good, and their text from the file: pages and index entries are overwritten.

        Takes seconds when there are very many other messages; others may write meanwhile. Raises as `delete`.
        """
        if not conversation_ids:
            return
        with self.db.write() as db:
            for conversation_id in conversation_ids:
                self._require_writable(conversation_id)
                db.execute("DELETE FROM messages WHERE conversation_id = ?", [conversation_id])
                db.execute("DELETE FROM conversations WHERE id = ?", [conversation_id])
        self._tell_deleted(*conversation_ids)
        self._merge_index()
        with self.db.read() as db:
            # Old pages live on in the write-ahead log until it is emptied. A reader in another process may prevent that
            # now; the next checkpoint does it then.
            db.conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def purge_deleted(self, keep_days: float) -> tuple[str, ...]:
        """Purge what was deleted more than `keep_days` ago. Returns the ids."""
        rows = self._rows("SELECT id FROM conversations WHERE deleted < ? ORDER BY deleted", [self.clock() - keep_days * DAY_S])
        free = [row["id"] for row in rows if (holder := self.locks.holder(lock_name(row["id"]))) is None or holder.here or not holder.alive]
        self.purge(*free)
        return tuple(free)

    # -- parts

    def _conversation(self, conversation_id: str) -> Conversation:
        row = self._row("SELECT * FROM conversations WHERE id = ?", [conversation_id])
        if row is None:
            raise NotFound(f"There is no conversation {conversation_id!r}.", "dsv41chat conversations list")
        return records.conversation(row)

    def _free_id(self, wish: str | None = None) -> str:
        while True:
            conversation_id, wish = wish or records.new_id(records.CONVERSATION_DIGITS), None
            if self._row("SELECT 1 FROM conversations WHERE id = ?", [conversation_id]) is None:
                return conversation_id

    def _set(self, conversation_id: str, column: str, value: Any) -> None:
        with self.db.write() as db:
            self._require_conversation(conversation_id)
            db.execute(f"UPDATE conversations SET {column} = ? WHERE id = ?", [value, conversation_id])

    def _merge_index(self) -> None:
        # The index only marks words of deleted rows; merging it into one piece drops them. Done in steps, so that no other
        # process waits long. The first step (negative) decides what is merged; a step that changes less than 2 rows was the last.
        pages = -MERGE_PAGES
        while True:
            with self.db.write() as db:
                before = db.conn.total_changes
                db.execute("INSERT INTO messages_fts(messages_fts, rank) VALUES ('merge', ?)", [pages])
                if db.conn.total_changes - before < 2:
                    return
            pages = MERGE_PAGES

    def _automatic_title(self, conversation_id: str) -> str:
        row = self._row("SELECT text FROM messages WHERE conversation_id = ? AND role = 'user' ORDER BY seq LIMIT 1", [conversation_id])
        return "" if row is None else title_of(row["text"])

    def _matching(self, search: str, titles_only: bool) -> list[str]:
        part = search.casefold()
        ids: Iterable[str] = [row["id"] for row in self._rows("SELECT id, title FROM conversations") if part in row["title"].casefold()]
        if titles_only:
            return list(ids)
        return list(dict.fromkeys([*ids, *self.conversations_with(search)]))


def _summary(row: Mapping[str, Any]) -> ConversationSummary:
    usage = records.from_json(row["usage"]) or {}
    return ConversationSummary(
        id=row["id"],
        title=row["title"],
        created=records.moment(row["created"]),
        updated=records.moment(row["updated"]),
        used=records.moment(row["used"]),
        leaf_id=row["leaf_id"],
        pinned=bool(row["pinned"]),
        deleted=row["deleted"],
        messages=row["messages"],
        context_used=usage.get("context_used"),
        build_name=row["build_name"],
        build_fingerprint=row["build_fingerprint"],
    )


def unread(c: Conversation) -> ConversationSummary:
    """The line of a conversation whose messages were not looked at."""
    return ConversationSummary(c.id, c.title, c.created, c.updated, c.used, c.leaf_id, c.pinned, c.deleted, None, None, None, None)
