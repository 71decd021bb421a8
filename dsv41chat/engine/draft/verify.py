"""One round: propose, verify in one forward, walk, commit. The only decode loop there is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dsv41chat.engine.draft.base import Drafter, Proposal
from dsv41chat.engine.draft.depth import DepthPolicy, FixedDepth, RoundTimes
from dsv41chat.engine.sampling import SamplingParams
from dsv41chat.engine.target import Target


@dataclass(frozen=True)
class Round:
    """emitted: tokens chosen by the target, one more than `accepted` proposals; proposed: verified rows beside the pending one;
    ended: why emission stopped, or None."""

    emitted: tuple[int, ...]
    proposed: int
    accepted: int
    ended: str | None


def run_round(
    target: Target,
    drafter: Drafter,
    depth: FixedDepth | DepthPolicy,
    pending: int,
    limit: int,
    sampling: SamplingParams,
    select: Callable[[np.ndarray, int], int],
    emit: Callable[[int], str | None],
    cancelled: Callable[[], bool],
    clock: Callable[[], float] = time.perf_counter,
) -> Round | None:
    """pending: the token chosen for position n, in no lane yet. limit: most proposals that can count (token budget, context).

    select(row, position) is `choose` bound to the history that `emit` keeps; emit(token) takes one final token and answers why
    emission ends there (stop id, stop string, budget, loop), or None. Each token that the walk chooses is final the moment it is
    chosen, so every cut falls before the commit and the lane ends exactly at it. None when cancelled between verify and walk:
    then nothing is committed and `pending` stays valid.
    """
    n, recorded, began = target.n, target.recorded, clock()
    want = depth.ask(limit)
    proposal = drafter.propose(pending, n, want, sampling) if want > 0 else Proposal(())
    kept = depth.keep(proposal, limit)
    guesses, drafted = proposal.ids[:kept], clock()
    trial = target.rows([pending, *guesses], want_taps=drafter.needs_taps)
    if cancelled():
        target.drop()
        return None
    logits, verified = np.asarray(trial.logits), clock()
    try:
        emitted, ended = _walk(target, logits, n, guesses, select, emit)
    except BaseException:
        target.drop()
        raise
    target.commit(trial, len(emitted))
    drafter.ingest(None if trial.taps is None else trial.taps[: len(emitted)], n, tuple(emitted))
    depth.learn(proposal, kept, emitted, RoundTimes(drafted - began, verified - drafted, clock() - began, target.recorded != recorded))
    return Round(tuple(emitted), kept, len(emitted) - 1, ended)


def _walk(target: Target, logits: np.ndarray, n: int, guesses: tuple[int, ...], select, emit) -> tuple[list[int], str | None]:
    """The target's own token row by row, as long as it is the one that was guessed."""
    emitted, ended = [], None
    for i, row in enumerate(logits):
        token = select(row, n + i + 1)
        last = i == len(guesses) or token != guesses[i]
        if last:
            target.prefetch(n + i + 1, token)
        emitted.append(token)
        ended = emit(token)
        if ended is not None or last:
            break
    return emitted, ended
