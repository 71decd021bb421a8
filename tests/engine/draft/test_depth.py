"""The depth policy on simulated machines (test T11): its speeds, what it can lose at most, and that parking is not for ever."""

from __future__ import annotations

import pytest

from dsv41chat.engine.draft.base import Proposal
from dsv41chat.engine.draft.costs import DraftCosts, prior_costs
from dsv41chat.engine.draft.depth import DepthPolicy, FixedDepth, RoundTimes
from tests.engine.draft.simulate import BLOCK, MACHINES, TEXTS, mean, run

# Speed over plain decode by machine; columns as TEXTS. Source: spec drafting, section 6.3.
TABLE = {
    "launch-bound": (3.76, 2.99, 1.83, 0.994),
    "mtp-like": (3.25, 2.62, 1.68, 0.985),
    "linear": (1.41, 1.27, 1.03, 0.985),
    "fixed": (1.56, 1.28, 0.984, 0.985),
    "streamed": (1.006, 0.985, 0.985, 0.984),
}


@pytest.mark.parametrize("machine", ["launch-bound", "streamed", *(pytest.param(m, marks=pytest.mark.slow) for m in ("mtp-like", "linear", "fixed"))])
def test_speeds_and_the_worst_case_of_long_answers(machine: str):
    for kind, want in zip(TEXTS, TABLE[machine]):
        # By itself a mean of 24 seeds has a standard error of up to 0.012; texts that are nearly always alike (in their guesses) need fewer.
        count = 24 if kind in ("code", "prose") else 12
        speeds = [run(machine, [(kind, 1500)], seed)[0] for seed in range(count)]
        assert sum(speeds) / count == pytest.approx(want, abs=0.03), kind
        assert min(speeds) >= 0.98, kind


@pytest.mark.parametrize("machine", MACHINES)
def test_short_answers_lose_little(machine: str):
    assert min(run(machine, [(kind, 60)], seed, confidence=c)[0] for kind in TEXTS for seed in range(8) for c in (True, False)) >= 0.94


@pytest.mark.parametrize("machine", MACHINES)
def test_mixed_text_is_not_slower_than_any_fixed_depth(machine: str):
    text = [(kind, 300) for kind in ("code", "junk", "code", "prose", "code")]
    assert mean(machine, text, 4) >= max(mean(machine, text, 4, fixed=k) for k in range(1, BLOCK + 1))


@pytest.mark.parametrize(("machine", "within"), [("launch-bound", 60), ("mtp-like", 60), ("linear", 222), ("fixed", 387)])
def test_drafting_resumes_when_junk_turns_into_code(machine: str, within: int):
    for seed in range(6):
        _, modes = run(machine, [("junk", 300), ("code", 600)], seed)
        assert any(mode == "shadow" for at, mode in modes if at < 300)
        assert next(at for at, mode in modes if at >= 300 and mode == "draft") - 300 <= within


def test_costs_misstated_by_a_third_are_found_out():
    for machine in MACHINES:
        for kind, want in zip(TEXTS, TABLE[machine]):
            assert mean(machine, [(kind, 1500)], 2, misstated=1.3) >= want - 0.16


@pytest.mark.parametrize(("machine", "kind"), [("launch-bound", "agent"), ("launch-bound", "code"), ("mtp-like", "agent"), ("fixed", "agent")])
def test_a_busy_machines_clock_does_not_talk_drafting_down(machine: str, kind: str):
    assert mean(machine, [(kind, 600)], busy=True) >= 0.85 * mean(machine, [(kind, 600)])


