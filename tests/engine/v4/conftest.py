"""Runs that several files of this folder look at."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from dsv41chat.engine.pack.build import Pack, build_trunk, open_pack
from dsv41chat.engine.target import Target
from dsv41chat.engine.trunk_v4 import TrunkV4
from tests.engine.v4 import golden as g
from tests.engine.v4 import tiny


@pytest.fixture(scope="package", autouse=True)
def on_cpu():
    """Bits are compared here, which is promised of the CPU's stock operations."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="session")
def pack() -> Pack:
    return open_pack(g.FOLDER)


@pytest.fixture(scope="session")
def golden() -> dict:
    return g.read_golden()


@pytest.fixture(scope="session")
def ids(golden) -> list[int]:
    return golden["input_ids"].tolist()


@pytest.fixture(scope="session")
def trunk(pack) -> TrunkV4:
    return build_trunk(pack, dtype=mx.float32)


@pytest.fixture(scope="session")
def oneshot(trunk, ids):
    """(trial, lane, module outputs) of the golden sequence in one call, float32."""
    watched, seen = g.recorded(trunk)
    target = Target(watched)
    trial = target.rows(ids, want_taps=True)
    target.commit(trial, trial.count)
    return trial, target.lane, seen


@pytest.fixture(scope="session")
def tiny_pack(tmp_path_factory) -> Pack:
    folder = tmp_path_factory.mktemp("tiny_v4")
    tiny.write_pack(folder)
    return open_pack(folder)


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def tiny_trunk(request, tiny_pack) -> TrunkV4:
    return build_trunk(tiny_pack, dtype=getattr(mx, request.param))


@pytest.fixture(scope="session")
def quick_trunk(pack) -> TrunkV4:
    """The golden trunk with one Sinkhorn pass: other values, the same layout, a fraction of the time."""
    return build_trunk(replace(pack, config=replace(pack.config, hc_sinkhorn_iters=1)), dtype=mx.float32)
