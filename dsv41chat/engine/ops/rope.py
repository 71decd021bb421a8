"""Rotary positions: frequencies with optional YaRN, host tables, rotation of the last channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.plan import RopeSpec

# Of 2,048 positions the tables of two specs are a megabyte.
_KEPT_TABLES = 16
_FORTH, _BACK = np.array([-1, 1], np.float32), np.array([1, -1], np.float32)


def inverse_frequencies(spec: RopeSpec) -> np.ndarray:
    """float32 [dims / 2]. YaRN blends f / factor into f between the two beta bounds; there is no attention factor."""
    d, theta = spec.dims, float(spec.base)
    inv = theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
    if spec.yarn is not None:
        y = spec.yarn
        bound = lambda turns: d * math.log(y.original / (2 * math.pi * turns)) / (2 * math.log(theta))
        low, high = max(math.floor(bound(y.beta_fast)), 0), min(math.ceil(bound(y.beta_slow)), d - 1)
        ramp = np.clip((np.arange(d // 2) - low) / max(high - low, 1e-3), 0, 1)
        inv = inv / y.factor * ramp + inv * (1 - ramp)
    return inv.astype(np.float32)


class Frequencies(dict[RopeSpec, np.ndarray]):
    """By spec its `inverse_frequencies`; and what was last made of them for long calls. The cosines of two thousand positions take the host
    milliseconds in which a device waits, and the same positions come again: prompts begin at 0, and their chunks end on a grid."""

    def __init__(self, by_spec: Mapping[RopeSpec, np.ndarray]):
        super().__init__(by_spec)
        self._made: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gave for this key, while it is among those used last."""
        found = self._made.pop(key) if key in self._made else make()
        self._made[key] = found
        if len(self._made) > _KEPT_TABLES:
            del self._made[next(iter(self._made))]
        return found


def rope_table(frequencies: np.ndarray, positions: np.ndarray) -> tuple[mx.array, mx.array]:
    """`host_table` as MLX arrays."""
    cos, sin = host_table(frequencies, positions)
    return mx.array(cos), mx.array(sin)


def host_table(frequencies: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), each float32 [n, dims / 2], for absolute positions [n].

    The phase is a float32 product; its cosine and sine are taken in float64 on the host, because fast GPU trigonometry drifts
    at long positions and a drift flips FP4 codes.
    """
    phase = (np.asarray(positions, np.float32)[:, None] * frequencies).astype(np.float64)
    return np.cos(phase).astype(np.float32), np.sin(phase).astype(np.float32)


def rotate(x: mx.array, table: tuple[mx.array, mx.array], inverse: bool = False) -> mx.array:
    """Rotate adjacent pairs of the last `dims` channels of x [n, ..., C] by table row i for row i; float32 inside, cast back."""
    cos, sin = table
    dims, half = 2 * cos.shape[-1], cos.shape[-1]
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (half, 1)
    head, tail = x[..., : x.shape[-1] - dims], x[..., x.shape[-1] - dims :].astype(mx.float32)
    pairs = tail.reshape(*tail.shape[:-1], half, 2)
    # a cos - b sin beside a sin + b cos: each pair, and the pair the other way round times a sine with two signs.
    turned = pairs * cos.reshape(shape) + pairs[..., ::-1] * (sin.reshape(shape) * mx.array(_BACK if inverse else _FORTH))
    return mx.concatenate([head, turned.reshape(tail.shape).astype(x.dtype)], axis=-1)
