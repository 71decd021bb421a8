"""A small cache of packed rows, for reads that leave nothing in the page cache."""

from __future__ import annotations

import numpy as np

FEW = 512


class RowCache:
    """Up to `capacity` rows of `row_bytes` (all regions, one after another); eviction by a clock hand. Not thread-safe."""

    def __init__(self, capacity: int, row_bytes: int):
        self.rows = np.empty((capacity, row_bytes), np.uint8)
        self.ids = np.full(capacity, -1, np.int64)
        self._used = np.zeros(capacity, bool)
        self._slots: dict[int, int] = {}
        self._hand = 0
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Slots of distinct ids (int64 [n]); -1 where a row is not here. Marks the found ones as used."""
        if len(ids) <= FEW:
            slots = np.array([self._slots.get(row, -1) for row in ids.tolist()], np.int64)
        else:
            if self._sorted is None:
                order = np.argsort(self.ids, kind="stable")
                self._sorted = self.ids[order], order
            known, order = self._sorted
            at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
            slots = np.where(known[at] == ids, order[at], -1)
        self._used[slots[slots >= 0]] = True
        return slots

    def insert(self, ids: np.ndarray, regions: tuple[np.ndarray, ...]) -> None:
        """Keep rows: distinct int64 [n] ids that are not here, and one uint8 [n, row_bytes] array per region."""
        capacity = len(self.ids)
        ids, regions = ids[-capacity:], tuple(region[-capacity:] for region in regions)
        slots = np.array([self._evict() for _ in range(len(ids))], np.int64)
        for row, slot in zip(ids.tolist(), slots.tolist()):
            self._slots[row] = slot
        self.ids[slots] = ids
        column = 0
        for region in regions:
            self.rows[slots, column : column + region.shape[1]] = region
            column += region.shape[1]
        self._sorted = None

    def _evict(self) -> int:
        used, capacity = self._used, len(self.ids)
        while used[self._hand]:
            used[self._hand] = False
            self._hand = (self._hand + 1) % capacity
        slot = self._hand
        used[slot] = True  # a second round clears this before it evicts, so one insert never takes a slot twice
        self._hand = (self._hand + 1) % capacity
        self._slots.pop(int(self.ids[slot]), None)
        return slot
