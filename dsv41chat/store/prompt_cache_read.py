"""Reading a state of the prompt cache: all files of a mark opened first, then checked byte by byte while they are copied."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsv41chat.store import prompt_cache_index as index
from dsv41chat.store.prompt_cache_files import ITEM_BYTES, CacheCorrupt, Header, Tensor, read_data, read_header
from dsv41chat.store.prompt_cache_index import BuildKey, Found


@dataclass(frozen=True)
class State:
    """What was read: ids (little-endian uint32), growing tensors joined along their first axis, fixed ones, the tail's metadata."""

    pos: int
    kind: str
    ids: bytes
    growing: Mapping[str, Tensor]
    fixed: Mapping[str, Tensor]
    meta: Mapping[str, str]
    segments: tuple[tuple[int, int], ...]  # (id, hi)


def read_state(folder: Path, build: BuildKey, found: Found) -> State:
    """Every file of a mark, read and checked. Raises CacheCorrupt or OSError."""
    if not found.segments or found.segments[-1].hi != found.pos:
        raise CacheCorrupt("missing segment")
    opened: list[int] = []
    try:
        # An unlinked file stays readable through its descriptor, so open everything first.
        for file in (*(s.file for s in found.segments), found.file):
            opened.append(os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC))
        headers = [read_header(fd, row.bytes) for fd, row in zip(opened, (*found.segments, found))]
        for header, row in zip(headers, found.segments):
            _check_meta(header, build, row.lo, row.hi)
        _check_meta(headers[-1], build, found.pos, found.pos)
        growing, parts = join(headers[:-1])
        fixed = {name: (dtype, shape, bytearray(tensor_bytes(dtype, shape))) for name, (dtype, shape) in headers[-1].tensors.items()}
        for fd, header, row, into in zip(opened, headers, found.segments, parts):
            read_data(fd, header, row.crc, into)
        read_data(opened[-1], headers[-1], found.crc, {name: memoryview(t[2]) for name, t in fixed.items()})
    finally:
        for fd in opened:
            os.close(fd)
    ids = bytes(growing.pop("tok", ("U32", (0,), b""))[2])
    segments = tuple((s.id, s.hi) for s in found.segments)
    return State(found.pos, found.kind, ids, growing, fixed, headers[-1].meta, segments)


def broken_segment(folder: Path, found: Found) -> list[int]:
    """The first segment of the chain that cannot be read, in a list; empty when only the tail is at fault."""
    for row in found.segments:
        try:
            fd = os.open(folder / row.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return [row.id]
        try:
            header = read_header(fd, row.bytes)
            into = {name: memoryview(bytearray(tensor_bytes(*entry))) for name, entry in header.tensors.items()}
            read_data(fd, header, row.crc, into)
            if (header.meta.get("lo"), header.meta.get("hi")) != (str(row.lo), str(row.hi)):
                return [row.id]
        except (CacheCorrupt, OSError):
            return [row.id]
        finally:
            os.close(fd)
    return []


def reason_of(error: BaseException) -> str:
    """Why a state could not be read, in a word or two."""
    if isinstance(error, CacheCorrupt):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "missing file"
    return "out of memory" if isinstance(error, MemoryError) else "unreadable"


def join(headers: list[Header]) -> tuple[dict[str, Tensor], list[dict[str, memoryview]]]:
    """Buffers for each growing tensor over all segments, and per segment the part of each that it fills."""
    rows: dict[str, int] = {}
    form: dict[str, tuple[str, tuple[int, ...]]] = {}
    for header in headers:
        for name, (dtype, shape) in header.tensors.items():
            if form.setdefault(name, (dtype, shape[1:])) != (dtype, shape[1:]):
                raise CacheCorrupt("wrong shape")
            rows[name] = rows.get(name, 0) + shape[0]
    out = {name: (dtype, (rows[name], *tail), bytearray(tensor_bytes(dtype, (rows[name], *tail)))) for name, (dtype, tail) in form.items()}
    filled, parts = dict.fromkeys(out, 0), []
    for header in headers:
        into = {}
        for name, (dtype, shape) in header.tensors.items():
            size = tensor_bytes(dtype, shape)
            into[name] = memoryview(out[name][2])[filled[name] : filled[name] + size]
            filled[name] += size
        parts.append(into)
    return out, parts


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return ITEM_BYTES[dtype] * math.prod(shape)


def _check_meta(header: Header, build: BuildKey, lo: int, hi: int) -> None:
    meta = header.meta
    if meta.get("fmt") != str(index.STORE_FORMAT):
        raise CacheCorrupt("older format")
    if meta.get("fp") != build.fp:
        raise CacheCorrupt("different model build")
    if (meta.get("lo"), meta.get("hi")) != (str(lo), str(hi)):
        raise CacheCorrupt("wrong place")
