"""Stock operations as compiled graphs: `mx.compile` fuses their elementwise parts and builds a step from fewer primitives.

Everything that changes from call to call enters as an array, so an operation is traced once per shape of its inputs. On a CPU the
library compiles each fused kernel with the system's C++ compiler when it first runs, so the route is taken there only when it is asked for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dsv41chat.engine.device import device_kind
from dsv41chat.engine.kernels.routes import Declined, Route
from dsv41chat.engine.kernels.sites import Routed, Site, sites
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear

_OPS = (
    "enter", "settle", "project", "query", "latent", "output", "gathered", "router", "experts", "engram", "raw_rows", "pool", "entries",
    "queries", "visible", "scores", "candidates", "among", "select", "begin", "tap", "logits", "mix", "head_mix",
)  # fmt: skip


class Graph:
    """A compiled operation. traced: how often it was traced, by the values of its arguments that are no arrays."""

    def __init__(self, stock: Callable):
        self.stock = stock
        self.traced: dict[tuple, int] = {}
        self._calls: dict[tuple, Callable] = {}

    def __call__(self, *args: Any) -> Any:
        arrays, form = [], []
        for a in args:
            parts = a if isinstance(a, tuple) else (a,)
            form.append((isinstance(a, tuple), *(None if isinstance(p, mx.array) else (p,) for p in parts)))
            arrays += [p for p in parts if isinstance(p, mx.array)]
        key = tuple(form)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = mx.compile(self._with(key))
        return call(*arrays)

    def _with(self, key: tuple) -> Callable:
        """The stock operation of the arrays alone."""

        def call(*arrays: mx.array) -> Any:
            self.traced[key] = self.traced.get(key, 0) + 1
            left, args = iter(arrays), []
            for nested, *parts in key:
                values = tuple(next(left) if p is None else p[0] for p in parts)
                args.append(values if nested else values[0])
            return self.stock(*args)

        return call


def _build(site: Site) -> Callable:
    if site.op == "experts" and isinstance(getattr(site.owner.w1, "stock", site.owner.w1), Exl3ExpertLinear):
        raise Declined("the picks of trellis-coded experts are read while it runs")
    return Graph(site.stock)


def _missing() -> str | None:
    if device_kind() == "cpu" and shutil.which("g++") is None:
        return "there is no g++ to compile with"
    return None


ROUTE = Route(
    "compiled",
    frozenset({"cpu", "cuda", "metal"}),
    dict.fromkeys(_OPS, _build),
    dict.fromkeys(_OPS, 4e-3),
    rows_alike=True,
    missing=_missing,
    auto_on=frozenset({"cuda", "metal"}),
)


def as_graphs(trunk: Any) -> None:
    """Put compiled graphs in place without a check, for counting what they consist of."""
    for site in list(sites(trunk, trunk)):
        if site.op in _OPS:
            try:
                setattr(site.owner, site.field, Routed(ROUTE.name, _build(site), site.stock))
            except Declined:
                continue
