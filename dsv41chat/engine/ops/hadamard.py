"""The orthonormal Walsh-Hadamard mix of the V4 index channels."""

from __future__ import annotations

import numpy as np


def hadamard_matrix(size: int) -> np.ndarray:
    """float32 [size, size], symmetric and orthonormal: entry (i, j) is (-1)**popcount(i & j) / sqrt(size). size: a power of two.

    Applied as a product, like any matrix: not every back end has the library's transform, and row checks see it.
    On both sides of a dot product it changes nothing but what is rounded after it.
    """
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)
