"""The writing thread: what it refuses, how it steps back, what it does on a full disk."""

from __future__ import annotations

import errno
import threading

import pytest

from dsv41chat.store import prompt_cache_put as module
from dsv41chat.store.prompt_cache_put import Entry
from dsv41chat.store.prompt_cache_writer import RATE_BYTES_S, PromptCacheWriter
from tests.store.states import build_of, load, open_cache, packed, pool, window

IDS = list(range(5000))


@pytest.fixture
def cache(tmp_path):
    cache = open_cache(tmp_path / "states")
    yield cache
    cache.close()


def entry(cache, pos=400, ids=IDS, parent=None, conversation="c"):
    lo = parent.hi if parent is not None else 0
    return Entry(build_of(cache), parent, lo, pos, packed(ids[:pos]), {"pool": pool(ids, lo, pos)}, {"win": window(ids[:pos])}, "E", conversation)


def test_what_is_queued_is_written_in_order(cache):
    writer = PromptCacheWriter(cache)
    first = writer.put(entry(cache))
    second = writer.put(entry(cache, 600, parent=first))
    assert writer.drain(20)
    assert first.seg_id and second.seg_id and load(cache, build_of(cache), IDS) == 600
    assert writer.close()
    late = writer.put(entry(cache, 800, parent=second))
    assert late.settled and late.seg_id is None and cache.counters["skipped: the cache is closed"] == 1


def test_backlog_and_hour(cache):
    gate, now = threading.Event(), [0.0]
    writer = PromptCacheWriter(cache, monotonic=lambda: now[0], backlog_bytes=5000, hour_bytes=20_000)
    writer.run("waiting", gate.wait)
    assert not writer.put(entry(cache)).settled
    dropped = writer.put(entry(cache, 1200))
    assert dropped.settled and dropped.seg_id is None and cache.counters["skipped: writing is behind"] == 1
    gate.set()
    assert writer.drain()
    # What continues a dropped entry is not written either; the next one begins further back.
    assert writer.put(entry(cache, 1300, parent=dropped)).seg_id is None
    for number in range(20):
        writer.put(entry(cache, 400, [number + 9, *IDS]))
        writer.drain()
    assert cache.counters["skipped: hourly limit of writing"] > 0
    now[0] = 3601
    assert not writer.put(entry(cache, 400, [77, *IDS])).settled or writer.drain()
    writer.drain()
    assert load(cache, build_of(cache), [77, *IDS]) == 400
    writer.close()


@pytest.mark.parametrize("busy", [True, False])
def test_it_steps_back_while_a_turn_runs(cache, monkeypatch, busy):
    """The rate is held by sleeping between pieces; a writer without a turn beside it does not sleep."""
    monkeypatch.setattr("dsv41chat.store.prompt_cache_files.PIECE_BYTES", 1024)
    slept = []
    writer = PromptCacheWriter(cache, monotonic=lambda: 0.0, sleep=slept.append)
    writer.drain()
    if busy:
        writer.busy.set()
    big = list(range(4000))
    writer.put(entry(cache, 4000, big))
    assert writer.drain()
    if busy:
        assert slept[-1] == pytest.approx(cache.counters["bytes written"] / RATE_BYTES_S, rel=0.1) and len(slept) > 10
    else:
        assert slept == []
    writer.close()


def test_a_full_disk(cache, monkeypatch):
    """Evict once, try once more, then leave the disk alone for ten minutes; one notice, no exception."""
    now = [0.0]
    writer = PromptCacheWriter(cache, monotonic=lambda: now[0])
    writer.put(entry(cache, 400))
    writer.drain()
    writing, calls = module.write_file, []

    def full(*args, **options):
        calls.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_file", full)
    writer.put(entry(cache, 500, [5, *IDS]))
    assert writer.drain() and len(calls) == 2
    assert len(cache.notices) == 1 and "full" in cache.notices[0] and cache.counters["write failed: OSError"] == 1
    monkeypatch.setattr(module, "write_file", writing)
    writer.put(entry(cache, 500, [6, *IDS]))
    writer.drain()
    assert cache.counters["skipped: the disk was full"] == 1
    now[0] = 601
    writer.put(entry(cache, 500, [7, *IDS]))
    writer.drain()
    assert load(cache, build_of(cache), [7, *IDS]) == 500
    writer.close()


def test_a_failing_index_is_counted(cache, monkeypatch):
    writer = PromptCacheWriter(cache)
    writer.drain()
    monkeypatch.setattr(module, "_publish", lambda *a: (_ for _ in ()).throw(RuntimeError("broken")))
    ticket = writer.put(entry(cache))
    assert writer.drain() and ticket.settled and ticket.seg_id is None
    assert cache.counters["write failed: RuntimeError"] == 1 and not list(cache.folder.glob("*/??/*"))
    writer.close()


def test_too_large_is_said_once_written_never(tmp_path):
    cache = open_cache(tmp_path / "states", 150_000)
    writer = PromptCacheWriter(cache)
    writer.put(entry(cache, 4000, list(range(40_000))))
    big = list(range(60_000))
    writer.put(entry(cache, 50_000, big))
    writer.drain()
    assert any("larger than the cache's budget" in text for text in cache.notices)
    assert cache.counters["skipped: larger than the budget"] == 1
    writer.close()
    cache.close()
