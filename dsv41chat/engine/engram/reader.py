"""`EngramReader`: the only way to the rows of engram tables. A table is never an array of the model's framework."""

from __future__ import annotations

import json
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

import numpy as np

from dsv41chat.engine.engram.counters import TableCounters
from dsv41chat.engine.engram.fetch import STAGING_BYTES, Job, PackedRows, Ticket, buffer_bytes
from dsv41chat.engine.engram.jobs import Desk, JobRunner
from dsv41chat.engine.engram.os_layer import PosixLayer, system_layer
from dsv41chat.engine.engram.paths import Adviser, Paths
from dsv41chat.engine.engram.regions import Table, TableFile
from dsv41chat.engine.engram.residency import CacheBudget, ResidencyProbe, TableGovernor
from dsv41chat.engine.engram.rowcache import RowCache
from dsv41chat.engine.engram.table import EngramSettings, TableSpec
from dsv41chat.engine.errors import DoesNotFit, EngramReadError
from dsv41chat.engine.events import TableState

GIB = 1 << 30
KEEP_FREE_BYTES = 24 * 10**9
MAX_BUDGET_BYTES = 16 * GIB
MAC_CACHE_ROWS = 65536


class EngramReader:
    """Both tables of one pack. Not shared between processes; staging and waiting belong to the model's thread.

    open() checks headers against the specs; stage() starts reads and returns a Ticket; prefetch() only makes pages
    resident; begin_request() re-checks the files and resets the cache budget.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        settings: EngramSettings,
        facts: MutableMapping[str, str] | None,
        os: PosixLayer,
        progress: Callable[[int, int], None],
    ):
        self.settings, self.facts, self.os = settings, facts if facts is not None else {}, os
        self._files: dict[Path, TableFile] = {}
        self._closed = False
        try:
            self._open_files(tables)
            self.tables = [Table(index, spec, self._files) for index, spec in enumerate(tables)]
            self._load_regions(progress)
        except BaseException:
            self._close_files()
            raise
        self.probe = ResidencyProbe(os)
        self.adviser = Adviser(os)
        self.budget = CacheBudget(self._budget_bytes())
        self.desks = [
            Desk(table, TableGovernor(table, self.probe, self.budget), TableCounters(), self._new_row_cache(table), {}, set())
            for table in self.tables
        ]
        self.runner = JobRunner(os, self.settings, self.desks, Paths(os, self.probe, self.adviser), self.adviser)
        self.staging = self.runner.staging
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
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> EngramReader:
        """Open and check the tables of a pack, in slot order.

        facts: where measured path choices are kept (see calibrate.py). progress(bytes done, total): while regions are copied
        into memory; what it raises ends the opening. Raises PackIncomplete, PackDamaged, PackUnsupported or DoesNotFit before
        anything is read.
        """
        return cls(tables, settings or EngramSettings(), facts, os_layer or system_layer(), progress)

    @property
    def files(self) -> list[TableFile]:
        """The distinct shards that the tables lie in."""
        return list(self._files.values())

    # opening
    def _open_files(self, tables: Sequence[TableSpec]) -> None:
        for spec in tables:
            for ref in spec.regions:
                if ref.file not in self._files:
                    access = self.settings.access
                    mapped = access == "mmap" or (access == "auto" and not self.os.removable(ref.file))
                    self._files[ref.file] = TableFile(self.os, ref.file, mapped)

    def _load_regions(self, progress: Callable[[int, int], None]) -> None:
        if self.settings.mode == "resident":
            wanted = [region for table in self.tables for region in table.regions]
        elif self._scales_resident():
            wanted = [region for table in self.tables for region in table.regions[1:]]
        else:
            return
        total, available = sum(region.nbytes for region in wanted), self.os.memory()[1]
        if total > available:
            raise DoesNotFit(
                f"The engram tables need {total / 1e9:.1f} GB in memory, {available / 1e9:.1f} GB are available.",
                hint="--engram stream reads them from disk",
            )
        done = 0

        def copied(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total)

        for region in wanted:
            region.load(copied)

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
            rows = MAC_CACHE_ROWS if self.os.name == "darwin" else 0
        return RowCache(min(rows, table.rows), table.row_bytes) if rows and not table.resident else None

    def fact_key(self, table: Table, size: str) -> str:
        """The key of a measured choice: platform, volume and batch class (decode or prefill)."""
        return f"engram.path/{self.os.name}/{self.os.volume(table.spec.weight.file)}/{size}"

    def reload_choices(self) -> None:
        """Take measured paths from the facts; what cannot be parsed or is not available here is ignored."""
        for desk in self.desks:
            for size in ("decode", "prefill"):
                try:
                    path = json.loads(self.facts[self.fact_key(desk.table, size)])["path"]
                except (KeyError, TypeError, ValueError):
                    continue
                if path in ("direct", "advise", "pool", "nocache"):
                    desk.choices[size] = path

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
        for desk in self.desks:
            desk.hints.clear()

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
            self.desks[table.index].counters.add(lookups=len(flat), bytes=len(flat) * table.row_bytes)
        if self.settings.overlap:
            for job in jobs:
                if job is not None and (urgent or self.staging.in_flight + buffer_bytes(job.table, len(job.flat)) <= STAGING_BYTES):
                    self.runner.start(job, urgent)
        self._add_host_time(jobs, self.os.clock() - began)
        return Ticket(self, jobs)

    def gather(self, slot: int, ids: np.ndarray) -> PackedRows:
        """Read rows now. The result owns its memory."""
        rows: list[np.ndarray | None] = [None] * len(self.tables)
        rows[slot] = ids
        job = self.stage(rows)._jobs[slot]
        packed = self.runner.rows_of(job)
        job.release(self.staging, reuse=False)
        return packed

    def reads_ahead(self) -> bool:
        """Would prefetch() do anything now? Saves its caller the hashing."""
        return self.settings.overlap and any(self.runner.reads_ahead(table) for table in self.tables)

    def prefetch(self, rows: Sequence[np.ndarray | None]) -> Ticket:
        """Make the pages of rows resident ahead of a later stage(); integer arrays [n, columns] in slot order, or None.

        The ticket has no rows; cancel() drops what has not been asked for yet. Nothing happens for a warm or resident table.
        """
        began = self.os.clock()
        jobs: list[Job | None] = []
        for table, ids in zip(self.tables, rows):
            job = None
            if ids is not None and self.settings.overlap and self.runner.reads_ahead(table):
                job = self.runner.prefetch(table, table.checked(ids).reshape(np.shape(ids)))
            jobs.append(job)
        self._add_host_time(jobs, self.os.clock() - began)
        return Ticket(self, jobs)

    def residency(self) -> tuple[TableState, ...]:
        """The state of each table: resident, or warm, cold, probing as of the last probe."""
        states = []
        for table, desk in zip(self.tables, self.desks):
            latch = desk.governor.latch
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
        return self.desks[table.index].counters

    def _add_host_time(self, jobs: Sequence[Job | None], seconds: float) -> None:
        present = [job for job in jobs if job is not None]
        for job in present:
            self.counters_of(job.table).add(host_s=seconds / len(present))

    def close(self) -> None:
        """Stop the threads and close the files. Rows handed out stay valid; the reader is not used again."""
        if self._closed:
            return
        self._closed = True
        self.runner.close()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
