"""Whether a row's bits depend on how many rows share its call: the probe, its verdicts, and the row-by-row route.

A verify window gives the same tokens as single steps only if every kernel gives each row the same bits in both. Where a kernel does
not (another tile, another split of the sum), its operation runs row by row for the window sizes concerned. A verdict is a fact about
a kernel and a shape, not about the data, so a few random draws decide it and it can be kept. Source: spec drafting, section 5.3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3GroupedLinear, Exl3Linear
from dsv41chat.engine.nn.hyper_connection import HyperConnection, HyperHead
from dsv41chat.engine.nn.linear import (
    ExpertLinear,
    GroupedLinear,
    Linear,
    QuantizedExpertLinear,
    QuantizedGroupedLinear,
    QuantizedLinear,
)
from dsv41chat.engine.ops.attend import attend_rows, index_scores

DRAWS = 3
_PACKED = (QuantizedLinear, QuantizedGroupedLinear, QuantizedExpertLinear)
_EXPERTS = (ExpertLinear, QuantizedExpertLinear, Exl3ExpertLinear)
_MATRICES = (Linear, GroupedLinear, *_PACKED, *_EXPERTS, Exl3Linear, Exl3GroupedLinear)


@dataclass
class Tokenwise:
    """Calls `inner` once per row for windows of the sizes in `rows`, and once for all rows otherwise.

    shared: indices of arguments that all rows use alike; every other array argument has the rows as its first axis.
    """

    inner: Callable
    rows: frozenset[int]
    shared: frozenset[int] = frozenset()

    def __call__(self, *args: Any) -> Any:
        n = args[0].shape[0]
        if n not in self.rows:
            return self.inner(*args)
        row = lambda i, k, a: a[i : i + 1] if isinstance(a, mx.array) and k not in self.shared and a.shape[0] == n else a
        parts = [self.inner(*(row(i, k, a) for k, a in enumerate(args))) for i in range(n)]
        if isinstance(parts[0], tuple):
            return tuple(mx.concatenate(column) for column in zip(*parts))
        return mx.concatenate(parts)

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


def places(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """(owner, field, callable) of everything below a module whose rows are probed. Modules are dataclasses, alone or in lists."""
    for item in module if isinstance(module, (list, tuple)) else [module]:
        if not is_dataclass(item) or isinstance(item, type):
            continue
        for field in fields(item):
            value = getattr(item, field.name)
            if isinstance(value, (*_MATRICES, HyperConnection, HyperHead, Tokenwise)) or _is_core(value):
                yield item, field.name, value
            elif isinstance(value, (list, tuple)) or (is_dataclass(value) and not isinstance(value, type)):
                yield from places(value)


def probe(trunk: Any, largest: int, known: MutableMapping[str, list[int]] | None = None) -> list[Verdict]:
    """Verdicts for windows of 2 .. largest rows, one per kind and shape of a trunk's operations; `known` is used and filled."""
    known, out = {} if known is None else known, {}
    for owner, _, value in places(trunk):
        inner = value.inner if isinstance(value, Tokenwise) else value
        key = f"{_key(owner, inner, trunk)} to {largest}"
        if key in out:
            continue
        if key not in known:
            known[key] = _differing(inner, _inputs(owner, inner, trunk, largest), largest)
        out[key] = Verdict(_key(owner, inner, trunk), tuple(known[key]))
    return list(out.values())


def install(trunk: Any, verdicts: list[Verdict]) -> int:
    """Put row-by-row wrappers where the verdicts ask for them, and take back those they do not ask for. Returns how many."""
    asked, count = {v.op: frozenset(v.tokenwise) for v in verdicts}, 0
    for owner, name, value in list(places(trunk)):
        inner = value.inner if isinstance(value, Tokenwise) else value
        rows = asked.get(_key(owner, inner, trunk), frozenset())
        setattr(owner, name, Tokenwise(inner, rows, _shared(inner)) if rows else inner)
        count += bool(rows)
    return count


