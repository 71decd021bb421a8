"""The orthonormal Walsh-Hadamard mix of the V4 index channels."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def hadamard_matrix(size: int) -> np.ndarray:
    """float32 [size, size], symmetric and orthonormal: entry (i, j) is (-1)**popcount(i & j) / sqrt(size). size: a power of two."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)


def hadamard(x: mx.array, matrix: mx.array) -> mx.array:
    """x [..., C] @ matrix in float32, cast back. On both sides of a dot product it changes nothing but what is rounded after it.

    A product and not the library's transform, which not every back end has.
    """
    return (x.astype(mx.float32) @ matrix).astype(x.dtype)
