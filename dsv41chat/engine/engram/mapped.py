"""Table rows straight from a mapping of the shard: the plain reader, one page fault after the other."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import EngramReadError
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.release import E4M3, ue8m0


class MappedTables:
    """tables: (rows e4m3 [rows, width], scales ue8m0 [rows, width / 32]) per engram layer. Never an mx.array."""

    def __init__(self, tables: list[tuple[TensorRef, TensorRef]]):
        self._views = [(weight.bytes(), scale.bytes()) for weight, scale in tables]
        self._names = [weight.name for weight, _ in tables]
        self._rows = self._bytes = 0

    def counters(self) -> dict[str, int]:
        """Rows and bytes read so far. A plain mapping cannot tell cold rows from warm ones."""
        return {"cold_rows": 0, "warm_rows": self._rows, "bytes_read": self._bytes}

    def values(self, slot: int, rows: np.ndarray) -> mx.array:
        """rows int64 [n, columns] -> bfloat16 [n, columns * width]. Raises EngramReadError for an address outside the table."""
        weight, scale = self._views[slot]
        if rows.size and not (0 <= rows.min() and rows.max() < len(weight)):
            raise EngramReadError(f"{self._names[slot]}: row {int(rows.min())}..{int(rows.max())} of {len(weight):,} rows was asked for")
        self._rows += rows.size
        self._bytes += rows.size * (weight.shape[1] + scale.shape[1])
        values = E4M3[weight[rows]] * np.repeat(ue8m0(scale[rows]), 32, -1)
        return mx.array(values.reshape(len(rows), -1)).astype(mx.bfloat16)
