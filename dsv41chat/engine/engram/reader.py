"""`EngramReader`: the only way to the rows of engram tables. A table is never an array of the model's framework."""

from __future__ import annotations

import json
import threading
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import numpy as np

from dsv41chat.engine.engram.counters import TableCounters
from dsv41chat.engine.engram.fetch import STAGING_BYTES, Job, Lane, PackedRows, Staging, Ticket, buffer_bytes, split_buffer
from dsv41chat.engine.engram.os_layer import PosixLayer, Unsupported, system_layer
from dsv41chat.engine.engram.paths import DIRECT_SLICES, WORKERS, Adviser, Batch, Paths
from dsv41chat.engine.engram.regions import Table, TableFile
from dsv41chat.engine.engram.residency import CacheBudget, ResidencyProbe, TableGovernor
from dsv41chat.engine.engram.rowcache import RowCache
from dsv41chat.engine.engram.table import EngramSettings, TableSpec
from dsv41chat.engine.errors import EngramReadError
from dsv41chat.engine.events import TableState

GIB = 1 << 30
SMALL_PAGES = 512
DEDUPE_IDS = 512
KEEP_FREE_BYTES = 24 * 10**9
MAX_BUDGET_BYTES = 16 * GIB
MAC_CACHE_ROWS = 65536


