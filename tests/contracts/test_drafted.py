"""Contract C1: drafted decode gives plain decode's tokens, whatever drafts, how deep and how badly. C2: rejected rows never happened.

On tiny packs of both families, scripted drafters and the packs' own (DSpark of both families, MTP). Prompts of 11 tokens and answers
of 26 cross the window (16; 32 in V4), the ring's end, group borders and the change from all entries to the best ones.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.draft.depth import FixedDepth
from dsv41chat.engine.draft.guard import GuardedDrafter
from dsv41chat.engine.draft.load import new_drafter
from dsv41chat.engine.target import Target
from tests import drafting
from tests.drafting import DATA, SETTINGS, RandomDepth, adaptive, decode, settings

PROMPT, COUNT = 11, 26
FAMILIES = {"v41": "v41", "v4": "v4"}
DEPTHS = [0, 1, 2, 3, 4, 5, "auto"]


class Family:
    """A tiny pack without a drafter, and plain decode's runs on it."""

    def __init__(self, name: str, folder, dtype=mx.float32):
        self.folder = drafting.write_with_drafter(DATA / name, folder / name, None)
        self.trunk, _ = drafting.load(self.folder, dtype)
        self.vocab = self.trunk.config.vocab_size
        self.trunk.tap_layers = tuple(range(self.trunk.config.num_hidden_layers))[-3:]
        self.plain = lru_cache(None)(self._plain)
        self.with_states = lru_cache(None)(lambda *key: self._plain(*key, states=True))

    def prompt(self, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(3, self.vocab - 2, PROMPT).tolist()

    def _plain(self, setting: str, seed: int, count: int = COUNT, **options):
        return decode(self.trunk, self.prompt(seed), settings(setting, seed), count, **options)

    def drafted(self, setting: str, seed: int, depth, make, count: int = COUNT, **options):
        """make(text, vocab) -> drafter, from plain decode's own text."""
        text = self.plain(setting, seed, count).text
        depth = adaptive(self.trunk, 5) if depth == "auto" else FixedDepth(depth) if isinstance(depth, int) else depth
        return decode(self.trunk, self.prompt(seed), settings(setting, seed), count, make(text, self.vocab), depth, **options)


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=list(FAMILIES))
def family(request, tmp_path_factory):
    return Family(request.param, tmp_path_factory.mktemp("pack"))


@pytest.mark.parametrize("setting", SETTINGS)
def test_drafted_equals_plain(family, setting):
    """Every depth, forced and adaptive, three seeds; guesses that are right now and then."""
    for seed in range(3):
        plain = family.plain(setting, seed)
        for depth in DEPTHS:
            run = family.drafted(setting, seed, depth, drafting.random_guesses)
            assert run.text == plain.text, (seed, depth)
            assert run.target.n == PROMPT + COUNT - 1 and run.target.lane.ids == run.text[:-1]
            if depth == "auto":
                assert run.deepest, "the adaptive policy drafted"
            elif depth:
                assert run.deepest == depth, "proposals were made at the forced depth"
                assert run.accepts and run.rejects, (seed, depth)


@pytest.mark.parametrize("setting", ["greedy", "penalties"])
def test_state_is_plain_decodes_after_every_round(family, setting):
    """Test T2: lanes bit for bit at every n that a round ends at, and the rows that drafters are given."""
    plain = family.with_states(setting, 1)
    witness = family.drafted(setting, 1, 0, drafting.oracle)
    makers = {
        "oracle": drafting.oracle,
        "wrong": drafting.always_wrong,
        "random": drafting.random_guesses,
        **{f"{a} right": lambda text, vocab, a=a: drafting.prefix_right(text, vocab, a, PROMPT - 1) for a in (1, 2, 3, 4)},
    }
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


def test_random_depth_every_round(family):
    """Test T1: another depth each round, ten seeds."""
    plain = family.plain("warm", 2)
    for seed in range(10):
        run = family.drafted("warm", 2, RandomDepth(5, seed), lambda text, vocab, seed=seed: drafting.random_guesses(text, vocab, seed))
        assert run.text == plain.text and run.accepts and run.rejects


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
    """Test T3: windows of 1 .. 6 rows of which 1 .. all are kept, from every n up to past the ring's end, against one shot."""
    trunk, text = family.trunk, family.plain("warm", 0, 60).text
    target, want = Target(trunk), None
    one = Target(trunk)
    trial = one.rows(text[: one.lane.roll]) if len(text) > one.lane.roll else one.rows(text)
    want = np.array(trial.logits)
    n = 0
    while n < len(want):
        for m in range(6, 0, -1):
            good = text[n : n + 1 + (n % m)]
            trial = target.rows((good + [7, 11, 13, 17, 19, 23])[:m])
            rows = np.array(trial.logits)
            for i in range(min(len(good), m, len(want) - n)):
                np.testing.assert_array_equal(rows[i], want[n + i], err_msg=f"n {n}, {m} rows, row {i}")
            target.drop()
        target.commit(target.rows(text[n : n + 1]), 1)
        n += 1