def load_known(facts: MutableMapping[str, str], key: str) -> dict[str, list[int]]:
    """Verdicts kept under `key`; damaged ones count as none."""
    try:
        raw = json.loads(facts.get(key, "{}"))
        return {str(k): [int(m) for m in v] for k, v in raw.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _is_core(value: Any) -> bool:
    return value is attend_rows or value is index_scores


def _shared(value: Callable) -> frozenset[int]:
    """Arguments that all rows share: attend_rows(q, keys, mask, sink, scale); index_scores(q, weight, keys, length)."""
    return frozenset({3, 4}) if value is attend_rows else frozenset({2}) if value is index_scores else frozenset()


def _key(owner: Any, value: Any, trunk: Any) -> str:
    if isinstance(value, _MATRICES):
        rounds = " rounded" if getattr(value, "round_input", False) else ""
        return f"{type(value).__name__} {_stored(value)} x {_short(_input_dtype(value, trunk))}{rounds}"
    if isinstance(value, (HyperConnection, HyperHead)):
        return f"{type(value).__name__} {list(value.fn.shape)} {_short(trunk.dtype)}"
    c = trunk.config
    heads, width = (c.num_attention_heads, c.head_dim) if value is attend_rows else (c.index_n_heads, c.index_head_dim)
    return f"{value.__name__} {heads} heads of {width} {_short(trunk.dtype)}"


def _stored(value: Any) -> str:
    """Shape and format of a matrix module, in words."""
    if isinstance(value, _PACKED):
        p = value.packed
        return f"{list(p.weight.shape)} {p.mode} {p.bits} bits per {p.group}"
    if isinstance(value, Exl3Linear):
        return f"{list(value.words.shape)} {value.codebook}" + (" rounded" if value.round_input else "")
    if isinstance(value, (Exl3GroupedLinear, Exl3ExpertLinear)):
        parts = value.groups if isinstance(value, Exl3GroupedLinear) else value.matrices
        return f"{len(parts)} of " + ", ".join(sorted({_stored(part) for part in parts}))
    return f"{list(value.weight.shape)} {_short(value.weight.dtype)}"


def _width(value: Any) -> int:
    """Inputs of a matrix module, all groups together."""
    if isinstance(value, Exl3Linear):
        return value.suh.shape[0]
    if isinstance(value, Exl3GroupedLinear):
        return sum(_width(part) for part in value.groups)
    if isinstance(value, Exl3ExpertLinear):
        return _width(value.matrices[0])
    groups = _count(value) if isinstance(value, (GroupedLinear, QuantizedGroupedLinear)) else 1
    return groups * (value.packed.scales.shape[-1] * value.packed.group if isinstance(value, _PACKED) else value.weight.shape[-1])


def _count(value: Any) -> int:
    """Experts or groups of a matrix module."""
    if isinstance(value, Exl3ExpertLinear):
        return len(value.matrices)
    return (value.packed if isinstance(value, _PACKED) else value).weight.shape[0]


def _short(dtype: mx.Dtype) -> str:
    return str(dtype).rsplit(".", 1)[-1]


def _input_dtype(value: Any, trunk: Any) -> mx.Dtype:
    """Matrices kept in float32 beside a narrower model are applied to float32 rows (router, head, compressors)."""
    narrow = isinstance(value, Linear) and value.weight.dtype == mx.float32
    return mx.float32 if narrow else trunk.dtype


def _inputs(owner: Any, value: Any, trunk: Any, largest: int) -> list[tuple]:
    """DRAWS argument lists of `largest` rows each, seeded by the operation's own key."""
    rng = np.random.default_rng(list(_key(owner, value, trunk).encode()))
    c, dtype, n = trunk.config, trunk.dtype, largest
    normal = lambda *shape: mx.array(rng.standard_normal(shape).astype(np.float32))
    out = []
    for _ in range(DRAWS):
        if isinstance(value, _EXPERTS):
            count = _count(value)
            picks = min(c.num_experts_per_tok, count)
            ids = np.sort(np.stack([rng.permutation(count)[:picks] for _ in range(n)]), axis=1).astype(np.int32)
            args = (normal(n, picks if _is_down(owner, value) else 1, 1, _width(value)).astype(dtype), mx.array(ids))
        elif isinstance(value, _MATRICES):
            args = (normal(n, _width(value)).astype(_input_dtype(value, trunk)),)
        elif isinstance(value, (HyperConnection, HyperHead)):
            args = (normal(n, c.hc_mult, c.hidden_size).astype(dtype),)
        elif value is attend_rows:
            keys, heads = c.sliding_window + c.index_topk, c.num_attention_heads
            keep = mx.array(rng.random((n, keys)) < 0.8)
            args = (normal(n, heads, c.head_dim).astype(dtype), normal(n, keys, c.head_dim).astype(dtype), keep, normal(heads), c.head_dim**-0.5)
        else:
            heads, width, rows = c.index_n_heads, c.index_head_dim, 4 * c.index_topk
            length = mx.array(rng.integers(1, rows, (n, 1)).astype(np.int32))
            args = (normal(n, heads, width).astype(dtype), normal(n, heads), normal(rows, width).astype(dtype), length)
        out.append(args)
    return out


def _is_down(owner: Any, value: Any) -> bool:
    """The down projection takes one row per picked expert, the others the same row for all."""
    found = getattr(owner, "w2", None)
    return (found.inner if isinstance(found, Tokenwise) else found) is value


def _differing(value: Callable, inputs: list[tuple], largest: int) -> list[int]:
    """Window sizes 2 .. largest in which some row's bits differ from the same row alone."""
    shared, bad = _shared(value), set()
    for args in inputs:
        part = lambda a, b, args=args: value(*(v[a:b] if isinstance(v, mx.array) and k not in shared else v for k, v in enumerate(args)))
        single = [_bits(part(i, i + 1)) for i in range(largest)]
        for m in range(2, largest + 1):
            if m not in bad and _bits(part(0, m), m) != [row for i in range(m) for row in single[i]]:
                bad.add(m)
    return sorted(bad)


def _bits(result: Any, rows: int = 1) -> list[bytes]:
    """The bytes of every row of a result, which is an array or a tuple of arrays."""
    arrays = [a.astype(mx.float32) for a in (result if isinstance(result, tuple) else (result,))]
    mx.eval(arrays)
    return [b"".join(np.array(a[i]).tobytes() for a in arrays) for i in range(rows)]
