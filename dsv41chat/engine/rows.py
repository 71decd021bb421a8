"""`Rows`: what all layers of one forward share. Positions, rope tables, ring slots and visibility are made once per call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.engram.fetch import Ticket
from dsv41chat.engine.engram.values import take_host_values, take_values
from dsv41chat.engine.ops.blocks import row_blocks
from dsv41chat.engine.ops.rope import Frequencies, host_table, rope_table
from dsv41chat.engine.plan import LayerPlan, RopeSpec

# Calls of so few rows bring their arrays one by one, longer ones together.
_FEW = 8


def _together(parts: Sequence[np.ndarray]) -> list[mx.array]:
    """float32 arrays, brought to the device in one piece.

    What MLX makes of an array of the host may lie in memory that a device used before; on CUDA this memory is first moved to where the
    host can write, and everything that runs is waited for. Once per call, before its first layer, there is nothing to wait for.
    """
    whole, made, at = mx.array(np.concatenate([a.reshape(-1) for a in parts])), [], 0
    for a in parts:
        # A part of a larger array would be copied again by every kernel that reads it.
        made.append(mx.contiguous(whole[at : at + a.size]).reshape(a.shape))
        at += a.size
    return made


class Rows:
    """n rows at absolute positions start, start + 1, ...; nothing here outlives the forward, above all no selection.

    picked: (index, present) of the newest index source, into its owner's pool. candidates: (index, present) of the
    candidate source, of blocks of entries.
    image [n]: rows of an image span, None where the family has none. host: arrays are numpy's instead of MLX's.
    """

    def __init__(
        self, ids: np.ndarray, start: int, window: int, ring: int, frequencies: Frequencies, image_id: int | None, host: bool = False
    ):
        self.host = host
        self.ids, self.start, self.n = ids, start, len(ids)
        self.window, self.ring = window, ring
        self.positions = start + np.arange(self.n)
        self.frequencies = frequencies
        self._apart = host or self.n <= _FEW
        self._entry_tables: dict[tuple, tuple[Any, Any]] = {}
        if self._apart:
            self.tables = {spec: self.table(spec, self.positions) for spec in frequencies}
            self.image = None if image_id is None else self.array(ids == image_id)
        else:
            self.tables = frequencies.once((start, self.n), self._tables)
            self.image = None if image_id is None else self.tokens == image_id
        self.picked: tuple[Any, Any] | None = None
        self.candidates: tuple[Any, Any] | None = None
        self._lengths: dict[int, Any] = {}

    def array(self, a: np.ndarray) -> Any:
        return a if self.host else mx.array(a)

    def concatenate(self, parts: Sequence[Any], axis: int = 0) -> Any:
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, axis) if self.host else mx.concatenate(list(parts), axis)

    def ring_slots(self, positions: np.ndarray, capacity: int) -> Any:
        """Where consecutive positions lie in a ring: a slice, which is written as one run, or int32 slots where the ring begins anew."""
        slots = (positions % capacity).astype(np.int32)
        return slice(int(slots[0]), int(slots[-1]) + 1) if slots[-1] - slots[0] == len(slots) - 1 else self.array(slots)

    def table(self, spec: RopeSpec, positions: np.ndarray) -> tuple[Any, Any]:
        """Rope table of any positions."""
        return (host_table if self.host else rope_table)(self.frequencies[spec], positions)

    def _tables(self) -> dict[RopeSpec, tuple[mx.array, mx.array]]:
        """Those of all layers, for a long call."""
        made = iter(_together([a for f in self.frequencies.values() for a in host_table(f, self.positions)]))
        return {spec: (next(made), next(made)) for spec in self.frequencies}

    @cached_property
    def tokens(self) -> Any:
        """int32 [n]: the token ids."""
        return self.array(self.ids.astype(np.int32))

    def table_rows(self, ticket: Ticket, slot: int, dtype: mx.Dtype) -> Any:
        """Values [n, width] of a slot's n-gram rows, waited for."""
        return take_host_values(ticket, slot) if self.host else take_values(ticket, slot).astype(dtype)

    def row_blocks(self, row_bytes: int) -> Iterator[slice]:
        """Cuts of the rows, of which each needs `row_bytes`; see `ops.blocks`."""
        return row_blocks(self.n, row_bytes, self.host)

    @staticmethod
    def entry_positions(first: int, count: int, ratio: int) -> np.ndarray:
        """A group is rotated at the position of its first token."""
        return (first + np.arange(count)) * ratio

    def entry_table(self, layer: LayerPlan, first: int, last: int) -> tuple[Any, Any]:
        """Rope table of entries [first, last) of a layer."""
        key = layer.rope, layer.ratio, first, last
        if key not in self._entry_tables:
            self._entry_tables[key] = self._entry_table(layer.rope, self.entry_positions(first, last - first, layer.ratio))
        return self._entry_tables[key]

    def _entry_table(self, spec: RopeSpec, positions: np.ndarray) -> tuple[Any, Any]:
        """Rows of this call's own table where the positions are those of every so many rows."""
        at = (positions - self.start).astype(np.int64)
        step = int(at[1] - at[0]) if len(at) > 1 else 1
        if self._apart or not len(at) or at[0] < 0 or at[-1] >= self.n or step < 1 or (np.diff(at) != step).any():
            return self.table(spec, positions)
        part = slice(int(at[0]), int(at[-1]) + 1, step)
        make = lambda: tuple(mx.contiguous(a[part]) for a in self.tables[spec])
        return self.frequencies.once((spec, self.start + part.start, self.start + part.stop, step), make)

    def counted(self, first: int, ratio: int, rest: bool = False) -> Any:
        """int32 [n]: `first`, first + 1, ... by `ratio`, whole or what is left."""
        if not self._apart:
            return counted(first, self.n, ratio, rest)
        numbers = first + np.arange(self.n)
        return self.array((numbers % ratio if rest else numbers // ratio).astype(np.int32))

    def group_slots(self, ratio: int, capacity: int) -> Any:
        """int32 [groups * ratio]: where the tokens of the groups that these rows complete lie in a ring of raw rows."""
        tokens = np.arange(self.start // ratio * ratio, self.last_length(ratio) * ratio)
        return self.array((tokens % capacity).astype(np.int32))

    def length(self, ratio: int) -> Any:
        """int32 [n, 1]: entries visible to each row, the group that closes at the row included."""
        if ratio not in self._lengths:
            self._lengths[ratio] = self.counted(self.start + 1, ratio)[:, None]
        return self._lengths[ratio]

    def last_length(self, ratio: int) -> int:
        return (self.start + self.n) // ratio

    @cached_property
    def blocks(self) -> list[tuple[slice, Any, Any, Any]]:
        """(rows, write slots as `ring_slots`, window slots [b, W], present [b, W]) for blocks of at most ring - W rows.

        A block is written to the ring before it is read, so one gather serves one row and many, always W slots wide in
        chronological order, absent ones masked in front. Longer blocks would overwrite rows that they still have to see.
        """
        out = []
        for a in range(0, self.n, self.ring - self.window):
            part = slice(a, min(self.n, a + self.ring - self.window))
            at = self.positions[part, None] + np.arange(1 - self.window, 1)
            write = self.ring_slots(self.positions[part], self.ring)
            out.append((part, write, self.array((np.maximum(at, 0) % self.ring).astype(np.int32)), self.array(at >= 0)))
        return out

    @property
    def fits(self) -> bool:
        """Whether all rows can lie in a ring at once, beside the windows that they see."""
        return self.n <= self.ring - self.window

    @property
    def run(self) -> tuple[int, mx.array, mx.array]:
        """(how many of the rows before it it sees, window slots int32 [n, W] into those rows with all of its own behind them, present [n, W])
        for a call that does not fit a ring, on a device."""
        before = min(self.start, self.window - 1)
        return before, *run_windows(before, self.n, self.window)


@lru_cache(maxsize=4)
def run_windows(before: int, n: int, window: int) -> tuple[mx.array, mx.array]:
    """(slots int32 [n, window], present) of `Rows.run`: the same ones in every layer, and in most chunks of a prompt."""
    slots = mx.arange(n, dtype=mx.int32)[:, None] + mx.arange(before + 1 - window, before + 1, dtype=mx.int32)
    return mx.maximum(slots, 0), slots >= 0


@lru_cache(maxsize=16)
def counted(first: int, n: int, ratio: int, rest: bool) -> mx.array:
    """int32 [n]: `first`, first + 1, ... by `ratio`, whole or what is left, counted on the device; every prompt begins with the same ones."""
    numbers = mx.arange(first, first + n, dtype=mx.int32)
    return numbers % ratio if rest else numbers // ratio
