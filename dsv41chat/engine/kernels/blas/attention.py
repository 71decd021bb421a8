"""Projections, the attention core and the index scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels.blas import rounding
from dsv41chat.engine.kernels.blas.dense import filled, host, joined, multiply, multiply_groups, turned
from dsv41chat.engine.kernels.blas.streams import norm
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.sites import Site, bare, outputs
from dsv41chat.engine.nn.attention import AttentionWeights
from dsv41chat.engine.nn.attention_v4 import AttentionV4
from dsv41chat.engine.nn.compressor_v4 import CompressorV4
from dsv41chat.engine.nn.indexer_v4 import IndexerV4
from dsv41chat.engine.ops import fakequant
from dsv41chat.engine.rows_v4 import slots_for

# Bounds the copies of key rows and the scores of one block of rows.
_BLOCK_BYTES = 8 << 20
# Keys of one tile of index scores; at fixed places, so that a row's tiles do not depend on its call.
_KEY_TILE = 4096


def rotation(table: tuple[mx.array, mx.array]) -> np.ndarray:
    """complex64 [n, dims / 2]: a pair of channels times this is the rotated pair."""
    cos, sin = host(table[0]), host(table[1])
    out = np.empty(cos.shape, np.complex64)
    out.real, out.imag = cos, sin
    return out


def rotate(x: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Rotate the last channels of x [n, C] or [n, H, C] in place."""
    pairs = x[..., x.shape[-1] - 2 * turn.shape[-1] :].view(np.complex64)
    pairs *= turn if x.ndim == 2 else turn[:, None]
    return x


def _rounding(w: AttentionWeights) -> Callable[[np.ndarray], np.ndarray] | None:
    r = w.rounding
    if r is None:
        return None
    if r is fakequant.fp8_ue8m0:
        return rounding.fp8_ue8m0
    if isinstance(r, partial) and r.func is fakequant.v4_fp8:
        return partial(rounding.v4_fp8, **r.keywords)
    raise Declined("an unknown rounding of latents")


