"""Matrices as callables: dense or quantised, alone or stacked per expert. Rows are the first axis of every input."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.ops.fakequant import fp8_ue8m0

BITS = {"mxfp4": 4, "mxfp8": 8}


@dataclass
class Linear:
    """y = x @ weight.T. weight [out, in]; round_input: the fp8 input rounding of the release, where that option is on."""

    weight: mx.array
    round_input: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        return (fp8_ue8m0(x) if self.round_input else x) @ self.weight.T


@dataclass
class QuantizedLinear:
    """The same from packed words: weight uint32 [out, in * bits / 32], scales uint8 [out, in / 32]."""

    weight: mx.array
    scales: mx.array
    mode: str
    round_input: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        x = fp8_ue8m0(x) if self.round_input else x
        return mx.quantized_matmul(x, self.weight, self.scales, transpose=True, group_size=32, bits=BITS[self.mode], mode=self.mode)


@dataclass
class GroupedLinear:
    """Block-diagonal product: weight [G, rank, in]; x [n, G * in] -> [n, G * rank]."""

    weight: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        groups = self.weight.shape[0]
        y = mx.swapaxes(x.reshape(x.shape[0], groups, -1), 0, 1) @ mx.swapaxes(self.weight, 1, 2)
        return mx.swapaxes(y, 0, 1).reshape(x.shape[0], -1)


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
        return mx.gather_mm(x.astype(self.weight.dtype), mx.swapaxes(self.weight, 1, 2), rhs_indices=ids).astype(self.dtype)


@dataclass
class QuantizedExpertLinear:
    """The same from packed words: weight uint32 [E, out, in * bits / 32], scales uint8 [E, out, in / 32]."""

    weight: mx.array
    scales: mx.array
    mode: str
    dtype: mx.Dtype
    round_input: bool = False

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        x = fp8_ue8m0(x) if self.round_input else x
        y = mx.gather_qmm(x, self.weight, self.scales, rhs_indices=ids, transpose=True, group_size=32, bits=BITS[self.mode], mode=self.mode)
        return y.astype(self.dtype)
