"""Runs the jobs of tickets: plans a batch, chooses its path, starts its reads, and hands its rows over."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsv41chat.engine.engram.counters import TableCounters
from dsv41chat.engine.engram.fetch import Job, Lane, PackedRows, Staging, buffer_bytes, split_buffer
from dsv41chat.engine.engram.os_layer import PosixLayer, Unsupported
from dsv41chat.engine.engram.paths import DIRECT_SLICES, WORKERS, Adviser, Batch, Paths
from dsv41chat.engine.engram.regions import Table
from dsv41chat.engine.engram.residency import TableGovernor
from dsv41chat.engine.engram.rowcache import RowCache
from dsv41chat.engine.engram.table import EngramSettings

SMALL_PAGES = 512
DEDUPE_IDS = 512
ADVISE_ROWS = 512
HINTS_KEPT = 1 << 15


@dataclass
class Desk:
    """What belongs to one table at run time. choices: measured paths by batch size (decode, prefill); hints: see `hinted`."""

    table: Table
    governor: TableGovernor
    counters: TableCounters
    row_cache: RowCache | None
    choices: dict[str, str]
    hints: set[int]

    def hint(self, ids: np.ndarray) -> None:
        """Remember tokens whose pages were asked for ahead; ids int64 [n, columns]."""
        if len(self.hints) > HINTS_KEPT:
            self.hints.clear()
        self.hints.update(ids[:, -1].tolist())

    def hinted(self, flat: np.ndarray) -> bool:
        """Were the pages of this batch asked for ahead? Then probing it would measure our own reads, not the cache."""
        return bool(self.hints) and flat.size > 0 and int(flat[-1]) in self.hints


class JobRunner:
    """desks: one per table. Batches of decode size start on the caller's thread, larger ones on the lane."""

    def __init__(self, os: PosixLayer, settings: EngramSettings, desks: Sequence[Desk], paths: Paths, adviser: Adviser):
        self.os, self.settings, self.desks, self.paths, self.adviser = os, settings, desks, paths, adviser
        self.staging, self.lane = Staging(), Lane()
        self._row_cache_lock = threading.Lock()

    def start(self, job: Job, urgent: bool) -> None:
        job.started = True
        if job.table.resident or len(job.flat) * len(job.table.disk_regions) <= SMALL_PAGES:
            self._plan(job, small=True)
            self._begin_small(job)
        else:
            self.lane.submit(lambda: self._drive(job), urgent)

    def rows_of(self, job: Job) -> PackedRows:
        """Wait for a job, or make its copy on this thread; raises what went wrong."""
        began = self.os.clock()
        desk = self.desks[job.table.index]
        if not job.started:
            self.start(job, urgent=True)
        if job.inline and not job.done.is_set():
            self._copy_inline(job, desk, began)
        else:
            job.done.wait()
        if (error := job.error or (job.batch and job.batch.error)) is not None:
            raise error
        if desk.row_cache is not None and job.batch.n_fetch and (job.path == "nocache" or self.settings.row_cache != "auto"):
            self._remember(job, desk.row_cache)
        seconds = self.os.clock() - began
        desk.counters.add(wait_s=seconds, host_s=seconds)
        return job.packed()

    def _copy_inline(self, job: Job, desk: Desk, began: float) -> None:
        batch = job.batch
        batch.take(0, batch.n_fetch)
        if job.to_drop:
            self.paths.drop(job.to_drop, batch.counters)
        if job.path == "direct":
            desk.governor.took(self.os.clock() - began)
        job.finish()

    # planning
    def _plan(self, job: Job, small: bool) -> None:
        """Distinct ids, a buffer, rows the row cache has, and the path."""
        table, desk = job.table, self.desks[job.table.index]
        ids, known = job.flat, None
        if len(ids) >= DEDUPE_IDS:
            ids, job.inverse = np.unique(ids, return_inverse=True)
        if desk.row_cache and ids.size:
            ids, job.inverse, known = self._cached_last(ids, job.inverse, desk.row_cache)
        if small:
            buffer = np.empty(buffer_bytes(table, len(ids)), np.uint8)
        else:
            job.buffer = buffer = self.staging.acquire(buffer_bytes(table, len(ids)))
        out = split_buffer(buffer, table, len(ids))
        n_fetch = len(ids)
        if known is not None and len(known):
            n_fetch -= len(known)
            column = 0
            for part in out:
                part[n_fetch:] = known[:, column : column + part.shape[1]]
                column += part.shape[1]
            desk.counters.add(row_cache_hits=len(known))
        job.batch = Batch(table, ids, out, n_fetch, desk.counters)
        job.batch.cancelled = job.cancelled
        job.path = self._choose(job, desk, n_fetch, "decode" if small else "prefill")
        warm = job.path in ("direct", "resident")
        desk.counters.add(rows=n_fetch, **{"warm_rows" if warm else "cold_rows": n_fetch})
        desk.counters.batch(job.path)

    def _cached_last(self, ids, inverse, cache: RowCache):
        """Reorder distinct ids so that rows of the row cache come last: (ids, inverse, copies of the cached ones)."""
        if inverse is None:
            ids, inverse = np.unique(ids, return_inverse=True)
        with self._row_cache_lock:
            slots = cache.find(ids)
            order = np.argsort(slots >= 0, kind="stable")
            known = cache.rows[slots[order][np.count_nonzero(slots < 0) :]]
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return ids[order], place[inverse], known

    def _remember(self, job: Job, cache: RowCache) -> None:
        n = job.batch.n_fetch
        with self._row_cache_lock:
            new = cache.find(job.batch.ids[:n]) < 0  # another ticket may have brought the same row meanwhile
            cache.insert(job.batch.ids[:n][new], tuple(part[:n][new] for part in job.batch.out))

    def _choose(self, job: Job, desk: Desk, rows: int, size: str) -> str:
        table, counters, governor, forced = job.table, desk.counters, desk.governor, self.settings.path
        if table.resident:
            return "resident"
        if not rows:
            return "direct"
        hinted = desk.hinted(job.flat)
        verdict = governor.latch.state if hinted else governor.verdict(job.batch.ids[:rows], job.n_tokens, prefill=size == "prefill")
        if forced != "auto":
            path = forced
        elif verdict == "warm":
            path = "direct"
        elif not hinted and not governor.within_budget(rows * len(table.disk_regions)):
            path = "nocache"
        else:
            path = desk.choices.get(size) or ("advise" if self.adviser else "pool")
        if path == "advise" and not self.adviser:
            counters.fallback("advise: no means is left, pool instead")
            path = "pool"
        if path == "nocache" and not self.paths.drops(table):
            try:
                for region in table.disk_regions:
                    region.file.uncached_fd()
            except (Unsupported, OSError) as error:
                counters.fallback(f"nocache: {error}, pool instead")
                path = "pool"
        return path

    # running
    def _begin_small(self, job: Job) -> None:
        uncached = job.path == "nocache" and not self.paths.drops(job.table)
        if job.path == "pool" or uncached:
            self.paths.split(job.batch, WORKERS, lambda: self._job_done(job), uncached=uncached)
            return
        job.inline = True
        job.to_drop = self.paths.begin_small(job.path, job.batch)

    def _drive(self, job: Job) -> None:
        """On the lane: plan a large batch and set its reads going."""
        if job.cancelled:
            return self._job_done(job)
        try:
            self._plan(job, small=False)
            done = lambda: self._job_done(job)
            if job.path == "advise" or (job.path == "nocache" and self.paths.drops(job.table)):
                self.paths.advise_slices(job.batch, job.path == "nocache", done)
            else:
                self.paths.split(job.batch, DIRECT_SLICES if job.path == "direct" else WORKERS, done, uncached=job.path == "nocache")
        except BaseException as error:  # raised again in rows()
            job.error = error
            self._job_done(job)

    def _job_done(self, job: Job) -> None:
        job.finish()
        if job.released:
            job.release(self.staging)

    # read-ahead
    def reads_ahead(self, table: Table) -> bool:
        """Is read-ahead of use? Not for a warm table: staging probes it often enough to notice when it cools down."""
        forced = self.settings.path
        if table.resident or forced in ("direct", "nocache"):
            return False
        return forced != "auto" or self.desks[table.index].governor.latch.state != "warm"

    def prefetch(self, table: Table, ids: np.ndarray) -> Job | None:
        """Start bringing in the pages of rows ids (int64 [n, columns], checked); None where that is of no use."""
        desk, forced = self.desks[table.index], self.settings.path
        if not ids.size:
            return None
        flat = ids.reshape(-1)
        small = len(flat) * len(table.disk_regions) <= SMALL_PAGES
        verdict = desk.governor.verdict(flat, len(ids), prefill=not small)
        if forced == "auto" and (verdict == "warm" or not desk.governor.within_budget(len(flat) * len(table.disk_regions))):
            return None
        desk.hint(ids)
        job = Job(table, flat, flat.shape, len(ids))
        job.started = True
        if small and self._advises(desk, "decode"):
            self._advise(job, flat)
            job.finish()
        else:
            self.lane.submit(lambda: self._warm_pages(job, desk, small), urgent=False)
        return job

    def _advises(self, desk: Desk, size: str) -> bool:
        wanted = self.settings.path if self.settings.path != "auto" else desk.choices.get(size, "advise")
        return bool(self.adviser) and wanted == "advise"

    def _advise(self, job: Job, ids: np.ndarray) -> None:
        counters = self.desks[job.table.index].counters
        pages = job.table.pages(ids)
        counters.add(prefetched_pages=sum(len(numbers) for _, numbers in pages))
        self.adviser.advise(pages, counters)

    def _warm_pages(self, job: Job, desk: Desk, small: bool) -> None:
        """On the lane: advice slice by slice where there is any, else the rows are read into scratch on the pool."""
        try:
            if job.cancelled:
                return job.finish()
            ids = np.unique(job.flat)
            if self._advises(desk, "decode" if small else "prefill"):
                for lo in range(0, len(ids), ADVISE_ROWS):
                    if job.cancelled:
                        break
                    self._advise(job, ids[lo : lo + ADVISE_ROWS])
                return job.finish()
            scratch = np.empty(buffer_bytes(job.table, len(ids)), np.uint8)
            job.batch = Batch(job.table, ids, split_buffer(scratch, job.table, len(ids)), len(ids), desk.counters)
            job.batch.cancelled = job.cancelled
            desk.counters.add(prefetched_pages=len(ids) * len(job.table.disk_regions))
            self.paths.split(job.batch, WORKERS, job.finish)
        except Exception:  # a hint has nobody to tell; the read that needs the row will meet the same error
            job.finish()

    def close(self) -> None:
        self.lane.close()
        self.paths.close()
