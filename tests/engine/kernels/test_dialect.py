"""What MLX is handed: names, arguments, and what the shim refuses that a device would refuse too."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from dsv41chat.engine.kernels import launch
from dsv41chat.engine.kernels.dialect import DIALECTS, Kernel, header, kernel_name, source
from dsv41chat.engine.kernels.text_matrix import MATVEC
from tests.engine.kernels.shim import Shim, needs_compiler

DOUBLE = Kernel("double_it", ("x",), ("out",), "  if (tid < N) out[tid] = 2.0f * x[tid];\n")


def test_a_name_stands_for_one_text_and_one_set_of_types():
    kinds = ("bfloat16", "uint32"), ("float32", "uint32"), ("bfloat16", "uint32", "True")
    names = {kernel_name(k, d, kind) for k in (MATVEC, replace(MATVEC, body=MATVEC.body + " ")) for d in DIALECTS for kind in kinds}
    assert len(names) == 12 and all(name.isidentifier() for name in names)


def test_metal_gets_the_strings_that_the_shim_compiles(monkeypatch):
    made, calls = [], []

    def fake(**options):
        made.append(options)
        return lambda **call: calls.append(call) or ["result"]

    monkeypatch.setattr(mx.fast, "metal_kernel", fake, raising=False)
    run = launch.MetalBackend().run
    for size in (16, 16, 4):
        assert run(DOUBLE, [mx.zeros((size,))], {"N": 4}, (3, 2, 1), 32, [((4,), mx.float32)]) == ["result"]
    assert len(made) == 2 and made[0]["name"] != made[1]["name"], "an input below 8 elements is another type on Metal"
    assert made[0]["source"] == source(DOUBLE, "metal") and made[0]["header"] == header(DOUBLE, "metal")
    assert made[0]["input_names"] == ["x"] and made[0]["output_names"] == ["out"]
    assert calls[0]["grid"] == (96, 2, 1) and calls[0]["threadgroup"] == (32, 1, 1) and calls[0]["template"] == [("N", 4)]
    assert calls[0]["output_shapes"] == [(4,)] and calls[0]["output_dtypes"] == [mx.float32]


@needs_compiler
@pytest.mark.parametrize("dialect", DIALECTS)
def test_small_inputs_can_be_indexed_and_not_cast(dialect):
    x = mx.array([1.0, -2.0, 3.0, 0.5])
    assert Shim(dialect).run(DOUBLE, [x], {"N": 4}, (1, 1, 1), 32, [((4,), mx.float32)])[0].tolist() == [2.0, -4.0, 6.0, 1.0]
    cast = replace(DOUBLE, body="  DEV const float* p = (DEV const float*)x;\n  if (tid < N) out[tid] = 2.0f * p[tid];\n")
    if dialect == "metal":
        with pytest.raises(AssertionError, match="does not compile"):
            Shim(dialect).run(cast, [x], {"N": 4}, (1, 1, 1), 32, [((4,), mx.float32)])
    else:
        Shim(dialect).run(cast, [x], {"N": 4}, (1, 1, 1), 32, [((4,), mx.float32)])


@needs_compiler
@pytest.mark.parametrize("dialect", DIALECTS)
def test_barriers_and_shuffles_between_many_simd_groups(dialect):
    """A prefix sum over 320 threads, whose SIMD groups finish at different times."""
    text = Kernel(
        "prefix", ("x",), ("out",),
        """
  SHM float part[32];
  float v = x[gx * 320 + tid];
  for (u32 i = 0; i < sg; i++) v += 0.0f * wsum(v);
  UNROLL for (int o = 1; o < 32; o <<= 1) { const float z = SHIDX(v, (lane - o) & 31u); if (lane >= (u32)o) v += z; }
  if (lane == 31) part[sg] = v;
  BARRIER();
  float before = 0.0f;
  for (u32 i = 0; i < sg; i++) before += part[i];
  out[gx * 320 + tid] = v + before;
""",
    )  # fmt: skip
    x = mx.arange(640).astype(mx.float32)
    (out,) = Shim(dialect).run(text, [x], {}, (2, 1, 1), 320, [((640,), mx.float32)])
    assert out.tolist() == mx.cumsum(x.reshape(2, 320), axis=1).reshape(-1).tolist()
