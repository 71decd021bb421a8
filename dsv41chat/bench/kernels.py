"""`dsv41chat bench kernels`: each operation that a route took over, against the stock operation on the same weights and inputs.

Calls of one kind form a chain in which each waits for the one before, over the weights of all layers by turns, so that launches are
counted and no weight is found in a cache that a decode step would find empty. Both arms run by turns; the figure is the median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.bench.receipt import OUTPUT_HELP, environment, write_receipt
from dsv41chat.engine.backend import backend_info
from dsv41chat.engine.device import device_kind
from dsv41chat.engine.errors import EngineError
from dsv41chat.engine.kernels.sites import Routed, Site, bare, sites
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.nano import embedded_pack


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", type=Path, help="folder of a build (default: the embedded model)")
    parser.add_argument("--route", default="auto", help="auto or the name of a route (default: auto)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the model; default: the device's")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="rows of a call (default: 1 2 4 8)")
    parser.add_argument("--chain", type=int, default=200, help="calls that wait for one another (default: 200)")
    parser.add_argument("--repeats", type=int, default=5, help="chains per arm (default: 5)")
    parser.add_argument("-o", "--output", type=Path, help=OUTPUT_HELP)


def run_options(args: argparse.Namespace) -> int:
    """Measure, print, write the receipt. Returns the exit code."""
    try:
        pack = open_pack(args.build or embedded_pack())
        trunk = build_trunk(pack, dtype=getattr(mx, args.dtype) if args.dtype else None, engram=False, routes=args.route)
    except EngineError as error:
        print(f"{error}\n{error.hint}".strip())
        return 4
    if not trunk.routes.names:
        print("nothing to compare: every operation is stock here\n" + "\n".join(trunk.routes.summary()))
        return 1
    began = time.perf_counter()
    found = measure(trunk, args.rows, args.chain, args.repeats)
    print(table(found))
    device, version = backend_info()
    payload = {
        "what": "kernels", "build": pack.folder.resolve().name, "fingerprint": pack.fingerprint, "device": device, "mlx": version,
        "dtype": str(trunk.dtype), "chain": args.chain, "repeats": args.repeats, "seconds": time.perf_counter() - began,
        "routes": trunk.routes.facts(), "operations": found, "environment": environment(),
    }  # fmt: skip
    print(write_receipt(args.output, "kernels", payload, device_kind()))
    return 0


def measure(trunk: Any, rows: Sequence[int], chain: int, repeats: int) -> list[dict[str, Any]]:
    """One entry per kind of routed operation: op, key, count and, by number of rows, microseconds per call of stock and route."""
    kinds: dict[tuple[str, str], list[Site]] = {}
    for site in sites(trunk, trunk):
        if isinstance(site.value, Routed):
            kinds.setdefault((site.op, site.key), []).append(site)
    out = []
    for (op, key), found in kinds.items():
        times = {str(n): _compare(found, n, chain, repeats) for n in rows}
        out.append({"op": op, "key": key, "count": len(found), "route": found[0].value.route, "microseconds": times})
    return out


def _compare(found: list[Site], rows: int, chain: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(rows)
    inputs = [site.inputs(rows, rng) for site in found]
    mx.eval(inputs)
    arms = {"stock": [bare(site.value) for site in found], "route": [site.value.inner for site in found]}
    for calls in arms.values():
        _chain(calls, inputs, min(chain, 2 * len(found)))
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, calls in arms.items():
            taken[name].append(_chain(calls, inputs, chain))
    return {name: round(1e6 * statistics.median(values) / chain, 2) for name, values in taken.items()}


def _chain(calls: list[Callable], inputs: list[tuple], length: int) -> float:
    """Seconds of `length` calls in one evaluation, each of which waits for the one before."""
    began, last = time.perf_counter(), None
    for i in range(length):
        first, *rest = inputs[i % len(calls)]
        if last is not None:
            first = mx.depends([first], [last])[0]
        result = calls[i % len(calls)](first, *rest)
        last = result[0] if isinstance(result, tuple) else result
        # A route on the host has computed it by now.
        last = last if isinstance(last, mx.array) else None
    if last is not None:
        mx.eval(last)
    mx.synchronize()
    return time.perf_counter() - began


def table(found: list[dict[str, Any]]) -> str:
    """Microseconds per call, stock -> route, by number of rows."""
    lines = []
    for entry in found:
        times = "  ".join(f"{n} rows {t['stock']:.0f} -> {t['route']:.0f}" for n, t in entry["microseconds"].items())
        lines.append(f"{entry['op']:<10} x{entry['count']:<3} {times}   {entry['key']}")
    return "\n".join(lines)
