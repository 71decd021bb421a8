"""clang's front end, which Metal's is made from, over every Metal text: address spaces, types and overloads, with the constants of the cases
and of the releases. Nothing is compiled to code.

`python -m pytest -m oracle tests/engine/kernels/test_address_spaces.py` (needs the package libclang)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from dsv41chat.engine.kernels.dialect import Kernel, header, source
from dsv41chat.engine.kernels.glue import Scatter
from tests.engine.kernels.cases import cases
from tests.engine.kernels.paper import BUILDS, Paper, call_every_kernel, on_paper, paper
from tests.engine.kernels.test_dialect import DOUBLE

pytestmark = [pytest.mark.oracle, pytest.mark.skipif(importlib.util.find_spec("clang") is None, reason="needs the package libclang")]
__all__ = ["paper"]

# The part of Metal's library that the texts use. C++ lets no local variable live in another address space unless it is static.
LANGUAGE = r"""
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define SHM static threadgroup
typedef unsigned int uint; typedef unsigned short ushort; typedef unsigned long ulong; typedef unsigned char uchar;
typedef uint uint2 __attribute__((ext_vector_type(2))); typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float2 __attribute__((ext_vector_type(2))); typedef float float4 __attribute__((ext_vector_type(4)));
struct bfloat16_t { ushort bits; };
struct float16_t { ushort bits; };
struct atomic_uint { uint value; };
enum memory_order { memory_order_relaxed };
uint atomic_fetch_add_explicit(threadgroup atomic_uint*, uint, memory_order);
uint atomic_load_explicit(threadgroup atomic_uint*, memory_order);
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
template <class T> T simd_shuffle_xor(T, ushort);
template <class T> T simd_shuffle(T, ushort);
template <class T, class F> T as_type(F);
namespace precise { float exp(float); float log(float); float sqrt(float); }
float fma(float, float, float);
"""
_TYPES = {
    mx.float32: "float", mx.uint32: "uint", mx.int32: "int", mx.bfloat16: "bfloat16_t", mx.float16: "float16_t", mx.uint8: "uchar",
    mx.bool_: "bool",
}  # fmt: skip


@cache
def front_end() -> Any:
    from clang import cindex

    return cindex.Index.create()


def errors(kernel: Kernel, inputs: Sequence[tuple[mx.Dtype, bool]], outputs: Sequence[mx.Dtype], constants: Mapping[str, int]) -> list[str]:
    """What the front end says of a text as MLX lays it out: a function template with an instance."""
    space = lambda small: "constant" if small else "device"
    arguments = [(f"const {space(small)} {_TYPES[dtype]}*", name) for name, (dtype, small) in zip(kernel.inputs, inputs)]
    arguments += [(f"device {_TYPES[dtype]}*", name) for name, dtype in zip(kernel.outputs, outputs)]
    arguments += [("uint3", "thread_position_in_threadgroup"), ("uint3", "threadgroup_position_in_grid")]
    arguments += [("uint", "thread_index_in_simdgroup"), ("uint", "simdgroup_index_in_threadgroup")]
    names, values = ", ".join(f"int {name}" for name in constants), ", ".join(map(str, constants.values()))
    text = (
        f"{LANGUAGE}\n{header(kernel, 'metal')}\n"
        f"template <{names}> void {kernel.base}({', '.join(map(' '.join, arguments))}) {{\n{source(kernel, 'metal')}\n}}\n"
        f"template void {kernel.base}<{values}>({', '.join(kind for kind, _ in arguments)});\n"
    )
    found = front_end().parse("kernel.cpp", args=["-std=c++17", "-Wno-everything"], unsaved_files=[("kernel.cpp", text)])
    lines = text.splitlines()
    return [f"{kernel.base}: {d.spelling} | {lines[d.location.line - 1].strip()}" for d in found.diagnostics if d.severity >= 3]


def all_errors(backend: Paper) -> list[str]:
    return [e for kernel, inputs, outputs, constants in backend.programs for e in errors(kernel, inputs, outputs, dict(constants))]


def test_the_cases():
    backend = Paper("metal")
    for case in cases():
        if case.only is None:
            case.run(backend, 1)
            case.run(backend)
    Scatter(backend).into(mx.zeros((1, 64)), mx.zeros((1,), mx.int32), mx.zeros((16, 64)))
    assert len(backend.programs) > 80 and not all_errors(backend)


@on_paper(*((build, "metal") for build in BUILDS))
def test_the_releases(paper):
    trunk, backend, _ = paper
    call_every_kernel(trunk, (1, 8))
    assert not all_errors(backend)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("  const float* p = x;\n  if (tid < N) out[tid] = p[tid];\n", "cannot initialize"),
        ("  SHM float v[4];\n  DEV float* p = v;\n  if (tid < N) p[tid] = x[tid];\n", "cannot initialize"),
        ("  if (tid < N) out[tid] = wsum(x);\n", "no matching function"),
    ],
)
def test_a_fault_is_found(body, word):
    """Casts between address spaces are not among them: plain C++ allows those, and the shim does not."""
    kinds = [(mx.float32, False)], [mx.float32], {"N": 4}
    assert not errors(DOUBLE, *kinds)
    found = errors(replace(DOUBLE, body=body), *kinds)
    assert found and word in found[0], found
