"""CUDA callables on the matrix unit: decode products of 4-bit matrices, and experts and matrices of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dsv41chat.engine.kernels.launch import Backend, number
from dsv41chat.engine.kernels.matrix import Stored, stored
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_matrix import DECODE_MATRIX
from dsv41chat.engine.kernels.text_tensor import TENSOR_MATVEC, TENSOR_TILES
from dsv41chat.engine.ops.route import swiglu

_TILE_BITS = (2, 4, 6, 8)


class TensorMatvec:
    """`Matvec` for bfloat16 rows and 4-bit affine matrices in groups of 64 with bfloat16 scales."""

    def __init__(self, backend: Backend, module: Any):
        self.backend, self.matrix = backend, stored(module)
        m, weight = self.matrix, self.matrix.arrays[0]
        if (m.form.mode, m.form.bits, m.form.group, m.form.scales) != (0, 4, 64, 0) or m.inputs % 256 or m.outputs % 16:
            raise Declined("the matrix unit takes 4-bit affine matrices in groups of 64, of 256 inputs and 16 outputs or multiples")
        groups = weight.shape[0] if weight.ndim == 3 else 1
        self.outputs = m.outputs * groups
        blocks = m.inputs // 256
        # Fixed by the shape, because it orders a sum.
        self.splits = blocks if blocks <= 5 else 8 if self.outputs <= 8192 else 4
        self.constants = {"K": m.inputs, "N": self.outputs, "KS": self.splits, "XS": m.inputs * groups, "RG": m.outputs if groups > 1 else 0}

    def __call__(self, x: mx.array) -> mx.array:
        n = x.shape[0]
        grid = self.outputs // 16, 1, 1
        inputs = [x, *self.matrix.arrays, number(n)]
        return self.backend.run(TENSOR_MATVEC, inputs, self.constants, grid, 32 * self.splits, [((n, self.outputs), mx.bfloat16)])[0]


def decoded(backend: Backend, m: Stored) -> mx.array:
    """A matrix [..., out, in] in bfloat16, each value rounded once."""
    shape = (*m.arrays[0].shape[:-1], m.inputs)
    runs = 1
    for size in shape:
        runs *= size
    runs //= 32
    inputs = [*m.arrays, number(runs)]
    return backend.run(DECODE_MATRIX, inputs, m.form.constants(), (-(-runs // 128), 1, 1), 128, [(shape, mx.bfloat16)])[0]


class DecodedProduct:
    """y = x @ matrix.T for many rows: the matrix is decoded for the call and multiplied as it is. x [n, groups * in] bfloat16."""

    def __init__(self, backend: Backend, module: Any):
        self.backend, self.matrix = backend, stored(module)

    def __call__(self, x: mx.array) -> mx.array:
        weight = decoded(self.backend, self.matrix)
        if weight.ndim == 2:
            return x @ weight.T
        y = mx.swapaxes(x.reshape(x.shape[0], weight.shape[0], -1), 0, 1) @ mx.swapaxes(weight, 1, 2)
        return mx.swapaxes(y, 0, 1).reshape(x.shape[0], -1)


class TileProduct:
    """Rows sorted by expert times their experts' matrices: x [*, in] bfloat16, tok int32 [R], tiles -> [R, out] bfloat16."""

    def __init__(self, backend: Backend, module: Any):
        self.backend, self.matrix = backend, stored(module)
        m = self.matrix
        if m.form.bits not in _TILE_BITS or m.inputs % 64 or m.outputs % 64:
            raise Declined(f"prompt tiles take 2, 4, 6 or 8 bits and multiples of 64, not {m.form.bits} and {m.inputs} x {m.outputs}")
        self.constants = {"K": m.inputs, "N": m.outputs, **m.form.constants()}

    def __call__(self, x: mx.array, tok: mx.array, tiles: mx.array, columns: int) -> mx.array:
        """columns: of 8 rows, of a tile; also 16ths of the outputs of a group."""
        m = self.matrix
        grid = m.outputs // (16 * columns), tiles.shape[0], 1
        inputs, outputs = [x, *m.arrays, tiles, tok], [((tok.shape[0], m.outputs), mx.bfloat16)]
        return self.backend.run(TENSOR_TILES, inputs, {**self.constants, "NT": columns}, grid, 32 * columns, outputs)[0]


def tiles_of(ids: mx.array, experts: int, rows: int) -> mx.array:
    """ids int32 [R] sorted -> int32 [R / rows + experts, 4]: (expert, first row, rows, 0) of tiles of at most `rows` rows of one expert.

    The number of tiles does not depend on the ids; those that are left over have no rows.
    """
    every = mx.arange(experts, dtype=mx.int32)
    start = mx.sum(ids[:, None] < every[None], axis=0).astype(mx.int32)
    count = mx.sum(ids[:, None] == every[None], axis=0).astype(mx.int32)
    share = (count + rows - 1) // rows
    last = mx.cumsum(share)
    tile = mx.arange(-(-ids.shape[0] // rows) + experts, dtype=mx.int32)
    expert = mx.minimum(mx.sum(tile[:, None] >= last[None], axis=1).astype(mx.int32), experts - 1)
    done = (tile - (last - share)[expert]) * rows
    left = mx.clip(count[expert] - done, 0, rows)
    return mx.stack([expert, start[expert] + done, mx.where(tile < last[-1], left, 0), mx.zeros_like(tile)], axis=1)


class TileExperts:
    """The experts of a prompt: x [n, D] bfloat16, ids int32 and weight float32 [n, picks] -> [n, D].

    shared: x -> the shared expert's output. Outputs are summed in float32 by ascending expert, the shared one last.
    """

    def __init__(self, backend: Backend, w1: Any, w3: Any, w2: Any, shared: Callable, limit: float):
        self.gate, self.up, self.down = (TileProduct(backend, w) for w in (w1, w3, w2))
        self.shared, self.limit, self.experts = shared, limit, self.gate.matrix.arrays[0].shape[0]

    def __call__(self, x: mx.array, ids: mx.array, weight: mx.array) -> mx.array:
        n, picks = ids.shape
        order = mx.argsort(ids.reshape(-1)).astype(mx.int32)
        whole = not (self.gate.matrix.outputs % 128 or self.down.matrix.outputs % 128)
        columns = 8 if whole and n * picks >= 48 * self.experts else 4
        tiles, tok = tiles_of(ids.reshape(-1)[order], self.experts, 8 * columns), order // picks
        gate, up = self.gate(x, tok, tiles, columns), self.up(x, tok, tiles, columns)
        act = swiglu(gate, up, self.limit, weight.reshape(-1)[order][:, None], mx.bfloat16)
        y = self.down(act, mx.arange(n * picks, dtype=mx.int32), tiles, columns)
        back = mx.argsort(order)
        routed = mx.sum(y[back].reshape(n, picks, -1).astype(mx.float32), axis=1)
        return (routed + self.shared(x).astype(mx.float32)).astype(mx.bfloat16)
