"""The route of a GPU: which kernel computes which site. Metal and CUDA share the texts, so they share this table.

What the kernels do not have (a shape, a format, a dtype) is declined here, at construction, with the reason; such a site stays stock.
A decode call has at most `MOST_ROWS` rows. In wider calls router, matrices and experts are stock on Metal, these sorted by expert, and have
kernels for the matrix unit or are decoded to bfloat16 for it on CUDA; all else is one kernel for any number of rows.
"""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine import kernels
from dsv41chat.engine.errors import RouteUnavailable
from dsv41chat.engine.kernels.attend import Attend, TensorAttend
from dsv41chat.engine.kernels.choose import Router, Scores, TopK
from dsv41chat.engine.kernels.dialect import Kernel, kernel_name
from dsv41chat.engine.kernels.exl3 import exl3_product
from dsv41chat.engine.kernels.exl3_chains import Exl3Output, Exl3Project, Exl3Queries, Exl3RawRows
from dsv41chat.engine.kernels.exl3_experts import Exl3Experts
from dsv41chat.engine.kernels.experts import TensorExperts
from dsv41chat.engine.kernels.finish import FP4_SCALED, FP4_UE8M0, FP8_UE8M0, NO_ROUNDING, V4_FP4, Finish, Rounding, v4_fp8
from dsv41chat.engine.kernels.glue import (
    STREAMS,
    BlockTop,
    Collapse,
    Embed,
    EngramGate,
    FirstVisible,
    Hadamard,
    HeadMix,
    KeepBlocks,
    PoolGroups,
    Scaled,
    Settle,
    StreamMean,
)
from dsv41chat.engine.kernels.hyper import Enter, Mixes
from dsv41chat.engine.kernels.launch import Backend
from dsv41chat.engine.kernels.matrix import MOST_ROWS, Experts, Matvec, narrowed
from dsv41chat.engine.kernels.prompt import SortedExperts
from dsv41chat.engine.kernels.recorder import Gathered, Recorder
from dsv41chat.engine.kernels.replay import KEPT_BYTES
from dsv41chat.engine.kernels.routes import STOCK_HINT, Declined, Route, distance
from dsv41chat.engine.kernels.sites import Site, bare, input_dtype, sites, values
from dsv41chat.engine.kernels.tensor import DecodedProduct, DecodedThree, TensorPlain, pair_product, product
from dsv41chat.engine.kernels.tiles import GroupsProduct, RowsProduct, TileExperts
from dsv41chat.engine.nn.attention import AttentionWeights
from dsv41chat.engine.nn.compressor_v4 import CompressorV4
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3GroupedLinear, Exl3Linear
from dsv41chat.engine.nn.indexer_v4 import IndexerV4
from dsv41chat.engine.nn.linear import ExpertLinear, Linear, QuantizedExpertLinear, QuantizedGroupedLinear, QuantizedLinear
from dsv41chat.engine.ops import norm, rope
from dsv41chat.engine.ops.route import swiglu
from dsv41chat.engine.rows_v4 import slots_for

# Relative L2 distance to the reference in bfloat16. Source: spec: kernels, section 7. Latents, entries and index queries are rounded to
# few bits at the end, which makes a whole step of a low bit of the product; so their products are compared as matrices, and what follows
# a latent's product on equal input.
TOLERANCE = {
    "matrix": 4e-3, "mix": 1e-4, "enter": 4e-3, "project": 5e-2, "latent": 5e-2, "output": 8e-3, "gathered": 4e-3, "queries": 1e-1, "raw_rows": 4e-3,
    "entries": 5e-2,
    "scores": 1e-5, "select": 0.0, "router": 1e-5, "experts": 8e-3, "begin": 4e-3, "settle": 4e-3, "tap": 4e-3, "logits": 6e-3, "engram": 8e-3,
    "pool": 4e-3, "visible": 0.0, "candidates": 0.0, "among": 0.0,
}  # fmt: skip
# Every module of texts.
_TEXTS = [import_module(f"{kernels.__name__}.{m.name}") for m in pkgutil.iter_modules(kernels.__path__) if m.name.startswith("text_")]
_FINISH_LIMIT = 5e-3
# What recorded steps of eight rows need between their launches, with lists as long as the longest contexts make them, and a lane's buffers
# while they are there twice.
_STEP_BYTES = (256 << 20) + KEPT_BYTES
# Of calls that are compared with stock: of decode, of a window, of a prompt.
_CHECK_ROWS = {"metal": (1, 5), "cuda": (1, 5, 40)}
# By backend and shape: every layer builds its own, and they are alike.
_finish_gaps: dict[tuple, float] = {}


