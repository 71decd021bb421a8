"""Softmax pooling of token rows into compressed latents."""

from __future__ import annotations

import mlx.core as mx


def pool_groups(rows: mx.array, ratio: int) -> mx.array:
    """rows float32 [T, 2, D] (value, gate), T a multiple of ratio -> latents float32 [T // ratio, D].

    The softmax runs over the tokens of a group for every channel separately. One expression for one group or many: a running
    fold would sum in another order.
    """
    group = rows.reshape(rows.shape[0] // ratio, ratio, 2, -1)
    return mx.sum(mx.softmax(group[:, :, 1], axis=1, precise=True) * group[:, :, 0], axis=1)
