"""Lanes alone: where rows lie in rings, and what a reset leaves."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.bench import ops
from dsv41chat.engine.lane import Lane, PoolSpec, RingSpec
from dsv41chat.engine.target import Target
from tests.engine.kernels.test_gpu_route import nano, tiny_v4, tokens

SIZE, ROLL = 16, 8
SPECS = (RingSpec("ring", SIZE, (3,), mx.float32, window=8), PoolSpec("pool", 2, (3,), mx.float32, 4))


def rows(first: int, count: int, host: bool) -> mx.array | np.ndarray:
    """Row p of all: p, p + 1000, p + 2000."""
    made = (first + np.arange(count, dtype=np.float32))[:, None] + np.array([0, 1000, 2000], np.float32)
    return made if host else mx.array(made)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("count", [1, 7, 15, 16, 17, 33])
def test_a_ring_holds_the_last_rows_wherever_they_begin(host, count):
    for first in range(SIZE + 3):
        lane = Lane(SPECS, ROLL, host=host)
        held = lane.hold_rings()
        version = lane.version
        if first:
            lane.keep("ring", 0, rows(0, first, host))
        lane.keep("ring", first, rows(first, count, host))
        assert lane.version > version
        last = first + count
        for back in {min(n, last) for n in (0, 1, 5, SIZE)}:
            found = [np.array(part) for part in lane.before("ring", last, back)]
            want = rows(last - back, back, True)
            np.testing.assert_array_equal(np.concatenate(found) if found else want[:0], want)
        for p in range(max(0, last - SIZE), last):
            np.testing.assert_array_equal(np.array(lane.buffers["ring"])[p % SIZE], rows(p, 1, True)[0])
        assert not np.array(held["ring"]).any(), "what was held is another array"


def test_a_ring_does_not_hold_on_to_the_rows_of_a_prompt():
    lane, prompt = Lane(SPECS, ROLL), rows(0, 100 * SIZE, False)
    lane.keep("ring", 0, prompt)
    mx.eval(lane.arrays(), prompt)
    inside = lambda a: np.array(a, copy=False).ctypes.data
    assert not inside(prompt) <= inside(lane.buffers["ring"]) < inside(prompt) + prompt.nbytes


def test_a_reset_leaves_what_is_small_where_a_device_writes():
    lane = Lane(SPECS, ROLL, in_place=True)
    ring, pool, version = lane.buffers["ring"], lane.buffers["pool"], lane.version
    lane.n, lane.ids = 6, [1] * 6
    lane.reset()
    assert lane.buffers["ring"] is ring and lane.buffers["pool"] is pool and lane.version == version and lane.n == 0 and lane.ids == []
    lane.reserve(10)
    pool = lane.buffers["pool"]
    lane.reset()
    assert lane.buffers["pool"] is pool and pool.shape == (2048, 3), "room for the first 4,096 tokens"
    lane.append("pool", 0, rows(0, 2049, False))
    version = lane.version
    lane.reset()
    assert lane.buffers["ring"] is ring and lane.buffers["pool"].shape == (4, 3) and lane.version > version
    lane.reset(lost=True)
    assert lane.buffers["ring"] is not ring and not np.array(lane.buffers["ring"]).any()


@pytest.mark.parametrize("host", [False, True])
def test_a_reset_clears_what_others_look_at(host):
    lane = Lane(SPECS, ROLL, host=host)
    lane.keep("ring", 0, rows(1, SIZE, host))
    lane.append("pool", 0, rows(1, 4, host))
    lane.reset()
    assert not any(np.array(a).any() for a in lane.buffers.values())


def test_buffers_that_a_device_lost_are_made_anew(monkeypatch):
    trunk = nano()
    target, want = Target(trunk), Target(trunk).rows([5, 6, 7])
    target.commit(target.rows([9, 8]), 2)
    ring = target.lane.buffers["window.0"]
    evaluate = mx.eval

    def fails(*arrays):
        monkeypatch.setattr(mx, "eval", evaluate)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(mx, "eval", fails)
    with pytest.raises(RuntimeError, match="gone"):
        target.rows([1, 2, 3])
    assert target.n == 0 and target.lane.buffers["window.0"] is not ring
    np.testing.assert_array_equal(np.array(target.rows([5, 6, 7]).logits), np.array(want.logits))


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_a_device_has_work_while_the_first_layers_are_built(family, tmp_path, monkeypatch):
    """In a long call; in one of few rows every second layer is set running, as later ones are in a long call. No bit depends on it."""
    trunk, ids = nano() if family == "v41" else tiny_v4(tmp_path), list(tokens(96, 12))
    layers, begin, found, built = len(trunk.layers), mx.async_eval, [], []
    inner = type(trunk)._layer

    def layer(self, part, *args):
        built.append(part)
        return inner(self, part, *args)

    monkeypatch.setattr(type(trunk), "_layer", layer)
    for ahead, at_once, count, want in ((0, 4, 12, []), (2, 0, 12, [2]), (2, 4, 12, [1, 1, 2, 3]), (2, 1, 12, [1, 1, 2]), (2, 4, 5, [2])):
        trunk.routes = replace(trunk.routes, ahead=ahead, at_once=at_once)
        target, seen = Target(trunk), []
        built.clear()
        with monkeypatch.context() as patch:
            patch.setattr(mx, "async_eval", lambda arrays, seen=seen: seen.append(len(built)) or begin(arrays))
            target.commit(target.rows(ids[:count]), count)
        assert layers == 3 and seen == want
        found.append(np.array(target.rows([7]).logits))
    for got in found[1:-1]:
        np.testing.assert_array_equal(got, found[0])


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_a_chunk_without_logits_ends_with_its_rows_in_the_lane(family, tmp_path, monkeypatch):
    """Neither at its end nor while it is built is anything asked for that only the last layer's experts make."""
    trunk, ids = nano() if family == "v41" else tiny_v4(tmp_path), list(tokens(96, 12))
    layers, evaluate, found = len(trunk.layers), mx.eval, []
    trunk.routes = replace(trunk.routes, ahead=1)
    for wanted, streams, count in ((0, True, layers), (None, False, layers - 1)):
        target, asked = Target(trunk), []
        with monkeypatch.context() as patch:
            patch.setattr(mx, "async_eval", lambda arrays, asked=asked: asked.extend(arrays))
            patch.setattr(mx, "eval", lambda *parts, asked=asked: asked.extend(a for part in parts for a in part))
            trial = target.rows(ids, logits_from=wanted)
        assert (trial.streams is not None) == streams and not trial.done
        kinds = ops.primitives(asked)
        assert kinds["GatherQMM"] + kinds["GatherMM"] == 3 * count
        evaluate(asked)
        target.commit(trial, len(ids))
        found.append(np.array(target.rows([7]).logits))
    np.testing.assert_array_equal(*found)
