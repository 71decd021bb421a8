"""RMS norm with the release's epsilon."""

from __future__ import annotations

import mlx.core as mx


def rms(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; statistics and product in float32, cast back to x's dtype.

    weight: [D] float32 or None. eps is 1e-6 for V4, and 1e-20 for V4.1, where it must stay so: a zero row gives 0, a row of size 1e-8
    its unit norm.
    """
    y = x.astype(mx.float32)
    y = y * mx.rsqrt(mx.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y if weight is None else y * weight).astype(x.dtype)
