"""One case per kernel form: the callable, its stock operation in float32, and inputs, of eight rows or more. The CPU shim and a device run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels import finish, tensor, tiles
from dsv41chat.engine.kernels.attend import Attend, TensorAttend
from dsv41chat.engine.kernels.choose import Router, Scores, TopK
from dsv41chat.engine.kernels.experts import TensorExperts
from dsv41chat.engine.kernels.hyper import Enter, Mixes
from dsv41chat.engine.kernels.launch import Backend
from dsv41chat.engine.kernels.matrix import Experts, Matvec, PairMatvec, stored
from dsv41chat.engine.nn import linear as nn
from dsv41chat.engine.nn.hyper_connection import HyperConnection, enter
from dsv41chat.engine.nn.moe_v4 import MoEV4
from dsv41chat.engine.ops import attend, fakequant, norm, rope, route, select

ROWS = 8
BF16, F32 = mx.bfloat16, mx.float32


@dataclass(frozen=True)
class Case:
    """inputs: for `rows` rows, arrays or tuples of them; shared: those that all rows use. limits: relative L2 distance to stock, one per
    result; 0: the same bits. close: results whose bits may differ between devices (exp, log, the matrix unit). only: its one dialect.
    fewer: numbers of rows that are also taken alone."""

    name: str
    build: Callable[[Backend], Callable]
    stock: Callable
    inputs: tuple
    limits: tuple[float, ...]
    shared: frozenset[int] = frozenset()
    close: frozenset[int] = frozenset()
    only: str | None = None
    rows: int = ROWS
    fewer: tuple[int, ...] = (1, 3)

    def arguments(self, rows: int) -> tuple:
        return tuple(a if i in self.shared else _cut(a, rows) for i, a in enumerate(self.inputs))

    def run(self, backend: Backend, rows: int | None = None) -> tuple[mx.array, ...]:
        return _tuple(self.build(backend)(*self.arguments(rows or self.rows)))

    def want(self, rows: int | None = None) -> tuple[mx.array, ...]:
        return _tuple(self.stock(*self.arguments(rows or self.rows)))

    def distances(self, got: tuple[mx.array, ...], rows: int | None = None) -> list[float]:
        return [distance(a, b) for a, b in zip(got, self.want(rows), strict=True)]


def distance(a: mx.array, b: mx.array) -> float:
    """Relative L2; inf for another shape, a value that is not finite where the other is, or another whole number."""
    if a.shape != b.shape:
        return float("inf")
    x, y = (np.array(v.astype(F32), np.float64) for v in (a, b))
    if not mx.issubdtype(b.dtype, mx.floating):
        return 0.0 if np.array_equal(x, y) else float("inf")
    live = np.isfinite(y)
    if not np.array_equal(x[~live], y[~live]) or not np.isfinite(x[live]).all():
        return float("inf")
    return float(np.linalg.norm(x[live] - y[live]) / max(np.linalg.norm(y[live]), 1e-30))


def _cut(value: Any, rows: int) -> Any:
    return tuple(_cut(v, rows) for v in value) if isinstance(value, tuple) else None if value is None else value[:rows]


def _tuple(value: Any) -> tuple[mx.array, ...]:
    return value if isinstance(value, tuple) else (value,)


def short(dtype: mx.Dtype) -> str:
    return str(dtype).rsplit(".", 1)[-1]


class Draw:
    """Seeded arrays."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, size: float = 1.0) -> mx.array:
        return mx.array((self.rng.standard_normal(shape) * size).astype(np.float32))

    def rows(self, *shape: int) -> mx.array:
        """bfloat16, with a row of zeros and a row of size 1e-8."""
        x = self.rng.standard_normal(shape)
        x[1] = 0
        x[2] *= 1e-8
        return mx.array(x.astype(np.float32)).astype(BF16)

    def positive(self, *shape: int) -> mx.array:
        return mx.array(self.rng.random(shape).astype(np.float32) + 0.05)

    def table(self, rows: int, dims: int) -> tuple[mx.array, mx.array]:
        phase = self.rng.random((rows, dims // 2)) * 6
        return mx.array(np.cos(phase).astype(np.float32)), mx.array(np.sin(phase).astype(np.float32))

    def whole(self, low: int, high: int, *shape: int) -> mx.array:
        return mx.array(self.rng.integers(low, high, shape).astype(np.int32))

    def chosen(self, picks: int, total: int) -> mx.array:
        return mx.array(np.sort(np.stack([self.rng.permutation(total)[:picks] for _ in range(ROWS)]), axis=1).astype(np.int32))

    def packed(self, shape: tuple[int, ...], mode: str, bits: int, group: int, dtype: mx.Dtype = BF16) -> nn.Packed:
        parts = mx.quantize(self.normal(*shape, size=shape[-1] ** -0.5).astype(dtype), group_size=group, bits=bits, mode=mode)
        return nn.Packed(parts[0], parts[1], parts[2] if len(parts) > 2 else None, mode, bits, group)


def values(module: Any) -> mx.array:
    """The float32 matrix of a module."""
    if hasattr(module, "weight"):
        return module.weight.astype(F32)
    p = module.packed
    floats = [None if a is None else a.astype(F32) if p.mode == "affine" else a for a in (p.scales, p.biases)]
    return mx.dequantize(p.weight, *floats, group_size=p.group, bits=p.bits, mode=p.mode, dtype=F32)


# the cases ----------------------------------------------------------------------------------------------------------------

FORMATS = (
    [("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)]
    + [("affine", 4, 32), ("affine", 2, 128), ("affine", 4, 128), ("mxfp4", 4, 32), ("mxfp8", 8, 32)]
)  # fmt: skip


def matvec(mode: str, bits: int, group: int, scales: mx.Dtype = BF16, wide: bool = False, inputs: int = 1280, outputs: int = 24) -> Case:
    """wide: float32 rows and result."""
    d = Draw(bits * 1000 + group)
    module = nn.QuantizedLinear(d.packed((outputs, inputs), mode, bits, group, scales))
    x = d.rows(ROWS, inputs).astype(F32 if wide else BF16)
    name = f"matvec {mode} {bits} g{group} {short(scales)}{' float32 rows' if wide else ''} {inputs}"
    return Case(name, lambda b: Matvec(b, module), lambda x: x.astype(F32) @ values(module).T, (x,), (1e-5 if wide else 2.5e-3,))


def plain(dtype: mx.Dtype) -> Case:
    d = Draw(5)
    module = nn.Linear(d.normal(24, 1280, size=0.03).astype(dtype))
    stock = lambda x: x.astype(F32) @ values(module).T
    return Case(f"matvec {short(dtype)}", lambda b: Matvec(b, module, F32), stock, (d.rows(ROWS, 1280),), (1e-5,))


def grouped() -> Case:
    d = Draw(6)
    module = nn.QuantizedGroupedLinear(d.packed((4, 8, 128), "affine", 4, 64))
    w = values(module)
    stock = lambda x: mx.concatenate([x.astype(F32)[:, 128 * g : 128 * (g + 1)] @ w[g].T for g in range(4)], axis=1)
    return Case("matvec grouped", lambda b: Matvec(b, module), stock, (d.rows(ROWS, 512),), (2.5e-3,))


def pair() -> Case:
    """Two matrices of one form, and a row of a table by position on top of the second."""
    d = Draw(21)
    first, second, table = nn.Linear(d.normal(24, 256)), nn.Linear(d.normal(40, 256)), d.normal(4, 40)
    at = d.whole(0, 1000, ROWS)
    stock = lambda x, at: mx.concatenate([first(x.astype(F32)), second(x.astype(F32)) + table[at % 4]], axis=1)
    return Case("matvec pair", lambda b: PairMatvec(b, first, second, F32, table), stock, (d.rows(ROWS, 256), at), (1e-5,))


def packed_pair() -> Case:
    d = Draw(22)
    first, second = (nn.QuantizedLinear(d.packed((n, 256), "mxfp8", 8, 32)) for n in (24, 10))
    stock = lambda x: x.astype(F32) @ mx.concatenate([values(first), values(second)]).T
    return Case("matvec packed pair", lambda b: PairMatvec(b, first, second, BF16), stock, (d.rows(ROWS, 256),), (2.5e-3,))


def experts(routed: tuple[str, int, int], shared: tuple[str, int, int], limit: float, unit: bool = False) -> Case:
    """Gate and up are large enough for the clamps to act. unit: on the matrix unit; the rows share some of their experts."""
    d, E, D, I, picks = (Draw(25), 5, 1536, 512, 2) if unit else (Draw(7), 6, 256, 96, 3)
    up = [nn.QuantizedExpertLinear(replace_scale(d.packed((E, I, D), *routed), 4.0), BF16) for _ in range(2)]
    down = nn.QuantizedExpertLinear(d.packed((E, D, I), routed[0], routed[1], 64 if unit else 32), BF16)
    su = [nn.QuantizedLinear(d.packed((I, D), *shared)) for _ in range(2)]
    sd = nn.QuantizedLinear(d.packed((D, I), shared[0], shared[1], 64 if unit else 32))
    as32 = lambda m: nn.ExpertLinear(values(m), F32) if isinstance(m, nn.QuantizedExpertLinear) else nn.Linear(values(m))
    moe = MoEV4(None, None, None, as32(up[0]), as32(down), as32(up[1]), as32(su[0]), as32(sd), as32(su[1]), picks, 1.0, limit, "", F32)
    build = lambda b: (TensorExperts if unit else Experts)(b, (up[0], up[1]), down, (su[0], su[1]), sd, limit)
    inputs = d.rows(ROWS, D), d.chosen(picks, E), d.positive(ROWS, picks)
    name = "experts on the unit" if unit else f"experts {routed[0]} {routed[1]} shared {shared[0]} {shared[1]}"
    stock = lambda x, ids, w: moe.experts(x.astype(F32), ids, w)
    return Case(name, build, stock, inputs, (3e-3,), close=frozenset({0}), only="cuda" if unit else None)


def replace_scale(p: nn.Packed, factor: float) -> nn.Packed:
    """The same codes under larger scales, where these are floats."""
    return p if p.mode != "affine" else replace(p, scales=p.scales * factor, biases=p.biases * factor)


def hyper(stagger: bool, first: bool, extreme: bool = False, prompt: bool = False) -> Case:
    """extreme: Sinkhorn inputs of +-80. prompt: what many rows take, of these few; wide enough for several stretches and runs."""
    d, D = Draw(8), 256 if not prompt else 384 if stagger else 2176
    base = d.normal(24)
    if extreme:
        base = mx.array(np.where(np.arange(24) % 3, 80.0, -80.0).astype(np.float32))
    mix = HyperConnection(d.normal(24, 4 * D, size=0.05), base, mx.array([1.1, 0.9, 2.0]), 20, 1e-6, 1e-20 if stagger else 1e-6)
    weight = d.positive(D)
    inputs = d.rows(ROWS, 4, D), d.positive(ROWS, 4), d.rows(ROWS, D), d.positive(ROWS, 4), d.positive(ROWS, 4, 4) / 4
    if first:
        inputs = *inputs[:2], None, None, None
    name = f"{'prompt ' if prompt else ''}enter {'lagged' if stagger else 'own'}{' first' if first else ''}{' extreme' if extreme else ''}"
    stock = lambda *streams: enter(mix, weight, mix.norm_eps, stagger, streams)
    # The streams and the row are bfloat16: a sum in another order moves a rounding now and then.
    limits = 1e-3, 1e-3, 1e-5, 1e-5, 1e-5
    close = frozenset({2, 3, 4}) | (frozenset() if stagger else frozenset({1}))

    def build(backend: Backend) -> Callable:
        call = Enter(backend, mix, weight, mix.norm_eps, stagger)
        if prompt:
            call._many = lambda n: True
        return call

    return Case(name, build, stock, inputs, limits, close=close, only="cuda" if prompt else None)


def mixes() -> Case:
    d, D = Draw(19), 96
    mix = HyperConnection(d.normal(24, 4 * D, size=0.1), d.normal(24), mx.array([1.1, 0.9, 2.0]), 6, 1e-6, 1e-6)
    return Case("mixes", lambda b: Mixes(b, mix), lambda h: mix(h.astype(F32)), (d.rows(ROWS, 4, D),), (1e-5,) * 3, close=frozenset({0, 1, 2}))


def attention(
    heads: int, channels: int, dims: int, window: int, entries: int, head_eps: float | None, unit: bool = False, rows: int = ROWS
) -> Case:  # fmt: skip
    """Lists with absent slots in front and at the end; row 3 sees its own window row alone. unit: on the matrix unit. rows: more than
    eight are those of a prompt."""
    d = Draw(9)
    q, ring, pool = d.rows(rows, heads, channels), d.normal(2 * window, channels).astype(BF16), d.normal(90, channels).astype(BF16)
    slots, live = d.whole(0, 2 * window, rows, window), d.rng.integers(0, window, (rows, 1))
    live[3] = window - 1
    present = mx.array(np.arange(window)[None] >= live)
    sink, table = d.normal(heads), d.table(rows, dims)
    seen = d.rng.integers(0, entries + 1, (rows, 1)) if entries else None
    if entries:
        seen[3] = 0
    chosen = (pool, d.whole(0, 90, rows, entries), mx.array(np.arange(entries)[None] < seen)) if entries else (None, None, None)

    def stock(q, table, ring, slots, present, pool, index, picked):
        x = q if head_eps is None else norm.rms(q, None, head_eps)
        keys, keep = ring[slots], present
        if pool is not None:
            keys, keep = mx.concatenate([keys, pool[index]], axis=1), mx.concatenate([keep, picked], axis=1)
        return rope.rotate(attend.attend_rows(rope.rotate(x, table), keys, keep, sink, channels**-0.5), table, inverse=True)

    build = lambda b: (TensorAttend if unit else Attend)(b, heads, channels, dims, window, sink, head_eps)
    fewer = (1, 3)
    if rows > ROWS:
        # Scores so far apart that running maxima grow by much.
        q = q * mx.where(mx.arange(rows) % 4 == 0, 16, 1).astype(BF16)[:, None, None]
        fewer = ROWS + 1, rows - 1
    inputs = q, table, ring, slots, present, *chosen
    kind = "prompt " if rows > ROWS else "tensor " if unit else ""
    name = f"{kind}attend {heads} x {channels}, {window} + {entries}{' normed' if head_eps else ''}"
    return Case(name, build, stock, inputs, (2.5e-3,), frozenset({2, 5}), frozenset({0}), "cuda" if unit else None, rows, fewer)


def scores(heads: int, channels: int) -> Case:
    """Values of few bits, as the model's rounding leaves them, so that sums are exact in any order."""
    d = Draw(10)
    few = lambda *shape: (d.whole(-4, 5, *shape).astype(F32) * 0.5).astype(BF16)
    inputs = few(ROWS, heads, channels), d.whole(-8, 9, ROWS, heads).astype(F32) / 16, few(100, channels), d.whole(0, 101, ROWS, 1)
    return Case(f"scores {heads} x {channels}", lambda b: Scores(b, heads, channels), attend.index_scores, inputs, (0.0,), frozenset({2}))


def top_k(width: int, k: int, slots: int) -> Case:
    """Many equal scores; rows with nothing visible, less than k visible, holes, and equal scores only."""
    d = Draw(11)
    s = np.round(d.rng.standard_normal((ROWS, width)) * 4) / 4
    s[0] = -np.inf
    s[1, width // 3 :] = -np.inf
    s[2, ::2] = -np.inf
    s[3] = 0.25
    s[4, : k // 2] = -np.inf
    stock = lambda score: select.ascending(select.best_mask(score, k), slots)
    return Case(f"top {k} of {width}", lambda b: TopK(b, k, slots), stock, (mx.array(s.astype(np.float32)),), (0.0, 0.0))


def router(kind: str, experts_count: int = 40, picks: int = 6) -> Case:
    """kind: scores, images (rows with another bias), hashed, sigmoid."""
    d, D = Draw(12), 288  # of no multiple of 256, so that both dialects take the same text for the logits
    gate = nn.Linear(d.normal(experts_count, D, size=0.06).astype(BF16).astype(F32))
    bias, other = d.normal(experts_count, size=0.1), d.normal(experts_count, size=0.1)
    scoring, temperature = ("sigmoid", 1.0) if kind == "sigmoid" else ("sqrtsoftplus", 2.0)
    image = mx.array(d.rng.random(ROWS) < 0.5) if kind == "images" else None
    hashed = kind == "hashed"
    table = mx.array(np.stack([d.rng.permutation(experts_count)[:picks] for _ in range(40)]).astype(np.int32)) if hashed else None
    image = d.whole(0, 40, ROWS) if hashed else image

    def stock(x, image):
        score = route.router_scores(gate(x.astype(F32)) / temperature, scoring)
        if hashed:
            return route.route_hashed(score, table, image, 1.5)
        return route.route(score, bias if image is None else mx.where(image[:, None], other, bias), picks, 1.5)

    others = (None, None, table) if hashed else (bias, other if kind == "images" else None)
    build = lambda b: Router(b, gate, picks, scoring, 1.5, temperature, *others)
    return Case(f"router {kind}", build, stock, (d.normal(ROWS, D).astype(BF16), image), (0.0, 1e-6), close=frozenset({1}))


def tensor_matvec(inputs: int = 512, outputs: int = 32, groups: int = 1, wide: bool = False, tiling: dict[str, int] | None = None) -> Case:
    """wide: a float32 result; tiling: of a larger matrix."""
    d = Draw(15)
    shape = (outputs, inputs) if groups == 1 else (groups, outputs, inputs)
    module = (nn.QuantizedLinear if groups == 1 else nn.QuantizedGroupedLinear)(d.packed(shape, "affine", 4, 64))
    w, dtype = values(module).reshape(groups, -1, inputs), F32 if wide else BF16
    stock = lambda x: mx.concatenate([x.astype(F32)[:, inputs * g : inputs * (g + 1)] @ w[g].T for g in range(groups)], axis=1)
    name = f"tensor matvec {inputs} to {groups} x {outputs}{' wide' if wide else ''}"
    limit = 1e-5 if wide else 2.5e-3

    def build(backend: Backend) -> Callable:
        call = tensor.TensorMatvec(backend, module, dtype)
        call.constants |= tiling or {}
        return call

    return Case(name, build, stock, (d.rows(ROWS, inputs * groups),), (limit,), close=frozenset({0}), only="cuda")


def tensor_plain(inputs: int, outputs: int, groups: int = 1, wide: bool = False) -> Case:
    d = Draw(23)
    shape = (outputs, inputs) if groups == 1 else (groups, outputs, inputs)
    module = (nn.Linear if groups == 1 else nn.GroupedLinear)(d.normal(*shape).astype(BF16))
    w = module.weight.astype(F32).reshape(groups, -1, inputs)
    stock = lambda x: mx.concatenate([x.astype(F32)[:, inputs * g : inputs * (g + 1)] @ w[g].T for g in range(groups)], axis=1)
    build, limit = lambda b: tensor.TensorPlain(b, module, F32 if wide else BF16), 1e-5 if wide else 2.5e-3
    name = f"tensor plain {inputs} to {groups} x {outputs}{' wide' if wide else ''}"
    return Case(name, build, stock, (d.rows(ROWS, inputs * groups),), (limit,), close=frozenset({0}), only="cuda")


def tensor_times(factor: float) -> Case:
    d = Draw(27)
    module = nn.Linear(d.normal(16, 512).astype(BF16))
    stock = lambda x: factor * (x.astype(F32) @ module.weight.astype(F32).T)
    build = lambda b: tensor.TensorPlain(b, module, F32).times(factor)
    return Case(f"tensor plain times {factor}", build, stock, (d.rows(ROWS, 512),), (1e-5,), close=frozenset({0}), only="cuda")


def tensor_pair(table_rows: int) -> Case:
    """As `pair`; table_rows 0: without a table, and the two side by side."""
    d = Draw(24)
    first, second = (nn.Linear(d.normal(24, 512).astype(BF16)) for _ in range(2))
    table, at = d.normal(table_rows, 24) if table_rows else None, d.whole(0, 1000, ROWS)

    def stock(x, at):
        a, b = (x.astype(F32) @ w for w in [m.weight.astype(F32).T for m in (first, second)])
        return mx.concatenate([a, b], axis=1) if table is None else mx.stack([a, b + table[at % table_rows]], axis=1)

    build = lambda b: tensor.TensorPlain(b, first, F32, second, table, split=table is not None)
    return Case(f"tensor pair {table_rows}", build, stock, (d.rows(ROWS, 512), at), (1e-5,), close=frozenset({0}), only="cuda")


def tensor_experts(mode: str, bits: int, group: int, shared: tuple[str, int, int] | None = None, plain: bool = False) -> Case:
    """Weights are rounded to bfloat16 before the products, which this stock operation does as well. shared: the form of the shared expert,
    the same by default; plain: it has none that tiles take."""
    d, E, D, I, picks = Draw(16), 5, 128, 64, 3
    up = [nn.QuantizedExpertLinear(replace_scale(d.packed((E, I, D), mode, bits, group), 4.0), BF16) for _ in range(2)]
    down = nn.QuantizedExpertLinear(d.packed((E, D, I), mode, bits, group), BF16)
    form = shared or (mode, bits, group)
    alone = [nn.QuantizedLinear(d.packed(shape, *form)) for shape in ((I, D), (I, D), (D, I))]
    wide = [nn.ExpertLinear(values(m).astype(BF16).astype(F32), F32) for m in (*up, down)]
    half = [values(m).astype(BF16).astype(F32) for m in alone]

    def other(x):
        v = x.astype(F32)
        return route.swiglu(v @ half[0].T, v @ half[1].T, 2.0, None, BF16).astype(F32) @ half[2].T

    def stock(x, ids, w):
        v = x.astype(F32)[:, None, None]
        act = route.swiglu(wide[0](v, ids), wide[1](v, ids), 2.0, w[..., None, None], F32)
        return mx.sum(wide[2](act, ids)[:, :, 0], axis=1) + other(x)

    inputs = d.rows(ROWS, D), d.chosen(picks, E), d.positive(ROWS, picks)
    matrices = [nn.QuantizedLinear(d.packed((m, n), "affine", 3, 32)) for m, n in ((I, D), (I, D), (D, I))] if plain else alone
    build = lambda b: tiles.TileExperts(b, tuple(up), down, tuple(matrices[:2]), matrices[2], 2.0, lambda x: other(x).astype(BF16))
    name = f"tensor experts {mode} {bits}{f' shared {shared[0]}' if shared else ''}{' beside another' if plain else ''}"
    return Case(name, build, stock, inputs, (5e-3,), close=frozenset({0}), only="cuda")


def prompt_groups(mode: str, bits: int, group: int, K: int = 192) -> Case:
    d, G, N = Draw(27), 3, 64
    module = nn.QuantizedGroupedLinear(d.packed((G, N, K), mode, bits, group))
    w = values(module)
    stock = lambda x: mx.concatenate([x.astype(F32)[:, K * g : K * (g + 1)] @ w[g].T for g in range(G)], axis=1)
    name = f"prompt groups {mode} {bits}{f' of {K}' if K > 256 else ''}"
    return Case(name, lambda b: tiles.GroupsProduct(b, module), stock, (d.rows(ROWS, G * K),), (4e-3,), close=frozenset({0}), only="cuda")


def prompt_rows(inputs: int, outputs: int, table_rows: int | None = None) -> Case:
    """Plain matrices of a prompt with float32 results; table_rows: two of them, 0 without a table."""
    d = Draw(26)
    first, second = (nn.Linear(d.normal(outputs, inputs).astype(BF16)) for _ in range(2))
    table, at = d.normal(table_rows, outputs) if table_rows else None, d.whole(0, 1000, ROWS)
    build = lambda b: tiles.RowsProduct(b, first, None if table_rows is None else second, table, split=bool(table_rows))

    def stock(x, at):
        a, b = (x.astype(F32) @ m.weight.astype(F32).T for m in (first, second))
        if table_rows is None:
            return a
        return mx.concatenate([a, b], axis=1) if table is None else mx.stack([a, b + table[at % table_rows]], axis=1)

    name = f"prompt rows {inputs} to {outputs}{'' if table_rows is None else f' and {table_rows}'}"
    return Case(name, build, stock, (d.rows(ROWS, inputs), at), (1e-5,), close=frozenset({0}), only="cuda")


def decoded(mode: str, bits: int, group: int) -> Case:
    """The result has the matrix's rows, of which there are eight."""
    d = Draw(17)
    module = nn.QuantizedLinear(d.packed((ROWS, 640), mode, bits, group))
    whole = values(module).astype(BF16)
    build = lambda b: lambda x: tensor.decoded(b, stored(module))
    return Case(f"decoded {mode} {bits} g{group}", build, lambda x: whole, (whole,), (0.0,), frozenset({0}))


def decoded_three(mode: str, bits: int, group: int) -> Case:
    """The results have as many rows as calls have: four of each of two, and those of the third, which has several groups of threads."""
    d = Draw(31)
    modules = [nn.QuantizedLinear(d.packed(shape, mode, bits, group)) for shape in ((ROWS // 2, 640), (ROWS // 2, 640), (ROWS, 2304))]
    first, second, third = (values(m).astype(BF16) for m in modules)
    whole = mx.concatenate([first, second])
    build = lambda b: lambda x: tensor.DecodedThree(b, tuple(modules))()
    return Case(f"decoded three {mode} {bits}", build, lambda x: (whole, third), (whole,), (0.0, 0.0), frozenset({0}))


STOCK_ROUNDING = {
    finish.NO_ROUNDING: lambda x: x, finish.FP8_UE8M0: fakequant.fp8_ue8m0, finish.FP4_UE8M0: fakequant.fp4_ue8m0,
    finish.FP4_SCALED: fakequant.fp4_e4m3, finish.V4_FP4: fakequant.v4_fp4, finish.v4_fp8(64): lambda x: fakequant.v4_fp8(x, 64),
}  # fmt: skip


def finished(channels: int, rounding: finish.Rounding, normed: bool, dims: int, heads: int = 1) -> Case:
    d = Draw(13)
    shape = (ROWS, channels) if heads == 1 else (ROWS, heads, channels)
    weight, eps = (d.positive(channels), 1e-20) if normed else (None, None)
    # Magnitudes differ between channels, so that the blocks of the rounding have different scales.
    spread = 2.0 ** d.whole(-6, 7, channels).astype(F32)
    x = d.rows(*shape)
    if not normed:
        # Half of the rows hold values of few bits, among which ties of the codes are frequent.
        few = d.whole(-24, 25, *shape).astype(F32) / 4
        x = (mx.concatenate([x[: ROWS // 2].astype(F32), few[ROWS // 2 :]]) * spread).astype(BF16)

    def stock(x, table):
        y = norm.rms(x, weight, eps) if normed else x
        return STOCK_ROUNDING[rounding](rope.rotate(y, table) if dims else y)

    build = lambda b: finish.Finish(b, channels, weight=weight, eps=eps, rope=dims, rounding=rounding)
    name = f"finish {heads} x {channels} kind {rounding.kind} g{rounding.block}{' normed' if normed else ''}{' turned' if dims else ''}"
    # Without a norm nothing is summed and every bit is the stock chain's. With one, a low bit can become a whole step of the rounding.
    return Case(name, build, stock, (x, d.table(ROWS, dims) if dims else None), (5e-3 if normed else 0.0,))


def finished_two() -> Case:
    d = Draw(32)
    first, second, eps = 1280, 128, 1e-20
    weights, x = (d.positive(first), d.positive(second)), d.rows(ROWS, first + second)

    def build(b):
        latent = finish.Finish(b, second, weight=weights[1], eps=eps, rope=64, rounding=finish.FP8_UE8M0)
        return finish.Finish(b, first, weight=weights[0], eps=eps).beside(latent)

    stock = lambda x, table: (
        norm.rms(x[:, :first], weights[0], eps), fakequant.fp8_ue8m0(rope.rotate(norm.rms(x[:, first:], weights[1], eps), table))
    )  # fmt: skip
    return Case("finish of two parts", build, stock, (x, d.table(ROWS, 64)), (5e-3, 5e-3))


@cache
def cases() -> tuple[Case, ...]:
    from tests.engine.kernels.cases_exl3 import exl3_cases  # which are made of this module
    from tests.engine.kernels.cases_step import step_cases

    return (
        *(matvec(*f) for f in FORMATS),
        matvec("affine", 4, 64, F32),
        matvec("affine", 4, 64, mx.float16),
        matvec("affine", 8, 64, wide=True),
        matvec("affine", 4, 32, inputs=96, outputs=3),
        plain(BF16),
        plain(F32),
        grouped(),
        pair(),
        packed_pair(),
        experts(("affine", 4, 64), ("affine", 4, 64), 2.0),
        experts(("mxfp4", 4, 32), ("mxfp8", 8, 32), 0.0),
        experts(("affine", 4, 64), ("affine", 4, 64), 2.0, unit=True),
        hyper(True, False),
        hyper(True, True),
        hyper(False, False),
        hyper(False, True),
        hyper(True, False, extreme=True),
        hyper(True, False, prompt=True),
        hyper(True, True, prompt=True),
        hyper(False, False, prompt=True),
        mixes(),
        attention(8, 64, 32, 64, 128, None),
        attention(4, 512, 64, 32, 20, None),
        attention(4, 128, 64, 32, 30, 1e-6),
        attention(8, 64, 32, 64, 0, None),
        attention(8, 64, 32, 64, 128, None, True),
        attention(32, 512, 64, 32, 20, None, True),
        attention(24, 256, 64, 48, 30, 1e-6, True),
        attention(16, 128, 64, 40, 0, None, True),
        attention(16, 64, 32, 64, 128, None, True, 40),
        attention(128, 64, 32, 64, 128, None, True, 10),
        attention(20, 512, 64, 32, 20, None, True, 10),
        attention(24, 192, 64, 48, 500, 1e-6, True, 12),
        attention(64, 128, 64, 40, 0, None, True, 10),
        scores(32, 128),
        scores(64, 128),
        scores(4, 32),
        top_k(300, 64, 64),
        top_k(2100, 512, 528),
        top_k(20, 64, 64),
        *(router(kind) for kind in ("scores", "images", "hashed", "sigmoid")),
        finished(512, finish.FP8_UE8M0, True, 64),
        finished(512, finish.v4_fp8(64), True, 64),
        finished(1280, finish.NO_ROUNDING, True, 0),
        finished_two(),
        finished(128, finish.FP4_UE8M0, False, 64, heads=4),
        finished(512, finish.FP4_SCALED, False, 64),
        finished(128, finish.V4_FP4, False, 0, heads=3),
        finished(64, finish.FP8_UE8M0, False, 32),
        finished(32, finish.FP4_UE8M0, False, 16, heads=4),
        tensor_matvec(),
        tensor_matvec(256, 16, groups=4),
        tensor_matvec(1280, 128, tiling={"KS": 5, "RT": 4, "RING": 1}),
        tensor_matvec(1792, 64, wide=True, tiling={"KS": 2, "RT": 2, "RING": 2}),
        tensor_plain(512, 24),
        tensor_plain(5632, 8, wide=True),
        tensor_plain(256, 16, groups=4),
        tensor_times(0.25),
        tensor_pair(4),
        tensor_pair(0),
        tensor_experts("affine", 4, 64),
        tensor_experts("mxfp4", 4, 32),
        tensor_experts("mxfp8", 8, 32),
        tensor_experts("affine", 6, 32),
        tensor_experts("affine", 2, 64),
        tensor_experts("affine", 8, 32),
        tensor_experts("affine", 4, 64, plain=True),
        tensor_experts("mxfp4", 4, 32, ("mxfp8", 8, 32)),
        prompt_groups("affine", 4, 64),
        prompt_groups("affine", 4, 64, 512),
        prompt_groups("mxfp8", 8, 32),
        prompt_rows(640, 40),
        prompt_rows(128, 1056),
        prompt_rows(192, 32, 4),
        prompt_rows(192, 32, 0),
        *(decoded(*f) for f in (("affine", 4, 64), ("affine", 2, 64), ("affine", 3, 32), ("affine", 5, 64), ("affine", 6, 128), ("affine", 8, 64))),
        *(decoded(*f) for f in (("mxfp4", 4, 32), ("mxfp8", 8, 32))),
        decoded_three("affine", 4, 64),
        decoded_three("mxfp8", 8, 32),
        *exl3_cases(),
        *step_cases(),
    )
