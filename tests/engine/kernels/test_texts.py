"""Every kernel text under the CPU shim: right against stock in float32, the same bits from both preludes, no row minds the others."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.kernels import tiles
from dsv41chat.engine.kernels.glue import Scatter, Settle
from dsv41chat.engine.kernels.hyper import Enter
from dsv41chat.engine.kernels.tiles import tile_order
from dsv41chat.engine.nn import linear as nn
from dsv41chat.engine.nn.hyper_connection import HyperConnection, enter
from tests.engine.kernels.cases import ROWS, Case, Draw, cases, distance
from tests.engine.kernels.cases_exl3 import tensor_trellis, trellis
from tests.engine.kernels.record import raw, record_of
from tests.engine.kernels.shim import Shim, needs_compiler

pytestmark = needs_compiler


def bits(arrays, rows: int | None = None) -> list[bytes]:
    return [np.array(mx.contiguous(a[:rows]).view(mx.uint8)).tobytes() for a in arrays]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_text(case):
    first = case.only or "metal"
    got = case.run(Shim(first))
    assert all(d <= limit for d, limit in zip(case.distances(got), case.limits, strict=True)), case.distances(got)
    want = record_of(case)
    stale = [i for i, a in enumerate(got) if want and i not in case.close and not np.array_equal(raw(a), want[i])]
    assert not stale, "texts or cases changed: write the record again with python -m tests.engine.kernels.record"
    if case.only is None:
        assert bits(case.run(Shim("cuda"))) == bits(got), "the preludes give different bits"
    for rows in case.fewer:
        assert bits(case.run(Shim(first), rows), rows) == bits(got, rows), f"{rows} rows alone have other bits than among {case.rows}"


@pytest.mark.parametrize("dialect", ["metal", "cuda"])
@pytest.mark.parametrize(("width", "dtype"), [(288, mx.bfloat16), (10, mx.float32), (640, mx.int32)])
def test_rows_go_into_their_places(dialect, width, dtype):
    """Places in any order and out of the way of -1; all other rows stay."""
    d = Draw(41)
    rows, target = (mx.reshape(d.whole(-99, 99, n, width).astype(dtype), (n, 2, -1)) for n in (5, 12))
    at = [7, -1, 0, 11, -1]
    got = Scatter(Shim(dialect)).into(rows, mx.array(at, dtype=mx.int32), target)
    want = [next((rows[i] for i in range(5) if at[i] == r), target[r]) for r in range(12)]
    assert got.dtype == dtype and mx.array_equal(got, mx.stack(want))


def test_what_is_settled_has_the_bits_of_the_way_into_a_sublayer():
    """So a tap or a gate between two sublayers leaves the streams as they were."""
    d, D = Draw(42), 192
    h, y, post, comb = d.rows(ROWS, 4, D), d.rows(ROWS, D), d.positive(ROWS, 4), d.positive(ROWS, 4, 4) / 3
    mix = HyperConnection(d.normal(24, 4 * D, size=0.05), d.normal(24), mx.array([1.1, 0.9, 2.0]), 4, 1e-6, 1e-6)
    entered = Enter(Shim("cuda"), mix, d.positive(D), 1e-6, False)(h, None, y, post, comb)[0]
    assert bits([Settle(Shim("cuda"), D)(h, y, post, comb)]) == bits([entered])


def test_the_way_into_a_sublayer_of_a_prompt():
    """More rows than a group has: those of few, and of a call that ends elsewhere."""
    d, D, n = Draw(43), 192, 90
    mix = HyperConnection(d.normal(24, 4 * D, size=0.05), d.normal(24), mx.array([1.1, 0.9, 2.0]), 4, 1e-6, 1e-6)
    args = d.rows(n, 4, D), d.positive(n, 4), d.rows(n, D), d.positive(n, 4), d.positive(n, 4, 4) / 3
    weight = d.positive(D)
    call = Enter(Shim("cuda"), mix, weight, 1e-6, True)
    got = call(*args)
    assert call.backend.launches == ["tensor_spread", "hyper_finish"]
    want = enter(mix, weight, 1e-6, True, args)
    assert all(distance(a, b) <= limit for a, b, limit in zip(got, want, (1e-3, 1e-3, 1e-5, 1e-5, 1e-5)))
    assert bits(call(*(a[:77] for a in args)), 77) == bits(got, 77) and bits(call(*(a[40:60] for a in args)), 20) == bits([a[40:60] for a in got], 20)


@pytest.mark.parametrize("rows", [32, 128])
def test_tiles_cover_every_pick_once(rows):
    """Experts without a row, with one, with exactly a tile and with more; picks of one expert stay in order."""
    counts = [0, 1, rows, rows + 1, 3 * rows - 2, 0]
    ids = np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
    order, back, found = map(np.array, tile_order(Shim("cuda"), mx.array(ids.reshape(-1, 5)), len(counts), rows))
    assert np.array_equal(order, np.argsort(ids, kind="stable")) and np.array_equal(order[back.reshape(-1)], np.arange(ids.size))
    seen = [(int(e), int(first) + i) for e, first, count, _ in found for i in range(count)]
    assert seen == [(e, i) for i, e in enumerate(ids[order].tolist())] and found[:, 2].max() <= rows
    assert len(found) == ids.size // rows + len(counts)


def many_rows(n: int) -> Case:
    """Two picks of three experts each, of the last rows other ones."""
    case, d = next(c for c in cases() if c.name == "tensor experts affine 4"), Draw(18)
    ids = mx.array(np.sort(np.stack([d.rng.permutation(3)[:2] for _ in range(n)]) + np.arange(n)[:, None] // (n - 2), axis=1).astype(np.int32))
    return replace(case, inputs=(d.normal(n, 128).astype(mx.bfloat16), ids, d.positive(n, 2)))


def test_a_prompt_of_many_rows_in_tiles_of_every_width():
    """More rows of an expert than one tile holds, and tiles that are partly full: right, and the same bits whatever the tiles and the rows."""
    n = 150
    case = many = many_rows(n)
    with pytest.MonkeyPatch.context() as patch:
        wide = many.run(Shim("cuda"), n)
        assert many.distances(wide, n)[0] <= case.limits[0] and tiles.columns_of(2 * n, 5) == tiles.WIDE
        for columns in (tiles.MIDDLE, tiles.NARROW):
            patch.setattr(tiles, "columns_of", lambda *sizes, columns=columns: columns)
            assert bits(many.run(Shim("cuda"), n), n) == bits(wide, n)
    assert [tiles.columns_of(64 * rows, 64) for rows in (5, 27, 28, 48, 59, 60, 400)] == [4, 4, 8, 8, 8, 16, 16]
    assert bits(many.run(Shim("cuda"), 70), 70) == bits(wide, 70)


@pytest.mark.parametrize("fault", [None, ("2 * s * NT + n", "2 * s * NT + n / 2"), ("2 * s + 1", "2 * s"), ("s < 4; s++", "s < 3; s++")])
def test_tiles_that_four_groups_multiply_together(fault, monkeypatch):
    """The same bits as with a product of each SIMD group for itself, on a device whose SIMD groups cannot do it together too."""
    n, kernel = 40, tiles.TENSOR_TILES
    case = many_rows(n)
    want = case.run(Shim("cuda"), n)
    if fault:
        assert fault[0] in kernel.helpers
        monkeypatch.setattr(tiles, "TENSOR_TILES", replace(kernel, helpers=kernel.helpers.replace(*fault)))
    for columns in (tiles.NARROW, tiles.MIDDLE, tiles.WIDE):
        monkeypatch.setattr(tiles, "columns_of", lambda *sizes, columns=columns: columns)
        assert (bits(case.run(Shim("cuda", warpgroups=True), n), n) == bits(want, n)) == (not fault)


def test_plain_matrices_of_a_prompt_in_wide_and_narrow_tiles():
    d, n = Draw(44), 150
    first, second = (nn.Linear(d.normal(256, 128).astype(mx.bfloat16)) for _ in range(2))
    x, got = d.normal(n, 128).astype(mx.bfloat16), []
    for least in (0, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "_BUSY", least)
            got.append(tiles.RowsProduct(Shim("cuda"), first, second)(x))
    want = mx.concatenate([x.astype(mx.float32) @ m.weight.astype(mx.float32).T for m in (first, second)], axis=1)
    assert distance(got[0], want) < 1e-5 and bits(got[:1], n) == bits(got[1:], n)


def test_equal_picks_of_a_row():
    """A hashed router's table may name an expert twice in a row: each pick has its own weight."""
    case = next(c for c in cases() if c.name == "experts on the unit")
    x, ids, weight = case.inputs
    same = mx.array([[4, 4], [1, 4], [2, 2], [4, 4], [0, 2], [2, 2], [1, 3], [4, 0]], dtype=mx.int32)
    twin = replace(case, inputs=(x, same, weight))
    got = twin.run(Shim("cuda"))
    assert twin.distances(got)[0] <= case.limits[0] and all(bits(twin.run(Shim("cuda"), n), n) == bits(got, n) for n in (1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("book", ["3inst", "mcg", "mul1"])
@pytest.mark.parametrize("halves", [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16])
def test_every_width_of_a_trellis(book, halves):
    for case, dialect in ((trellis(book, halves), "metal"), (tensor_trellis(book, halves, 128, 128, True), "cuda")):
        assert case.distances(case.run(Shim(dialect), 2), 2)[0] <= case.limits[0]
