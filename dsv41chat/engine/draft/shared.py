"""What the sessions of one engine share for drafting: weights, row verdicts, measured costs."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, MutableMapping

import numpy as np

from dsv41chat.engine import rowcheck
from dsv41chat.engine.draft.base import Drafter, PlainDrafter
from dsv41chat.engine.draft.costs import FIRST_COSTS, DraftCosts, prior_costs
from dsv41chat.engine.draft.depth import DepthPolicy, FixedDepth
from dsv41chat.engine.draft.dspark import DSparkModel
from dsv41chat.engine.draft.guard import GuardedDrafter
from dsv41chat.engine.draft.load import DraftModel, new_drafter
from dsv41chat.engine.sampling import SamplingParams
from dsv41chat.engine.target import Target
from dsv41chat.engine.trial import Trunk

_log = logging.getLogger(__name__)
_CALIBRATION_ROUNDS = 5
# Positions after one another at which windows close groups of tokens or not: each way is a recorded step of its own.
_POSITIONS = 4


def guessed_costs(trunk: Trunk, model: DraftModel | None) -> DraftCosts:
    """Costs before anything is timed, from the shapes and from what computes them."""
    c, block = trunk.config, 0 if model is None else model.block
    # One pass over `block` rows of a few stages, or a chain of `block` passes over one row of one stage.
    layers = 0 if model is None else len(model.stages) if isinstance(model, DSparkModel) else block
    rows, draft = prior_costs(block, c.n_routed_experts, c.num_experts_per_tok, layers / c.num_hidden_layers, host=trunk.routes.host)
    return DraftCosts(rows, draft)


class Drafting:
    """model: None without a usable drafter, then every depth is 0. exact: on (drafted text is plain text, bit for bit) or fast (no
    operation runs row by row, so near-ties may fall otherwise than in plain decode). facts: verdicts and costs by key.

    build, machine: names under which measurements are kept. fault: why drafter tensors of the pack are not used, or None.
    """

    def __init__(
        self,
        trunk: Trunk,
        model: DraftModel | None,
        *,
        exact: str,
        facts: MutableMapping[str, str],
        build: str,
        machine: str,
        fault: str | None = None,
    ):
        self.trunk, self.model, self.exact, self.facts, self.fault = trunk, model, exact, facts, fault
        self.kind, self.block = ("none", 0) if model is None else (new_drafter(model).kind, model.block)
        # Bits, and so acceptance, hardly depend on the machine; what a row costs does, and on what computes it and on `exact`.
        self._rows_key, self._costs_key = f"rows.{machine}", f"draft.costs.{build}.{machine}.{exact}"
        self._learned_key = f"draft.learned.{build}"
        self._verdicts: list[rowcheck.Verdict] | None = None
        # Steps are recorded for a process, costs are kept.
        self._recorded = trunk.routes.replay is None
        if model is None:
            _log.log(logging.WARNING if fault else logging.INFO, "%s", fault or "no drafter in this build: answers are decoded plainly")
        self.costs = DraftCosts.from_json(facts.get(self._costs_key, ""), self.block) or guessed_costs(trunk, model)
        self._learned = DepthPolicy(self.block, self.costs)
        self._learned.recall(facts.get(self._learned_key, ""))

    def new_drafter(self) -> Drafter:
        return PlainDrafter() if self.model is None else GuardedDrafter(new_drafter(self.model))

    def new_policy(self) -> DepthPolicy:
        """The adaptive depth of another conversation; what the last answer taught about this build's texts counts half."""
        return self._learned.fork()

    def depth(self, mode: str | int, policy: DepthPolicy) -> FixedDepth | DepthPolicy:
        """mode: off, a depth (0 is off; more than the drafter's block means the block) or auto. Begins a turn of the policy."""
        if self.model is None or mode == "off" or mode == 0:
            return FixedDepth(0)
        self.verdicts()
        if mode != "auto":
            return FixedDepth(min(int(mode), self.block))
        policy.begin_turn()
        return policy

    def verdicts(self) -> list[rowcheck.Verdict]:
        """How the trunk's operations treat windows of 2 .. block + 1 rows. The first call probes, or takes what facts hold, and
        puts the row-by-row route where it is needed."""
        if self._verdicts is None:
            if self.exact == "fast":
                self._verdicts = []
            else:
                known = rowcheck.load_known(self.facts, self._rows_key)
                before = len(known)
                self._verdicts = rowcheck.probe(self.trunk, self.block + 1, known)
                if len(known) != before:
                    self.facts[self._rows_key] = json.dumps(known)
            rowcheck.install(self.trunk, self._verdicts)
        return self._verdicts

    def keep_costs(self) -> None:
        """Store the measured costs for the next process, once they are measured."""
        if self.costs.known:
            self.facts[self._costs_key] = self.costs.to_json()

    def keep_learned(self, policy: DepthPolicy) -> None:
        """An answer has ended: the next conversation, and the next process, begin with what it taught."""
        self.keep_costs()
        if policy.judged:
            self._learned.recall(policy.to_json())
            self.facts[self._learned_key] = policy.to_json()

    @property
    def wants_calibration(self) -> bool:
        """Whether some window size has hardly been timed, so that its cost is still a guess, or steps are still to be recorded."""
        return self.model is not None and (min(self.costs.samples) < FIRST_COSTS or not self._recorded)

    def calibrate(self, cancel: Callable[[], bool] = lambda: False, position: int = 128) -> bool:
        """Time windows of 1 .. block + 1 rows and a pass of the drafter on a scratch lane of `position` tokens, and keep the costs.

        The median of several each, after a first one that is not counted. Takes a second or so; for idle moments and `doctor`. What is
        recorded for the scratch lane serves the next conversation. Asks cancel before each call; False, and nothing is kept, when it says so.
        """
        if self.model is None or cancel():
            return False
        self.verdicts()
        target, drafter = Target(self.trunk), new_drafter(self.model)
        turns = 1 + _CALIBRATION_ROUNDS + (0 if self.trunk.routes.replay is None else _POSITIONS)
        ids = np.random.default_rng(0).integers(0, self.trunk.config.vocab_size, position + turns + self.block + 1).tolist()
        # As in a round of middling success: some rows have come since the last pass.
        first = max(1, position - (self.block + 1) // 2)
        for a, b in ((0, first), (first, position)):
            if cancel():
                return False
            trial = target.rows(ids[a:b], logits_from=None, want_taps=True)
            target.commit(trial, trial.count)
            drafter.ingest(trial.taps, a, ids[a + 1 : b + 1])

        def propose(sampling: SamplingParams) -> None:
            drafter.truncate(first)
            drafter.ingest(trial.taps, first, ids[first + 1 : position + 1])
            drafter.propose(ids[position], position, self.block, sampling)

        window = lambda m: np.array(target.rows(ids[target.n : target.n + m], want_taps=True).logits)
        calls = [lambda m=m: window(m) for m in range(1, self.block + 2)] + [lambda: propose(SamplingParams())]
        propose(SamplingParams(temperature=1.0))
        seconds: list[list[float]] = [[] for _ in calls]
        # All in turn, so that a busy moment of the machine does not fall on one of them.
        for turn in range(turns):
            for call, found in zip(calls, seconds):
                if cancel():
                    return False
                recorded, began = target.recorded, time.perf_counter()
                call()
                if turn and target.recorded == recorded:
                    found.append(time.perf_counter() - began)
            target.commit(target.rows(ids[target.n : target.n + 1], want_taps=True), 1)
        *rows, draft = map(statistics.median, seconds)
        self.costs.set(rows, draft, [_CALIBRATION_ROUNDS] * len(rows), _CALIBRATION_ROUNDS)
        self._recorded = True
        self.keep_costs()
        return True

    def summary(self) -> list[str]:
        """Lines for `doctor` and `models info`: what drafts, and which operations run row by row."""
        if self.model is None:
            return [self.fault or "no drafter in this build: answers are decoded plainly"]
        lines = [f"{self.kind}, up to {self.block} tokens a round"]
        if self.exact == "fast":
            return [*lines, "exact = fast: nothing runs row by row; drafted text may differ from plain text at near-ties"]
        single = [v for v in self.verdicts() if v.tokenwise]
        lines.append(f"row check: {len(self.verdicts()) - len(single)} operations batched, {len(single)} row by row")
        if self.costs.known:
            rows = " ".join(f"{1000 * c:.1f}" for c in self.costs.rows)
            lines.append(f"costs: windows of 1 to {self.block + 1} rows take {rows} ms, a pass of the drafter {1000 * self.costs.draft:.1f} ms")
        return lines + [str(v) for v in single]
