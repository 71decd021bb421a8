"""Choosing the k best as a set: higher score first, then the smaller index, then ascending order.

The order that a library's top-k returns depends on the width of its input and so on the call; a threshold, ties by index and an
ascending list give every row the same bits whether it runs alone or among many.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

NEG = -float("inf")
_ABSENT = 2**30


@lru_cache(maxsize=64)
def counting(width: int) -> mx.array:
    """int32 [1, width]: 0, 1, 2, ... A constant, so it is no part of a step's graph."""
    return mx.array(np.arange(width, dtype=np.int32)[None])


def best_mask(score: mx.array, k: int) -> mx.array:
    """Boolean mask of the k best entries of each row of score [n, T]; ties go to the smaller index; -inf is never taken."""
    width, seen = score.shape[-1], score > NEG
    if width <= k:
        return seen
    kth = mx.sort(score, axis=-1)[..., width - k : width - k + 1]
    above, tie = score > kth, (score == kth) & seen
    room = k - mx.sum(above, axis=-1, keepdims=True)
    return above | (tie & (mx.cumsum(tie.astype(mx.int32), axis=-1) <= room))


def ascending(mask: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """mask [n, T] with at most k set per row -> (index int32 [n, k] ascending, present [n, k]); absent slots last, index 0."""
    n, width = mask.shape
    index = mx.where(mask, counting(width), _ABSENT)
    if width < k:
        index = mx.concatenate([index, mx.full((n, k - width), _ABSENT, dtype=index.dtype)], axis=1)
    index = mx.sort(index, axis=-1)[:, :k]
    present = index < _ABSENT
    return mx.where(present, index, 0), present


def first_visible(length: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Selection of rows that see at most k entries: all of them. length int32 [n, 1] -> (index [n, k], present [n, k])."""
    slots = counting(k)
    present = slots < length
    return mx.where(present, slots, 0), present


def candidate_mask(score: mx.array, length: mx.array, block: int, blocks: int) -> mx.array:
    """Entries of the `blocks` best blocks of each row.

    score [n, T] with -inf where invisible, T a multiple of `block`; length [n, 1] visible entries. A block's score is its best
    entry's; the block that holds the newest visible entry is always kept (none while length is 0).
    """
    n = score.shape[0]
    top = mx.max(score.reshape(n, -1, block), axis=-1)
    newest = (mx.arange(top.shape[1])[None] == (length - 1) // block) & (length > 0)
    return mx.repeat(best_mask(mx.where(newest, float("inf"), top), blocks), block, axis=1)
