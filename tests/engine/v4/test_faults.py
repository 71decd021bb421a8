"""Faults of streaming, planted one by one: each must break the equality that test_exact.py demands."""

from __future__ import annotations

import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.lane import Lane, RingSpec
from dsv41chat.engine.nn.attention_v4 import AttentionV4
from dsv41chat.engine.nn.indexer_v4 import IndexerV4
from dsv41chat.engine.ops import attend, pool, select
from dsv41chat.engine.pack.build import build_trunk
from dsv41chat.engine.rows_v4 import RowsV4
from dsv41chat.engine.target import Target
from dsv41chat.engine.trunk_v4 import TrunkV4
from tests.engine.v4 import golden as g
from tests.engine.v4.test_exact import LENGTH, sequence, speculate

FAULTS = {}


def fault(function):
    FAULTS[function.__name__] = function
    return function


def change_specs(mp, change):
    specs = TrunkV4.lane_specs
    mp.setattr(TrunkV4, "lane_specs", lambda self: tuple(change(s) if isinstance(s, RingSpec) else s for s in specs(self)))


@fault
def raw_rings_without_room_for_rollback(mp):
    change_specs(mp, lambda s: replace(s, rows=s.group + s.overlap) if s.group else s)


@fault
def a_trim_lowers_the_high_mark(mp):
    truncate = Lane.truncate

    def lowering(self, n):
        done = truncate(self, n)
        self.high = self.n if done else self.high
        return done

    mp.setattr(Lane, "truncate", lowering)


@fault
def overlap_lost_at_a_call_border(mp):
    original = RowsV4._group_block

    def without_lead(self, layer, capacity, part):
        block = original(self, layer, capacity, part)
        if block.read is None or not layer.overlap or block.first == 0 or part.start:
            return block
        return replace(block, read=mx.concatenate([block.read[layer.ratio :][: layer.ratio], block.read[layer.ratio :]]))

    mp.setattr(RowsV4, "_group_block", without_lead)


@fault
def ape_from_the_start_of_the_call(mp):
    original = pool.raw_rows
    mp.setattr(pool, "raw_rows", lambda value, gate, ape, places: original(value, gate, ape, (places - places[0]) % ape.shape[0]))


@fault
def index_keys_idle_while_dense(mp):
    original = IndexerV4.__call__

    def late(self, lane, rows, x, qr):
        if rows.last_length(self.layer.ratio) <= self.topk:
            return select.first_visible(rows.length(self.layer.ratio), 16)
        return original(self, lane, rows, x, qr)

    mp.setattr(IndexerV4, "__call__", late)


@fault
def entries_visible_as_soon_as_emitted(mp):
    original = RowsV4.length
    mp.setattr(RowsV4, "length", lambda self, ratio: mx.broadcast_to(original(self, ratio)[-1:], (self.n, 1)))


@fault
def groups_pooled_by_a_running_fold_when_alone(mp):
    original = pool.pool_groups

    def fold(rows, ratio):
        if rows.shape[0] > ratio:
            return original(rows, ratio)
        value, total, top = 0, 0, rows[0, 1]
        for row in rows:
            new = mx.maximum(top, row[1])
            value, total, top = value * mx.exp(top - new) + row[0] * mx.exp(row[1] - new), total * mx.exp(top - new) + mx.exp(row[1] - new), new
        return (value / total)[None]

    mp.setattr(pool, "pool_groups", fold)


@fault
def picks_in_order_of_score(mp):
    best, scores = select.best_mask, {}

    def remember(score, k):
        scores[score.shape] = score
        return best(score, k)

    def by_score(mask, k):
        score = scores.get(mask.shape)
        order = mx.argsort(-mx.where(mask, score, select.NEG), axis=-1)[:, : min(k, mask.shape[1])].astype(mx.int32)
        order = mx.concatenate([order, mx.zeros((mask.shape[0], k - order.shape[1]), mx.int32)], axis=1)
        present = mx.arange(k)[None] < mx.sum(mask, axis=-1, keepdims=True)
        return mx.where(present, order, 0), present

    mp.setattr(select, "best_mask", remember)
    mp.setattr(select, "ascending", by_score)


@fault
def entries_before_the_window_in_single_rows(mp):
    load = AttentionV4.load.__func__

    def core(q, keys, keep, sink, scale):
        if q.shape[0] == 1:
            order = mx.roll(mx.arange(keys.shape[1]), 16)
            keys, keep = keys[:, order], keep[:, order]
        return attend.attend_rows(q, keys, keep, sink, scale)

    mp.setattr(AttentionV4, "load", classmethod(lambda cls, *a: replace(load(cls, *a), core=core)))


@fault
def a_long_chunk_writes_half_of_the_ring(mp):
    """Rows that no next query sees, but a trim does, are left out."""
    write = Lane.write

    def visible_only(self, name, slots, rows):
        slots = mx.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        keep = min(slots.shape[0], self.specs[name].rows // 2 - 4)
        write(self, name, slots[slots.shape[0] - keep :], rows[rows.shape[0] - keep :])

    mp.setattr(Lane, "write", visible_only)


def broken(trunk, ids, truth) -> bool:
    """Whether any of a few ways to feed the sequence differs from what a sound trunk gives in one call."""
    same = lambda out: g.same_bits(out, truth)
    for cuts in ([LENGTH], g.even(LENGTH, 7), [30] + [1] * (LENGTH - 30)):
        if not same(g.feed(trunk, ids, cuts)[0]):
            return True
    if not same(speculate(trunk, ids, random.Random(5), 20)[0]):
        return True
    for top in (40, 77):
        low = top - trunk.config.roll_rows
        _, target = g.feed(trunk, ids, g.even(top, 31))
        for n in range(top - 1, low - 1, -4):
            assert target.lane.truncate(n)
        if not g.same_bits(np.array(target.rows(ids[target.n : target.n + 8]).logits), truth[target.n : target.n + 8]):
            return True
    _, target = g.feed(trunk, ids, [40])
    for n in (30, 24, 20, 14, 9):
        if target.lane.truncate(n) and not g.same_bits(np.array(target.rows(ids[n : n + 6]).logits), truth[n : n + 6]):
            return True
    return False


@pytest.fixture(scope="module")
def sound(tiny_pack):
    trunk = build_trunk(tiny_pack, dtype=mx.float32)
    ids = sequence(trunk)
    truth, _ = g.feed(trunk, ids, [LENGTH])
    assert not broken(trunk, ids, truth)
    return ids, truth


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(monkeypatch, tiny_pack, sound, name):
    ids, truth = sound
    FAULTS[name](monkeypatch)
    assert broken(build_trunk(tiny_pack, dtype=mx.float32), ids, truth)


def test_a_window_ring_of_the_window_alone_is_caught(monkeypatch, tiny_pack, sound):
    """Without slots beyond the window, a rejected row overwrites what the rows before it still see."""
    ids, truth = sound
    change_specs(monkeypatch, lambda s: replace(s, rows=s.window) if s.window else s)
    trunk = build_trunk(tiny_pack, dtype=mx.float32)
    blocks = RowsV4.blocks.func

    def narrow(self):
        write = lambda part: self.ring_slots(self.positions[part], self.window)
        return [(part, write(part), slots % self.window, present) for part, _, slots, present in blocks(self)]

    monkeypatch.setattr(RowsV4, "blocks", property(narrow))
    monkeypatch.setattr(RowsV4, "fits", True)
    assert not g.same_bits(speculate(trunk, ids, random.Random(5), 20)[0], truth)
    assert Target(trunk).lane.specs["window.0"].rows == tiny_pack.config.sliding_window
