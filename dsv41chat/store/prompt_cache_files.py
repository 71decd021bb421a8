"""Files of the prompt cache: safetensors, written once, never changed, checked on every reading.

A tensor is a plain triple (dtype, shape, data): dtype as safetensors spells it, data any buffer of that many bytes. The store
never looks into one.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tensor = tuple[str, tuple[int, ...], Any]

# Small, so that a decode step on the same cores never waits long for one.
PIECE_BYTES = 128 * 2**10
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I32": 4, "U32": 4}
_MAX_HEADER_BYTES = 16 * 2**20


class CacheCorrupt(Exception):
    """A stored state cannot be used. The text is the reason in a word or two: checksum, missing file, truncated, ..."""


class NoRoom(Exception):
    """An entry was not written; the text says why."""


@dataclass(frozen=True)
class Header:
    """tensors: name -> (dtype, shape), in the order of their data. raw: the bytes before the data, for the checksum."""

    meta: Mapping[str, str]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    raw: bytes


def encode_header(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(meta)}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        size = memoryview(data).nbytes
        if size != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{name}: {dtype} {list(shape)} in {size} bytes")
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The format wants the data to begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_bytes(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> int:
    """Size of the file that `write_file` would make."""
    return len(encode_header(tensors, meta)) + sum(memoryview(data).nbytes for _, _, data in tensors.values())


def write_file(
    temporary: Path,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, str],
    pace: Callable[[int], None] = lambda written: None,
    hook: Callable[[str], None] = lambda step: None,
) -> tuple[int, int]:
    """Write a new private file and bring it to the disk. Returns (bytes, CRC-32 of all of them).

    pace: called after each piece with its size; may sleep. Raises OSError, and leaves no file behind then.
    """
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", buffering=0) as file:
            _uncached(file.fileno())
            hook("created")
            crc = size = 0
            for piece in _pieces(tensors, meta):
                view = memoryview(piece)
                while len(view):
                    view = view[file.write(view) :]
                crc = zlib.crc32(piece, crc)
                size += len(piece)
                hook("piece")
                pace(len(piece))
            os.fsync(file.fileno())
            _drop_cached(file.fileno())
            hook("synced")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size, crc


def _pieces(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> Iterator[memoryview | bytes]:
    yield encode_header(tensors, meta)
    for _, _, data in tensors.values():
        view = memoryview(data).cast("B")
        for a in range(0, len(view), PIECE_BYTES):
            yield view[a : a + PIECE_BYTES]


def _uncached(fd: int) -> None:
    """macOS: these bytes are read again at the earliest in another turn, they must not push the weights out of memory."""
    import fcntl

    if hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)


def _drop_cached(fd: int) -> None:
    """Linux: the same, once they are on the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_header(fd: int, size: int) -> Header:
    """The header of an open file that should have `size` bytes. Raises CacheCorrupt."""
    if os.fstat(fd).st_size != size:
        raise CacheCorrupt("truncated")
    head = os.pread(fd, 8, 0)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise CacheCorrupt("checksum")
    raw = head + os.pread(fd, length, 8)
    try:
        entries = json.loads(raw[8:])
        meta = {str(k): str(v) for k, v in entries.pop("__metadata__").items()}
        tensors, offset = {}, 0
        for name, entry in entries.items():
            dtype, shape = entry["dtype"], tuple(int(v) for v in entry["shape"])
            end = offset + math.prod(shape) * ITEM_BYTES[dtype]
            if entry["data_offsets"] != [offset, end]:
                raise ValueError(name)
            tensors[name], offset = (dtype, shape), end
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheCorrupt("checksum") from error
    if len(raw) + offset != size:
        raise CacheCorrupt("checksum")
    return Header(meta, tensors, raw)


def read_data(fd: int, header: Header, crc: int, into: Mapping[str, memoryview]) -> None:
    """Fill `into` (one writable byte view per tensor of the header) and check the file's CRC. Raises CacheCorrupt."""
    offset, found = len(header.raw), zlib.crc32(header.raw)
    for name in header.tensors:
        view, a = into[name], 0
        while a < len(view):
            part = view[a : a + PIECE_BYTES]
            count = os.preadv(fd, [part], offset) if hasattr(os, "preadv") else _pread_into(fd, part, offset)
            if count == 0:
                raise CacheCorrupt("truncated")
            found = zlib.crc32(part[:count], found)
            a, offset = a + count, offset + count
    if found != crc:
        raise CacheCorrupt("checksum")


def _pread_into(fd: int, part: memoryview, offset: int) -> int:
    data = os.pread(fd, len(part), offset)
    part[: len(data)] = data
    return len(data)