def test_confidences_never_move_a_token(family):
    plain = family.plain("greedy", 0)
    for lie in (9.0, -9.0, 0.0):
        make = lambda text, vocab, lie=lie: drafting.ScriptedDrafter(text, lambda position, true: (true + 1) % vocab, lambda j: lie)
        assert family.drafted("greedy", 0, "auto", make).text == plain.text


def test_a_drafter_that_raises_is_turned_off(family, caplog):
    class Raising(drafting.ScriptedDrafter):
        def propose(self, pending, n, want, sampling):
            if n > PROMPT + 6:
                raise RuntimeError("out of luck")
            return super().propose(pending, n, want, sampling)

    plain = family.plain("warm", 1)
    run = family.drafted("warm", 1, 3, lambda text, vocab: GuardedDrafter(Raising(text, lambda position, true: true)))
    assert run.text == plain.text and run.accepts
    assert [r.message for r in caplog.records] == ["drafting is off for this conversation: RuntimeError: out of luck"]
    assert run.drafter.block == 0 and "out of luck" in run.drafter.fault


# the packs' own drafters --------------------------------------------------------------------------------------------------

# source pack, kind, stages, block
KINDS = {
    "v41-dspark": ("v41", "dspark", 3, 5),
    "v41-two-stages": ("v41", "dspark", 2, 5),
    "v4-dspark": ("v4", "dspark", 3, 5),
    "v4-mtp": ("v4", "mtp", 1, 3),
}


class Own(Family):
    """The same pack with a drafter that has been taught what follows what in plain decode's own answers."""

    def __init__(self, kind: str, folder):
        source, drafter, stages, self.block = KINDS[kind]
        super().__init__(source, folder / "base")
        texts = [self.plain(setting, seed).text for setting in ("greedy", "warm", "penalties") for seed in range(2)]
        own = drafting.write_with_drafter(DATA / source, folder / "own", drafter, drafting.succession(texts), stages)
        self.trunk, self.model = drafting.load(own)
        self.stages = stages

    def own(self, setting: str, seed: int, depth, **options):
        return self.drafted(setting, seed, depth, lambda text, vocab: new_drafter(self.model), **options)


@pytest.fixture(scope="module", params=KINDS)
def own(request, tmp_path_factory):
    return Own(request.param, tmp_path_factory.mktemp("own"))


def test_own_drafter_equals_plain(own):
    for setting, seed in (("greedy", 0), ("warm", 1), ("penalties", 0)):
        plain = own.plain(setting, seed)
        for depth in [1, 3, 5, "auto"]:
            run = own.own(setting, seed, depth)
            assert run.text == plain.text, (setting, seed, depth)
            if depth == "auto":
                assert run.deepest
            else:
                assert run.deepest == min(own.block, depth)
                assert run.accepts and run.rejects, (setting, seed, depth)


def test_own_drafters_state_does_not_depend_on_the_depth(own):
    """Test T2 for the drafter's lanes: the rings after a drafted answer are those of one that verified nothing."""
    states = []
    for depth in (0, 1, 5):
        run = own.own("warm", 0, depth)
        states.append({k: np.array(v) for k, v in run.drafter.state().items()})
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        for name, want in states[0].items():
            np.testing.assert_array_equal(other[name], want, err_msg=name)


def test_saved_after_any_round_and_loaded(own):
    """Test T7: lane and drafter from a stored state go on as if nothing had happened, acceptance included."""
    plain, whole = own.plain("greedy", 0), own.own("greedy", 0, 3)
    done = 0
    for i, r in enumerate(whole.rounds[:-1]):
        done += len(r.emitted)
        if i % 4:
            continue
        half = decode(own.trunk, own.prompt(0), settings("greedy"), done, new_drafter(own.model), FixedDepth(3))
        if half.rounds != whole.rounds[: i + 1]:
            continue  # the last round of the first half was cut shorter than the whole one's
        target, drafter = Target(own.trunk), new_drafter(own.model)
        target.lane.load(half.target.lane.state())
        drafter.load(half.drafter.state(), target.n)
        rest = decode(own.trunk, half.text, settings("greedy"), COUNT - done, drafter, FixedDepth(3), target=target)
        assert rest.text == plain.text and rest.rounds == whole.rounds[i + 1 :]
        blind = new_drafter(own.model)
        blind.load({}, target.n)
        assert blind.propose(plain.text[target.n] if target.n < len(plain.text) else 3, target.n, 1, settings("greedy")) is not None


def test_bfloat16(tmp_path):
    family = Family("v41", tmp_path, mx.bfloat16)
    plain = family.with_states("warm", 0)
    run = family.drafted("warm", 0, 5, drafting.random_guesses, states=True)
    assert run.text == plain.text and run.states == {n: plain.states[n] for n in run.states} and run.accepts and run.rejects
