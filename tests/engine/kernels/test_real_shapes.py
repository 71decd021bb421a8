"""The releases' own shapes, on paper: every hot operation has its kernel, and a step is as few launches as the design says."""

from __future__ import annotations

import pytest

from tests.engine.kernels.paper import call_every_kernel, on_paper, paper
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
    call_every_kernel(trunk, (1, 8, 40))
    assert len(backend.programs) > 30
    for kernel, inputs, outputs, constants in backend.programs:
        _library(_program(kernel, backend.dialect, list(inputs), list(outputs), dict(constants)))
