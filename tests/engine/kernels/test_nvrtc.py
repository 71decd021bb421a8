"""NVIDIA's compiler takes every CUDA text with the constants of the cases and of the releases, without spilling a register.

`python -m pytest -m oracle tests/engine/kernels/test_nvrtc.py`
"""

from __future__ import annotations

import numpy as np
import pytest

from dsv41chat.engine.kernels.nvrtc import library
from dsv41chat.engine.kernels.sites import Routed, sites
from tests.engine.kernels.cases import cases
from tests.engine.kernels.nvrtc import compile_kernel
from tests.engine.kernels.test_real_shapes import BUILDS, Paper, paper

pytestmark = [pytest.mark.oracle, pytest.mark.skipif(library() is None, reason="needs the package nvidia-cuda-nvrtc")]
__all__ = ["paper"]


def compiled(backend: Paper, architecture: str) -> None:
    for kernel, inputs, outputs, constants in backend.programs:
        found = compile_kernel(kernel, [dtype for dtype, _ in inputs], outputs, dict(constants), architecture)
        assert not found.spills and found.registers <= 255 and found.shared <= 32 << 10, (kernel.base, constants, found)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
def test_the_cases(architecture):
    backend = Paper("cuda")
    for case in cases():
        case.run(backend)
    bases = {kernel.base for kernel, *_ in backend.programs}
    assert bases >= {
        "matvec", "tensor_matvec", "tensor_tiles", "experts_up", "experts_down", "exl3_matvec", "hyper_spread", "hyper_finish",
        "attend_split", "attend_merge", "index_scores", "top_k", "route", "finish_rows", "decode_matrix",
    }  # fmt: skip
    compiled(backend, architecture)


@pytest.mark.parametrize("paper", [(build, "cuda") for build in BUILDS], indirect=True, ids=lambda way: " ".join(way[0]))
def test_the_releases(paper):
    trunk, backend, _ = paper
    rng, seen = np.random.default_rng(0), set()
    for site in sites(trunk, trunk):
        if isinstance(site.value, Routed) and site.key not in seen:
            seen.add(site.key)
            for rows in (1, 8, 40):
                site.value.inner(*site.inputs(rows, rng))
    compiled(backend, "sm_90")
