"""Is the next batch in memory already? The probe asks, the latch remembers, the budget bounds what reading may evict."""

from __future__ import annotations

import statistics
import threading
from collections import deque

import numpy as np

from dsv41chat.engine.engram.os_layer import PosixLayer, Unsupported
from dsv41chat.engine.engram.regions import Table, TableFile

SAMPLE = 64
LATENCY_SAMPLE = 16
SELF_CHECK = 256
WARM_SHARE, COLD_SHARE = 62 / 64, 56 / 64
TOKENS_BETWEEN_PROBES = {"warm": 64, "cold": 16, "probing": 1}
SLOW_FACTOR, SLOW_FLOOR_S = 10, 2e-4


class ResidencyProbe:
    """Asks whether pages are resident, by the most truthful means left.

    mincore is taken only from a caller the kernel answers truthfully; any error, and a self-check that cannot be true,
    retires a means for the session. `refused` keeps the reasons.
    """

    def __init__(self, os: PosixLayer, rng: np.random.Generator | None = None):
        self.os = os
        self.kinds = list(os.probes)
        self.refused: dict[str, str] = {}
        self.rng = rng or np.random.default_rng()
        self._checked: set[TableFile] = set()
        self._lock = threading.Lock()

    @property
    def kind(self) -> str:
        return self.kinds[0] if self.kinds else "none"

    @property
    def sample_size(self) -> int:
        return LATENCY_SAMPLE if self.kind == "latency" else SAMPLE

    @property
    def reads(self) -> bool:
        """Does asking read the pages? Then it is asked rarely, and never to decide which pages to drop."""
        return self.kind != "mincore"

    def refuse(self, kind: str, reason: str) -> None:
        """Retire a means; a second thread that found the same changes nothing."""
        with self._lock:
            if self.kind == kind:
                self.refused[self.kinds.pop(0)] = reason

    def self_check(self, tables: list[Table]) -> None:
        """Retire a means that calls random pages of tables resident that cannot be: they exceed physical memory.

        On platforms whose mincore is unproven one page is read first and must then be reported.
        """
        tables = [table for table in tables if not table.resident]
        if not tables:
            return
        physical, _ = self.os.memory()
        impossible = sum(table.nbytes for table in tables) > physical
        table = max(tables, key=lambda table: table.nbytes)
        region = table.disk_regions[0]
        first = region.offset // self.os.page_size
        count = max(1, region.nbytes // self.os.page_size)
        pages = first + self.rng.integers(0, count, SELF_CHECK)
        while self.kind == "mincore":
            if self.os.name != "linux":
                self.os.pread_into(region.file.fd, memoryview(bytearray(1)), int(pages[0]) * self.os.page_size)
            resident = self.resident(region.file, pages)
            if resident is None or self.kind != "mincore":
                return
            if self.os.name != "linux" and not resident[0]:
                self.refuse("mincore", "mincore calls a page absent that was just read")
            elif impossible and resident.all():
                self.refuse("mincore", "mincore calls every page resident of tables larger than memory")
            else:
                return

    def resident(self, file: TableFile, pages: np.ndarray) -> np.ndarray | None:
        """bool [n] for int64 [n] page numbers of a file, or None when every means has failed."""
        while (kind := self.kind) != "none":
            try:
                return self._ask(kind, file, pages)
            except (Unsupported, OSError) as error:
                self.refuse(kind, str(error))
        return None

    def _ask(self, kind: str, file: TableFile, pages: np.ndarray) -> np.ndarray:
        if kind == "mincore":
            if file.mapped is None:
                raise Unsupported("mincore: the file is not mapped")
            if file not in self._checked:
                if not self.os.mincore_truthful(file.path):
                    raise Unsupported("mincore: the file belongs to another user, the kernel would call every page resident")
                self._checked.add(file)
            return self.os.mincore(file.mapped, pages)
        return (self.os.nowait if kind == "nowait" else self.os.latency)(file.fd, pages)


class Latch:
    """state: probing until there is a verdict, then cold or warm with hysteresis; sampled/resident: the last probe."""

    def __init__(self):
        self.state = "probing"
        self.sampled = self.resident = 0
        self._warm_streak = 0

    @property
    def share(self) -> float:
        return self.resident / self.sampled if self.sampled else 0.0

    def update(self, sampled: int, resident: int) -> None:
        self.sampled, self.resident = sampled, resident
        if self.share >= WARM_SHARE:
            self._warm_streak += 1
            if self._warm_streak >= 2:
                self.state = "warm"
            return
        self._warm_streak = 0
        if self.share < COLD_SHARE:
            self.state = "cold"


class CacheBudget:
    """How many bytes of table pages one request may still push into the page cache."""

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0
        self._lock = threading.Lock()

    def charge(self, nbytes: int) -> bool:
        """Add to the running sum; False once the request is over its budget."""
        with self._lock:
            self.used += nbytes
            return self.used <= self.limit

    def reset(self) -> None:
        with self._lock:
            self.used = 0


class TableGovernor:
    """Decides, per batch of one table, whether it is read as warm, as cold, or around the cache."""

    def __init__(self, table: Table, probe: ResidencyProbe, budget: CacheBudget):
        self.table, self.probe, self.budget = table, probe, budget
        self.latch = Latch()
        self._tokens_since_probe = TOKENS_BETWEEN_PROBES["warm"]
        self._suspicious = False
        self._durations: deque[float] = deque(maxlen=65)
        self._lock = threading.Lock()

    def verdict(self, ids: np.ndarray, n_tokens: int, prefill: bool) -> str:
        """warm or cold for this batch (distinct int64 [n] ids), probing first when a probe is due."""
        with self._lock:
            self._tokens_since_probe += n_tokens
            # A probe by latency reads what it samples: between chunks it is asked as rarely as for a warm table.
            state = "warm" if self.probe.kind == "latency" else self.latch.state
            if prefill or self._suspicious or self._tokens_since_probe >= TOKENS_BETWEEN_PROBES[state]:
                self._probe(ids)
            return "warm" if self.latch.state == "warm" else "cold"

    def _probe(self, ids: np.ndarray) -> None:
        self._tokens_since_probe, self._suspicious = 0, False
        file, pages = self.table.weight_pages(ids)
        pages = np.unique(pages)
        if pages.size > self.probe.sample_size:
            pages = self.probe.rng.choice(pages, self.probe.sample_size, replace=False)
        resident = self.probe.resident(file, pages)
        if resident is None:
            self.latch.update(0, 0)
        elif pages.size:
            self.latch.update(pages.size, int(resident.sum()))

    def within_budget(self, n_pages: int) -> bool:
        """Charge the pages of a cold batch that the last probe says are new."""
        return self.budget.charge(round(n_pages * self.probe.os.page_size * (1 - self.latch.share)))

    def took(self, seconds: float) -> None:
        """A warm batch of decode size took this long; one far over the running median asks for a probe at once."""
        self._durations.append(seconds)
        if seconds > SLOW_FLOOR_S and len(self._durations) >= 8 and seconds > SLOW_FACTOR * statistics.median(self._durations):
            self._suspicious = True
