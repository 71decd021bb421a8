"""`RowsV4`: what the layers of one V4 forward share beyond positions: group borders, ring slots of the compressors, attention tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.ops.rope import Frequencies
from dsv41chat.engine.plan import LayerPlan
from dsv41chat.engine.rows import Rows

# Key lists grow in steps of this many entries, so that no live key falls into a ragged vector tail.
SLOT_UNIT = 16
# How often, in tokens, a key list may get wider; a step is at least SLOT_UNIT entries.
_STEP_TOKENS = 256


def slots_for(count: int) -> int:
    """`count` entries, rounded up to whole slots."""
    return -(-count // SLOT_UNIT) * SLOT_UNIT


@dataclass(frozen=True)
class GroupBlock:
    """Rows `part` of a call: where they lie in their ring (`Rows.ring_slots`), and the groups [first, last) that they complete with the
    ring slots of all raw rows that these pool (None without a group)."""

    part: slice
    write: slice | mx.array
    first: int
    last: int
    read: mx.array | None


@dataclass(frozen=True)
class GroupRun:
    """Of a whole call: the groups [first, last) that it completes, how many raw rows before the call these pool, and how many with those of the
    call."""

    first: int
    last: int
    before: int
    pooled: int


class RowsV4(Rows):
    """n rows at absolute positions start, start + 1, ..."""

    def __init__(self, ids: np.ndarray, start: int, window: int, ring: int, frequencies: Frequencies, host: bool = False):
        super().__init__(ids, start, window, ring, frequencies, None, host)
        self._places: dict[int, mx.array] = {}
        self._made: dict[tuple, Any] = {}
        self._groups: dict[tuple[int, bool, int], list[GroupBlock]] = {}

    def once(self, key: tuple, make: Callable[[], Any]) -> Any:
        """What `make` gives, made by the first layer that asks."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def places(self, ratio: int) -> mx.array:
        """int32 [n]: the place of each row in its group of `ratio` tokens."""
        if ratio not in self._places:
            self._places[ratio] = self.counted(self.start % ratio, ratio, rest=True)
        return self._places[ratio]

    def group_blocks(self, layer: LayerPlan, capacity: int) -> list[GroupBlock]:
        """Blocks of at most ring - W rows for a raw ring of `capacity` slots, which then still holds every open group."""
        key = layer.ratio, layer.overlap, capacity
        if key not in self._groups:
            self._groups[key] = [self._group_block(layer, capacity, part) for part, *_ in self.blocks]
        return self._groups[key]

    def _group_block(self, layer: LayerPlan, capacity: int, part: slice) -> GroupBlock:
        slots = lambda positions: self.array((positions % capacity).astype(np.int32))
        first, last = (self.start + part.start) // layer.ratio, (self.start + part.stop) // layer.ratio
        read = None
        if last > first:
            lead = 1 if layer.overlap and first > 0 else 0
            read = slots(np.arange((first - lead) * layer.ratio, last * layer.ratio))
        return GroupBlock(part, self.ring_slots(self.positions[part], capacity), first, last, read)

    def group_run(self, layer: LayerPlan) -> GroupRun:
        """What `group_blocks` is for a call that does not fit a ring."""
        first, last = self.start // layer.ratio, self.last_length(layer.ratio)
        begin = (first - (1 if layer.overlap and first > 0 else 0)) * layer.ratio
        return GroupRun(first, last, self.start - begin, last * layer.ratio - begin)

    def widest(self, part: slice, ratio: int, most: int | None) -> int:
        """Entry slots of the last of `tiles`, which no other has more of."""
        if not ratio:
            return 0
        step = slots_for(max(1, _STEP_TOKENS // ratio))
        width = -(-((self.start + part.stop) // ratio) // step) * step
        return width if most is None else min(width, slots_for(most))

    def tiles(self, part: slice, ratio: int, most: int | None) -> list[tuple[slice, int]]:
        """(rows, entry slots) of attention tiles inside `part`: all rows of a tile have key lists of one width.

        The width follows from a row's own position: its visible entries in steps, at most `most` (None: no limit). So a row's
        list has the same shape alone and among others.
        """
        seen = (self.positions[part] + 1) // ratio if ratio else np.zeros(part.stop - part.start, np.int64)
        step = slots_for(max(1, _STEP_TOKENS // ratio)) if ratio else 1
        widths = -(-seen // step) * step
        widths = widths if most is None else np.minimum(widths, slots_for(most))
        out, a = [], 0
        while a < len(widths):
            width = int(widths[a])
            b = a + int(np.argmin(np.append(widths[a:] == width, False)))
            out.append((slice(part.start + a, part.start + b), width))
            a = b
        return out
