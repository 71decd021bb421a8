"""The kernels on this machine's GPU against what the CPU shim recorded: `python -m pytest -m device tests/engine/kernels -s`."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.device import device_kind
from dsv41chat.engine.kernels.cuda import BACKEND as CUDA
from dsv41chat.engine.kernels.launch import MetalBackend
from tests.engine.kernels.cases import ROWS, cases
from tests.engine.kernels.record import raw, record_of

KIND = device_kind()
# Drawn on the CPU, where the record was made: an operation stays on the stream that it was made on.
with mx.stream(mx.cpu):
    CASES = {case.name: case for case in cases()}
BACKEND = CUDA if KIND == "cuda" else MetalBackend()
pytestmark = [pytest.mark.device, pytest.mark.skipif(KIND == "cpu", reason="needs a GPU that MLX computes on")]


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_on_the_device(name):
    case = CASES[name]
    if case.only not in (None, KIND):
        pytest.skip(f"a {case.only} kernel")
    got = case.run(BACKEND)
    mx.eval(got)
    # MLX's compiled functions need a compiler of the machine's own on the CPU, and not every machine's is taken.
    mx.disable_compile()
    with mx.stream(mx.cpu):
        distances = case.distances(got)
    mx.enable_compile()
    assert all(d <= limit for d, limit in zip(distances, case.limits, strict=True)), distances
    want = record_of(case)
    for i, (a, b) in enumerate(zip(got, want or ())):
        differing = int((raw(a) != b).sum())
        print(f"{name}, result {i}: {differing} of {b.size} bytes differ from the shim, {distances[i]:.1e} from stock")
        assert i in case.close or not differing, "the text computes other bits here than on the CPU"
    for rows in range(1, ROWS) if case.rows == ROWS else case.fewer:
        few, wrong = case.run(BACKEND, rows), f"{rows} rows alone have other bits than among {case.rows}"
        assert all(np.array_equal(raw(x), raw(y[: x.shape[0]])) for x, y in zip(few, got)), wrong
