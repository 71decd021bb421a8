"""The roundings that the model was trained with. Blocks run along the last axis; float32 inside, cast back to x's dtype.

Every result fits bfloat16 exactly. Scales are powers of two found from the bits of a float (a floating log2 is off by one step
at exact powers), or an e4m3 number for the compressed latents.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_DOWN_AT_TIE = (0.25, 1.25, 2.5, 5.0)
_UP_AT_TIE = (0.75, 1.75, 3.5)


def _pow2_ceil(v: mx.array) -> mx.array:
    bits = v.view(mx.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent.astype(mx.uint32) << 23).view(mx.float32)


def _e2m1(v: mx.array) -> mx.array:
    a = mx.abs(v)
    code = sum((a > t).astype(mx.int32) for t in _DOWN_AT_TIE) + sum((a >= t).astype(mx.int32) for t in _UP_AT_TIE)
    y = mx.array(_E2M1)[code]
    return mx.where(v < 0, -y, y)


def _e4m3(v: mx.array) -> mx.array:
    return mx.from_fp8(mx.to_fp8(v), dtype=mx.float32)


def _round_blocks(x: mx.array, size: int, floor: float, scale: Callable, limit: float, code: Callable) -> mx.array:
    width, y = x.shape[-1], x.astype(mx.float32)
    if width % size:
        # A last block that is not full is rounded on its own; zeros do not move its maximum.
        y = mx.pad(y, [(0, 0)] * (x.ndim - 1) + [(0, -width % size)])
    y = y.reshape(*x.shape[:-1], -1, size)
    s = scale(mx.maximum(mx.max(mx.abs(y), axis=-1, keepdims=True), floor))
    return (code(mx.clip(y / s, -limit, limit)) * s).reshape(*x.shape[:-1], -1)[..., :width].astype(x.dtype)


def fp8_ue8m0(x: mx.array) -> mx.array:
    """e4m3 values under a power-of-two scale per 32: window rows, and linear inputs where that option is on."""
    return _round_blocks(x, 32, 1e-4, lambda a: _pow2_ceil(a * mx.array(np.float32(1 / 448))), 448, _e4m3)


def fp4_ue8m0(x: mx.array) -> mx.array:
    """e2m1 values under a power-of-two scale per 32: index queries and index keys."""
    return _round_blocks(x, 32, 6 * 2.0**-126, lambda a: _pow2_ceil(a * mx.array(np.float32(1 / 6))), 6, _e2m1)


def fp4_e4m3(x: mx.array) -> mx.array:
    """e2m1 values under an e4m3 scale per 16: compressed entries."""
    return _round_blocks(x, 16, 6 * 2.0**-9, lambda a: _e4m3(a / 6), 6, _e2m1)


def v4_fp8(x: mx.array, rope_dims: int) -> mx.array:
    """V4 window rows and pooled rows: channels before the rope slice as e4m3 under a power-of-two scale per 64."""
    plain = x[..., : x.shape[-1] - rope_dims]
    return mx.concatenate([_round_blocks(plain, 64, 1e-4, lambda a: _pow2_ceil(a / 448), 448, _e4m3), x[..., x.shape[-1] - rope_dims :]], axis=-1)


def v4_fp4(x: mx.array) -> mx.array:
    """V4 index queries and index rows, after the Hadamard mix: e2m1 under a power-of-two scale per 32."""
    return _round_blocks(x, 32, 6 * 2.0**-126, lambda a: _pow2_ceil(a / 6), 6, _e2m1)