def test_confidences_that_lie_cost_no_more_than_the_budget():
    """A head that is sure of everything: the calibration brings it to the observed rates."""
    policy = DepthPolicy(BLOCK, DraftCosts([0.1 + 0.01 * m for m in range(BLOCK + 1)], 0.01, [3] * (BLOCK + 1)))
    lie = Proposal(tuple(range(BLOCK)), (9.0,) * BLOCK)
    for _ in range(60):
        ask = policy.ask(BLOCK)
        proposal = lie if ask else Proposal(())
        kept = policy.keep(proposal, BLOCK) if ask else 0
        seconds = policy.costs.rows[kept]
        policy.learn(proposal, kept, [-1], RoundTimes(0.01 if ask else 0.0, seconds, seconds + (0.01 if ask else 0.0)))
    assert policy.parked and policy.loss <= 0.015 * policy.total + 3 * policy.costs.rows[0]


def test_nothing_is_drafted_before_one_row_has_been_timed_and_never_past_the_limit():
    rows, draft = prior_costs(BLOCK, 256, 6)
    assert rows[0] == pytest.approx(1) and all(a < b for a, b in zip(rows, rows[1:]))
    policy = DepthPolicy(BLOCK, DraftCosts(rows, draft / 2))
    plain = Proposal(())
    for seconds in (0.5, 0.1):
        assert policy.ask(BLOCK) == 0
        policy.learn(plain, 0, [1], RoundTimes(0.0, seconds, seconds))
    assert policy.costs.rows[0] == pytest.approx(0.1) and policy.costs.draft == pytest.approx(0.1 * draft / 2)
    policy.begin_turn()
    assert policy.ask(2) == BLOCK and policy.keep(Proposal((7,) * BLOCK), 2) <= 2, "a whole block is guessed, no more is verified than can count"
    assert policy.ask(0) == 0
    assert FixedDepth(4).ask(2) == 2 and FixedDepth(4).keep(Proposal((1, 2, 3)), 2) == 2


def test_a_pause_of_the_machine_is_not_a_cost():
    policy = DepthPolicy(BLOCK, DraftCosts([0.1] * (BLOCK + 1), 0.01, [3] * (BLOCK + 1)))
    before = policy.loss, policy.costs.rows[:]
    policy.ask(BLOCK)
    policy.learn(Proposal((1, 2, 3, 4, 5)), 5, [-1], RoundTimes(0.01, 60.0, 60.0))
    assert (policy.loss, policy.costs.rows) == before
    policy.learn(Proposal((1, 2, 3, 4, 5)), 5, [-1], RoundTimes(0.01, 0.3, 0.32, first=True))
    assert (policy.loss, policy.costs.rows) == before, "a round in which something is recorded for the first time"


def test_costs_survive_a_restart_and_damaged_ones_are_not_used():
    costs = DraftCosts([0.1, 0.2, 0.3], 0.01, [3, 1, 0])
    again = DraftCosts.from_json(costs.to_json(), 2)
    assert again.to_json() == costs.to_json() and again.draft_samples == 0
    bad = '{"rows": [0, 1, 1], "draft": 1, "samples": [1, 1, 1], "draft_samples": 1}'
    for text in ("", "[]", '{"rows": [1], "draft": 1, "samples": [1]}', bad, bad.replace("[0, 1, 1]", "[1]")):
        assert DraftCosts.from_json(text, 2) is None


def test_what_was_learned_about_texts_survives_a_restart():
    policy, costs = DepthPolicy(BLOCK, DraftCosts([0.1] * (BLOCK + 1), 0.01, [3] * (BLOCK + 1))), DraftCosts(*prior_costs(BLOCK, 256, 6))
    policy.acceptance, policy.kept, policy.chance = [0.9] * BLOCK, [3.0] * BLOCK, [4.0] * BLOCK
    again = DepthPolicy(BLOCK, costs)
    again.recall(policy.to_json())
    assert again.to_json() == policy.to_json() and again.fork().acceptance[0] == pytest.approx((0.9 + 0.75) / 2)
    for text in ("", "[]", policy.to_json().replace("0.9", "1.5"), policy.to_json().replace("3.0", "-1.0"), policy.to_json().replace("[4.0, ", "[")):
        fresh = DepthPolicy(BLOCK, costs)
        fresh.recall(text)
        assert fresh.to_json() == DepthPolicy(BLOCK, costs).to_json(), text
