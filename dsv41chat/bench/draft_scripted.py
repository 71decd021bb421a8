"""`dsv41chat bench draft --acceptance`: what drafting is worth on a machine when guesses are right with a given chance.

A drafter does all its work, is timed with it, and only the ids of its guesses are replaced: each is the id that plain decode gives, known
from a run before, with the chance asked for, and a wrong one otherwise. So the trunk verifies real windows and really rolls back, on weights
of any values. Whether a guess is right depends on its position alone, so all depths meet the same luck; a drafter's confidence is the chance
itself, which is calibrated and tells good guesses from bad ones as little as can be. Greedy, end ids ignored, all arms in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.bench import arms
from dsv41chat.bench.draft import Arm, ids_hash, run_in_turn, summary
from dsv41chat.bench.receipt import write_receipt
from dsv41chat.engine.device import device_kind
from dsv41chat.engine.draft.base import Drafter, Proposal, Taps
from dsv41chat.engine.draft.depth import DepthPolicy, FixedDepth, RoundTimes
from dsv41chat.engine.draft.load import new_drafter
from dsv41chat.engine.engine import Engine, open_engine
from dsv41chat.engine.errors import EngineError
from dsv41chat.engine.sampling import SamplingParams
from dsv41chat.nano import embedded_pack

DEPTHS = (1, 2, 3, 5)
# Rounds of a kind from which its median is believed.
_SEEN = 3
# Of a chance of 0 or 1, which has no logit.
_SURE = 8.0


class ScriptedDrafter:
    """inner: does the work. text: prompt and answer as plain decode has them; after its end guesses are wrong."""

    def __init__(self, inner: Drafter, text: Sequence[int], rate: float, seed: int, vocab: int):
        self.inner, self.text, self.vocab = inner, text, vocab
        self.kind, self.block, self.window, self.needs_taps = inner.kind, inner.block, inner.window, inner.needs_taps
        self.right = np.random.default_rng(seed).random(len(text)) < rate
        self.confidence = _SURE * (2 * rate - 1) if rate in (0, 1) else math.log(rate / (1 - rate))

    def guess(self, position: int) -> int:
        if position >= len(self.text):
            return 0
        true = self.text[position]
        # As in prompts, no id of either end: those mean something.
        return true if self.right[position] else 40 + (true + 1 + position % 7) % (self.vocab - 80)

    def ingest(self, taps: Taps | None, first_pos: int, next_tokens: Sequence[int]) -> None:
        self.inner.ingest(taps, first_pos, next_tokens)

    def propose(self, pending: int, n: int, want: int, sampling: SamplingParams) -> Proposal:
        found = self.inner.propose(pending, n, want, sampling)
        ids = tuple(self.guess(n + 1 + j) for j in range(len(found.ids)))
        return Proposal(ids, None if found.confidence is None else (self.confidence,) * len(ids))

    def reset(self) -> None:
        self.inner.reset()

    def truncate(self, n: int) -> None:
        self.inner.truncate(n)

    def state(self) -> dict[str, mx.array]:
        return self.inner.state()

    def load(self, state: dict[str, mx.array], n: int) -> None:
        self.inner.load(state, n)


@dataclass(frozen=True)
class Seen:
    """rows: of the verify. drafted: whether the drafter ran."""

    rows: int
    drafted: bool
    times: RoundTimes


class Watched:
    """A depth, and what every round under it was."""

    def __init__(self, inner: FixedDepth | DepthPolicy):
        self.inner, self.rounds = inner, []
        self.ask, self.keep = inner.ask, inner.keep

    def learn(self, proposal: Proposal, kept: int, emitted: Sequence[int], times: RoundTimes) -> None:
        self.rounds.append(Seen(kept + 1, bool(proposal.ids), times))
        self.inner.learn(proposal, kept, emitted, times)


@dataclass
class ScriptedArm(Arm):
    """text: prompt and answer of plain decode."""

    text: Sequence[int] = ()
    rate: float = 0.0
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.depth = Watched(self.depth)

    def new_drafter(self) -> ScriptedDrafter:
        """Without the guard of a conversation: a drafter that fails here must say so."""
        return ScriptedDrafter(new_drafter(self.engine.drafting.model), self.text, self.rate, self.seed, self.engine.pack.config.vocab_size)

    @property
    def differs_at(self) -> int | None:
        """The first token that plain decode has otherwise."""
        answer = self.text[len(self.prompt) :]
        return next((i for i, (mine, plain) in enumerate(zip(self.ids, answer, strict=True)) if mine != plain), None)


def usual_seconds(rounds: Sequence[Seen]) -> float:
    """Of all rounds, had each taken as long as the median one of its kind: steps that are recorded or compiled on first use do not count.
    A kind that was seen too seldom for a median counts as the dearest other."""
    kinds: dict[tuple[int, bool], list[Seen]] = {}
    for r in rounds:
        kinds.setdefault((r.rows, r.drafted), []).append(r)
    known = {kind: [r.times.total_s for r in found if not r.times.first] for kind, found in kinds.items()}
    medians = {kind: statistics.median(found) for kind, found in known.items() if len(found) >= _SEEN}
    usual = max(medians.values(), default=statistics.median(r.times.total_s for r in rounds))
    return sum(len(found) * medians.get(kind, usual) for kind, found in kinds.items())


def figures(mine: list[ScriptedArm], plain: list[ScriptedArm]) -> dict[str, Any]:
    """Of one mode over all prompts. speed: over plain decode by the median rounds of each kind; the other speeds are sums of all rounds."""
    rounds, others = ([r for a in found for r in a.depth.rounds] for found in (mine, plain))
    sums = summary(mine, plain)
    judged, accepted = (sum(column) for column in zip(*sums["by_depth"])) if sums["by_depth"] else (0, 0)
    verify = [r.times.verify_s for r in rounds]
    passes = [r.times.draft_s for r in rounds if r.drafted]
    return sums | {
        "speed": round(usual_seconds(others) / usual_seconds(rounds), 3),
        "speed_of_sums": sums["speed"],
        "acceptance": round(accepted / judged, 3) if judged else None,
        "round_ms": arms.milliseconds([r.times.total_s for r in rounds]),
        "verify_ms": arms.milliseconds(verify),
        "draft_ms": arms.milliseconds(passes) if passes else None,
        "rounds_by_rows": dict(sorted(Counter(r.rows for r in rounds).items())),
        "passes_not_verified": sum(r.drafted and r.rows == 1 for r in rounds),
    }


def measure(engine: Engine, rates: Sequence[float], context: int, steps: int, repeats: int, log: Callable[[str], None]) -> dict[str, Any]:
    drafting = engine.drafting
    log("; ".join(drafting.summary()))
    # As idle moments of the program do, so that the adaptive depth begins with this machine's costs.
    drafting.calibrate(position=context)
    costs = {"rows": [round(1000 * c, 3) for c in drafting.costs.rows], "draft": round(1000 * drafting.costs.draft, 3)}
    modes = ["off", *(d for d in DEPTHS if d <= drafting.block), "auto"]
    texts, everything = [], []
    for seed in range(repeats):
        prompt = arms.prompt(engine, context, seed)
        first = Arm(engine, "off", prompt, SamplingParams(), steps)
        run_in_turn([first])
        texts.append((prompt, prompt + first.ids))
    found, bars = {}, {}
    for rate in rates:
        raced: dict[str | int, list[ScriptedArm]] = {mode: [] for mode in modes}
        for seed, (prompt, text) in enumerate(texts):
            mine = [ScriptedArm(engine, mode, prompt, SamplingParams(), steps, text=text, rate=rate, seed=seed + 1000) for mode in modes]
            run_in_turn(mine)
            for arm in mine:
                arm.close()
                raced[arm.mode].append(arm)
            everything += mine
        result = found[str(rate)] = {str(mode): figures(raced[mode], raced["off"]) for mode in modes}
        best = max((m for m in modes if m not in ("off", "auto")), key=lambda m: result[str(m)]["speed"])
        speeds = lambda mode, result=result: {"speed": result[str(mode)]["speed"], "of_sums": result[str(mode)]["speed_of_sums"]}
        bars[f"{rate}: best fixed depth over plain"] = {"depth": best} | speeds(best)
        bars[f"{rate}: auto over plain"] = speeds("auto")
        log(f"acceptance {rate}: " + ", ".join(f"{mode} {v['speed']:.2f}x" for mode, v in result.items()))
    differing = [{"rate": a.rate, "mode": a.mode, "prompt": a.seed - 1000, "token": a.differs_at} for a in everything if a.differs_at is not None]
    bars["all arms gave plain decode's ids"] = not differing
    by_rows: dict[int, list[float]] = {}
    for r in (r for a in everything for r in a.depth.rounds):
        by_rows.setdefault(r.rows, []).append(r.times.verify_s)
    plan = engine.pack.found.plan
    return {
        **arms.frame("drafted decode against plain decode, acceptance scripted", {"auto": engine}),
        "drafter": {
            "kind": plan.kind, "stages": len(plan.prefixes), "block": plan.block, "experts": plan.experts, "picks": plan.picks,
            "taps": list(plan.taps), "bytes": engine.pack.drafter_bytes, "summary": drafting.summary(),
        },
        "context": context, "steps": steps, "prompts": repeats,
        "distinct_experts": arms.distinct_experts(engine, arms.prompt(engine, 65), drafting.block + 1),
        "calibrated_ms": costs,
        "verify_ms_by_rows": {rows: arms.milliseconds(by_rows[rows]) for rows in sorted(by_rows)},
        "bars": bars,
        "rates": found,
        "differing": differing,
        "ids_hash": [ids_hash(text[len(prompt) :]) for prompt, text in texts],
        "note": "all arms of a prompt in turn, round by round, in one process; speed: by the median round of each kind (rows, whether the "
        "drafter ran); speed_of_sums: with first-use compiling and recording of steps. The drafter's own time and the prompt's backlog in its "
        "first pass are in the drafted arms; confidences are the chance itself",
    }  # fmt: skip


def run_options(options: argparse.Namespace) -> int:
    """Measure, print the bars, write the receipt. Returns the exit code: 1 where an arm's ids are not plain decode's."""
    o = options
    if not all(0 <= rate <= 1 for rate in o.acceptance) or o.context < 2 or o.steps < 2 or o.repeats < 1:
        print("bench draft: --acceptance takes chances from 0 to 1, --context and --steps at least 2, --repeats at least 1", file=sys.stderr)
        return 2
    try:
        engine = open_engine(embedded_pack() if o.build is None or str(o.build) == "nano" else o.build, force=True)
        if not engine.drafting.block:
            fault = engine.drafting.fault or "this build has no drafter; bench weights --drafter makes builds that have one"
            print(f"bench draft: {fault}", file=sys.stderr)
            return 2
        payload = measure(engine, o.acceptance, o.context, o.steps, o.repeats, lambda line: print(line, flush=True))
    except EngineError as error:
        print(f"bench draft: {error}", file=sys.stderr)
        return 2
    build = "" if o.build is None else f" --build {o.build.name}"
    rates = " ".join(map(str, o.acceptance))
    payload["command"] = f"dsv41chat bench draft{build} --acceptance {rates} --context {o.context} --steps {o.steps} --repeats {o.repeats}"
    path = write_receipt(o.output, "draft-scripted", payload, device_kind())
    print(json.dumps(payload["bars"], indent=1))
    print(path.name)
    if payload["differing"]:
        first = payload["differing"][0]
        print(
            f"bench draft: {len(payload['differing'])} arms do not give plain decode's ids, the first at depth {first['mode']}, token "
            f"{first['token']}: a window's rows are not the bits of single rows; `doctor drafting` shows which operations were checked, and "
            "the speeds of these arms are void",
            file=sys.stderr,
        )
        return 1
    return 0