def gpu_route(
    dialect: str, backend: Backend, missing: Callable[[], str | None], devices: frozenset[str] | None = None, replays: Callable | None = None
) -> Route:
    """The route named after its dialect. backend: what runs the texts; devices: kinds it is for, by default the dialect's own; replays: as
    `Route` has it."""
    return Route(
        dialect,
        devices or frozenset({dialect}),
        builders(backend),
        TOLERANCE,
        rows_alike=False,
        missing=missing,
        identity=lambda: text_digest(dialect),
        reference=in_float32,
        check_rows=_CHECK_ROWS[dialect],
        joins=backend.lazy,
        replays=replays,
        prepare=lambda found: _prepare(backend, found),
        copies=narrowed_bytes if replays is None else lambda modules, trunk: narrowed_bytes(modules, trunk) + _STEP_BYTES,
    )


def _prepare(backend: Backend, found: list[Site]) -> None:
    """Compile side by side what the checks will call; what fails here fails there again, and is reported there."""
    if not hasattr(backend, "collecting"):
        return
    build = builders(backend)
    with backend.collecting():
        for site in found:
            try:
                call = build[site.op](site)
                for rows in _CHECK_ROWS[backend.dialect]:
                    call(*site.inputs(rows, np.random.default_rng(rows)))
            except (Declined, RouteUnavailable):
                continue
    _finish_gaps.clear()


def narrowed_bytes(modules: list[Any], trunk: Any) -> int:
    """Bytes of the bfloat16 copies of float32 matrices, of compressors and routers, if their values allow them all."""
    found = [s.owner for s in sites(modules, trunk) if s.op in ("raw_rows", "router")] if trunk.dtype == mx.bfloat16 else []
    parts = {id(m): m for o in found for name in ("wkv", "wgate", "gate") if isinstance(m := bare(getattr(o, name, None)), Linear)}
    return sum(2 * values(m) for m in parts.values() if m.weight.dtype == mx.float32)


def text_digest(dialect: str) -> str:
    """Stands for every text of the route: states that other texts computed can differ in low bits."""
    texts = [v for module in _TEXTS for v in vars(module).values() if isinstance(v, Kernel) and v.only in (None, dialect)]
    names = sorted({kernel_name(text, dialect, ()) for text in texts})
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]


def in_float32(site: Site) -> Callable:
    """The stock operation; products run in float32 and only their results are rounded, so that its own roundings do not count.

    The step between sublayers and the choices stay as they are: what they decide on is the bfloat16 rows themselves.
    """
    if site.op not in ("matrix", "project", "latent", "output", "gathered", "experts"):
        return site.stock
    call = site.stock
    if site.op == "experts":
        m = site.owner
        wide = {name: replace(bare(getattr(m, name)), dtype=mx.float32) for name in ("w1", "w2", "w3")}
        parts = {name: bare(getattr(m, name)) for name in ("shared1", "shared2", "shared3")}
        call = replace(m, **wide, **parts, dtype=mx.float32).experts
    narrow = lambda value: tuple(map(narrow, value)) if isinstance(value, tuple) else value.astype(dtype)
    dtype = input_dtype(site.stock, site.trunk) if site.op == "matrix" else site.trunk.dtype
    floating = lambda a: isinstance(a, mx.array) and mx.issubdtype(a.dtype, mx.floating)
    return lambda *args: narrow(call(*(a.astype(mx.float32) if floating(a) else a for a in args)))


