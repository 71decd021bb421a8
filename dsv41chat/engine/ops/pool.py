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


def raw_rows(value: mx.array, gate: mx.array, ape: mx.array, places: mx.array) -> mx.array:
    """value, gate float32 [n, C], ape [ratio, C], places int32 [n] in their groups -> [n, 2, C] (value, gate plus its place's bias).

    The bias follows the absolute position, so a row is the same wherever its call started.
    """
    return mx.concatenate([value, gate + ape[places]], axis=-1).reshape(value.shape[0], 2, -1)


def pool_overlapping(rows: mx.array, ratio: int, first: bool) -> mx.array:
    """rows float32 [T, 2, 2 * D], T a multiple of ratio -> latents float32 [T // ratio (- 1 unless first), D].

    A group pools the first D channels of the group before it and the second D channels of its own tokens, in one softmax per
    channel. first: rows begin with group 0, which has no group before it (value 0, gate -inf); else their first group only lends.
    """
    group = rows.reshape(rows.shape[0] // ratio, ratio, 2, -1)
    width = group.shape[-1] // 2
    before, own = group[:-1, ..., :width], group[..., width:]
    if first:
        none = mx.stack([mx.zeros((ratio, width)), mx.full((ratio, width), -float("inf"))], axis=1)
        before = mx.concatenate([none[None], before])
    else:
        own = own[1:]
    slots = mx.concatenate([before, own], axis=1)
    return mx.sum(mx.softmax(slots[:, :, 1], axis=1, precise=True) * slots[:, :, 0], axis=1)
