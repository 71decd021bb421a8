"""Where modules get their weights: one object that knows the pack's format, so that no other file asks for it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dsv41chat.engine.nn.linear import ExpertLinear, GroupedLinear, Linear, QuantizedExpertLinear, QuantizedLinear
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.names import scale_name
from dsv41chat.engine.pack.release import decode, repack


@dataclass(frozen=True)
class WeightSource:
    """dtype: the model dtype. packed: keep fp8/fp4 matrices as mxfp8/mxfp4 words instead of decoding them.
    round_inputs: the release's fp8 input rounding (an option of the engine)."""

    tensors: dict[str, TensorRef]
    dtype: mx.Dtype
    packed: bool
    round_inputs: bool

    def _parts(self, name: str) -> tuple[TensorRef, TensorRef | None]:
        return self.tensors[name], self.tensors.get(scale_name(name))

    def array(self, name: str, dtype: mx.Dtype | None = None) -> mx.array:
        return mx.array(decode(*self._parts(name))).astype(dtype or self.dtype)

    def float32(self, name: str) -> mx.array:
        return self.array(name, mx.float32)

    def ids(self, name: str) -> mx.array:
        """A table of whole numbers as int32."""
        ref = self.tensors[name]
        return mx.array(np.frombuffer(ref.bytes(), {"I32": "<i4", "I64": "<i8"}[ref.dtype]).reshape(ref.shape).astype(np.int32))

    def linear(self, name: str, *, rounds: bool = True, dtype: mx.Dtype | None = None) -> Linear | QuantizedLinear:
        """rounds: this matrix is stored as fp8 in the release, so its input takes part in the input rounding."""
        ref, scale = self._parts(name)
        rounded = rounds and self.round_inputs
        if self.packed and scale is not None and dtype is None and ref.shape[-1] * (2 if ref.dtype == "I8" else 1) % 32 == 0:
            return QuantizedLinear(*repack(ref, scale), rounded)
        return Linear(self.array(name, dtype), rounded)

    def grouped(self, name: str, groups: int) -> GroupedLinear:
        """[groups * rank, in] -> [groups, rank, in]; split by rows, and before any packing."""
        weight = self.array(name)
        return GroupedLinear(weight.reshape(groups, weight.shape[0] // groups, -1))

    def experts(self, prefix: str, which: str, count: int) -> ExpertLinear | QuantizedExpertLinear:
        """`prefix.{e}.{which}.weight` for e < count, stacked; or `prefix.{which}.weight`, which is already."""
        if f"{prefix}.{which}.weight" in self.tensors:
            return self._experts(decode(*self._parts(f"{prefix}.{which}.weight")))
        parts = [self._parts(f"{prefix}.{e}.{which}.weight") for e in range(count)]
        if self.packed and all(scale is not None for _, scale in parts):
            words = [repack(ref, scale) for ref, scale in parts]
            if len({mode for _, _, mode in words}) == 1:
                weight, scales = mx.stack([w for w, _, _ in words]), mx.stack([s for _, s, _ in words])
                return QuantizedExpertLinear(weight, scales, words[0][2], self.dtype, self.round_inputs)
        return self._experts(np.stack([decode(ref, scale) for ref, scale in parts]))

    def _experts(self, stacked: np.ndarray) -> ExpertLinear:
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        weight = mx.array(stacked).astype(self.dtype)
        return ExpertLinear(weight.astype(mx.float32) if on_cpu else weight, self.dtype, self.round_inputs)
