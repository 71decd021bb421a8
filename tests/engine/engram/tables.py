"""Small table files and stand-ins for the operating system, shared by the engram tests."""

from __future__ import annotations

import errno
import mmap
import os
import threading

import numpy as np

from dsv41chat.engine.engram.os_layer import LinuxLayer, MacLayer, Unsupported
from dsv41chat.engine.engram.paths import WORKERS
from dsv41chat.engine.engram.table import TableRef, TableSpec

PAGE = mmap.PAGESIZE
FORMATS = ("fp8", "affine4-g32", "affine4-g64", "affine6-g64", "affine8-g32", "affine8-g64")


def row_parts(label: str, dim: int) -> list[tuple[str, int, int]]:
    """(dtype tag, items per row, bytes per row) of each region."""
    if label == "fp8":
        return [("F8_E4M3", dim, dim), ("F8_E8M0", dim // 32, dim // 32)]
    bits, group = int(label[6]), int(label.split("-g")[1])
    words, groups = dim * bits // 32, dim // group
    return [("U32", words, words * 4), ("BF16", groups, groups * 2), ("BF16", groups, groups * 2)]


def write_table(path, rows: int, label="fp8", dim: int = 256, start: int = 208, seed: int = 0, name="layers.1.engram", append=False) -> TableSpec:
    """Write one table's regions (scales first, as the release may) from byte `start` on and return its spec.

    fp8 rows hold no NaN code and scales near 1; affine scales and biases are finite bfloat16 values.
    """
    rng = np.random.default_rng(seed)
    parts = row_parts(label, dim)
    refs: list[TableRef | None] = [None] * len(parts)
    with open(path, "r+b" if append else "wb") as out:
        at = start
        for i in (*range(1, len(parts)), 0):
            tag, items, row_bytes = parts[i]
            if tag == "F8_E8M0":
                data = rng.integers(110, 135, (rows, row_bytes), np.uint8)
            elif tag == "BF16":
                data = (rng.standard_normal((rows, items)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
            else:
                data = rng.integers(0, 256, (rows, row_bytes), np.uint8)
                if tag == "F8_E4M3":
                    data[(data & 0x7F) == 0x7F] = 0x3A
            out.seek(at)
            out.write(data.tobytes())
            refs[i] = TableRef(path, at, tag, (rows, items))
            at += rows * row_bytes + 40 * (i + 1) + 3
    return TableSpec(name, dim, rows, *refs)


def oracle(spec: TableSpec, ids) -> tuple[np.ndarray, ...]:
    """One os.pread per row and region."""
    flat = np.asarray(ids).reshape(-1).tolist()
    parts = []
    for ref in spec.regions:
        fd = os.open(ref.file, os.O_RDONLY)
        try:
            data = b"".join(os.pread(fd, ref.row_bytes, ref.offset + row * ref.row_bytes) for row in flat)
        finally:
            os.close(fd)
        parts.append(np.frombuffer(data, np.uint8).reshape(len(flat), ref.row_bytes))
    return tuple(parts)


def straddlers(spec: TableSpec, page: int = PAGE) -> np.ndarray:
    """Rows whose weight bytes lie on two pages."""
    ref = spec.weight
    start = ref.offset + np.arange(spec.rows) * ref.row_bytes
    return np.flatnonzero(start // page != (start + ref.row_bytes - 1) // page)


def assert_rows(packed, spec, ids, expected=None) -> None:
    """expected: what `oracle` gave for these ids, when it was asked before."""
    for got, want in zip(packed.expanded(), expected or oracle(spec, ids), strict=True):
        assert np.array_equal(got, want)


def drop_file(path, mapped: mmap.mmap | None = None) -> None:
    """Push a file out of the page cache."""
    if mapped is not None:
        mapped.madvise(mmap.MADV_DONTNEED)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


class FakeMac(MacLayer):
    """The macOS layer on a Linux machine: its fcntl calls are acted out, and every Linux-only call is an error."""

    def __init__(self):
        super().__init__()
        self.advised = 0

    def _fcntl(self, fd, command, argument):
        if command == self.F_RDADVISE:
            self.advised += 1
        elif command != self.F_NOCACHE:
            raise OSError(errno.EINVAL, "unknown command")


def refuse_linux_calls(monkeypatch) -> None:
    """What macOS does not have must not be called on the macOS paths."""
    for name in ("posix_fadvise", "pidfd_open", "RWF_NOWAIT", "O_DIRECT", "POSIX_FADV_RANDOM", "POSIX_FADV_WILLNEED", "POSIX_FADV_DONTNEED"):
        monkeypatch.delattr(os, name, raising=False)


class SlowDisk(LinuxLayer):
    """A drive where a page takes `delay_s`, however many are asked for at once, and nothing is cached at first.

    A copy waits for pages whose read was started, and reads the others itself, one after another. Time is not the
    machine's: it passes where somebody waits here, and where the test calls tick().
    """

    advisers = ("process_madvise",)
    probes = ("mincore",)

    def __init__(self, delay_s: float = 0.005):
        super().__init__()
        self.delay_s, self.now = delay_s, 0.0
        self.ready: dict[int, float] = {}
        self.maps: list = []
        self._lock = threading.Lock()

    def clock(self):
        return self.now

    def tick(self, reader, seconds: float) -> None:
        """Let the reader's threads do all they can do now, then let time pass, as computing does."""
        idle = threading.Event()
        reader.runner.lane.submit(idle.set, urgent=False)
        assert idle.wait(120)
        barrier = threading.Barrier(WORKERS + 1)
        for _ in range(WORKERS):
            reader.runner.paths.pool.submit(barrier.wait, 120)
        barrier.wait(120)
        with self._lock:
            self.now += seconds

    def advise(self, means, fd, mapped, pages):
        with self._lock:
            for page in pages.tolist():
                self.ready.setdefault((fd, page), self.now + self.delay_s)

    def mincore(self, mapped, pages):
        fd = next(fd for fd, m in self.maps if m is mapped)
        return np.array([self.ready.get((fd, page), np.inf) <= self.now for page in pages.tolist()], bool)

    def take(self, rows, ids, out):
        address, width = rows.ctypes.data, rows.shape[1]
        fd, base = next((fd, m.address) for fd, m in self.maps if m.address <= address < m.address + len(m.array))
        with self._lock:
            for page in np.unique((address - base + ids * width) // self.page_size).tolist():
                self.now = max(self.now, self.ready.setdefault((fd, page), self.now + self.delay_s))
        super().take(rows, ids, out)

    def map(self, fd, size):
        mapped = super().map(fd, size)
        self.maps.append((fd, mapped))
        return mapped


class GatedDisk(LinuxLayer):
    """No copy ends before `gate` is set."""

    def __init__(self):
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()

    def take(self, rows, ids, out):
        self.entered.set()
        assert self.gate.wait(120)
        super().take(rows, ids, out)


class FaultyDisk(LinuxLayer):
    """Reads fail with `error` once `armed`; everything else is real."""

    def __init__(self, error: int = errno.EIO):
        super().__init__()
        self.armed, self.error = False, error

    def _maybe(self):
        if self.armed:
            raise OSError(self.error, os.strerror(self.error))

    def take(self, rows, ids, out):
        self._maybe()
        super().take(rows, ids, out)

    def pread_into(self, fd, buffer, offset):
        self._maybe()
        return super().pread_into(fd, buffer, offset)


class NoAdvice(LinuxLayer):
    """A container that forbids some means of advice."""

    def __init__(self, forbidden=("process_madvise",)):
        super().__init__()
        self.forbidden = forbidden

    def advise(self, means, fd, mapped, pages):
        if means in self.forbidden:
            raise Unsupported(f"{means}: Operation not permitted")
        super().advise(means, fd, mapped, pages)
