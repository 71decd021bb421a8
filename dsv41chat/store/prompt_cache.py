"""`PromptCache`: states of conversations on disk, found by exact ids. Spec: prompt_cache.

Files are immutable and published by a row of the index, so readers need no lock and two processes can use one folder. Nothing
here knows what a tensor means; nothing here may end a turn: what cannot be used is removed, counted and named.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from dsv41chat.store import files
from dsv41chat.store import prompt_cache_index as index
from dsv41chat.store.db import Connections
from dsv41chat.store.errors import StoreDamaged, StoreError, StoreNewer, StoreReadOnly, from_os
from dsv41chat.store.prompt_cache_files import CacheCorrupt, NoRoom
from dsv41chat.store.prompt_cache_index import BuildKey, Found
from dsv41chat.store.prompt_cache_read import State, broken_segment, read_state, reason_of

log = logging.getLogger(__name__)

FOLDER = "prompt_cache"
DATABASE = "index.db"
MIN_AUTO_BYTES, MAX_AUTO_BYTES = 2 * 2**30, 64 * 2**30
MIN_FREE_BYTES, MIN_FREE_SHARE = 10 * 2**30, 0.05  # of a disk; the smaller one counts
MAX_NAMES = 8  # of one build that are remembered
# A small log file: the folder's size is promised, the log belongs to it.
_PRAGMAS = {"synchronous": "NORMAL", "wal_autocheckpoint": "32", "journal_size_limit": "0"}


class PromptCache:
    """Threads: any method from any thread. Raises StoreError where the index cannot be used.

    budget_bytes: for everything in the folder. min_free_bytes: of the disk, below which nothing is written.
    hook: called with the name of each step of a write; for tests that stop there.
    """

    def __init__(
        self,
        folder: Path,
        db: Connections,
        budget_bytes: int | None,
        *,
        clock: Callable[[], float] = time.time,
        min_free_bytes: int | None = None,
        hook: Callable[[str], None] = lambda step: None,
    ):
        """Use `PromptCache.open`."""
        self.folder, self.db, self.clock = folder, db, clock
        self.hook = hook
        if min_free_bytes is None:
            min_free_bytes = min(MIN_FREE_BYTES, int(MIN_FREE_SHARE * shutil.disk_usage(folder).total))
        self.min_free_bytes = min_free_bytes
        self.counters: Counter[str] = Counter()
        self.notices: list[str] = []
        self._lock = threading.Lock()  # counters, notices and the sets of marks in use
        self._held: frozenset[int] = frozenset()
        self._fresh: int | None = None
        self._foreign_bytes = 0
        self.store_key = self._meta("store_key", lambda: secrets.token_hex(32))
        self.budget_bytes = int(self._meta("budget", self._auto_budget)) if budget_bytes is None else budget_bytes

    @classmethod
    def open(cls, folder: Path, budget_bytes: int | None = None, **options: Any) -> PromptCache:
        """Open the cache in `folder`, made if it is not there. budget_bytes None: chosen at the first use and kept.

        An index that cannot be read, or that a newer program wrote, is moved aside and an empty one is started; `notices` says so.
        Raises StoreError: read-only, full, busy, or a folder that belongs to somebody else.
        """
        folder = Path(folder)
        private(folder)
        notices = []
        for attempt in (0, 1):
            try:
                db = Connections(folder / DATABASE, index.PROMPT_CACHE, pragmas=_PRAGMAS)
                cache = cls(folder, db, budget_bytes, **options)
                version = cache._meta("schema_version", lambda: index.SCHEMA_VERSION)
                if version != index.SCHEMA_VERSION:
                    db.close()
                    raise StoreNewer(f"the prompt cache has schema {version}")
                break
            except (StoreNewer, StoreDamaged) as error:
                if attempt:
                    raise
                move_aside(folder)
                words = "was written by a newer version" if isinstance(error, StoreNewer) else "could not be read"
                notices.append(f"The index of the saved states {words}; they were set aside and the cache starts empty.")
                log.warning("prompt cache set aside: %s", error)
        for sub in ("seg", "tail", "tmp"):
            files.private_folder(folder / sub)
        cache.notices += notices
        for _ in notices:
            cache.count("moved aside")
        return cache

    @classmethod
    def open_readonly(cls, folder: Path, budget_bytes: int | None = None, **options: Any) -> PromptCache:
        """Open the cache that is in `folder` to be looked at: nothing is written, also where nothing can be.

        Raises StoreDamaged, StoreNewer, StoreUnreadable.
        """
        db = Connections(Path(folder) / DATABASE, index.PROMPT_CACHE, readonly=True, pragmas=_PRAGMAS)
        try:
            cache = cls(Path(folder), db, budget_bytes, **options)
            version = cache._meta("schema_version", lambda: index.SCHEMA_VERSION)
            if version != index.SCHEMA_VERSION:
                raise StoreNewer(f"the prompt cache has schema {version}")
        except BaseException:
            db.close()
            raise
        return cache

    def close(self) -> None:
        """Write the counters, close the index. Never raises."""
        try:
            if not self.db.readonly:
                self._flush_counters()
        except StoreError as error:
            log.info("counters of the prompt cache were lost: %s", error)
        self.db.close()

    # finding and reading -----------------------------------------------------------------------------------------------

    def build(self, facts: Mapping[str, Any], family: str, info: Mapping[str, Any]) -> BuildKey:
        """The key of a loaded build; notes that it was loaded. info: shown by `cache stats`; every `name` that it was loaded by is kept."""
        fp, now = index.fingerprint(facts), self.clock()
        with self.db.write() as db:
            known = db.execute("SELECT info FROM build WHERE fp = ?", [fp]).fetchone()
            names = [name for name in index.names_of(known[0] if known else None) if name != info.get("name")]
            info = {**info, "names": [*([info["name"]] if info.get("name") else []), *names][:MAX_NAMES]}
            db.execute(
                "INSERT INTO build(fp, family, info, created, last_used) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT(fp) DO UPDATE SET last_used = excluded.last_used, info = excluded.info",
                [fp, family, json.dumps(dict(info)), now, now],
            )
            id = db.execute("SELECT id FROM build WHERE fp = ?", [fp]).fetchone()[0]
        return BuildKey(id, fp, bytes.fromhex(self.store_key))

    def find(self, build: BuildKey, ids: bytes, above: int = 0, kinds: Iterable[str] | None = None, grid: int = 1, hold: bool = True) -> Found | None:
        """The deepest mark that is a prefix of `ids`, leaves one id to run and lies after `above`.

        kinds, grid: only marks of these kinds at multiples of `grid`. hold: until the next call no mark that fits is evicted.
        """
        allowed = None if kinds is None else set(kinds)
        with self.db.read() as db:
            rows = index.matching_marks(db, build, ids)
            matches = frozenset(row["id"] for row in rows)
            if hold:
                with self._lock:
                    self._held = matches
            for row in rows:
                if row["pos"] <= above:
                    break
                if row["pos"] % grid or (allowed is not None and row["kind"] not in allowed):
                    continue
                segments = index.segments_to(db, row["seg_id"]) or ()
                return Found(row["id"], row["pos"], row["kind"], row["file"], row["bytes"], row["crc"], segments, matches)
        return None

    def read(self, build: BuildKey, found: Found, ids: bytes) -> State:
        """Read a mark's state whole, checked byte by byte. Raises CacheCorrupt after removing it, with the reason."""
        try:
            state = read_state(self.folder, build, found)
            if state.ids != ids[: 4 * found.pos]:
                raise CacheCorrupt("token ids differ")
        except (CacheCorrupt, OSError, MemoryError) as error:
            reason = reason_of(error)
            self.remove(found, reason)
            raise CacheCorrupt(reason) from error
        return state

    def remove(self, found: Found, reason: str) -> None:
        """Drop a mark that cannot be used, with every mark that shares a broken segment; their conversations remember why."""
        broken = broken_segment(self.folder, found)
        now = self.clock()
        with self.db.write() as db:
            below = [found.mark_id]
            for seg_id in broken:
                below += [
                    row["id"]
                    for row in db.query(
                        "WITH RECURSIVE down(id) AS (SELECT ? UNION SELECT s.id FROM seg s JOIN down ON s.parent_id = down.id)"
                        " SELECT m.id FROM mark m JOIN down ON m.seg_id = down.id",
                        [seg_id],
                    )
                ]
            self._lose(db, below, "damaged")
            index.delete_marks(db, below, now)
        self.count(f"removed: {reason}")
        self.empty_trash()

    def holds(self, seg_id: int) -> bool:
        """Whether a segment is still there."""
        with self.db.read() as db:
            return db.execute("SELECT 1 FROM seg WHERE id = ?", [seg_id]).fetchone() is not None

    def has_mark(self, build: BuildKey, ids: bytes) -> bool:
        blk, chain, rest = index.mark_key(build, ids)
        with self.db.read() as db:
            return db.execute("SELECT 1 FROM mark WHERE build_id = ? AND chain = ? AND rest = ?", [build.id, chain, rest]).fetchone() is not None

    def touch(self, found: Found, conversation: str | None, turn: int) -> None:
        """A conversation resumed from a mark: it is young again, and the conversation takes part in it."""
        with self.db.write() as db:
            db.execute("UPDATE mark SET last_used = ?, hits = hits + 1 WHERE id = ?", [self.clock(), found.mark_id])
            if conversation is not None:
                db.execute("INSERT OR IGNORE INTO conv_mark SELECT ?, id, ? FROM mark WHERE id = ?", [conversation, turn, found.mark_id])

    # reasons -----------------------------------------------------------------------------------------------------------

    def why_cold(self, build: BuildKey, conversation: str, head: Mapping[str, Any]) -> str:
        """Why a conversation with history found no state: the words that the user sees."""
        with self.db.read() as db:
            rows = {row["build_id"]: row for row in db.query("SELECT * FROM conv WHERE conv_id = ?", [conversation])}
            marks = "SELECT count(*) FROM conv_mark c JOIN mark m ON m.id = c.mark_id WHERE conv_id = ? AND build_id = ?"
            count = db.execute(marks, [conversation, build.id]).fetchone()[0]
        row = rows.get(build.id)
        if row is None:
            return "other build" if rows else "no stored state"
        before = json.loads(row["head"])
        changed = [name for name in head if name in before and before[name] != head[name]]
        if changed:
            return f"other settings ({' and '.join(changed)} changed)"
        if row["lost"]:
            return "state damaged, removed" if row["lost"] == "damaged" else "state pruned"
        return "no stored state before the change" if count else "no stored state"

    def _lose(self, db: Database, mark_ids: Iterable[int], why: str) -> None:
        for mark_id in mark_ids:
            db.execute(
                "UPDATE conv SET lost = ? WHERE build_id = (SELECT build_id FROM mark WHERE id = ?)"
                " AND conv_id IN (SELECT conv_id FROM conv_mark WHERE mark_id = ?)",
                [why, mark_id, mark_id],
            )

    # conversations -----------------------------------------------------------------------------------------------------

    def forget(self, *conversations: str) -> None:
        """Delete the states of conversations for good: rows, files, and what the index's log still holds of them."""
        now = self.clock()
        with self.db.write() as db:
            for conversation in conversations:
                index.unlink_conversation(db, conversation, now)
        self.empty_trash()
        self.checkpoint()

    def checkpoint(self) -> None:
        with self.db.read() as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def pin(self, conversation: str, on: bool = True) -> int:
        """Keep a conversation's newest P and E (or no longer). Returns how many marks are pinned; raises NoRoom past half the budget."""
        with self.db.write() as db:
            db.execute("UPDATE mark SET pinned = 0 WHERE id IN (SELECT mark_id FROM conv_mark WHERE conv_id = ?)", [conversation])
            if not on:
                return 0
            chosen = [
                row["id"]
                for kind in "PE"
                for row in db.query(
                    "SELECT m.id FROM mark m JOIN conv_mark c ON c.mark_id = m.id WHERE c.conv_id = ? AND m.kind = ?"
                    " ORDER BY c.turn DESC, m.pos DESC LIMIT 1",
                    [conversation, kind],
                )
            ]
            for mark_id in chosen:
                db.execute("UPDATE mark SET pinned = 1 WHERE id = ?", [mark_id])
            pinned = db.execute(
                "WITH RECURSIVE up(id) AS (SELECT seg_id FROM mark WHERE pinned UNION SELECT s.parent_id FROM seg s JOIN up ON s.id = up.id)"
                " SELECT (SELECT coalesce(sum(bytes), 0) FROM mark WHERE pinned)"
                " + (SELECT coalesce(sum(bytes), 0) FROM seg WHERE id IN (SELECT id FROM up))"
            ).fetchone()[0]
            if pinned > self.budget_bytes / 2:
                raise NoRoom("pinned states may take at most half the budget")
        return len(chosen)

    def pin_again(self, conversation: str) -> None:
        """A pinned conversation went on: its newest states are the pinned ones now."""
        with self.db.read() as db:
            pinned = "SELECT 1 FROM mark m JOIN conv_mark c ON c.mark_id = m.id WHERE c.conv_id = ? AND m.pinned"
            if db.execute(pinned, [conversation]).fetchone() is None:
                return
        try:
            self.pin(conversation)
        except NoRoom as error:
            self.notice(f"This conversation's new states are not pinned: {error}.")

    # numbers -----------------------------------------------------------------------------------------------------------

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self.counters[name] += by

    def notice(self, text: str) -> None:
        """A sentence for the user."""
        with self._lock:
            self.notices.append(text)

    def take_notices(self) -> list[str]:
        """The sentences since the last call."""
        with self._lock:
            taken, self.notices = self.notices, []
        return taken

    def just_written(self, mark_id: int) -> None:
        """This mark is not evicted before another one is written."""
        with self._lock:
            self._fresh = mark_id

    def in_use(self) -> set[int]:
        """Marks that are not evicted now: those of the request in hand and the one just written."""
        with self._lock:
            return set(self._held) | ({self._fresh} if self._fresh is not None else set())

    def _flush_counters(self) -> None:
        with self._lock:
            counts = dict(self.counters)
        with self.db.write() as db:
            for name, count in counts.items():
                db.execute("INSERT INTO counter VALUES (?, ?) ON CONFLICT(name) DO UPDATE SET count = count + excluded.count", [name, count])
        with self._lock:
            self.counters.subtract(counts)
            self.counters += Counter()

    def _meta(self, key: str, make: Callable[[], Any]) -> str:
        with self.db.read() as db:
            row = db.execute("SELECT value FROM meta WHERE key = ?", [key]).fetchone()
        if row is not None:
            return row[0]
        if self.db.readonly:
            return str(make())
        with self.db.write() as db:
            db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", [key, str(make())])
            return db.execute("SELECT value FROM meta WHERE key = ?", [key]).fetchone()[0]

    def _auto_budget(self) -> int:
        return max(MIN_AUTO_BYTES, min(MAX_AUTO_BYTES, shutil.disk_usage(self.folder).free // 5))

    def empty_trash(self) -> None:
        """Unlink what deletions left, then forget it."""
        with self.db.read() as db:
            names = [row["file"] for row in db.query("SELECT file FROM trash")]
        gone = []
        for name in names:
            try:
                (self.folder / name).unlink(missing_ok=True)
                gone.append(name)
            except OSError as error:
                log.info("%s could not be unlinked: %s", name, error)
            self.hook("unlinked")
        if gone:
            with self.db.write() as db:
                for name in gone:
                    db.execute("DELETE FROM trash WHERE file = ?", [name])


def private(folder: Path) -> None:
    """Make the folder, or make it private. Raises StoreReadOnly when it belongs to somebody else."""
    files.private_folder(folder)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise StoreReadOnly(f"{folder} belongs to another user, so nothing is kept there", "set cache.dir to a folder of your own")
    if status.st_mode & 0o077:
        try:
            os.chmod(folder, files.FOLDER_MODE)
        except OSError as error:
            raise from_os(error, folder) from error


def move_aside(folder: Path) -> None:
    """Put what the cache has in the folder, and nothing else, into a sub-folder that the sweep deletes."""
    aside = folder / f"trash-{int(time.time())}-{secrets.token_hex(3)}"
    files.private_folder(aside)
    for name in (DATABASE, DATABASE + "-wal", DATABASE + "-shm", "seg", "tail", "tmp"):
        if (folder / name).exists():
            os.replace(folder / name, aside / name)
