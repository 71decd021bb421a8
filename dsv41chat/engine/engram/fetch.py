"""From row ids to staged rows: tickets, the thread that drives large batches, and the buffers rows are staged in.

Only the model's thread stages and waits. Batches of decode size are started on that thread (an advise call of up to
512 pages costs it less than a hand-over); larger ones, and read-ahead, are driven by one lane thread and a pool.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dsv41chat.engine.engram.os_layer import MIB
from dsv41chat.engine.engram.paths import Batch, FilePages
from dsv41chat.engine.engram.regions import Table
from dsv41chat.engine.engram.table import RowFormat
from dsv41chat.engine.errors import Cancelled, EngineError

STAGING_BYTES = 64 * MIB
KEPT_BUFFERS = 4
IDLE_S = 30.0
ALIGN = 64  # every region of a staging buffer starts on this border, so that it can be viewed as uint32 or uint16


@dataclass(frozen=True)
class PackedRows:
    """Staged rows as they lie in the file. weight, scale, bias: uint8 [rows, row_bytes]; shape: of the ids asked for.

    inverse: int64 [lookups], the staged row of each id in order, or None when row i answers id i. The arrays are views of
    a staging buffer: they hold until the slot is released.
    """

    table: Table
    format: RowFormat
    weight: np.ndarray
    scale: np.ndarray
    bias: np.ndarray | None
    inverse: np.ndarray | None
    shape: tuple[int, ...]

    def expanded(self) -> tuple[np.ndarray, ...]:
        """One row per id, in the order of the ids: (weight, scale) or (weight, scale, bias)."""
        parts = (self.weight, self.scale) if self.bias is None else (self.weight, self.scale, self.bias)
        return parts if self.inverse is None else tuple(part[self.inverse] for part in parts)


class Staging:
    """Reusable byte buffers for large batches; `in_flight` is what bounds read-ahead."""

    def __init__(self):
        self.in_flight = 0
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> np.ndarray:
        with self._lock:
            fitting = [buffer for buffer in self._free if nbytes <= len(buffer) <= 4 * nbytes]
            buffer = min(fitting, key=len) if fitting else np.empty(nbytes, np.uint8)
            self._free = [other for other in self._free if other is not buffer]
            self.in_flight += len(buffer)
            return buffer

    def release(self, buffer: np.ndarray, reuse: bool = True) -> None:
        """reuse False: the buffer belongs to its holder from now on."""
        with self._lock:
            self.in_flight -= len(buffer)
            if reuse:
                self._free = [buffer, *self._free[: KEPT_BUFFERS - 1]]


class Lane:
    """One thread that runs jobs in order, urgent ones first. It starts with a job and ends when idle for IDLE_S."""

    def __init__(self):
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Callable[[], None], urgent: bool) -> None:
        with self._wake:
            if self._closed:
                raise EngineError("the engram reader is closed")
            heapq.heappush(self._jobs, (0 if urgent else 1, next(self._order), job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engram-lane", daemon=True)
                self._thread.start()
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closed:
                    if not self._wake.wait(IDLE_S) and not self._jobs:
                        break
                if not self._jobs:
                    self._thread = None
                    return
                _, _, job = heapq.heappop(self._jobs)
            job()
            del job  # an idle lane keeps no reader alive

    def close(self) -> None:
        """Run what is queued (cancelled jobs end at once), then stop."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            thread = self._thread
        if thread is not None:
            thread.join()


class Job:
    """One table's part of a ticket. It is planned when it starts: distinct ids, buffer, path."""

    def __init__(self, table: Table, flat: np.ndarray, shape: tuple[int, ...], n_tokens: int):
        self.table, self.flat, self.shape, self.n_tokens = table, flat, shape, n_tokens
        self.batch: Batch | None = None
        self.inverse: np.ndarray | None = None
        self.buffer: np.ndarray | None = None
        self.path = ""
        self.started = False
        self.inline = False  # the copy is made by the thread that waits
        self.to_drop: FilePages = []
        self.cancelled = False
        self.released = False
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._lock = threading.Lock()

    def cancel(self) -> None:
        self.cancelled = True
        if self.batch is not None:
            self.batch.cancelled = True

    def finish(self) -> None:
        self.done.set()

    def release(self, staging: Staging, reuse: bool = True) -> None:
        """Give the buffer back, once: at once when nothing writes to it, else the last writer calls again."""
        with self._lock:
            self.released = True
            if self.buffer is not None and self.done.is_set():
                buffer, self.buffer = self.buffer, None
                staging.release(buffer, reuse)

    def packed(self) -> PackedRows:
        out = self.batch.out
        return PackedRows(self.table, self.table.format, out[0], out[1], out[2] if len(out) > 2 else None, self.inverse, self.shape)


def split_buffer(buffer: np.ndarray, table: Table, rows: int) -> tuple[np.ndarray, ...]:
    """Views of a flat uint8 buffer: one uint8 [rows, row_bytes] array per region."""
    parts, at = [], 0
    for region in table.regions:
        end = at + rows * region.row_bytes
        parts.append(buffer[at:end].reshape(rows, region.row_bytes))
        at = -(-end // ALIGN) * ALIGN
    return tuple(parts)


def buffer_bytes(table: Table, rows: int) -> int:
    return sum(-(-rows * region.row_bytes // ALIGN) * ALIGN for region in table.regions)


class Ticket:
    """The rows of one forward, one slot per table. rows() blocks and belongs to the model's thread; cancel() never blocks."""

    def __init__(self, reader, jobs: Sequence[Job | None]):
        self._reader, self._jobs = reader, list(jobs)

    def rows(self, slot: int) -> PackedRows:
        """The packed rows of a table. Raises EngramReadError (a read failed) or Cancelled."""
        job = self._jobs[slot]
        if job is None:
            raise EngineError(f"no rows of engram table {slot} were staged with this ticket")
        if job.cancelled:
            raise Cancelled("the rows were cancelled before they were read")
        return self._reader.runner.rows_of(job)

    def ready(self, slot: int) -> bool:
        """Would rows(slot) return without waiting for a drive, as far as one can know?"""
        job = self._jobs[slot]
        return job is None or job.done.is_set() or (job.inline and job.path in ("direct", "resident"))

    def release(self, slot: int) -> None:
        """The rows were copied elsewhere; their buffer may be used again. Idempotent."""
        job = self._jobs[slot]
        if job is not None:
            job.release(self._reader.staging)

    def cancel(self) -> None:
        """Drop what is queued and forget what is running; also the way to be done with a ticket. Idempotent."""
        for job in self._jobs:
            if job is not None and not job.released:
                if not job.done.is_set():
                    self._reader.counters_of(job.table).add(cancelled=1)
                job.cancel()
                job.release(self._reader.staging)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exc) -> None:
        self.cancel()
