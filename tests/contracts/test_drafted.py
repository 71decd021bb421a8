"""Contract C1: drafted decode gives plain decode's tokens, whatever drafts, how deep and how badly.

On a tiny pack of V4.1 with scripted drafters; `test_drafted_v4` has the same of V4, so that both can run at once. `test_drafted_states`
has contract C2, `test_drafted_own` the packs' own drafters.
Prompts of 11 tokens and answers of 26 cross the window (16; 32 in V4), the ring's end, group borders and the change from all entries to
the best ones.
"""

from __future__ import annotations

import pytest

from dsv41chat.engine.draft.guard import GuardedDrafter
from tests import drafting
from tests.drafting import COUNT, PROMPT, SETTINGS, Family, RandomDepth

DEPTHS = [0, 1, 2, 3, 4, 5, "auto"]
# Every setting with one of three seeds, each seed with two settings; with the other seeds it is the same again.
CASES = [
    pytest.param(setting, seed, id=f"{setting}-{seed}", marks=[] if seed == place % 3 else pytest.mark.slow)
    for place, setting in enumerate(SETTINGS)
    for seed in range(3)
]


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family("v41", tmp_path_factory.mktemp("pack"))


@pytest.mark.parametrize("setting, seed", CASES)
def test_drafted_equals_plain(family, setting, seed):
    """Every depth, forced and adaptive, with the first setting, and some of them with each of the others; guesses that are right now and then."""
    plain, place = family.plain(setting, seed), list(SETTINGS).index(setting)
    for depth in DEPTHS if place == 0 else {place, 6 - place, "auto"}:
        run = family.drafted(setting, seed, depth, drafting.random_guesses)
        assert run.text == plain.text, depth
        assert run.target.n == PROMPT + COUNT - 1 and run.target.lane.ids == run.text[:-1]
        if depth == "auto":
            assert run.deepest, "the adaptive policy drafted"
        elif depth:
            assert run.deepest == depth, "proposals were made at the forced depth"
            assert run.accepts and run.rejects, depth


def test_random_depth_every_round(family):
    """Test T1: another depth each round, six seeds."""
    plain = family.plain("warm", 2)
    for seed in range(6):
        run = family.drafted("warm", 2, RandomDepth(5, seed), lambda text, vocab, seed=seed: drafting.random_guesses(text, vocab, seed))
        assert run.text == plain.text and run.accepts and run.rejects


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
