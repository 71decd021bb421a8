"""Room for the prompt cache: thinning, eviction, the sweep, merging. Spec: prompt_cache, sections 6 and 7.

The budget holds for everything in the folder, whatever build wrote it. Age alone decides; pinned states, the states of the
request in hand and the one just written stay.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from dsv41chat.store import files
from dsv41chat.store import prompt_cache_index as index
from dsv41chat.store.errors import StoreDamaged, StoreError, StoreNewer, translated
from dsv41chat.store.locks import process_birth
from dsv41chat.store.prompt_cache import DATABASE, PromptCache
from dsv41chat.store.prompt_cache_files import CacheCorrupt, NoRoom, read_data, read_header, write_file
from dsv41chat.store.prompt_cache_read import join

log = logging.getLogger(__name__)

RECENT_TURNS = 8
STALE_BUILD_S = 14 * 86_400.0
ORPHAN_S, TEMPORARY_S = 600.0, 3600.0
SWEEP_ENTRIES = 20_000
EVICT_TO = 0.9
MERGE_SEGMENTS, MERGE_BYTES = 64, 64 * 2**20


# how much -----------------------------------------------------------------------------------------------------------------


def used_bytes(cache: PromptCache) -> int:
    """Bytes of the folder by the index: states, the index itself, and what the last sweep found besides."""
    with cache.db.read() as db:
        rows = db.execute("SELECT (SELECT coalesce(sum(bytes), 0) FROM seg) + (SELECT coalesce(sum(bytes), 0) FROM mark)").fetchone()[0]
    return rows + _index_bytes(cache.folder) + cache._foreign_bytes


def folder_bytes(folder: Path) -> int:
    """Bytes of every file below the folder, as they are."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _index_bytes(folder: Path) -> int:
    total = 0
    for suffix in ("", "-wal", "-shm"):
        try:
            total += os.stat(folder / (DATABASE + suffix)).st_size
        except FileNotFoundError:
            continue
    return total


# thinning -----------------------------------------------------------------------------------------------------------------


