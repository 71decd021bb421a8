"""Saving and loading the golden's lane at the offsets that are easy to get wrong, and what exactly is kept."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.errors import SnapshotMismatch
from dsv41chat.engine.target import Target
from tests.engine.v4 import golden as g


@pytest.fixture(scope="module")
def whole(quick_trunk, ids):
    return g.feed(quick_trunk, ids, [len(ids)])[0]


@pytest.mark.parametrize("n", [3, 127, 128, 131, 383])
def test_save_and_go_on(quick_trunk, ids, whole, n):
    """A rotated window, a half-filled ratio-128 group, the carried half of the overlap: bitwise state, equal continuation."""
    _, target = g.feed(quick_trunk, ids, g.even(n, 50))
    state = target.lane.state()
    resumed = Target(quick_trunk)
    resumed.lane.load(state)
    assert not g.differing(g.state_of(target.lane), g.state_of(resumed.lane))
    count = min(len(ids), n + 9) - n
    out, _ = g.feed(quick_trunk, ids, [1, 2, *g.even(count - 3, 3)], resumed)
    assert g.same_bits(out, whole[n : n + count])


def test_saved_rows_are_the_minimum(quick_trunk, ids):
    """Window rows, n // ratio entries and keys, and the raw rows of the open group with the group before it where groups overlap."""
    _, target = g.feed(quick_trunk, ids, [131])
    state = target.lane.state()
    shapes = {name: len(v) for name, v in state.items() if name.endswith((".1", ".2", ".5"))}
    assert shapes == {
        "window.1": 32, "pool.1": 32, "raw.1": 7, "keys.1": 32, "raw_keys.1": 7, "window.2": 32, "pool.2": 1, "raw.2": 3, "window.5": 32,
    }  # fmt: skip
    assert state["raw.1"].dtype == mx.float32 and state["raw.1"].shape[1:] == (2, 64)


def test_a_state_of_another_shape_is_refused(quick_trunk, ids):
    _, target = g.feed(quick_trunk, ids, [40])
    state = target.lane.state()
    state["raw.1"] = state["raw.1"].astype(mx.bfloat16)
    resumed = Target(quick_trunk)
    with pytest.raises(SnapshotMismatch, match="raw.1"):
        resumed.lane.load(state)
    assert resumed.n == 0


@pytest.mark.parametrize("lost", ["raw.3", "raw_keys.1", "keys.3", "window.0", "pool.2"])
def test_every_part_of_the_state_matters(quick_trunk, ids, whole, lost):
    """Each kind of row, zeroed in a saved state, changes what comes after."""
    n = 131
    _, target = g.feed(quick_trunk, ids, [n])
    state = target.lane.state()
    state[lost] = mx.zeros_like(state[lost])
    resumed = Target(quick_trunk)
    resumed.lane.load(state)
    out, _ = g.feed(quick_trunk, ids, [9], resumed)
    assert not np.array_equal(out, whole[n : n + 9])
