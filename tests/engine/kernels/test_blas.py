"""The numpy route: what it takes over, that faults in it are refused when it is installed, and its roundings and choices bit for bit."""

from __future__ import annotations

import gc
import shutil
import tracemalloc
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.bench.shapes import write_pack
from dsv41chat.engine.engine import open_engine, probe_pack
from dsv41chat.engine.errors import RouteUnavailable
from dsv41chat.engine.kernels import compiled
from dsv41chat.engine.kernels.blas import attention, dense, experts, rounding, streams
from dsv41chat.engine.kernels.routes import install
from dsv41chat.engine.kernels.sites import INNER, Routed, sites
from dsv41chat.engine.ops import fakequant
from dsv41chat.engine.ops.select import best_mask
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.nano import embedded_pack
from tests.engine.v4 import tiny
from tests.v41 import golden, run, trunk


def test_every_operation_of_v41_is_taken_over():
    t = trunk(cache_quant=True, routes="blas")
    assert t.routes.host and t.routes.rows_alike and not {c.op for c in t.routes.choices if c.route != "blas"} - {"matrix", "pool"}
    assert all(isinstance(s.value, Routed) and s.value.route == "blas" for s in sites(t, t) if s.op not in {*INNER, "pool"})
    ids = golden()["input_ids"][:90]
    np.testing.assert_allclose(run(t, ids), run(trunk(cache_quant=True), ids), atol=2e-4, rtol=0)


def test_v4_runs_beside_stock_operations(tmp_path):
    tiny.write_pack(tmp_path)
    pack = open_pack(tmp_path)
    t, stock = build_trunk(pack, routes="blas"), build_trunk(pack)
    assert t.routes.host and {"router", "pool", "entries"} <= {c.op for c in t.routes.choices if c.route == "stock"}
    ids = np.random.default_rng(2).integers(3, t.config.vocab_size, 120)
    np.testing.assert_allclose(run(t, ids), run(stock, ids), atol=2e-4, rtol=0)


