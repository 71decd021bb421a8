"""Every kernel text under the CPU shim: right against stock in float32, the same bits from both preludes, no row minds the others."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.kernels.cases import ROWS, cases
from tests.engine.kernels.shim import Shim, needs_compiler

pytestmark = needs_compiler


def bits(arrays, rows: int = ROWS) -> list[bytes]:
    return [np.array(mx.contiguous(a[:rows]).view(mx.uint8)).tobytes() for a in arrays]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_text(case):
    got = case.run(Shim("metal"))
    assert all(d <= limit for d, limit in zip(case.distances(got), case.limits, strict=True)), case.distances(got)
    assert bits(case.run(Shim("cuda"))) == bits(got), "the preludes give different bits"
    for rows in (1, 3):
        assert bits(case.run(Shim("metal"), rows)) == bits(got, rows), f"{rows} rows alone have other bits than among {ROWS}"
