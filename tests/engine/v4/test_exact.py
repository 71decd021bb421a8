"""A row's bits do not depend on how rows came: every way to feed a sequence gives the logits and the state of one call.

Float32 and bfloat16, on the CPU. The tiny trunk crosses every border within a hundred rows; the golden trunk has the real kinds.
"""

from __future__ import annotations

import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.engine.target import Target
from tests.engine.v4 import golden as g
from tests.engine.v4 import tiny

LENGTH = 100
# Of the 1 .. 16 rows that a round can leave: one, around a group of 4, around one of 12, all.
FEW = (1, 3, 4, 11, 16)


def sequence(trunk, length=LENGTH, seed=1) -> list[int]:
    return np.random.default_rng(seed).integers(0, trunk.config.vocab_size, length).tolist()


def speculate(trunk, ids, rng, start, seen=lambda t: None):
    """Windows of 2..8 rows of which a random number of leading ones is right; the others are garbage and dropped."""
    out, target = g.feed(trunk, ids, [start])
    out = [out]
    while target.n < len(ids):
        n, m = target.n, rng.randint(2, 8)
        keep = min(rng.randint(1, m), len(ids) - n)
        trial = target.rows(ids[n : n + keep] + [rng.randrange(trunk.config.vocab_size) for _ in range(m - keep)])
        out.append(np.array(trial.logits)[:keep])
        target.commit(trial, keep)
        seen(target)
    return np.concatenate(out), target


@pytest.fixture(scope="module")
def truth(tiny_trunk):
    """(ids, logits of one call, state of a fresh one-call prefill at every border)."""
    ids = sequence(tiny_trunk)
    logits, _ = g.feed(tiny_trunk, ids, [len(ids)])
    states = {p: g.state_of(g.feed(tiny_trunk, ids[:p], [p])[1].lane) for p in g.borders(tiny_trunk, len(ids))}
    return ids, logits, states


def check_states(states, bad):
    def check(target):
        if target.n in states:
            bad.extend((target.n, name) for name in g.differing(g.state_of(target.lane), states[target.n]))

    return check


CUTS = {
    "one by one": g.even(LENGTH, 1),
    "chunks of 7": g.even(LENGTH, 7),
    "chunks of 64": g.even(LENGTH, 64),
    **{f"windows of {m}": g.even(LENGTH, m) for m in (2, 5, 8)},
    **{f"random cuts to {m}": g.random_cuts(LENGTH, random.Random(m), m) for m in (9, 40, 90)},
}


@pytest.mark.parametrize("way", CUTS)
def test_any_cuts_equal_one_call(tiny_trunk, truth, way):
    ids, logits, states = truth
    bad = []
    out, _ = g.feed(tiny_trunk, ids, CUTS[way], seen=check_states(states, bad))
    assert g.same_bits(out, logits) and not bad


@pytest.mark.parametrize("seed", range(3))
def test_rejected_rows_leave_nothing(tiny_trunk, truth, seed):
    ids, logits, states = truth
    bad = []
    out, _ = speculate(tiny_trunk, ids, random.Random(seed), 1 + 17 * seed, check_states(states, bad))
    assert g.same_bits(out, logits) and not bad


def check_trims(trunk, ids, logits, spots, counts=range(1, 17)):
    """At each spot: commit so many rows of garbage, trim them, compare the state and the next three rows."""
    rng, target, wrong = random.Random(9), Target(trunk), []
    for p in spots:
        if p > target.n:
            g.feed(trunk, ids, [p - target.n], target)
        before = g.state_of(target.lane)
        for garbage in (count for count in counts if count <= target.lane.roll):
            trial = target.rows([rng.randrange(trunk.config.vocab_size) for _ in range(garbage)])
            target.commit(trial, garbage)
            assert target.lane.truncate(p)
            after = np.array(target.rows(ids[p : p + 3]).logits)
            target.drop()
            if g.differing(g.state_of(target.lane), before) or not g.same_bits(after, logits[p : p + 3]):
                wrong.append((p, garbage))
    assert not wrong


def test_trims_of_1_to_16_rows_at_every_border(tiny_trunk, truth):
    """Ends of both kinds of groups, the window, the ring's wrap, the dense-to-sparse crossing (entry 6 of 6, token 24)."""
    ids, logits, states = truth
    spots = (3, 11, 12, 16, 23, 24, 25, 28, 32, 36, 49)
    assert set(spots) <= set(states)
    check_trims(tiny_trunk, ids, logits, spots, range(1, 17) if tiny_trunk.dtype == mx.float32 else FEW)


def test_deep_trims_and_their_limit(tiny_trunk, truth):
    """Down to the limit is exact; one further is refused and changes nothing; a trim does not lower the high mark."""
    ids, logits, states = truth
    roll = tiny_trunk.config.roll_rows
    for top in (35, LENGTH):
        for step in (1, 5, roll):
            _, target = g.feed(tiny_trunk, ids, g.even(top, 31))
            low = top - roll
            while target.n > low:
                assert target.lane.truncate(max(low, target.n - step))
            before = g.state_of(target.lane)
            assert not target.lane.truncate(low - 1) and not target.lane.truncate(target.n + 1)
            assert target.n == low and not g.differing(before, g.state_of(target.lane))
            fresh = states[low] if low in states else g.state_of(g.feed(tiny_trunk, ids[:low], [low])[1].lane)
            assert not g.differing(before, fresh)
            out, _ = g.feed(tiny_trunk, ids, g.even(LENGTH - low, 3), target)
            assert g.same_bits(out, logits[low:])


