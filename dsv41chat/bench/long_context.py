"""Decode and one prompt chunk after many cached tokens whose state is random: what grows with the context, and what does not.

A state's values change no cost, so lanes are filled instead of computed. Only the scoring of index keys may grow; it is told apart where
operations run one by one (the BLAS route), and by the kernels of a recorded step.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.bench import arms
from dsv41chat.engine.engine import Engine
from dsv41chat.engine.kernels.sites import sites
from dsv41chat.engine.lane import Lane, PoolSpec

_SCORING = ("scores", "select", "candidates", "among")
# The kernels of these operations. Lists of what is chosen are made by others, whatever the context.
_SCORING_KERNELS = ("index_scores", "top_k", "block_top", "keep_blocks")


def fill(lane: Lane, n: int, vocab: int) -> None:
    """Put a lane at n tokens of random state."""
    rng = np.random.default_rng(n)
    lane.reset()
    lane.ids, lane.n = rng.integers(40, vocab - 40, n).tolist(), n
    lane.high = n + lane.roll
    for name, spec in lane.specs.items():
        rows = spec.rows if not isinstance(spec, PoolSpec) else -(-(n // spec.ratio + 1) // spec.block) * spec.block
        values = rng.standard_normal((rows, *spec.tail), dtype=np.float32)
        lane.buffers[name] = values if lane.host else mx.array(values).astype(spec.dtype)
    mx.eval(lane.arrays())


def measure(engine: Engine, cached: Sequence[int], steps: int) -> dict[str, Any]:
    """By number of cached tokens: ms per step, ms of it in index scoring, bytes of a chunk's peak, of the state, and of the
    state as it is planned before a build is opened (at its peak, while its largest buffer grows)."""
    out = {}
    for n in cached:
        stepper = arms.Stepper(engine)
        lane = stepper.session.target.lane
        fill(lane, n, engine.pack.config.vocab_size)
        stepper.ids = [100]
        spent = _timed_sites(engine)
        for turn in range(steps + arms.WARM_UP):
            if turn == arms.WARM_UP:
                stepper.rounds.clear()
                spent["seconds"] = 0.0
            stepper.step()
        scoring = 1000 * spent["seconds"] / steps if lane.host else _recorded_scoring(engine, stepper)
        spent["restore"]()
        out[str(n)] = {
            "step_ms": arms.milliseconds(stepper.rounds), "scoring_ms": None if scoring is None else round(scoring, 4),
            "without_scoring_ms": None if scoring is None else round(1000 * statistics.median(stepper.rounds) - scoring, 4),
            "chunk_peak_bytes": _chunk_peak(engine, stepper, n), "state_bytes": sum(b.nbytes for b in lane.buffers.values()),
            "planned_state_bytes": engine.admission.plan.state(n),
        }  # fmt: skip
    return out


def _recorded_scoring(engine: Engine, stepper: arms.Stepper) -> float | None:
    """Milliseconds of the kernels of one step that score, one after the other; None where steps are not recorded."""
    replay, target = engine.trunk.routes.replay, stepper.session.target
    if replay is None:
        return None
    kernels = replay.ready(target.lane, target.n - 1, 1, True, False).loaded.kernel_seconds()
    return 1000 * sum(seconds for label, (_, seconds) in kernels.items() if label.split()[0] in _SCORING_KERNELS)


def _timed_sites(engine: Engine) -> dict[str, Any]:
    """Wrap the operations that score, where they run at once; `restore` takes the wrappers away."""
    spent: dict[str, Any] = {"seconds": 0.0}
    held = []
    for site in [s for s in sites(engine.trunk, engine.trunk) if s.op in _SCORING] if engine.trunk.routes.host else []:
        inner = site.value

        def timed(*args, inner=inner):
            began = time.perf_counter()
            found = inner(*args)
            spent["seconds"] += time.perf_counter() - began
            return found

        held.append((site, inner))
        setattr(site.owner, site.field, timed)
    spent["restore"] = lambda: [setattr(site.owner, site.field, inner) for site, inner in held]
    return spent


def _chunk_peak(engine: Engine, stepper: arms.Stepper, n: int) -> int:
    """Bytes that one prompt chunk needs at its peak beyond what was held before."""
    target = stepper.session.target
    ids = arms.prompt(engine, engine.prefill_chunk, seed=n)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tracemalloc.start()
    trial = target.rows(ids, logits_from=None)
    numpy_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    target.commit(trial, trial.count)
    return int(numpy_peak + max(0, mx.get_peak_memory() - before))
