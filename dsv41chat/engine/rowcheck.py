"""Whether a row's bits depend on how many rows share its call: the probe, its verdicts, and the row-by-row route.

A verify window gives the same tokens as single steps only if every kernel gives each row the same bits in both. Where a kernel does
not (another tile, another split of the sum), its operation runs row by row for the window sizes concerned. A verdict is a fact about
a kernel and a shape, not about the data, so a few random draws decide it and it can be kept. Source: spec drafting, section 5.3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels.joined import forget
from dsv41chat.engine.kernels.routes import STOCK, row_bytes, rows_of
from dsv41chat.engine.kernels.sites import Routed, Site, sites

DRAWS = 3


@dataclass
class Tokenwise:
    """Calls `inner` once per row for windows of the sizes in `rows`, and once for all rows otherwise.

    shared: indices of arguments that all rows use alike; every other array, alone or in a tuple, has the rows as its first axis.
    """

    inner: Callable
    rows: frozenset[int]
    shared: frozenset[int] = frozenset()

    def __call__(self, *args: Any) -> Any:
        n = args[0].shape[0]
        if n not in self.rows:
            return self.inner(*args)
        parts = [self.inner(*(a if k in self.shared else rows_of(a, i, i + 1) for k, a in enumerate(args))) for i in range(n)]
        join = lambda column: np.concatenate(column) if isinstance(column[0], np.ndarray) else mx.concatenate(column)
        return tuple(join(list(column)) for column in zip(*parts)) if isinstance(parts[0], tuple) else join(parts)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


@dataclass(frozen=True)
class Verdict:
    """op: kind and shape in words. tokenwise: window sizes whose rows differ from single rows; empty: batched throughout."""

    op: str
    tokenwise: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op}: " + (f"row by row for windows of {', '.join(map(str, self.tokenwise))}" if self.tokenwise else "batched")


def places(module: Any, trunk: Any = None) -> Iterator[Site]:
    """The sites of a trunk whose rows are probed: matrices, coefficients, cores, and everything that a route has taken over."""
    for site in sites(module, trunk or module):
        value = site.value
        taken = isinstance(_inner(value), Routed) and _inner(value).route != STOCK and site.op != "pool"
        if taken or site.op in ("matrix", "mix", "head_mix", "core", "scores"):
            yield site


def probe(trunk: Any, largest: int, known: MutableMapping[str, list[int]] | None = None) -> list[Verdict]:
    """Verdicts for windows of 2 .. largest rows, one per kind and shape of a trunk's operations; `known` is used and filled."""
    known, out = {} if known is None else known, {}
    for site in places(trunk):
        op = _key(site)
        key = f"{op} to {largest}"
        if key in out:
            continue
        if key not in known:
            known[key] = _differing(site, largest)
        out[key] = Verdict(op, tuple(known[key]))
    return list(out.values())


def install(trunk: Any, verdicts: list[Verdict]) -> int:
    """Put row-by-row wrappers where the verdicts ask for them, and take back those they do not ask for. Returns how many."""
    asked, count = {v.op: frozenset(v.tokenwise) for v in verdicts}, 0
    for site in list(places(trunk)):
        rows = asked.get(_key(site), frozenset())
        if rows or isinstance(site.value, Tokenwise):
            setattr(site.owner, site.field, Tokenwise(_inner(site.value), rows, site.shared) if rows else _inner(site.value))
        count += bool(rows)
    forget(trunk)
    return count


def load_known(facts: MutableMapping[str, str], key: str) -> dict[str, list[int]]:
    """Verdicts kept under `key`; damaged ones count as none."""
    try:
        raw = json.loads(facts.get(key, "{}"))
        return {str(k): [int(m) for m in v] for k, v in raw.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Tokenwise) else value


def _key(site: Site) -> str:
    value = _inner(site.value)
    return f"{site.key} by {value.route}" if isinstance(value, Routed) and value.route != STOCK else site.key


def _differing(site: Site, largest: int) -> list[int]:
    """Window sizes 2 .. largest in which some row's bits differ from the same row alone."""
    rng, value, bad = np.random.default_rng(list(_key(site).encode())), _inner(site.value), set()
    for _ in range(DRAWS):
        args = site.inputs(largest, rng)
        part = lambda a, b, args=args: value(*(v if k in site.shared else rows_of(v, a, b) for k, v in enumerate(args)))
        single = [row_bytes(part(i, i + 1)) for i in range(largest)]
        for m in range(2, largest + 1):
            if m not in bad and row_bytes(part(0, m), m) != [row for i in range(m) for row in single[i]]:
                bad.add(m)
    return sorted(bad)
