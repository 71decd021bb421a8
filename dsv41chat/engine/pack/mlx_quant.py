"""MLX's own quantised layouts: affine 1 to 8 bits, mxfp4, mxfp8 and nvfp4. Shapes decide; a config can only be wrong about them.

`weight` is one bit stream per row, least significant bit first, in uint32 words. Affine: value = scale * code + bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import PackDamaged, PackIncomplete, PackUnsupported
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.matrix import FLOATS, Layout, WordSpec, demand, floats, only, raw, where

AFFINE_BITS, AFFINE_GROUPS = (1, 2, 3, 4, 5, 6, 8), (32, 64, 128)
# (bits, group) -> mode, for scales that are bytes
BYTE_MODES = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}


@dataclass(frozen=True)
class MlxMatrix:
    shape: tuple[int, int]
    parts: Mapping[str, TensorRef]
    mode: str
    bits: int
    group: int

    @property
    def label(self) -> str:
        return f"affine {self.bits} g{self.group}" if self.mode == "affine" else self.mode

    @property
    def layout(self) -> Layout:
        return Layout(self.mode, self.bits, self.group, tuple((leaf, WordSpec(ref.shape, ref.dtype)) for leaf, ref in self.parts.items()))

    def values(self, a: int = 0, b: int | None = None) -> np.ndarray:
        """Affine values are computed in float32 from the stored scales and biases."""
        part = {leaf: mx.array(floats(ref, a, b) if ref.dtype in FLOATS else np.array(raw(ref, a, b))) for leaf, ref in self._checked().items()}
        options = dict(group_size=self.group, bits=self.bits, mode=self.mode, dtype=mx.float32)
        with mx.stream(mx.cpu):
            return np.array(mx.dequantize(part["weight"], part["scales"], part.get("biases"), **options))

    def words(self) -> dict[str, np.ndarray]:
        return {leaf: np.array(raw(ref)) for leaf, ref in self._checked().items()}

    def _checked(self) -> Mapping[str, TensorRef]:
        """The parts, after a look at the byte scales. Raises PackDamaged for a NaN."""
        if self.mode != "affine":
            scales = self.parts["scales"]
            found = raw(scales)
            bad = (found & 127) == 127 if self.mode == "nvfp4" else found == 255
            if bad.any():
                raise PackDamaged(f"{scales.name} holds a NaN scale {where(scales)}", "download the file again")
        return self.parts


def recognise(parts: Mapping[str, TensorRef], name: str, shape: tuple[int, int]) -> MlxMatrix:
    """A matrix with `scales`. Raises PackError naming the part that does not fit."""
    rows, columns = shape
    if "weight" not in parts:
        raise PackIncomplete(f"{name} is missing beside {parts['scales'].name}", "the build is incomplete; copy it again")
    weight, scales = parts["weight"], parts["scales"]
    if weight.dtype != "U32" or len(weight.shape) != 2 or weight.shape[0] != rows or not weight.shape[1]:
        words = f"{weight.name} is {weight.dtype} {list(weight.shape)}, expected U32 words for [{rows}, {columns}] {where(weight)}"
        raise PackDamaged(words, "the build does not match its config.json; convert it again")
    if len(scales.shape) != 2 or scales.shape[0] != rows or not scales.shape[1]:
        raise PackDamaged(f"{scales.name} is {list(scales.shape)}, expected [{rows}, {columns} / group] {where(scales)}")
    bits, group = 32 * weight.shape[1] / columns, columns / scales.shape[1]
    if scales.dtype in FLOATS:
        if bits not in AFFINE_BITS or group not in AFFINE_GROUPS:
            raise _refused(name, weight, scales, bits, group)
        only(parts, name, ("weight", "scales", "biases"), "affine")
        demand(parts, name, "biases", (scales.dtype,), (scales.shape,))
        return MlxMatrix(shape, parts, "affine", int(bits), int(group))
    mode = BYTE_MODES.get((bits, group))
    if scales.dtype not in ("U8", "F8_E8M0", "F8_E4M3") or mode is None:
        raise _refused(name, weight, scales, bits, group)
    only(parts, name, ("weight", "scales"), mode)
    return MlxMatrix(shape, parts, mode, int(bits), int(group))


def _refused(name: str, weight: TensorRef, scales: TensorRef, bits: float, group: float) -> PackUnsupported:
    shapes = f"{list(weight.shape)} words and {scales.dtype} {list(scales.shape)} scales"
    return PackUnsupported(
        f"{name}: {shapes} mean {bits:g} bits in groups of {group:g}; MLX has affine {'/'.join(map(str, AFFINE_BITS))} in groups of "
        f"{'/'.join(map(str, AFFINE_GROUPS))}, mxfp4 and mxfp8 (32), nvfp4 (16)",
        "the build does not match its config.json; convert it again",
    )