def builders(backend: Backend) -> Mapping[str, Callable[[Site], Callable]]:
    make = {
        "matrix": _matrix, "mix": _mix, "enter": _enter, "project": _project, "latent": _latent, "output": _output, "gathered": _gathered,
        "queries": _queries, "raw_rows": _raw_rows,
        "entries": _entries, "scores": _scores, "select": _select, "router": _router, "experts": _experts, "begin": _begin, "settle": _settle,
        "tap": _tap, "logits": _logits, "engram": _engram, "pool": _pool, "visible": _visible, "candidates": _candidates, "among": _among,
    }  # fmt: skip
    return {op: lambda site, build=build: build(backend, site) for op, build in make.items()}


def _bfloat16(site: Site) -> None:
    if site.trunk.dtype != mx.bfloat16:
        raise Declined(f"the kernels compute on bfloat16 rows, not {str(site.trunk.dtype).rsplit('.', 1)[-1]}")


def _four_streams(site: Site) -> None:
    _bfloat16(site)
    if site.trunk.config.hc_mult != STREAMS:
        raise Declined(f"{site.trunk.config.hc_mult} streams; the kernels have {STREAMS}")


def _few(few: Callable, many: Callable) -> Callable:
    """few for a decode call, many for a wider one."""
    return lambda x, *rest, **more: (few if x.shape[0] <= MOST_ROWS else many)(x, *rest, **more)


def _matrix(backend: Backend, site: Site) -> Callable:
    """Stacked matrices stay stock, `experts` serves them. On Metal plain ones stay as well."""
    if isinstance(site.stock, (Exl3Linear, Exl3GroupedLinear, Exl3ExpertLinear)):
        return _few(exl3_product(backend, site.stock), site.stock)
    if isinstance(site.stock, (ExpertLinear, QuantizedExpertLinear)):
        raise Declined("")
    if not isinstance(site.stock, (QuantizedLinear, QuantizedGroupedLinear)):
        if backend.dialect != "cuda":
            raise Declined(f"{type(site.stock).__name__} stays with the stock product")
        return _few(_half(product(backend, site.stock), Matvec(backend, site.stock)), site.stock)
    few, many = Matvec(backend, site.stock), site.stock
    if backend.dialect == "cuda":
        few, many = _half(product(backend, site.stock), few), _half(_wide(backend, site.stock), many)
    return _few(few, many)


def _wide(backend: Backend, module: Any) -> Callable:
    """A packed matrix for many bfloat16 rows on CUDA."""
    try:
        return GroupsProduct(backend, module)
    except Declined:
        return DecodedProduct(backend, module)


def _half(call: Callable, other: Callable) -> Callable:
    """call for bfloat16 rows, other for float32 ones."""
    return lambda x: call(x) if x.dtype == mx.bfloat16 else other(x)


def _mix(backend: Backend, site: Site) -> Callable:
    """Of drafters, which take the coefficients by themselves; the layers of a trunk take them inside `enter`."""
    _bfloat16(site)
    return Mixes(backend, site.stock)


def _enter(backend: Backend, site: Site) -> Callable:
    _bfloat16(site)
    layer = site.owner
    mix, weight = (layer.attn_mix, layer.attn_norm) if site.field == "into_attention" else (layer.ffn_mix, layer.ffn_norm)
    return Enter(backend, bare(mix), weight, layer.eps, site.trunk.config.family == "v41")


def _latent(backend: Backend, site: Site) -> Callable:
    """Called with whatever computes `wkv`, so that its own route counts."""
    w, finish = site.owner, _latent_finish(backend, site)
    return lambda x, table: finish(w.wkv(x), table)


