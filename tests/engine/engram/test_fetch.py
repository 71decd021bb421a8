"""Tickets, overlap, cancel, staging."""

import gc
import os
import threading
import time

import numpy as np
import pytest

from dsv41chat.engine.engram.fetch import STAGING_BYTES, Lane, Staging
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.rowcache import RowCache
from dsv41chat.engine.engram.table import EngramSettings
from dsv41chat.engine.errors import Cancelled, EngineError
from tests.engine.engram.tables import FakeMac, GatedDisk, SlowDisk, assert_rows, write_table

ROWS = 60_000


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    return [write_table(folder / name, ROWS, seed=seed, name=name) for seed, name in enumerate(("layers.1.engram", "layers.14.engram"))]


def open_slow(specs, **settings):
    return EngramReader.open(specs, EngramSettings(scales="mapped", **settings), os_layer=SlowDisk())


def waits(reader, specs) -> float:
    return sum(reader.counters()[spec.name]["wait_s"] for spec in specs)


COMPUTE_S = 0.008  # between two uses of the reader: more than the fake drive needs


@pytest.mark.parametrize("path", ("auto", "advise", "pool"))
def test_decode_waits_less_with_overlap(specs, path):
    """Rows are asked for when a token is known; the second table's while the layers before it run."""

    def decode(overlap: bool) -> float:
        reader = open_slow(specs, path=path, overlap=overlap)
        rng = np.random.default_rng(0)
        for _ in range(8):
            ids = rng.integers(0, ROWS, (2, 1, 6))
            reader.prefetch(ids)
            reader.os.tick(reader, COMPUTE_S)
            with reader.stage(ids) as ticket:
                for slot in (0, 1):
                    assert_rows(ticket.rows(slot), specs[slot], ids[slot])
                    reader.os.tick(reader, COMPUTE_S)
        reader.close()
        return waits(reader, specs)

    on, off = decode(True), decode(False)
    assert on <= off / 2 and off >= 16 * reader_delay(), (on, off)


def reader_delay() -> float:
    return SlowDisk().delay_s


def test_prefill_waits_less_with_overlap(specs):
    """The next chunk is read while this one computes. The fake drive reads a chunk's pages in 5 ms once they are advised."""

    def prefill(overlap: bool) -> float:
        reader = open_slow(specs, path="advise", overlap=overlap)
        rng = np.random.default_rng(0)
        chunks = [rng.integers(0, ROWS, (2, 64, 6)) for _ in range(5)]
        for chunk, following in zip(chunks, [*chunks[1:], None]):
            with reader.stage(chunk) as ticket:
                if following is not None:
                    reader.prefetch(following)
                for slot in (0, 1):
                    assert_rows(ticket.rows(slot), specs[slot], chunk[slot])
                    reader.os.tick(reader, COMPUTE_S)
        reader.close()
        return waits(reader, specs)

    on, off = prefill(True), prefill(False)
    assert on <= off / 2 and off > 0, (on, off)


@pytest.mark.parametrize("urgent", (True, False))
@pytest.mark.parametrize("n", (1, 200))
def test_cancel_does_not_wait_for_reads_and_frees_the_buffers(specs, urgent, n):
    disk = GatedDisk()
    reader = EngramReader.open(specs, EngramSettings(path="pool", scales="mapped"), os_layer=disk)
    ids = np.random.default_rng(0).integers(0, ROWS, (2, n, 24))
    ticket = reader.stage(ids, urgent=urgent)
    assert disk.entered.wait(120)
    ticket.cancel()  # returns although no read can end
    with pytest.raises(Cancelled):
        ticket.rows(0)
    ticket.cancel()
    disk.gate.set()
    with reader.stage(ids[:, :1]) as after:
        assert_rows(after.rows(0), specs[0], ids[0, :1])
    # The last thread that writes to a buffer gives it back, when it comes to run.
    deadline = time.monotonic() + 120
    while reader.staging.in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reader.staging.in_flight == 0
    reader.close()


def test_cancelled_read_ahead_is_dropped_from_the_queue(specs):
    reader = open_slow(specs, path="advise")
    gate, entered = threading.Event(), threading.Event()
    reader.runner.lane.submit(lambda: (entered.set(), gate.wait(120)), urgent=True)
    entered.wait(120)
    ticket = reader.prefetch(np.random.default_rng(0).integers(0, ROWS, (2, 300, 24)))
    ticket.cancel()
    gate.set()
    reader.close()
    for spec in specs:
        counters = reader.counters()[spec.name]
        assert counters["prefetched_pages"] == 0 and counters["cancelled"] == 1