def superseded(rows: list[dict[str, Any]], recent: int = RECENT_TURNS) -> list[int]:
    """Marks that a conversation no longer needs. rows: id, kind, pos, turn of its marks.

    The last `recent` turns keep all; before them every 2nd, 4th, 8th ... turn keeps its end (its prompt, if it has no end); S always;
    grid marks only above the newest P.
    """
    newest = max((row["turn"] for row in rows if row["kind"] != "S"), default=0)
    last_p = max((row["pos"] for row in rows if row["kind"] == "P" and row["turn"] == newest), default=0)
    ended = {row["turn"] for row in rows if row["kind"] == "E"}
    out = []
    for row in rows:
        if row["kind"] == "S":
            continue
        age = newest - row["turn"]
        step = 1 << max(0, (age // recent).bit_length()) if age >= recent else 1
        old = age >= recent and row["kind"] != "E" and row["turn"] in ended
        if old or row["turn"] % step or (row["kind"] == "G" and row["pos"] < last_p):
            out.append(row["id"])
    return out


def thin(cache: PromptCache, conversation: str, recent: int = RECENT_TURNS) -> int:
    """Apply the thinning rule to one conversation. Returns how many marks it gave up."""
    now, keep = cache.clock(), cache.in_use()
    with cache.db.write() as db:
        rows = _marks_of(db, conversation)
        builds: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            builds.setdefault(row["build_id"], []).append(row)
        ids = [id for part in builds.values() for id in superseded(part, recent)]
        ids = [id for id in ids if id not in keep and not any(r["id"] == id and r["pinned"] for r in rows)]
        for id in ids:
            db.execute("DELETE FROM conv_mark WHERE conv_id = ? AND mark_id = ?", [conversation, id])
        index.delete_marks(db, index.unlinked(db, ids), now)
    if ids:
        cache.count("thinned", len(ids))
        cache.empty_trash()
    return len(ids)


def _marks_of(db: Database, conversation: str) -> list[dict[str, Any]]:
    return list(db.query("SELECT m.*, c.turn FROM mark m JOIN conv_mark c ON c.mark_id = m.id WHERE c.conv_id = ?", [conversation]))


# eviction -----------------------------------------------------------------------------------------------------------------


def make_room(cache: PromptCache, need: int) -> None:
    """Evict until `need` more bytes fit. Raises NoRoom: larger than the budget, disk nearly full, or nothing may go."""
    limit = cache.budget_bytes
    if need > limit:
        raise NoRoom(f"a state of {need:,} bytes is larger than the cache's budget of {limit:,}")
    if shutil.disk_usage(cache.folder).free - need < cache.min_free_bytes:
        raise NoRoom("the disk is nearly full")
    # Rows and the log grow a little with each entry.
    margin = min(64 * 2**10, limit // 16)
    if used_bytes(cache) + need + margin > limit:
        cache.checkpoint()
    if used_bytes(cache) + need + margin > limit:
        evict(cache, max(0, int(EVICT_TO * limit) - need - margin))
        if used_bytes(cache) + need + margin > limit:
            raise NoRoom("everything in the cache is in use or pinned")


def evict(cache: PromptCache, target: int, *, older_than: float | None = None, build: str | None = None, everything: bool = False) -> int:
    """Remove states, least wanted first, until the folder holds at most `target` bytes. Returns the bytes it freed.

    older_than: only states not used since then. build: only of this fingerprint or name. everything: pinned and held ones as well.
    """
    before = used_bytes(cache)
    cache.empty_trash()
    for ids in _victims(cache, older_than, build, everything):
        if used_bytes(cache) <= target:
            break
        with cache.db.write() as db:
            cache._lose(db, ids, "pruned")
            index.delete_marks(db, ids, cache.clock())
        cache.count("evicted", len(ids))
        cache.empty_trash()
    if used_bytes(cache) > target or everything:
        with cache.db.write() as db:
            db.execute("DELETE FROM build WHERE id NOT IN (SELECT build_id FROM seg) AND id NOT IN (SELECT build_id FROM mark) AND last_used < ?",
                       [cache.clock() - STALE_BUILD_S])  # fmt: skip
    cache.checkpoint()
    return before - used_bytes(cache)


def would_evict(cache: PromptCache, target: int, **which: Any) -> tuple[int, int]:
    """(marks, bytes) that `evict` would remove, at least: segments that become bare are counted where they belong to one mark."""
    before, marks, freed = used_bytes(cache), 0, 0
    which = {"older_than": None, "build": None, "everything": False} | which
    for ids in _victims(cache, **which):
        if before - freed <= target:
            break
        with cache.db.read() as db:
            for id in ids:
                freed += db.execute(
                    "SELECT m.bytes + coalesce((SELECT s.bytes FROM seg s WHERE s.id = m.seg_id"
                    " AND NOT EXISTS (SELECT 1 FROM seg c WHERE c.parent_id = s.id)), 0) FROM mark m WHERE m.id = ?",
                    [id],
                ).fetchone()[0]
        marks += len(ids)
    return marks, freed


def _victims(cache: PromptCache, older_than: float | None, build: str | None, everything: bool) -> Iterator[list[int]]:
    """Groups of marks in the order in which they go."""
    now, keep = cache.clock(), set() if everything else cache.in_use()

    def free(rows: list[dict[str, Any]]) -> list[int]:
        return [
            row["id"] for row in rows
            if row["id"] not in keep and (everything or not row["pinned"]) and (older_than is None or row["last_used"] < older_than)
            and (build is None or build == row["fp"] or build in index.names_of(row["info"]))
        ]  # fmt: skip

    select = "SELECT m.*, b.fp, b.last_used AS loaded, b.info FROM mark m JOIN build b ON b.id = m.build_id"
    if older_than is None and build is None and not everything:
        with cache.db.read() as db:
            stale = list(db.query(f"{select} WHERE b.last_used < ? ORDER BY m.last_used, m.pos DESC", [now - STALE_BUILD_S]))
            conversations = [row["conv_id"] for row in db.query("SELECT DISTINCT conv_id FROM conv_mark")]
        yield from ([id] for id in free(stale))
        for conversation in conversations:
            with cache.db.read() as db:
                rows = _marks_of(db, conversation)
                shared = {row["mark_id"] for row in db.query("SELECT mark_id FROM conv_mark GROUP BY mark_id HAVING count(*) > 1")}
                named = {row["id"]: row for row in db.query(select)}
            builds = {row["build_id"] for row in rows}
            old = [id for b in builds for id in superseded([r for r in rows if r["build_id"] == b], recent=1)]
            yield from ([id] for id in free([named[id] for id in old if id in named and id not in shared]))
    with cache.db.read() as db:
        # A mark is as young as the youngest conversation that has it; shared system prompts go last.
        rows = list(
            db.query(
                f"{select} LEFT JOIN (SELECT c.mark_id, max(u.used) AS used FROM conv_mark c JOIN"
                " (SELECT conv_id, max(last_used) AS used FROM conv_mark JOIN mark ON mark.id = mark_id GROUP BY conv_id) u"
                " ON u.conv_id = c.conv_id GROUP BY c.mark_id) v ON v.mark_id = m.id"
                " ORDER BY m.kind = 'S', coalesce(v.used, m.last_used), m.pos DESC"
            )
        )
    yield from ([id] for id in free(rows))


def enforce(cache: PromptCache) -> None:
    """Bring the folder within its budget: at the start, and after the budget was lowered."""
    if used_bytes(cache) > cache.budget_bytes:
        evict(cache, int(EVICT_TO * cache.budget_bytes))


# sweep --------------------------------------------------------------------------------------------------------------------


@contextmanager
def _sole(path: Path) -> Iterator[bool]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.FILE_MODE)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(fd)


def sweep(cache: PromptCache, orphan_s: float = ORPHAN_S) -> int:
    """Remove what crashes left: temporary files, files without a row, rows without a file. Returns how many things went.

    orphan_s: how old a file without a row must be; a younger one may be about to be published.
    """
    with _sole(cache.folder / "sweep.lock") as mine:
        if not mine:
            return 0
        gone = _sweep_temporary(cache) + _sweep_files(cache, orphan_s) + _sweep_rows(cache)
        cache.empty_trash()
        for entry in list(cache.folder.glob("trash-[0-9]*-" + "[0-9a-f]" * 6)):
            shutil.rmtree(entry, ignore_errors=True)
            gone += 1
        if gone:
            cache.count("swept", gone)
        _measure(cache)
        return gone


def _sweep_temporary(cache: PromptCache) -> int:
    gone = 0
    for entry in os.scandir(cache.folder / "tmp"):
        pid = entry.name.rpartition(".")[2]
        try:
            old = cache.clock() - entry.stat().st_mtime > TEMPORARY_S
            if old or not pid.isdigit() or process_birth(int(pid)) is None:
                os.unlink(entry.path)
                gone += 1
        except FileNotFoundError:
            continue
    return gone


def _files(cache: PromptCache) -> Iterator[tuple[str, os.stat_result]]:
    seen = 0
    for kind in ("seg", "tail"):
        for folder in sorted(os.scandir(cache.folder / kind), key=lambda e: e.name):
            for entry in os.scandir(folder.path):
                seen += 1
                if seen > SWEEP_ENTRIES:
                    return
                try:
                    yield f"{kind}/{folder.name}/{entry.name}", entry.stat()
                except FileNotFoundError:
                    continue


def _sweep_files(cache: PromptCache, orphan_s: float) -> int:
    with cache.db.read() as db:
        known = {row["file"] for row in db.query("SELECT file FROM seg UNION ALL SELECT file FROM mark UNION ALL SELECT file FROM trash")}
    gone = 0
    for name, status in _files(cache):
        if name not in known and cache.clock() - status.st_mtime >= orphan_s:
            (cache.folder / name).unlink(missing_ok=True)
            gone += 1
    return gone


def _sweep_rows(cache: PromptCache) -> int:
    """Rows whose file is absent or has another size: their marks, and all marks below a broken segment."""
    with cache.db.read() as db:
        segs, marks = list(db.query("SELECT id, file, bytes FROM seg")), list(db.query("SELECT id, file, bytes FROM mark"))
    wrong = lambda row: _size(cache.folder / row["file"]) != row["bytes"]
    ids = [row["id"] for row in marks if wrong(row)]
    broken = [row["id"] for row in segs if wrong(row)]
    with cache.db.write() as db:
        for seg_id in broken:
            ids += [
                row["id"]
                for row in db.query(
                    "WITH RECURSIVE down(id) AS (SELECT ? UNION SELECT s.id FROM seg s JOIN down ON s.parent_id = down.id)"
                    " SELECT m.id FROM mark m JOIN down ON m.seg_id = down.id",
                    [seg_id],
                )
            ]
        cache._lose(db, ids, "damaged")
        index.delete_marks(db, ids, cache.clock())
        # A crash between the rows of one deletion cannot be; rows that an older mistake left bare go here.
        for row in list(db.query("SELECT id FROM seg WHERE id NOT IN (SELECT seg_id FROM mark)")):
            index.drop_bare_segments(db, row["id"], cache.clock())
    return len(set(ids))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _measure(cache: PromptCache) -> None:
    """Count what lies in the folder and is in no row."""
    cache._foreign_bytes = 0
    cache._foreign_bytes = max(0, folder_bytes(cache.folder) - used_bytes(cache))


# merging ------------------------------------------------------------------------------------------------------------------


def merge(cache: PromptCache, seg_id: int) -> int:
    """Join runs of small segments of the chain that ends in `seg_id`, if it has more than MERGE_SEGMENTS. Returns how many went.

    Only segments that nothing but the next one needs are joined, each at most once; the last one of a run keeps its id.
    """
    with cache.db.read() as db:
        chain = index.segments_to(db, seg_id)
        if chain is None or len(chain) <= MERGE_SEGMENTS:
            return 0
        inner = {
            row["id"]
            for row in db.query(
                "SELECT id FROM seg WHERE merged = 0 AND id NOT IN (SELECT seg_id FROM mark)"
                " AND (SELECT count(*) FROM seg c WHERE c.parent_id = seg.id) = 1"
            )
        }
    runs: list[list[Any]] = [[]]
    for segment in chain:
        # A run is a row of inner segments and the one that follows them.
        if sum(s.bytes for s in runs[-1]) + segment.bytes > MERGE_BYTES:
            runs.append([])
        runs[-1].append(segment)
        if segment.id not in inner:
            runs.append([])
    return sum(_merge_run(cache, run) for run in runs if len(run) > 1)


def _merge_run(cache: PromptCache, run: list[Any]) -> int:
    try:
        tensors, meta = _joined(cache, run)
    except (CacheCorrupt, OSError) as error:
        log.info("segments were not merged: %s", error)
        return 0
    name = secrets.token_hex(16)
    final = f"seg/{name[:2]}/{name}.safetensors"
    files.private_folder((cache.folder / final).parent)
    temporary = cache.folder / "tmp" / f"{name}.{os.getpid()}"
    size, crc = write_file(temporary, tensors, meta, hook=lambda step: cache.hook(f"merge {step}"))
    os.replace(temporary, cache.folder / final)
    cache.hook("merge renamed")
    first, last, now = run[0], run[-1], cache.clock()
    try:
        with cache.db.write() as db:
            again = index.segments_to(db, last.id)
            if again is None or [s for s in again if s.lo >= first.lo] != run:
                raise CacheCorrupt("the chain has changed")
            for segment in run[:-1]:
                others = db.execute(
                    "SELECT (SELECT count(*) FROM mark WHERE seg_id = ?) + (SELECT count(*) FROM seg WHERE parent_id = ?)", [segment.id, segment.id]
                ).fetchone()[0]
                if others != 1:
                    raise CacheCorrupt("the chain has changed")
            parent = db.execute("SELECT parent_id FROM seg WHERE id = ?", [first.id]).fetchone()[0]
            db.execute(
                "UPDATE seg SET lo = ?, parent_id = ?, file = ?, bytes = ?, crc = ?, merged = 1 WHERE id = ?",
                [first.lo, parent, final, size, crc, last.id],
            )
            for segment in reversed(run[:-1]):
                db.execute("DELETE FROM seg WHERE id = ?", [segment.id])
            for segment in run:
                db.execute("INSERT OR REPLACE INTO trash VALUES (?, ?)", [segment.file, now])
            cache.hook("merge rows")
    except (CacheCorrupt, StoreError) as error:
        log.info("segments were not merged: %s", error)
        (cache.folder / final).unlink(missing_ok=True)
        return 0
    cache.count("merged", len(run))
    cache.empty_trash()
    return len(run) - 1


def _joined(cache: PromptCache, run: list[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    opened = []
    try:
        for segment in run:
            opened.append(os.open(cache.folder / segment.file, os.O_RDONLY | os.O_CLOEXEC))
        headers = [read_header(fd, segment.bytes) for fd, segment in zip(opened, run)]
        out, parts = join(headers)
        for fd, header, segment, into in zip(opened, headers, run, parts):
            read_data(fd, header, segment.crc, into)
    finally:
        for fd in opened:
            os.close(fd)
    return out, dict(headers[0].meta) | {"lo": str(run[0].lo), "hi": str(run[-1].hi)}


# reports ------------------------------------------------------------------------------------------------------------------


def stats(cache: PromptCache) -> dict[str, Any]:
    """entries, bytes (of the whole folder), budget, per build, and counters since the cache began.

    name of a build: by which it was loaded last; names: all. Builds that compute the same are one here, whatever they are called.
    """
    with cache.db.read() as db:
        builds = [
            dict(row)
            for row in db.query(
                "SELECT json_extract(b.info, '$.name') AS name, b.info AS names, b.family, b.fp, b.last_used, count(m.id) AS entries,"
                " coalesce(sum(m.bytes), 0) + (SELECT coalesce(sum(bytes), 0) FROM seg WHERE build_id = b.id) AS bytes"
                " FROM build b LEFT JOIN mark m ON m.build_id = b.id GROUP BY b.id ORDER BY b.last_used DESC"
            )
        ]
        for row in builds:
            row["names"] = index.names_of(row["names"])
        kinds = {row["kind"]: row["n"] for row in db.query("SELECT kind, count(*) AS n FROM mark GROUP BY kind")}
        counters = {row["name"]: row["count"] for row in db.query("SELECT name, count FROM counter")}
        segments = db.execute("SELECT count(*) FROM seg").fetchone()[0]
    for name, count in dict(cache.counters).items():
        counters[name] = counters.get(name, 0) + count
    return {
        "folder": str(cache.folder), "entries": sum(kinds.values()), "by_kind": kinds, "segments": segments, "bytes": folder_bytes(cache.folder),
        "budget": cache.budget_bytes, "builds": builds, "counters": dict(sorted(counters.items())),
    }  # fmt: skip


def listing(cache: PromptCache, build_fp: str | None = None) -> list[dict[str, Any]]:
    """Per conversation and build: marks, tokens of the deepest one, bytes (shared segments count for each), last use, pinned."""
    with cache.db.read() as db:
        rows = [
            dict(row)
            for row in db.query(
                "SELECT c.conv_id AS conversation, json_extract(b.info, '$.name') AS build, b.info AS builds, b.fp, count(*) AS entries,"
                " max(m.pos) AS tokens, sum(m.bytes) AS bytes, max(m.last_used) AS last_used, max(m.pinned) AS pinned, m.build_id"
                " FROM conv_mark c JOIN mark m ON m.id = c.mark_id JOIN build b ON b.id = m.build_id"
                " WHERE ? IS NULL OR b.fp = ? GROUP BY c.conv_id, m.build_id ORDER BY last_used DESC",
                [build_fp, build_fp],
            )
        ]
        for row in rows:
            row["bytes"] += db.execute(
                "WITH RECURSIVE up(id) AS (SELECT m.seg_id FROM conv_mark c JOIN mark m ON m.id = c.mark_id WHERE c.conv_id = ? AND m.build_id = ?"
                " UNION SELECT s.parent_id FROM seg s JOIN up ON s.id = up.id)"
                " SELECT coalesce(sum(bytes), 0) FROM seg WHERE id IN (SELECT id FROM up)",
                [row["conversation"], row.pop("build_id")],
            ).fetchone()[0]
            row["pinned"], row["builds"] = bool(row["pinned"]), index.names_of(row["builds"])
    return rows


def open_existing(folder: Path, budget_bytes: int | None, *, readonly: bool = False) -> PromptCache | None:
    """The cache of `folder` if there is one; None, and nothing is made, otherwise. Raises StoreError: also for a file in the folder's place.

    readonly: to be looked at only. An index that cannot be used is set aside all the same, as at every opening.
    """
    with translated(Path(folder), reading=True):
        if not (Path(folder) / DATABASE).exists():
            files.refuse_file(folder)
            return None
    if readonly:
        try:
            return PromptCache.open_readonly(folder, budget_bytes)
        except (StoreDamaged, StoreNewer) as error:
            log.info("the prompt cache cannot be looked at: %s", error)
    return PromptCache.open(folder, budget_bytes)
