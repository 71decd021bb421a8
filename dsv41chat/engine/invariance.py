"""Is a row's result the same whatever shares its call? The answer decides where states may be kept and what a resumed turn promises.

Measured once per build, device and MLX version, when the machine is idle; until then the stock route on the CPU, and a route that promises the same,
count as row-invariant (the row contracts of the test suite hold there) and any other route does not.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
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


def measure_rows(engine: Engine, stop: Callable[[], bool] = lambda: False, test: RowsTest | None = None) -> bool | None:
    """Run the self-test and keep its verdict in the engine's facts.

    stop: asked before each forward; None, and nothing is kept, when it says so. test: one that was stopped and goes on.
    """
    verdict = (test or RowsTest(engine.trunk, engine.prefill_chunk)).run(stop)
    if verdict is not None:
        engine.facts[fact_key(engine)] = "yes" if verdict else "no"
    return verdict


class RowsTest:
    """Whether the same tokens give the same logits and the same state in calls of each width as in one call of `chunk` rows.

    The tokens are forwarded in calls of each width in turn; states are compared as bytes.
    """

    def __init__(self, trunk: Trunk, chunk: int = _TOKENS, seed: int = 0):
        self._trunk = trunk
        self._ids = np.random.default_rng(seed).integers(3, trunk.config.vocab_size, max(_TOKENS, min(chunk, 512))).tolist()
        self._want: bytes | None = None
        self._left = list(WIDTHS)

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool | None:
        """The verdict; the first width that differs decides. None: stopped, and the next call goes on with the width that was not finished."""
        if self._want is None:
            self._want = self._forward(len(self._ids), stop)
        while self._want is not None and self._left:
            found = self._forward(self._left[0], stop)
            if found is None:
                return None
            if found != self._want:
                return False
            self._left.pop(0)
        return None if self._want is None else True

    def _forward(self, width: int, stop: Callable[[], bool]) -> bytes | None:
        """Three calls of `width` rows, one of what is left; a digest of the last row's logits and of the lane. None when stopped."""
        ids, target = self._ids, Target(self._trunk)
        cuts = sorted({0, *(min(len(ids) - 1, width * k) for k in range(1, 4)), len(ids)}) if width < len(ids) else [0, len(ids)]
        for a, b in zip(cuts, cuts[1:]):
            if stop():
                return None
            trial = target.rows(ids[a:b], logits_from=b - a - 1)
            target.commit(trial, b - a)
        digest = blake2b(np.array(trial.logits).tobytes())
        for name, value in sorted(target.lane.state().items()):
            if isinstance(value, mx.array):
                digest.update(name.encode())
                digest.update(np.array(value.view(mx.uint8)).tobytes())
        return digest.digest()
