"""The greedy and drafting parts of `models verify --goldens`: continuations at every depth, and the proposals themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dsv41chat.engine.draft.base import Drafter, PlainDrafter
from dsv41chat.engine.draft.costs import DraftCosts, prior_costs
from dsv41chat.engine.draft.depth import DepthPolicy, FixedDepth
from dsv41chat.engine.draft.load import DraftModel, new_drafter
from dsv41chat.engine.draft.verify import Round, run_round
from dsv41chat.engine.errors import PackDamaged
from dsv41chat.engine.sampling import SamplingParams
from dsv41chat.engine.target import Target
from dsv41chat.engine.trial import Trunk

_GREEDY = SamplingParams()


class Result(NamedTuple):
    """n: positions or rounds compared; share of them that are equal; wrong: the first position where they are not, or None."""

    name: str
    n: int
    share: float
    wrong: int | None


class _Watched:
    """A drafter whose proposals are kept by the number of committed rows they were made at."""

    def __init__(self, inner: Drafter):
        self._inner, self.made = inner, {}

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def propose(self, pending: int, n: int, want: int, sampling: SamplingParams):
        proposal = self._inner.propose(pending, n, want, sampling)
        self.made[n] = proposal.ids
        return proposal


def greedy_results(trunk: Trunk, model: DraftModel | None, golden: dict[str, np.ndarray]) -> Iterator[Result]:
    """Every check that applies."""
    want = [int(i) for i in golden["greedy_ids"]]
    length = int(golden["prompt_len"][0]) if "prompt_len" in golden else len(golden["input_ids"])
    prompt = [int(i) for i in golden["input_ids"][:length]]
    depths: list[tuple[str, FixedDepth | DepthPolicy]] = [("", FixedDepth(0))]
    if model is not None:
        depths += [(f" (depth {k})", FixedDepth(k)) for k in range(1, model.block + 1)]
        costs = DraftCosts(*prior_costs(model.block, trunk.config.n_routed_experts, trunk.config.num_experts_per_tok))
        depths.append((" (adaptive)", DepthPolicy(model.block, costs)))
    for label, depth in depths:
        got, _ = continuation(trunk, model, prompt, prompt[:-1], len(want), depth)
        yield _compared(f"greedy_ids{label}", got, want, length)
    if "draft_ids" in golden:
        yield _fixed_schedule(trunk, model, golden, [*prompt, *want])
    if "draft_ids_all" in golden and "draft_n_all" in golden:
        yield _any_schedule(trunk, model, golden, [*prompt, *want])


def continuation(
    trunk: Trunk, model: DraftModel | None, known: list[int], prefix: list[int], count: int, depth, rounds: int | None = None
) -> tuple[list[int], list[tuple[int, tuple[int, ...], Round]]]:
    """Greedy ids after known[len(prefix)], the first pending token, and (n, proposal, round) of every round. Stops are ignored."""
    drafting = model is not None and not (isinstance(depth, FixedDepth) and depth.depth == 0)
    drafter = _Watched(new_drafter(model) if drafting else PlainDrafter())
    target = Target(trunk)
    if prefix:
        trial = target.rows(prefix, logits_from=None, want_taps=drafter.needs_taps)
        target.commit(trial, trial.count)
        drafter.ingest(trial.taps, 0, known[1 : len(prefix) + 1])
    pending, got, log = known[len(prefix)], [], []
    emit = lambda token: "length" if (got.append(token), len(got))[1] >= count else None
    while len(got) < count and (rounds is None or len(log) < rounds):
        n = target.n
        result = run_round(target, drafter, depth, pending, count - len(got) - 1, _GREEDY, lambda row, at: int(row.argmax()), emit, lambda: False)
        log.append((n, drafter.made.get(n, ()), result))
        pending = got[-1]
    return got, log


def _fixed_schedule(trunk: Trunk, model: DraftModel | None, golden: dict[str, np.ndarray], known: list[int]) -> Result:
    """draft_ids [rounds, k], round_n and round_accept [rounds] of the first rounds at depth k."""
    want = golden["draft_ids"]
    starts = golden.get("round_n", np.full(1, int(golden.get("prompt_len", [len(golden["input_ids"])])[0])))
    accepts = golden.get("round_accept")
    first = int(starts[0])
    if model is None or not 0 < first < len(known):
        return Result("draft_ids", len(want), 0.0, first)
    count = len(known) - first - 1
    _, log = continuation(trunk, model, known, known[:first], max(count, 1), FixedDepth(want.shape[1]), rounds=len(want))
    wrong, equal = None, 0
    for i, (n, ids, result) in enumerate(log):
        # The last rounds of a short continuation are cut by its length; what they had proposed still counts.
        shown = len(ids)
        good = shown > 0 and list(ids) == want[i][:shown].tolist() and ("round_n" not in golden or n == starts[i])
        if good and accepts is not None and shown == want.shape[1] and result.ended is None:
            good = result.accepted == int(accepts[i])
        equal += good
        wrong = n if wrong is None and not good else wrong
    if len(log) < len(want) and wrong is None and count > 0 and log[-1][2].ended is None:
        raise PackDamaged(f"the golden file has {len(want)} draft rounds, its greedy_ids end after {len(log)}")
    return Result("draft_ids", len(log), equal / max(1, len(log)), wrong)


def _any_schedule(trunk: Trunk, model: DraftModel | None, golden: dict[str, np.ndarray], known: list[int]) -> Result:
    """draft_ids_all [q, k] by draft_n_all [q], the number of committed rows: asked for along the plain continuation."""
    want = {int(n): [int(i) for i in ids] for n, ids in zip(golden["draft_n_all"], golden["draft_ids_all"])}
    first = min(want)
    if model is None or first < 1 or max(want) >= len(known):
        return Result("draft_ids_all", len(want), 0.0, first)
    drafter, target, bad = new_drafter(model), Target(trunk), []
    for n in range(first, max(want) + 1):
        trial = target.rows(known[target.n : n], logits_from=None, want_taps=True)
        target.commit(trial, trial.count)
        drafter.ingest(trial.taps, trial.start, known[trial.start + 1 : n + 1])
        if n in want and list(drafter.propose(known[n], n, len(want[n]), _GREEDY).ids) != want[n]:
            bad.append(n)
    return Result("draft_ids_all", len(want), 1 - len(bad) / len(want), bad[0] if bad else None)


def _compared(name: str, got: list[int], want: list[int], first: int) -> Result:
    same = np.array(got) == np.array(want)
    wrong = None if same.all() else first + int(np.flatnonzero(~same)[0])
    return Result(name, len(want), float(same.mean()), wrong)
