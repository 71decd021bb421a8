"""The attention core: every row has its own key list of fixed width; one latent is both key and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dsv41chat.engine.ops.blocks import after, row_blocks
from dsv41chat.engine.ops.select import NEG, counting

# Keys of one tile of index scores; at fixed places, so that a row's tiles do not depend on its call.
KEY_TILE = 4096


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
    entries = 0 if pool is None else index.shape[1]
    parts = []
    # A row's keys as they are stored and in float32.
    for part in row_blocks(q.shape[0], 8 * (slots.shape[1] + entries) * window.shape[1]):
        last = parts[-1] if parts else None
        keys, keep, turn = window[after(slots[part], last)], present[part], (table[0][part], table[1][part])
        if pool is not None:
            keys = mx.concatenate([keys, pool[after(index[part], last)]], axis=1)
            keep = mx.concatenate([keep, picked[part]], axis=1)
        o = core(weights.turned(after(q[part], last), turn), keys, keep, weights.sink, weights.head_dim**-0.5)
        parts.append(weights.turned_back(o, turn, q.dtype))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def index_scores(q: mx.array, weight: mx.array, keys: mx.array, length: mx.array) -> mx.array:
    """sum_h relu(q[h] . key) * weight[h], -inf from `length` on.

    q [n, H, C], weight float32 [n, H] (signed), keys [T, C], length int32 [n, 1] -> float32 [n, T].
    """
    total, last = keys.shape[0], None
    wide, weight, rows = q.astype(mx.float32), weight[..., None], []
    for part in row_blocks(q.shape[0], 4 * q.shape[1] * min(total, KEY_TILE)):
        tiles = []
        for a in range(0, total, KEY_TILE):
            tile = after(keys if total <= KEY_TILE else keys[a : a + KEY_TILE], last).astype(mx.float32)
            last = mx.sum(mx.maximum(wide[part] @ tile.T[None], 0) * weight[part], axis=1)
            tiles.append(last)
        rows.append(tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=1))
    score = rows[0] if len(rows) == 1 else mx.concatenate(rows)
    return mx.where(counting(total) < length, score, NEG)
