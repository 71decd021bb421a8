"""Is a row's result the same whatever shares its call? The answer decides where states may be kept and what a resumed turn promises.

Measured once per build, device and MLX version, when the machine is idle; until then the stock route on the CPU, and a route that promises the same,
count as row-invariant (the row contracts of the test suite hold there) and any other route does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from dsv41chat.engine.target import Target
from dsv41chat.engine.trial import Trunk

if TYPE_CHECKING:
    from dsv41chat.engine.engine import Engine

WIDTHS = (*range(1, 10), 63, 64)
_TOKENS = 128


def fact_key(engine: Engine) -> str:
    options = ",".join(f"{name}={value}" for name, value in sorted(engine.numeric_options.items()))
    return f"state_rows.{engine.fingerprint[:16]}.{engine.trunk.dtype}.{engine.device}.{engine.mlx_version}.{engine.prefill_chunk}.{options}"


def rows_verdict(engine: Engine) -> bool:
    found = engine.facts.get(fact_key(engine))
    return _stock_like(engine) if found is None else found == "yes"


def rows_known(engine: Engine) -> bool:
    """Whether the verdict was measured, or needs no measurement."""
    return _stock_like(engine) or fact_key(engine) in engine.facts


def _stock_like(engine: Engine) -> bool:
    return engine.device == "cpu" and engine.trunk.routes.rows_alike


def measure_rows(engine: Engine) -> bool:
    """Run the self-test and keep its verdict in the engine's facts."""
    verdict = not differing_widths(engine.trunk, engine.prefill_chunk)
    engine.facts[fact_key(engine)] = "yes" if verdict else "no"
    return verdict


def differing_widths(trunk: Trunk, chunk: int = _TOKENS, seed: int = 0) -> list[int]:
    """The widths at which the same tokens give other logits or another state than in one call of `chunk` rows.

    The tokens are forwarded in calls of each width in turn; states are compared as bytes.
    """
    count = max(_TOKENS, min(chunk, 512))
    ids = np.random.default_rng(seed).integers(3, trunk.config.vocab_size, count).tolist()
    want = _run(trunk, ids, count)
    return [width for width in WIDTHS if _run(trunk, ids, width) != want]


def _run(trunk: Trunk, ids: list[int], width: int) -> tuple[bytes, ...]:
    """Three calls of `width` rows, one of what is left; the last row's logits and the lane as bytes."""
    target = Target(trunk)
    cuts = sorted({0, *(min(len(ids) - 1, width * k) for k in range(1, 4)), len(ids)}) if width < len(ids) else [0, len(ids)]
    for a, b in zip(cuts, cuts[1:]):
        trial = target.rows(ids[a:b], logits_from=b - a - 1)
        target.commit(trial, b - a)
    state = {name: v for name, v in target.lane.state().items() if isinstance(v, mx.array)}
    return np.array(trial.logits).tobytes(), *(np.array(state[name].view(mx.uint8)).tobytes() for name in sorted(state))
