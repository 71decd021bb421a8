"""A machine and a text for the depth policy: costs in milliseconds, chances per depth, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dsv41chat.engine.draft.base import Proposal
from dsv41chat.engine.draft.costs import DraftCosts
from dsv41chat.engine.draft.depth import DepthPolicy, RoundTimes

BLOCK = 5
# name: (cost of a verify of m rows in ms, cost of a pass of the drafter in ms)
MACHINES: dict[str, tuple[Callable[[int], float], float]] = {
    "launch-bound": (lambda m: 97 + 8.2 * m, 10.7),
    "mtp-like": (lambda m: 40 + 5 * (m - 1), 4.0),
    "linear": (lambda m: 20 * (1 + 0.55 * (m - 1)), 4.0),
    "fixed": (lambda m: 44.0 if m == 1 else 70 + 12 * m, 12.6),
    "streamed": (lambda m: 50 * (1 + 0.9 * (m - 1)), 6.0),
}
# The embedded model on a CPU through numpy's BLAS: a step is cheap, a pass of the drafter is half of one or all of one.
CPUS: dict[str, tuple[Callable[[int], float], float]] = {
    "cpu": (lambda m: 7.2 * (1 + 0.16 * (m - 1)), 3.8),
    "cpu, dear drafter": (lambda m: 7.2 * (1 + 0.16 * (m - 1)), 7.7),
}
# chance that proposal j stands given that those before it did
TEXTS = {kind: np.geomspace(first, last, BLOCK) for kind, (first, last) in {
    "agent": (0.985, 0.95), "code": (0.93, 0.78), "prose": (0.72, 0.40), "junk": (0.15, 0.10),
}.items()}  # fmt: skip
# A confidence logit is the text's own plus evidence: this much more where the proposal stands than where it does not, with noise 1.
EVIDENCE = 1.25


def run(
    machine: str,
    text: Sequence[tuple[str, int]],
    seed: int,
    *,
    fixed: int | None = None,
    confidence: bool = True,
    busy: bool = False,
    misstated: float = 1.0,
    policy: DepthPolicy | None = None,
) -> tuple[float, list[tuple[int, str]]]:
    """(speed over plain decode, [(token index, mode of each round)]) for segments (kind, tokens) one after the other.

    busy: the policy's clock is that of a machine with other work; the speed is still that of the machine alone.
    policy: one that has seen something already, instead of a new one that knows the machine's costs.
    """
    cost, draft = (MACHINES | CPUS)[machine]
    rng = np.random.default_rng(seed)
    kinds = [kind for kind, count in text for _ in range(count)]
    calm = lambda ms: ms * (1 + 0.03 * rng.standard_normal()) / 1000
    # Other programs: every time is off by a third, one in ten is a fourfold pause.
    rough = lambda ms: ms / 1000 * np.exp(0.3 * rng.standard_normal()) * (4 if rng.random() < 0.1 else 1)
    jitter = rough if busy else calm
    costs = DraftCosts([cost(m) * misstated / 1000 for m in range(1, BLOCK + 2)], draft / 1000, [3] * (BLOCK + 1), 3)
    policy = policy or DepthPolicy(BLOCK, costs)
    done, spent, plain, modes = 0, 0.0, 0.0, []
    while done < len(kinds):
        chances = TEXTS[kinds[done]]
        hits = rng.random(BLOCK) < chances
        logits = np.log(chances / (1 - chances)) + EVIDENCE * (hits - chances) + rng.standard_normal(BLOCK)
        ask, mode = (policy.ask(BLOCK), policy.mode) if fixed is None else (fixed, "draft")
        # The token at index i is i itself, so a guess stands iff it says so.
        ids = tuple(done + j if hit else -1 for j, hit in enumerate(hits))
        proposal = Proposal(ids, tuple(logits) if confidence else None) if ask else Proposal(())
        kept = fixed if fixed is not None else policy.keep(proposal, BLOCK) if ask else 0
        accepted = min(kept, int(np.argmin(np.append(hits, False))))
        emitted = range(done, done + accepted + 1)
        draft_s, verify_s = (jitter(draft) if ask else 0.0), jitter(cost(kept + 1))
        spent += (draft * bool(ask) + cost(kept + 1)) / 1000 if busy else draft_s + verify_s
        plain += len(emitted) * cost(1) / 1000
        modes.append((done, "plain" if mode == "draft" and not kept else mode))
        if fixed is None:
            policy.learn(proposal, kept, emitted, RoundTimes(draft_s, verify_s, draft_s + verify_s))
        done += len(emitted)
    return plain / spent, modes


def mean(machine: str, text, seeds: int = 8, **options) -> float:
    return float(np.mean([run(machine, text, seed, **options)[0] for seed in range(seeds)]))
