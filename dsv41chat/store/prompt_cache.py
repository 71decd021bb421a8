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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from dsv41chat.store import files
from dsv41chat.store import prompt_cache_index as index
from dsv41chat.store.db import Connections
from dsv41chat.store.errors import StoreDamaged, StoreError, StoreNewer, StoreReadOnly, from_os
from dsv41chat.store.prompt_cache_files import CacheCorrupt, Header, Tensor, file_bytes, read_data, read_header, write_file
from dsv41chat.store.prompt_cache_index import BuildKey, Found

log = logging.getLogger(__name__)

FOLDER = "prompt_cache"
DATABASE = "index.db"
MIN_AUTO_BYTES, MAX_AUTO_BYTES = 2 * 2**30, 64 * 2**30
MIN_FREE_BYTES, MIN_FREE_SHARE = 10 * 2**30, 0.05  # of a disk; the smaller one counts
# A small log file: the folder's size is promised, the log belongs to it.
_PRAGMAS = {"synchronous": "NORMAL", "wal_autocheckpoint": "32", "journal_size_limit": "0"}


@dataclass
class Ticket:
    """A segment as a live state knows it: the tokens up to `hi` are (or are about to be) on disk. seg_id None: not, or not yet."""

    hi: int
    seg_id: int | None = None
    settled: bool = False


@dataclass
class Entry:
    """One mark to be written. ids: all tokens up to `pos`, little-endian uint32. segment: tensors of the tokens [lo, pos), empty
    together with lo == pos. exact: states of the same tokens are equal bit for bit, whoever computed them.
    conversation None: shared by all (a system prompt's mark). turn: its number in the conversation. head: what it was made with."""

    build: BuildKey
    parent: Ticket | None
    lo: int
    pos: int
    ids: bytes
    segment: dict[str, Tensor]
    tail: dict[str, Tensor]
    kind: str
    conversation: str | None
    turn: int = 0
    exact: bool = True
    meta: dict[str, str] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)

    def nbytes(self) -> int:
        return sum(memoryview(t[2]).nbytes for part in (self.segment, self.tail) for t in part.values())


@dataclass(frozen=True)
class State:
    """What was read: ids (little-endian uint32), growing tensors joined along their first axis, fixed ones, the tail's metadata."""

    pos: int
    kind: str
    ids: bytes
    growing: Mapping[str, Tensor]
    fixed: Mapping[str, Tensor]
    meta: Mapping[str, str]
    segments: tuple[tuple[int, int], ...]  # (id, hi)


