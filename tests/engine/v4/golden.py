"""The V4 goldens, and ways to feed a sequence to a trunk.

tests/data/v4: a six-layer pack with logits and streams by transformers (torch, float32) and the other tensors by a float64 NumPy program
that runs a sequence in one piece. The same program made `qat_sim.safetensors` (with the release's rounding, on that pack) and
`pro_layout.safetensors` (on the pack that `tiny.write_pack` makes of seed 5 and the changes in test_goldens.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.lane import Lane
from dsv41chat.engine.target import Target
from dsv41chat.engine.trunk_v4 import TrunkV4

FOLDER = Path(__file__).parents[2] / "data" / "v4"
ATOL = 2e-4


def read_golden() -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in mx.load(str(FOLDER / "goldens.safetensors")).items()}


def as_numpy(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)) if x.dtype == mx.bfloat16 else np.array(x)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def state_of(lane: Lane) -> dict[str, np.ndarray]:
    """What a later row can see, as numpy arrays of equal bits."""
    return {name: as_numpy(v) if isinstance(v, mx.array) else v for name, v in lane.state().items()}


def differing(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    return [name for name in a.keys() | b.keys() if name not in a or name not in b or not same_bits(a[name], b[name])]


def feed(trunk: TrunkV4, ids: Sequence[int], cuts: Sequence[int], target: Target | None = None, seen: Callable[[Target], Any] = lambda t: None):
    """(float32 logits of all rows, target) after calls of the given lengths. seen: called after every commit."""
    target, out = target or Target(trunk), []
    for size in cuts:
        at = target.n
        trial = target.rows(ids[at : at + size])
        out.append(np.array(trial.logits))
        target.commit(trial, trial.count)
        seen(target)
    return np.concatenate(out), target


def even(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


def random_cuts(total: int, rng: random.Random, most: int) -> list[int]:
    cuts: list[int] = []
    while sum(cuts) < total:
        cuts.append(min(rng.randint(1, most), total - sum(cuts)))
    return cuts


class Recorder:
    """Stands before a module and keeps what it gives."""

    def __init__(self, module: Callable, into: dict[str, Any], name: str):
        self._module, self._into, self._name = module, into, name

    def __getattr__(self, name: str):
        return getattr(self._module, name)

    def __call__(self, *args):
        out = self._into[self._name] = self._module(*args)
        return out


def recorded(trunk: TrunkV4) -> tuple[TrunkV4, dict[str, Any]]:
    """The same trunk with the outputs of its modules kept by golden name."""
    seen: dict[str, Any] = {}
    layers = []
    for layer in trunk.layers:
        i = layer.plan.index
        attention = replace(layer.attention)
        if attention.indexer is not None:
            attention = replace(attention, indexer=Recorder(attention.indexer, seen, f"layer{i}.picked"))
        # The golden's output of the attention half is that of its last projection.
        attention.weights = replace(attention.weights)
        attention.weights.output = Recorder(attention.weights.output, seen, f"layer{i}.attn_out")
        moe = replace(layer.moe)
        moe.choose = Recorder(layer.moe.choose, seen, f"layer{i}.route")
        layers.append(
            replace(
                layer,
                attn_mix=Recorder(layer.attn_mix, seen, f"layer{i}.hc"),
                attention=attention,
                moe=Recorder(moe, seen, f"layer{i}.ffn_out"),
            )
        )
    return replace(trunk, layers=layers), seen


def borders(trunk: TrunkV4, length: int) -> list[int]:
    """Positions worth a look: group ends, the window, the ring's wrap, the dense-to-sparse crossing."""
    c = trunk.config
    marks = {1, 4, c.sliding_window, c.ring_rows, 4 * c.index_topk, length}
    marks |= {r * k for r in c.compress_ratios if r > 4 for k in range(1, length // r + 1)}
    return sorted({n + d for n in marks for d in (-1, 0, 1, 4) if 0 < n + d <= length})