FAULTS = {
    "wrong scale": (dense, "multiply", lambda real: lambda x, w: real(x, w) * np.float32(1.001), "project"),
    "dropped row": (streams, "collapse", lambda real: lambda h, pre: real(h, pre) * (np.arange(len(h)) < max(1, len(h) - 1))[:, None], "enter"),
    "streams not mixed": (streams, "spread", lambda real: lambda y, h, post, comb: real(y, h, post, comb.transpose(0, 2, 1)), "enter"),
    "lost sink": (
        attention, "_attend", lambda real: lambda q, k, keep, sink, scale, out: real(q, k, keep, np.full_like(sink, -1e30), scale, out), "gathered",
    ),
    "swapped lanes": (attention, "rotate", lambda real: lambda x, turn: real(x, np.conj(turn)), "latent"),
    "a gate that is not clamped": (experts, "sigmoid", lambda real: lambda x: real(x) * np.float32(1.01), "experts"),
    "one entry less": (attention, "best", lambda real: lambda s, k: real(s, k - 1), "select"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_refused(name, monkeypatch):
    module, function, fault, op = FAULTS[name]
    monkeypatch.setattr(module, function, fault(getattr(module, function)))
    if function == "multiply":
        monkeypatch.setattr(attention, "multiply", getattr(module, function))
    t = trunk(cache_quant=True)
    found = install(t, t, "auto", device="cpu")
    assert any(c.op == op and c.route == "stock" and "is allowed" in c.reason for c in found.choices), name
    with pytest.raises(RouteUnavailable, match="is allowed"):
        trunk(cache_quant=True, routes="blas")


def test_another_dtype_keeps_the_stock_operations():
    assert trunk(mx.bfloat16, routes="auto").routes.names == ()
    with pytest.raises(RouteUnavailable, match="another dtype than float32"):
        trunk(mx.bfloat16, routes="blas")


def test_packed_builds_are_decoded_once_and_counted(tmp_path, monkeypatch):
    folder = write_pack(tmp_path / "b", "nano", 2, 4, 4)
    engine, info = open_engine(folder), probe_pack(folder)
    copies = info.admission.plan.copies
    assert copies > 4 * 2 * 4 * 3 * 256 * 192 and "copies of routes" in info.admission.words
    assert copies + probe_pack(folder, routes="stock").resident_bytes == info.resident_bytes
    ids = list(range(50, 90))
    stock = build_trunk(open_pack(folder))
    np.testing.assert_allclose(run(engine.trunk, ids), run(stock, ids), atol=2e-3, rtol=0)
    monkeypatch.setattr(dense, "LIMIT_BYTES", 1000)
    large = build_trunk(open_pack(folder), routes="auto")
    assert any("stay packed" in (c.reason or "") for c in large.routes.choices) and large.routes.host
    np.testing.assert_allclose(run(large, ids), run(stock, ids), atol=2e-3, rtol=0)
    assert 0 < probe_pack(folder).admission.plan.copies < copies // 10, "the zeros that fill matrices up are left"


def test_roundings_have_the_stock_bits():
    rng = np.random.default_rng(0)
    for _ in range(10):
        x = (rng.standard_normal((40, 64)) * 10.0 ** rng.integers(-9, 5, (40, 1))).astype(np.float32)
        x[0], x[1], x[2] = 0, 448, np.exp2(rng.integers(-20, 20, 64))
        x[3] = np.tile([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], 8)
        x[4] = -x[3]
        for name in ("fp8_ue8m0", "fp4_ue8m0", "fp4_e4m3"):
            np.testing.assert_array_equal(getattr(rounding, name)(x), np.array(getattr(fakequant, name)(mx.array(x))), name)
        np.testing.assert_array_equal(rounding.v4_fp8(x, 16), np.array(fakequant.v4_fp8(mx.array(x), 16)))


@pytest.mark.parametrize("spread", [2, 5, 1000])
def test_choices_are_the_stock_choices_with_ties(spread):
    rng = np.random.default_rng(spread)
    for width in (5, 16, 40, 200):
        for k in (1, 4, 16):
            s = np.round(rng.standard_normal((50, width)) * spread).astype(np.float32)
            s[np.arange(width)[None] >= rng.integers(0, width + 1, (50, 1))] = -np.inf
            np.testing.assert_array_equal(attention.best(s, k), np.array(best_mask(mx.array(s), k)))


def test_a_held_lane_keeps_its_rings():
    """Lanes of this route are written in place: what is held or marked is a copy."""
    from dsv41chat.engine.target import Target

    t = trunk(routes="blas")
    target, ids = Target(t), [int(i) for i in golden()["input_ids"][:80]]
    target.commit(target.rows(ids[:40], logits_from=None), 40)
    mark = target.lane.mark()
    want = np.array(target.rows(ids[40:44]).logits)
    target.drop()
    for _ in range(2):
        target.commit(target.rows(ids[40:80], logits_from=None), 40)
        assert target.lane.rewind(mark) and target.n == 40
        np.testing.assert_array_equal(np.array(target.rows(ids[40:44]).logits), want)
        target.drop()


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles fused operations with g++ on a CPU")
def test_a_compiled_operation_has_the_stock_bits():
    t = trunk()
    site = next(s for s in sites(t, t) if s.op == "router")
    args = site.inputs(3, np.random.default_rng(0))
    for got, want in zip(compiled.Graph(site.stock)(*args), site.stock(*args)):
        assert mx.array_equal(got, want).item()


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles fused operations with g++ on a CPU")
@pytest.mark.parametrize("op, result", [("router", 1), ("project", 2)])
def test_a_wrong_compiled_block_is_refused(op, result, monkeypatch):
    """A wrong scale in one of its results; with the right block beside it, which is taken."""
    stock = compiled.Graph._with

    def wrong(self, key):
        call = stock(self, key)
        return lambda *arrays: tuple(y * 1.01 if k == result else y for k, y in enumerate(call(*arrays)))

    route = replace(compiled.ROUTE, builders={op: compiled._build})
    assert install(trunk(), trunk(), "compiled", routes=(route,)).by_op() == {op: "compiled"}
    monkeypatch.setattr(compiled.Graph, "_with", wrong)
    t = trunk()
    found = install(t, t, "auto", routes=(replace(route, auto_on=None),))
    assert found.names == () and all(c.op == op and "is allowed" in c.reason for c in found.choices)
    with pytest.raises(RouteUnavailable, match=f"compiled for {op}.*is allowed"):
        install(t, t, "compiled", routes=(route,))
    assert not any(isinstance(s.value, Routed) for s in sites(t, t))


@pytest.mark.parametrize("build", ["packed", "embedded, with a drafter", "v4"])
def test_the_plan_counts_the_copies_that_are_made(build, tmp_path):
    """Memory of MLX and numpy after the opening, over what the stock operations hold."""
    if build == "packed":
        folder = write_pack(tmp_path / "b", "nano", 4, 4, 4)
    elif build == "v4":
        folder = tmp_path
        tiny.write_pack(folder, {**tiny.CONFIG, "hidden_size": 256, "head_dim": 64, "q_lora_rank": 128, "moe_intermediate_size": 64})
    else:
        folder = embedded_pack()
    held = {}
    for routes in ("stock", "stock", "blas"):  # the first opening leaves what is made once
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        tracemalloc.start()
        kept = open_engine(folder, routes=routes)
        gc.collect()
        held[routes] = mx.get_active_memory() - before + tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        kept.close()
        del kept
    found, want = held["blas"] - held["stock"], probe_pack(folder, routes="blas").admission.plan.copies
    # Python objects of the route come on top: closures, and what shapes need once.
    assert want * 0.98 <= found <= want * 1.02 + (1 << 20), (found, want)
