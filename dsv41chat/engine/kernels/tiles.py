"""CUDA callables for the many rows of a prompt on the matrix unit: experts, and plain matrices with float32 results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import float_bits
from dsv41chat.engine.kernels.launch import Backend, Constants, number
from dsv41chat.engine.kernels.matrix import Stored, stored
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_tiles import JOIN_PICKS, TENSOR_GROUPS, TENSOR_NARROW, TENSOR_ROWS, TENSOR_TILES, TILE_ORDER

_BITS = (2, 4, 6, 8)
# Groups of wide tiles that are enough for a device.
_BUSY = 64
_PLAIN = 3
_ORDER_THREADS, _JOIN_THREADS, _NARROW_SIMDS = 512, 128, 8
_ORDER = Constants({"NTH": _ORDER_THREADS})
# Columns of 8 rows of a tile, and from how many rows of an expert on average such tiles are taken: a larger one reads the weights for more
# rows, of a smaller one more groups at once hide the way to them. The middle one is for experts of which most fill one and no second one.
WIDE, MIDDLE, NARROW = 16, 8, 4
_FROM_ROWS = ((60, WIDE), (28, MIDDLE), (0, NARROW))


def tiled(module: Any, outputs: int) -> Stored:
    """A matrix for tiles, whose outputs are a multiple of `outputs`. Raises Declined."""
    m = stored(module)
    if m.form.mode != _PLAIN and m.form.bits not in _BITS or m.form.mode > _PLAIN:
        raise Declined(f"prompt tiles take bfloat16 and 2, 4, 6 or 8 bits, not {m.form.bits}")
    if m.inputs % 64 or m.outputs % outputs:
        raise Declined(f"prompt tiles take multiples of 64 inputs and {outputs} outputs, not {m.inputs} x {m.outputs}")
    return m


def _what(m: Stored) -> tuple:
    """What matrices of one launch have in common."""
    return m.form, m.inputs, m.outputs


def _simds(outputs: int, each: int, columns: int) -> int:
    """SIMD groups of a tile of which each has `each` outputs."""
    return next(w for w in (8, 4, 2, 1) if w <= max(columns // 2, 4) and outputs % (w * each) == 0)


def _tiled(backend: Backend, constants: Constants, columns: int, simds: int) -> Constants:
    return constants.plus(NT=columns, W=simds, WG=int(simds % 4 == 0 and backend.warpgroups))


class TileMatrices:
    """Gate and up of experts with their activation, or their down matrices: the rows of TENSOR_TILES.

    shared: the same of the expert that every row has, None where it is computed otherwise. experts 0: there are no others.
    """

    def __init__(self, backend: Backend, routed: Sequence[Stored], shared: Sequence[Stored] | None, picks: int, experts: int, limit: float):
        first = routed[0]
        self.backend, self.up, self.outputs, self.shared = backend, len(routed) == 2, first.outputs, shared is not None
        both = [*routed, *(routed if shared is None else shared)]
        if any(_what(m) != _what(first) for m in both):
            raise Declined("matrices of one launch of tiles are stored alike")
        self.arrays = [a for pair in (both[: len(routed)], both[len(routed) :]) for m in (pair[0], pair[-1]) for a in m.arrays]
        constants = {"K": first.inputs, "N": first.outputs, **first.form.constants(), "P": picks, "E": experts, "UP": int(self.up)}
        self.constants = Constants({**constants, "LIMIT": float_bits(max(limit, 0.0))})

    def __call__(self, x: mx.array, n: int, columns: int, tiles: mx.array, order: mx.array, weight: mx.array) -> mx.array:
        """n: rows of the call. Returns bfloat16 [slots, out]."""
        c, each = self.constants, 16 if self.up else 32
        simds, rows = _simds(self.outputs, each, columns), 8 * columns
        routed = n * c["P"]
        places = (routed // rows + c["E"] if c["P"] else 0) + (-(-n // rows) if self.shared else 0)
        constants, grid = _tiled(self.backend, c, columns, simds), (self.outputs // (each * simds), places, 1)
        outputs = [((routed + (n if self.shared else 0), self.outputs), mx.bfloat16)]
        return self.backend.run(TENSOR_TILES, [x, *self.arrays, tiles, order, weight, number(n)], constants, grid, 32 * simds, outputs)[0]


class TileExperts:
    """The experts of a prompt: x [n, D] bfloat16, ids int32 and weight float32 [n, picks] -> [n, D].

    The activation is rounded once, with the routing weight in it; outputs are rounded, and summed in float32 by ascending expert, the shared
    one last. A row's bits do not depend on the others.
    """

    def __init__(self, backend: Backend, up: tuple[Any, Any], down: Any, shared_up: tuple[Any, Any], shared_down: Any, limit: float, other: Callable):
        """other: x -> the shared expert's output [n, D], for one that tiles do not take. Raises Declined."""
        self.backend, self.limit, self.other = backend, limit, other
        self.up, self.down = [tiled(m, 64) for m in up], tiled(down, 64)
        self.experts, self.width = self.up[0].arrays[0].shape[0], self.down.outputs
        if _what(self.up[0]) != _what(self.up[1]):
            raise Declined("gate and up of an expert are stored in different forms")
        try:
            self.shared = [tiled(m, 64) for m in shared_up], tiled(shared_down, 64)
            self.alone = TileMatrices(backend, self.shared[0], self.shared[0], 0, 0, limit), TileMatrices(
                backend, [self.shared[1]], [self.shared[1]], 0, 0, limit
            )
        except Declined:
            self.shared = self.alone = None
        self.parts: dict[int, tuple[TileMatrices, TileMatrices, bool]] = {}
        self.join = Constants({"D": self.width, "NTH": _JOIN_THREADS})

    def _parts(self, picks: int) -> tuple[TileMatrices, TileMatrices, bool]:
        """Up and down, and whether the shared expert is among the others."""
        found = self.parts.get(picks)
        if found is None:
            given = self.backend, picks, self.experts, self.limit
            found = self.parts[picks] = self._built(*given, self.shared) if self._alike() else self._built(*given, None)
        return found

    def _built(self, backend: Backend, picks: int, experts: int, limit: float, shared: Any) -> tuple[TileMatrices, TileMatrices, bool]:
        up = TileMatrices(backend, self.up, None if shared is None else shared[0], picks, experts, limit)
        return up, TileMatrices(backend, [self.down], None if shared is None else [shared[1]], picks, experts, limit), shared is not None

    def _alike(self) -> bool:
        return self.shared is not None and [*map(_what, (*self.up, self.down))] == [*map(_what, (*self.shared[0], self.shared[1]))]

    def __call__(self, x: mx.array, ids: mx.array, weight: mx.array) -> mx.array:
        n, picks = ids.shape
        up, down, joined = self._parts(picks)
        columns = columns_of(n * picks, self.experts)
        order, back, tiles = tile_order(self.backend, ids, self.experts, 8 * columns)
        y = down(up(x, n, columns, tiles, order, weight), n, columns, tiles, order, weight)
        alone = y if joined else self._alone(x)
        constants = self.join.plus(P=picks, ALONE=int(not joined))
        grid = -(-self.width // (8 * _JOIN_THREADS)), n, 1
        return self.backend.run(JOIN_PICKS, [y, back, alone, number(n)], constants, grid, _JOIN_THREADS, [((n, self.width), mx.bfloat16)])[0]

    def _alone(self, x: mx.array) -> mx.array:
        """The shared expert by itself."""
        if self.alone is None:
            return self.other(x)
        n, none = x.shape[0], number(0)
        for part in self.alone:
            x = part(x, n, _columns(n, part.outputs, 16 if part.up else 32), none, none, none)
        return x


def columns_of(slots: int, experts: int) -> int:
    """Columns of 8 rows of the tiles of a call. They are in no row's sums."""
    return next(columns for rows, columns in _FROM_ROWS if slots >= rows * experts)


def _columns(rows: int, outputs: int, each: int) -> int:
    """Of a call whose rows all have one matrix."""
    return WIDE if outputs // (8 * each) * (rows // (8 * WIDE)) >= _BUSY else NARROW


def tile_order(backend: Backend, ids: mx.array, experts: int, rows: int) -> list[mx.array]:
    """ids int32 [n, picks] -> order and back int32 [n * picks], tiles int32 [n * picks // rows + experts, 4], as TILE_ORDER explains them."""
    n, picks = ids.shape
    constants = _ORDER.plus(P=picks, E=experts, ROWS=rows)
    outputs = [((n * picks,), mx.int32), ((n, picks), mx.int32), ((n * picks // rows + experts, 4), mx.int32)]
    return backend.run(TILE_ORDER, [ids, number(n)], constants, (experts, 1, 1), _ORDER_THREADS, outputs)


class GroupsProduct:
    """y = x @ matrix.T for many rows and a block-diagonal matrix [groups, out, in]: x [n, groups * in] bfloat16 -> [n, groups * out]. Neither rows
    nor results change places, and no decoded matrix is kept. A row's bits do not depend on the others."""

    def __init__(self, backend: Backend, module: Any):
        """Raises Declined."""
        self.backend, self.matrix = backend, tiled(module, 64)
        weight = self.matrix.arrays[0]
        if weight.ndim != 3:
            raise Declined("one matrix is decoded for the call")
        self.groups = weight.shape[0]
        self.constants = Constants({"K": self.matrix.inputs, "N": self.matrix.outputs, "G": self.groups, **self.matrix.form.constants()})

    def __call__(self, x: mx.array) -> mx.array:
        n, m = x.shape[0], self.matrix
        columns = _columns(n, m.outputs * self.groups, 32)
        simds = _simds(m.outputs, 32, columns)
        constants = _tiled(self.backend, self.constants, columns, simds)
        grid = m.outputs // (32 * simds), -(-n // (8 * columns)), self.groups
        outputs = [((n, m.outputs * self.groups), mx.bfloat16)]
        return self.backend.run(TENSOR_GROUPS, [x, *m.arrays, number(n)], constants, grid, 32 * simds, outputs)[0]


class RowsProduct:
    """y = x @ matrix.T in float32 for many bfloat16 rows and a plain bfloat16 matrix, or with a second one [x @ first.T, x @ second.T], to whose
    outputs row positions[m] % r of `table` float32 [r, out] is added. A row's bits do not depend on the others."""

    def __init__(self, backend: Backend, first: Any, second: Any = None, table: mx.array | None = None, split: bool = False):
        """split: the result of two is [n, 2, out]. Raises Declined."""
        a, b = stored(first), None if second is None else stored(second)
        if any(m.form.mode != _PLAIN or m.inputs % 64 or m.arrays[0].ndim != 2 for m in (a, b or a)):
            raise Declined("the matrix unit takes plain bfloat16 matrices of a multiple of 64 inputs")
        if b is not None and (a.inputs, a.outputs) != (b.inputs, b.outputs):
            raise Declined("two matrices in one launch have one shape")
        self.backend, self.first, self.second, self.table = backend, a, b, table
        # Few outputs are few groups of threads, which then share out the inputs.
        self.narrow = b is None and a.outputs <= 1024
        if not self.narrow and a.outputs % 32:
            raise Declined(f"{a.outputs} outputs are not a multiple of 32")
        self.shape = (a.outputs,) if b is None else (2, a.outputs) if split else (2 * a.outputs,)
        self.constants = Constants({"K": a.inputs, "N": a.outputs})
        if self.narrow:
            self.constants = self.constants.plus(KS=_NARROW_SIMDS)
        else:
            self.constants = self.constants.plus(N2=0 if b is None else b.outputs, AR=0 if table is None else table.shape[0])

    def __call__(self, x: mx.array, positions: mx.array | None = None) -> mx.array:
        n, rows, (a, b) = x.shape[0], number(x.shape[0]), (self.first, self.second)
        outputs = [((n, *self.shape), mx.float32)]
        if self.narrow:
            grid = -(-a.outputs // 32), -(-n // 32), 1
            return self.backend.run(TENSOR_NARROW, [x, a.arrays[0], rows], self.constants, grid, 32 * _NARROW_SIMDS, outputs)[0]
        each = 32 if b is None else 16
        columns = _columns(n, a.outputs, each)
        simds = _simds(a.outputs, each, columns)
        constants = _tiled(self.backend, self.constants, columns, simds)
        added = (rows, rows) if self.table is None else (self.table, positions)
        inputs = [x, a.arrays[0], (b or a).arrays[0], *added, rows]
        grid = a.outputs // (each * simds), -(-n // (8 * columns)), 1
        return self.backend.run(TENSOR_ROWS, inputs, constants, grid, 32 * simds, outputs)[0]
