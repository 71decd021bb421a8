"""The releases' own shapes, on paper: every hot operation has its kernel, and a step is as few launches as the design says."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from dsv41chat.bench import ops
from dsv41chat.engine.kernels import choose, gpu
from dsv41chat.engine.kernels.recorder import Recorder, arrange
from dsv41chat.engine.kernels.replay import Replay
from dsv41chat.engine.kernels.replay_draft import DraftReplay
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.sites import sites
from dsv41chat.engine.pack.build import arrays_of
from tests.engine.kernels.paper import BUILDS, TRELLISES, call_every_kernel, on_paper, outline, outline_drafter, paper
from tests.engine.kernels.shim import _library, _program, needs_compiler

__all__ = ["paper"]
every = on_paper()


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
    attend = ("tensor_attend", "tensor_merge") if backend.dialect == "cuda" else ("attend_split", "attend_merge")
    unit = backend.dialect == "cuda" and trunk.layers[0].moe.w1.packed.mode == "affine"
    assert all(count[base] == layers for base in (*attend, "route", f"{'tensor_' * unit}experts_up", f"{'tensor_' * unit}experts_down"))
    assert count["finish_rows"] >= 2 * layers
    assert ("tensor_matvec" in count) == (backend.dialect == "cuda" and trunk.layers[0].attention.weights.wq_a.packed.mode == "affine")
    assert sum(count.values()) <= 19 * layers + 32, "the head and the owners of entries come on top"


@pytest.mark.parametrize("build", [*BUILDS, *TRELLISES], ids=" ".join)
def test_a_decode_step_of_a_release_can_be_recorded(build, monkeypatch):
    """At the start, where few entries are seen, where entries are chosen and where blocks of them are; alone and in windows."""
    monkeypatch.setattr(gpu, "_finish_gap", lambda *args: 0.0)
    trunk, notes = outline(*build), Recorder("cuda")
    replay = Replay(trunk, notes, None, gpu.builders(notes), {})
    lane, layers = trunk.new_lane(), len(trunk.layers)
    lane.reserve(40_008)
    for start, rows in ((0, 1), (300, 4), (3000, 1), (40_000, 8)):
        tape, _, results = replay.record(lane, start, rows, True, False)
        assert len(tape.launches) <= (40 if build in TRELLISES else 30) * layers and results[0].shape == (rows, trunk.config.vocab_size)
        assert len(arrange(tape).offsets) and all(p.memory.kind != "fixed" for x in tape.launches for p in x.outputs)


@pytest.mark.parametrize("build", [build for build in BUILDS if build[0] == "V4.1-Flash"], ids=" ".join)
def test_a_drafting_pass_of_a_release_can_be_recorded(build, monkeypatch):
    """All guesses of a block, and committed rows, are a few dozen launches each."""
    monkeypatch.setattr(gpu, "_finish_gap", lambda *args: 0.0)
    trunk, model, notes = outline(*build), outline_drafter(*build), Recorder("cuda")
    model.markov_embed, model.confidence = mx.zeros(model.markov_embed.shape, mx.bfloat16), mx.zeros(model.confidence.shape)
    replay = DraftReplay(Replay(trunk, notes, None, gpu.builders(notes), {}), model, {})
    for form, most in ((("pass", model.block, True), 80), (("pass", 1, False), 60), (("extend",), 12), (("chain",), 2), (("put",), 3)):
        tape, _, results = replay.record(replay.rings(), form)
        assert len(tape.launches) <= most and all(p.memory.kind != "fixed" for x in tape.launches for p in x.outputs)
        assert arrange(tape).nbytes < 32 << 20
    assert results == []


@on_paper((("V4.1-Flash", "affine-4"), "cuda"), (("V4-Flash", "affine-4"), "metal"))
def test_the_copies_of_a_gpu_route_are_counted(paper, monkeypatch):
    """Every float32 matrix that a builder narrows, once; a drafter that shares the trunk's modules adds nothing."""
    trunk, backend, _ = paper
    made, narrowed = {}, gpu.narrowed

    def recorded(module):
        found = narrowed(module)
        if found is not module:
            made[id(module)] = found.weight.nbytes
        return found

    monkeypatch.setattr(gpu, "narrowed", recorded)
    monkeypatch.setattr(choose, "narrowed", recorded)
    for site in list(sites(trunk, trunk)):
        if site.op in ("raw_rows", "router"):
            try:
                gpu.builders(backend)[site.op](site)
            except Declined:
                continue
    assert gpu.narrowed_bytes([trunk], trunk) == gpu.narrowed_bytes([trunk, trunk.layers[:2]], trunk) == sum(made.values()) > 30 << 20


@on_paper(*((build, dialect) for build in BUILDS if build[1] == "affine-4" for dialect in ("metal", "cuda")))
def test_a_decode_step_is_few_primitives(paper):
    """Everything in the graph of a step, launches and the small operations between them. spec: performance, P4."""
    trunk, *_ = paper
    if trunk.config.family == "v41":
        trunk = replace(trunk, hasher=None)
    lane = trunk.new_lane()
    mx.eval(trunk.forward(lane, [5], 0).arrays(), lane.arrays(), arrays_of(trunk))  # constants are there after the first step
    found = ops.count(trunk, 512, ops.LIMIT_KERNELS)
    assert found["mean_per_layer"] <= found["limit"] == 25, found["first_layers"]


@needs_compiler
@pytest.mark.slow
@every
def test_the_texts_compile_for_the_shapes_of_a_release(paper):
    """With the very constants, for one row and eight; nothing is run."""
    trunk, backend, _ = paper
    call_every_kernel(trunk, (1, 8, 40))
    assert len(backend.programs) > 30
    for kernel, inputs, outputs, constants in backend.programs:
        _library(_program(kernel, backend.dialect, list(inputs), list(outputs), dict(constants)))
