"""What a trunk needs beside its layers to be run with places: rows whose numbers come with every step, and a lane of places.

A recorded step serves every position at which the trunk would take the same way; what differs then are numbers, and each of them is a
field of the block that a step brings with it. Two positions take the same way when their `form` is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels.glue import Scatter
from dsv41chat.engine.kernels.recorder import BORDER, Memory, Place, Recorder
from dsv41chat.engine.lane import Lane, PoolSpec
from dsv41chat.engine.plan import LayerPlan, RopeSpec
from dsv41chat.engine.rows import Rows
from dsv41chat.engine.rows_v4 import GroupBlock, RowsV4, slots_for

_NUMPY = {mx.int32: np.int32, mx.float32: np.float32, mx.bool_: np.bool_, mx.bfloat16: np.uint16}


class Given:
    """The block that a step brings with it, as it is laid out while a step is recorded. tables: byte and shape of the values of each slot of
    n-gram rows, which are bfloat16. fills: (places, what makes their numbers from the rows of a step). of_ids: (place, what makes its numbers
    from the ids of a step): all else of a step of the trunk follows from its position."""

    def __init__(self, candidate_block: int = 1):
        self.memory, self.candidate_block = Memory("given", 0), candidate_block
        self.fills: list[tuple[tuple[Place, ...], Callable[[Rows], tuple[np.ndarray, ...]]]] = []
        self.of_ids: list[tuple[Place, Callable[[np.ndarray], np.ndarray]]] = []
        self.tables: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._known: dict[Any, tuple[Place, ...]] = {}

    def place(self, key: Any, shape: Sequence[int], dtype: mx.Dtype, make: Callable[[Rows], np.ndarray]) -> Place:
        """The field of that key, the same one whoever asks."""
        return self.places(key, 1, shape, dtype, lambda rows: (make(rows),))[0]

    def places(
        self, key: Any, count: int, shape: Sequence[int], dtype: mx.Dtype, make: Callable[[Rows], tuple[np.ndarray, ...]]
    ) -> tuple[Place, ...]:
        """`count` fields that are made together."""
        if key not in self._known:
            self._known[key] = tuple(self._room(shape, dtype) for _ in range(count))
            self.fills.append((self._known[key], make))
        return self._known[key]

    def ids(self, shape: Sequence[int], dtype: mx.Dtype, make: Callable[[np.ndarray], np.ndarray]) -> Place:
        """A field that the ids decide."""
        place = self._room(shape, dtype)
        self.of_ids.append((place, make))
        return place

    def table(self, slot: int, shape: Sequence[int], dtype: mx.Dtype) -> Place:
        place = self._room(shape, dtype)
        self.tables[slot] = place.at, place.shape
        return place

    def _room(self, shape: Sequence[int], dtype: mx.Dtype) -> Place:
        place = Place(self.memory, shape, dtype, self.memory.nbytes)
        self.memory.nbytes += -(-max(1, place.nbytes) // BORDER) * BORDER
        return place

    def filler(self, block: np.ndarray) -> Callable[[Rows], None]:
        """What writes the numbers of a step's rows into its block, uint8 [memory.nbytes]."""
        bound = [(tuple(_view(block, p) for p in places), make) for places, make in self.fills]

        def fill(rows: Rows) -> None:
            for targets, make in bound:
                for target, numbers in zip(targets, make(rows)):
                    target[...] = numbers

        return fill


def _view(block: np.ndarray, place: Place) -> np.ndarray:
    return block[place.at : place.at + place.nbytes].view(_NUMPY[place.dtype]).reshape(place.shape)


class Filler:
    """Writes the block of a step of the trunk. What follows from its position can be made before the step is there, while the device works: not in
    the block, which the device may be reading, but beside it."""

    def __init__(self, given: Given, block: np.ndarray, rows: Callable[[int], Rows]):
        """rows: position -> rows there, of any ids, in numpy."""
        self._block, self._made, self._rows = block, block.copy(), rows
        self._fill = given.filler(self._made)
        self._ids = [(_view(block, place), make) for place, make in given.of_ids]
        self._start: int | None = None

    def prepare(self, start: int) -> None:
        if start != self._start:
            self._start = None
            self._fill(self._rows(start))
            self._start = start

    def __call__(self, ids: np.ndarray, start: int) -> None:
        """Nobody may be reading the block."""
        self.prepare(start)
        self._block[...] = self._made
        for target, make in self._ids:
            target[...] = make(ids)


