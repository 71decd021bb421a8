"""One matrix of a pack as it lies on disk. What a format has to answer, and the parts that formats share.

A matrix `P` is the set of its tensors `P.weight`, `P.scale`, `P.trellis` and so on. Which format it has follows from which of them are
there, their dtypes and their shapes; config files only comment on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import PackDamaged, PackIncomplete
from dsv41chat.engine.pack.index import TensorRef

LEAVES = ("weight", "scale", "scales", "biases", "trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias")
FLOATS = ("BF16", "F16", "F32")
_NUMPY = {
    "BF16": "<u2", "F16": "<f2", "F32": "<f4", "U32": "<u4", "I32": "<i4", "I64": "<i8", "I16": "<i2", "U8": "u1", "I8": "i1",
    "F8_E4M3": "u1", "F8_E8M0": "u1",
}  # fmt: skip
_MLX = {
    "BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32, "U8": mx.uint8, "I16": mx.int16, "I32": mx.int32,
    "F8_E8M0": mx.uint8, "F8_E4M3": mx.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class WordSpec:
    """One array of a packed matrix in memory: shape of one matrix, and the safetensors tag of its values."""

    shape: tuple[int, ...]
    tag: str

    @property
    def dtype(self) -> mx.Dtype:
        return _MLX[self.tag]

    def empty(self, count: int | None = None) -> np.ndarray:
        return np.empty(self.shape if count is None else (count, *self.shape), _NUMPY[self.tag])

    def to_mlx(self, raw: np.ndarray) -> mx.array:
        return mx.array(raw).view(mx.bfloat16) if self.tag == "BF16" else mx.array(raw)


@dataclass(frozen=True)
class Layout:
    """How MLX holds a packed matrix: its mode, bits and group, and its arrays by name (weight, scales, biases)."""

    mode: str
    bits: int
    group: int
    words: tuple[tuple[str, WordSpec], ...]


class Matrix(Protocol):
    """A checked matrix of which no data was read. shape [out, in]; label: the format in words, such as `affine 4 g64`.

    layout: how MLX can hold its very bytes, None where it cannot. `values(a, b)` gives float32 rows a..b; `words()` raw arrays as
    `layout` lists them. Both raise PackDamaged for bytes that cannot be.
    """

    shape: tuple[int, int]
    label: str
    parts: Mapping[str, TensorRef]

    @property
    def layout(self) -> Layout | None: ...

    def values(self, a: int = 0, b: int | None = None) -> np.ndarray: ...

    def words(self) -> dict[str, np.ndarray]: ...


def stem_of(name: str) -> str:
    """`layers.0.attn.wq_a.` of `layers.0.attn.wq_a.weight`."""
    return name.removesuffix("weight")


def parts_of(tensors: Mapping[str, TensorRef], name: str) -> dict[str, TensorRef]:
    """The tensors of the matrix `name` (its weight's name) by leaf."""
    stem = stem_of(name)
    return {leaf: tensors[stem + leaf] for leaf in LEAVES if stem + leaf in tensors}


def raw(ref: TensorRef, a: int = 0, b: int | None = None) -> np.ndarray:
    """Rows a..b of a tensor as it is stored, in its shape; bfloat16 as uint16. Mapped, not yet read."""
    data, shape = ref.bytes(), ref.shape or (1,)
    rows = data[a:b]
    return rows.reshape(-1).view(_NUMPY[ref.dtype]).reshape(rows.shape[0], *shape[1:])


def floats(ref: TensorRef, a: int = 0, b: int | None = None) -> np.ndarray:
    """float32 rows a..b of a bf16, f16 or f32 tensor."""
    found = raw(ref, a, b)
    return (found.astype(np.uint32) << 16).view(np.float32) if ref.dtype == "BF16" else found.astype(np.float32)


def where(ref: TensorRef) -> str:
    """The place of a tensor, and the name its file gives it."""
    return f"(file {ref.file.name}, offset {ref.offset:,})"


def demand(parts: Mapping[str, TensorRef], name: str, leaf: str, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> TensorRef:
    """The part `leaf`, checked. Raises PackIncomplete without it, PackDamaged when dtype or shape differ."""
    stem = stem_of(name)
    if leaf not in parts:
        have = ", ".join(stem + other for other in parts)
        raise PackIncomplete(f"{stem}{leaf} is missing beside {have}", "the build is incomplete; copy or convert it again")
    ref = parts[leaf]
    if ref.dtype not in dtypes or ref.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise PackDamaged(f"{stem}{leaf} is {ref.dtype} {list(ref.shape)}, expected {'/'.join(dtypes)} {wanted} {where(ref)}")
    return ref


def only(parts: Mapping[str, TensorRef], name: str, allowed: tuple[str, ...], label: str) -> None:
    """Raises PackDamaged when the matrix has parts that its format does not know."""
    extra = [leaf for leaf in parts if leaf not in allowed]
    if extra:
        stem = stem_of(name)
        raise PackDamaged(f"{stem}{extra[0]} does not belong to {label} {stem}{allowed[0]} {where(parts[extra[0]])}")
