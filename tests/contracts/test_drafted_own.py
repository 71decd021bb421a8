"""Contracts C1 and C2 with the packs' own drafters: DSpark of both families and MTP, taught a little so that they are right now and then."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dsv41chat.engine.draft.depth import FixedDepth
from dsv41chat.engine.draft.load import new_drafter
from dsv41chat.engine.target import Target
from tests import drafting
from tests.drafting import COUNT, DATA, Family, decode, settings

# source pack, kind, stages, block, routes; auto: what the machine's CPU takes, and where that is numpy the drafter's pass is too
KINDS = {
    "v41-dspark": ("v41", "dspark", 3, 5, "stock"),
    "v41-two-stages": ("v41", "dspark", 2, 5, "auto"),
    "v4-dspark": ("v4", "dspark", 3, 5, "stock"),
    "v4-dspark-auto": ("v4", "dspark", 3, 5, "auto"),
    "v4-mtp": ("v4", "mtp", 1, 3, "stock"),
    "v4-mtp-auto": ("v4", "mtp", 1, 3, "auto"),
}


class Own(Family):
    """The same pack with a drafter that has been taught what follows what in plain decode's own answers, which `base` gives."""

    def __init__(self, kind: str, base: Family, folder):
        source, drafter, self.stages, self.block, routes = KINDS[kind]
        self.vocab, self.plain = base.vocab, base.plain
        texts = [self.plain(setting, seed).text for setting in ("greedy", "warm", "penalties") for seed in range(2)]
        own = drafting.write_with_drafter(DATA / source, folder, drafter, drafting.succession(texts), self.stages)
        self.trunk, self.model = drafting.load(own, routes=routes)

    def own(self, setting: str, seed: int, depth, **options):
        return self.drafted(setting, seed, depth, lambda text, vocab: new_drafter(self.model), **options)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The pack without a drafter, by (source, routes): once for all kinds that are made of it."""
    return cache(lambda source, routes: Family(source, tmp_path_factory.mktemp("base"), routes=routes))


@pytest.fixture(scope="module", params=KINDS)
def own(request, bases, tmp_path_factory):
    source, *_, routes = KINDS[request.param]
    return Own(request.param, bases(source, routes), tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize(
    "setting, seed, depths",
    [("greedy", 0, [1, 5]), ("warm", 1, [3, "auto"]), ("penalties", 0, [5, "auto"])]
    + [pytest.param(*rest, marks=pytest.mark.slow) for rest in (("greedy", 0, [3, "auto"]), ("warm", 1, [1, 5]), ("penalties", 0, [1, 3]))],
)
def test_own_drafter_equals_plain(own, setting, seed, depths):
    plain = own.plain(setting, seed)
    for depth in depths:
        run = own.own(setting, seed, depth)
        assert run.text == plain.text, depth
        if depth == "auto":
            assert run.deepest
        else:
            assert run.deepest == min(own.block, depth)
            assert run.accepts and run.rejects, depth


def test_own_drafters_state_does_not_depend_on_the_depth(own):
    """Test T2 for the drafter's lanes: the rings after a drafted answer are those of one that verified nothing."""
    states = []
    for depth in (0, 5):
        run = own.own("warm", 0, depth)
        states.append({k: np.array(v) for k, v in run.drafter.state().items()})
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        for name, want in states[0].items():
            np.testing.assert_array_equal(other[name], want, err_msg=name)


def test_saved_after_any_round_and_loaded(own):
    """Test T7: lane and drafter from a stored state go on as if nothing had happened, acceptance included."""
    plain, whole = own.plain("greedy", 0), own.own("greedy", 0, 3)
    done = 0
    for i, r in enumerate(whole.rounds[:-1]):
        done += len(r.emitted)
        if i % 4:
            continue
        half = decode(own.trunk, own.prompt(0), settings("greedy"), done, new_drafter(own.model), FixedDepth(3))
        if half.rounds != whole.rounds[: i + 1]:
            continue  # the last round of the first half was cut shorter than the whole one's
        target, drafter = Target(own.trunk), new_drafter(own.model)
        target.lane.load(half.target.lane.state())
        drafter.load(half.drafter.state(), target.n)
        rest = decode(own.trunk, half.text, settings("greedy"), COUNT - done, drafter, FixedDepth(3), target=target)
        assert rest.text == plain.text and rest.rounds == whole.rounds[i + 1 :]


def test_a_state_without_the_drafters_lanes_starts_blind(own):
    """An older state has none: the tokens are the same, guesses come at once (DSpark) or after the first round (MTP)."""
    plain, half = own.plain("greedy", 0), 9
    first = decode(own.trunk, own.prompt(0), settings("greedy"), half)
    target, blind = Target(own.trunk), new_drafter(own.model)
    target.lane.load(first.target.lane.state())
    blind.load({}, target.n)
    assert blind.rings.valid_from == blind.rings.end == target.n
    rest = decode(own.trunk, first.text, settings("greedy"), COUNT - half, blind, FixedDepth(3), target=target)
    assert rest.text == plain.text
    assert [r.proposed for r in rest.rounds[:2]] == [0 if blind.kind == "mtp" else 3, 3] and rest.accepts
    assert blind.rings.valid_from == len(first.text) - 1 and blind.rings.end > blind.rings.valid_from


def test_the_pass_is_the_route_s(own):
    """Where numpy arrays pass between a trunk's operations they do so in a DSpark pass, and proposals are those of the MLX pass."""
    run = own.own("greedy", 0, 3)
    if run.drafter.kind == "mtp" or not own.trunk.routes.host:
        assert not getattr(own.model, "host", False)
        return
    assert own.model.host and isinstance(run.drafter.rings.buffers["ring.0"], np.ndarray)
    n, pending = run.target.n, run.text[run.target.n]
    mlx = new_drafter(replace(own.model, host=False))
    mlx.load(run.drafter.state(), n)
    one, two = (d.propose(pending, n, 5, settings("greedy")) for d in (run.drafter, mlx))
    assert one.ids == two.ids and np.allclose(one.confidence, two.confidence, rtol=0, atol=1e-4)
    assert own.own("greedy", 0, 3).rounds == run.rounds