class Projections:
    """Queries and latents of one layer or draft stage."""

    def __init__(self, site: Site, with_query: bool, with_latent: bool):
        w = self.w = site.owner
        self.rank = outputs(bare(w.wq_a)) if with_query else 0
        parts = ([bare(w.wq_a)] if with_query else []) + ([bare(w.wkv)] if with_latent else [])
        self.first = joined(site.trunk, *parts) if len(parts) > 1 else turned(parts[0], site.trunk)
        self.second = turned(bare(w.wq_b), site.trunk) if with_query else None
        self.q_norm, self.kv_norm, self.rounding = host(w.q_norm), host(w.kv_norm), _rounding(w) if with_latent else None

    def query(self, m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        qr = norm(m[:, : self.rank], self.q_norm, self.w.eps)
        return qr, multiply(qr, self.second).reshape(-1, self.w.heads, self.w.head_dim)

    def latent(self, m: np.ndarray, turn: np.ndarray) -> np.ndarray:
        kv = rotate(norm(m[:, self.rank :], self.kv_norm, self.w.eps), turn)
        return kv if self.rounding is None else self.rounding(kv)


def project(site: Site) -> Callable:
    p = Projections(site, True, True)

    def call(x, table):
        m = multiply(host(x), p.first)
        return *p.query(m), p.latent(m, rotation(table))

    return call


def query(site: Site) -> Callable:
    p = Projections(site, True, False)
    return lambda x: p.query(multiply(host(x), p.first))


def latent(site: Site) -> Callable:
    p = Projections(site, False, True)
    return lambda x, table: p.latent(multiply(host(x), p.first), rotation(table))


def output(site: Site) -> Callable:
    w = site.owner
    first, second = turned(bare(w.wo_a), site.trunk), turned(bare(w.wo_b), site.trunk)
    return lambda o: multiply(multiply_groups(host(o).reshape(o.shape[0], -1), first), second)


def _attend(q: np.ndarray, keys: np.ndarray, keep: np.ndarray, sink: np.ndarray, scale: float, out: np.ndarray) -> None:
    """q [n, H, C], keys [n or 1, K, C], keep [n or 1, K] -> out [n, H, C]."""
    score = np.matmul(q * np.float32(scale), keys.transpose(0, 2, 1))
    np.copyto(score, -np.inf, where=~keep[:, None])
    top = np.maximum(np.maximum.reduce(score, axis=-1, keepdims=True), sink)
    score -= top
    np.exp(score, out=score)
    total = np.add.reduce(score, axis=-1, keepdims=True)
    total += np.exp(sink - top)
    score /= total
    np.matmul(score, keys, out=out)


def core(site: Site) -> Callable:

    def call(q, keys, keep_mask, sink, scale):
        queries = host(q)
        out = np.empty(queries.shape, np.float32)
        _attend(queries, host(keys), host(keep_mask), host(sink)[None, :, None], scale, out)
        return out

    return call


def gathered(site: Site) -> Callable:
    weights = site.owner.weights
    scale = weights.head_dim**-0.5

    def call(q, table, window, slots, present, pool, index, picked):
        turn, ring, at, keep = rotation(table), host(window), host(slots), host(present)
        queries = rotate(norm(host(q), None, weights.eps) if weights.head_norm else np.array(host(q)), turn)
        sink = host(weights.sink)[None, :, None]
        n, recent = at.shape
        width = recent + (0 if pool is None else index.shape[1])
        out = np.empty(queries.shape, np.float32)
        if pool is not None:
            entries, chosen = host(pool), host(index)
            keep = np.concatenate([keep, host(picked)], axis=1)
        step = max(1, _BLOCK_BYTES // (4 * width * ring.shape[1]))
        for a in range(0, n, step):
            part = slice(a, a + step)
            keys = np.empty((len(at[part]), width, ring.shape[1]), np.float32)
            np.take(ring, at[part], axis=0, out=keys[:, :recent], mode="clip")
            if pool is not None:
                np.take(entries, chosen[part], axis=0, out=keys[:, recent:], mode="clip")
            _attend(queries[part], keys, keep[part], sink, scale, out[part])
        return rotate(out, np.conj(turn))

    return call


def scores(site: Site) -> Callable:

    def call(q, weight, keys, length):
        queries, rows, per_head = host(q), host(keys), host(weight)
        n, total = queries.shape[0], rows.shape[0]
        out = np.empty((n, total), np.float32)
        # One product per row, so that a row's sums do not depend on how many rows there are; tiles of keys stay in the cache.
        for i in range(n):
            for a in range(0, total, _KEY_TILE):
                score = np.matmul(queries[i], rows[a : a + _KEY_TILE].T)
                np.maximum(score, 0, out=score)
                np.matmul(per_head[i : i + 1], score, out=out[i : i + 1, a : a + _KEY_TILE])
        np.copyto(out, -np.inf, where=np.arange(total) >= host(length))
        return out

    return call


def best(s: np.ndarray, k: int) -> np.ndarray:
    """Mask of the k best entries of each row; ties go to the smaller index; -inf is never taken."""
    width = s.shape[1]
    if width <= k:
        return s > -np.inf
    kth = np.partition(s, width - k, axis=1)[:, width - k].copy()
    # Where fewer than k are seen the k-th is -inf, the smallest float then stands for it.
    mask = s >= np.maximum(kth, np.finfo(np.float32).min)[:, None]
    for row in np.flatnonzero(np.count_nonzero(mask, axis=1) > k):
        ties = np.flatnonzero(s[row] == kth[row])
        mask[row, ties[k - np.count_nonzero(s[row] > kth[row]) :]] = False
    return mask


def select(site: Site) -> Callable:
    """The best entries as `ops.select` takes them: higher score first, then the smaller index; ascending."""
    owner: Any = site.owner
    k = owner.topk

    slots = slots_of(owner)
    return lambda score: ascending(best(host(score), k), slots)


def ascending(mask: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """As `ops.select.ascending`."""
    rows, columns = np.nonzero(mask)
    index = np.zeros((len(mask), slots), np.int32)
    present = np.arange(slots) < np.bincount(rows, minlength=len(mask))[:, None]
    index[present] = columns
    return index, present


def slots_of(owner: Any) -> int:
    return slots_for(owner.topk) if isinstance(owner, IndexerV4) else owner.topk


def _first(length: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    index = np.broadcast_to(np.arange(slots, dtype=np.int32), (len(length), slots))
    present = index < length
    return np.where(present, index, 0), present


def visible(site: Site) -> Callable:
    if isinstance(site.owner, AttentionV4):
        return lambda length, width: _first(host(length), width)
    slots = slots_of(site.owner)
    return lambda length: _first(host(length), slots)


def queries(site: Site) -> Callable:
    """Index queries and the weights of their heads."""
    owner = site.owner
    wq_b, proj = turned(bare(owner.wq_b), site.trunk), filled(bare(owner.weights_proj), site.trunk)
    mix = turned(bare(owner.mix), site.trunk) if isinstance(owner, IndexerV4) else None
    rounds = owner.qat_sim if isinstance(owner, IndexerV4) else owner.cache_quant
    factor = np.float32(owner.head_dim**-0.5 * owner.heads**-0.5)

    def call(x, qr, table):
        q = multiply(host(qr), wq_b)
        n = q.shape[0]
        q = rotate(q.reshape(n, owner.heads, owner.head_dim), rotation(table))
        if mix is not None:
            q = multiply(q.reshape(n * owner.heads, -1), mix).reshape(q.shape)
        return (rounding.fp4_ue8m0(q) if rounds else q), multiply(host(x), proj)[:, : owner.heads] * factor

    return call


def candidates(site: Site) -> Callable:
    """As `ops.select.best_blocks`."""
    block, blocks = site.owner.block, site.owner.blocks

    def call(score, length):
        s, seen = host(score), host(length)
        top = np.maximum.reduce(s.reshape(s.shape[0], -1, block), axis=-1)
        newest = (np.arange(top.shape[1]) == (seen - 1) // block) & (seen > 0)
        return ascending(best(np.where(newest, np.float32(np.inf), top), blocks), min(blocks, top.shape[1]))

    return call


def among(site: Site) -> Callable:
    """As `ops.select.inside_blocks`."""
    block = site.owner.block

    def call(score, chosen):
        s, (index, present) = host(score), map(host, chosen)
        mask = np.zeros((s.shape[0], s.shape[1] // block), bool)
        mask[np.nonzero(present)[0], index[present]] = True
        return np.where(np.repeat(mask, block, axis=1), s, np.float32(-np.inf))

    return call


def raw_rows(site: Site) -> Callable:
    owner = site.owner
    if owner.wgate is None:
        wkv = turned(bare(owner.wkv), site.trunk)
        return lambda x: multiply(host(x), wkv)
    both = joined(site.trunk, bare(owner.wkv), bare(owner.wgate))
    ape = host(owner.ape) if isinstance(owner, CompressorV4) else None

    def call(x, places=None):
        rows = multiply(host(x), both).reshape(x.shape[0], 2, -1)
        if ape is not None:
            rows[:, 1] += ape[host(places)]
        return rows

    return call


def pool(site: Site) -> Callable:
    """Groups that do not overlap: a softmax per channel over the rows of each."""
    ratio = site.owner.layer.ratio
    if ratio == 1 or site.owner.layer.overlap:
        raise Declined("")

    def call(group, begins=True):
        rows = host(group)
        rows = rows.reshape(rows.shape[0] // ratio, ratio, 2, -1)
        e = np.exp(rows[:, :, 1] - np.maximum.reduce(rows[:, :, 1], axis=1, keepdims=True))
        e /= np.add.reduce(e, axis=1, keepdims=True)
        e *= rows[:, :, 0]
        return np.add.reduce(e, axis=1)

    return call


def entries(site: Site) -> Callable:
    """Of V4.1: the entry and, from the latent before rotation and rounding, the index key."""
    owner = site.owner
    if isinstance(owner, CompressorV4):
        raise Declined("")
    weight, key_norm, index_key, eps = host(owner.norm), host(owner.index_norm), turned(bare(owner.index_key), site.trunk), owner.eps

    def call(pooled, table):
        turn = rotation(table)
        latent = norm(host(pooled), weight, eps)
        key = rotate(norm(multiply(latent, index_key), key_norm, eps), turn)
        entry = rotate(latent, turn)
        return (rounding.fp4_e4m3(entry), rounding.fp4_ue8m0(key)) if owner.cache_quant else (entry, key)

    return call