def _latent_finish(backend: Backend, site: Site) -> Finish:
    """What becomes of a latent's product. Raises RouteUnavailable where it is too far from stock."""
    _bfloat16(site)
    w, dims, rounding = site.owner, site.trunk.config.qk_rope_head_dim, _rounding(site)
    finish = Finish(backend, w.head_dim, weight=w.kv_norm, eps=w.eps, rope=dims, rounding=rounding)
    key = backend, w.head_dim, w.eps, dims, rounding
    if key not in _finish_gaps and not isinstance(backend, Recorder):
        _finish_gaps[key] = _finish_gap(finish, w, dims)
    if _finish_gaps.get(key, 0.0) > _FINISH_LIMIT:
        reason = f"norm, rotation and rounding of latents are {_finish_gaps[key]:.1e} from stock on equal rows"
        raise RouteUnavailable(reason, STOCK_HINT)
    return finish


def _finish_gap(finish: Finish, w: AttentionWeights, dims: int) -> float:
    """The distance to stock of what follows a product."""
    rng = np.random.default_rng(w.head_dim)
    y = mx.array(rng.standard_normal((8, w.head_dim)).astype(np.float32)).astype(mx.bfloat16)
    phase = rng.random((8, dims // 2)) * 6
    table = mx.array(np.cos(phase).astype(np.float32)), mx.array(np.sin(phase).astype(np.float32))
    want = rope.rotate(norm.rms(y, w.kv_norm, w.eps), table)
    return distance(finish(y, table), want if w.rounding is None else w.rounding(want))


def _rounding(site: Site) -> Rounding:
    """What `AttentionWeights.rounding` is, for the kernel."""
    if site.owner.rounding is None:
        return NO_ROUNDING
    return v4_fp8(site.trunk.config.qk_rope_head_dim) if site.trunk.config.family == "v4" else FP8_UE8M0


def _project(backend: Backend, site: Site) -> Callable:
    latent, w = _latent(backend, site), site.owner
    narrow = Finish(backend, w.q_norm.shape[0], weight=w.q_norm, eps=w.eps)

    def project(x: mx.array, table: Any) -> tuple[mx.array, mx.array, mx.array]:
        qr = narrow(w.wq_a(x))
        return qr, w.wq_b(qr).reshape(x.shape[0], w.heads, w.head_dim), latent(x, table)

    try:
        few = Exl3Project(backend, w, site.trunk.config.qk_rope_head_dim, _rounding(site))
    except Declined:
        few = project
    if backend.dialect != "cuda":
        return _few(few, project)
    try:
        return _few(few, _projected_together(backend, site))
    except Declined:
        return _few(few, project)


def _projected_together(backend: Backend, site: Site) -> Callable:
    """`project` of many rows in few calls: its matrices are decoded at once, and what queries and latents begin with is one product. The host builds
    a prompt while the device waits for it. Raises Declined."""
    w = site.owner
    matrices = DecodedThree(backend, (bare(w.wq_a), bare(w.wkv), bare(w.wq_b)))
    finish = Finish(backend, w.q_norm.shape[0], weight=w.q_norm, eps=w.eps).beside(_latent_finish(backend, site))

    def project(x: mx.array, table: Any) -> tuple[mx.array, mx.array, mx.array]:
        narrow, wide = matrices()
        qr, kv = finish(x @ narrow.T, table)
        return qr, (qr @ wide.T).reshape(x.shape[0], w.heads, w.head_dim), kv

    return project


def _output(backend: Backend, site: Site) -> Callable:
    """Of trellis-coded matrices; others are two products, and nothing between them."""
    _bfloat16(site)
    return _few(Exl3Output(backend, site.owner), site.stock)


def _gathered(backend: Backend, site: Site) -> Callable:
    _bfloat16(site)
    c, w = site.trunk.config, site.owner.weights
    kernel = core(backend, w, c.qk_rope_head_dim, c.sliding_window)
    gathered = lambda *args: kernel(*args, dims=_used(args[6]))
    gathered.pads = True
    return gathered


def _queries(backend: Backend, site: Site) -> Callable:
    """Index queries and the weights of their heads."""
    _bfloat16(site)
    o, proj = site.owner, bare(site.owner.weights_proj)
    factor, dtype = o.head_dim**-0.5 * o.heads**-0.5, input_dtype(proj, site.trunk)
    weigh, few = Scaled(backend, factor), product(backend, narrowed(proj), mx.float32)
    many = _rows(backend, proj, lambda x: o.weights_proj(x.astype(dtype)).astype(mx.float32))
    few = few.times(factor) if isinstance(few, TensorPlain) else _then(few, weigh)
    weights, turned = _few(few, _then(many, weigh)), _turned_queries(backend, site)
    return lambda x, qr, table: (turned(qr, table), weights(x))


def _then(call: Callable, after: Callable) -> Callable:
    return lambda x: after(call(x))


def _turned_queries(backend: Backend, site: Site) -> Callable:
    """(qr, table) -> the queries of an indexer."""
    o, dims, mixed = site.owner, site.trunk.config.qk_rope_head_dim, isinstance(site.owner, IndexerV4)
    rounding = (V4_FP4 if o.qat_sim else NO_ROUNDING) if mixed else FP4_UE8M0 if o.cache_quant else NO_ROUNDING
    turn = Finish(backend, o.head_dim, rope=dims, rounding=NO_ROUNDING if mixed else rounding)
    coarse = Finish(backend, o.head_dim, rounding=rounding) if mixed and rounding.kind else lambda x: x
    spread = Hadamard(backend, o.head_dim) if mixed else lambda x: x
    queries = lambda qr, table: coarse(spread(turn(o.wq_b(qr).reshape(qr.shape[0], o.heads, o.head_dim), table)))
    try:
        return _few(Exl3Queries(backend, o.wq_b, o.head_dim, dims, mixed, rounding), queries)
    except Declined:
        return queries


def _raw_rows(backend: Backend, site: Site) -> Callable:
    """Value and gate rows of a compressor that pools."""
    _bfloat16(site)
    o, value = site.owner, bare(site.owner.wkv)
    if o.wgate is None:
        return _few(exl3_product(backend, value) if isinstance(value, Exl3Linear) else product(backend, narrowed(value)), site.stock)
    table = getattr(o, "ape", None)
    if isinstance(value, Exl3Linear):
        return _few(Exl3RawRows(backend, value, o.wgate, table), site.stock)
    pair = narrowed(value), narrowed(bare(o.wgate))
    many = _rows(backend, pair[0], site.stock, pair[1], table, True)
    return _few(pair_product(backend, *pair, mx.float32, table, split=True), many)


def _rows(backend: Backend, module: Any, stock: Callable, *rest: Any) -> Callable:
    """A product of many rows in float32 on the matrix unit where there is one and it takes the matrix."""
    if backend.dialect == "cuda":
        try:
            return RowsProduct(backend, narrowed(module), *rest)
        except Declined:
            pass  # stock takes every form
    return stock


def _entries(backend: Backend, site: Site) -> Callable:
    """Pooled latents to entries, and in V4.1 to index keys as well."""
    _bfloat16(site)
    o, dims = site.owner, site.trunk.config.qk_rope_head_dim
    width = o.norm.shape[0]
    if not isinstance(o, CompressorV4):
        narrow = Finish(backend, width, weight=o.norm, eps=o.eps)
        turn = Finish(backend, width, rope=dims, rounding=FP4_SCALED if o.cache_quant else NO_ROUNDING)
        rounding = FP4_UE8M0 if o.cache_quant else NO_ROUNDING
        key = Finish(backend, o.index_norm.shape[0], weight=o.index_norm, eps=o.eps, rope=dims, rounding=rounding)

        def entries(pooled: mx.array, table: Any) -> tuple[mx.array, mx.array]:
            latent = narrow(pooled)
            return turn(latent, table), key(o.index_key(latent), table)

        return entries
    rounding = v4_fp8(dims) if o.qat_sim and o.mix is None else NO_ROUNDING
    turn = Finish(backend, width, weight=o.norm, eps=o.eps, rope=dims, rounding=rounding)
    if o.mix is None:
        return turn
    coarse = Finish(backend, width, rounding=V4_FP4) if o.qat_sim else lambda x: x
    spread = Hadamard(backend, width)
    return lambda pooled, table: coarse(spread(turn(pooled, table)))


def _scores(backend: Backend, site: Site) -> Callable:
    _bfloat16(site)
    kernel = Scores(backend, site.owner.heads, site.owner.head_dim)
    return lambda q, weight, keys, length: _with(kernel(q, weight, keys, length, dims=_used(keys)), _used(keys))


def _select(backend: Backend, site: Site) -> Callable:
    _bfloat16(site)
    owner = site.owner
    kernel = TopK(backend, owner.topk, slots_for(owner.topk) if isinstance(owner, IndexerV4) else owner.topk)
    return lambda score: kernel(score, dims=_used(score))


def _router(backend: Backend, site: Site) -> Callable:
    _bfloat16(site)
    moe = site.owner
    table = getattr(moe, "table", None)
    kernel = Router(
        backend, bare(moe.gate), moe.picks, moe.scoring, moe.factor, getattr(moe, "gate_temp", 1.0), moe.bias, getattr(moe, "bias_image", None), table
    )
    call = (lambda x, tokens: kernel(x)) if table is None and site.trunk.config.family == "v4" else kernel
    return call if kernel.many is not None else _few(call, site.stock)


def _experts(backend: Backend, site: Site) -> Callable:
    _bfloat16(site)
    m = site.owner
    part = lambda *names: tuple(bare(getattr(m, name)) for name in names)
    given = backend, part("w1", "w3"), bare(m.w2), part("shared1", "shared3"), bare(m.shared2), m.limit
    kernel = (Exl3Experts if isinstance(bare(m.w1), Exl3ExpertLinear) else Experts)(*given)
    try:
        many = SortedExperts(m, part("w1", "w3", "w2"))
    except Declined:
        many = site.stock
    if backend.dialect == "cuda":
        s1, s2, s3 = (DecodedProduct(backend, p) if isinstance(p, QuantizedLinear) else p for p in part("shared1", "shared2", "shared3"))
        shared = lambda x: s2(swiglu(s1(x), s3(x), m.limit, None, m.dtype))
        try:
            many = TileExperts(*given, shared)
        except Declined:
            pass  # such experts take the other way, which is right and slower
        try:
            kernel = TensorExperts(*given)
        except Declined:
            pass  # likewise
    return _few(kernel, many)


# of a trunk, and of what is chosen ------------------------------------------------------------------------------------------


def _used(place: Any) -> Any:
    """Of a recorded array: where it says how much of it is in use; None of an array."""
    return getattr(place, "used", None)


def _with(place: Any, used: Any) -> Any:
    if used is not None:
        place.used = used
    return place


def _begin(backend: Backend, site: Site) -> Callable:
    _bfloat16(site)
    trunk = site.owner
    streams = trunk.config.hc_mult
    embed = Embed(backend, trunk.embed, streams)
    if trunk.config.family != "v41":
        return embed
    first = [mx.array([[1.0] + [0.0] * (streams - 1)] * n) for n in range(1, MOST_ROWS + 1)]
    wide = lru_cache(maxsize=4)(lambda n: mx.contiguous(mx.broadcast_to(first[0], (n, streams))))
    many = lambda ids: (embed(ids), wide(ids.shape[0]))
    return _few(lambda ids: (embed(ids), first[ids.shape[0] - 1]), many)


def _settle(backend: Backend, site: Site) -> Callable:
    """The coefficients that come with the streams are not needed."""
    _four_streams(site)
    kernel = Settle(backend, site.trunk.config.hidden_size)
    return lambda h, pre, y, post, comb: h if y is None else kernel(h, y, post, comb)


def _tap(backend: Backend, site: Site) -> Callable:
    _four_streams(site)
    return StreamMean(backend, site.trunk.config.hidden_size)


def _logits(backend: Backend, site: Site) -> Callable:
    """The row is rounded to bfloat16 where stock rounds it; its products stay in float32."""
    _four_streams(site)
    trunk, c = site.owner, site.trunk.config
    head = wide_product(backend, bare(trunk.head))
    if c.family == "v41":
        collapse = Collapse(backend, trunk.norm, c.rms_norm_eps)
        return _few(lambda h, pre: head(collapse(h, pre)), site.stock)
    mix = HeadMix(backend, bare(trunk.head_mix), trunk.norm, c.rms_norm_eps)
    return _few(lambda h: head(mix(h)), site.stock)


def wide_product(backend: Backend, module: Any) -> Callable:
    """Few bfloat16 rows by a matrix in any form, in float32. Raises Declined."""
    return exl3_product(backend, module, mx.float32) if isinstance(module, Exl3Linear) else product(backend, narrowed(module), mx.float32)


def core(backend: Backend, w: AttentionWeights, rope_dims: int, window: int) -> Attend | TensorAttend:
    """Attention over listed rows, for any number of rows. Raises Declined."""
    form = backend, w.heads, w.head_dim, rope_dims, window, w.sink, w.eps if w.head_norm else None
    if backend.dialect == "cuda":
        try:
            return TensorAttend(*form)
        except Declined:
            pass  # the other text takes more forms
    return Attend(*form)


def _engram(backend: Backend, site: Site) -> Callable:
    _bfloat16(site)
    engram = site.stock
    gate = EngramGate(backend, engram)
    return lambda h, rows, dead: gate(h, engram.wkv(rows), dead)


def _pool(backend: Backend, site: Site) -> Callable:
    """Rows of whole groups, or where they lie in a ring."""
    _bfloat16(site)
    o = site.owner
    overlap = getattr(o.layer, "overlap", False)
    width = o.norm.shape[0]
    kernel = PoolGroups(backend, o.layer.ratio, width, overlap)

    def pool(group: Any, begins: bool = False) -> Any:
        if isinstance(group, Gathered):
            return kernel(group.buffer, group.slots)
        return kernel(group, pool_slots(group.shape[0] // o.layer.ratio, o.layer.ratio, overlap, begins))

    return pool


@lru_cache(maxsize=16)
def pool_slots(groups: int, ratio: int, overlap: bool, begins: bool) -> mx.array:
    """int32 [groups to make, tokens of each]: rows of `groups` whole groups in order. overlap: each also takes those of the group before
    it, -1 where group 0 begins; else the first group only lends."""
    own = np.arange(groups * ratio, dtype=np.int32).reshape(groups, ratio)
    if not overlap:
        return mx.array(own)
    before = np.concatenate([np.full((1, ratio), -1, np.int32), own[:-1]])
    return mx.array(np.concatenate([before, own], axis=1)[0 if begins else 1 :])


def _visible(backend: Backend, site: Site) -> Callable:
    """Lists of a fixed width; those of a V4 layer that sees all of its pool are as wide as what is in use of it."""
    o = site.owner
    kernel = FirstVisible(backend)
    if hasattr(o, "topk"):
        return lambda length: kernel(length, o.topk)
    if o.indexer is not None:
        return lambda length, width: kernel(length, width)

    def growing(length: Any, width: int) -> Any:
        index, present = kernel(length, width, dims=_used(length))
        return _with(index, _used(length)), present

    return growing


def _candidates(backend: Backend, site: Site) -> Callable:
    o = site.owner
    top, best = BlockTop(backend, o.block), {}

    def candidates(score: Any, length: Any) -> Any:
        slots = min(o.blocks, score.shape[1] // o.block)
        kernel = best.setdefault(slots, TopK(backend, o.blocks, slots))
        used = _used(score)
        return kernel(top(score, length, dims=used), dims=None if used is None else used.used)

    return candidates


def _among(backend: Backend, site: Site) -> Callable:
    keep = KeepBlocks(backend, site.owner.block)
    return lambda score, chosen: _with(keep(score, *chosen, dims=_used(score)), _used(score))
