"""The index of the prompt cache: which states there are, what they continue, and how a request finds one.

A segment holds what the tokens [lo, hi) added; segments form a tree. A mark stands at the end of a segment and makes that
position resumable. Hashes find a mark, token ids decide. Source: spec prompt_cache, sections 4.2 and 4.3.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

SCHEMA_VERSION = "1"
STORE_FORMAT = 1
BLOCK_TOKENS = 64
_SLICE = 500  # keys per query; SQLite limits the number of parameters

PROMPT_CACHE = Migrations("prompt_cache")


@PROMPT_CACHE()
def tables(db: Database) -> None:
    """Everything of the first version."""
    for statement in (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE build (id INTEGER PRIMARY KEY, fp TEXT NOT NULL UNIQUE, family TEXT, info TEXT, created REAL, last_used REAL)",
        """
        CREATE TABLE seg (
          id INTEGER PRIMARY KEY AUTOINCREMENT,
          build_id INTEGER NOT NULL REFERENCES build(id),
          parent_id INTEGER REFERENCES seg(id),
          lo INTEGER NOT NULL, hi INTEGER NOT NULL,
          file TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL, crc INTEGER NOT NULL,
          merged INTEGER NOT NULL DEFAULT 0,
          created REAL NOT NULL
        )
        """,
        """
        CREATE TABLE mark (
          id INTEGER PRIMARY KEY AUTOINCREMENT,
          build_id INTEGER NOT NULL REFERENCES build(id),
          seg_id INTEGER NOT NULL REFERENCES seg(id),
          pos INTEGER NOT NULL,
          blk INTEGER NOT NULL, chain BLOB NOT NULL, rest BLOB NOT NULL,
          kind TEXT NOT NULL,                    -- S, P, E or G
          file TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL, crc INTEGER NOT NULL,
          created REAL NOT NULL, last_used REAL NOT NULL,
          hits INTEGER NOT NULL DEFAULT 0,
          pinned INTEGER NOT NULL DEFAULT 0
        )
        """,
        "CREATE TABLE conv_mark (conv_id TEXT NOT NULL, mark_id INTEGER NOT NULL REFERENCES mark(id) ON DELETE CASCADE, turn INTEGER NOT NULL, "
        "PRIMARY KEY (conv_id, mark_id))",
        # What the newest states of a conversation were made with, and why older ones went: to give a reason for a miss.
        "CREATE TABLE conv (conv_id TEXT NOT NULL, build_id INTEGER NOT NULL, head TEXT NOT NULL DEFAULT '{}', lost TEXT, "
        "PRIMARY KEY (conv_id, build_id))",
        "CREATE TABLE trash (file TEXT PRIMARY KEY, since REAL NOT NULL)",
        "CREATE TABLE counter (name TEXT PRIMARY KEY, count INTEGER NOT NULL)",
        "CREATE UNIQUE INDEX mark_key ON mark(build_id, chain, rest)",
        "CREATE INDEX mark_used ON mark(last_used)",
        "CREATE INDEX mark_seg ON mark(seg_id)",
        "CREATE INDEX seg_parent ON seg(parent_id)",
        "CREATE INDEX conv_mark_mark ON conv_mark(mark_id)",
    ):
        db.execute(statement)


@dataclass(frozen=True)
class BuildKey:
    """One fingerprint in the index. key: of this store's hashes."""

    id: int
    fp: str
    key: bytes


@dataclass(frozen=True)
class SegmentRow:
    id: int
    lo: int
    hi: int
    file: str
    bytes: int
    crc: int


