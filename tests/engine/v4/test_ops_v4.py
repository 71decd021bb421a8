"""Pure functions of the V4 family against plain formulas."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.config_v4 import parse_v4
from dsv41chat.engine.nn.linear import Linear
from dsv41chat.engine.ops import attend, fakequant, hyper, pool, rope, route, select
from dsv41chat.engine.ops.hadamard import hadamard_matrix
from dsv41chat.engine.plan import build_plan
from dsv41chat.engine.rows_v4 import RowsV4, slots_for
from tests.engine.v4 import golden as g
from tests.engine.v4 import tiny

RNG = np.random.default_rng(5)


def pooled_reference(kv, gate, ratio):
    """Groups one by one, in float64; kv, gate [T, 2 * D]."""
    out, d = [], kv.shape[1] // 2
    for w in range(len(kv) // ratio):
        own = slice(w * ratio, (w + 1) * ratio)
        values, scores = kv[own, d:], gate[own, d:]
        if w:
            before = slice((w - 1) * ratio, w * ratio)
            values, scores = np.concatenate([kv[before, :d], values]), np.concatenate([gate[before, :d], scores])
        e = np.exp(scores - scores.max(0))
        out.append((e / e.sum(0) * values).sum(0))
    return np.stack(out)


def test_overlapping_pool():
    kv, gate = RNG.standard_normal((20, 12)), RNG.standard_normal((20, 12)) * 3
    rows = mx.array(np.stack([kv, gate], 1).astype(np.float32))
    want = pooled_reference(kv, gate, 4)
    assert np.allclose(np.array(pool.pool_overlapping(rows, 4, True)), want, atol=1e-5)
    for w in range(1, 5):
        alone = pool.pool_overlapping(rows[4 * (w - 1) : 4 * (w + 1)], 4, False)
        assert alone.shape == (1, 6) and np.allclose(np.array(alone)[0], want[w], atol=1e-5)


def test_position_bias_follows_the_absolute_position():
    value, gate, ape = (mx.array(RNG.standard_normal(s).astype(np.float32)) for s in ((10, 6), (10, 6), (4, 6)))
    rows = np.array(pool.raw_rows(value, gate, ape, mx.arange(7, 17) % 4))
    assert (rows[:, 0] == np.array(value)).all()
    assert np.allclose(rows[:, 1], np.array(gate) + np.array(ape)[np.arange(7, 17) % 4])


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_hadamard(size):
    """The butterfly of strides 1, 2, 4, ... and the scale size**-0.5; its own inverse."""
    matrix, x = hadamard_matrix(size), RNG.standard_normal((3, size))
    y, stride = x.copy(), 1
    while stride < size:
        y = y.reshape(3, -1, 2, stride)
        y = np.concatenate([y[:, :, :1] + y[:, :, 1:], y[:, :, :1] - y[:, :, 1:]], axis=2).reshape(3, size)
        stride *= 2
    assert np.allclose(x @ matrix.T, y * size**-0.5, atol=1e-5)
    assert np.allclose(matrix @ matrix, np.eye(size), atol=1e-6)


def e4m3(x):
    """Nearest e4m3 value, ties to the even mantissa, by search in the table of all codes."""
    codes = np.array([np.ldexp(1 + (b & 7) / 8, (b >> 3) - 7) if b >> 3 else np.ldexp(b & 7, -9) for b in range(127)])
    i = np.clip(np.searchsorted(codes, np.abs(x)), 1, len(codes) - 1)
    low, high = codes[i - 1], codes[i]
    down, up = np.abs(x) - low, high - np.abs(x)
    return np.sign(x) * np.where((down < up) | ((down == up) & ((i - 1) % 2 == 0)), low, high)


def e2m1(x):
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    i = np.clip(np.searchsorted(codes, np.abs(x)), 1, 7)
    low, high = codes[i - 1], codes[i]
    down, up = np.abs(x) - low, high - np.abs(x)
    return np.sign(x) * np.where((down < up) | ((down == up) & ((i - 1) % 2 == 0)), low, high)


def rounded(x, size, floor, top, code):
    out = x.astype(np.float64).copy()
    for a in range(0, x.shape[1], size):
        part = x[:, a : a + size].astype(np.float64)
        biggest = np.maximum(np.abs(part).max(1, keepdims=True), floor)
        ratio = (biggest.astype(np.float32) / np.float32(top)).astype(np.float64)
        mantissa, exponent = np.frexp(ratio)
        scale = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
        out[:, a : a + size] = code(np.clip(part / scale, -top, top)) * scale
    return out


@pytest.mark.parametrize("channels", [448, 64, 24, 100])
def test_simulated_rounding_of_window_and_pooled_rows(channels):
    """e4m3 per 64 channels before the rope slice; a short last group on its own; the rope slice untouched."""
    x = np.exp(RNG.standard_normal((200, channels + 8)) * 3) * RNG.choice([-1, 1], (200, channels + 8))
    x[0], x[1, :channels], x[2, :channels] = 0, 448.0, np.arange(channels) % 17 / 16
    x = x.astype(np.float32)
    got = np.array(fakequant.v4_fp8(mx.array(x), 8))
    assert (got[:, channels:] == x[:, channels:]).all()
    assert (got[:, :channels] == rounded(x[:, :channels], 64, 1e-4, 448, e4m3)).all()


@pytest.mark.parametrize("channels", [128, 16, 40])
def test_simulated_rounding_of_index_rows(channels):
    x = (RNG.standard_normal((200, channels)) * np.exp(RNG.standard_normal((200, 1)) * 4)).astype(np.float32)
    midpoints = np.resize([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], channels)
    x[0], x[1], x[2] = 0, midpoints, -midpoints * 2
    assert (np.array(fakequant.v4_fp4(mx.array(x))) == rounded(x, 32, 6 * 2.0**-126, 6, e2m1)).all()


def test_the_mix_matters_only_to_the_rounding():
    """Without simulated rounding the mix on both sides leaves index scores alone; with it, scores change."""
    q, keys = (mx.array(RNG.standard_normal(s).astype(np.float32)) for s in ((5, 4, 16), (9, 16)))
    mix, weight, length = Linear(mx.array(hadamard_matrix(16))), mx.ones((5, 4)), mx.full((5, 1), 9, dtype=mx.int32)
    mixed = mix(q), mix(keys)
    plain = np.array(attend.index_scores(q, weight, keys, length))
    assert np.allclose(np.array(attend.index_scores(mixed[0], weight, mixed[1], length)), plain, atol=1e-5)
    simulated = attend.index_scores(fakequant.v4_fp4(mixed[0]), weight, fakequant.v4_fp4(mixed[1]), length)
    assert np.abs(np.array(simulated) - plain).max() > 1e-2


def test_equal_scores_go_to_the_lower_entry_whatever_the_buffer_holds():
    score = mx.zeros((1, 40))
    for width in (40, 64, 300):
        padded = mx.concatenate([score, mx.full((1, width - 40), select.NEG)], axis=1)
        index, present = select.ascending(select.best_mask(padded, 6), 16)
        assert np.array(index)[0, :6].tolist() == [0, 1, 2, 3, 4, 5] and np.array(present)[0].sum() == 6


def test_index_scores_take_negative_weights_and_mask_first():
    q, keys = (mx.array(RNG.standard_normal(s).astype(np.float32)) for s in ((3, 2, 8), (5, 8)))
    weight = mx.array([[1.0, -2.0]] * 3)
    got = np.array(attend.index_scores(q, weight, keys, mx.array([[5], [2], [0]], dtype=mx.int32)))
    dots = np.maximum(np.einsum("nhc,tc->nht", np.array(q), np.array(keys)), 0)
    want = dots[:, 0] - 2 * dots[:, 1]
    assert np.allclose(got[0], want[0], atol=1e-5) and np.allclose(got[1, :2], want[1, :2], atol=1e-5)
    assert np.isinf(got[1, 2:]).all() and np.isinf(got[2]).all()


def test_hashed_route():
    score, table = mx.array([[1.0, 2.0, 3.0, 4.0]] * 2), mx.array([[3, 1], [0, 2]], dtype=mx.int32)
    ids, weight = route.route_hashed(score, table, mx.array([0, 1]), 1.5)
    assert np.array(ids).tolist() == [[1, 3], [0, 2]], "ascending, one row of ids per token"
    assert np.allclose(np.array(weight), [[1.5 * 2 / 6, 1.5 * 4 / 6], [1.5 * 1 / 4, 1.5 * 3 / 4]])


def test_head_weights():
    h = RNG.standard_normal((3, 4, 8))
    fn, base, scale = RNG.standard_normal((4, 32)), RNG.standard_normal(4), np.array([0.8])
    f32 = lambda a: mx.array(a.astype(np.float32))
    got = hyper.head_weights(f32(h), f32(fn.T), f32(base), f32(scale), eps=1e-6, norm_eps=1e-6)
    flat = h.reshape(3, -1) / np.sqrt((h.reshape(3, -1) ** 2).mean(-1, keepdims=True) + 1e-6)
    assert np.allclose(np.array(got), 1 / (1 + np.exp(-(flat @ fn.T * 0.8 + base))) + 1e-6, atol=1e-5)


@pytest.mark.parametrize("ratio, most", [(0, None), (4, 6), (4, None), (12, None), (128, None), (300, None)])
def test_a_key_list_is_as_wide_alone_as_among_others(ratio, most):
    """Tiles cover the rows in order, and a row's width follows from its position; it holds every entry the row may see."""
    c = parse_v4(tiny.CONFIG)
    frequencies = rope.Frequencies({p.rope: rope.inverse_frequencies(p.rope) for p in build_plan(c)})
    many = RowsV4(np.zeros(1000, np.int64), 50, c.sliding_window, c.ring_rows, frequencies)
    widths = {}
    for part, *_ in many.blocks:
        tiles = many.tiles(part, ratio, most)
        assert [t.start for t, _ in tiles] == [part.start, *(t.stop for t, _ in tiles[:-1])] and tiles[-1][0].stop == part.stop
        widths |= {50 + i: w for tile, w in tiles for i in range(tile.start, tile.stop)}
    for position in (50, 51, 127, 128, 255, 256, 700, 1049):
        alone = RowsV4(np.zeros(1, np.int64), position, c.sliding_window, c.ring_rows, frequencies)
        assert alone.tiles(slice(0, 1), ratio, most) == [(slice(0, 1), widths[position])]
        seen = (position + 1) // ratio if ratio else 0
        assert widths[position] >= min(seen, most or seen) and widths[position] % 16 == 0
        assert widths[position] <= slots_for(most if most is not None else seen + 64)


def test_pooled_rows_reach_the_attention_in_prefill_and_decode(quick_trunk, ids):
    """Scaling one layer's entries changes rows of a long call and a single row alike: nobody hides them behind a mask."""
    logits, target = g.feed(quick_trunk, ids[:120], [119])
    lane = target.lane
    last = np.array(target.rows(ids[119:120]).logits)
    target.drop()
    lane.buffers["pool.1"] = lane.buffers["pool.1"] * 50
    single = np.array(target.rows(ids[119:120]).logits)
    target.drop()
    many = np.array(target.rows(ids[119:130]).logits)[0]
    assert np.abs(single - last).max() > 0.1 and g.same_bits(single[0], many)