@dataclass(frozen=True)
class Form:
    """All that decides which way a trunk takes. closing: by ratio, how many groups these rows complete; scored: by ratio, whether entries
    are chosen, and whether blocks of them are."""

    rows: int
    logits: bool
    taps: bool
    closing: tuple[int, ...]
    scored: tuple[tuple[bool, bool], ...]


def form_of(trunk: Any, start: int, count: int, logits: bool, taps: bool) -> Form:
    c, ratios = trunk.config, sorted({p.ratio for p in trunk.plan if p.ratio})
    blocks = c.candidate_block_size * c.candidate_topk_blocks if c.family == "v41" else None
    entries = [(start + count) // r for r in ratios]
    closing = tuple(e - start // r for r, e in zip(ratios, entries))
    return Form(count, logits, taps, closing, tuple((e > c.index_topk, blocks is not None and e > blocks) for e in entries))


class RecordedRows:
    """`Rows` and `RowsV4` with places in the place of arrays. start: any position of the form that is recorded."""

    host = False
    fits = True

    def __init__(self, trunk: Any, recorder: Recorder, given: Given, start: int, count: int, lane: Lane):
        c = trunk.config
        self.recorder, self.given, self.lane, self.plan = recorder, given, lane, trunk.plan
        self.start, self.n, self.window, self.ring = start, count, c.sliding_window, c.ring_rows
        self.positions = start + np.arange(count)
        self.tables = {spec: self._table(("rope", spec), spec, lambda r, s=spec: r.tables[s]) for spec in trunk.frequencies}
        image = c.family == "v41" and c.image_token_id is not None
        self.image = given.ids((count,), mx.bool_, lambda ids: ids == c.image_token_id) if image else None
        self.tokens = given.ids((count,), mx.int32, lambda ids: ids)
        self.picked: Any = None
        self.candidates: Any = None
        self._made: dict[Any, Any] = {}

    def _table(
        self, key: Any, spec: RopeSpec, make: Callable[[Rows], tuple[np.ndarray, np.ndarray]], count: int | None = None
    ) -> tuple[Place, ...]:
        return self.given.places(key, 2, (self.n if count is None else count, spec.dims // 2), mx.float32, make)

    # of all families

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def row_blocks(self, row_bytes: int) -> list[slice]:
        return [slice(0, self.n)]

    def concatenate(self, parts: Sequence[Any], axis: int = 0) -> Any:
        """Of rows there is one part only; other parts stay side by side."""
        return parts[0] if len(parts) == 1 else tuple(parts)

    def last_length(self, ratio: int) -> int:
        return (self.start + self.n) // ratio

    def length(self, ratio: int) -> Place:
        place = self.given.place(("length", ratio), (self.n, 1), mx.int32, lambda r: r.length(ratio))
        name = self._pool(ratio)
        place.used = used_rows(self.given, self.lane.specs[name], self.lane.buffers[name].shape[0])
        return place

    def ring_slots(self, positions: np.ndarray, capacity: int) -> Place:
        return self.given.place(("ring", capacity), (self.n,), mx.int32, lambda r: r.positions % capacity)

    @property
    def blocks(self) -> list[tuple[slice, Place, Place, Place]]:
        slots = self.given.place("slots", (self.n, self.window), mx.int32, lambda r: r.blocks[0][2])
        present = self.given.place("present", (self.n, self.window), mx.bool_, lambda r: r.blocks[0][3])
        return [(slice(0, self.n), self.ring_slots(self.positions, self.ring), slots, present)]

    def entry_table(self, layer: LayerPlan, first: int, last: int) -> tuple[Place, Place]:
        ratio = layer.ratio
        make = lambda r: r.entry_table(layer, r.start // ratio, r.last_length(ratio))
        return self._table(("entry", layer.rope, ratio), layer.rope, make, last - first)

    # of V4.1

    def table_rows(self, ticket: Any, slot: int, dtype: mx.Dtype) -> Place:
        """What comes before does not wait for the drive."""
        self.recorder.tape.parts.append(len(self.recorder.tape.launches))
        return self.given.table(slot, (self.n, ticket.of[slot]), dtype)

    def group_slots(self, ratio: int, capacity: int) -> Place:
        count = self.last_length(ratio) - self.start // ratio
        make = lambda r: r.group_slots(ratio, capacity).reshape(count, ratio)
        return self.given.place(("group", ratio, capacity), (count, ratio), mx.int32, make)

    # of V4

    def places(self, ratio: int) -> Place:
        return self.given.place(("places", ratio), (self.n,), mx.int32, lambda r: r.places(ratio))

    def group_blocks(self, layer: LayerPlan, capacity: int) -> list[GroupBlock]:
        first, last, ratio = self.start // layer.ratio, self.last_length(layer.ratio), layer.ratio
        span = ratio * (2 if layer.overlap else 1)
        shape = last - first, span
        make = lambda r: _overlapping(r, ratio, span, capacity)
        read = self.given.place(("group", ratio, capacity), shape, mx.int32, make) if last > first else None
        return [GroupBlock(slice(0, self.n), self.ring_slots(self.positions, capacity), first, last, read)]

    def widest(self, part: slice, ratio: int, most: int | None) -> int:
        """The same at every position: chosen entries, or room for all that the pool can hold."""
        return 0 if not ratio else self.lane.buffers[self._pool(ratio)].shape[0] if most is None else slots_for(most)

    def tiles(self, part: slice, ratio: int, most: int | None) -> list[tuple[slice, int]]:
        """One list width for all rows."""
        return [(part, self.widest(part, ratio, most))]

    def _pool(self, ratio: int) -> str:
        """The first of that ratio; they are all of one size."""
        return f"pool.{next(p.index for p in self.plan if p.owns_pool and p.ratio == ratio)}"


def _overlapping(rows: RowsV4, ratio: int, span: int, capacity: int) -> np.ndarray:
    """int32 [groups, span]: ring slots of the tokens of the groups that close, and before them of those that they lend from; -1 before 0."""
    ends = (np.arange(rows.start // ratio, rows.last_length(ratio)) + 1) * ratio
    tokens = ends[:, None] + np.arange(-span, 0)
    return np.where(tokens < 0, -1, tokens % capacity).astype(np.int32)


def used_rows(given: Given, spec: PoolSpec, capacity: int) -> Place:
    """How many rows of a pool are in use, in whole steps, and in its own `used` how many blocks of candidates these are."""
    rows = lambda r: min(capacity, -(-max(1, r.last_length(spec.ratio)) // spec.block) * spec.block)
    place = given.place(("used", spec.ratio, capacity), (8,), mx.int32, lambda r: np.full(8, rows(r), np.int32))
    blocks = lambda r: np.full(8, rows(r) // given.candidate_block, np.int32)
    place.used = given.place(("blocks", spec.ratio, capacity), (8,), mx.int32, blocks)
    return place


class RecordedLane:
    """A lane of places; what is written to it is a launch that writes into the buffer itself."""

    def __init__(self, lane: Lane, recorder: Recorder, given: Given):
        self.specs, self.roll = lane.specs, lane.roll
        self._scatter, self._given = Scatter(recorder), given
        self.memories = {name: Memory("lane", buffer.nbytes, name) for name, buffer in lane.buffers.items()}
        self.buffers = {
            name: Place(self.memories[name], b.shape, b.dtype, used=self._used(name, b.shape[0])) for name, b in lane.buffers.items()
        }

    def _used(self, name: str, capacity: int) -> Place | None:
        spec = self.specs[name]
        return used_rows(self._given, spec, capacity) if isinstance(spec, PoolSpec) else None

    def write(self, name: str, slots: Place, rows: Place) -> None:
        self._scatter.into(rows, slots, self.buffers[name])

    def append(self, name: str, first: int, rows: Place) -> None:
        ratio = self.specs[name].ratio
        at = self._given.place(("append", ratio), (rows.shape[0],), mx.int32, lambda r: np.arange(r.start // ratio, r.last_length(ratio)))
        self._scatter.into(rows, at, self.buffers[name])
