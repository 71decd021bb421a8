"""Blocks of rows: what a call needs at its peak is bounded by its rows, however long the context is.

Rows are independent of each other, so a cut between them changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

# What a block may need, per row of its call, and what any block may need. On the host, where a block costs no launches, what fits a cache.
ROW_BYTES, LEAST_BYTES, HOST_BYTES = 256 << 10, 32 << 20, 8 << 20


def row_blocks(n: int, row_bytes: int, host: bool = False) -> Iterator[slice]:
    """Cut n rows of which each needs `row_bytes`; a row that needs more than there is makes a block of its own."""
    bound = HOST_BYTES if host else max(LEAST_BYTES, n * ROW_BYTES)
    step = max(1, bound // max(row_bytes, 1))
    for a in range(0, n, step):
        yield slice(a, min(n, a + step))


def after(value: Any, *earlier: Any) -> Any:
    """`value`, which an evaluation takes up only when all of `earlier` are done; else blocks would be computed side by side and need their
    memory together. None among them counts as done; of numpy nothing is put off."""
    waits = [a for a in earlier if isinstance(a, mx.array)]
    return mx.depends([value], waits)[0] if waits and isinstance(value, mx.array) else value
