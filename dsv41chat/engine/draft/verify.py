"""One round: propose, verify in one forward, walk, commit. The only decode loop there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dsv41chat.engine.draft.base import Drafter
from dsv41chat.engine.sampling import SamplingParams
from dsv41chat.engine.target import Target


@dataclass(frozen=True)
class Round:
    """emitted: tokens chosen by the target, one more than `accepted` proposals; ended: why emission stopped, or None."""

    emitted: tuple[int, ...]
    proposed: int
    accepted: int
    ended: str | None


def run_round(
    target: Target,
    drafter: Drafter,
    pending: int,
    depth: int,
    sampling: SamplingParams,
    select: Callable[[np.ndarray, int], int],
    emit: Callable[[int], str | None],
    cancelled: Callable[[], bool],
) -> Round | None:
    """pending: the token chosen for position n, in no lane yet. depth: most proposals wanted.

    select(row, position) is `choose` bound to the history that `emit` keeps; emit(token) takes one final token and answers why
    emission ends there (stop id, stop string, budget, loop), or None. Each token that the walk chooses is final the moment it is
    chosen, so every cut falls before the commit and the lane ends exactly at it. None when cancelled between verify and walk:
    then nothing is committed and `pending` stays valid.
    """
    n = target.n
    proposal = drafter.propose(pending, n, depth, sampling).ids[:depth] if depth > 0 else ()
    trial = target.rows([pending, *proposal], want_taps=drafter.needs_taps)
    if cancelled():
        target.drop()
        return None
    logits, emitted, ended = np.array(trial.logits), [], None
    for i in range(trial.count):
        token = select(logits[i], n + i + 1)
        last = i == len(proposal) or token != proposal[i]
        if last:
            target.prefetch(n + i + 1, token)
        emitted.append(token)
        ended = emit(token)
        if ended is not None or last:
            break
    target.commit(trial, len(emitted))
    drafter.ingest(None if trial.taps is None else trial.taps[: len(emitted)], n, tuple(emitted))
    return Round(tuple(emitted), len(proposal), len(emitted) - 1, ended)
