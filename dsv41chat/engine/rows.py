"""`Rows`: what all layers of one forward share. Positions, rope tables, ring slots and visibility are made once per call."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx
import numpy as np

from dsv41chat.engine.ops.rope import rope_table
from dsv41chat.engine.plan import RopeSpec


class Rows:
    """n rows at absolute positions start, start + 1, ...; nothing here outlives the forward, above all no selection.

    picked: (index, present) of the newest index source, into its owner's pool. candidates: mask of the candidate source.
    image [n]: rows of an image span, None where the family has none.
    """

    def __init__(self, ids: np.ndarray, start: int, window: int, ring: int, frequencies: dict[RopeSpec, np.ndarray], image_id: int | None):
        self.ids, self.start, self.n = ids, start, len(ids)
        self.window, self.ring = window, ring
        self.positions = start + np.arange(self.n)
        self.tables = {spec: rope_table(f, self.positions) for spec, f in frequencies.items()}
        self.frequencies = frequencies
        self.image = None if image_id is None else mx.array(ids == image_id)
        self.picked: tuple[mx.array, mx.array] | None = None
        self.candidates: mx.array | None = None
        self._lengths: dict[int, mx.array] = {}

    def length(self, ratio: int) -> mx.array:
        """int32 [n, 1]: entries visible to each row, the group that closes at the row included."""
        if ratio not in self._lengths:
            self._lengths[ratio] = mx.array(((self.positions + 1) // ratio).astype(np.int32))[:, None]
        return self._lengths[ratio]

    def last_length(self, ratio: int) -> int:
        return (self.start + self.n) // ratio

    @cached_property
    def blocks(self) -> list[tuple[slice, mx.array, mx.array, mx.array]]:
        """(rows, write slots [b], window slots [b, W], present [b, W]) for blocks of at most ring - W rows.

        A block is written to the ring before it is read, so one gather serves one row and many, always W slots wide in
        chronological order, absent ones masked in front. Longer blocks would overwrite rows that they still have to see.
        """
        out = []
        for a in range(0, self.n, self.ring - self.window):
            part = slice(a, min(self.n, a + self.ring - self.window))
            at = self.positions[part, None] + np.arange(1 - self.window, 1)
            write = mx.array((self.positions[part] % self.ring).astype(np.int32))
            out.append((part, write, mx.array((np.maximum(at, 0) % self.ring).astype(np.int32)), mx.array(at >= 0)))
        return out
