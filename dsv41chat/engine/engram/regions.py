"""Open table files, and rows by address: the only code that touches the bytes of a table."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from dsv41chat.engine.engram.os_layer import MIB, MappedFile, PosixLayer
from dsv41chat.engine.engram.table import RowFormat, TableRef, TableSpec, row_format
from dsv41chat.engine.errors import EngramReadError, PackDamaged, PackIncomplete, PackUnsupported

COPY_BYTES = 64 * MIB
UNMAP_ABOVE_BYTES = 512 * MIB
ROWS_BETWEEN_LOOKS = 4096  # each can add up to 16 pages, which the kernel maps around a fault


def read_error(name: str, path: Path, offset: int, reason: str) -> EngramReadError:
    error = EngramReadError(
        f"{name}: cannot read the row at offset {offset:,} of {path}: {reason}.",
        hint="Check that the volume is connected and the file is whole (`models verify`), then ask again.",
    )
    error.file, error.offset = path, offset
    return error


def _close_all(os: PosixLayer, fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


class TableFile:
    """One shard. mapped: its read-only map, None in pread access; identity: what R9 compares at each request."""

    def __init__(self, os: PosixLayer, path: Path, mapped: bool):
        self.os, self.path = os, path
        try:
            self.fd = os.open(path)
        except FileNotFoundError as error:
            raise PackIncomplete(f"{path} is absent; it holds an engram table") from error
        except OSError as error:
            raise PackDamaged(f"{path} cannot be opened: {error.strerror}") from error
        self._fds = [self.fd]
        self._closer = weakref.finalize(self, _close_all, os, self._fds)
        self.identity = os.identity(self.fd)
        self.size = self.identity[2]
        self.mapped: MappedFile | None = os.map(self.fd, self.size) if mapped and self.size else None
        self._uncached_fd: int | None = None
        self._rows_since_look = 0
        self._resident_floor = os.mapped_resident_bytes()
        self._lock = threading.Lock()

    def uncached_fd(self) -> int:
        """A second descriptor that leaves the page cache alone. Raises Unsupported where there is none."""
        with self._lock:
            if self._uncached_fd is None:
                self._uncached_fd = self.os.open_uncached(self.path)
                self._fds.append(self._uncached_fd)
            return self._uncached_fd

    def changed(self) -> str | None:
        """What differs from the file that was opened, or None."""
        try:
            now = self.os.identity(self.fd), self.os.identity(self.path)
        except OSError as error:
            return str(error.strerror)
        if now[1][:2] != self.identity[:2]:
            return "another file lies at its place"
        if now[0][2] != self.size:
            return f"its size is {now[0][2]:,} instead of {self.size:,} bytes"
        return "it was written to" if now[0] != self.identity or now[1] != self.identity else None

    def require_whole(self, name: str) -> None:
        """Raise EngramReadError when the file is shorter than its map: touching what is gone would end the process."""
        if (size := self.os.size(self.fd)) < self.size:
            raise read_error(name, self.path, size, f"the file ends there, it had {self.size:,} bytes when it was opened")

    def touched(self, rows: int) -> None:
        """Bound the resident size: mapped pages count as ours until they are unmapped, though the cache keeps them."""
        self._rows_since_look += rows
        if self._rows_since_look >= ROWS_BETWEEN_LOOKS:
            self._rows_since_look = 0
            if self.os.mapped_resident_bytes() > self._resident_floor + UNMAP_ABOVE_BYTES:
                self.os.unmap_touched(self.mapped)
                self._resident_floor = self.os.mapped_resident_bytes()  # what is left belongs to other maps

    def close(self) -> None:
        """Close the descriptors; the map goes with the last view of it."""
        self._closer()
        self.mapped = None


class Region:
    """Rows of one region. view: uint8 [rows, row_bytes] over the map or over memory, None in pread access."""

    def __init__(self, name: str, ref: TableRef, file: TableFile):
        self.name, self.file, self.os = name, file, file.os
        self.rows, self.row_bytes, self.offset = ref.shape[0], ref.row_bytes, ref.offset
        if ref.end > file.size:
            raise PackDamaged(f"{name} needs {ref.end:,} bytes of {file.path}, which has {file.size:,}; the download is probably incomplete")
        if self.row_bytes > self.os.page_size:
            raise PackUnsupported(f"{name}: a row of {self.row_bytes} bytes is longer than a page")
        self.in_memory = False
        self.view: np.ndarray | None = None
        if file.mapped is not None:
            self.view = file.mapped.array[self.offset : ref.end].reshape(self.rows, self.row_bytes)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def pages(self, ids: np.ndarray) -> np.ndarray:
        """First and last page numbers (of the file) that rows ids (int64 [n]) lie on, int64 [n] or [m > n], not unique."""
        start = ids * self.row_bytes
        start += self.offset
        first = start // self.os.page_size
        start += self.row_bytes - 1
        start //= self.os.page_size
        straddling = start[start != first]
        return np.concatenate((first, straddling)) if straddling.size else first

    def load(self, copied: Callable[[int], None]) -> None:
        """Copy the region into ordinary memory with sequential reads; copied(bytes) after each, and it may raise to stop."""
        memory = np.empty(self.nbytes, np.uint8)
        flat = memoryview(memory)
        for lo in range(0, self.nbytes, COPY_BYTES):
            part = flat[lo : lo + COPY_BYTES]
            self._read_exact(self.file.fd, part, self.offset + lo)
            copied(len(part))
        self.view, self.in_memory = memory.reshape(self.rows, self.row_bytes), True

    def take(self, ids: np.ndarray, out: np.ndarray) -> None:
        """Rows ids into out (uint8 [n, row_bytes]), through memory, the map, or one read per row."""
        if self.view is None:
            return self._read_rows(self.file.fd, ids, out)
        if self.in_memory:
            np.take(self.view, ids, axis=0, out=out, mode="clip")
            return
        try:
            self.os.take(self.view, ids, out)
        except OSError as error:
            raise read_error(self.name, self.file.path, self.offset + int(ids[0]) * self.row_bytes, str(error)) from error
        self.file.touched(len(ids))

    def take_uncached(self, ids: np.ndarray, out: np.ndarray) -> None:
        """The same bytes without the page cache. Raises Unsupported where there is no such read."""
        if self.in_memory:
            return self.take(ids, out)
        fd = self.file.uncached_fd()
        if self.os.direct_alignment() == 1:
            return self._read_rows(fd, ids, out)
        self._read_rows_aligned(fd, self.os.direct_alignment(), ids, out)

    def _read_rows(self, fd: int, ids: np.ndarray, out: np.ndarray) -> None:
        size, offset = self.row_bytes, self.offset
        flat = memoryview(out.reshape(-1))
        read = self.os.pread_into
        for i, row in enumerate(ids.tolist()):
            at = offset + row * size
            part = flat[i * size : (i + 1) * size]
            try:
                if read(fd, part, at) == size:
                    continue
            except OSError as error:
                raise read_error(self.name, self.file.path, at, error.strerror or str(error)) from error
            self._read_exact(fd, part, at)

    def _read_exact(self, fd: int, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                got = self.os.pread_into(fd, buffer[done:], offset + done)
            except OSError as error:
                raise read_error(self.name, self.file.path, offset + done, error.strerror or str(error)) from error
            if got == 0:
                raise read_error(self.name, self.file.path, offset + done, f"the file ends there, {len(buffer) - done} bytes are missing")
            done += got

    def _read_rows_aligned(self, fd: int, alignment: int, ids: np.ndarray, out: np.ndarray) -> None:
        # Uncached Linux reads want buffer, offset and length on block borders: read the blocks, copy the row out.
        raw = np.empty(3 * alignment, np.uint8)
        shift = -raw.ctypes.data % alignment
        block = raw[shift : shift + 2 * alignment]
        whole = memoryview(block)
        for i, row in enumerate(ids.tolist()):
            at = self.offset + row * self.row_bytes
            start = at - at % alignment
            stop = -(-(at + self.row_bytes) // alignment) * alignment
            try:
                got = self.os.pread_into(fd, whole[: stop - start], start)
            except OSError as error:
                raise read_error(self.name, self.file.path, at, error.strerror or str(error)) from error
            if got < at - start + self.row_bytes:
                raise read_error(self.name, self.file.path, start + got, "the file ends inside the row")
            out[i] = block[at - start : at - start + self.row_bytes]


class Table:
    """One engram layer's regions, open. index: its slot in the reader; files: the distinct shards it lies in."""

    def __init__(self, index: int, spec: TableSpec, files: dict[Path, TableFile]):
        self.index, self.spec, self.name, self.rows = index, spec, spec.name, spec.rows
        self.format: RowFormat = row_format(spec)
        self.regions = [Region(spec.name, ref, files[ref.file]) for ref in spec.regions]

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions)

    @cached_property
    def row_bytes(self) -> int:
        return sum(region.row_bytes for region in self.regions)

    @cached_property
    def resident(self) -> bool:
        return not self.disk_regions

    @cached_property
    def disk_regions(self) -> list[Region]:
        return [region for region in self.regions if not region.in_memory]

    @cached_property
    def mapped_files(self) -> list[TableFile]:
        return list({region.file: None for region in self.disk_regions if region.file.mapped is not None})

    def checked(self, ids) -> np.ndarray:
        """Flat int64 ids. Raises TypeError on other kinds of numbers, IndexError when one is outside 0 <= id < rows."""
        ids = np.asarray(ids)
        if ids.dtype.kind not in "iu":
            raise TypeError(f"{self.name}: row ids are integers, not {ids.dtype}")
        flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
        # Seen as unsigned, a negative id is larger than any table: one pass checks both ends.
        if flat.size and int(flat.view(np.uint64).max()) >= self.rows:
            bad = flat[(flat < 0) | (flat >= self.rows)][0]
            raise IndexError(f"{self.name}: row {bad} is outside 0 <= row < {self.rows}")
        return flat

    def pages(self, ids: np.ndarray) -> list[tuple[TableFile, np.ndarray]]:
        """Sorted distinct pages that rows ids need from disk, one entry per file."""
        by_file: dict[TableFile, list[np.ndarray]] = {}
        for region in self.disk_regions:
            by_file.setdefault(region.file, []).append(region.pages(ids))
        return [(file, np.unique(np.concatenate(parts))) for file, parts in by_file.items()]

    def weight_pages(self, ids: np.ndarray) -> tuple[TableFile, np.ndarray]:
        """The pages a residency probe samples: those of the weight region, one per row."""
        region = next(iter(self.disk_regions))
        return region.file, (ids * region.row_bytes + region.offset) // region.os.page_size

    def take(self, ids: np.ndarray, out: tuple[np.ndarray, ...], *, uncached: bool = False) -> None:
        """Copy rows ids into out, one uint8 [n, row_bytes] array per region."""
        for file in self.mapped_files:
            file.require_whole(self.name)
        for region, part in zip(self.regions, out):
            (region.take_uncached if uncached else region.take)(ids, part)
