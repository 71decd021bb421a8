"""The releases' own shapes, on paper: every hot operation has its kernel, and a step is as few launches as the design says."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.convert.layout import plan_groups
from dsv41chat.engine.convert.recipes import Choice
from dsv41chat.engine.kernels import gpu
from dsv41chat.engine.kernels.dialect import SMALL_ELEMENTS
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.sites import Routed, sites
from dsv41chat.engine.pack.build import outline_trunk
from dsv41chat.engine.pack.dialects import release_tensors
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.paper import release_pack
from dsv41chat.engine.published import RELEASES
from tests.engine.kernels.shim import _library, _program, needs_compiler

BUILDS = (("V4.1-Flash", "native"), ("V4-Flash", "native"), ("V4-Pro", "native"), ("V4.1-Flash", "affine-4"), ("V4-Flash", "affine-4"))


class Paper:
    """A `Backend` that launches nothing: it keeps what would have been compiled and counts the launches."""

    lazy = True

    def __init__(self, dialect: str):
        self.dialect, self.launches, self.programs = dialect, Counter(), set()

    def run(self, kernel, inputs, constants, groups, threads, outputs):
        assert kernel.only in (None, self.dialect) and threads % 32 == 0 and threads <= 1024 and all(g >= 1 for g in groups)
        self.launches[kernel.base] += 1
        arguments = tuple((a.dtype, a.size < SMALL_ELEMENTS) for a in inputs)
        self.programs.add((kernel, arguments, tuple(dtype for _, dtype in outputs), tuple(constants.items())))
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]


@cache
def outline(name: str, recipe: str):
    """The trunk of a release, or of its conversion, with few experts; its arrays have shapes and are never read."""
    outer = copy.deepcopy(RELEASES[name])
    outer.get("text_config", outer)["n_routed_experts"] = 8
    pack = release_pack(outer)
    if recipe != "native":
        groups = plan_groups(pack, Choice.of(recipe, None, "keep", pack.config.num_hidden_layers))
        found = {t.name: TensorRef(t.name, Path("paper"), t.tag, t.shape, 8, t.nbytes) for group in groups for t in group.tensors}
        pack = replace(pack, index=replace(pack.index, tensors=release_tensors(found)))
    return outline_trunk(pack, dtype=mx.bfloat16, packed=True)


@pytest.fixture
def paper(request, monkeypatch):
    """(trunk, backend, what was declined by op) with everything that can be in place."""
    build, dialect = request.param
    monkeypatch.setattr(gpu, "_finish_gap", lambda *args: 0.0)
    trunk, backend, declined = outline(*build), Paper(dialect), {}
    build = gpu.builders(backend)
    for site in list(sites(trunk, trunk)):
        if site.op in build:
            try:
                monkeypatch.setattr(site.owner, site.field, Routed(dialect, build[site.op](site), site.stock), raising=False)
            except Declined as reason:
                declined.setdefault(site.op, set()).add(str(reason))
    backend.launches.clear()
    yield trunk, backend, declined
    gpu._finish_gaps.clear()


WAYS = [(build, dialect) for build in BUILDS for dialect in ("metal", "cuda")]
every = pytest.mark.parametrize("paper", WAYS, indirect=True, ids=lambda way: " ".join((*way[0], way[1])))


@every
def test_every_hot_operation_of_a_release_has_a_kernel(paper):
    """An empty reason: the operation has nothing to compute there, or another one serves it."""
    _, _, declined = paper
    plain = declined.pop("matrix")
    assert plain <= {"", "Linear stays with the stock product"} and all(reasons == {""} for reasons in declined.values()), declined


@every
def test_a_decode_step_is_few_launches(paper):
    trunk, backend, _ = paper
    lane = trunk.new_lane()
    trunk.forward(lane, [5], 300)
    count, layers = backend.launches, len(trunk.layers)
    assert count["hyper_spread"] == count["hyper_finish"] == 2 * layers
    assert count["attend_split"] == count["attend_merge"] == count["experts_up"] == count["experts_down"] == count["route"] == layers
    assert count["finish_rows"] >= 2 * layers
    assert ("tensor_matvec" in count) == (backend.dialect == "cuda" and trunk.layers[0].attention.weights.wq_a.packed.mode == "affine")
    assert sum(count.values()) <= 19 * layers + 32, "the head and the owners of entries come on top"


@needs_compiler
@pytest.mark.slow
@every
def test_the_texts_compile_for_the_shapes_of_a_release(paper):
    """With the very constants, for one row and eight; nothing is run."""
    trunk, backend, _ = paper
    rng, seen = np.random.default_rng(0), set()
    for site in sites(trunk, trunk):
        if isinstance(site.value, Routed) and site.key not in seen:
            seen.add(site.key)
            for rows in (1, 8, 40):
                site.value.inner(*site.inputs(rows, rng))
    assert len(backend.programs) > 30
    for kernel, inputs, outputs, constants in backend.programs:
        _library(_program(kernel, backend.dialect, list(inputs), list(outputs), dict(constants)))
