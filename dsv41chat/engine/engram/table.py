"""What an engram table is on disk: regions, row formats, and the checks before anything is read.

A table is two or three regions of a safetensors shard: packed weights, one scale per group of values and, for affine
rows, one bias per group. The regions are far apart in the file, so a row costs one page per region.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsv41chat.engine.errors import PackDamaged, PackIncomplete, PackUnsupported

ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "U32": 4, "BF16": 2, "F16": 2}
KEY_PREFIXES = ("", "model.", "language_model.", "language_model.model.")
RELEASE_GROUP = 32


@dataclass(frozen=True)
class TableRef:
    """One region: `offset` is absolute in the file (header included), `dtype` the safetensors tag, `shape` [rows, items]."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        return self.offset + self.shape[0] * self.row_bytes


@dataclass(frozen=True)
class TableSpec:
    """One engram layer's table. name as `layers.1.engram`; dim: values per row; rows: what the config expects."""

    name: str
    dim: int
    rows: int
    weight: TableRef
    scale: TableRef
    bias: TableRef | None = None

    @property
    def regions(self) -> tuple[TableRef, ...]:
        return (self.weight, self.scale) if self.bias is None else (self.weight, self.scale, self.bias)


@dataclass(frozen=True)
class RowFormat:
    """How the bytes of a row become values. kind: `fp8` (release) or `affine`; scale_dtype: `F8_E8M0`, `BF16` or `F16`."""

    kind: str
    dim: int
    bits: int
    group: int
    scale_dtype: str

    @property
    def label(self) -> str:
        return "fp8" if self.kind == "fp8" else f"affine{self.bits}-g{self.group}"


def find_table(refs: Mapping[str, TableRef], layer: int, dim: int, rows: int) -> TableSpec:
    """Pick one layer's regions out of a pack's tensors by name: release (weight, scale) or MLX (weight, scales, biases).

    Raises PackIncomplete when a region is missing, PackDamaged when two spellings of the table are present.
    """
    stems = [stem for prefix in KEY_PREFIXES if (stem := f"{prefix}layers.{layer}.engram.embed.") + "weight" in refs]
    if not stems:
        raise PackIncomplete(f"the engram table of layer {layer} is absent: no tensor layers.{layer}.engram.embed.weight in this pack")
    if len(stems) > 1:
        raise PackDamaged(f"the engram table of layer {layer} occurs twice: {stems[0]}weight and {stems[1]}weight")
    stem = stems[0]
    release, scales, biases = (refs.get(stem + leaf) for leaf in ("scale", "scales", "biases"))
    if (release is None) == (scales is None):
        raise PackIncomplete(f"{stem}weight needs exactly one of {stem}scale (release) and {stem}scales (MLX)")
    if scales is not None and biases is None:
        raise PackIncomplete(f"{stem}scales is there but {stem}biases is not; other MLX modes are not supported for tables")
    return TableSpec(f"layers.{layer}.engram", dim, rows, refs[stem + "weight"], release or scales, biases if scales is not None else None)


def row_format(spec: TableSpec) -> RowFormat:
    """Check every region against the spec and say how rows are packed.

    Raises PackUnsupported for a layout that is not read here, PackDamaged when shapes, dtypes and config disagree.
    """
    for part, ref in zip(("weight", "scale", "bias"), spec.regions):
        if ref.dtype not in ITEM_BYTES:
            raise PackUnsupported(f"{spec.name} {part} has dtype {ref.dtype}; tables are read as fp8 with ue8m0 scales or MLX affine")
        if len(ref.shape) != 2 or ref.shape[0] != spec.rows:
            raise PackDamaged(f"{spec.name} {part} is {list(ref.shape)} in {ref.file.name}, the config expects {spec.rows} rows")
        if ref.offset < 8:
            raise PackDamaged(f"{spec.name} {part} starts at byte {ref.offset} of {ref.file.name}, inside the header length")
    if spec.bias is None:
        return _release_format(spec)
    return _affine_format(spec)


def _release_format(spec: TableSpec) -> RowFormat:
    expected = (spec.dim, spec.dim // RELEASE_GROUP)
    found = (spec.weight.shape[1], spec.scale.shape[1])
    if spec.dim % RELEASE_GROUP or found != expected:
        raise PackDamaged(f"{spec.name} has {found[0]} values and {found[1]} scales per row, {expected[0]} and {expected[1]} are expected")
    if spec.weight.dtype != "F8_E4M3" or spec.scale.dtype != "F8_E8M0":
        raise PackUnsupported(f"{spec.name} is {spec.weight.dtype} with {spec.scale.dtype} scales; the release layout is F8_E4M3 with F8_E8M0")
    return RowFormat("fp8", spec.dim, 8, RELEASE_GROUP, "F8_E8M0")


def _affine_format(spec: TableSpec) -> RowFormat:
    words, groups = spec.weight.shape[1], spec.scale.shape[1]
    if spec.weight.dtype != "U32" or spec.scale.dtype not in ("BF16", "F16"):
        raise PackUnsupported(f"{spec.name} is {spec.weight.dtype} with {spec.scale.dtype} scales; MLX affine is U32 with BF16 or F16")
    if (spec.bias.dtype, spec.bias.shape) != (spec.scale.dtype, spec.scale.shape):
        raise PackDamaged(f"{spec.name}: biases {spec.bias.dtype} {list(spec.bias.shape)} differ from scales {list(spec.scale.shape)}")
    if not groups or spec.dim % groups or (32 * words) % spec.dim:
        raise PackDamaged(f"{spec.name}: {words} words and {groups} scales per row do not divide into {spec.dim} values")
    bits, group = 32 * words // spec.dim, spec.dim // groups
    if bits not in (4, 6, 8) or group not in (32, 64):
        raise PackUnsupported(f"{spec.name} is affine {bits}-bit in groups of {group}; 4, 6 or 8 bits in groups of 32 or 64 are read")
    return RowFormat("affine", spec.dim, bits, group, spec.scale.dtype)


@dataclass(frozen=True)
class EngramSettings:
    """The `[engram]` settings, already parsed.

    mode: auto, stream or resident; scales: auto, resident or mapped; access: auto, mmap or pread; path: auto or the one
    path to use for every batch; cache_budget: auto or bytes; row_cache: auto or rows; overlap: start reads before they
    are wanted (off only for diagnosis).
    """

    mode: str = "auto"
    scales: str = "auto"
    access: str = "auto"
    path: str = "auto"
    cache_budget: int | str = "auto"
    row_cache: int | str = "auto"
    overlap: bool = True

    def __post_init__(self):
        choices = {
            "mode": ("auto", "stream", "resident"),
            "scales": ("auto", "resident", "mapped"),
            "access": ("auto", "mmap", "pread"),
            "path": ("auto", "direct", "advise", "pool", "nocache"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"engram.{name} is {getattr(self, name)!r}; one of {', '.join(allowed)}")
        for name in ("cache_budget", "row_cache"):
            value = getattr(self, name)
            if value != "auto" and (not isinstance(value, int) or value < 0):
                raise ValueError(f"engram.{name} is {value!r}; 'auto' or a number >= 0")
