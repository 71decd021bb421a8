"""EXL3 tiles -> values with stock operations, exact on every device.

A 16x16 tile is a ring of 256 * K bits: 8 * K little-endian words, each read from its most significant bit. Position i owns K of
them (with K = a + 1/2 the odd positions own a + 1, the even ones a) and is decoded from the 16 bits that end with its own.
Source: spec: exl3, sections 4 to 7.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from dsv41chat.engine.ops.hadamard import hadamard_matrix

MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
CODEBOOKS = ("3inst", *MULTIPLIERS)
BLOCK = 128
_POSITIONS, _MASK = 256, 0xFFFF


def ends(halves: int) -> np.ndarray:
    """int64 [256]: the bit after the last one that each ring position owns; halves is 2 * K."""
    i = np.arange(_POSITIONS)
    return (i + 1) * (halves // 2) + (halves % 2) * ((i + 1) // 2)


@lru_cache
def table(codebook: str) -> mx.array:
    """float16 [65536]: the value of every state."""
    state = np.arange(1 << 16, dtype=np.uint32)
    if codebook == "mul1":
        x = state * np.uint32(MULTIPLIERS["mul1"])
        total = sum(((x >> np.uint32(8 * b)) & np.uint32(255)).astype(np.float32) for b in range(4))
        return mx.array((total * np.float32(0.00676727294921875) - np.float32(3.453125)).astype(np.float16))
    x = state * np.uint32(89226354) + np.uint32(64248484) if codebook == "3inst" else state * np.uint32(MULTIPLIERS["mcg"])
    halves = ((x & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16).astype(np.float32).reshape(-1, 2)
    return mx.array((halves[:, 0] + halves[:, 1]).astype(np.float16))


def states(words: mx.array, halves: int) -> mx.array:
    """words uint32 [..., 8 * K] -> uint32 [..., 256] in ring order.

    Positions are taken in runs that fill whole words, so every shift is a constant of the run.
    """
    end = ends(halves)
    run = next(n for n in range(1, _POSITIONS + 1) if end[n - 1] % 32 == 0 and _POSITIONS % n == 0)
    span = int(end[run - 1]) // 32
    shape = (*words.shape[:-1], words.shape[-1] // span, span)
    current, before = words.reshape(shape), mx.roll(words, 1, axis=-1).reshape(shape)
    parts = []
    for word in range(span):
        inside = [32 * (word + 1) - int(e) for e in end[:run] if (int(e) - 1) // 32 == word]
        shift = mx.array(np.array(inside, np.uint32))
        w, p = current[..., word : word + 1], before[..., word : word + 1]
        # Twice by at most 31: a shift by 32 is not defined, and none is wanted when the window lies inside one word.
        parts.append(((w >> shift) | ((p << 1) << (31 - shift))) & _MASK)
    return mx.concatenate(parts, axis=-1).reshape(*words.shape[:-1], _POSITIONS)


def _decode(words: mx.array, codebook_values: mx.array, halves: int) -> mx.array:
    rows, columns = words.shape[:2]
    values = codebook_values[states(words, halves)].reshape(rows, columns, 8, 4, 2, 2, 2)
    return mx.transpose(values, (0, 5, 3, 6, 1, 4, 2)).reshape(16 * rows, 16 * columns)


@lru_cache
def _compiled(halves: int):
    return mx.compile(lambda words, values: _decode(words, values, halves))


def rotated(words: mx.array, codebook: str) -> mx.array:
    """words uint32 [in / 16, out / 16, 8 * K] -> float16 [in, out], the matrix between the two rotations."""
    return _compiled(words.shape[-1] // 4)(words, table(codebook))


@lru_cache
def _mix() -> mx.array:
    return mx.array(hadamard_matrix(BLOCK))


def rotate_blocks(x: mx.array) -> mx.array:
    """x float32 [n, C]: every run of 128 channels through the orthonormal Hadamard matrix. Its own inverse."""
    return (x.reshape(x.shape[0], -1, BLOCK) @ _mix()).reshape(x.shape)


def dense(words: mx.array, codebook: str, suh: mx.array, svh: mx.array) -> mx.array:
    """float32 [out, in], as `Linear` has its weight."""
    inner = rotated(words, codebook).astype(mx.float32)
    by_out = rotate_blocks(inner) * svh.astype(mx.float32)
    return rotate_blocks(by_out.T) * suh.astype(mx.float32)


def multiply(x: mx.array, words: mx.array, codebook: str, suh: mx.array, svh: mx.array) -> mx.array:
    """x [n, in] -> float32 [n, out]; products and both rotations in float32."""
    xh = rotate_blocks(x.astype(mx.float32) * suh.astype(mx.float32))
    return rotate_blocks(xh @ rotated(words, codebook).astype(mx.float32)) * svh.astype(mx.float32)
