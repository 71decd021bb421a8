"""Halves of layers as compiled graphs: the bits of the calls one by one, and traced anew when what they call has changed."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.kernels import joined
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.engine.target import Target
from dsv41chat.nano import embedded_pack
from tests.engine.kernels.shim import needs_compiler
from tests.engine.v4.tiny import write_pack

# Each number of rows is traced; the last call is wider than what is joined.
CUTS = (0, 12, 13, 14, 16, 19)
pytestmark = needs_compiler


@pytest.fixture(scope="module", params=["v41", "v4"])
def trunk(request, tmp_path_factory):
    if request.param == "v41":
        return build_trunk(open_pack(embedded_pack()), dtype=mx.float32, routes="stock", engram=False)
    folder = tmp_path_factory.mktemp("v4")
    write_pack(folder, {})
    return build_trunk(open_pack(folder), dtype=mx.float32, routes="stock")


def feed(trunk) -> tuple[list[np.ndarray], Target]:
    ids, target, out = [int(i) for i in np.random.default_rng(5).integers(3, 60, CUTS[-1])], Target(trunk), []
    for a, b in zip(CUTS, CUTS[1:]):
        trial = target.rows(ids[a:b])
        out.append(np.array(trial.logits))
        target.commit(trial, b - a)
    return out, target


def test_graphs_have_the_bits_of_the_calls_one_by_one(trunk):
    (want, plain), before = feed(trunk), trunk.layers[0].before
    joined.join(trunk)
    trunk.routes.ahead = 2
    try:
        got, target = feed(trunk)
        assert len(trunk.layers[0].before.graphs) == 1 and len(trunk.layers[1].after.graphs) == 1
        with joined.parted(trunk):
            assert trunk.layers[0].before == before
        assert isinstance(trunk.layers[0].before, joined.Joined)
    finally:
        joined.part(trunk)
        trunk.routes.ahead = 0
    assert all(np.array_equal(a, b) for a, b in zip(want, got))
    a, b = plain.lane.state(), target.lane.state()
    assert all(np.array_equal(np.array(a[k]), np.array(b[k])) for k in a)


def test_a_changed_operation_is_traced_anew(trunk):
    moe = trunk.layers[-1].moe
    (want, _), experts = feed(trunk), moe.experts
    joined.join(trunk)
    try:
        feed(trunk)
        moe.experts = lambda *args: 2 * experts(*args)
        stale, _ = feed(trunk)
        joined.forget(trunk)
        fresh, _ = feed(trunk)
    finally:
        joined.part(trunk)
        del moe.experts
    assert np.array_equal(want[1], stale[1]), "the planted change is seen by graphs of before"
    assert not np.array_equal(want[1], fresh[1])
