"""A row's bits do not depend on which rows share its call, on what was tried before it, or on who else uses the engine.

Compared bit for bit on the CPU, in float32 and bfloat16, on the golden pack and on the embedded one.
"""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.nn import compressor, moe
from dsv41chat.engine.nn.attention import Attention
from dsv41chat.engine.rows import Rows
from dsv41chat.engine.target import Target
from dsv41chat.nano import embedded_pack
from tests.v41 import PACK, golden, lane_bits, pieces, random_cuts, run, trunk

CASES = {
    "golden-f32": (PACK, mx.float32, False, "stock"),
    "golden-f32-rounded": (PACK, mx.float32, True, "stock"),
    "golden-bf16-rounded": (PACK, mx.bfloat16, True, "stock"),
    "embedded-f32": (None, mx.float32, True, "stock"),
    "embedded-bf16": (None, mx.bfloat16, True, "stock"),
    "golden-blas": (PACK, mx.float32, False, "blas"),
    "embedded-blas": (None, mx.float32, True, "blas"),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def case(request):
    """(trunk, ids, one-shot logits, one-shot lane)."""
    folder, dtype, cache_quant, routes = request.param
    t = trunk(dtype, cache_quant, folder or embedded_pack(), routes=routes)
    if not t.routes.rows_alike:
        pytest.skip("the BLAS of this machine computes a row of a wide product otherwise than one of a narrow product; the route says so")
    ids = golden()["input_ids"] if folder else np.random.default_rng(5).integers(3, 4000, 150)
    target = Target(t)
    return t, ids, run(t, ids, target=target), lane_bits(target)


@pytest.mark.parametrize("size", [1, 7, 128])
def test_pieces_equal_one_shot(case, size):
    t, ids, want, lane = case
    target = Target(t)
    np.testing.assert_array_equal(run(t, ids, pieces(len(ids), size), target), want)
    assert lane_bits(target) == lane


def test_random_cuts_equal_one_shot(case):
    t, ids, want, lane = case
    for seed in range(2):
        target = Target(t)
        np.testing.assert_array_equal(run(t, ids, random_cuts(len(ids), seed), target), want)
        assert lane_bits(target) == lane


def test_rollback_at_every_row_of_a_round(case):
    """Windows of up to 8 rows with wrong tails: keep 1..8 of them, over and over; the wrong rows never happened."""
    t, ids, want, lane = case
    rng, target, keep = random.Random(3), Target(t), 0
    while target.n < len(ids):
        keep = keep % 8 + 1
        good = [int(i) for i in ids[target.n : target.n + keep]]
        wrong = [rng.randrange(3, 150) for _ in range(8 - len(good))]
        n = target.n
        trial = target.rows(good + wrong)
        np.testing.assert_array_equal(np.array(trial.logits)[: len(good)], want[n : n + len(good)])
        target.commit(trial, len(good))
    assert lane_bits(target) == lane


def test_a_trial_that_is_dropped_never_happened(case):
    t, ids, want, lane = case
    target, cut = Target(t), 60
    run(t, ids[:cut], target=target)
    before = lane_bits(target)
    target.rows([7] * 8)
    target.commit(target._open, 0)
    target.rows([9] * 5)
    target.drop()
    assert lane_bits(target) == before
    np.testing.assert_array_equal(run(t, ids[cut:], target=target), want[cut:])
    assert lane_bits(target) == lane


def test_trim_and_run_again(case):
    t, ids, want, lane = case
    target = Target(t)
    run(t, ids, target=target)
    back = max(len(ids) - 7, target.lane.high - target.lane.roll)
    assert target.lane.truncate(back)
    np.testing.assert_array_equal(run(t, ids[back:], target=target), want[back:])
    assert lane_bits(target) == lane
    assert not target.lane.truncate(target.lane.high - target.lane.roll - 1), "below the trim limit nothing may be cut"
    assert lane_bits(target) == lane


def test_saved_and_loaded_goes_on_alike(case):
    t, ids, want, lane = case
    first, second = Target(t), Target(t)
    run(t, ids[:91], target=first)
    second.lane.load(first.lane.state())
    np.testing.assert_array_equal(run(t, ids[91:], target=second), want[91:])
    assert lane_bits(second) == lane
    assert not second.lane.truncate(90)


def test_interleaved_equals_alone(case):
    t, ids, want, lane = case
    other = np.roll(ids, 11)
    alone = run(t, other)
    rng, sessions = random.Random(8), [(Target(t), ids, want, []), (Target(t), other, alone, [])]
    while any(target.n < len(ids) for target, *_ in sessions):
        target, mine, _, got = rng.choice([s for s in sessions if s[0].n < len(ids)])
        step = min(len(ids) - target.n, rng.choice([1, 2, 5, 31]))
        trial = target.rows(mine[target.n : target.n + step])
        got.append(np.array(trial.logits))
        target.commit(trial, step)
    for _, _, expected, got in sessions:
        np.testing.assert_array_equal(np.concatenate(got), expected)
    assert lane_bits(sessions[0][0]) == lane


def test_long_chunks_are_committed_whole(case):
    t, ids, *_ = case
    target = Target(t)
    trial = target.rows(ids[: target.lane.roll + 1])
    with pytest.raises(ValueError, match="committed whole"):
        target.commit(trial, 3)
    with pytest.raises(ValueError, match="must be committed"):
        target.rows([3])
    target.commit(trial, trial.count)
    assert target.n == target.lane.roll + 1


# faults that must turn the contracts red ----------------------------------------------------------------------------------


def differs(cuts_of=lambda n: pieces(n, 1), cache_quant=False) -> bool:
    """Whether single rows (or other pieces) differ from one shot on the golden pack."""
    t, ids = trunk(cache_quant=cache_quant), golden()["input_ids"][:100]
    return not np.array_equal(run(t, ids, cuts_of(len(ids))), run(t, ids))


def test_fault_window_in_another_order_for_one_row(monkeypatch):
    blocks = Rows.blocks.func

    def planted(self):
        out = blocks(self)
        return [(part, write, slots[:, ::-1], present[:, ::-1]) for part, write, slots, present in out] if self.n == 1 else out

    monkeypatch.setattr(Rows, "blocks", property(planted))
    assert differs()


def test_fault_selection_in_another_order_for_one_row(monkeypatch):
    attend = Attention._attend

    def planted(self, lane, rows, q, kv):
        if rows.n == 1 and rows.picked is not None:
            index, present = rows.picked
            order = mx.argsort(-index, axis=-1)
            rows.picked = mx.take_along_axis(index, order, -1), mx.take_along_axis(present, order, -1)
        return attend(self, lane, rows, q, kv)

    monkeypatch.setattr(Attention, "_attend", planted)
    assert differs()


def test_fault_group_folded_in_another_formula(monkeypatch):
    exact = compressor.pool_groups

    def planted(rows, ratio):
        if rows.shape[0] > ratio:
            return exact(rows, ratio)
        gate, value = rows[:, 1], rows[:, 0]
        top, total, acc = gate[0], mx.ones_like(gate[0]), value[0]
        for g, v in zip(gate[1:], value[1:]):
            new = mx.maximum(top, g)
            keep, add = mx.exp(top - new), mx.exp(g - new)
            top, total, acc = new, total * keep + add, acc * keep + v * add
        return (acc / total)[None]

    monkeypatch.setattr(compressor, "pool_groups", planted)
    assert differs()


def test_fault_experts_summed_in_another_order():
    """Invisible with two picks (a + b = b + a), so the pick count of the golden pack is raised to four."""
    t, ids = trunk(), golden()["input_ids"][:60]
    for layer in t.layers:
        layer.moe.picks = 4
    want = run(t, ids)
    np.testing.assert_array_equal(run(t, ids, pieces(60, 1)), want)
    choose = moe.MoE.choose
    try:
        moe.MoE.choose = lambda self, x, image: tuple(v[:, ::-1] for v in choose(self, x, image)) if x.shape[0] == 1 else choose(self, x, image)
        assert not np.array_equal(run(t, ids, pieces(60, 1)), want)
    finally:
        moe.MoE.choose = choose


def test_fault_a_ring_too_small_for_its_rollback():
    """The ring bound: with one slot less than window + rejected rows, a wrong tail overwrites what a later row still sees."""
    t, ids = trunk(), golden()["input_ids"][:50]
    want = run(t, ids)

    def spoiled(ring: int) -> bool:
        config = type("Small", (type(t.config),), {"ring_rows": property(lambda self: ring), "roll_rows": property(lambda self: 8)})
        t2 = trunk()
        t2.config = config(**t2.config.__dict__)
        target, out = Target(t2), []
        for i in ids:
            target.rows([int(i)] + [11] * 7)
            target.drop()
            trial = target.rows([int(i)])
            out.append(np.array(trial.logits))
            target.commit(trial, 1)
        return not np.array_equal(np.concatenate(out), want)

    window = t.config.sliding_window
    assert not spoiled(window + 8) and spoiled(window + 6)
