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
# The widest constant that is kept.
_KEPT = 4096
# Bytes per entry of a row while the best are chosen: the scores, their sorted copy, masks, counts and indices.
CHOICE_BYTES = 24


def counting(width: int) -> mx.array:
    """int32 [1, width]: 0, 1, 2, ... A constant, so it is no part of a step's graph; long ones are made anew, nothing of them is kept."""
    return _counting(width) if width <= _KEPT else mx.arange(width, dtype=mx.int32)[None]


@lru_cache(maxsize=64)
def _counting(width: int) -> mx.array:
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


def best_blocks(score: mx.array, length: mx.array, block: int, blocks: int) -> tuple[mx.array, mx.array]:
    """The `blocks` best blocks of each row: (index int32 [n, slots] ascending, present [n, slots]), slots of them or of all there are.

    score [n, T] with -inf where invisible, T a multiple of `block`; length [n, 1] visible entries. A block's score is its best
    entry's; the block that holds the newest visible entry is always kept (none while length is 0). A list and no mask, because it
    outlives its call: a mask would grow with the context.
    """
    top = mx.max(score.reshape(score.shape[0], -1, block), axis=-1)
    newest = (counting(top.shape[1]) == (length - 1) // block) & (length > 0)
    best = best_mask(mx.where(newest, float("inf"), top), blocks)
    return ascending(best, min(blocks, top.shape[1]))


def inside_blocks(score: mx.array, chosen: tuple[mx.array, mx.array], block: int) -> mx.array:
    """score [n, T] with -inf outside the chosen blocks, `best_blocks` of the same rows."""
    index, present = chosen
    n, total = score.shape[0], score.shape[1] // block
    # Slots without a block write behind the last one.
    mask = mx.put_along_axis(mx.zeros((n, total + 1), dtype=mx.bool_), mx.where(present, index, total), mx.array(True), axis=1)
    return mx.where(mask[:, :total, None], score.reshape(n, total, block), NEG).reshape(score.shape)
