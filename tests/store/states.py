"""Made-up states: tensors that say which tokens they belong to, so that a reader can tell whether it got the right ones.

As a program it writes marks in a loop until it is killed: `python -m tests.store.states FOLDER STEP COUNT` kills itself (signal 9)
when the write path reaches STEP for the COUNT-th time; `... FOLDER write SEED SECONDS` writes and evicts for a while.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from array import array
from pathlib import Path

from dsv41chat.store.prompt_cache import PromptCache
from dsv41chat.store.prompt_cache_files import CacheCorrupt, NoRoom
from dsv41chat.store.prompt_cache_put import Entry, Ticket, put
from dsv41chat.store.prompt_cache_room import merge, thin

FACTS = {"pack": "one"}
WIDTH = 8


def packed(ids) -> bytes:
    return array("I", ids).tobytes()


def pool(ids, lo: int, hi: int, ratio: int = 2):
    """A growing tensor: row g holds the ids of its group."""
    rows = range(lo // ratio, hi // ratio)
    return "U32", (len(rows), ratio), packed(i for g in rows for i in ids[g * ratio : (g + 1) * ratio])


def window(ids, size: int = 16):
    """A fixed tensor: the last ids."""
    return "U32", (len(ids[-size:]),), packed(ids[-size:])


def open_cache(folder, budget: int = 50_000_000, **options) -> PromptCache:
    return PromptCache.open(Path(folder), budget, min_free_bytes=0, **options)


def build_of(cache, facts=FACTS, name: str = "one"):
    return cache.build(facts, "v41", {"name": name})


def save(cache, build, ids, pos: int, parent: Ticket | None = None, kind: str = "E", conversation: str | None = "c", turn: int = 1, head=None):
    """Put a mark after ids[:pos]; returns its ticket."""
    ids, lo = list(ids[:pos]), parent.hi if parent is not None else 0
    segment = {"pool": pool(ids, lo, pos)} if pos // 2 > lo // 2 else {}
    ticket = Ticket(pos)
    put(cache, Entry(build, parent, lo, pos, packed(ids), segment, {"win": window(ids)}, kind, conversation, turn, head=head or {}), ticket)
    return ticket


def load(cache, build, ids):
    """Position that `ids` resumes from after checking every byte; 0 without a state."""
    found = cache.find(build, packed(ids))
    if found is None:
        return 0
    state = cache.read(build, found, packed(ids))
    ids = list(ids[: state.pos])
    assert state.ids == packed(ids)
    assert bytes(state.growing["pool"][2]) == pool(ids, 0, state.pos)[2] if state.pos >= 2 else True
    assert bytes(state.fixed["win"][2]) == window(ids)[2]
    return state.pos


def _killing(step: str, count: int):
    seen = 0

    def hook(name: str) -> None:
        nonlocal seen
        if name == step:
            seen += 1
            if seen >= count:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _write_until_killed(folder: str, step: str, count: int) -> None:
    """Marks after 100, 120, ... ids of one conversation, with what the program does around them."""
    cache = open_cache(folder, hook=_killing(step, count))
    build, ids, ticket = build_of(cache), list(range(10_000)), None
    for turn in range(1, 90):
        pos = 100 + 20 * turn
        ticket = save(cache, build, ids, pos, ticket, turn=turn)
        print(pos, flush=True)
        thin(cache, "c")
        merge(cache, ticket.seg_id)
    cache.forget("c")
    print("end", flush=True)


def _write_for(folder: str, seed: int, seconds: float) -> None:
    """Write, read, thin, evict and forget with another process at work in the same folder; prints what went wrong."""
    rng, cache = random.Random(seed), open_cache(folder, budget=400_000)
    build, done, missed = build_of(cache), 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        conversation = f"c{rng.randrange(6)}"
        ids = [rng.randrange(3) if i % 97 == 0 else i for i in range(600)]
        ticket = None
        for turn in range(1, rng.randrange(2, 6)):
            try:
                if ticket is not None and ticket.seg_id is None:
                    break
                ticket = save(cache, build, ids, 100 * turn, ticket, conversation=conversation, turn=turn)
                done += 1
            except NoRoom:
                break
        try:
            load(cache, build, ids)
        except CacheCorrupt:
            missed += 1
        if rng.random() < 0.1:
            cache.forget(conversation)
        elif rng.random() < 0.3:
            thin(cache, conversation, 2)
    cache.close()
    print(done, missed, flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "write":
        _write_for(sys.argv[1], int(sys.argv[3]), float(sys.argv[4]))
    else:
        _write_until_killed(sys.argv[1], sys.argv[2], int(sys.argv[3]))
