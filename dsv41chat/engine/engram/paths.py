"""How a batch of rows is brought in: direct, advise, pool, nocache, and rows that already lie in memory.

    direct   copy through the map; right when the pages are resident
    advise   ask the system to start all reads, then copy; each copy waits only for reads that are already in flight
    pool     let many threads fault at once
    nocache  leave nothing behind in the page cache: uncached descriptors, or (Linux, mapped) advise, copy, drop again
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dsv41chat.engine.engram.counters import TableCounters
from dsv41chat.engine.engram.os_layer import PosixLayer, Unsupported
from dsv41chat.engine.engram.regions import Table, TableFile
from dsv41chat.engine.engram.residency import ResidencyProbe

WORKERS = 15  # with the lane of fetch.py: 16 threads for all tables
SLICE_PAGES = 1024
TAKE_ROWS = 1024
DIRECT_SLICES = 4

FilePages = list[tuple[TableFile, np.ndarray]]


class Adviser:
    """Starts reads by the best means that still works here; a refused means is retired for the session."""

    def __init__(self, os: PosixLayer):
        self.os = os
        self.means = list(os.advisers)
        self.refused: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self.means)

    def advise(self, pages: FilePages, counters: TableCounters) -> bool:
        """Start reading sorted distinct pages. False when no means is left: the caller's copy will fault instead."""
        for file, numbers in pages:
            while numbers.size:
                if not (means := self.means[:1]):
                    return False
                try:
                    self.os.advise(means[0], file.fd, file.mapped, numbers)
                    break
                except (Unsupported, OSError) as error:
                    if self.means[:1] == means:
                        self.refused[self.means.pop(0)] = str(error)
                    counters.fallback(str(error))
        return True


class Batch:
    """Distinct rows of one table on their way into `out` (one uint8 [n, row_bytes] array per region).

    Only rows [0, n_fetch) are read; the rest came from the row cache. `cancelled` is looked at between slices.
    """

    def __init__(self, table: Table, ids: np.ndarray, out: tuple[np.ndarray, ...], n_fetch: int, counters: TableCounters):
        self.table, self.ids, self.out, self.n_fetch, self.counters = table, ids, out, n_fetch, counters
        self.cancelled = False
        self.error: BaseException | None = None

    def take(self, lo: int, hi: int, *, uncached: bool = False) -> None:
        for start in range(lo, hi, TAKE_ROWS):
            if self.cancelled or self.error is not None:
                return
            stop = min(start + TAKE_ROWS, hi)
            self.table.take(self.ids[start:stop], tuple(part[start:stop] for part in self.out), uncached=uncached)


class _Countdown:
    """Called `count` times from any threads; True the last time."""

    def __init__(self, count: int):
        self._count, self._lock = count, threading.Lock()

    def __call__(self) -> bool:
        with self._lock:
            self._count -= 1
            return self._count == 0


class Paths:
    """Runs batches. `begin_small` works on the caller's thread; `split` and `advise_slices` use the pool."""

    def __init__(self, os: PosixLayer, probe: ResidencyProbe, adviser: Adviser):
        self.os, self.probe, self.adviser = os, probe, adviser
        self.pool = ThreadPoolExecutor(WORKERS, "engram-io")  # its threads start with the first batch that needs them

    def drops(self, table: Table) -> bool:
        """Is `nocache` done by a cached read whose new pages are dropped again?"""
        return self.os.drops_pages and table.disk_regions[0].file.mapped is not None

    def begin_small(self, path: str, batch: Batch) -> FilePages:
        """Start the reads of a decode-size batch. Returns the pages to drop after the copy (nocache), else nothing."""
        if path not in ("advise", "nocache"):
            return []
        pages = batch.table.pages(batch.ids[: batch.n_fetch])
        batch.counters.add(pages=sum(len(numbers) for _, numbers in pages))
        if path == "nocache":
            pages = self.absent(pages)
        self.adviser.advise(pages, batch.counters)
        return pages if path == "nocache" else []

    def absent(self, pages: FilePages) -> FilePages:
        """Those of the pages that are not resident; all of them when the probe would have to read to tell."""
        if self.probe.kind not in ("mincore", "nowait"):
            return pages
        found = []
        for file, numbers in pages:
            resident = self.probe.resident(file, numbers)
            found.append((file, numbers if resident is None else numbers[~resident]))
        return found

    def drop(self, pages: FilePages, counters: TableCounters) -> None:
        for file, numbers in pages:
            try:
                self.os.drop(file.fd, file.mapped, numbers)
            except (Unsupported, OSError) as error:
                counters.fallback(f"drop: {error}")
            else:
                counters.add(dropped_pages=len(numbers))

    def split(self, batch: Batch, slices: int, done: Callable[[], None], *, uncached: bool = False) -> None:
        """Copy the batch on several threads; done() is called once, by the last of them."""
        n = batch.n_fetch
        slices = max(1, min(slices, -(-n // 3)))
        cuts = [n * i // slices for i in range(slices + 1)]
        batch.counters.add(pages=n * len(batch.table.disk_regions))
        last_one = _Countdown(slices)

        def work(lo: int, hi: int) -> None:
            try:
                batch.take(lo, hi, uncached=uncached)
            except BaseException as error:  # handed to the thread that waits for the rows
                batch.error = batch.error or error
            finally:
                if last_one():
                    done()

        for lo, hi in zip(cuts, cuts[1:]):
            self.pool.submit(work, lo, hi)

    def advise_slices(self, batch: Batch, drop: bool, done: Callable[[], None]) -> None:
        """Start reads slice by slice on this thread, which the device queue slows down; a worker copies behind it."""
        ready: queue.SimpleQueue = queue.SimpleQueue()

        def copy() -> None:
            try:
                while (item := ready.get()) is not None:
                    lo, hi, pages = item
                    batch.take(lo, hi)
                    if drop:
                        self.drop(pages, batch.counters)
            except BaseException as error:  # handed to the thread that waits for the rows
                batch.error = batch.error or error
            finally:
                done()

        self.pool.submit(copy)
        step = max(1, SLICE_PAGES // len(batch.table.disk_regions))
        try:
            for lo in range(0, batch.n_fetch, step):
                if batch.cancelled or batch.error is not None:
                    break
                hi = min(lo + step, batch.n_fetch)
                pages = batch.table.pages(batch.ids[lo:hi])
                batch.counters.add(pages=sum(len(numbers) for _, numbers in pages))
                if drop:
                    pages = self.absent(pages)
                self.adviser.advise(pages, batch.counters)
                ready.put((lo, hi, pages))
        except BaseException as error:
            batch.error = batch.error or error
        finally:
            ready.put(None)

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
