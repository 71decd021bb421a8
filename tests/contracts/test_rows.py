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
from tests.drafting import write_with_drafter
from tests.v41 import PACK, golden, lane_bits, pieces, random_cuts, run, trunk

# Packs: golden; short, the same with few Sinkhorn passes, which are most of its time and mix no rows; embedded.
CASES = {
    "golden-f32": ("golden", mx.float32, False, "stock"),
    "golden-f32-rounded": ("short", mx.float32, True, "stock"),
    "golden-bf16-rounded": ("short", mx.bfloat16, True, "stock"),
    "embedded-f32": ("embedded", mx.float32, True, "stock"),
    "embedded-bf16": ("embedded", mx.bfloat16, True, "stock"),
    "golden-blas": ("golden", mx.float32, False, "blas"),
    "embedded-blas": ("embedded", mx.float32, True, "blas"),
}


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return write_with_drafter(PACK, tmp_path_factory.mktemp("pack") / "short", None)


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def case(request, short):
    """(trunk, ids, one-shot logits, one-shot lane)."""
    pack, dtype, cache_quant, routes = request.param
    t = trunk(dtype, cache_quant, {"golden": PACK, "short": short, "embedded": embedded_pack()}[pack], routes=routes)
    if not t.routes.rows_alike:
        pytest.skip("the BLAS of this machine computes a row of a wide product otherwise than one of a narrow product; the route says so")
    # Eight more than the embedded pack's ring has and its selection takes, and than a piece of 128.
    ids = np.random.default_rng(5).integers(3, 4000, 136) if pack == "embedded" else golden()["input_ids"][:136]
    target = Target(t)
    return t, ids, run(t, ids, target=target), lane_bits(target)


def large(t) -> bool:
    """Whether it is the embedded pack, of whose thousand operations a row few rows are run."""
    return t.config.vocab_size > 1000


def singles(n: int, large: bool) -> list[int]:
    """Row by row from the start, past the golden pack's ring and its first selections, and to the end, past those of the embedded pack."""
    return [*range(9 if large else 37), *range(n - (16 if large else 30), n + 1)]


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param(singles, id="1"),
        pytest.param(lambda n, large: pieces(n, 7), id="7"),
        pytest.param(lambda n, large: pieces(n, 128), id="128", marks=pytest.mark.slow),
    ],
)
def test_pieces_equal_one_shot(case, cuts):
    t, ids, want, lane = case
    target = Target(t)
    np.testing.assert_array_equal(run(t, ids, cuts(len(ids), large(t)), target), want)
    assert lane_bits(target) == lane


def test_random_cuts_equal_one_shot(case):
    t, ids, want, lane = case
    for seed in range(1 if large(t) else 2):
        target = Target(t)
        np.testing.assert_array_equal(run(t, ids, random_cuts(len(ids), seed), target), want)
        assert lane_bits(target) == lane


def test_rollback_at_every_row_of_a_round(case):
    """Windows of up to 8 rows with wrong tails: keep 1..8 of them, over and over; the wrong rows never happened."""
    t, ids, want, lane = case
    rng, target, keep = random.Random(3), Target(t), 0
    if large(t):  # across the ring's end
        run(t, ids[:100], target=target)
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
    t, ids, *_ = case
    rng, sessions = random.Random(8), []
    for mine in (ids[:80], np.roll(ids, 11)[:80]):
        alone = Target(t)
        sessions.append((Target(t), mine, run(t, mine, target=alone), lane_bits(alone), []))
    while left := [s for s in sessions if s[0].n < 80]:
        target, mine, _, _, got = rng.choice(left)
        step = min(80 - target.n, rng.choice([1, 2, 5, 31]))
        trial = target.rows(mine[target.n : target.n + step])
        got.append(np.array(trial.logits))
        target.commit(trial, step)
    for target, _, expected, lane, got in sessions:
        np.testing.assert_array_equal(np.concatenate(got), expected)
        assert lane_bits(target) == lane


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


def first_difference(t, ids, feed=lambda target, i: None) -> int | None:
    """The first of these rows that is another one by itself than in one shot; feed is called before each with what comes next."""
    target, want = Target(t), run(t, ids)
    for n, i in enumerate(ids):
        feed(target, i)
        trial = target.rows([int(i)])
        if not np.array_equal(np.array(trial.logits)[0], want[n]):
            return n
        target.commit(trial, 1)
    return None


def differs() -> bool:
    """Whether single rows differ from one shot on the golden pack."""
    return first_difference(trunk(), golden()["input_ids"][:100]) is not None


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


def test_fault_experts_summed_in_another_order(monkeypatch):
    """Invisible with two picks (a + b = b + a), so the pick count of the golden pack is raised to four."""
    t, ids = trunk(), golden()["input_ids"][:60]
    for layer in t.layers:
        layer.moe.picks = 4
    assert first_difference(t, ids) is None
    choose = moe.MoE.choose
    swapped = lambda self, x, image: tuple(v[:, ::-1] for v in choose(self, x, image)) if x.shape[0] == 1 else choose(self, x, image)
    monkeypatch.setattr(moe.MoE, "choose", swapped)
    assert first_difference(t, ids) is not None


def test_fault_a_ring_too_small_for_its_rollback(short):
    """The ring bound: with one slot less than window + rejected rows, a wrong tail overwrites what a later row still sees."""

    def wrong_tail(target, i):
        target.rows([int(i)] + [11] * 7)
        target.drop()

    def spoiled(ring: int) -> bool:
        t = trunk(folder=short)
        plain = type(t.config)
        config = type("Small", (plain,), {"ring_rows": property(lambda self: ring), "roll_rows": property(lambda self: 8)})
        t.config = config(**t.config.__dict__)
        return first_difference(t, golden()["input_ids"][:50], wrong_tail) is not None

    window = trunk(folder=short).config.sliding_window
    assert not spoiled(window + 8) and spoiled(window + 6)
