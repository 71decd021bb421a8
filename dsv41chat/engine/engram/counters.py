"""Counts that `/stats`, the log and the tests read. Plain integers and seconds; one writer lock per table."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict


class TableCounters:
    """lookups: ids asked for; rows: distinct rows fetched; pages: distinct pages planned; wait_s: time the model thread
    waited for rows; host_s: all time it spent in the reader; batches: per path; fallbacks: reason -> times.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._numbers: defaultdict[str, float] = defaultdict(float)
        self.batches: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()

    def add(self, **amounts: float) -> None:
        with self._lock:
            numbers = self._numbers
            for name, amount in amounts.items():
                numbers[name] += amount

    def batch(self, path: str) -> None:
        with self._lock:
            self.batches[path] += 1

    def fallback(self, reason: str) -> None:
        with self._lock:
            self.fallbacks[reason] += 1

    def as_dict(self) -> dict:
        names = ("lookups", "rows", "warm_rows", "cold_rows", "pages", "bytes", "row_cache_hits", "prefetched_pages", "cancelled", "dropped_pages")
        with self._lock:
            found: dict = {name: int(self._numbers[name]) for name in names}
            found |= {name: round(float(self._numbers[name]), 6) for name in ("wait_s", "host_s")}
            return found | {"batches": dict(self.batches), "fallbacks": dict(self.fallbacks)}
