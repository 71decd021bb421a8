"""`doctor engram`: what this machine can do for the tables, checked line by line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv41chat.engine.checks import Line
from dsv41chat.engine.engram.calibrate import BATCHES, SLOW_ROWS_S, Measured, calibrate, time_warm
from dsv41chat.engine.engram.reader import EngramReader

GB = 1e9
_SAMPLED_ROWS = 4096


def examine(reader: EngramReader, measure: bool = True) -> list[Line]:
    """Lines about tables, probe, paths and speed. measure: run the calibration, which takes some seconds and stores its winners."""
    lines = [table_line(reader, index) for index in range(len(reader.tables))]
    lines.append(Line("ok", "pages", f"{reader.os.page_size // 1024} KiB"))
    lines.append(_probe_line(reader))
    means = reader.adviser.means
    refused = "; ".join(f"{name}: {why}" for name, why in reader.adviser.refused.items())
    if means:
        lines.append(Line("ok", "advice", f"{means[0]}" + (f" ({refused})" if refused else "")))
    else:
        lines.append(Line("warn", "advice", refused or "no means to start many reads at once; a pool of threads reads instead"))
    lines.append(Line("ok", "cache budget", f"{reader.budget.limit / GB:.1f} GB of table pages per request"))
    if measure and any(not table.resident for table in reader.tables):
        lines += _speed_lines(reader, calibrate(reader))
    return lines


def sample_residency(reader: EngramReader) -> None:
    """Ask once, for random rows of every table, whether their pages are in memory; `table_line` then knows."""
    rng = np.random.default_rng()
    for desk in reader.desks:
        if not desk.table.resident:
            ids = np.unique(rng.integers(0, desk.table.rows, _SAMPLED_ROWS))
            for _ in range(2):  # a governor calls a table warm only when it was so twice
                desk.governor.verdict(ids, len(ids), prefill=True)


def table_line(reader: EngramReader, index: int) -> Line:
    table, found = reader.tables[index], reader.residency()[index]
    state = found.state + (f" ({found.resident:,} of {found.sampled:,} sampled pages in memory)" if found.sampled else "")
    access = "memory" if table.resident else "mapped" if table.regions[0].file.mapped is not None else "positional reads"
    scales = ", scales in memory" if table.regions[1].in_memory and not table.resident else ""
    return Line("ok", table.name, f"{table.rows:,} rows of {table.row_bytes} bytes, {table.format.label}, {access}{scales}, {state}")


def _probe_line(reader: EngramReader) -> Line:
    refused = "; ".join(f"{name}: {why}" for name, why in reader.probe.refused.items())
    if reader.probe.kind == "none":
        return Line("warn", "residency probe", f"none works here, every table is treated as cold ({refused})")
    if reader.probe.kind == "latency":
        return Line("warn", "residency probe", f"by latency, which reads what it asks about ({refused})")
    return Line("ok", "residency probe", reader.probe.kind + (f" ({refused})" if refused else ""))


def _speed_lines(reader: EngramReader, measured: Sequence[Measured]) -> list[Line]:
    lines = []
    for size in BATCHES:
        found = sorted((m for m in measured if m.size == size), key=lambda m: -m.rows_s)
        if not found:
            continue
        text = ", ".join(f"{m.path} {m.rows_s:,.0f} rows/s ({m.p50_ms:.2f} ms)" for m in found)
        choice = reader.desks[0].choices.get(size)
        note = f"; {choice} is used" if choice else "; not stored: the sampled pages were in memory"
        if found[0].rows_s < SLOW_ROWS_S:
            remedy = "Prefill will wait for this drive; keep the two table shards on the internal drive."
            lines.append(Line("warn", f"cold {size}", text + note, remedy))
        else:
            lines.append(Line("ok", f"cold {size}", text + note))
    lines.append(Line("ok", "warm decode", f"{time_warm(reader, np.random.default_rng()):,.0f} rows/s"))
    return lines
