"""Rotary positions: frequencies with optional YaRN, host tables, rotation of the last channels."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from dsv41chat.engine.plan import RopeSpec


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


def rope_table(frequencies: np.ndarray, positions: np.ndarray) -> tuple[mx.array, mx.array]:
    """(cos, sin), each float32 [n, dims / 2], for absolute positions [n].

    The phase is a float32 product; its cosine and sine are taken in float64 on the host, because fast GPU trigonometry drifts
    at long positions and a drift flips FP4 codes.
    """
    phase = (np.asarray(positions, np.float32)[:, None] * frequencies).astype(np.float64)
    return mx.array(np.cos(phase).astype(np.float32)), mx.array(np.sin(phase).astype(np.float32))


def rotate(x: mx.array, table: tuple[mx.array, mx.array], inverse: bool = False) -> mx.array:
    """Rotate adjacent pairs of the last `dims` channels of x [n, ..., C] by table row i for row i; float32 inside, cast back."""
    cos, sin = table
    dims = 2 * cos.shape[-1]
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (dims // 2,)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    sin = -sin if inverse else sin
    head, tail = x[..., : x.shape[-1] - dims], x[..., x.shape[-1] - dims :].astype(mx.float32)
    a, b = tail[..., 0::2], tail[..., 1::2]
    tail = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(tail.shape)
    return mx.concatenate([head, tail.astype(x.dtype)], axis=-1)
