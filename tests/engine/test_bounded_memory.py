"""What a prompt chunk needs at its peak is bounded by its rows, not by the context before it; the cuts that see to it change no bit."""

from __future__ import annotations

import gc
import tracemalloc

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.bench.long_context import fill
from dsv41chat.engine import rows
from dsv41chat.engine.kernels.blas import attention as blas_attention
from dsv41chat.engine.lane import Lane
from dsv41chat.engine.nn import attention_v4
from dsv41chat.engine.ops import attend, blocks, select
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.engine.target import Target
from tests.engine.v4 import tiny
from tests.v41 import golden, run, trunk

ROWS = 64
# Contexts between which every bound is reached; on the host the small V4's ring cuts a call into blocks of 32 rows, so its factor stays below that.
CONTEXTS = {"v41": (256, 32 * 256), "v4": (2048, 8 * 2048)}


@pytest.fixture(params=["v41", "v4"])
def build(request, tmp_path):
    """Makes a trunk of a family: routes -> trunk."""
    if request.param == "v41":
        return lambda routes: trunk(cache_quant=True, routes=routes)
    tiny.write_pack(tmp_path, {**tiny.CONFIG, "max_position_embeddings": 1 << 20})
    return lambda routes: build_trunk(open_pack(tmp_path), routes=routes)


def small_bounds(monkeypatch, t) -> None:
    """The bounds of real shapes in proportion: as there, what one row needs after the longest context just fits."""
    c, longest = t.config, CONTEXTS[t.config.family][1] + 1024
    scored = [select.CHOICE_BYTES * (longest // p.ratio) for p in t.plan if p.scores]
    seen = [8 * c.head_dim * (c.sliding_window + longest // p.ratio) for p in t.plan if p.owns_pool and not p.scores]
    monkeypatch.setattr(blocks, "LEAST_BYTES", max(scored + seen))
    monkeypatch.setattr(blocks, "HOST_BYTES", max(scored + seen))
    monkeypatch.setattr(blocks, "ROW_BYTES", 0)
    monkeypatch.setattr(attend, "KEY_TILE", 1024)
    monkeypatch.setattr(blas_attention, "_KEY_TILE", 256)
    monkeypatch.setattr(blas_attention, "_BLOCK_BYTES", max(seen, default=64 << 10))


def chunk_peak(t, cached: int) -> int:
    """Bytes beyond what is held before: MLX's and numpy's."""
    target = Target(t)
    fill(target.lane, cached, t.config.vocab_size)
    ids = np.random.default_rng(1).integers(3, t.config.vocab_size, ROWS).tolist()
    target.commit(target.rows(ids, logits_from=None), ROWS)  # what is made once, and a buffer that grows
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tracemalloc.start()
    target.rows(ids, logits_from=None)
    found = tracemalloc.get_traced_memory()[1] + max(0, mx.get_peak_memory() - before)
    tracemalloc.stop()
    return found


@pytest.mark.parametrize("routes", ["stock", "blas"])
def test_a_chunk_after_a_long_context_needs_no_more_than_after_a_short_one(build, routes, monkeypatch):
    t = build(routes)
    small_bounds(monkeypatch, t)
    short, long = (chunk_peak(t, cached) for cached in CONTEXTS[t.config.family])
    assert long <= 1.2 * short, (short, long)
    # The fault: all rows of a call in one block.
    whole = lambda n, *rest: iter([slice(0, n)])
    for module in (rows, attend, attention_v4):
        monkeypatch.setattr(module, "row_blocks", whole)
    assert chunk_peak(t, CONTEXTS[t.config.family][1]) > 2 * short


@pytest.mark.parametrize("routes", ["stock", "blas"])
def test_cuts_between_rows_and_keys_change_no_bit(build, routes, monkeypatch):
    t = build(routes)
    n = 200
    ids = (golden()["input_ids"][:n] if hasattr(t, "hasher") else np.random.default_rng(3).integers(3, t.config.vocab_size, n)).tolist()
    whole = run(t, ids)
    monkeypatch.setattr(blocks, "LEAST_BYTES", 1 << 10)
    monkeypatch.setattr(blocks, "HOST_BYTES", 1 << 10)
    monkeypatch.setattr(blocks, "ROW_BYTES", 64)
    monkeypatch.setattr(attend, "KEY_TILE", 64)
    np.testing.assert_array_equal(run(t, ids), whole)


@pytest.mark.parametrize("first", [0, 3, 61])
def test_a_long_call_has_the_bits_of_blocks_through_the_ring(build, first, monkeypatch):
    """Its windows and open groups begin in the rings, and it leaves there what the blocks leave, in whole and in part of a turn."""
    t, found = build("stock"), []
    ids = np.random.default_rng(4).integers(3, t.config.vocab_size, first + 300).tolist()
    assert 150 > t.config.ring_rows - t.config.sliding_window
    for fits in (False, True):
        target = Target(t)
        if fits:
            monkeypatch.setattr(rows.Rows, "fits", True)
        logits = []
        for a, b in (*([(0, first)] if first else []), (first, first + 150), (first + 150, first + 299), (first + 299, first + 300)):
            trial = target.rows(ids[a:b])
            logits.append(np.array(trial.logits))
            target.commit(trial, b - a)
        found.append((np.concatenate(logits), {name: np.array(v) for name, v in target.lane.state().items()}))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1].keys() == found[1][1].keys()
    for name, kept in found[0][1].items():
        np.testing.assert_array_equal(kept, found[1][1][name])


def test_blocks_cover_all_rows_once():
    for n, size in ((1, 10**12), (7, 10**7), (128, 10**6), (2048, 3 * 10**6), (5, 0)):
        found = list(blocks.row_blocks(n, size))
        assert [a for part in found for a in range(part.start, part.stop)] == list(range(n))
        bound = max(blocks.LEAST_BYTES, n * blocks.ROW_BYTES)
        assert all((part.stop - part.start) * size <= bound or part.stop - part.start == 1 for part in found)


def test_a_pool_of_the_host_grows_in_place_and_keeps_its_rows():
    t = trunk(routes="blas")
    lane = t.new_lane()
    name = next(n for n in lane.specs if n.startswith("pool"))
    width = lane.buffers[name].shape[1]
    rows = np.random.default_rng(0).standard_normal((5000, width)).astype(np.float32)
    for a in range(0, 5000, 40):
        lane.append(name, a, rows[a : a + 40])
    np.testing.assert_array_equal(lane.buffers[name][:5000], rows)
    assert not lane.buffers[name][5000:].any() and len(lane.buffers[name]) % lane.specs[name].block == 0


def test_what_is_read_of_a_lane_that_a_device_writes_into_lies_elsewhere():
    """Else the first look at it on the host would take the buffer away from what is recorded for its memory."""
    t = trunk()
    lane = Lane(t.lane_specs(), t.config.roll_rows, in_place=True)
    name = next(n for n in lane.specs if n.startswith("pool"))
    lane.append(name, 0, mx.random.normal((12, *lane.specs[name].tail), dtype=lane.specs[name].dtype))
    mx.eval(lane.arrays())
    whole = np.array(lane.buffers[name], copy=False)
    for index in (slice(2, 9), np.arange(2, 9)):
        found = lane.rows(name, index)
        mx.eval(found)
        mine = np.array(found, copy=False)
        np.testing.assert_array_equal(mine, whole[2:9])
        assert not np.shares_memory(mine, whole)
    lane.in_place = False
    shared = lane.rows(name, slice(2, 9))
    mx.eval(shared)
    assert np.shares_memory(np.array(shared, copy=False), whole), "or this test would see nothing"
