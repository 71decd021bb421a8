"""The attention core: every row has its own key list of fixed width; one latent is both key and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dsv41chat.engine.ops.select import NEG, counting


def attend_rows(q: mx.array, keys: mx.array, keep_mask: mx.array, sink: mx.array, scale: float) -> mx.array:
    """q [n, H, C], keys [n, K, C], keep_mask [n, K], sink float32 [H] -> float32 [n, H, C].

    The sink adds exp(sink) to the denominator and no value. Scores and softmax in float32. A row always keeps at least its own
    window entry. Rows are a batch axis, so a row's sums do not depend on its neighbours.
    """
    keys = keys.astype(mx.float32)
    score = (q.astype(mx.float32) * scale) @ mx.swapaxes(keys, 1, 2)
    score = mx.where(keep_mask[:, None], score, NEG)
    sink = sink[None, :, None]
    top = mx.maximum(mx.max(score, axis=-1, keepdims=True), sink)
    e = mx.exp(score - top)
    return (e / (mx.sum(e, axis=-1, keepdims=True) + mx.exp(sink - top))) @ keys


def gather_and_attend(core: Callable, weights: Any, q, table, window, slots, present, pool, index, picked) -> mx.array:
    """`core` over window rows in the order of their slots, then pool rows in the order of their index; the weights turn q and its result."""
    keys = window[slots]
    if pool is not None:
        keys = mx.concatenate([keys, pool[index]], axis=1)
        present = mx.concatenate([present, picked], axis=1)
    o = core(weights.turned(q, table), keys, present, weights.sink, weights.head_dim**-0.5)
    return weights.turned_back(o, table, q.dtype)


def index_scores(q: mx.array, weight: mx.array, keys: mx.array, length: mx.array) -> mx.array:
    """sum_h relu(q[h] . key) * weight[h], -inf from `length` on.

    q [n, H, C], weight float32 [n, H] (signed), keys [T, C], length int32 [n, 1] -> float32 [n, T].
    """
    score = mx.maximum(q.astype(mx.float32) @ keys.astype(mx.float32).T[None], 0) * weight[..., None]
    return mx.where(counting(keys.shape[0]) < length, mx.sum(score, axis=1), NEG)
