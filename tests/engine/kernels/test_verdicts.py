"""What install checks found is kept, and never trusted where anything that it depends on is another."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.bench.shapes import write_pack
from dsv41chat.engine.engine import open_engine
from dsv41chat.engine.errors import RouteUnavailable
from dsv41chat.engine.kernels import routes, verdicts
from dsv41chat.engine.kernels.blas import ROUTE as BLAS
from dsv41chat.engine.kernels.blas import dense
from dsv41chat.engine.kernels.routes import install
from dsv41chat.engine.kernels.verdicts import Verdicts
from tests.engine.kernels.test_routes import made
from tests.v41 import golden, run, trunk


@pytest.fixture
def checks(monkeypatch):
    """Operations that are compared with stock, counted; what a route declines is no comparison."""
    seen: Counter[str] = Counter()
    check = routes._check

    def counted(site, route):
        found = check(site, route)
        seen[site.op] += 1
        return found

    monkeypatch.setattr(routes, "_check", counted)
    return seen


def opened(facts, route=None, build="a" * 64, wanted="auto", **options):
    t = trunk()
    t.routes = install(t, t, wanted, routes=(route or made(),), verdicts=Verdicts(facts, build, "trunk", {"dtype": "float32", **options}))
    return t


def test_a_second_opening_checks_nothing_and_says_when_it_was_checked(checks):
    facts = {}
    first = opened(facts)
    assert checks["matrix"] > 5 and "checked now" in first.routes.summary()[0] and first.routes.facts()["checked"] == "checked now"
    checks.clear()
    second = opened(facts)
    assert not checks and second.routes.identity == first.routes.identity and second.routes.by_op() == first.routes.by_op()
    day = json.loads(facts["routes." + "a" * 16 + ".trunk"])["passed"].popitem()[1]["checked"]
    assert f"checked before on {day}" in second.routes.summary()[0]
    assert [c.error for c in second.routes.choices] == [c.error for c in first.routes.choices]
    ids = golden()["input_ids"][:40]
    np.testing.assert_array_equal(run(second, ids), run(first, ids))


CHANGES = {
    "the sources": lambda p: p.setattr(verdicts, "sources", lambda: "other kernels"),
    "MLX": lambda p: p.setattr(verdicts.mx, "__version__", "0.0.1"),
    "numpy": lambda p: p.setattr(verdicts.np, "__version__", "0.0.1"),
    "the processors": lambda p: p.setattr(verdicts.os, "sched_getaffinity", lambda pid: set(range(999)), raising=False),
    "the build": {"build": "a" * 16 + "b" * 48},
    "an option": {"cache_quant": True},
    "the route's own identity": {"route": made(identity=lambda: "another library")},
    "the tolerance": {"route": replace(made(), tolerance={"matrix": 1e-6})},
    "the rows of a check": {"route": made(check_rows=(1, 3))},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_verdict_on_something_else_is_not_trusted(change, checks, monkeypatch):
    facts = {}
    opened(facts)
    known, what = checks["matrix"], CHANGES[change]
    checks.clear()
    if callable(what):
        what(monkeypatch)
    t = opened(facts, **({} if callable(what) else what))
    assert checks["matrix"] == known and "checked now" in t.routes.summary()[0]


def test_a_damaged_route_is_refused_at_every_opening():
    facts, spoilt = {}, made(lambda y: y * 1.01)
    for _ in range(2):
        assert opened(facts, spoilt).routes.names == ()
        with pytest.raises(RouteUnavailable, match="is allowed"):
            opened(facts, spoilt, wanted="other")
    assert not facts, "nothing is kept of what failed"


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", '{"basis": "x", "passed": {}}', '{"passed": {"a": 3}}'])
def test_what_cannot_be_read_counts_for_nothing(text, checks):
    facts = {"routes." + "a" * 16 + ".trunk": text}
    opened(facts)
    assert checks["matrix"] > 5


def test_damaged_entries_are_not_taken(checks):
    facts = {}
    opened(facts)
    name, kept = next((name, json.loads(text)) for name, text in facts.items())
    kept["passed"] = {key: {"error": "small", "alike": True, "checked": "2026-01-01"} for key in kept["passed"]}
    checks.clear()
    opened({name: json.dumps(kept)})
    assert checks["matrix"] > 5


def test_without_sources_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(verdicts, "_SOURCES", tmp_path)
    verdicts.sources.cache_clear()
    try:
        facts = {}
        assert opened(facts).routes.names == ("other",) and not facts
    finally:
        verdicts.sources.cache_clear()


def test_the_sources_are_those_of_the_engine(monkeypatch, tmp_path):
    before = verdicts.sources()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "text.py").write_text("BODY = 1\n")
    assert len(before) == 64 and any(p.name == "text_matrix.py" for p in verdicts._SOURCES.rglob("*.py"))
    monkeypatch.setattr(verdicts, "_SOURCES", tmp_path)
    found = set()
    for text in ("BODY = 1\n", "BODY = 2\n"):
        (tmp_path / "kernels" / "text.py").write_text(text)
        verdicts.sources.cache_clear()
        found.add(verdicts.sources())
    verdicts.sources.cache_clear()
    assert len(found) == 2


def test_an_engine_is_checked_once_with_its_options(tmp_path, checks, monkeypatch):
    """The numpy route of a real opening; a changed kernel of it is found although its verdicts are known, when told to look again."""
    folder, facts = write_pack(tmp_path / "b", "nano", 2, 4, 4), {}
    first = open_engine(folder, facts=facts)
    assert checks["experts"] and len(facts) == 1
    checks.clear()
    again = open_engine(folder, facts=facts)
    assert not checks and again.trunk.routes.names == first.trunk.routes.names == (BLAS.name,) and again.trunk.routes.host
    assert mx.array_equal(mx.array(run(first.trunk, range(50, 90))), mx.array(run(again.trunk, range(50, 90)))).item()
    open_engine(folder, facts=facts, cache_quant=False)
    assert checks["experts"]
    real = dense.multiply_groups
    monkeypatch.setattr(dense, "multiply_groups", lambda x, weight: real(x, weight) * np.float32(1.01))
    assert open_engine(folder, facts=facts, recheck=True).trunk.routes.by_op()["matrix"] == "blas+stock"
