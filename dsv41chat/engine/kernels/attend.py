"""Attention over listed rows on a device: rotation in and out, both buffers and the sink in two launches."""

from __future__ import annotations

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import float_bits
from dsv41chat.engine.kernels.launch import Backend, number
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_attend import ATTEND_MERGE, ATTEND_SPLIT
from dsv41chat.engine.kernels.text_attend_tensor import TENSOR_ATTEND, TENSOR_MERGE

# Bounds the float32 partial results of one launch; rows are independent, so the cut changes no bit.
_PARTIAL_BYTES = 64 * 2**20
# Slots of one piece of a list: with entries of a pool, and for the window alone.
_PIECE, _WINDOW_PIECE = 40, 32
# Of the matrix unit: slots of one piece, SIMD groups that merge, and pieces that each of them has on the way at once.
_TENSOR_PIECE, _MERGERS, _ON_THE_WAY = 32, 8, 4


class Attend:
    """(q [n, H, C] as projected, (cos, sin) [n, rope / 2], ring [*, C], slots and present [n, W], pool [*, C], index and picked [n, K], or
    None three times) -> [n, H, C] bfloat16, rotated back. Any number of rows; a row's bits do not depend on it, nor on empty slots
    at the end of its list.

    dims int32 [1 or more]: its first number says how many of the K entries of a list are in use; it is the stride of index and picked.
    Such a call is one launch of each kernel, whatever it takes.
    """

    def __init__(self, backend: Backend, heads: int, channels: int, rope: int, window: int, sink: mx.array, head_eps: float | None):
        """sink float32 [H]. head_eps: each head is normed without a weight first (V4), None: it is not. Raises Declined."""
        self.backend, self.heads, self.channels, self.window, self.sink = backend, heads, channels, window, sink
        if channels % 64 or channels > 1024:
            raise Declined(f"heads of {channels} channels are not a multiple of 64 up to 1,024")
        if channels > 128 and channels % 256:
            raise Declined(f"heads of {channels} channels are more than 128 and not a multiple of 256")
        self.group = next(g for g in (8, 4, 2, 1) if heads % g == 0)
        self.constants = {"H": heads, "C": channels, "RD": rope, "W": window}
        self.split_constants = {"HG": self.group, "HEADNORM": int(head_eps is not None), "EPS": float_bits(head_eps or 0.0)}
        self.split_constants["SCALE"] = float_bits(channels**-0.5)
        self.merge_threads = -(-channels // 128) * 32

    def __call__(
        self, q: mx.array, table: tuple[mx.array, mx.array], ring: mx.array, slots: mx.array, present: mx.array, pool: mx.array | None,
        index: mx.array | None, picked: mx.array | None, dims: mx.array | None = None,
    ) -> mx.array:  # fmt: skip
        entries = 0 if index is None else index.shape[1]
        piece = _WINDOW_PIECE if pool is None else _PIECE
        pieces = -(-(self.window + entries) // piece)
        step = max(1, _PARTIAL_BYTES // (4 * self.heads * self.channels * pieces)) if dims is None else q.shape[0]
        dims = number(entries) if dims is None else dims
        lists = [slots, present, *((slots, present) if pool is None else (index, picked))]
        out = []
        for a in range(0, q.shape[0], step):
            cut = (lambda v, a=a: v) if q.shape[0] <= step else (lambda v, a=a: v[a : a + step])
            cos, sin = map(cut, table)
            rows, n = cut(q), min(step, q.shape[0] - a)
            inputs = [rows, ring, ring if pool is None else pool, *map(cut, lists), dims, cos, sin]
            outputs = [((n, self.heads, pieces, self.channels), mx.float32), ((n, self.heads, pieces, 2), mx.float32)]
            grid, constants = (pieces, self.heads // self.group, n), {**self.constants, **self.split_constants, "CH": piece}
            partial, weights = self.backend.run(ATTEND_SPLIT, inputs, constants, grid, 32 * self.group, outputs)
            (o,) = self.backend.run(
                ATTEND_MERGE, [partial, weights, self.sink, dims, cos, sin], {**self.constants, "CH": piece}, (self.heads, n, 1),
                self.merge_threads, [((n, self.heads, self.channels), mx.bfloat16)],
            )  # fmt: skip
            out.append(o)
        return out[0] if len(out) == 1 else mx.concatenate(out)


class TensorAttend:
    """`Attend` on CUDA's matrix unit, with the same call and the same promises, for calls of few rows: it keeps the partial results of
    all of them at once."""

    def __init__(self, backend: Backend, heads: int, channels: int, rope: int, window: int, sink: mx.array, head_eps: float | None):
        """Arguments as of `Attend`. Raises Declined."""
        self.backend, self.heads, self.channels, self.window, self.sink = backend, heads, channels, window, sink
        if channels % 64 or channels > 512:
            raise Declined(f"heads of {channels} channels are not a multiple of 64 up to 512")
        self.constants = {"H": heads, "C": channels, "RD": rope, "W": window, "CH": _TENSOR_PIECE}
        self.head_constants = {"HEADNORM": int(head_eps is not None), "EPS": float_bits(head_eps or 0.0), "SCALE": float_bits(channels**-0.5)}

    def __call__(
        self, q: mx.array, table: tuple[mx.array, mx.array], ring: mx.array, slots: mx.array, present: mx.array, pool: mx.array | None,
        index: mx.array | None, picked: mx.array | None, dims: mx.array | None = None,
    ) -> mx.array:  # fmt: skip
        n, entries = q.shape[0], 0 if index is None else index.shape[1]
        pieces = -(-(self.window + entries) // _TENSOR_PIECE)
        dims = number(entries) if dims is None else dims
        constants = {**self.constants, "POOL": int(pool is not None)}
        inputs = [q, ring, ring if pool is None else pool, slots, present, *((slots, present) if pool is None else (index, picked)), dims, *table]
        outputs = [((n, self.heads, pieces, self.channels), mx.float32), ((n, self.heads, pieces, 2), mx.float32)]
        grid = pieces, -(-self.heads // 16), n
        partial, weights = self.backend.run(TENSOR_ATTEND, inputs, {**constants, **self.head_constants}, grid, self.channels // 2, outputs)
        return self.backend.run(
            TENSOR_MERGE, [partial, weights, self.sink, dims, *table], {**constants, "NM": _MERGERS, "MOST": _ON_THE_WAY},
            (self.heads * -(-self.channels // 128), n, 1), 32 * _MERGERS, [((n, self.heads, self.channels), mx.bfloat16)],
        )[0]  # fmt: skip
