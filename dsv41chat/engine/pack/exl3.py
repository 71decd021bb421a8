"""EXL3 matrices: trellis, scale vectors and codebook markers. Checks by headers; decoding is in ops/exl3.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import PackDamaged, PackUnsupported
from dsv41chat.engine.ops.exl3 import BLOCK, MULTIPLIERS, dense
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.matrix import demand, only, raw, where

_HALVES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)


@dataclass(frozen=True)
class Exl3Matrix:
    """shape [out, in]; halves: 2 * K, bits per weight; codebook: 3inst, mcg or mul1."""

    shape: tuple[int, int]
    parts: Mapping[str, TensorRef]
    halves: int
    codebook: str
    layout = None

    @property
    def label(self) -> str:
        return f"exl3 {self.halves / 2:g} {self.codebook}"

    def stored(self) -> dict[str, np.ndarray]:
        """words uint32 [in / 16, out / 16, 8 * K], suh and svh float16, bias float16 where there is one. Raises PackDamaged."""
        self.check_markers()
        out = {"words": np.array(raw(self.parts["trellis"])).view(np.uint32)}
        for full, signs in (("suh", "su"), ("svh", "sv")):
            out[full] = np.array(raw(self.parts[full])) if full in self.parts else unpack_signs(raw(self.parts[signs]))
        return out | ({"bias": np.array(raw(self.parts["bias"]))} if "bias" in self.parts else {})

    def check_markers(self) -> None:
        """Raises PackDamaged for a marker that is not the codebook's multiplier."""
        for leaf, multiplier in MULTIPLIERS.items():
            if leaf in self.parts and int(raw(self.parts[leaf]).reshape(-1).view(np.uint32)[0]) != multiplier:
                ref = self.parts[leaf]
                raise PackDamaged(f"{ref.name} does not hold the multiplier {multiplier:#x} of its codebook {where(ref)}", "download the file again")

    def values(self, a: int = 0, b: int | None = None) -> np.ndarray:
        """float32 rows; computed over the blocks of 128 outputs that hold them."""
        b = self.shape[0] if b is None else b
        low, high = a // BLOCK * BLOCK, -(-b // BLOCK) * BLOCK
        part = self.stored()
        with mx.stream(mx.cpu):
            words = mx.array(np.ascontiguousarray(part["words"][:, low // 16 : high // 16]))
            found = np.array(dense(words, self.codebook, mx.array(part["suh"]), mx.array(part["svh"][low:high])))
        return found[a - low : b - low]

    def words(self) -> dict[str, np.ndarray]:
        raise TypeError("a trellis has no MLX layout")


def unpack_signs(words: np.ndarray) -> np.ndarray:
    """int16 [n / 16] sign bits -> float16 [n]: bit j of word i, least significant first, is element 16 * i + j; 1 means -1."""
    bits = (np.ascontiguousarray(words).view(np.uint16)[:, None] >> np.arange(16, dtype=np.uint16)) & 1
    return (1 - 2 * bits.reshape(-1).astype(np.int8)).astype(np.float16)


def recognise(parts: Mapping[str, TensorRef], name: str, shape: tuple[int, int]) -> Exl3Matrix:
    """A matrix with `trellis`. Raises PackError naming the part that does not fit."""
    rows, columns = shape
    trellis = parts["trellis"]
    if rows % BLOCK or columns % BLOCK:
        raise PackUnsupported(f"{trellis.name}: a matrix of [{rows}, {columns}] cannot be EXL3; both must be multiples of {BLOCK}")
    both = [leaf for leaf in MULTIPLIERS if leaf in parts]
    if len(both) > 1:
        raise PackDamaged(f"{trellis.name} has two codebook markers, {' and '.join(both)} {where(trellis)}")
    demand(parts, name, "trellis", ("I16",), tuple((columns // 16, rows // 16, 8 * halves) for halves in _HALVES))
    halves, codebook = trellis.shape[2] // 8, both[0] if both else "3inst"
    if halves % 2 and codebook != "mul1":
        raise PackUnsupported(f"{trellis.name}: {halves / 2:g} bits per weight exist with the mul1 codebook only, this one is {codebook}")
    for full, signs, length in (("suh", "su", columns), ("svh", "sv", rows)):
        if full in parts or signs not in parts:
            demand(parts, name, full, ("F16",), ((length,),))
        else:
            demand(parts, name, signs, ("I16", "U16"), ((length // 16,),))
    for leaf in both:
        demand(parts, name, leaf, ("I32", "U32"), ((), (1,)))
    if "bias" in parts:
        demand(parts, name, "bias", ("F16",), ((rows,),))
    only(parts, name, ("trellis", "suh", "svh", "su", "sv", *MULTIPLIERS, "bias"), "the trellis of")
    return Exl3Matrix(shape, parts, halves, codebook)
