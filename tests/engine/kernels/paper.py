"""Releases on paper: their trunks with every kernel in place, and a back end that launches nothing."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.bench import shapes
from dsv41chat.engine.convert.layout import plan_groups
from dsv41chat.engine.convert.recipes import Choice
from dsv41chat.engine.draft.load import load_draft_model
from dsv41chat.engine.kernels import gpu
from dsv41chat.engine.kernels.dialect import SMALL_ELEMENTS
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.sites import Routed, sites
from dsv41chat.engine.pack.build import Pack, outline_trunk, weight_source
from dsv41chat.engine.pack.dialects import release_tensors
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.paper import release_pack
from dsv41chat.engine.published import RELEASES

BUILDS = (("V4.1-Flash", "native"), ("V4-Flash", "native"), ("V4-Pro", "native"), ("V4.1-Flash", "affine-4"), ("V4-Flash", "affine-4"))

TRELLISES = (("V4.1-Flash", "exl3"), ("V4-Flash", "exl3"))


class Paper:
    """A `Backend` that launches nothing: it keeps what would have been compiled, with the largest group, and counts the launches."""

    lazy = True

    def __init__(self, dialect: str, warpgroups: bool = False):
        self.dialect, self.warpgroups, self.launches, self.programs, self.threads = dialect, warpgroups, Counter(), set(), Counter()

    def run(self, kernel, inputs, constants, groups, threads, outputs):
        assert kernel.only in (None, self.dialect) and threads % 32 == 0 and threads <= 1024 and all(g >= 1 for g in groups)
        self.launches[kernel.base] += 1
        arguments = tuple((a.dtype, a.size < SMALL_ELEMENTS) for a in inputs)
        program = kernel, arguments, tuple(dtype for _, dtype in outputs), tuple(constants.items())
        self.programs.add(program)
        self.threads[program] = max(self.threads[program], threads)
        results = [_nothing(tuple(shape), dtype) for shape, dtype in outputs]
        # One node per launch, which hangs on its inputs, so that the graph is that of a step.
        return mx.depends(results, list(inputs))

    def run_into(self, kernel, inputs, constants, groups, threads, targets):
        return self.run(kernel, inputs, constants, groups, threads, [(a.shape, a.dtype) for a in targets])


@cache
def _nothing(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    made = mx.zeros(shape, dtype)
    mx.eval(made)
    return made


@cache
def outline(name: str, recipe: str):
    """The trunk of a release, or of its conversion, with few experts; its arrays have shapes and are never read. exl3: of 3 bits."""
    return outline_trunk(_pack(name, recipe), dtype=mx.bfloat16, packed=True)


def outline_drafter(name: str, recipe: str):
    """The drafter of the same build, on its trunk."""
    pack, trunk = _pack(name, recipe), outline(name, recipe)
    return load_draft_model(pack.found.plan, trunk, weight_source(pack, pack.found.plan.expected, dtype=trunk.dtype, packed=True, empty=True), False)


@cache
def _pack(name: str, recipe: str) -> Pack:
    if recipe == "exl3":
        return shapes.outline_pack({"V4.1-Flash": "v41", "V4-Flash": "v4"}[name], experts=8, bits=3, form="exl3")
    outer = copy.deepcopy(RELEASES[name])
    text = outer.get("text_config", outer)
    text |= {key: 8 for key in ("n_routed_experts", "dspark_n_routed_experts") if key in text}
    pack = release_pack(outer)
    if recipe != "native":
        groups = plan_groups(pack, Choice.of(recipe, None, "keep", pack.config.num_hidden_layers))
        found = {t.name: TensorRef(t.name, Path("paper"), t.tag, t.shape, 8, t.nbytes) for group in groups for t in group.tensors}
        pack = replace(pack, index=replace(pack.index, tensors=release_tensors(found)))
    return pack


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


def on_paper(*ways: tuple[tuple[str, str], str]) -> Any:
    """Parametrises the fixture `paper` by (build, dialect); without any, by all."""
    chosen = ways or [(build, dialect) for build in BUILDS for dialect in ("metal", "cuda")]
    return pytest.mark.parametrize("paper", chosen, indirect=True, ids=lambda way: " ".join((*way[0], way[1])))


def call_every_kernel(trunk: Any, rows: Sequence[int]) -> None:
    """Each kind of site once per number of rows."""
    rng, seen = np.random.default_rng(0), set()
    for site in sites(trunk, trunk):
        if isinstance(site.value, Routed) and site.key not in seen:
            seen.add(site.key)
            for n in rows:
                site.value.inner(*site.inputs(n, rng))
