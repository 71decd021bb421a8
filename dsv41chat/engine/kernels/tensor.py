"""CUDA callables on the matrix unit: decode products of 4-bit and plain matrices, and packed matrices of a prompt."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import float_bits
from dsv41chat.engine.kernels.launch import Backend, Constants, number
from dsv41chat.engine.kernels.matrix import Form, Matvec, PairMatvec, Stored, stored
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_matrix import DECODE_MATRIX, DECODE_THREE
from dsv41chat.engine.kernels.text_tensor import TENSOR_MATVEC, TENSOR_PLAIN

# Runs of 8 values of a matrix, that a group of threads decodes.
_GROUP_RUNS = 1024


def _tiling(inputs: int, rows: int, groups: int) -> dict[str, int]:
    """Constants of TENSOR_MATVEC for `groups` matrices of `rows` outputs. Fixed by the shape, because they order a sum; the copies of a
    group of threads are at most 21 steps of 16 rows."""
    blocks, outputs, tiles = inputs // 256, rows * groups, 1
    if outputs <= 2560:
        # Fewer groups than a device holds at once: many SIMD groups each, all of whose weights are on their way together.
        splits = max(n for n in range(1, 21) if blocks % n == 0)
    elif blocks <= 5:
        splits, tiles = blocks, 2
    elif outputs >= 65536:
        # So many groups that they hide each other's waits: tall ones read x less often.
        splits, tiles = 4, 4
    else:
        # Measured on an H200: short rows in tall groups, long ones in deep.
        splits, tiles = 8, 2 if blocks <= 16 else 1
    while rows % (16 * tiles):
        tiles //= 2
    return {"KS": splits, "RT": tiles, "RING": min(-(-blocks // splits), 21 // (splits * tiles))}


class TensorMatvec:
    """`Matvec` for bfloat16 rows and 4-bit affine matrices in groups of 64 with bfloat16 scales; `dtype` of the result: by default x's."""

    def __init__(self, backend: Backend, module: Any, dtype: mx.Dtype = mx.bfloat16):
        """Raises Declined."""
        self.backend, self.dtype, self.matrix = backend, dtype, stored(module)
        m, weight = self.matrix, self.matrix.arrays[0]
        if (m.form.mode, m.form.bits, m.form.group, m.form.scales) != (0, 4, 64, 0) or m.inputs % 256 or m.outputs % 16:
            raise Declined("the matrix unit takes 4-bit affine matrices in groups of 64, of 256 inputs and 16 outputs or multiples")
        groups = weight.shape[0] if weight.ndim == 3 else 1
        self.outputs = m.outputs * groups
        self.constants = {"K": m.inputs, "N": self.outputs, **_tiling(m.inputs, m.outputs, groups), "XS": m.inputs * groups}
        self.constants |= {"RG": m.outputs if groups > 1 else 0, "OF": int(dtype == mx.float32)}

    def __call__(self, x: mx.array) -> mx.array:
        n, c = x.shape[0], self.constants
        grid = self.outputs // (16 * c["RT"]), 1, 1
        return self.backend.run(TENSOR_MATVEC, [x, *self.matrix.arrays, number(n)], c, grid, 32 * c["KS"], [((n, self.outputs), self.dtype)])[0]


