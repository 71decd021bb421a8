"""A generated engram shard of real row widths, without holes, whose every row can be checked from its id alone."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from dsv41chat.engine.engram.os_layer import PosixLayer
from dsv41chat.engine.engram.table import TableRef, TableSpec

DIM, SCALES, START = 256, 8, 208
CHUNK_ROWS = 1 << 18
STAMP = 0x9E3779B97F4A7C15


def _pattern() -> np.ndarray:
    return np.random.default_rng(11).integers(0, 256, (4096, DIM), np.uint8)


def _stamps(ids: np.ndarray, slot: int) -> np.ndarray:
    """uint8 [n, 8], different for every row and table."""
    return ((ids.astype(np.uint64) * np.uint64(2) + np.uint64(slot)) * np.uint64(STAMP)).view(np.uint8).reshape(-1, 8)


def weight_rows(ids: np.ndarray, slot: int, pattern: np.ndarray) -> np.ndarray:
    """uint8 [n, 256] that rows ids of table `slot` hold."""
    rows = pattern[ids % len(pattern)]
    rows[:, :8] = _stamps(ids, slot)
    return rows


class TableFile:
    """Two tables of `rows` rows each in one file; scales lie before weights, the data area is not page aligned."""

    def __init__(self, folder: Path, rows: int):
        self.path, self.rows, self.pattern = folder / "engram-bench.tables", rows, _pattern()
        self.specs, at = [], START
        for layer in (1, 14):
            scale = TableRef(self.path, at, "F8_E8M0", (rows, SCALES))
            weight = TableRef(self.path, scale.end, "F8_E4M3", (rows, DIM))
            self.specs.append(TableSpec(f"layers.{layer}.engram", DIM, rows, weight, scale))
            at = weight.end
        self.size = at

    def write(self) -> None:
        with open(self.path, "wb") as out:
            out.write(bytes(START))
            for slot in (0, 1):
                for lo in range(0, self.rows, CHUNK_ROWS):
                    out.write(_stamps(np.arange(lo, min(lo + CHUNK_ROWS, self.rows)), slot).tobytes())
                self.write_weights(out, slot)
            out.flush()
            os.fsync(out.fileno())

    def write_weights(self, out, slot: int) -> None:
        for lo in range(0, self.rows, CHUNK_ROWS):
            out.write(weight_rows(np.arange(lo, min(lo + CHUNK_ROWS, self.rows)), slot, self.pattern).tobytes())

    def check(self, slot: int, ids: np.ndarray, weight: np.ndarray, scale: np.ndarray | None) -> None:
        """Raises ValueError unless rows (one per id) are what the file holds."""
        if not np.array_equal(weight, weight_rows(ids, slot, self.pattern)):
            raise ValueError(f"wrong weight rows from table {slot}")
        if scale is not None and not np.array_equal(scale, _stamps(ids, slot)):
            raise ValueError(f"wrong scale rows from table {slot}")


class WeightCopy:
    """The first table's weights alone, from byte 0 of a file of their own, as a peer's layout wants them."""

    def __init__(self, table: TableFile, path: Path):
        self.path, self.rows, self.size = path, table.rows, table.rows * DIM
        weight = TableRef(path, 0, "F8_E4M3", (table.rows, DIM))
        self.specs = [TableSpec("weights", DIM, table.rows, weight, weight)]
        with open(path, "wb") as out:
            table.write_weights(out, 0)
            out.flush()
            os.fsync(out.fileno())


class ColdIds:
    """Fresh row ids of which mincore says, page by page, that nothing is in memory.

    It keeps its own map of the file, which is never read through. scales: are the scales read from the file too?
    """

    def __init__(self, file: TableFile | WeightCopy, os_layer: PosixLayer, seed: int = 0):
        self.file, self.os = file, os_layer
        self.fd = os_layer.open(file.path)
        self.mapped = os_layer.map(self.fd, file.size)
        self.rng = np.random.default_rng(seed)

    def pages(self, slot: int, ids: np.ndarray, scales: bool) -> np.ndarray:
        """int64 [n, 2 or 4]: first and last page of each row's regions."""
        spec, size = self.file.specs[slot], self.os.page_size
        columns = []
        for ref in spec.regions[: 2 if scales else 1]:
            start = ref.offset + ids * ref.row_bytes
            columns += [start // size, (start + ref.row_bytes - 1) // size]
        return np.stack(columns, 1)

    def resident(self, slot: int, ids: np.ndarray, scales: bool) -> np.ndarray:
        """bool [n]: is any page of the row in memory?"""
        pages, back = np.unique(self.pages(slot, ids, scales), return_inverse=True)
        return self.os.mincore(self.mapped, pages)[back.reshape(len(ids), -1)].any(1)

    def take(self, slot: int, n: int, scales: bool) -> tuple[np.ndarray, int]:
        """n fresh cold ids and the number of distinct pages they lie on."""
        found = np.zeros(0, np.int64)
        for _ in range(20):
            ids = self.rng.integers(0, self.file.rows, n + n // 8 + 8)
            found = np.unique(np.concatenate((found, ids[~self.resident(slot, ids, scales)])))
            if len(found) >= n:
                ids = self.rng.permutation(found)[:n]
                return ids, len(np.unique(self.pages(slot, ids, scales)))
        raise RuntimeError("the page cache holds too much of the file to find cold rows")

    def drop(self, *maps) -> None:
        """Push the whole file out of the page cache. maps: mmap objects through which it was read."""
        for mapped in (self.mapped.mmap, *maps):
            mapped.madvise(mmap.MADV_DONTNEED)  # pages that are still mapped would be kept
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_ahead_kb(path: Path) -> int | None:
    """Read-ahead of the volume a file lies on, from sysfs; None where that is not told."""
    device = os.stat(path).st_dev
    base = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for folder in (base, base.resolve().parent):
        if (value := folder / "queue" / "read_ahead_kb").is_file():
            return int(value.read_text())
    return None
