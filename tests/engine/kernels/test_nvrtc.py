"""NVIDIA's compiler takes every CUDA text with the constants of the cases and of the releases, without spilling a register.

`python -m pytest -m oracle tests/engine/kernels/test_nvrtc.py`
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from dsv41chat.engine.kernels import tiles
from dsv41chat.engine.kernels.glue import Scatter
from dsv41chat.engine.kernels.gpu import builders
from dsv41chat.engine.kernels.nvrtc import library
from dsv41chat.engine.kernels.recorder import Recorder
from dsv41chat.engine.kernels.replay import Replay
from dsv41chat.engine.nn import linear as nn
from tests.engine.kernels.cases import Draw, cases
from tests.engine.kernels.nvrtc import compile_kernel
from tests.engine.kernels.paper import BUILDS, TRELLISES, Paper, call_every_kernel, on_paper, outline, paper

pytestmark = [pytest.mark.oracle, pytest.mark.skipif(library() is None, reason="needs the package nvidia-cuda-nvrtc")]
__all__ = ["paper"]


def compiled(backend: Paper, architecture: str) -> None:
    for program in backend.programs:
        kernel, inputs, outputs, constants = program
        found = compile_kernel(kernel, [dtype for dtype, _ in inputs], outputs, dict(constants), architecture)
        assert not found.spills and found.registers <= 255 and found.shared <= 48 << 10, (kernel.base, constants, found)
        # Registers are given out by eights; a group that wants more than a processor has does not start.
        assert -(-found.registers // 8) * 8 * backend.threads[program] <= 1 << 16, (kernel.base, constants, found, backend.threads[program])
        # What a launch brings of shared memory is bounded by the smallest processor, of generation 12.
        assert dict(constants).get("SHARED_BYTES", 0) <= 99 << 10, (kernel.base, constants)
        assert kernel.bounds is None or backend.threads[program] <= kernel.bounds[0], (kernel.base, constants, backend.threads[program])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
def test_the_cases(architecture):
    backend = Paper("cuda")
    for case in cases():
        case.run(backend)
    Scatter(backend).into(mx.zeros((8, 64)), mx.zeros((8,), mx.int32), mx.zeros((16, 64)))
    bases = {kernel.base for kernel, *_ in backend.programs}
    assert bases >= {
        "matvec", "tensor_matvec", "tensor_plain", "tensor_tiles", "tile_order", "join_picks", "tensor_rows", "tensor_narrow", "tensor_groups",
        "experts_up", "experts_down", "tensor_experts_up", "tensor_experts_down",
        "exl3_matvec", "exl3_tensor", "exl3_tensor_up",
        "exl3_tensor_down", "exl3_latent", "exl3_join_turn", "exl3_queries", "exl3_raw", "hyper_spread", "hyper_finish", "tensor_spread",
        "attend_split", "attend_merge", "tensor_attend", "tensor_merge", "tensor_prompt", "index_scores", "top_k", "route", "finish_rows",
        "decode_matrix", "embed", "settle", "engram", "head_mix", "collapse", "pool_groups", "scatter", "first_visible", "block_top", "keep_blocks",
        "scaled", "hadamard", "finish_two", "decode_three",
    }  # fmt: skip
    compiled(backend, architecture)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_wide_tiles_of_a_prompt(architecture):
    """They take as many registers as there are; every form of the weights has to leave room."""
    backend, d, E, D, I = Paper("cuda", warpgroups=architecture == "sm_90a"), Draw(1), 2, 256, 128
    x, ids, weight = mx.zeros((128, D), mx.bfloat16), mx.zeros((128, 2), mx.int32), mx.zeros((128, 2))
    for mode, bits, group, *scales in [("affine", b, 64) for b in (2, 4, 6, 8)] + [("affine", 4, 32, mx.float32), ("mxfp4", 4, 32), ("mxfp8", 8, 32)]:
        up, down = (nn.QuantizedExpertLinear(d.packed((E, *shape), mode, bits, group, *scales), mx.bfloat16) for shape in ((I, D), (D, I)))
        s1, s2 = (nn.QuantizedLinear(d.packed(shape, mode, bits, group, *scales)) for shape in ((I, D), (D, I)))
        experts = tiles.TileExperts(backend, (up, up), down, (s1, s1), s2, 2.0, None)
        for n in (128, 40):
            experts(x[:n], ids[:n], weight[:n])
        grouped = tiles.GroupsProduct(backend, nn.QuantizedGroupedLinear(d.packed((2, 256, 64), mode, bits, group, *scales)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "_BUSY", 0)
            grouped(x)
    matrix = nn.Linear(mx.zeros((2048, D), mx.bfloat16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_BUSY", 0)
        for second in (None, matrix):
            tiles.RowsProduct(backend, matrix, second)(x)
    together = {dict(constants)["WG"] for kernel, *_, constants in backend.programs if kernel is tiles.TENSOR_TILES}
    assert together == {int(architecture == "sm_90a")}
    assert {dict(constants).get("NT", tiles.WIDE) for *_, constants in backend.programs} == {tiles.WIDE, tiles.MIDDLE}
    compiled(backend, architecture)


@on_paper(*((build, "cuda") for build in BUILDS + TRELLISES))
def test_the_releases(paper):
    trunk, backend, _ = paper
    call_every_kernel(trunk, (1, 8, 40))
    compiled(backend, "sm_90")


@pytest.mark.parametrize("build", TRELLISES, ids=lambda build: build[0])
def test_recorded_steps_of_trellises(build):
    """What takes over other launches there is called nowhere else."""
    trunk, notes, seen = outline(*build), Recorder("cuda"), set()
    replay = Replay(trunk, notes, None, builders(notes), {})
    lane = replay._lane()
    lane.reserve(4104)
    for x in replay.record(lane, 4096, 8, True, False)[0].launches:
        program = x.kernel, tuple(p.dtype for p in x.inputs), tuple(p.dtype for p in x.outputs), tuple(x.constants.items())
        if program not in seen:
            seen.add(program)
            found = compile_kernel(*program[:3], dict(program[3]), "sm_90")
            assert not found.spills and -(-found.registers // 8) * 8 * x.threads <= 1 << 16, (x.kernel.base, x.constants, found)
    assert {"hyper_joined", "exl3_latent", "exl3_queries", "exl3_join_turn"} <= {kernel.base for kernel, *_ in seen}