def test_lane_runs_urgent_jobs_first():
    lane, order, gate, entered = Lane(), [], threading.Event(), threading.Event()
    lane.submit(lambda: (entered.set(), gate.wait(120)), urgent=True)
    entered.wait(120)
    for name, urgent in (("a", False), ("b", True), ("c", False), ("d", True)):
        lane.submit(lambda name=name: order.append(name), urgent)
    gate.set()
    lane.close()
    assert order == ["b", "d", "a", "c"]
    with pytest.raises(EngineError):
        lane.submit(lambda: None, True)


def test_staging_reuses_buffers_and_defers_read_ahead_beyond_its_limit(specs):
    staging = Staging()
    first = staging.acquire(1000)
    staging.release(first)
    assert staging.acquire(900) is first and staging.in_flight == 1000
    assert staging.acquire(900) is not first
    reader = EngramReader.open(specs)
    reader.staging.in_flight = STAGING_BYTES
    ids = np.random.default_rng(0).integers(0, ROWS, (2, 100, 24))
    ticket = reader.stage(ids, urgent=False)
    assert not any(job.started for job in ticket._jobs)
    assert_rows(ticket.rows(1), specs[1], ids[1])
    ticket.cancel()
    assert reader.staging.in_flight == STAGING_BYTES
    reader.close()


def test_a_slot_that_was_not_staged_has_no_rows(specs):
    reader = EngramReader.open(specs)
    with reader.stage([None, np.array([[3]])]) as ticket:
        with pytest.raises(EngineError, match="no rows of engram table 0"):
            ticket.rows(0)
        assert ticket.ready(0)
        assert_rows(ticket.rows(1), specs[1], [[3]])
    reader.close()
    reader.close()


def test_row_cache_against_a_dictionary():
    rng = np.random.default_rng(0)
    cache, truth = RowCache(50, 12), {}
    for _ in range(300):
        ids = np.unique(rng.integers(0, 1000, int(rng.integers(1, 90)) if rng.random() < 0.9 else 700))
        slots = cache.find(ids)
        for row, slot in zip(ids.tolist(), slots.tolist()):
            if slot >= 0:
                assert cache.ids[slot] == row and np.array_equal(cache.rows[slot], truth[row])
        assert len(set(slots[slots >= 0].tolist())) == (slots >= 0).sum()
        new = ids[slots < 0]
        rows = rng.integers(0, 256, (len(new), 12), np.uint8)
        cache.insert(new, (rows[:, :8], rows[:, 8:]))
        truth |= dict(zip(new.tolist(), rows))
        live = cache.ids[cache.ids >= 0]
        assert len(live) == len(set(live.tolist()))


def test_row_cache_hits_are_counted_and_not_read_again(specs):
    reader = EngramReader.open(specs, EngramSettings(row_cache=1000))
    ids = np.random.default_rng(0).permutation(ROWS)[:600]
    for n in (600, 24, 600):
        assert_rows(reader.gather(0, ids[:n][None]), specs[0], ids[:n])
    counters = reader.counters()[specs[0].name]
    assert counters["rows"] == 600 and counters["row_cache_hits"] == 624
    reader.close()


def test_on_macos_rows_of_uncached_reads_are_kept(specs):
    ids = np.random.default_rng(0).permutation(ROWS)[:24][None]
    for path, hits in (("nocache", 48), ("pool", 0)):
        reader = EngramReader.open(specs, EngramSettings(path=path), os_layer=FakeMac())
        for _ in range(3):
            assert_rows(reader.gather(0, ids), specs[0], ids)
        assert reader.counters()[specs[0].name]["row_cache_hits"] == hits
        reader.close()


def test_dedupe_counts_distinct_rows(specs):
    reader = EngramReader.open(specs)
    ids = np.resize(np.arange(40), 4096).reshape(-1, 8)
    packed = reader.gather(0, ids)
    assert len(packed.weight) == 40
    assert_rows(packed, specs[0], ids)
    counters = reader.counters()[specs[0].name]
    assert (counters["lookups"], counters["rows"]) == (4096, 40)
    reader.close()


def test_a_forgotten_reader_gives_its_descriptors_back(specs):
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("counts descriptors by /proc")
    gc.collect()
    before = opened()
    reader = EngramReader.open(specs)
    reader.gather(0, np.arange(2000)[None])
    assert opened() > before
    del reader
    gc.collect()
    assert opened() <= before + 1  # the process's own pidfd may stay a moment longer


def test_an_idle_lane_ends_and_starts_again(monkeypatch):
    monkeypatch.setattr("dsv41chat.engine.engram.fetch.IDLE_S", 0.01)
    lane, ran = Lane(), threading.Event()
    for _ in range(2):
        ran.clear()
        lane.submit(ran.set, urgent=False)
        assert ran.wait(120)
        thread = lane._thread
        if thread is not None:
            thread.join(120)
        assert lane._thread is None
    lane.close()
