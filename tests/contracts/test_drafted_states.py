"""Contract C2: rejected rows never happened. After any round the state is plain decode's, bit for bit, whatever was tried beyond it."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.target import Target
from tests import drafting
from tests.drafting import PROMPT, Family


@pytest.mark.parametrize("setting", ["greedy", "penalties"])
def test_state_is_plain_decodes_after_every_round(family, setting):
    """Test T2: lanes bit for bit at every n that a round ends at, and the rows that drafters are given."""
    plain = family.with_states(setting, 1)
    witness = family.drafted(setting, 1, 0, drafting.oracle)
    makers = {
        "oracle": drafting.oracle,
        "wrong": drafting.always_wrong,
        "random": drafting.random_guesses,
    }
    if setting == "greedy":
        makers |= {f"{a} right": lambda text, vocab, a=a: drafting.prefix_right(text, vocab, a, PROMPT - 1) for a in (1, 2, 3, 4)}
    for name, make in makers.items():
        run = family.drafted(setting, 1, 5, make, states=True)
        assert run.text == plain.text
        assert run.states == {n: plain.states[n] for n in run.states}, name
        assert run.drafter.rows == witness.drafter.rows, name
        if name == "oracle":
            assert run.accepts and not run.rejects and max(r.accepted for r in run.rounds) == 5
        elif name == "wrong":
            assert run.rejects and not run.accepts
        elif name.endswith("right"):
            whole = [r for r in run.rounds if r.proposed == 5]
            assert whole and all(r.accepted == int(name[0]) for r in whole)


def test_rows_of_a_window_are_rows_alone(family):
    """Test T4: logits and taps of windows of 2 .. 8 rows against single steps, bit for bit."""
    trunk, text = family.trunk, family.plain("warm", 0).text
    alone, target = [], Target(trunk)
    for token in text:
        trial = target.rows([token], want_taps=True)
        alone.append((np.array(trial.logits[0]), np.array(trial.taps[0])))
        target.commit(trial, 1)
    for m in range(2, 9):
        target = Target(trunk)
        for a in range(0, len(text), m):
            trial = target.rows(text[a : a + m], want_taps=True)
            for i in range(trial.count):
                np.testing.assert_array_equal(np.array(trial.logits[i]), alone[a + i][0])
                np.testing.assert_array_equal(np.array(trial.taps[i]), alone[a + i][1])
            target.commit(trial, trial.count)


def test_every_rollback_across_every_border(family):
    """Test T3: windows of 1 .. 6 rows of which 1 .. all are kept, three from every n up to past the ring's end, against one shot."""
    trunk, text = family.trunk, family.plain("warm", 0, 60).text
    target, want = Target(trunk), None
    one = Target(trunk)
    trial = one.rows(text[: one.lane.roll]) if len(text) > one.lane.roll else one.rows(text)
    want = np.array(trial.logits)
    n, rng = 0, random.Random(3)
    while n < len(want):
        for m in rng.sample(range(1, 7), 3):
            good = text[n : n + 1 + (n % m)]
            trial = target.rows((good + [7, 11, 13, 17, 19, 23])[:m])
            rows = np.array(trial.logits)
            for i in range(min(len(good), m, len(want) - n)):
                np.testing.assert_array_equal(rows[i], want[n + i], err_msg=f"n {n}, {m} rows, row {i}")
            target.drop()
        target.commit(target.rows(text[n : n + 1]), 1)
        n += 1


def test_bfloat16(tmp_path):
    family = Family("v41", tmp_path, mx.bfloat16)
    plain = family.with_states("warm", 0)
    run = family.drafted("warm", 0, 5, drafting.random_guesses, states=True)
    assert run.text == plain.text and run.states == {n: plain.states[n] for n in run.states} and run.accepts and run.rejects
