"""Writing a state of the prompt cache: files under their final names first, then the rows that publish them."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlite_utils import Database

from dsv41chat.store import files
from dsv41chat.store import prompt_cache_index as index
from dsv41chat.store.prompt_cache import PromptCache
from dsv41chat.store.prompt_cache_files import NoRoom, Tensor, file_bytes, write_file
from dsv41chat.store.prompt_cache_index import BuildKey
from dsv41chat.store.prompt_cache_room import make_room, used_bytes


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


def put(cache: PromptCache, entry: Entry, ticket: Ticket, pace: Callable[[int], None] = lambda size: None) -> None:
    """Write one entry and publish it. Raises NoRoom, OSError or StoreError; nothing is left behind then but what the sweep finds."""
    try:
        if _link_existing(cache, entry, ticket):
            return
        parent_id = None
        if entry.parent is not None:
            parent_id = entry.parent.seg_id
            if parent_id is None:
                raise NoRoom("what it continues was not saved")
        segment = {"tok": ("U32", (entry.pos - entry.lo,), entry.ids[4 * entry.lo :]), **entry.segment} if entry.pos > entry.lo else {}
        meta = {"fmt": str(index.STORE_FORMAT), "fp": entry.build.fp, "kind": entry.kind, "created": f"{cache.clock():.0f}"}
        seg_meta = meta | {"lo": str(entry.lo), "hi": str(entry.pos)}
        tail_meta = meta | entry.meta | {"lo": str(entry.pos), "hi": str(entry.pos)}
        need = (file_bytes(segment, seg_meta) if segment else 0) + file_bytes(entry.tail, tail_meta)
        make_room(cache, need)
        cache.hook("room")
        placed: list[tuple[str, int, int]] = []
        try:
            if segment:
                placed.append(_place(cache, "seg", segment, seg_meta, pace))
            placed.append(_place(cache, "tail", entry.tail, tail_meta, pace))
            ticket.seg_id = _publish(cache, entry, parent_id, placed[0] if segment else None, placed[-1])
        except BaseException:
            for file, *_ in placed:
                (cache.folder / file).unlink(missing_ok=True)
            raise
        cache.count("written")
        cache.count("bytes written", need)
        if used_bytes(cache) > cache.budget_bytes:
            # The index's log has grown past the margin.
            cache.checkpoint()
    finally:
        ticket.settled = True


def _place(
    cache: PromptCache, folder: str, tensors: Mapping[str, Tensor], meta: Mapping[str, str], pace: Callable[[int], None]
) -> tuple[str, int, int]:
    """Write a file and give it its final name. Returns (name below the folder, bytes, crc)."""
    name = secrets.token_hex(16)
    final = f"{folder}/{name[:2]}/{name}.safetensors"
    files.private_folder((cache.folder / final).parent)
    temporary = cache.folder / "tmp" / f"{name}.{os.getpid()}"
    size, crc = write_file(temporary, tensors, meta, pace, lambda step: cache.hook(f"{folder} {step}"))
    os.replace(temporary, cache.folder / final)
    cache.hook(f"{folder} renamed")
    return final, size, crc


def _publish(cache: PromptCache, entry: Entry, parent_id: int | None, seg: tuple[str, int, int] | None, tail: tuple[str, int, int]) -> int:
    blk, chain, rest = index.mark_key(entry.build, entry.ids)
    now = cache.clock()
    lost: list[str] = []
    with cache.db.write() as db:
        cache.hook("begun")
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
            cache.hook("seg row")
            cursor = db.execute(
                "INSERT INTO mark(build_id, seg_id, pos, blk, chain, rest, kind, file, bytes, crc, created, last_used)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [entry.build.id, seg_id, entry.pos, blk, chain, rest, entry.kind, *tail, now, now],
            )
            _link(cache, db, entry, cursor.lastrowid)
        cache.hook("rows")
    cache.hook("committed")
    for file in lost:
        (cache.folder / file).unlink(missing_ok=True)
    return seg_id


def _link_existing(cache: PromptCache, entry: Entry, ticket: Ticket) -> bool:
    """Whether these tokens have a mark already; then the conversation only takes part in it."""
    blk, chain, rest = index.mark_key(entry.build, entry.ids)
    with cache.db.write() as db:
        row = db.execute("SELECT id, seg_id FROM mark WHERE build_id = ? AND chain = ? AND rest = ?", [entry.build.id, chain, rest]).fetchone()
        if row is None:
            return False
        _link(cache, db, entry, row[0])
        db.execute("UPDATE mark SET last_used = ? WHERE id = ?", [cache.clock(), row[0]])
    # Rows that another computation made may differ in the last bit where the route is not row-invariant; what continues
    # this state must then not stand on them.
    ticket.seg_id = row[1] if entry.exact else None
    cache.count("already there")
    return True


def _link(cache: PromptCache, db: Database, entry: Entry, mark_id: int) -> None:
    cache.just_written(mark_id)
    if entry.conversation is None:
        return
    db.execute("INSERT OR REPLACE INTO conv_mark VALUES (?, ?, ?)", [entry.conversation, mark_id, entry.turn])
    db.execute(
        "INSERT INTO conv VALUES (?, ?, ?, NULL) ON CONFLICT(conv_id, build_id) DO UPDATE SET head = excluded.head, lost = NULL",
        [entry.conversation, entry.build.id, json.dumps(entry.head)],
    )
