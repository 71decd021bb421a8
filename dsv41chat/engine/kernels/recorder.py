"""A list of launches instead of results: `Recorder` stands in a `Backend`'s place, and what passes between operations are `Place`s.

Operations that are made of kernels alone can be called with places; the launches that they would make are noted with the memory that
each reads and writes. Nothing is computed. `arrange` says which launches have to wait for which, and where their results lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.launch import Outputs

# Results start on such a border, as those of a device's allocator do.
BORDER = 256
# Memory is used again only for results as large as this, and not before so many launches have passed since it was last read: an early
# second use would make launches wait that do not need each other.
_REUSED_BYTES, _REST = 1 << 18, 64
_OWN = ("scratch", "result")


@dataclass(eq=False)
class Memory:
    """A run of bytes. kind: `fixed`, the memory of `array`; `lane`, a lane's buffer `name`; `given`, what a step brings with it;
    `scratch`; `result`, what is read when the step is done."""

    kind: str
    nbytes: int
    name: str = ""
    array: mx.array | None = None


class Place:
    """Where an array will be: row-major, from byte `at` of a memory. used: int32 array whose first number says how many of its rows (a
    buffer's) or columns (a score's, a list's) are in use, where that changes from step to step."""

    __slots__ = ("memory", "at", "shape", "dtype", "used")

    def __init__(self, memory: Memory, shape: Sequence[int], dtype: mx.Dtype, at: int = 0, used: Place | None = None):
        self.memory, self.at, self.shape, self.dtype, self.used = memory, at, tuple(shape), dtype, used

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.size

    def reshape(self, *shape: int) -> Place:
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if -1 in shape:
            known = -math.prod(shape)
            shape = tuple(self.size // known if s == -1 else s for s in shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"a place of {self.shape} cannot be seen as {shape}")
        return Place(self.memory, shape, self.dtype, self.at, self.used)

    def __getitem__(self, index: slice | tuple | Place) -> Place | Gathered:
        """Leading rows by slice, with all columns; or rows by a place of slots, which the kernel that takes them gathers."""
        if isinstance(index, Place):
            return Gathered(self, index)
        rows, *rest = index if isinstance(index, tuple) else (index,)
        if not isinstance(rows, slice) or any(s != slice(None) and s != slice(None, width) for s, width in zip(rest, self.shape[1:])):
            raise TypeError(f"a place of {self.shape} has no part {index}")
        first, last, step = rows.indices(self.shape[0])
        if step != 1:
            raise TypeError(f"a place of {self.shape} has no part {index}")
        return Place(self.memory, (last - first, *self.shape[1:]), self.dtype, self.at + first * (self.nbytes // max(1, self.shape[0])), self.used)


@dataclass(frozen=True)
class Gathered:
    """Rows `slots` of a buffer."""

    buffer: Place
    slots: Place


@dataclass(frozen=True, eq=False)
class Launch:
    kernel: Kernel
    constants: Mapping[str, int]
    groups: tuple[int, int, int]
    threads: int
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]


@dataclass
class Tape:
    """What was recorded. parts: indices of launches before which something has to be brought in."""

    launches: list[Launch] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)


class Recorder:
    """A `Backend` that notes. dialect: of the backend that will run the launches. Its operations may be called again and again, each time
    for another tape (`begin`)."""

    lazy = warpgroups = False

    def __init__(self, dialect: str):
        self.dialect = dialect
        self.tape = Tape()
        self._fixed: dict[int, Memory] = {}

    def begin(self) -> Tape:
        self.tape = Tape()
        return self.tape

    def run(
        self, kernel: Kernel, inputs: Sequence[Place | mx.array], constants: Mapping[str, int], groups: tuple[int, int, int], threads: int,
        outputs: Outputs,
    ) -> list[Place]:  # fmt: skip
        made = [Place(Memory("scratch", math.prod(shape) * dtype.size), shape, dtype) for shape, dtype in outputs]
        return self.run_into(kernel, inputs, constants, groups, threads, made)

    def run_into(
        self, kernel: Kernel, inputs: Sequence[Place | mx.array], constants: Mapping[str, int], groups: tuple[int, int, int], threads: int,
        targets: Sequence[Place],
    ) -> list[Place]:  # fmt: skip
        """A launch that writes into memory that is there."""
        read = tuple(map(self.place, inputs))
        self.tape.launches.append(Launch(kernel, dict(constants), groups, threads, read, tuple(targets)))
        return list(targets)

    def place(self, array: Place | mx.array) -> Place:
        """The place of a weight or of another array that stays as it is; held as long as the recorder is."""
        if isinstance(array, Place):
            return array
        if not isinstance(array, mx.array):
            raise TypeError(f"a recorded step reads arrays, not {type(array).__name__}")
        memory = self._fixed.get(id(array))
        if memory is None:
            memory = self._fixed[id(array)] = Memory("fixed", array.nbytes, array=array)
        return Place(memory, array.shape, array.dtype)


@dataclass(frozen=True)
class Arrangement:
    """offsets: by scratch and result memory, its first byte in one block of `nbytes`, which any number of tapes can share that run one
    after the other. waits: by launch, the earlier launches of its part to wait for, without those that one of them waits for already."""

    offsets: dict[Memory, int]
    nbytes: int
    waits: list[tuple[int, ...]]


def arrange(tape: Tape) -> Arrangement:
    offsets, nbytes = _offsets(tape.launches)
    writer: dict[object, int] = {}
    readers: dict[object, list[int]] = {}
    waits, before = [], []
    first = 0
    for i, launch in enumerate(tape.launches):
        if i in tape.parts:
            first = i
        needed = set()
        for read in launch.inputs:
            if (key := _range(read.memory, offsets)) is not None:
                needed.add(writer.get(key, -1))
                readers.setdefault(key, []).append(i)
        for written in launch.outputs:
            key = _range(written.memory, offsets)
            needed.add(writer.get(key, -1))
            needed.update(readers.pop(key, ()))
            writer[key] = i
        needed = {j for j in needed if first <= j < i}
        # A set of launches as the bits of a number: all that the launches before i come after.
        known = 0
        for j in needed:
            known |= before[j]
        waits.append(tuple(sorted(j for j in needed if not known >> j & 1)))
        before.append(known | sum(1 << j for j in needed))
    return Arrangement(offsets, nbytes, waits)


def _range(memory: Memory, offsets: dict[Memory, int]) -> object | None:
    """What two uses of the same bytes share; None where nothing ever writes."""
    return None if memory.kind in ("fixed", "given") else offsets.get(memory, memory)


def _offsets(launches: list[Launch]) -> tuple[dict[Memory, int], int]:
    last = {p.memory: i for i, launch in enumerate(launches) for p in (*launch.inputs, *launch.outputs) if p.memory.kind in _OWN}
    offsets: dict[Memory, int] = {}
    free: dict[int, list[tuple[int, int]]] = {}  # size -> (offset, launch that read it last), oldest first
    leaving: dict[int, list[Memory]] = {}
    total = 0
    for i, launch in enumerate(launches):
        for memory in dict.fromkeys(p.memory for p in launch.outputs if p.memory.kind in _OWN):
            if memory in offsets:
                continue
            size = -(-max(1, memory.nbytes) // BORDER) * BORDER
            found = free.get(size, [])
            if size >= _REUSED_BYTES and found and found[0][1] + _REST <= i:
                offsets[memory] = found.pop(0)[0]
            else:
                offsets[memory], total = total, total + size
            if memory.kind == "scratch":
                leaving.setdefault(last[memory], []).append(memory)
        for memory in leaving.pop(i, ()):
            free.setdefault(-(-max(1, memory.nbytes) // BORDER) * BORDER, []).append((offsets[memory], i))
    return offsets, total
