"""What lies in a pack folder: safetensors headers -> `TensorRef`. No tensor data is read here.

We own this reader because the numpy side of safetensors has no fp8 dtypes and because the Engram tables must be addressed by byte
offset: evaluating any slice of a lazily loaded MLX tensor materialises the whole tensor.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dsv41chat.engine.errors import PackDamaged, PackIncomplete

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E5M2": 1,
}  # fmt: skip
_MAX_HEADER_BYTES = 256 * 2**20
INDEX_NAME = "model.safetensors.index.json"
# Lies in a folder as long as a conversion into it has not ended.
UNFINISHED_NAME = "conversion.json"


@dataclass(frozen=True)
class TensorRef:
    """One tensor on disk. offset: absolute byte position in `file`; shape row-major; dtype: the safetensors tag."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def bytes(self) -> np.ndarray:
        """The raw bytes as uint8 [first axis, bytes per row] (a scalar as [1, nbytes]), mapped and not yet read."""
        flat = np.memmap(self.file, np.uint8, "r", offset=self.offset, shape=(self.nbytes,)) if self.nbytes else np.zeros(0, np.uint8)
        return flat.reshape(self.shape[0] if self.shape else 1, -1)


@dataclass(frozen=True)
class PackIndex:
    """tensors by name as their owning shard holds them; files: every shard in use; notes: what was ignored, in words."""

    folder: Path
    tensors: dict[str, TensorRef]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = field(default=())


def read_header(path: Path) -> dict[str, TensorRef]:
    """Tensors of one safetensors file. Raises PackDamaged for anything that contradicts itself, with the numbers."""
    size = path.stat().st_size
    with open(path, "rb") as f:
        head = f.read(8)
        if head.startswith(b"version "):
            raise PackDamaged(f"{path.name} is a Git LFS pointer, not the weights", "fetch the real files with git lfs pull")
        # A header length has zero bytes; its first byte alone may look like any character.
        if head.lstrip()[:1] == b"<" and b"\0" not in head:
            raise PackDamaged(f"{path.name} is a web page saved under this name, not the weights", "download the file again")
        if len(head) < 8:
            raise PackDamaged(f"{path.name} has {size} bytes, too few for a safetensors header", "download the file again")
        length = struct.unpack("<Q", head)[0]
        if length > _MAX_HEADER_BYTES or 8 + length > size:
            words = f"{path.name} announces a header of {length:,} bytes in a file of {size:,}"
            raise PackDamaged(words, "the file is cut or not a safetensors file; download it again")
        raw = f.read(length)
    try:
        header = json.loads(raw)
        entries = {name: t for name, t in header.items() if name != "__metadata__"}
        refs = {name: _ref(path, name, t, 8 + length) for name, t in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackDamaged(f"{path.name}: the header is not valid safetensors JSON: {error}", "download the file again") from error
    end = max((r.offset + r.nbytes for r in refs.values()), default=8 + length)
    if end > size:
        raise PackDamaged(f"{path.name} is truncated: its header describes {end:,} bytes, the file has {size:,}", "download the rest of the file")
    return refs


def _ref(path: Path, name: str, t: dict, data_start: int) -> TensorRef:
    start, end = t["data_offsets"]
    dtype, shape = t["dtype"], tuple(int(v) for v in t["shape"])
    item = ITEM_BYTES.get(dtype)
    if start < 0 or end < start or any(v < 0 for v in shape):
        raise ValueError(f"{name} has offsets {start}..{end}")
    if item is not None and math.prod(shape) * item != end - start:
        raise ValueError(f"{name} is {dtype} {list(shape)} = {math.prod(shape) * item:,} bytes, but spans {end - start:,}")
    return TensorRef(name, path, dtype, shape, data_start + start, end - start)


def open_index(folder: str | Path) -> PackIndex:
    """Every tensor of a pack. With an index file, the index owns the names: a tensor is taken only from the shard it names.

    Raises PackIncomplete for absent shards or tensors, PackDamaged for contradictions.
    """
    folder = Path(folder)
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        return _open_with_index(folder, index_path)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise PackIncomplete(f"{folder} holds no model*.safetensors", "copy the weight files into the folder")
    tensors: dict[str, TensorRef] = {}
    for path in files:
        for name, ref in read_header(path).items():
            if name in tensors:
                raise PackDamaged(f"{name} is in {tensors[name].file.name} and in {path.name}, and no {INDEX_NAME} says which counts")
            tensors[name] = ref
    return PackIndex(folder, tensors, tuple(files))


def _open_with_index(folder: Path, index_path: Path) -> PackIndex:
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise TypeError("weight_map is not an object of file names")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackDamaged(f"{INDEX_NAME} cannot be read: {error}", "copy it again from the original upload") from error
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).is_absolute() or ".." in Path(shard).parts or "\\" in shard:
            raise PackDamaged(f"{INDEX_NAME} names the file {shard!r}, which leaves the folder")
    absent = [s for s in shards if not (folder / s).is_file()]
    if absent:
        raise PackIncomplete(f"{len(absent)} of {len(shards)} shards are missing: {', '.join(absent[:8])}", "copy the missing files into the folder")
    headers = {shard: read_header(folder / shard) for shard in shards}
    lost = [name for name, shard in weight_map.items() if name not in headers[shard]]
    if lost:
        raise PackIncomplete(f"{len(lost)} tensors are in the index but not in their shard: {', '.join(lost[:8])}", "copy those shards again")
    unlisted = sum(name not in weight_map for header in headers.values() for name in header)
    doubles = sum(weight_map.get(name, shard) != shard for shard, header in headers.items() for name in header)
    notes = []
    if doubles:
        notes.append(f"{doubles} tensors are also in shards that the index does not name for them; those copies are ignored")
    if unlisted:
        notes.append(f"{unlisted} tensors are not in the index and are ignored")
    return PackIndex(folder, {name: headers[shard][name] for name, shard in weight_map.items()}, tuple(folder / s for s in shards), tuple(notes))