class EngramReader:
    """Both tables of one pack. Not shared between processes; staging and waiting belong to the model's thread.

    open() checks headers against the specs; stage() starts reads and returns a Ticket; prefetch() only makes pages
    resident; begin_request() re-checks the files and resets the cache budget.
    """

    def __init__(self, tables: Sequence[TableSpec], settings: EngramSettings, facts: MutableMapping[str, str] | None, os: PosixLayer):
        self.settings, self.facts, self.os = settings, facts if facts is not None else {}, os
        self._files: dict[Path, TableFile] = {}
        self.staging = Staging()
        self._closed = False
        try:
            self._open_files(tables)
            self.tables = [Table(index, spec, self._files) for index, spec in enumerate(tables)]
            self._load_regions()
        except BaseException:
            self._close_files()
            raise
        self.probe = ResidencyProbe(os)
        self.adviser = Adviser(os)
        self.paths = Paths(os, self.probe, self.adviser)
        self._lane = Lane()
        self._counters = [TableCounters() for _ in self.tables]
        self.budget = CacheBudget(self._budget_bytes())
        self._governors = [TableGovernor(table, self.probe, self.budget) for table in self.tables]
        self._row_caches = [self._new_row_cache(table) for table in self.tables]
        self._plan_lock = threading.Lock()
        self.choices: list[dict[str, str]] = [{} for _ in self.tables]
        self.reload_choices()
        self.probe.self_check(self.tables)

    @classmethod
    def open(
        cls,
        tables: Sequence[TableSpec],
        settings: EngramSettings | None = None,
        facts: MutableMapping[str, str] | None = None,
        *,
        os_layer: PosixLayer | None = None,
    ) -> EngramReader:
        """Open and check the tables of a pack, in slot order.

        facts: where measured path choices are kept (see calibrate.py). Raises PackIncomplete, PackDamaged or
        PackUnsupported before anything is read.
        """
        return cls(tables, settings or EngramSettings(), facts, os_layer or system_layer())

    # opening
    def _open_files(self, tables: Sequence[TableSpec]) -> None:
        for spec in tables:
            for ref in spec.regions:
                if ref.file not in self._files:
                    access = self.settings.access
                    mapped = access == "mmap" or (access == "auto" and not self.os.removable(ref.file))
                    self._files[ref.file] = TableFile(self.os, ref.file, mapped)

    def _load_regions(self) -> None:
        if self.settings.mode == "resident":
            wanted = [region for table in self.tables for region in table.regions]
        elif self._scales_resident():
            wanted = [region for table in self.tables for region in table.regions[1:]]
        else:
            wanted = []
        for region in wanted:
            region.load()

    def _scales_resident(self) -> bool:
        if self.settings.scales != "auto":
            return self.settings.scales == "resident"
        small = sum(region.nbytes for table in self.tables for region in table.regions[1:])
        return self.os.memory()[1] - small >= KEEP_FREE_BYTES

    def _budget_bytes(self) -> int:
        if self.settings.cache_budget != "auto":
            return int(self.settings.cache_budget)
        return min(self.os.memory()[1] // 4, MAX_BUDGET_BYTES)

    def _new_row_cache(self, table: Table) -> RowCache | None:
        rows = self.settings.row_cache
        if rows == "auto":
            # Where nocache reads skip the page cache altogether, hot rows would be read from the drive again and again.
            rows = MAC_CACHE_ROWS if self.os.name == "darwin" and self.settings.path == "nocache" else 0
        return RowCache(min(rows, table.rows), table.row_bytes) if rows and not table.resident else None

    def fact_key(self, table: Table, size: str) -> str:
        """The key of a measured choice: platform, volume and batch class (decode or prefill)."""
        return f"engram.path/{self.os.name}/{self.os.volume(table.spec.weight.file)}/{size}"

    def reload_choices(self) -> None:
        """Take measured paths from the facts; what cannot be parsed or is not available here is ignored."""
        for table, choice in zip(self.tables, self.choices):
            for size in ("decode", "prefill"):
                try:
                    path = json.loads(self.facts[self.fact_key(table, size)])["path"]
                except (KeyError, TypeError, ValueError):
                    continue
                if path in ("direct", "advise", "pool", "nocache"):
                    choice[size] = path

    # the model's side
    def begin_request(self) -> None:
        """Check that no file changed since it was opened (raises EngramReadError) and start a new cache budget."""
        for file in self._files.values():
            if (what := file.changed()) is not None:
                error = EngramReadError(
                    f"The weight files changed while the app was running: {file.path} (offset 0): {what}.",
                    hint="Restart the app; if the file was being replaced, wait until it is complete.",
                )
                error.file, error.offset = file.path, 0
                raise error
        self.budget.reset()

    def stage(self, rows: Sequence[np.ndarray | None], urgent: bool = True) -> Ticket:
        """Start reading rows: one integer array [n, columns] per table in slot order, None for a table that is not wanted.

        urgent: a forward waits for them; read-ahead is not. Raises IndexError for an id outside its table, before
        anything is read.
        """
        began = self.os.clock()
        jobs: list[Job | None] = []
        for table, ids in zip(self.tables, rows):
            if ids is None:
                jobs.append(None)
                continue
            flat = table.checked(ids)
            shape = np.shape(ids)
            jobs.append(Job(table, flat, shape, shape[0] if len(shape) > 1 else 1))
            self._counters[table.index].add(lookups=len(flat), bytes=len(flat) * table.row_bytes)
        if self.settings.overlap:
            for job in jobs:
                if job is not None and (urgent or self.staging.in_flight + buffer_bytes(job.table, len(job.flat)) <= STAGING_BYTES):
                    self._start(job, urgent)
        self._add_host_time(jobs, self.os.clock() - began)
        return Ticket(self, jobs)

    def gather(self, slot: int, ids: np.ndarray) -> PackedRows:
        """Read rows now. The result owns its memory."""
        rows: list[np.ndarray | None] = [None] * len(self.tables)
        rows[slot] = ids
        job = self.stage(rows)._jobs[slot]
        packed = self._rows_of(job)
        job.release(self.staging, reuse=False)
        return packed

    def prefetch(self, rows: Sequence[np.ndarray | None]) -> Ticket:
        """Make the pages of rows resident ahead of a later stage(). Counts as work only where reads can be started.

        The ticket has no rows; cancel() drops what has not been read. Nothing happens for a warm or resident table.
        """
        began = self.os.clock()
        jobs: list[Job | None] = []
        for table, ids in zip(self.tables, rows):
            job = None
            if ids is not None and self.settings.overlap:
                job = self._prefetch_one(table, table.checked(ids))
            jobs.append(job)
        self._add_host_time(jobs, self.os.clock() - began)
        return Ticket(self, jobs)

    def _prefetch_one(self, table: Table, flat: np.ndarray) -> Job | None:
        governor, counters = self._governors[table.index], self._counters[table.index]
        forced = self.settings.path
        if table.resident or not flat.size or forced in ("direct", "nocache") or governor.latch.state == "warm":
            return None
        if self.budget.used > self.budget.limit:
            return None
        job = Job(table, flat, flat.shape, 0)
        job.started = True
        if forced != "pool" and self.adviser and len(flat) * len(table.disk_regions) <= SMALL_PAGES:
            pages = table.pages(flat)
            counters.add(prefetched_pages=sum(len(numbers) for _, numbers in pages))
            self.adviser.advise(pages, counters)
            job.finish()
            return job

        def run() -> None:
            try:
                if not job.cancelled:
                    self._warm_pages(job)
            except Exception:  # a hint has nobody to tell; the read that needs the row will meet the same error
                job.finish()

        self._lane.submit(run, urgent=False)
        return job

    def _warm_pages(self, job: Job) -> None:
        """Bring pages in from the lane: by advice where there is one, else by reading rows into scratch on the pool."""
        table, counters = job.table, self._counters[job.table.index]
        ids = np.unique(job.flat)
        if self.adviser and self.settings.path != "pool":
            for lo in range(0, len(ids), 512):
                if job.cancelled:
                    break
                pages = table.pages(ids[lo : lo + 512])
                counters.add(prefetched_pages=sum(len(numbers) for _, numbers in pages))
                self.adviser.advise(pages, counters)
            job.finish()
            return
        scratch = np.empty(buffer_bytes(table, len(ids)), np.uint8)
        job.batch = Batch(table, ids, split_buffer(scratch, table, len(ids)), len(ids), counters)
        job.batch.cancelled = job.cancelled
        counters.add(prefetched_pages=len(ids) * len(table.disk_regions))
        self.paths.split(job.batch, WORKERS, job.finish)

    def residency(self) -> tuple[TableState, ...]:
        """The state of each table: resident, or warm, cold, probing as of the last probe."""
        states = []
        for table, governor in zip(self.tables, self._governors):
            latch = governor.latch
            states.append(TableState(table.name, "resident" if table.resident else latch.state, latch.sampled, latch.resident))
        return tuple(states)

    def counters(self) -> dict[str, dict]:
        """Per table name the numbers of TableCounters, plus the probe and the means of advice in use and what was refused."""
        result: dict[str, dict] = {table.name: self.counters_of(table).as_dict() for table in self.tables}
        result["reader"] = {
            "probe": self.probe.kind,
            "advise": self.adviser.means[0] if self.adviser else "none",
            "refused": self.probe.refused | self.adviser.refused,
            "budget_bytes": self.budget.limit,
            "budget_used": self.budget.used,
            "scales": "resident" if all(region.in_memory for table in self.tables for region in table.regions[1:]) else "mapped",
        }
        return result

    def counters_of(self, table: Table) -> TableCounters:
        return self._counters[table.index]

    # jobs
    def _start(self, job: Job, urgent: bool) -> None:
        job.started = True
        rows = len(job.flat)
        if rows * max(1, len(job.table.disk_regions)) <= SMALL_PAGES or job.table.resident:
            self._plan(job, small=True)
            self._begin_small(job)
        else:
            self._lane.submit(lambda: self._drive(job), urgent)

    def _plan(self, job: Job, small: bool) -> None:
        """Distinct ids, a buffer, rows the row cache has, and the path."""
        table, counters = job.table, self._counters[job.table.index]
        ids = job.flat
        if len(ids) >= DEDUPE_IDS:
            ids, job.inverse = np.unique(ids, return_inverse=True)
        cache, found = self._row_caches[table.index], None
        if cache is not None and ids.size:
            ids, job.inverse, found = self._cached_last(ids, job.inverse, cache)
        if small:
            buffer = np.empty(buffer_bytes(table, len(ids)), np.uint8)
        else:
            job.buffer = buffer = self.staging.acquire(buffer_bytes(table, len(ids)))
        out = split_buffer(buffer, table, len(ids))
        n_fetch = len(ids)
        if found is not None and len(found):
            n_fetch -= len(found)
            column = 0
            for part in out:
                part[n_fetch:] = found[:, column : column + part.shape[1]]
                column += part.shape[1]
            counters.add(row_cache_hits=len(found))
        job.batch = Batch(table, ids, out, n_fetch, counters)
        job.batch.cancelled = job.cancelled
        job.path = self._choose(job, n_fetch, "decode" if small else "prefill")
        counters.add(rows=n_fetch)
        counters.batch(job.path)

    def _cached_last(self, ids, inverse, cache: RowCache):
        """Reorder distinct ids so that rows of the row cache come last: (ids, inverse, copies of the cached ones)."""
        if inverse is None:
            ids, inverse = np.unique(ids, return_inverse=True)
        with self._plan_lock:
            slots = cache.find(ids)
            order = np.argsort(slots >= 0, kind="stable")
            found = cache.rows[slots[order][np.count_nonzero(slots < 0) :]]
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return ids[order], place[inverse], found

    def _choose(self, job: Job, rows: int, size: str) -> str:
        table, counters = job.table, self._counters[job.table.index]
        if table.resident:
            return "resident"
        if not rows:
            return "direct"
        governor, forced = self._governors[table.index], self.settings.path
        verdict = governor.verdict(job.batch.ids[:rows], job.n_tokens, prefill=size == "prefill")
        if forced != "auto":
            path = forced
        elif verdict == "warm":
            path = "direct"
        elif not governor.within_budget(rows * len(table.disk_regions)):
            path = "nocache"
        else:
            path = self.choices[table.index].get(size) or ("advise" if self.adviser else "pool")
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

    def _rows_of(self, job: Job) -> PackedRows:
        """Called by Ticket.rows: wait, or copy on this thread; raise what went wrong."""
        began = self.os.clock()
        if not job.started:
            self._start(job, urgent=True)
        if job.inline and not job.done.is_set():
            batch = job.batch
            batch.take(0, batch.n_fetch)
            if job.to_drop:
                self.paths.drop(job.to_drop, batch.counters)
            if job.path == "direct":
                self._governors[job.table.index].took(self.os.clock() - began)
            job.finish()
        else:
            job.done.wait()
        if (error := job.error or (job.batch and job.batch.error)) is not None:
            raise error
        cache = self._row_caches[job.table.index]
        if cache is not None and job.batch.n_fetch:
            self._remember(job, cache)
        seconds = self.os.clock() - began
        self._counters[job.table.index].add(wait_s=seconds, host_s=seconds)
        return job.packed()

    def _remember(self, job: Job, cache: RowCache) -> None:
        n = job.batch.n_fetch
        with self._plan_lock:
            new = cache.find(job.batch.ids[:n]) < 0  # another ticket may have brought the same row meanwhile
            cache.insert(job.batch.ids[:n][new], tuple(part[:n][new] for part in job.batch.out))

    def _add_host_time(self, jobs: Sequence[Job | None], seconds: float) -> None:
        present = [job for job in jobs if job is not None]
        for job in present:
            self._counters[job.table.index].add(host_s=seconds / len(present))

    def close(self) -> None:
        """Stop the threads and close the files. Rows handed out stay valid; the reader is not used again."""
        if self._closed:
            return
        self._closed = True
        self._lane.close()
        self.paths.close()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
