"""`dsv41chat bench verify-cost`: c(k), the time of a window of k + 1 rows over that of one row; whole forward and its parts.

Random rows have independent routing, so the number of distinct experts that a window touches is stated beside each figure. The dense
parts are the matrices that every row uses, called alone.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.bench import arms
from dsv41chat.engine.engine import Engine
from dsv41chat.engine.kernels.sites import sites

_PARTS = {"dense": ("project", "output"), "experts": ("experts",), "streams": ("enter",), "attention": ("gathered",)}


def add_options(parser: argparse.ArgumentParser) -> None:
    arms.add_options(parser)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100, help="windows of each size")


def measure(folder: Path, o: argparse.Namespace) -> dict:
    engines = arms.open_arms(folder, o)
    payload = arms.frame("cost of a verify window over a single row", engines)
    payload["arms"], payload["bars"] = {}, {}
    for name, engine in engines.items():
        if engine.drafting.block:
            engine.drafting.verdicts()
        largest = max(6, engine.drafting.block + 1)
        stepper = arms.Stepper(engine)
        ids = arms.prompt(engine, o.context + largest)
        stepper.prefill(ids[: o.context])
        target, times = stepper.session.target, {m: [] for m in range(1, largest + 1)}
        with arms.recorded_choices(engine) as seen:
            target.rows(ids[o.context - 1 : o.context - 1 + largest])
        picks = [p[-1] for p in seen]
        distinct = {m: round(float(np.mean([len(np.unique(p[:m])) for p in picks])), 2) for m in times}
        for turn in range(o.steps + 3):
            for m, found in times.items():
                window = ids[o.context - 1 : o.context - 1 + m]
                seconds = arms.timed(lambda target=target, window=window: np.array(target.rows(window).logits))
                if turn >= 3:
                    found.append(seconds)
        target.drop()
        one = statistics.median(times[1])
        cost = {k: round(statistics.median(times[k + 1]) / one, 3) for k in range(1, largest)}
        parts = {part: _part_cost(engine, ops, largest) for part, ops in _PARTS.items()}
        payload["arms"][name] = {
            "row_ms": round(1000 * one, 4), "c": cost, "distinct_experts": distinct, "parts_c": parts,
            "row_by_row": [str(v) for v in engine.drafting.verdicts() if v.tokenwise] if engine.drafting.block else [],
        }  # fmt: skip
        payload["bars"][f"{name}: layer c(3) <= 2.0"] = cost[3]
        payload["bars"][f"{name}: dense parts c(3) <= 1.1"] = parts["dense"][3]
    return payload


def _part_cost(engine: Engine, ops: tuple[str, ...], largest: int) -> dict[int, float]:
    """c(k) of the first layer's operations of these kinds."""
    trunk = engine.trunk
    found = [s for s in sites(trunk.layers[:1], trunk) if s.op in ops]
    medians = {m: sum(_median(s, m) for s in found) for m in range(1, largest + 1)}
    return {k: round(medians[k + 1] / medians[1], 3) for k in range(1, largest)}


def _median(site: Any, rows: int) -> float:
    args, call = site.inputs(rows, np.random.default_rng(rows)), site.value
    evaluate = lambda: mx.eval([a for a in _flat(call(*args)) if isinstance(a, mx.array)])
    for _ in range(3):
        evaluate()
    return statistics.median(arms.timed(evaluate) for _ in range(30))


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def run_options(options: argparse.Namespace) -> int:
    return arms.run_arm(options, "verify-cost", measure)