class TensorPlain:
    """`Matvec`, or with a second matrix `PairMatvec`, for bfloat16 rows and plain bfloat16 matrices."""

    def __init__(
        self, backend: Backend, module: Any, dtype: mx.Dtype = mx.bfloat16, second: Any = None, table: mx.array | None = None, split: bool = False
    ):
        """Raises Declined."""
        parts = [stored(m) for m in (module, second) if m is not None]
        self.backend, self.dtype, self.matrix, self.table = backend, dtype, parts[0], table
        weight, other = parts[0].arrays[0], parts[-1].arrays[0]
        if any(p.form.mode != 3 or p.inputs != parts[0].inputs or p.inputs % 256 or p.outputs % 8 for p in parts):
            raise Declined("the matrix unit takes plain bfloat16 matrices of 256 inputs and 8 outputs or multiples")
        if len(parts) == 2 and (weight.ndim != 2 or other.ndim != 2):
            raise Declined("two matrices in one launch are not grouped")
        m, groups = parts[0], weight.shape[0] if weight.ndim == 3 else 1
        first, after = m.outputs * groups, other.shape[0] if len(parts) == 2 else 0
        self.outputs, self.other = first + after, other
        self.shape = (2, first) if split else (self.outputs,)
        # As many SIMD groups as have work, up to 20 of a group: fixed by the shape, because it orders a sum.
        blocks, most = m.inputs // 256, 20 if self.outputs <= 4096 else 8
        self.splits = -(-blocks // -(-blocks // most))
        self.constants = {"K": m.inputs, "N": first, "KS": self.splits, "XS": m.inputs * groups, "RG": m.outputs if groups > 1 else 0}
        self.constants |= {"N2": after, "AR": 0 if table is None else table.shape[0], "OF": int(dtype == mx.float32), "FACTOR": 0}

    def times(self, factor: float) -> TensorPlain:
        """The same, its results multiplied by a number."""
        self.constants["FACTOR"] = float_bits(factor)
        return self

    def __call__(self, x: mx.array, positions: mx.array | None = None) -> mx.array:
        n, rows = x.shape[0], number(x.shape[0])
        inputs = [x, self.matrix.arrays[0], rows, self.other, *((rows, rows) if self.table is None else (self.table, positions))]
        grid, outputs = (self.outputs // 8, 1, 1), [((n, *self.shape), self.dtype)]
        return self.backend.run(TENSOR_PLAIN, inputs, self.constants, grid, 32 * self.splits, outputs)[0]


def product(backend: Backend, module: Any, dtype: mx.Dtype = mx.bfloat16) -> TensorMatvec | TensorPlain | Matvec:
    """y = x @ matrix.T for at most MOST_ROWS bfloat16 rows, on the matrix unit where there is one and it takes the matrix. Raises Declined."""
    if backend.dialect == "cuda":
        for kind in (TensorMatvec, TensorPlain):
            try:
                return kind(backend, module, dtype)
            except Declined:
                continue
    return Matvec(backend, module, dtype)


def pair_product(
    backend: Backend, first: Any, second: Any, dtype: mx.Dtype, table: mx.array | None = None, split: bool = False
) -> TensorPlain | PairMatvec:
    """`PairMatvec` for bfloat16 rows, as `product` chooses. Raises Declined."""
    if backend.dialect == "cuda":
        try:
            return TensorPlain(backend, first, dtype, second, table, split)
        except Declined:
            pass  # the other text takes more forms
    return PairMatvec(backend, first, second, dtype, table, split)


@cache
def _of_form(form: Form) -> Constants:
    return Constants(form.constants())


def decoded(backend: Backend, m: Stored) -> mx.array:
    """A matrix [..., out, in] in bfloat16, each value rounded once."""
    shape = (*m.arrays[0].shape[:-1], m.inputs)
    runs = math.prod(shape) // 8
    inputs, grid = [*m.arrays, number(runs)], (-(-runs // _GROUP_RUNS), 1, 1)
    return backend.run(DECODE_MATRIX, inputs, _of_form(m.form), grid, 256, [(shape, mx.bfloat16)])[0]


class DecodedProduct:
    """y = x @ matrix.T for many rows: the matrix is decoded for the call and multiplied as it is. x [n, groups * in] bfloat16."""

    def __init__(self, backend: Backend, module: Any):
        """Raises Declined."""
        self.backend, self.matrix = backend, stored(module)

    def __call__(self, x: mx.array) -> mx.array:
        weight = decoded(self.backend, self.matrix)
        if weight.ndim == 2:
            return x @ weight.T
        y = mx.swapaxes(x.reshape(x.shape[0], weight.shape[0], -1), 0, 1) @ mx.swapaxes(weight, 1, 2)
        return mx.swapaxes(y, 0, 1).reshape(x.shape[0], -1)


class DecodedThree:
    """-> bfloat16 [out + out2, in] of two packed matrices one below the other, and [out3, in3] of a third one of their form, in one launch."""

    def __init__(self, backend: Backend, modules: tuple[Any, Any, Any]):
        """Raises Declined."""
        self.backend, parts = backend, [stored(m) for m in modules]
        first, second, third = parts
        alike = len({p.form for p in parts}) == 1 and first.inputs == second.inputs
        if not alike or first.form.mode > 2 or any(p.arrays[0].ndim != 2 for p in parts):
            raise Declined("matrices that are decoded together are packed alike")
        runs = [p.outputs * p.inputs // 8 for p in parts]
        groups = [-(-r // _GROUP_RUNS) for r in runs]
        # On the device, where every group of threads reads them.
        self.dims = mx.concatenate([mx.full((1,), r, mx.int32) for r in runs])
        self.arrays = [a for p in parts for a in p.arrays]
        self.constants = Constants({**first.form.constants(), "SECOND": groups[0], "THIRD": groups[0] + groups[1]})
        self.grid = sum(groups), 1, 1
        self.outputs = [((first.outputs + second.outputs, first.inputs), mx.bfloat16), ((third.outputs, third.inputs), mx.bfloat16)]

    def __call__(self) -> tuple[mx.array, mx.array]:
        joined, other = self.backend.run(DECODE_THREE, [*self.arrays, self.dims], self.constants, self.grid, 256, self.outputs)
        return joined, other