@dataclass(frozen=True)
class Found:
    """A mark whose key fits a request. segments: from the first token on. matches: all marks that fit, this one included."""

    mark_id: int
    pos: int
    kind: str
    file: str
    bytes: int
    crc: int
    segments: tuple[SegmentRow, ...]
    matches: frozenset[int]


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Hex digest of everything that can change a bit or a shape of a state: canonical JSON of `facts` and the store's format."""
    text = json.dumps({"format": STORE_FORMAT, **facts}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def names_of(info: str | None) -> list[str]:
    """The names under which a build was loaded, the last one first. info: of its row."""
    known = json.loads(info or "{}")
    return known.get("names") or [name for name in [known.get("name")] if name]


def chain(build: BuildKey, ids: bytes) -> list[bytes]:
    """H(0), H(1), ...: one keyed hash per whole block of BLOCK_TOKENS ids. ids: little-endian uint32."""
    step = 4 * BLOCK_TOKENS
    value = hashlib.blake2b(build.fp.encode(), key=build.key, digest_size=16).digest()
    out = [value]
    for a in range(0, len(ids) - len(ids) % step, step):
        value = hashlib.blake2b(value + ids[a : a + step], key=build.key, digest_size=16).digest()
        out.append(value)
    return out


def mark_key(build: BuildKey, ids: bytes) -> tuple[int, bytes, bytes]:
    """(blk, chain, rest) of a mark after all of `ids`."""
    hashes = chain(build, ids)
    blk = len(hashes) - 1
    return blk, hashes[blk], ids[4 * BLOCK_TOKENS * blk :]


def matching_marks(db: Database, build: BuildKey, ids: bytes) -> list[dict[str, Any]]:
    """Rows of all marks that are a prefix of `ids` and leave at least one id to run, deepest first."""
    hashes = chain(build, ids)
    found = []
    newest_first = hashes[::-1]
    for a in range(0, len(newest_first), _SLICE):
        part = newest_first[a : a + _SLICE]
        marks = ",".join("?" * len(part))
        rows = db.query(f"SELECT * FROM mark WHERE build_id = ? AND chain IN ({marks})", [build.id, *part])
        for row in rows:
            blk, pos = row["blk"], row["pos"]
            if 4 * pos < len(ids) and hashes[blk] == row["chain"] and row["rest"] == ids[4 * BLOCK_TOKENS * blk : 4 * pos]:
                found.append(row)
    return sorted(found, key=lambda row: -row["pos"])


def segments_to(db: Database, seg_id: int) -> tuple[SegmentRow, ...] | None:
    """The segments from the first token to the end of this one; None if the chain is broken."""
    rows = list(
        db.query(
            "WITH RECURSIVE up(id, parent_id, lo, hi, file, bytes, crc) AS ("
            " SELECT id, parent_id, lo, hi, file, bytes, crc FROM seg WHERE id = ?"
            " UNION ALL SELECT s.id, s.parent_id, s.lo, s.hi, s.file, s.bytes, s.crc FROM seg s JOIN up ON s.id = up.parent_id)"
            " SELECT id, lo, hi, file, bytes, crc FROM up ORDER BY lo",
            [seg_id],
        )
    )
    segments = tuple(SegmentRow(**row) for row in rows)
    if not segments or segments[0].lo != 0 or any(a.hi != b.lo for a, b in zip(segments, segments[1:])):
        return None
    return segments


def delete_marks(db: Database, ids: list[int], now: float) -> None:
    """Drop marks, and the segments that no mark and no other segment needs any more; their files go to the trash list."""
    for mark_id in ids:
        row = next(iter(db.query("SELECT seg_id, file FROM mark WHERE id = ?", [mark_id])), None)
        if row is None:
            continue
        db.execute("INSERT OR REPLACE INTO trash VALUES (?, ?)", [row["file"], now])
        db.execute("DELETE FROM mark WHERE id = ?", [mark_id])
        drop_bare_segments(db, row["seg_id"], now)


def drop_bare_segments(db: Database, seg_id: int | None, now: float) -> None:
    """Drop this segment if it is bare, and then every bare one above it."""
    while seg_id is not None:
        row = next(
            iter(
                db.query(
                    "SELECT parent_id, file FROM seg WHERE id = ? AND NOT EXISTS (SELECT 1 FROM mark WHERE seg_id = seg.id)"
                    " AND NOT EXISTS (SELECT 1 FROM seg c WHERE c.parent_id = seg.id)",
                    [seg_id],
                )
            ),
            None,
        )
        if row is None:
            return
        db.execute("INSERT OR REPLACE INTO trash VALUES (?, ?)", [row["file"], now])
        db.execute("DELETE FROM seg WHERE id = ?", [seg_id])
        seg_id = row["parent_id"]


def unlink_conversation(db: Database, conv_id: str, now: float) -> None:
    """Forget a conversation: its links, and the marks that no other conversation has."""
    ids = [row["mark_id"] for row in db.query("SELECT mark_id FROM conv_mark WHERE conv_id = ?", [conv_id])]
    db.execute("DELETE FROM conv_mark WHERE conv_id = ?", [conv_id])
    db.execute("DELETE FROM conv WHERE conv_id = ?", [conv_id])
    delete_marks(db, unlinked(db, ids), now)


def unlinked(db: Database, mark_ids: list[int]) -> list[int]:
    """Those of `mark_ids` that no conversation has."""
    return [id for id in mark_ids if not db.execute("SELECT 1 FROM conv_mark WHERE mark_id = ?", [id]).fetchone()]
