"""Where modules get their weights: one object that knows the formats, so that no other file asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import PackDamaged, PackUnsupported
from dsv41chat.engine.nn import linear as nn
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3GroupedLinear, Exl3Linear, Exl3Stack
from dsv41chat.engine.pack.exl3 import Exl3Matrix
from dsv41chat.engine.pack.formats import identify_slices
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.matrix import Layout, Matrix, floats, raw, where
from dsv41chat.engine.pack.mlx_quant import MlxMatrix
from dsv41chat.engine.pack.names import Expected

AnyLinear = nn.Linear | nn.QuantizedLinear | Exl3Linear
AnyGrouped = nn.GroupedLinear | nn.QuantizedGroupedLinear | Exl3GroupedLinear
AnyExperts = nn.ExpertLinear | nn.QuantizedExpertLinear | Exl3ExpertLinear


@dataclass(frozen=True)
class WeightSource:
    """tensors, expected: by release name, already through the gate. dtype: the model dtype. packed: keep fp8 and fp4 matrices as mxfp8 and
    mxfp4 words instead of decoding them; matrices of MLX and EXL3 builds always keep their form.
    round_inputs: the release's fp8 input rounding (an option of the engine).
    empty: arrays have the shapes and dtypes they would have, and nothing is read; for measuring.
    """

    tensors: Mapping[str, TensorRef]
    expected: Mapping[str, Expected]
    dtype: mx.Dtype
    packed: bool
    round_inputs: bool
    empty: bool = False

    def array(self, name: str, dtype: mx.Dtype | None = None) -> mx.array:
        """The values of a tensor that is not quantised, in the model dtype unless told otherwise."""
        ref = self.tensors[name]
        dtype = dtype or self.dtype
        return _outline(ref.shape, dtype) if self.empty else mx.array(floats(ref)).astype(dtype)

    def float32(self, name: str) -> mx.array:
        return self.array(name, mx.float32)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def ids(self, name: str, below: int) -> mx.array:
        """A table of whole numbers from 0 to `below` - 1 as int32. Raises PackDamaged for any other: gathers do not look at them."""
        ref = self.tensors[name]
        if self.empty:
            return _outline(ref.shape, mx.int32)
        found = raw(ref)
        if found.size and (found.min() < 0 or found.max() >= below):
            words = f"{name} holds numbers from {found.min():,} to {found.max():,}, there are {below:,} to name {where(ref)}"
            raise PackDamaged(words, "the table is of another build, or experts were pruned without it")
        return mx.array(found.astype(np.int32))

    def linear(self, name: str, *, rounds: bool = True, dtype: mx.Dtype | None = None) -> AnyLinear:
        """rounds: this matrix is stored as fp8 in the release, so its input takes part in the input rounding.

        dtype: of plain values. A matrix that stays packed computes in the dtype of its input.
        """
        rounded = rounds and self.round_inputs
        if self.expected[name].kind == "float":
            return nn.Linear(self.array(name, dtype), rounded)
        matrix = self._matrix(name)
        if isinstance(matrix, Exl3Matrix):
            return self._exl3(matrix, rounded)
        if self._keeps(matrix, plain_asked=dtype is not None):
            return nn.QuantizedLinear(self._pack([matrix]), rounded)
        return nn.Linear(self._values(matrix, dtype or self.dtype), rounded)

    def lookup(self, name: str) -> mx.array | nn.QuantizedLookup:
        """A matrix of which rows are read, `table[ids]`."""
        matrix = self._matrix(name)
        return nn.QuantizedLookup(self._pack([matrix]), self.dtype) if self._keeps(matrix) else self._values(matrix, self.dtype)

    def grouped(self, name: str, groups: int) -> AnyGrouped:
        """[groups * rank, in] as one product per group."""
        parts = self._matrices(name)
        if isinstance(parts[0], Exl3Matrix):
            if len(parts) != groups:
                raise PackUnsupported(f"{name} is stored in {len(parts)} EXL3 slices, the config has {groups} groups")
            return Exl3GroupedLinear(self._exl3_side_by_side(parts, False))
        (matrix,) = parts
        if self._keeps(matrix):
            packed = self._pack([matrix])
            split = lambda a: None if a is None else a.reshape(groups, a.shape[0] // groups, -1)
            weight, scales, biases = split(packed.weight), split(packed.scales), split(packed.biases)
            return nn.QuantizedGroupedLinear(nn.Packed(weight, scales, biases, packed.mode, packed.bits, packed.group))
        return nn.GroupedLinear(self._values(matrix, self.dtype).reshape(groups, matrix.shape[0] // groups, -1))

    def experts(self, prefix: str, which: str, count: int) -> AnyExperts:
        """`prefix.{e}.{which}.weight` for e < count, stacked."""
        parts = [self._matrix(f"{prefix}.{e}.{which}.weight") for e in range(count)]
        if all(isinstance(part, Exl3Matrix) for part in parts):
            return Exl3ExpertLinear(self._exl3_side_by_side(parts, self.round_inputs), self.dtype)
        if all(self._keeps(part) for part in parts) and len({_arrangement(part.layout) for part in parts}) == 1:
            return nn.QuantizedExpertLinear(self._pack(parts, stacked=True), self.dtype, self.round_inputs)
        if any(isinstance(part, MlxMatrix | Exl3Matrix) for part in parts):
            labels = " and ".join(sorted({part.label for part in parts}))
            raise PackUnsupported(f"{prefix}.*.{which}: the experts of one layer have different formats, {labels}")
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        if self.empty:
            return nn.ExpertLinear(_outline((count, *parts[0].shape), mx.float32 if on_cpu else self.dtype), self.dtype, self.round_inputs)
        weight = mx.array(np.stack([part.values() for part in parts])).astype(self.dtype)
        return nn.ExpertLinear(weight.astype(mx.float32) if on_cpu else weight, self.dtype, self.round_inputs)

    def _matrices(self, name: str) -> list[Matrix]:
        return identify_slices(self.tensors, name, self.expected[name].shape)

    def _matrix(self, name: str) -> Matrix:
        found = self._matrices(name)
        if len(found) != 1:
            raise PackUnsupported(f"{name} is stored in {len(found)} slices; only grouped matrices are read so")
        return found[0]

    def _keeps(self, matrix: Matrix, plain_asked: bool = False) -> bool:
        """Whether the matrix stays in its words. plain_asked: the caller wants a float dtype, which decoded release bytes can have."""
        if isinstance(matrix, MlxMatrix):
            return True
        return matrix.layout is not None and self.packed and not plain_asked

    def _values(self, matrix: Matrix, dtype: mx.Dtype) -> mx.array:
        return _outline(matrix.shape, dtype) if self.empty else mx.array(matrix.values()).astype(dtype)

    def _pack(self, parts: list[Matrix], stacked: bool = False) -> nn.Packed:
        """The words of one matrix, or of several side by side."""
        layout = parts[0].layout
        count = len(parts) if stacked else None
        if self.empty:
            arrays = {key: _outline(spec.shape if count is None else (count, *spec.shape), spec.dtype) for key, spec in layout.words}
        else:
            buffers = {key: spec.empty(count) for key, spec in layout.words}
            for e, part in enumerate(parts):
                for key, words in part.words().items():
                    buffers[key][e if stacked else ...] = words
            arrays = {key: spec.to_mlx(buffers[key]) for key, spec in layout.words}
        return nn.Packed(arrays["weight"], arrays["scales"], arrays.get("biases"), layout.mode, layout.bits, layout.group)

    def _exl3(self, matrix: Exl3Matrix, rounded: bool) -> Exl3Linear:
        if self.empty:
            (rows, columns), f16 = matrix.shape, mx.float16
            words = _outline((columns // 16, rows // 16, 4 * matrix.halves), mx.uint32)
            bias = _outline((rows,), f16) if "bias" in matrix.parts else None
            return Exl3Linear(words, _outline((columns,), f16), _outline((rows,), f16), bias, matrix.codebook, rounded)
        part = {key: mx.array(value) for key, value in matrix.stored().items()}
        return Exl3Linear(part["words"], part["suh"], part["svh"], part.get("bias"), matrix.codebook, rounded)

    def _exl3_side_by_side(self, parts: list[Exl3Matrix], rounded: bool) -> list[Exl3Linear] | Exl3Stack:
        """One stack when all are of one width and codebook, which the formats leave open."""
        first = parts[0]
        if len({(part.shape, part.halves, part.codebook, "bias" in part.parts) for part in parts}) > 1:
            return [self._exl3(part, rounded) for part in parts]
        (rows, columns), count = first.shape, len(parts)
        shapes = {"words": (count, columns // 16, rows // 16, 4 * first.halves), "suh": (count, columns), "svh": (count, rows)}
        shapes |= {"bias": (count, rows)} if "bias" in first.parts else {}
        kinds = {key: (np.uint32, mx.uint32) if key == "words" else (np.float16, mx.float16) for key in shapes}
        if self.empty:
            arrays = {key: _outline(shape, kinds[key][1]) for key, shape in shapes.items()}
        else:
            buffers = {key: np.empty(shape, kinds[key][0]) for key, shape in shapes.items()}
            for e, part in enumerate(parts):
                for key, value in part.stored().items():
                    buffers[key][e] = value
            arrays = {key: mx.array(buffers.pop(key)) for key in shapes}
        return Exl3Stack(arrays["words"], arrays["suh"], arrays["svh"], arrays.get("bias"), first.codebook, rounded)


def _outline(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array of this shape and dtype that takes no memory, evaluated or not: one zero, broadcast."""
    return mx.broadcast_to(mx.zeros((), dtype), shape)


def _arrangement(layout: Layout) -> tuple:
    return layout.mode, layout.bits, layout.group, tuple((key, spec.tag) for key, spec in layout.words)
