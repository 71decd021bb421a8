"""The cases of what stands between the large kernels of a decode step, and of large kernels that use fewer columns than there are."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels import glue
from dsv41chat.engine.kernels.choose import Scores, TopK
from dsv41chat.engine.nn import linear as nn
from dsv41chat.engine.nn.engram import Engram
from dsv41chat.engine.nn.hyper_connection import HyperHead, mean_of_streams
from dsv41chat.engine.ops import attend, norm, pool, select
from dsv41chat.engine.ops import hyper as streams
from dsv41chat.engine.ops.hadamard import hadamard_matrix
from tests.engine.kernels.cases import BF16, F32, ROWS, Case, Draw, attention, scores


def embed(table: str, *form: int) -> Case:
    """table: a mode of packing, or the name of a dtype."""
    d = Draw(30)
    if form:
        module = nn.QuantizedLookup(d.packed((40, 1056 if table == "mxfp8" else 256), table, *form), BF16)
    else:
        module = d.normal(40, 96).astype(getattr(mx, table))
    stock = lambda ids: mx.repeat(module[ids][:, None], 4, axis=1).astype(BF16)
    return Case(f"embed {' '.join(map(str, (table, *form)))}", lambda b: glue.Embed(b, module), stock, (d.whole(0, 40, ROWS),), (0.0,))


def settled() -> Case:
    d, D = Draw(31), 320
    inputs = d.rows(ROWS, 4, D), d.rows(ROWS, D), d.positive(ROWS, 4), d.positive(ROWS, 4, 4) / 4

    stock = lambda h, y, post, comb: streams.expand(y, h, post, comb)
    return Case("settle", lambda b: glue.Settle(b, D), stock, inputs, (1e-3,))


def mean_of(D: int) -> Case:
    return Case("mean of streams", lambda b: glue.StreamMean(b, D), mean_of_streams, (Draw(31).rows(ROWS, 4, D),), (1e-3,))


def gated(D: int) -> Case:
    """Streams of zeros and of size 1e-8, keys of zeros, and a dead row."""
    d = Draw(32)
    kv = mx.array(np.array(d.normal(ROWS, 5 * D)) * np.where(np.arange(ROWS) == 3, 0, 1)[:, None]).astype(BF16)
    engram = Engram(None, d.positive(4, D), 1e-20)
    dead = mx.array(np.arange(ROWS) == 5)

    def stock(h, kv, dead):
        wide = Engram(lambda x: x, engram.qk, engram.eps)
        return wide(h, kv, dead)

    return Case(f"engram {D}", lambda b: glue.EngramGate(b, engram), stock, (d.rows(ROWS, 4, D), kv, dead), (1e-3,), close=frozenset({0}))


def collapsed(D: int) -> Case:
    d = Draw(33)
    weight, eps = d.positive(D), 1e-20
    stock = lambda h, pre: norm.rms(streams.collapse(h, pre), weight, eps)
    return Case(f"collapse {D}", lambda b: glue.Collapse(b, weight, eps), stock, (d.rows(ROWS, 4, D), d.positive(ROWS, 4)), (1e-3,))


def collapsed_alone(D: int) -> Case:
    d = Draw(33)
    weight = d.positive(D)
    inputs = d.rows(ROWS, 4, D), d.positive(ROWS, 4)
    return Case(f"collapse {D} alone", lambda b: glue.Collapse(b, weight, 1e-20, normed=False), streams.collapse, inputs, (1e-3,))


def row_norm(D: int) -> Case:
    d = Draw(33)
    weight = d.positive(D)
    return Case(f"row norm {D}", lambda b: glue.RowNorm(b, weight, 1e-6), lambda x: norm.rms(x, weight, 1e-6), (d.rows(ROWS, D),), (1e-3,))


def head_mix(D: int) -> Case:
    d = Draw(34)
    head = HyperHead(d.normal(4, 4 * D, size=0.05), d.normal(4), mx.array([1.3]), 1e-6, 1e-5)
    weight = d.positive(D)
    stock = lambda h: norm.rms(head(h), weight, 1e-6)
    return Case(f"head mix {D}", lambda b: glue.HeadMix(b, head, weight, 1e-6), stock, (d.rows(ROWS, 4, D),), (1e-3,), close=frozenset({0}))


def pooled(ratio: int, width: int, overlap: bool) -> Case:
    """Gates of +-80; group 2 is the first of its row (nothing before it), group 4 has one token."""
    d, halves, R = Draw(35), 2 if overlap else 1, 2 * ratio + 9
    ring = d.normal(R, 2, halves * width) * mx.array([1.0, 20.0])[:, None]
    slots = np.stack([d.rng.permutation(R)[: halves * ratio] for _ in range(ROWS)]).astype(np.int32)
    if overlap:
        slots[2, :ratio] = -1
    slots[4, :-1] = -1

    def stock(ring, slots):
        rows = mx.where((slots >= 0)[..., None, None], ring[mx.maximum(slots, 0)], mx.array([0.0, -float("inf")])[:, None])
        one = (lambda r: pool.pool_overlapping(r, ratio, False)) if overlap else (lambda r: pool.pool_groups(r, ratio))
        return mx.concatenate([one(r) for r in rows]).astype(BF16)

    name = f"pool {ratio} x {width}{' overlapping' if overlap else ''}"
    inputs = ring, mx.array(slots)
    return Case(name, lambda b: glue.PoolGroups(b, ratio, width, overlap), stock, inputs, (1e-3,), frozenset({0}), frozenset({0}))


def first_visible(slots: int) -> Case:
    lengths = mx.array([[0], [1], [2], [slots - 1], [slots], [slots + 1], [5], [100]], dtype=mx.int32)
    build, stock = lambda b: lambda length: glue.FirstVisible(b)(length, slots), lambda length: select.first_visible(length, slots)
    return Case(f"first {slots} visible", build, stock, (lengths,), (0.0, 0.0))


def first_visible_in_use(used: int, slots: int) -> Case:
    lengths = mx.array([[0], [1], [2], [used - 1], [used], [used + 1], [5], [100]], dtype=mx.int32)
    dims = mx.array([used], dtype=mx.int32)
    build = lambda b: lambda length: tuple(_in_use(a, used) for a in glue.FirstVisible(b)(length, slots, dims=dims))
    return Case(f"first {used} of {slots} visible", build, lambda length: select.first_visible(length, used), (lengths,), (0.0, 0.0))


def _in_use(a: mx.array, columns: int) -> mx.array:
    """The rows of an array of which only so many columns are in use, one behind the other."""
    return a.reshape(-1)[: a.shape[0] * columns].reshape(-1, columns)


def _seen(d: Draw, used: int, total: int) -> tuple[mx.array, mx.array]:
    """(scores [ROWS, total] whose first columns are in use, lengths [ROWS, 1]): many equal ones, -inf where invisible; row 0 sees none."""
    length = np.array([0, 1, used // 3, used, used - 1, 8, 9, 60])[:, None]
    s = np.where(np.arange(used)[None] < length, np.round(d.rng.standard_normal((ROWS, used)) * 4) / 4, -np.inf)
    flat = np.full(ROWS * total, 7.0)
    flat[: s.size] = s.reshape(-1)
    return mx.array(flat.reshape(ROWS, total).astype(np.float32)), mx.array(length.astype(np.int32))


def block_top(block: int, used: int, total: int) -> Case:
    score, length = _seen(Draw(36), used, total)

    def build(b):
        kernel = glue.BlockTop(b, block)
        return lambda score, length: _in_use(kernel(score, length, mx.array([used], dtype=mx.int32)), used // block)

    def stock(score, length):
        top = mx.max(_in_use(score, used).reshape(score.shape[0], -1, block), axis=-1)
        newest = (select.counting(used // block) == (length - 1) // block) & (length > 0)
        return mx.where(newest, float("inf"), top)

    return Case(f"best of blocks of {block}, {used} of {total}", build, stock, (score, length), (0.0,))


def kept_blocks(block: int, used: int, total: int, blocks: int) -> Case:
    """The last row sees some and chose none."""
    score, length = _seen(Draw(37), used, total)
    index, present = select.best_blocks(_in_use(score, used), length, block, blocks)
    chose = mx.array(np.arange(ROWS) < ROWS - 1)[:, None]
    index, present = mx.where(chose, index, 0), present & chose

    def build(b):
        kernel = glue.KeepBlocks(b, block)
        return lambda *arrays: _in_use(kernel(*arrays, mx.array([used], dtype=mx.int32)), used)

    stock = lambda score, *chosen: select.inside_blocks(_in_use(score, used), chosen, block)
    return Case(f"inside blocks of {block}, {used} of {total}", build, stock, (score, index, present), (0.0,))


def scaled(width: int) -> Case:
    factor = 128**-0.5 / 3
    return Case(f"scaled {width}", lambda b: glue.Scaled(b, factor), lambda x: x * factor, (Draw(38).rows(ROWS, width).astype(F32),), (0.0,))


def mixed(width: int, heads: int) -> Case:
    d, module = Draw(39), nn.Linear(mx.array(hadamard_matrix(width)))
    shape = (ROWS, heads, width) if heads > 1 else (ROWS, width)
    stock = lambda x: module(x.astype(F32)).astype(BF16)
    return Case(f"hadamard {heads} x {width}", lambda b: glue.Hadamard(b, width), stock, (d.rows(*shape),), (2.5e-3,))


def scores_in_use(used: int) -> Case:
    """Fewer keys in use than there are."""
    whole = scores(32, 128)

    def build(b):
        kernel = Scores(b, 32, 128)
        return lambda *arrays: _in_use(kernel(*arrays, dims=mx.array([used], dtype=mx.int32)), used)

    stock = lambda q, weight, keys, length: attend.index_scores(q, weight, keys[:used], length)
    return replace(whole, name=f"scores of {used} in use", build=build, stock=stock)


def top_k_in_use(used: int, total: int, k: int) -> Case:
    score, _ = _seen(Draw(40), used, total)
    stock = lambda score: select.ascending(select.best_mask(_in_use(score, used), k), k)
    build = lambda b: lambda score: TopK(b, k, k)(score, dims=mx.array([used], dtype=mx.int32))
    return Case(f"top {k} of {used} in use", build, stock, (score,), (0.0, 0.0))


def attention_in_use(used: int, unit: bool, rows: int = ROWS) -> Case:
    """Lists of fewer entries than there is room for."""
    whole = attention(8, 64, 32, 64, 128, None, unit, rows)
    build = lambda b: lambda *arrays: whole.build(b)(*arrays, dims=mx.array([used], dtype=mx.int32))
    stock = lambda *arrays: whole.stock(*arrays[:-2], *(_in_use(a, used) for a in arrays[-2:]))
    return replace(whole, name=f"{'prompt ' if rows > ROWS else 'tensor ' if unit else ''}attend to {used} in use", build=build, stock=stock)


def step_cases() -> tuple[Case, ...]:
    return (
        *(embed(*f) for f in (("affine", 4, 64), ("affine", 6, 32), ("affine", 3, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32))),
        *(embed(name) for name in ("bfloat16", "float32", "float16")),
        settled(),
        mean_of(320),
        gated(96),
        gated(2176),
        collapsed(96),
        collapsed(2176),
        collapsed_alone(96),
        row_norm(96),
        row_norm(2176),
        head_mix(96),
        head_mix(2176),
        pooled(4, 64, True),
        pooled(2, 48, False),
        pooled(128, 64, False),
        first_visible(130),
        first_visible_in_use(40, 130),
        block_top(8, 96, 160),
        block_top(64, 192, 192),
        block_top(12, 96, 120),
        kept_blocks(8, 96, 160, 5),
        kept_blocks(12, 96, 120, 20),
        scaled(160),
        scaled(4),
        mixed(128, 3),
        mixed(512, 1),
        mixed(16, 2),
        scores_in_use(37),
        top_k_in_use(96, 160, 20),
        attention_in_use(40, False),
        attention_in_use(40, True),
        attention_in_use(40, True, 10),
    )
