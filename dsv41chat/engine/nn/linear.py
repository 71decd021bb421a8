"""Matrices as callables: dense, quantised or trellis-coded, alone, grouped or stacked per expert. Rows are the first axis of every input."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

from dsv41chat.engine.ops.fakequant import fp8_ue8m0

_COLUMNS = "_columns"


def columns(module: object, name: str = "weight") -> mx.array:
    """A module's matrix [..., out, in] seen as [..., in, out]: a view that is made once, so that it is no part of a step's graph."""
    weight = getattr(module, name)
    kept = module.__dict__.get(_COLUMNS)
    if kept is None or kept[0] is not weight:
        view = mx.swapaxes(weight, -1, -2)
        mx.eval(view)
        kept = module.__dict__[_COLUMNS] = weight, view
    return kept[1]


@dataclass
class Linear:
    """y = x @ weight.T. weight [out, in]; round_input: the fp8 input rounding of the release, where that option is on."""

    weight: mx.array
    round_input: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        return (fp8_ue8m0(x) if self.round_input else x) @ columns(self)


@dataclass
class Packed:
    """Words of MLX's quantised layouts, as `mx.quantize` makes them.

    weight uint32 [..., out, in * bits / 32]; scales [..., out, in / group]: ue8m0 or e4m3 bytes, or floats with `biases` (affine).
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    mode: str
    bits: int
    group: int

    def matmul(self, x: mx.array) -> mx.array:
        """x [..., n, in] @ weight.T; leading axes are those of the weight."""
        return mx.quantized_matmul(x, self.weight, self.scales, self.biases, transpose=True, group_size=self.group, bits=self.bits, mode=self.mode)

    def gather(self, x: mx.array, ids: mx.array) -> mx.array:
        options = dict(lhs_indices=rows_of_picks(x, ids), rhs_indices=ids, transpose=True, group_size=self.group, bits=self.bits, mode=self.mode)
        return mx.gather_qmm(x, self.weight, self.scales, self.biases, **options)

    def rows(self, index: mx.array, dtype: mx.Dtype) -> mx.array:
        """Decoded rows [*index, in]; only these rows are touched. Affine rows are computed in float32 and rounded once."""
        floats = lambda a: a[index].astype(mx.float32) if self.mode == "affine" else a[index]
        biases = None if self.biases is None else floats(self.biases)
        options = dict(group_size=self.group, bits=self.bits, mode=self.mode, dtype=mx.float32)
        return mx.dequantize(self.weight[index], floats(self.scales), biases, **options).astype(dtype)


def rows_of_picks(x: mx.array, ids: mx.array) -> mx.array:
    """x [n, picks or 1, 1, in], ids [n, picks] -> uint32 [n, picks]: which row of x meets which id. A constant of the shapes."""
    return _rows_of_picks(*ids.shape, x.shape[1])


@lru_cache(maxsize=64)
def _rows_of_picks(n: int, picks: int, per_row: int) -> mx.array:
    return mx.array(np.broadcast_to(np.arange(n * per_row, dtype=np.uint32).reshape(n, per_row), (n, picks)))


@dataclass
class QuantizedLinear:
    """`Linear` from packed words [out, ...]; the result has the dtype of x."""

    packed: Packed
    round_input: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        return self.packed.matmul(fp8_ue8m0(x) if self.round_input else x).astype(x.dtype)


@dataclass
class QuantizedLookup:
    """A table of which only rows are read: `table[ids]`, ids [n] -> [n, in] in `dtype`."""

    packed: Packed
    dtype: mx.Dtype

    def __getitem__(self, ids: mx.array) -> mx.array:
        return self.packed.rows(ids, self.dtype)


@dataclass
class GroupedLinear:
    """Block-diagonal product: weight [G, rank, in]; x [n, G * in] -> [n, G * rank]."""

    weight: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        groups = self.weight.shape[0]
        y = mx.swapaxes(x.reshape(x.shape[0], groups, -1), 0, 1) @ columns(self)
        return mx.swapaxes(y, 0, 1).reshape(x.shape[0], -1)


@dataclass
class QuantizedGroupedLinear:
    """The same from packed words [G, rank, ...]: split by rows, which packing leaves whole."""

    packed: Packed

    def __call__(self, x: mx.array) -> mx.array:
        y = self.packed.matmul(mx.swapaxes(x.reshape(x.shape[0], self.packed.weight.shape[0], -1), 0, 1))
        return mx.swapaxes(y, 0, 1).reshape(x.shape[0], -1).astype(x.dtype)


@dataclass
class ExpertLinear:
    """One matrix per expert: weight [E, out, in]. x [n, picks or 1, 1, in], ids [n, picks] -> [n, picks, 1, out] in `dtype`.

    The CPU's gather_mm takes float32 only; bfloat16 values stay exact in it.
    """

    weight: mx.array
    dtype: mx.Dtype
    round_input: bool = False

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        x = fp8_ue8m0(x) if self.round_input else x
        return mx.gather_mm(x.astype(self.weight.dtype), columns(self), rows_of_picks(x, ids), ids).astype(self.dtype)


@dataclass
class QuantizedExpertLinear:
    """The same from packed words [E, out, ...]."""

    packed: Packed
    dtype: mx.Dtype
    round_input: bool = False

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        return self.packed.gather(fp8_ue8m0(x) if self.round_input else x, ids).astype(self.dtype)
