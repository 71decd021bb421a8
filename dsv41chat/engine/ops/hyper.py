"""Hyper-connections: S residual streams, mixed by coefficients that the streams themselves give. Everything in float32."""

from __future__ import annotations

import mlx.core as mx

from dsv41chat.engine.ops.norm import rms


def mixes(
    h: mx.array, fn_columns: mx.array, base: mx.array, scale: mx.array, *, iterations: int, eps: float, norm_eps: float
) -> tuple[mx.array, mx.array, mx.array]:
    """Coefficients of one sublayer from the streams that enter it.

    h [n, S, D]; fn_columns [S*D, 2S + S*S], base [2S + S*S], scale [3], or `by_column` of it, float32. Returns pre [n, S], post [n, S] and
    comb [n, S (summed), S], float32. `iterations` counts column passes; the last operation is a column normalisation.
    """
    n, s, _ = h.shape
    m = rms(h.astype(mx.float32).reshape(n, -1), None, norm_eps) @ fn_columns
    m = m * (scale if scale.shape == base.shape else by_column(scale, s)) + base
    pre, post, comb = mx.split(m, [s, 2 * s], axis=-1)
    pre, post, comb = mx.sigmoid(pre) + eps, 2 * mx.sigmoid(post), comb.reshape(n, s, s)
    return pre, post, sinkhorn(mx.softmax(comb, axis=-1, precise=True) + eps, iterations, eps)


def by_column(scale: mx.array, streams: int) -> mx.array:
    """scale [3] of pre, post and comb -> [2S + S*S], one for every column of the mix."""
    return mx.concatenate([mx.broadcast_to(scale[i], (width,)) for i, width in enumerate((streams, streams, streams * streams))])


def sinkhorn(comb: mx.array, iterations: int, eps: float) -> mx.array:
    """comb [n, S, S] positive -> columns (axis 1), then rows and columns in turn; ends on columns, so only these sum to 1."""
    comb = comb / (mx.sum(comb, axis=1, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (mx.sum(comb, axis=2, keepdims=True) + eps)
        comb = comb / (mx.sum(comb, axis=1, keepdims=True) + eps)
    return comb


def head_weights(h: mx.array, fn_columns: mx.array, base: mx.array, scale: mx.array, *, eps: float, norm_eps: float) -> mx.array:
    """Coefficients of the last collapse of the V4 family: h [n, S, D]; fn_columns [S*D, S], base [S], scale [1] -> float32 [n, S]."""
    m = rms(h.astype(mx.float32).reshape(h.shape[0], -1), None, norm_eps) @ fn_columns
    return mx.sigmoid(m * scale + base) + eps


def collapse(h: mx.array, pre: mx.array) -> mx.array:
    """sum_k pre[k] * h[k]: [n, S, D], [n, S] -> [n, D] in h's dtype. Multiplied, then summed: never a bfloat16 matmul."""
    return mx.sum(pre[..., None] * h.astype(mx.float32), axis=1).astype(h.dtype)


def expand(y: mx.array, h: mx.array, post: mx.array, comb: mx.array) -> mx.array:
    """out[k] = post[k] * y + sum_j comb[j, k] * h[j]: y [n, D], h [n, S, D] -> [n, S, D]. h is indexed by the summed axis."""
    mixed = mx.sum(comb[..., None] * h.astype(mx.float32)[:, :, None, :], axis=1)
    return (post[..., None] * y.astype(mx.float32)[:, None, :] + mixed).astype(h.dtype)