def test_a_chunk_longer_than_the_rollback_is_committed_whole(tiny_trunk, truth):
    ids, logits, _ = truth
    roll = tiny_trunk.config.roll_rows
    _, target = g.feed(tiny_trunk, ids, [40])
    trial = target.rows(ids[40 : 40 + roll + 2])
    with pytest.raises(ValueError, match="whole"):
        target.commit(trial, 1)
    with pytest.raises(ValueError, match="committed before"):
        target.rows(ids[40:41])
    target.commit(trial, trial.count)
    assert g.same_bits(np.array(target.rows(ids[58:60]).logits), logits[58:60])


def test_two_sessions_interleaved(tiny_trunk, truth):
    ids, logits, _ = truth
    other = sequence(tiny_trunk, seed=2)
    alone, _ = g.feed(tiny_trunk, other, [LENGTH])
    rng, targets, out = random.Random(2), (Target(tiny_trunk), Target(tiny_trunk)), ([], [])
    while any(t.n < LENGTH for t in targets):
        i = rng.randrange(2)
        target, text = targets[i], (ids, other)[i]
        if target.n == LENGTH:
            continue
        trial = target.rows(text[target.n : target.n + rng.choice((1, 2, 3, 8, 30))])
        keep = trial.count if trial.count > target.lane.roll else rng.randint(1, trial.count)
        out[i].append(np.array(trial.logits)[:keep])
        target.commit(trial, keep)
    assert g.same_bits(np.concatenate(out[0]), logits) and g.same_bits(np.concatenate(out[1]), alone)


@pytest.mark.parametrize("n", [3, 12, 23, 31, 47, 48, 71])
def test_saved_and_loaded(tiny_trunk, truth, n):
    """`state` is minimal and complete: a fresh lane goes on bit for bit, and cannot trim below what it was given."""
    ids, logits, _ = truth
    _, target = g.feed(tiny_trunk, ids, g.even(n, 5))
    state = target.lane.state()
    resumed = Target(tiny_trunk)
    resumed.lane.load(state)
    assert not g.differing(g.state_of(resumed.lane), g.state_of(target.lane))
    assert not resumed.lane.truncate(n - 1)
    out, _ = g.feed(tiny_trunk, ids, g.even(LENGTH - n, 5), resumed)
    assert g.same_bits(out, logits[n:])


def test_rows_do_not_see_the_future(tiny_trunk, truth):
    """Changing later tokens changes no earlier logits, in one call, with far more entries than the indexer picks."""
    ids, logits, _ = truth
    for n in (5, 26, 51, 90):
        other = ids[:n] + [(i * 7 + 1) % tiny_trunk.config.vocab_size for i in ids[n:]]
        out, _ = g.feed(tiny_trunk, other, [LENGTH])
        assert g.same_bits(out[:n], logits[:n])
        assert not g.same_bits(out[n : n + 1], logits[n : n + 1])


def test_simulated_rounding_is_exact_too(tiny_pack):
    trunk = build_trunk(tiny_pack, dtype=mx.bfloat16, qat_sim=True)
    ids = sequence(trunk)
    logits, _ = g.feed(trunk, ids, [LENGTH])
    for cuts in (CUTS["one by one"], CUTS["chunks of 7"], CUTS["random cuts to 40"]):
        assert g.same_bits(g.feed(trunk, ids, cuts)[0], logits)
    assert g.same_bits(speculate(trunk, ids, random.Random(4), 10)[0], logits)
    plain, _ = g.feed(build_trunk(tiny_pack, dtype=mx.bfloat16), ids, [LENGTH])
    assert not g.same_bits(plain, logits)


@pytest.mark.parametrize("heavy, length", [(5, 60), (33, 100), (300, 640)])
def test_any_heavy_ratio(tmp_path, heavy, length):
    """Groups shorter than the rollback and longer than any ring of the window; the last rows attend to every finished group."""
    tiny.write_pack(tmp_path, {"compress_ratios": [heavy, 0, heavy, 4]})
    trunk = build_trunk(open_pack(tmp_path), dtype=mx.float32)
    ids = sequence(trunk, length)
    logits, whole = g.feed(trunk, ids, [length])
    for cuts in (g.even(length, 41), [length - 45, *g.even(45, 1)]):
        out, target = g.feed(trunk, ids, cuts)
        assert g.same_bits(out, logits) and not g.differing(g.state_of(target.lane), g.state_of(whole.lane))
    assert len(whole.lane.state()["pool.2"]) == length // heavy
    check_trims(trunk, ids, logits, (2 * heavy - 1, 2 * heavy), FEW)
    whole.lane.buffers["pool.2"] = whole.lane.buffers["pool.2"] * 3
    low = length - 8
    assert whole.lane.truncate(low)
    assert not g.same_bits(np.array(whole.rows(ids[low:]).logits), logits[low:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_golden_trunk(pack, ids, dtype):
    """The golden's own shapes across the borders of ratio 4, ratio 128 and the dense-to-sparse crossing (token 64)."""
    trunk = build_trunk(replace(pack, config=replace(pack.config, hc_sinkhorn_iters=1)), dtype=getattr(mx, dtype))
    logits, whole = g.feed(trunk, ids, [len(ids)])
    for cuts in (g.even(len(ids), 128), g.even(len(ids), 37), [120] + [1] * 20 + [100] + [1] * 20 + [132]):
        out, target = g.feed(trunk, ids, cuts)
        assert g.same_bits(out, logits) and not g.differing(g.state_of(target.lane), g.state_of(whole.lane))
    check_trims(trunk, ids, logits, (64, 127, 128, 131, 256) if dtype == "float32" else (65, 128), FEW)
