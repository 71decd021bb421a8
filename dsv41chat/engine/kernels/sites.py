"""Where a trunk or a drafter computes: its hot operations, each with words for its shape and format and with inputs to try it on.

A site is an attribute that the token path calls. Where the attribute is a method of the module, a route shadows it on the instance.
Row checks and install checks draw their inputs from here, so both see the same operations.

| op | attribute | call |
|---|---|---|
| matrix | any matrix module | (x [n, in]) or, stacked per expert, (x [n, picks or 1, 1, in], ids [n, picks]) |
| mix | `attn_mix`, `ffn_mix` | (h [n, S, D]) -> pre, post, comb |
| head_mix | `head_mix`, `collapse_head` | (h) -> [n, D] |
| enter | `Layer.into_attention`, `.into_experts` | `Streams` -> h, x, pre, post, comb |
| project, latent | of `AttentionWeights` | (x [n, D], (cos, sin)) |
| query | `AttentionWeights.query` | (x [n, D]) -> qr, q [n, H, C] as projected |
| output | `AttentionWeights.output` | (o [n, H, C]) -> [n, D] |
| gathered | `Attention.gathered` | (q, (cos, sin), window, slots, present, pool, index, picked) -> [n, H, C] |
| core | `Attention.core`, `Stage.core` | (q, keys, keep_mask, sink, scale) |
| scores | `Indexer.score` | (q, weight, keys, length) -> float32 [n, T] |
| select | `Indexer.select` | (score [n, T]) -> index [n, slots] ascending, present |
| router | `MoE.choose` | (x [n, D], image or token ids) -> ids [n, picks] ascending, weight |
| experts | `MoE.experts` | (x [n, D], ids, weight) -> [n, D] |
| begin, settle, tap, logits | of the trunk | ids -> streams; `Streams` -> h; h -> [n, D]; streams -> float32 [n, vocab] |
| engram | `Layer.engram` | (h, table rows [n, width], dead [n]) -> h |
| raw_rows, pool, entries | of compressors | rows [n, D] -> raw rows; raw rows of whole groups -> latents; latents -> entries (and index keys) |
| queries, visible, candidates, among | of indexers | see there |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.nn.attention import Attention, AttentionWeights
from dsv41chat.engine.nn.attention_v4 import AttentionV4
from dsv41chat.engine.nn.compressor import Compressor
from dsv41chat.engine.nn.compressor_v4 import CompressorV4
from dsv41chat.engine.nn.engram import Engram
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3GroupedLinear, Exl3Linear, Exl3Stack
from dsv41chat.engine.nn.hyper_connection import HyperConnection, HyperHead
from dsv41chat.engine.nn.indexer import Indexer
from dsv41chat.engine.nn.indexer_v4 import IndexerV4
from dsv41chat.engine.nn.linear import (
    ExpertLinear,
    GroupedLinear,
    Linear,
    QuantizedExpertLinear,
    QuantizedGroupedLinear,
    QuantizedLinear,
)
from dsv41chat.engine.nn.moe import MoE
from dsv41chat.engine.nn.moe_v4 import MoEV4

PACKED = (QuantizedLinear, QuantizedGroupedLinear, QuantizedExpertLinear)
EXPERTS = (ExpertLinear, QuantizedExpertLinear, Exl3ExpertLinear)
MATRICES = (Linear, GroupedLinear, *PACKED, *EXPERTS, Exl3Linear, Exl3GroupedLinear)

# Methods and function fields by the type of their owner; by name where importing the type would run in a circle.
_METHODS: dict[type, dict[str, str]] = {
    AttentionWeights: {"project": "project", "query": "query", "latent": "latent", "output": "output"},
    Attention: {"gathered": "gathered", "core": "core"},
    AttentionV4: {"gathered": "gathered", "core": "core", "visible": "visible"},
    Indexer: {
        "score": "scores", "select": "select", "queries": "queries", "visible": "visible", "candidates": "candidates", "among": "among",
    },
    IndexerV4: {"score": "scores", "select": "select", "queries": "queries"},
    Compressor: {"raw_rows": "raw_rows", "pool_rows": "pool", "entries": "entries"},
    CompressorV4: {"raw_rows": "raw_rows", "pool": "pool", "entry_rows": "entries"},
    MoE: {"choose": "router", "experts": "experts"},
    MoEV4: {"choose": "router", "experts": "experts"},
}
_ENTER = {"into_attention": "enter", "into_experts": "enter"}
_TRUNK = {name: name for name in ("begin", "settle", "tap", "logits")}
_BY_NAME = {"Stage": {"core": "core"}, "Layer": _ENTER, "LayerV4": _ENTER, "TrunkV41": _TRUNK, "TrunkV4": _TRUNK}
# Arguments that all rows of a call share, by op.
SHARED = {"core": frozenset({3, 4}), "scores": frozenset({2}), "gathered": frozenset({2, 5})}
# Ops that other operations call; the others are called from the wiring of trunks and drafters.
INNER = frozenset({"matrix", "mix", "head_mix", "core"})
_POOL_ROWS = 96


@dataclass
class Routed:
    """What a route puts in an attribute's place. Everything but the call is the stock operation's.

    direct: of a host route, the same operation with numpy results whatever `inner` gives.
    """

    route: str
    inner: Callable
    stock: Callable
    direct: Callable | None = None

    def __call__(self, *args: Any) -> Any:
        return self.inner(*args)

    @property
    def pads(self) -> bool:
        """Of `gathered`: whether absent slots at the end of a list change no bit."""
        return getattr(self.inner, "pads", False)

    def __getattr__(self, name: str) -> Any:
        if name in ("route", "inner", "stock", "direct"):
            raise AttributeError(name)
        return getattr(self.stock, name)


@dataclass(frozen=True)
class Site:
    """op: of the table above. owner, field: the attribute. key: kind, shape and format in words; sites of one key compute alike."""

    op: str
    owner: Any
    field: str
    trunk: Any

    @property
    def value(self) -> Any:
        return getattr(self.owner, self.field)

    @property
    def stock(self) -> Any:
        """The operation itself, whatever is put in its place."""
        return bare(self.value)

    @property
    def shared(self) -> frozenset[int]:
        return SHARED.get(self.op, frozenset())

    @property
    def key(self) -> str:
        return _key(self)

    def inputs(self, rows: int, rng: np.random.Generator) -> tuple:
        """Random arguments for a call of `rows` rows."""
        return _inputs(self, rows, rng)


def bare(value: Any) -> Any:
    while isinstance(value, Routed) or type(value).__name__ == "Tokenwise":
        value = value.stock if isinstance(value, Routed) else value.inner
    return value


def sites(module: Any, trunk: Any) -> Iterator[Site]:
    """Every site below a module; modules are dataclasses, alone or in sequences. trunk: says configuration and dtype."""
    for item in module if isinstance(module, (list, tuple)) else [module]:
        if not is_dataclass(item) or isinstance(item, type):
            continue
        for name, op in _methods(item).items():
            yield Site(op, item, name, trunk)
        for field in fields(item):
            raw = getattr(item, field.name)
            value = bare(raw)
            if isinstance(value, MATRICES):
                yield Site("matrix", item, field.name, trunk)
            elif isinstance(value, HyperConnection):
                yield Site("mix", item, field.name, trunk)
            elif isinstance(value, HyperHead):
                yield Site("head_mix", item, field.name, trunk)
            elif isinstance(value, Engram):
                yield Site("engram", item, field.name, trunk)
                yield from sites(value, trunk)
            elif isinstance(value, (list, tuple)) or (is_dataclass(value) and not isinstance(value, type)):
                yield from sites(value, trunk)


def _methods(item: Any) -> dict[str, str]:
    for kind, found in _METHODS.items():
        if isinstance(item, kind):
            return found
    return _BY_NAME.get(type(item).__name__, {})


# keys --------------------------------------------------------------------------------------------------------------------


def _key(site: Site) -> str:
    value, c, dtype = site.stock, site.trunk.config, short(site.trunk.dtype)
    if site.op == "matrix":
        rounds = " rounded" if getattr(value, "round_input", False) else ""
        return f"{type(value).__name__} {stored(value)} x {short(input_dtype(value, site.trunk))}{rounds}"
    if site.op in ("mix", "head_mix"):
        return f"{type(value).__name__} {list(value.fn.shape)} {dtype}"
    if site.op == "enter":
        mix = bare(site.owner.attn_mix if site.field == "into_attention" else site.owner.ffn_mix)
        return f"enter {list(mix.fn.shape)} {mix.iterations} iterations {dtype}"
    if site.op in ("project", "query", "latent", "output"):
        w = site.owner
        parts = (w.wo_a, w.wo_b) if site.op == "output" else (w.wkv,) if site.op == "latent" else (w.wq_a, w.wq_b)
        parts += (w.wkv,) if site.op == "project" else ()
        extra = f"{w.heads} heads of {w.head_dim}" + (" normed" if w.head_norm else "") + (" rounded" if w.rounding else "")
        return f"{site.op} {' '.join(stored(bare(p)) for p in parts)} {extra} {dtype}"
    if site.op in ("core", "scores", "select", "gathered"):
        heads, width = (c.num_attention_heads, c.head_dim) if site.op in ("core", "gathered") else (c.index_n_heads, c.index_head_dim)
        name = value.__name__ if site.op in ("core", "scores") else site.op
        pool = " and pool" if site.op == "gathered" and site.owner.layer.ratio else ""
        return f"{name} {heads} heads of {width}{pool} {dtype}"
    if site.op in ("begin", "settle", "tap", "logits", "engram", "raw_rows", "pool", "entries", "queries", "visible", "candidates", "among"):
        return f"{site.op} of {_place(site)} {dtype}"
    moe = site.owner
    if site.op == "router":
        hashed = " hashed" if getattr(moe, "table", None) is not None else ""
        return f"router {stored(bare(moe.gate))} picks {moe.picks}{hashed} {dtype}"
    # The widths of a trellis differ between the matrices of one layer.
    down = f" {stored(bare(moe.w2))}" if isinstance(bare(moe.w2), Exl3ExpertLinear) else ""
    return f"experts {stored(bare(moe.w1))}{down} shared {stored(bare(moe.shared1))} picks {moe.picks} {dtype}"


def _place(site: Site) -> str:
    """What tells apart sites of one op that are no matrices."""
    owner = site.owner
    if site.op == "engram":
        return stored(bare(site.stock.wkv))
    if site.op == "logits":
        return f"{type(owner).__name__} {stored(bare(owner.head))}"
    if site.op in ("begin", "settle", "tap"):
        return type(owner).__name__
    name, ratio = type(owner).__name__, owner.layer.ratio
    if site.op in ("raw_rows", "pool", "entries"):
        return f"{name} {stored(bare(owner.wkv))} ratio {ratio}{' mixed' if getattr(owner, 'mix', None) is not None else ''}"
    return f"{name} {stored(bare(owner.wq_b))} ratio {ratio}" if hasattr(owner, "wq_b") else f"{name} ratio {ratio}"


def stored(value: Any) -> str:
    """Shape and format of a matrix module, in words."""
    if isinstance(value, PACKED):
        p = value.packed
        return f"{list(p.weight.shape)} {p.mode} {p.bits} bits per {p.group}"
    if isinstance(value, Exl3Linear):
        return f"{list(value.words.shape)} {value.codebook}" + (" rounded" if value.round_input else "")
    if isinstance(value, (Exl3GroupedLinear, Exl3ExpertLinear)):
        parts = value.groups if isinstance(value, Exl3GroupedLinear) else value.matrices
        kinds = {stored(part) for part in ([parts[0]] if isinstance(parts, Exl3Stack) else parts)}
        return f"{len(parts)} of " + ", ".join(sorted(kinds))
    return f"{list(value.weight.shape)} {short(value.weight.dtype)}"


def width(value: Any) -> int:
    """Inputs of a matrix module, all groups together."""
    if isinstance(value, Exl3Linear):
        return value.suh.shape[0]
    if isinstance(value, Exl3GroupedLinear):
        return sum(width(part) for part in value.groups)
    if isinstance(value, Exl3ExpertLinear):
        return width(value.matrices[0])
    groups = count(value) if isinstance(value, (GroupedLinear, QuantizedGroupedLinear)) else 1
    return groups * (value.packed.scales.shape[-1] * value.packed.group if isinstance(value, PACKED) else value.weight.shape[-1])


def outputs(value: Any) -> int:
    """Outputs of a matrix module; of each group or expert."""
    if isinstance(value, Exl3Linear):
        return value.svh.shape[0]
    if isinstance(value, (Exl3GroupedLinear, Exl3ExpertLinear)):
        return outputs((value.groups if isinstance(value, Exl3GroupedLinear) else value.matrices)[0])
    return (value.packed if isinstance(value, PACKED) else value).weight.shape[-2]


def values(value: Any) -> int:
    """Numbers in a matrix module."""
    if isinstance(value, (Exl3GroupedLinear, Exl3ExpertLinear)):
        return sum(map(values, value.groups if isinstance(value, Exl3GroupedLinear) else value.matrices))
    # The inputs of a grouped matrix are those of all groups together, each of which has its own outputs.
    return outputs(value) * width(value) * (count(value) if isinstance(value, EXPERTS) else 1)


def count(value: Any) -> int:
    """Experts or groups of a matrix module."""
    if isinstance(value, Exl3ExpertLinear):
        return len(value.matrices)
    return (value.packed if isinstance(value, PACKED) else value).weight.shape[0]


def short(dtype: mx.Dtype) -> str:
    return str(dtype).rsplit(".", 1)[-1]


def input_dtype(value: Any, trunk: Any) -> mx.Dtype:
    """Matrices kept in float32 beside a narrower model are applied to float32 rows (router, head, compressors)."""
    narrow = isinstance(value, Linear) and value.weight.dtype == mx.float32
    return mx.float32 if narrow else trunk.dtype


# inputs ------------------------------------------------------------------------------------------------------------------


def _inputs(site: Site, n: int, rng: np.random.Generator) -> tuple:
    c, dtype, value, op = site.trunk.config, site.trunk.dtype, site.stock, site.op
    normal = lambda *shape: mx.array(rng.standard_normal(shape).astype(np.float32))
    positive = lambda *shape: mx.array(rng.random(shape).astype(np.float32) + 0.05)
    chosen = lambda picks, total, rows: _chosen(rng, picks, total, rows)
    if op == "matrix" and isinstance(value, EXPERTS):
        picks = min(c.num_experts_per_tok, count(value))
        per_pick = picks if bare(getattr(site.owner, "w2", None)) is value else 1
        return normal(n, per_pick, 1, width(value)).astype(dtype), chosen(picks, count(value), n)
    if op == "matrix":
        return (normal(n, width(value)).astype(input_dtype(value, site.trunk)),)
    if op in ("mix", "head_mix"):
        return (normal(n, c.hc_mult, c.hidden_size).astype(dtype),)
    if op == "enter":
        s, d = c.hc_mult, c.hidden_size
        return normal(n, s, d).astype(dtype), positive(n, s), normal(n, d).astype(dtype), positive(n, s), positive(n, s, s) / s
    if op in ("project", "latent"):
        table = _table(site, n, rng)
        return normal(n, c.hidden_size).astype(dtype), table
    if op == "query":
        return (normal(n, c.hidden_size).astype(dtype),)
    if op == "output":
        return (normal(n, site.owner.heads, site.owner.head_dim).astype(dtype),)
    if op == "core":
        keys = c.sliding_window + c.index_topk
        keep = mx.array(rng.random((n, keys)) < 0.8)
        q, k = normal(n, c.num_attention_heads, c.head_dim).astype(dtype), normal(n, keys, c.head_dim).astype(dtype)
        return q, k, keep, normal(c.num_attention_heads), c.head_dim**-0.5
    if op == "gathered":
        w, ring = c.sliding_window, c.ring_rows
        q = normal(n, c.num_attention_heads, c.head_dim).astype(dtype)
        slots = mx.array(rng.integers(0, ring, (n, w)).astype(np.int32))
        present = mx.array(np.arange(w)[None] >= rng.integers(0, w, (n, 1)))
        args = (q, _table(site, n, rng), normal(ring, c.head_dim).astype(dtype), slots, present)
        if not site.owner.layer.ratio:
            return *args, None, None, None
        seen = rng.integers(0, 64, (n, 1))
        picked = np.arange(64)[None] < seen
        index = np.where(picked, np.sort(rng.integers(0, _POOL_ROWS, (n, 64)), axis=1), 0).astype(np.int32)
        return *args, normal(_POOL_ROWS, c.head_dim).astype(dtype), mx.array(index), mx.array(picked)
    if op in ("scores", "select"):
        heads, channels, rows = c.index_n_heads, c.index_head_dim, 4 * c.index_topk
        length = mx.array(rng.integers(1, rows, (n, 1)).astype(np.int32))
        if op == "select":
            return (mx.where(mx.arange(rows)[None] < length, normal(n, rows), -float("inf")),)
        return normal(n, heads, channels).astype(dtype), normal(n, heads), normal(rows, channels).astype(dtype), length
    x = normal(n, c.hidden_size).astype(dtype)
    if op in ("begin", "settle", "tap", "logits", "engram"):
        return _trunk_inputs(site, n, rng, normal, positive)
    if op in ("raw_rows", "pool", "entries", "queries", "visible", "candidates", "among"):
        return _entry_inputs(site, n, rng, normal)
    if op == "router":
        tokens = mx.array(rng.integers(0, c.vocab_size, n).astype(np.int32))
        image = None if getattr(site.owner, "bias_image", None) is None else mx.array(rng.random(n) < 0.3)
        return x, tokens if isinstance(site.owner, MoEV4) else image
    moe = site.owner
    total = count(bare(moe.w1))
    picks = min(moe.picks, total)
    return x, chosen(picks, total, n), positive(n, picks)


def _chosen(rng: np.random.Generator, picks: int, total: int, rows: int) -> mx.array:
    return mx.array(np.sort(np.stack([rng.permutation(total)[:picks] for _ in range(rows)]), axis=1).astype(np.int32))


def _table(site: Site, n: int, rng: np.random.Generator) -> tuple[mx.array, mx.array]:
    phase = rng.random((n, site.trunk.config.qk_rope_head_dim // 2)) * 6
    return mx.array(np.cos(phase).astype(np.float32)), mx.array(np.sin(phase).astype(np.float32))


def _trunk_inputs(site: Site, n: int, rng: np.random.Generator, normal: Callable, positive: Callable) -> tuple:
    c, dtype = site.trunk.config, site.trunk.dtype
    s, d = c.hc_mult, c.hidden_size
    if site.op == "begin":
        return (mx.array(rng.integers(0, c.vocab_size, n).astype(np.int32)),)
    h = normal(n, s, d).astype(dtype)
    if site.op == "settle":
        return h, positive(n, s), normal(n, d).astype(dtype), positive(n, s), positive(n, s, s) / s
    if site.op == "engram":
        return h, normal(n, width(bare(site.stock.wkv))).astype(dtype), mx.array(rng.random(n) < 0.2)
    return (h, positive(n, s)) if site.op == "logits" and c.family == "v41" else (h,)


def _entry_inputs(site: Site, n: int, rng: np.random.Generator, normal: Callable) -> tuple:
    """Of compressors and indexers; n counts groups where a call takes whole groups."""
    c, dtype, owner, op = site.trunk.config, site.trunk.dtype, site.owner, site.op
    length = mx.array(rng.integers(0, c.index_topk, (n, 1)).astype(np.int32))
    x = normal(n, c.hidden_size).astype(dtype)
    newer = isinstance(owner, CompressorV4)
    if op == "raw_rows":
        return (x, mx.array((np.arange(5, 5 + n) % owner.layer.ratio).astype(np.int32))) if newer else (x,)
    if op == "pool":
        group = normal(n * owner.layer.ratio, 2, outputs(bare(owner.wkv)))
        return (group, True) if newer else (group,)
    if op == "entries":
        channels = outputs(bare(owner.wkv)) // (2 if owner.layer.overlap else 1)
        return normal(n, channels).astype(dtype), _table(site, n, rng)
    if op == "queries":
        return x, normal(n, width(bare(owner.wq_b))).astype(dtype), _table(site, n, rng)
    if op == "visible":
        return (length, 64) if isinstance(owner, AttentionV4) else (length,)
    total = -(-2 * c.index_topk // owner.block) * owner.block
    score = mx.where(mx.arange(total)[None] < length, normal(n, total), -float("inf"))
    if op == "candidates":
        return score, length
    blocks = total // owner.block
    slots = min(owner.blocks, blocks)
    present = np.arange(slots)[None] < rng.integers(0, slots + 1, (n, 1))
    return score, (mx.where(mx.array(present), _chosen(rng, slots, blocks, n), 0), mx.array(present))
