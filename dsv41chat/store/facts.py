"""Measured verdicts of the engine, kept between runs. The engine gets this mapping and knows nothing of the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping

from dsv41chat.store.db import Connections
from dsv41chat.store.errors import StoreError


class Facts(MutableMapping[str, str]):
    """Text by key. Never raises StoreError: a full disk must not end a turn that could go on.

    A verdict that cannot be written is kept for this run, one that cannot be read counts as absent.
    """

    def __init__(self, db: Connections, clock: Callable[[], float]):
        self._db = db
        self._clock = clock
        self._lock = threading.Lock()
        self._unwritten: dict[str, str | None] = {}  # None: removed

    def __getitem__(self, key: str) -> str:
        value = self._all().get(key) if key in self._unwritten else self._stored(key)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: str) -> None:
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"a fact is a text under a text, not {value!r} under {key!r}")
        self._put(key, value)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._put(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _stored(self, key: str) -> str | None:
        return next((row["value"] for row in self._read("SELECT value FROM facts WHERE key = ?", key)), None)

    def _read(self, sql: str, *params: str) -> list[dict[str, str]]:
        try:
            with self._db.read() as db:
                return list(db.query(sql, params))
        except StoreError:
            return []

    def _all(self) -> dict[str, str]:
        stored: dict[str, str | None] = {row["key"]: row["value"] for row in self._read("SELECT key, value FROM facts ORDER BY key")}
        with self._lock:
            stored |= self._unwritten
        return {key: value for key, value in stored.items() if value is not None}

    def _put(self, key: str, value: str | None) -> None:
        try:
            with self._db.write() as db:
                if value is None:
                    db.execute("DELETE FROM facts WHERE key = ?", [key])
                else:
                    db.execute("INSERT OR REPLACE INTO facts(key, value, updated) VALUES (?, ?, ?)", [key, value, self._clock()])
        except StoreError:
            with self._lock:
                self._unwritten[key] = value
        else:
            with self._lock:
                self._unwritten.pop(key, None)
