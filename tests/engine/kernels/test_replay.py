"""Recorded steps, played under the CPU shim in any order that they allow: what a built step computes, row by row, in every form."""

from __future__ import annotations

import numpy as np
import pytest

from dsv41chat.engine.kernels.gpu import builders
from dsv41chat.engine.kernels.recorder import Recorder
from dsv41chat.engine.kernels.replay import Replay
from dsv41chat.engine.target import Target
from tests.engine.kernels.play import ShimPlayer
from tests.engine.kernels.shim import needs_compiler
from tests.engine.kernels.test_gpu_route import apart, nano, put, tiny_v4, tokens

pytestmark = needs_compiler


def replayed(trunk):
    recorder = Recorder("cuda")
    trunk.routes.replay = Replay(trunk, recorder, ShimPlayer(), builders(recorder), {})
    return trunk


@pytest.fixture(scope="module", params=["v41", "v4"])
def trunk(request, tmp_path_factory):
    made = nano() if request.param == "v41" else tiny_v4(tmp_path_factory.mktemp("v4"))
    return replayed(put(made, "cuda", "cuda"))


def feed(trunk, ids, cuts, replay=True):
    kept, out = trunk.routes.replay, []
    trunk.routes.replay = kept if replay else None
    target = Target(trunk)
    for a, b in zip(cuts, cuts[1:]):
        trial = target.rows(ids[a:b])
        out.append(np.array(trial.logits))
        target.commit(trial, b - a)
    trunk.routes.replay = kept
    return np.concatenate(out), target


def test_single_rows(trunk):
    ids = list(tokens(96))
    cuts = [0, 20, *range(21, 36)]
    want, _ = feed(trunk, ids, cuts, False)
    got, _ = feed(trunk, ids, cuts)
    gaps = [apart(g, w) for g, w in zip(got[20:], want[20:])]
    assert max(gaps) < 2e-2, gaps
