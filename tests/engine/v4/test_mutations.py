"""The 36 defects of the golden's report, each planted here: each must break the golden, from the very row that the report names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import rows as rows_module
from dsv41chat.engine.nn.compressor_v4 import CompressorV4
from dsv41chat.engine.ops import attend, hyper, norm, pool, rope, route, select
from dsv41chat.engine.pack.build import build_trunk
from dsv41chat.engine.rows import Rows
from dsv41chat.engine.rows_v4 import RowsV4
from dsv41chat.engine.target import Target
from dsv41chat.engine.trunk_v4 import TrunkV4
from tests.engine.v4 import golden as g

REPORT = json.loads((g.FOLDER / "report.json").read_text(encoding="utf-8"))["mutations_vs_ref"]
# Rows of a run; the others hold the golden's 30 positions up to 129.
SHORT = 130
Defect = Callable[[pytest.MonkeyPatch, object], TrunkV4]
DEFECTS: dict[str, Defect] = {}
# These change what a row sees of the rest of its call, so they are run in full.
WHOLE = {"one_selection_for_all_queries", "causal_mask_after_topk"}


def defect(function: Defect) -> Defect:
    DEFECTS[function.__name__] = function
    return function


def built(pack, config=None, rope_of=None) -> TrunkV4:
    """The golden trunk with changed config fields, or with other ropes in its plan."""
    pack = replace(pack, config=replace(pack.config, **(config or {})))
    if rope_of is not None:
        pack = replace(pack, plan=tuple(replace(p, rope=rope_of(p)) for p in pack.plan))
    return build_trunk(pack, dtype=mx.float32)


def patch_rotate(mp, make):
    mp.setattr(rope, "rotate", make(rope.rotate))


def patch_scores(trunk, function):
    for layer in trunk.layers:
        if layer.attention.indexer is not None:
            layer.attention.indexer.score = function
    return trunk


# -- positions


@defect
def rope_base_10000_everywhere(mp, pack):
    return built(pack, rope_of=lambda p: replace(p.rope, base=10000.0))


@defect
def yarn_on_ratio0(mp, pack):
    return built(pack, rope_of=lambda p: replace(p.rope, yarn=pack.config.yarn))


@defect
def no_yarn(mp, pack):
    return built(pack, rope_of=lambda p: replace(p.rope, yarn=None))


@defect
def yarn_magnitude_factor(mp, pack):
    trunk, original = built(pack), rope.host_table
    yarned = [f for spec, f in trunk.frequencies.items() if spec.yarn is not None]
    size = 0.1 * math.log(pack.config.yarn.factor) + 1

    def table(frequencies, positions):
        cos, sin = original(frequencies, positions)
        scale = size if any(frequencies is f for f in yarned) else 1
        return cos * scale, sin * scale

    mp.setattr(rope, "host_table", table)
    mp.setattr(rows_module, "host_table", table)
    return trunk


@defect
def rope_half_split(mp, pack):
    def half_split(original):
        def rotate(x, table, inverse=False):
            half = table[0].shape[-1]
            order = np.arange(2 * half).reshape(2, half).T.reshape(-1)
            back = np.argsort(order)
            head, tail = x[..., : x.shape[-1] - 2 * half], x[..., x.shape[-1] - 2 * half :]
            turned = original(mx.concatenate([head, tail[..., mx.array(order)]], -1), table, inverse)
            return mx.concatenate([head, turned[..., head.shape[-1] :][..., mx.array(back)]], -1)

        return rotate

    patch_rotate(mp, half_split)
    return built(pack)


@defect
def no_inverse_rope(mp, pack):
    patch_rotate(mp, lambda original: lambda x, table, inverse=False: x if inverse else original(x, table))
    return built(pack)


# -- hyper-connections


@defect
def sinkhorn_rows_first(mp, pack):
    original, turn = hyper.sinkhorn, lambda c: mx.swapaxes(c, 1, 2)
    mp.setattr(hyper, "sinkhorn", lambda comb, iterations, eps: turn(original(turn(comb), iterations, eps)))
    return built(pack)


@defect
def sinkhorn_1_iter(mp, pack):
    return built(pack, {"hc_sinkhorn_iters": 1})


@defect
def comb_not_transposed(mp, pack):
    original = hyper.expand
    mp.setattr(hyper, "expand", lambda y, h, post, comb: original(y, h, post, mx.swapaxes(comb, 1, 2)))
    return built(pack)


# -- compressors


@defect
def no_ape(mp, pack):
    original = pool.raw_rows
    mp.setattr(pool, "raw_rows", lambda value, gate, ape, positions: original(value, gate, mx.zeros_like(ape), positions))
    return built(pack)


@defect
def overlap_not_carried(mp, pack):
    original = pool.pool_overlapping

    def alone(rows, ratio, first):
        groups = [original(rows[a : a + ratio], ratio, True) for a in range(0 if first else ratio, rows.shape[0], ratio)]
        return mx.concatenate(groups)

    mp.setattr(pool, "pool_overlapping", alone)
    return built(pack)


@defect
def overlap_halves_swapped(mp, pack):
    original = pool.pool_overlapping
    swap = lambda rows: mx.concatenate(mx.split(rows, 2, axis=-1)[::-1], axis=-1)
    mp.setattr(pool, "pool_overlapping", lambda rows, ratio, first: original(swap(rows), ratio, first))
    return built(pack)


@defect
def rope_before_norm(mp, pack):
    def finish(self, pooled, rows, block):
        entry = norm.rms(rope.rotate(pooled, rows.entry_table(self.layer, block.first, block.last)), self.norm, self.eps)
        return entry if self.mix is None else self.mix(entry)

    mp.setattr(CompressorV4, "finish", finish)
    return built(pack)


@defect
def pool_rows_not_roped(mp, pack):
    mp.setattr(RowsV4, "entry_positions", staticmethod(lambda first, count, ratio: np.zeros(count)))
    return built(pack)


@defect
def rope_at_window_end(mp, pack):
    mp.setattr(RowsV4, "entry_positions", staticmethod(lambda first, count, ratio: (first + np.arange(count)) * ratio + ratio - 1))
    return built(pack)


@defect
def rope_at_row_index(mp, pack):
    mp.setattr(RowsV4, "entry_positions", staticmethod(lambda first, count, ratio: first + np.arange(count)))
    return built(pack)


# -- attention


@defect
def no_q_head_norm(mp, pack):
    trunk = built(pack)
    for layer in trunk.layers:
        layer.attention.weights.head_norm = False
    return trunk


@defect
def window_plus_one(mp, pack):
    return built(pack, {"sliding_window": pack.config.sliding_window + 1})


@defect
def no_sink(mp, pack):
    trunk = built(pack)
    for layer in trunk.layers:
        layer.attention.weights.sink = mx.full(layer.attention.weights.sink.shape, -math.inf)
    return trunk


def blocked(mp, pack):
    trunk, window = built(pack), pack.config.sliding_window
    core = lambda q, keys, keep, sink, scale: attend.attend_rows(q, keys, keep & (mx.arange(keep.shape[1]) < window), sink, scale)
    for layer in trunk.layers:
        layer.attention.core = core
    return trunk


@defect
def compressed_blocked(mp, pack):
    return blocked(mp, pack)


@defect
def no_compressed_lane(mp, pack):
    trunk = built(pack)
    for layer in trunk.layers:
        layer.attention.layer = replace(layer.attention.layer, ratio=0)
    return trunk


@defect
def visibility_late_by_one(mp, pack):
    late = lambda self, ratio: mx.array((self.positions // ratio).astype(np.int32))[:, None]
    mp.setattr(Rows, "length", late)
    return built(pack)


@defect
def visibility_leak(mp, pack):
    early = lambda self, ratio: mx.array(np.minimum((self.positions + 1) // ratio + 1, self.last_length(ratio)).astype(np.int32))[:, None]
    mp.setattr(Rows, "length", early)
    # The list must have room for the entry that is seen too early.
    tiles = RowsV4.tiles
    mp.setattr(RowsV4, "tiles", lambda self, *a: [(s, width + 16 if a[1] else 0) for s, width in tiles(self, *a)])
    return built(pack)


# -- indexer


@defect
def no_indexer(mp, pack):
    return built(pack, {"index_topk": 1024})


@defect
def indexer_no_relu(mp, pack):
    def score(q, weight, keys, length):
        raw = mx.sum((q @ keys.T[None]) * weight[..., None], axis=1)
        return mx.where(mx.arange(keys.shape[0])[None] < length, raw, select.NEG)

    return patch_scores(built(pack), score)


@defect
def indexer_sigmoid_mean(mp, pack):
    c = pack.config

    def score(q, weight, keys, length):
        gate = mx.sigmoid(weight / (c.index_head_dim**-0.5 * c.index_n_heads**-0.5))
        raw = mx.mean((q @ keys.T[None]) * gate[..., None], axis=1)
        return mx.where(mx.arange(keys.shape[0])[None] < length, raw, select.NEG)

    return patch_scores(built(pack), score)


@defect
def one_selection_for_all_queries(mp, pack):
    original = select.best_mask
    mp.setattr(select, "best_mask", lambda score, k: mx.broadcast_to(original(score, k)[-1:], score.shape) & (score > select.NEG))
    return built(pack)


@defect
def causal_mask_after_topk(mp, pack):
    original, seen = select.best_mask, {}

    def score(q, weight, keys, length):
        seen["visible"] = mx.arange(keys.shape[0])[None] < length
        return attend.index_scores(q, weight, keys, mx.broadcast_to(mx.max(length), length.shape))

    mp.setattr(select, "best_mask", lambda score, k: original(score, k) & seen["visible"])
    return patch_scores(built(pack), score)


# -- experts


@defect
def no_swiglu_clamp(mp, pack):
    original = route.swiglu
    mp.setattr(route, "swiglu", lambda gate, up, limit, weight, dtype: original(gate, up, 0, weight, dtype))
    return built(pack)


@defect
def gate_clamped_both_sides(mp, pack):
    original = route.swiglu
    mp.setattr(route, "swiglu", lambda gate, up, limit, weight, dtype: original(mx.maximum(gate, -limit), up, limit, weight, dtype))
    return built(pack)


@defect
def no_clamp_on_shared(mp, pack):
    original = route.swiglu
    mp.setattr(route, "swiglu", lambda gate, up, limit, weight, dtype: original(gate, up, limit if weight is not None else 0, weight, dtype))
    return built(pack)


@defect
def sigmoid_router(mp, pack):
    return built(pack, {"scoring_func": "sigmoid"})


@defect
def bias_in_weights(mp, pack):
    def biased(score, bias, k, factor):
        ids, _ = select.ascending(select.best_mask(score + bias, k), k)
        return ids, route.expert_weights(score + bias, ids, factor)

    mp.setattr(route, "route", biased)
    return built(pack)


@defect
def no_renorm(mp, pack):
    mp.setattr(route, "expert_weights", lambda score, ids, factor: mx.take_along_axis(score, ids, axis=-1) * factor)
    return built(pack)


@defect
def no_route_scale(mp, pack):
    return built(pack, {"routed_scaling_factor": 1.0})


@defect
def hash_layers_scored_topk(mp, pack):
    scored = lambda score, table, tokens, factor: route.route(score, mx.zeros(score.shape[-1]), table.shape[-1], factor)
    mp.setattr(route, "route_hashed", scored)
    return built(pack)


def test_every_defect_of_the_report_is_planted():
    assert set(DEFECTS) == set(REPORT) and len(REPORT) == 36


@pytest.mark.parametrize("name", sorted(REPORT))
def test_defect_is_caught(monkeypatch, pack, golden, ids, oneshot, name):
    trunk = DEFECTS[name](monkeypatch, pack)
    count = len(ids) if name in WHOLE else SHORT
    logits = np.array(Target(trunk).rows(ids[:count]).logits)
    at = golden["positions"][golden["positions"] < count]
    against_golden = np.abs(logits[at] - golden["logits"][: len(at)]).max()
    assert against_golden > 10 * g.ATOL
    off = np.abs(logits - np.array(oneshot[0].logits)[:count]).max(-1)
    assert int(np.argmax(off > 1e-3)) == REPORT[name]["first_bad"], off[:70]