class NoRoom(Exception):
    """An entry was not written; the text says why."""


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

    def close(self) -> None:
        """Write the counters, close the index. Never raises."""
        try:
            self._flush_counters()
        except StoreError as error:
            log.info("counters of the prompt cache were lost: %s", error)
        self.db.close()

    # finding and reading -----------------------------------------------------------------------------------------------

    def build(self, facts: Mapping[str, Any], family: str, info: Mapping[str, Any]) -> BuildKey:
        """The key of a loaded build; notes that it was loaded. info: shown by `cache stats`."""
        fp, now = index.fingerprint(facts), self.clock()
        with self.db.write() as db:
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
            state = self._read(build, found)
            if state.ids != ids[: 4 * found.pos]:
                raise CacheCorrupt("token ids differ")
        except (CacheCorrupt, OSError, MemoryError) as error:
            reason = _reason(error)
            self.remove(found, reason)
            raise CacheCorrupt(reason) from error
        return state

    def _read(self, build: BuildKey, found: Found) -> State:
        if not found.segments or found.segments[-1].hi != found.pos:
            raise CacheCorrupt("missing segment")
        opened: list[int] = []
        try:
            # An unlinked file stays readable through its descriptor, so open everything first.
            for file in (*(s.file for s in found.segments), found.file):
                opened.append(os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC))
            headers = [read_header(fd, row.bytes) for fd, row in zip(opened, (*found.segments, found))]
            for header, row in zip(headers, found.segments):
                _check_meta(header, build, row.lo, row.hi)
            _check_meta(headers[-1], build, found.pos, found.pos)
            growing, parts = _join(headers[:-1])
            fixed = {name: (dtype, shape, bytearray(_nbytes(dtype, shape))) for name, (dtype, shape) in headers[-1].tensors.items()}
            for fd, header, row, into in zip(opened, headers, found.segments, parts):
                read_data(fd, header, row.crc, into)
            read_data(opened[-1], headers[-1], found.crc, {name: memoryview(t[2]) for name, t in fixed.items()})
        finally:
            for fd in opened:
                os.close(fd)
        ids = bytes(growing.pop("tok", ("U32", (0,), b""))[2])
        segments = tuple((s.id, s.hi) for s in found.segments)
        return State(found.pos, found.kind, ids, growing, fixed, headers[-1].meta, segments)

    def remove(self, found: Found, reason: str) -> None:
        """Drop a mark that cannot be used, with every mark that shares a broken segment; their conversations remember why."""
        broken = self._broken(found)
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

    def _broken(self, found: Found) -> list[int]:
        """The first segment of the chain that cannot be read, in a list; empty when only the tail is at fault."""
        for row in found.segments:
            try:
                fd = os.open(self.folder / row.file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return [row.id]
            try:
                header = read_header(fd, row.bytes)
                into = {name: memoryview(bytearray(_nbytes(*entry))) for name, entry in header.tensors.items()}
                read_data(fd, header, row.crc, into)
                if (header.meta.get("lo"), header.meta.get("hi")) != (str(row.lo), str(row.hi)):
                    return [row.id]
            except (CacheCorrupt, OSError):
                return [row.id]
            finally:
                os.close(fd)
        return []

    def holds(self, seg_id: int) -> bool:
        """Whether a segment is still there."""
        with self.db.read() as db:
            return db.execute("SELECT 1 FROM seg WHERE id = ?", [seg_id]).fetchone() is not None

    def has_mark(self, build: BuildKey, ids: bytes) -> bool:
        blk, chain, rest = index.mark_key(build, ids)
        with self.db.read() as db:
            return db.execute("SELECT 1 FROM mark WHERE build_id = ? AND chain = ? AND rest = ?", [build.id, chain, rest]).fetchone() is not None

    # writing -----------------------------------------------------------------------------------------------------------

    def put(self, entry: Entry, ticket: Ticket, pace: Callable[[int], None] = lambda size: None) -> None:
        """Write one entry and publish it. Raises NoRoom, OSError or StoreError; nothing is left behind then but what the sweep finds."""
        from dsv41chat.store.prompt_cache_room import make_room, used_bytes

        try:
            if self._link_existing(entry, ticket):
                return
            parent_id = None
            if entry.parent is not None:
                parent_id = entry.parent.seg_id
                if parent_id is None:
                    raise NoRoom("what it continues was not saved")
            segment = {"tok": ("U32", (entry.pos - entry.lo,), entry.ids[4 * entry.lo :]), **entry.segment} if entry.pos > entry.lo else {}
            meta = {"fmt": str(index.STORE_FORMAT), "fp": entry.build.fp, "kind": entry.kind, "created": f"{self.clock():.0f}"}
            seg_meta = meta | {"lo": str(entry.lo), "hi": str(entry.pos)}
            tail_meta = meta | entry.meta | {"lo": str(entry.pos), "hi": str(entry.pos)}
            need = (file_bytes(segment, seg_meta) if segment else 0) + file_bytes(entry.tail, tail_meta)
            make_room(self, need)
            self.hook("room")
            placed: list[tuple[str, int, int]] = []
            try:
                if segment:
                    placed.append(self._place("seg", segment, seg_meta, pace))
                placed.append(self._place("tail", entry.tail, tail_meta, pace))
                ticket.seg_id = self._publish(entry, parent_id, placed[0] if segment else None, placed[-1])
            except BaseException:
                for file, *_ in placed:
                    (self.folder / file).unlink(missing_ok=True)
                raise
            self.count("written")
            self.count("bytes written", need)
            if used_bytes(self) > self.budget_bytes:
                # The index's log has grown past the margin.
                self.checkpoint()
        finally:
            ticket.settled = True

    def _place(self, folder: str, tensors: Mapping[str, Tensor], meta: Mapping[str, str], pace: Callable[[int], None]) -> tuple[str, int, int]:
        """Write a file and give it its final name. Returns (name below the folder, bytes, crc)."""
        name = secrets.token_hex(16)
        final = f"{folder}/{name[:2]}/{name}.safetensors"
        files.private_folder((self.folder / final).parent)
        temporary = self.folder / "tmp" / f"{name}.{os.getpid()}"
        size, crc = write_file(temporary, tensors, meta, pace, lambda step: self.hook(f"{folder} {step}"))
        os.replace(temporary, self.folder / final)
        self.hook(f"{folder} renamed")
        return final, size, crc

    def _publish(self, entry: Entry, parent_id: int | None, seg: tuple[str, int, int] | None, tail: tuple[str, int, int]) -> int:
        blk, chain, rest = index.mark_key(entry.build, entry.ids)
        now = self.clock()
        lost: list[str] = []
        with self.db.write() as db:
            self.hook("begun")
            row = db.execute("SELECT seg_id FROM mark WHERE build_id = ? AND chain = ? AND rest = ?", [entry.build.id, chain, rest]).fetchone()
            if row is not None:
                # Another process was faster with the same tokens.
                lost = [tail[0]] + ([seg[0]] if seg else [])
                seg_id = row[0]
            else:
                if parent_id is not None and db.execute("SELECT 1 FROM seg WHERE id = ? AND hi = ?", [parent_id, entry.lo]).fetchone() is None:
                    raise NoRoom("what it continues is gone")
                seg_id = parent_id
                if seg is not None:
                    cursor = db.execute(
                        "INSERT INTO seg(build_id, parent_id, lo, hi, file, bytes, crc, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                        [entry.build.id, parent_id, entry.lo, entry.pos, *seg, now],
                    )
                    seg_id = cursor.lastrowid
                self.hook("seg row")
                cursor = db.execute(
                    "INSERT INTO mark(build_id, seg_id, pos, blk, chain, rest, kind, file, bytes, crc, created, last_used)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [entry.build.id, seg_id, entry.pos, blk, chain, rest, entry.kind, *tail, now, now],
                )
                self._link(db, entry, cursor.lastrowid)
            self.hook("rows")
        self.hook("committed")
        for file in lost:
            (self.folder / file).unlink(missing_ok=True)
        return seg_id

    def _link_existing(self, entry: Entry, ticket: Ticket) -> bool:
        """Whether these tokens have a mark already; then the conversation only takes part in it."""
        blk, chain, rest = index.mark_key(entry.build, entry.ids)
        with self.db.write() as db:
            row = db.execute("SELECT id, seg_id FROM mark WHERE build_id = ? AND chain = ? AND rest = ?", [entry.build.id, chain, rest]).fetchone()
            if row is None:
                return False
            self._link(db, entry, row[0])
            db.execute("UPDATE mark SET last_used = ? WHERE id = ?", [self.clock(), row[0]])
        # Rows that another computation made may differ in the last bit where the route is not row-invariant; what continues
        # this state must then not stand on them.
        ticket.seg_id = row[1] if entry.exact else None
        self.count("already there")
        return True

    def _link(self, db: Database, entry: Entry, mark_id: int) -> None:
        with self._lock:
            self._fresh = mark_id
        if entry.conversation is None:
            return
        db.execute("INSERT OR REPLACE INTO conv_mark VALUES (?, ?, ?)", [entry.conversation, mark_id, entry.turn])
        db.execute(
            "INSERT INTO conv VALUES (?, ?, ?, NULL) ON CONFLICT(conv_id, build_id) DO UPDATE SET head = excluded.head, lost = NULL",
            [entry.conversation, entry.build.id, json.dumps(entry.head)],
        )

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


def _reason(error: BaseException) -> str:
    if isinstance(error, CacheCorrupt):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "missing file"
    return "out of memory" if isinstance(error, MemoryError) else "unreadable"


def _check_meta(header: Header, build: BuildKey, lo: int, hi: int) -> None:
    meta = header.meta
    if meta.get("fmt") != str(index.STORE_FORMAT):
        raise CacheCorrupt("older format")
    if meta.get("fp") != build.fp:
        raise CacheCorrupt("different model build")
    if (meta.get("lo"), meta.get("hi")) != (str(lo), str(hi)):
        raise CacheCorrupt("wrong place")


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    from dsv41chat.store.prompt_cache_files import ITEM_BYTES

    size = ITEM_BYTES[dtype]
    for n in shape:
        size *= n
    return size


def _join(headers: list[Header]) -> tuple[dict[str, Tensor], list[dict[str, memoryview]]]:
    """Buffers for each growing tensor over all segments, and per segment the part of each that it fills."""
    rows: dict[str, int] = {}
    form: dict[str, tuple[str, tuple[int, ...]]] = {}
    for header in headers:
        for name, (dtype, shape) in header.tensors.items():
            if form.setdefault(name, (dtype, shape[1:])) != (dtype, shape[1:]):
                raise CacheCorrupt("wrong shape")
            rows[name] = rows.get(name, 0) + shape[0]
    out = {name: (dtype, (rows[name], *tail), bytearray(_nbytes(dtype, (rows[name], *tail)))) for name, (dtype, tail) in form.items()}
    filled, parts = dict.fromkeys(out, 0), []
    for header in headers:
        into = {}
        for name, (dtype, shape) in header.tensors.items():
            size = _nbytes(dtype, shape)
            into[name] = memoryview(out[name][2])[filled[name] : filled[name] + size]
            filled[name] += size
        parts.append(into)
    return out, parts


__all__ = ["CacheCorrupt", "Entry", "Found", "NoRoom", "PromptCache", "State", "Ticket"]
