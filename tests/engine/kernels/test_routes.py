"""Routes are chosen once, checked against the stock operation, and refused with a reason; stock is always there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.errors import RouteUnavailable
from dsv41chat.engine.kernels import routes
from dsv41chat.engine.kernels.routes import Declined, Route, install
from dsv41chat.engine.kernels.sites import Routed, sites
from dsv41chat.settings import KEYS, ROUTE_DEVICES
from tests.v41 import golden, run, trunk

TOLERANCE = {"matrix": 1e-5, "router": 0.0, "experts": 1e-5}


def made(change=lambda y: y, ops=("matrix",), **options) -> Route:
    """A route that calls the stock operation and changes its result."""
    builders = {op: lambda site: lambda *args, stock=site.stock: change(stock(*args)) for op in ops}
    return Route("other", frozenset({"cpu", "metal", "cuda"}), builders, TOLERANCE, **{"rows_alike": True, **options})


@pytest.fixture
def ids():
    return golden()["input_ids"][:40]


def put(route: Route, wanted: str = "auto"):
    t = trunk()
    t.routes = install(t, t, wanted, routes=(route,))
    return t


def test_a_route_takes_the_place_of_the_operations_that_it_knows(ids):
    calls: Counter[str] = Counter()
    count = lambda site: lambda *args, stock=site.stock: calls.update([site.op]) or stock(*args)
    t = put(replace(made(), builders=dict.fromkeys(("matrix", "router", "experts"), count)))
    assert t.routes.names == ("other",) and t.routes.by_op() == {"experts": "other", "matrix": "other", "router": "other"}
    assert isinstance(t.head, Routed) and isinstance(t.layers[0].moe.experts, Routed) and t.head.weight is t.head.stock.weight
    calls.clear()
    np.testing.assert_array_equal(run(t, ids), run(trunk(), ids))
    assert calls["router"] == calls["experts"] == len(t.layers) and calls["matrix"] > 4 * len(t.layers), "the route computes, not stock"
    assert any("matrix: other, within 0.0e+00 of stock" in line for line in t.routes.summary())


@pytest.mark.parametrize("fault", ["scale", "row", "nan", "shape", "exception"])
def test_a_planted_fault_is_refused_with_its_reason(fault, ids):
    def spoil(y):
        if fault == "exception":
            raise TypeError("no such kernel")
        if fault == "shape":
            return y[..., :-1]
        if fault == "nan":
            return y * float("nan")
        if fault == "scale":
            return y * 1.01
        return mx.concatenate([y[:-1], mx.zeros_like(y[-1:])]) if y.shape[0] > 1 else y

    t = put(made(spoil))
    assert t.routes.names == () and t.routes.identity == "stock" and not isinstance(t.head, Routed)
    reasons = {c.reason for c in t.routes.choices}
    assert all("other for matrix" in r and ("is allowed" in r or "no such kernel" in r) for r in reasons)
    np.testing.assert_array_equal(run(t, ids), run(trunk(), ids))
    with pytest.raises(RouteUnavailable, match="is allowed|no such kernel"):
        put(made(spoil), "other")


def test_a_swapped_expert_is_refused():
    swap = made(lambda found: (found[0][:, ::-1], found[1]), ops=("router",))
    assert put(swap).routes.names == ()
    with pytest.raises(RouteUnavailable, match="router"):
        put(swap, "other")


def test_a_demanded_route_that_cannot_be_had_leaves_stock():
    t = trunk()
    calls = []

    def late(y):
        calls.append(1)
        return y if len(calls) < 6 else y * 2

    with pytest.raises(RouteUnavailable):
        install(t, t, "other", routes=(made(late),))
    assert len(calls) >= 6 and not any(isinstance(site.value, Routed) for site in sites(t, t)), "what was placed before is taken back"
    lacking = made(missing=lambda: "no compiler")
    with pytest.raises(RouteUnavailable, match="no compiler"):
        install(t, t, "other", routes=(lacking,))
    assert {c.reason for c in install(t, t, "auto", routes=(lacking,)).choices} == {"other: no compiler"}
    with pytest.raises(RouteUnavailable, match="there is no route 'nowhere'"):
        install(t, t, "nowhere", routes=(lacking,))
    with pytest.raises(RouteUnavailable, match="this device is cpu"):
        install(t, t, "other", routes=(replace(lacking, devices=frozenset({"cuda"})),), device="cpu")


def test_a_site_that_a_route_is_not_for_stays_stock():
    def build(site):
        if site.stock.weight.shape[0] < 100:
            raise Declined("small matrices stay")
        return lambda x: site.stock(x)

    t = put(replace(made(), builders={"matrix": build}), "other")
    assert isinstance(t.head, Routed) and not isinstance(t.layers[0].moe.gate, Routed)
    assert t.routes.by_op() == {"matrix": "other+stock"}


def test_routes_are_part_of_a_states_identity():
    plain, one = trunk().routes, put(made()).routes
    two = put(made(identity=lambda: "another library")).routes
    assert plain.identity == "stock" and len({plain.identity, one.identity, two.identity}) == 3
    assert put(made()).routes.identity == one.identity


def test_every_site_can_be_tried():
    t, rng, seen = trunk(cache_quant=True), np.random.default_rng(0), {}
    for site in sites(t, t):
        if site.key not in seen:
            seen[site.key] = site.op
            got = site.stock(*site.inputs(3, rng))
            mx.eval(got)
            arrays = got if isinstance(got, tuple) else (got,)
            assert all(not np.isnan(np.array(a.astype(mx.float32))).any() for a in arrays), site.key
    attention = {"project", "query", "latent", "output", "gathered", "core"}
    indexer = {"queries", "visible", "scores", "candidates", "among", "select"}
    others = {"matrix", "mix", "enter", "router", "experts", "raw_rows", "pool", "entries", "engram", "begin", "settle", "tap", "logits"}
    assert attention | indexer | others == set(seen.values())


def test_the_stock_route_is_a_choice_of_its_own():
    assert routes.install(trunk(), trunk(), "stock").names == ()
    assert routes.names() == KEYS["engine.routes"].choices, "what the settings offer"
    assert {route.name: tuple(sorted(route.devices)) for route in routes.known_routes()} == ROUTE_DEVICES


def test_a_route_that_no_build_could_have_here_is_known_without_one():
    assert [routes.problem(wanted, "cpu") for wanted in ("auto", "stock")] == [None, None]
    error = routes.problem("cuda", "cpu")
    assert "for cuda, this device is cpu" in str(error) and error.hint == "dsv41chat config set engine.routes auto"
    assert "cannot be used" in str(routes.problem("metal", "metal")) or routes.problem("metal", "metal") is None
