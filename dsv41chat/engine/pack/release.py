"""The release's byte formats: e4m3 and e2m1 values under power-of-two scales. Numbers out of bytes, and bytes into MLX layouts.

e4m3: sign, 4 exponent bits (bias 7), 3 mantissa bits, no infinities. ue8m0 byte b is 2**(b - 127), 255 is NaN and refused.
FP4: low nibble = even input index. Every product is exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dsv41chat.engine.errors import PackDamaged, PackIncomplete, PackUnsupported
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.matrix import FLOATS, Layout, WordSpec, floats, only, raw, stem_of, where

_POSITIVE_E4M3 = np.array([np.ldexp(1 + (b & 7) / 8, (b >> 3) - 7) if b >> 3 else np.ldexp(b & 7, -9) for b in range(127)] + [np.nan])
E4M3 = np.concatenate([_POSITIVE_E4M3, -_POSITIVE_E4M3]).astype(np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_SCALE_TAGS = ("F8_E8M0", "U8", "F32", "BF16")


def ue8m0(b: np.ndarray) -> np.ndarray:
    """Scale bytes -> float32 powers of two (255 -> NaN)."""
    value = np.ldexp(np.float32(1), b.astype(np.int32) - 127).astype(np.float32)
    return np.where(b == 255, np.float32(np.nan), value)


def scale_bytes(scale: TensorRef, a: int = 0, b: int | None = None) -> np.ndarray:
    """uint8 of rows a..b of a scale tensor. Scales stored as floats must be powers of two. Raises PackDamaged for a NaN."""
    if scale.dtype in ("F32", "BF16"):
        value = floats(scale, a, b)
        mantissa, exponent = np.frexp(value)
        if not ((mantissa == 0.5) & (exponent >= -126) & (exponent <= 128)).all():
            raise PackDamaged(f"{scale.name} holds scales that are not powers of two {where(scale)}", "convert the build again from its source")
        return (exponent + 126).astype(np.uint8)
    found = np.array(raw(scale, a, b)).view(np.uint8)
    if (found == 255).any():
        raise PackDamaged(f"{scale.name} holds the byte 255, which is NaN {where(scale)}", "download the file again")
    return found


def scale_block(weight: TensorRef, scale: TensorRef) -> tuple[int, int]:
    """(rows, inputs) that share one scale. (1, 32) is the layout of fp4 and of fp8 words with row scales.

    Shapes decide, names do not. Raises PackDamaged when no layout fits.
    """
    rows, columns = weight.shape[0], weight.shape[-1]
    if weight.dtype == "I8" and scale.shape == (rows, columns // 16):
        return 1, 32
    if weight.dtype in ("F8_E4M3", "U8"):
        for block in (32, 64, 128):
            if scale.shape == (-(-rows // block), -(-columns // block)):
                return block, block
        if scale.shape == (rows, -(-columns // 32)):
            return 1, 32
    found = f"{scale.name} is {scale.dtype} {list(scale.shape)}"
    raise PackDamaged(f"{found}, which does not fit {weight.name} {weight.dtype} {list(weight.shape)} {where(scale)}")


@dataclass(frozen=True)
class Plain:
    """bf16, f16 or f32 values."""

    shape: tuple[int, int]
    parts: Mapping[str, TensorRef]
    layout = None

    @property
    def label(self) -> str:
        return self.parts["weight"].dtype.lower()

    def values(self, a: int = 0, b: int | None = None) -> np.ndarray:
        return floats(self.parts["weight"], a, b)

    def words(self) -> dict[str, np.ndarray]:
        raise TypeError("plain values have no packed form")


@dataclass(frozen=True)
class Blocks:
    """fp8 or fp4 codes under power-of-two scales; block: (rows, inputs) of one scale."""

    shape: tuple[int, int]
    parts: Mapping[str, TensorRef]
    block: tuple[int, int]

    @property
    def four_bit(self) -> bool:
        return self.parts["weight"].dtype == "I8"

    @property
    def label(self) -> str:
        return "fp4" if self.four_bit else f"fp8 {self.block[0]}x{self.block[1]}"

    @property
    def layout(self) -> Layout | None:
        """The bytes are MLX's mxfp4 or mxfp8 words; scales are repeated to one per row and 32 inputs."""
        rows, columns = self.shape
        if columns % 32:
            return None
        bits = 4 if self.four_bit else 8
        words = ("weight", WordSpec((rows, columns * bits // 32), "U32")), ("scales", WordSpec((rows, columns // 32), "U8"))
        return Layout(f"mxfp{bits}", bits, 32, words)

    def values(self, a: int = 0, b: int | None = None) -> np.ndarray:
        rows, columns = self.shape
        b = rows if b is None else b
        codes, (high, wide) = raw(self.parts["weight"], a, b).view(np.uint8), self.block
        first = a // high
        scale = ue8m0(scale_bytes(self.parts["scale"], first, -(-b // high))[np.arange(a, b) // high - first])
        found = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(b - a, -1) if self.four_bit else E4M3[codes]
        return found * np.repeat(scale, wide, 1)[:, :columns]

    def words(self) -> dict[str, np.ndarray]:
        (rows, columns), (high, wide) = self.shape, self.block
        scale = scale_bytes(self.parts["scale"])
        if high > 1:
            scale = np.repeat(np.repeat(scale, high, 0)[:rows], wide // 32, 1)[:, : columns // 32]
        return {"weight": np.array(raw(self.parts["weight"])).view(np.uint32), "scales": np.ascontiguousarray(scale)}


def recognise(parts: Mapping[str, TensorRef], name: str, shape: tuple[int, int], block: int | None) -> Plain | Blocks:
    """A matrix in a release layout. block: what the config says of fp8 blocks, None without a word. Raises PackError."""
    weight, scale = parts["weight"], parts.get("scale")
    found = weight.shape[:-1] + (weight.shape[-1] * 2,) if weight.dtype == "I8" and weight.shape else weight.shape
    if found != shape:
        raise PackDamaged(f"{weight.name} is {list(found)}, the config expects {list(shape)} {where(weight)}")
    if weight.dtype in FLOATS:
        if scale is not None:
            raise PackDamaged(f"{scale.name} is there, but {weight.name} is {weight.dtype} and needs no scale {where(scale)}")
        only(parts, name, ("weight",), weight.dtype)
        return Plain(shape, parts)
    if weight.dtype not in ("F8_E4M3", "I8", "U8"):
        known = f"{', '.join(FLOATS)}, F8_E4M3, packed FP4 (I8), MLX or EXL3 words"
        raise PackUnsupported(f"{weight.name} has dtype {weight.dtype}; matrices are read as {known} {where(weight)}")
    if scale is None:
        raise PackIncomplete(f"{weight.name} is {weight.dtype} but {stem_of(name)}scale is missing", "the build is incomplete; copy it again")
    if scale.dtype not in _SCALE_TAGS:
        raise PackUnsupported(f"{scale.name} is {scale.dtype}, expected F8_E8M0")
    only(parts, name, ("weight", "scale"), weight.dtype)
    high, wide = scale_block(weight, scale)
    # A matrix no larger than a block fits several sizes, which then mean the same.
    fits = block is not None and scale.shape == tuple(-(-n // block) for n in shape)
    if high > 1 and block and high != block and not fits:
        raise PackDamaged(f"{scale.name} {list(scale.shape)} means blocks of {high}, $.quantization_config.weight_block_size says {block}")
    return Blocks(shape, parts, (high, wide))
