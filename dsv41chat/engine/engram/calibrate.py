"""Which path is fastest on this volume: measured on request or at idle, kept in the facts, read again at the next open."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dsv41chat.engine.engram.os_layer import Unsupported
from dsv41chat.engine.engram.reader import EngramReader

MIN_TABLE_BYTES = 1 << 30
BATCHES = {"decode": (24, 40), "prefill": (6144, 2)}  # rows and calls
SLOW_ROWS_S = 5000
HALF = 0.5


@dataclass(frozen=True)
class Measured:
    """One path on one batch size. cold_share: of the sampled pages, before the reads; p50_ms of one call."""

    size: str
    path: str
    rows_s: float
    p50_ms: float
    cold_share: float


def wants_calibration(reader: EngramReader) -> bool:
    """True for tables over 1 GiB, not resident, on a volume of which nothing has been measured."""
    table = max(reader.tables, key=lambda table: table.nbytes)
    if table.resident or table.nbytes < MIN_TABLE_BYTES:
        return False
    return any(reader.fact_key(table, size) not in reader.facts for size in BATCHES)


def calibrate(reader: EngramReader, cancel: Callable[[], bool] = lambda: False, rng: np.random.Generator | None = None) -> list[Measured]:
    """Time each path on fresh random rows of the largest table, about 5 s in all, and store the winners in reader.facts.

    Rows of a table far larger than memory are cold by themselves; where pages can be dropped, the sampled ones are. A size
    whose pages were mostly resident all the same is measured but not stored. The model's thread calls this while idle.
    """
    table = max(reader.tables, key=lambda table: table.nbytes)
    if table.resident:
        return []
    rng = rng or np.random.default_rng()
    results = []
    for path in _candidates(reader):
        probe = EngramReader.open([table.spec], replace(reader.settings, mode="stream", path=path, row_cache=0), os_layer=reader.os)
        try:
            for size, (rows, calls) in BATCHES.items():
                if cancel():
                    return results
                results.append(_time(probe, size, path, min(rows, table.rows), calls, rng))
        finally:
            probe.close()
    for size in BATCHES:
        best = max((m for m in results if m.size == size), key=lambda m: m.rows_s)
        if best.cold_share >= HALF:
            measured = {m.path: round(m.rows_s) for m in results if m.size == size}
            reader.facts[reader.fact_key(table, size)] = json.dumps({"path": best.path, "rows_s": measured})
    reader.reload_choices()
    return results


def _candidates(reader: EngramReader) -> list[str]:
    paths = ["pool"]
    if reader.adviser:
        paths.append("advise")
    if not reader.os.drops_pages:  # there nocache is a way to read of its own, not a cached read that is undone
        paths.append("nocache")
    return paths


def _time(reader: EngramReader, size: str, path: str, rows: int, calls: int, rng: np.random.Generator) -> Measured:
    table, seconds, cold, sampled = reader.tables[0], [], 0, 0
    for _ in range(calls):
        ids = rng.integers(0, table.rows, rows)
        _make_cold(reader, ids)
        file, pages = table.weight_pages(ids)
        resident = reader.probe.resident(file, pages[: reader.probe.sample_size]) if not reader.probe.reads else None
        if resident is not None:
            cold, sampled = cold + int((~resident).sum()), sampled + len(resident)
        began = reader.os.clock()
        reader.gather(0, ids)
        seconds.append(reader.os.clock() - began)
    middle = statistics.median(seconds)
    return Measured(size, path, rows / middle, middle * 1e3, cold / sampled if sampled else 1.0)


def _make_cold(reader: EngramReader, ids: np.ndarray) -> None:
    if reader.os.drops_pages:
        for file, pages in reader.tables[0].pages(ids):
            try:
                reader.os.drop(file.fd, file.mapped, pages)
            except (Unsupported, OSError):
                return


def time_warm(reader: EngramReader, rng: np.random.Generator, calls: int = 40) -> float:
    """Rows per second of decode-size batches whose pages were just read."""
    ids = rng.integers(0, reader.tables[0].rows, BATCHES["decode"][0])
    seconds = []
    for _ in range(calls):
        began = reader.os.clock()
        reader.gather(0, ids)
        seconds.append(reader.os.clock() - began)
    return len(ids) / statistics.median(seconds[calls // 2 :])
