"""What the depth policy is told about the machine: guesses, what becomes of them, and what short answers are worth with them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsv41chat.engine.draft.costs import DraftCosts, prior_costs
from dsv41chat.engine.draft.depth import DepthPolicy
from tests.engine.draft.simulate import BLOCK, CPUS, run

# (rows, drafter) as a CPU's stock operations once had them, in plain steps.
STOCK = [1.0, 2.4, 3.1, 3.6, 4.4, 3.9], 0.7


class Stuck(DraftCosts):
    """Planted fault: figures of another way to compute, as if timed here, which nothing that is timed can change."""

    def observe(self, m, seconds):
        return

    def observe_draft(self, seconds, backlog=False):
        return


def guessed(host: bool = True) -> DraftCosts:
    """As the embedded model's: 8 experts of which 2 work, 2 stages to 8 layers."""
    return DraftCosts(*prior_costs(BLOCK, 8, 2, 2 / 8, host))


def answers(machine: str, kind: str, costs: DraftCosts, count: int = 12, fixed: int | None = None, seed: int = 0) -> list[float]:
    """Speeds over plain decode of short answers, each in a conversation of its own; the first begins knowing nothing."""
    speeds, policy = [], DepthPolicy(BLOCK, costs)
    for i in range(count):
        policy = policy.fork()
        speeds.append(run(machine, [(kind, 34)], 1000 * seed + i, policy=policy, fixed=fixed)[0])
    return speeds


def together(speeds: list[float]) -> float:
    return len(speeds) / sum(1 / s for s in speeds)


@pytest.mark.parametrize("machine", CPUS)
@pytest.mark.parametrize("kind", ["agent", "code"])
@pytest.mark.parametrize("host", [True, False], ids=["guessed for it", "guessed for another"])
def test_short_answers_come_near_the_best_fixed_depth(machine: str, kind: str, host: bool):
    """From the first answer of a process on, whatever the first guess was."""
    best = max(together(answers(machine, kind, guessed(), fixed=k)) for k in range(1, BLOCK + 1))
    speeds = [together(answers(machine, kind, guessed(host), seed=seed)) for seed in range(4)]
    assert np.mean(speeds) >= 0.93 * best


@pytest.mark.parametrize("machine", CPUS)
def test_costs_of_another_route_would_turn_that_red(machine: str):
    best = max(together(answers(machine, "agent", guessed(), fixed=k)) for k in range(1, BLOCK + 1))
    rows, draft = [0.0072 * c for c in STOCK[0]], 0.0072 * STOCK[1]
    assert together(answers(machine, "agent", Stuck(rows, draft, [3] * len(rows), 3))) < 0.75 * best
    assert together(answers(machine, "agent", DraftCosts(*STOCK))) > 0.85 * best, "the same figures, when they can be found out"


@pytest.mark.parametrize("machine", CPUS)
def test_short_noise_loses_little(machine: str):
    assert together(answers(machine, "junk", guessed())) >= 0.95
    for seed in range(8):
        taught = DepthPolicy(BLOCK, DraftCosts([CPUS[machine][0](m) / 1000 for m in range(1, BLOCK + 2)], CPUS[machine][1] / 1000, [5] * 6, 5))
        before = taught.grant
        taught.recall('{"acceptance": [0.95, 0.95, 0.95, 0.95, 0.95], "kept": [9, 9, 9, 9, 9], "chance": [9, 9, 9, 9, 9]}')
        assert taught.grant > before, "answers that went well give it more room"
        for policy in (None, taught):
            assert run(machine, [("junk", 256)], seed, policy=policy)[0] >= 0.97
    assert min(run(machine, [("junk", 1500)], seed)[0] for seed in range(4)) >= 0.98


def test_one_timed_size_corrects_the_guesses_for_the_others():
    rows, draft = prior_costs(BLOCK, 8, 2)
    costs = DraftCosts(rows, draft)
    for _ in range(2):
        costs.observe(1, 0.01)
    assert costs.rows == pytest.approx([0.01 * c for c in rows]) and costs.draft == pytest.approx(0.01 * draft)
    for _ in range(3):
        costs.observe(BLOCK + 1, 0.01 * 1.5)
    assert costs.rows[-1] == pytest.approx(0.015) and all(a < b for a, b in zip(costs.rows, costs.rows[1:]))
    stretch = 0.5 / (rows[-1] - 1)
    assert costs.rows[2] == pytest.approx(0.01 * (1 + stretch * (rows[2] - 1)))


def test_one_lucky_time_of_a_rare_size_says_little():
    costs = DraftCosts([0.01 * (1 + 0.16 * j) for j in range(BLOCK + 1)], 0.004, [30] * (BLOCK + 1))
    costs.samples[2] = 0
    costs.observe(3, 0.002)
    assert costs.rows[2] == pytest.approx(0.0132, rel=0.25)
    for _ in range(20):
        costs.observe(3, 0.010)
    assert costs.rows[2] == pytest.approx(0.010, rel=0.1)


def test_the_first_times_count_by_their_median_and_pauses_hardly():
    costs = DraftCosts([0.01] * (BLOCK + 1), 0.002, [3] * (BLOCK + 1))
    costs.observe_draft(2.0)
    assert costs.draft == pytest.approx(0.008), "something compiled: at most four times the guess"
    costs.observe_draft(0.004)
    costs.observe_draft(0.005)
    assert costs.draft == pytest.approx(0.005)
    costs.observe_draft(3.0)
    assert costs.draft < 0.006


def test_a_pass_after_many_rows_only_says_what_is_enough():
    costs = DraftCosts([0.01] * (BLOCK + 1), 0.004, [3] * (BLOCK + 1), 3)
    costs.observe_draft(0.009, backlog=True)
    assert costs.draft == 0.004
    costs.observe_draft(0.003, backlog=True)
    assert costs.draft < 0.004


def test_guesses_by_route():
    for layers, drafted in ((2 / 8, 0.38), (3 / 40, 0.15)):
        rows, draft = prior_costs(BLOCK, 8, 2, layers, host=True)
        assert draft == pytest.approx(drafted, abs=0.04)
        assert all(math.isfinite(c) and c >= 1 - 1e-9 for c in rows)
    assert prior_costs(BLOCK, 8, 2, host=True)[0][-1] < prior_costs(BLOCK, 8, 2)[0][-1]


def test_a_plain_step_is_due_now_and_then_and_sooner_at_first():
    costs = DraftCosts([0.01 * (1 + 0.16 * j) for j in range(BLOCK + 1)], 0.004)
    drafted = []
    for _ in range(400):
        if not costs.known or costs.stale:
            costs.observe(1, 0.01)
            drafted.append(0)
        else:
            costs.observe(BLOCK + 1, 0.018)
            drafted[-1] += 1
    assert drafted[0] == 0 and drafted[1] == drafted[2] < drafted[-2] == 128 and not costs.stale
