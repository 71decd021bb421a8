"""What every part of the Store shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsv41chat.store.db import Connections
from dsv41chat.store.errors import NotFound
from dsv41chat.store.locks import Locks


class Part:
    """clock: epoch seconds. Parts are mixed into one Store; each keeps the statements of one concern."""

    db: Connections
    clock: Callable[[], float]
    locks: Locks

    on_deleted: Callable[..., None] | None

    def _tell_deleted(self, *conversation_ids: str) -> None:
        if self.on_deleted is not None and conversation_ids:
            self.on_deleted(*conversation_ids)

    def _rows(self, sql: str, params: Any = ()) -> list[dict[str, Any]]:
        with self.db.read() as db:
            return list(db.query(sql, params))

    def _row(self, sql: str, params: Any = ()) -> dict[str, Any] | None:
        rows = self._rows(sql, params)
        return rows[0] if rows else None

    def _require_conversation(self, conversation_id: str) -> None:
        if self._row("SELECT 1 FROM conversations WHERE id = ?", [conversation_id]) is None:
            raise NotFound(f"There is no conversation {conversation_id!r}.", "dsv41chat conversations list")

    def _require_writable(self, conversation_id: str) -> None:
        """Raise NotFound, or Locked if another living process has the conversation open."""
        self._require_conversation(conversation_id)
        self.locks.require_free(lock_name(conversation_id))


def lock_name(conversation_id: str) -> str:
    return f"conversation:{conversation_id}"
