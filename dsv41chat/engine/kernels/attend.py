"""Attention over listed rows on a device: rotation in and out, both buffers and the sink in one launch or two."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import SMALL_ELEMENTS, float_bits
from dsv41chat.engine.kernels.launch import MOST_ROWS, Backend, Constants, number
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_attend import ATTEND_MERGE, ATTEND_SPLIT
from dsv41chat.engine.kernels.text_attend_prompt import RING, TENSOR_PROMPT, room
from dsv41chat.engine.kernels.text_attend_tensor import TENSOR_ATTEND, TENSOR_MERGE

# Bounds the float32 partial results of one launch; rows are independent, so the cut changes no bit.
_PARTIAL_BYTES = 128 * 2**20
# Slots of one piece of a list: with entries of a pool, and for the window alone.
_PIECE, _WINDOW_PIECE = 40, 32
# Of the matrix unit: slots of one piece, SIMD groups that merge, and pieces that each of them has on the way at once.
_TENSOR_PIECE, _MERGERS, _ON_THE_WAY = 32, 8, 4


class _Listed(ABC):
    """(q [n, H, C] as projected, (cos, sin) [n, rope / 2], ring [*, C], slots and present [n, W], pool [*, C], index and picked [n, K], or
    None three times) -> [n, H, C] bfloat16, rotated back. Any number of rows; a row's bits do not depend on it, nor on empty slots
    at the end of its list.

    dims int32 [1 or more]: its first number says how many of the K entries of a list are in use; it is the stride of index and picked.
    Such a call is one launch of each kernel, whatever it takes.
    """

    def __init__(self, backend: Backend, heads: int, channels: int, rope: int, window: int, sink: mx.array, head_eps: float | None):
        """sink float32 [H]. head_eps: each head is normed without a weight first (V4), None: it is not. Raises Declined."""
        self.backend, self.heads, self.channels, self.window, self.sink = backend, heads, channels, window, sink
        self.constants = Constants({"H": heads, "C": channels, "RD": rope, "W": window})
        self.head_constants = {"HEADNORM": int(head_eps is not None), "EPS": float_bits(head_eps or 0.0), "SCALE": float_bits(channels**-0.5)}

    def __call__(
        self, q: mx.array, table: tuple[mx.array, mx.array], ring: mx.array, slots: mx.array, present: mx.array, pool: mx.array | None,
        index: mx.array | None, picked: mx.array | None, dims: mx.array | None = None,
    ) -> mx.array:  # fmt: skip
        # Without a pool its arguments are not read.
        lists = (slots, present, *((slots, present) if pool is None else (index, picked)))
        entries = 0 if index is None else index.shape[1]
        return self._call((ring, ring if pool is None else pool), dims, None if pool is None else entries, q, *table, *lists)

    @abstractmethod
    def _call(
        self, buffers: tuple[mx.array, mx.array], dims: mx.array | None, entries: int | None, q: mx.array, cos: mx.array, sin: mx.array,
        *lists: mx.array,
    ) -> mx.array:  # fmt: skip
        """entries: places of a list for entries of the pool, None without a pool."""

    def _partial(self, n: int, pieces: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """What the pieces of n rows leave: sums, and maximum and weight."""
        return [((n, self.heads, pieces, self.channels), mx.float32), ((n, self.heads, pieces, 2), mx.float32)]

    def _result(self, n: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        return [((n, self.heads, self.channels), mx.bfloat16)]


class Attend(_Listed):
    """The shared text: a SIMD group per head."""

    def __init__(self, backend: Backend, heads: int, channels: int, rope: int, window: int, sink: mx.array, head_eps: float | None):
        super().__init__(backend, heads, channels, rope, window, sink, head_eps)
        if channels % 64 or channels > 1024:
            raise Declined(f"heads of {channels} channels are not a multiple of 64 up to 1,024")
        if channels > 128 and channels % 256:
            raise Declined(f"heads of {channels} channels are more than 128 and not a multiple of 256")
        self.group = next(g for g in (8, 4, 2, 1) if heads % g == 0)
        self.merge_threads = -(-channels // 128) * 32

    def _call(
        self, buffers: tuple[mx.array, mx.array], dims: mx.array | None, entries: int | None, q: mx.array, cos: mx.array, sin: mx.array,
        *lists: mx.array,
    ) -> mx.array:  # fmt: skip
        piece = _WINDOW_PIECE if entries is None else _PIECE
        pieces, n, rows = -(-(self.window + (entries or 0)) // piece), q.shape[0], (q, cos, sin, *lists)
        step = max(MOST_ROWS, _PARTIAL_BYTES // (4 * self.heads * self.channels * pieces)) if dims is None else n
        calls = [rows] if n <= step else [[v[a : a + step] for v in rows] for a in range(0, n, step)]
        out = [self._launch(buffers, number(entries or 0) if dims is None else dims, piece, pieces, *part) for part in calls]
        return out[0] if len(out) == 1 else mx.concatenate(out)

    def _launch(
        self, buffers: tuple[mx.array, mx.array], dims: mx.array, piece: int, pieces: int, q: mx.array, cos: mx.array, sin: mx.array,
        *lists: mx.array,
    ) -> mx.array:  # fmt: skip
        n, constants = q.shape[0], {**self.constants, "CH": piece}
        inputs, grid = [q, *buffers, *lists, dims, cos, sin], (pieces, self.heads // self.group, n)
        split = {**constants, "HG": self.group, **self.head_constants}
        partial, weights = self.backend.run(ATTEND_SPLIT, inputs, split, grid, 32 * self.group, self._partial(n, pieces))
        inputs = [partial, weights, self.sink, dims, cos, sin]
        return self.backend.run(ATTEND_MERGE, inputs, constants, (self.heads, n, 1), self.merge_threads, self._result(n))[0]


class TensorAttend(_Listed):
    """On CUDA's matrix unit: few rows in pieces, each by a group of threads per sixteen heads; of many rows each by one group per 32."""

    def __init__(self, backend: Backend, heads: int, channels: int, rope: int, window: int, sink: mx.array, head_eps: float | None):
        super().__init__(backend, heads, channels, rope, window, sink, head_eps)
        if channels % 64 or channels > 512:
            raise Declined(f"heads of {channels} channels are not a multiple of 64 up to 512")

    def _call(
        self, buffers: tuple[mx.array, mx.array], dims: mx.array | None, entries: int | None, q: mx.array, cos: mx.array, sin: mx.array,
        *lists: mx.array,
    ) -> mx.array:  # fmt: skip
        n, constants = q.shape[0], self.constants.plus(POOL=int(entries is not None))
        dims = number(entries or 0) if dims is None else dims
        inputs = [q, *buffers, *lists, dims, cos, sin]
        if n > MOST_ROWS:
            # Where SIMD groups are few, each has many scores to weigh, and registers for 16 heads only.
            tiles = 2 if self.heads > 16 and self.channels >= 256 else 1
            whole = constants.plus(**self.head_constants, MT=tiles, RING=RING, SHARED_BYTES=room(self.channels, tiles))
            grid = -(-self.heads // (16 * tiles)), n, 1
            return self.backend.run(TENSOR_PROMPT, [*inputs, self.sink], whole, grid, self.channels // 2, self._result(n))[0]
        constants = {**constants, "CH": _TENSOR_PIECE}
        pieces = -(-(self.window + (entries or 0)) // _TENSOR_PIECE)
        grid, split = (pieces, -(-self.heads // 16), n), {**constants, **self.head_constants}
        partial, weights = self.backend.run(TENSOR_ATTEND, inputs, split, grid, self.channels // 2, self._partial(n, pieces))
        # What a recorded step may want besides (`fewer`) is not there.
        merge = {**constants, "NM": _MERGERS, "MOST": _ON_THE_WAY, "TURN": 0}
        inputs, outputs = [partial, weights, self.sink, dims, cos, sin, self.sink], [*self._result(n), ((SMALL_ELEMENTS,), mx.uint32)]
        grid = self.heads * -(-self.channels // 128), n, 1
        return self.backend.run(TENSOR_MERGE, inputs, merge, grid, 32 * _MERGERS, outputs)[0]
