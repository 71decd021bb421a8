"""One kernel text for Metal and CUDA: the preludes, and the strings that MLX compiles.

A body is written once in the macros below. `source` and `header` give the very strings that `mx.fast.metal_kernel` and
`mx.fast.cuda_kernel` get; the CPU tests compile the same strings. Source: spec: kernels, sections 2 and 8.

Rules of the dialect, so that every back end computes the same bits: each multiply-add is an explicit FMA or a MUL that is not
contracted, each sum has a fixed order (no library reduction, no atomic float), shuffles are never an argument of a macro that may
skip them, shared arrays stand at the outermost scope, offsets into stacked experts are 64 bits wide, and lengths that change from
step to step come in as arrays.

In a recorded step on CUDA a launch may start its groups while the one before it still runs (`driver.Node`). NEXT() allows that to the
launch that follows, at once; AFTER() waits until all that came before is done and seen. Both are nothing where it does not happen.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

DIALECTS = ("metal", "cuda")
# Metal passes inputs with fewer elements in another address space (`constant`). A body may index such an input and must not cast it.
SMALL_ELEMENTS = 8

_METAL = """
#pragma clang fp contract(off)
#define DEV device
#define THREAD thread
#ifndef SHM
#define SHM threadgroup
#endif
#define FN static inline
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHXOR(v, m) simd_shuffle_xor(v, m)
#define SHIDX(v, i) simd_shuffle(v, i)
#define FMA(a, b, c) fma(a, b, c)
#define MUL(a, b) ((a) * (b))
#define EXPF(x) precise::exp(x)
#define LOGF(x) precise::log(x)
#define SQRTF(x) precise::sqrt(x)
#define UNROLL _Pragma("clang loop unroll(full)")
#define ATOMIC_INC(p) atomic_fetch_add_explicit((threadgroup atomic_uint*)(p), 1u, memory_order_relaxed)
#define ATOMIC_GET(p) atomic_load_explicit((threadgroup atomic_uint*)(p), memory_order_relaxed)
typedef uint u32; typedef ushort u16; typedef ulong u64; typedef uchar u8;
FN float asf(u32 v) { return as_type<float>(v); }
FN u32 asu(float v) { return as_type<u32>(v); }
"""

_CUDA = """
#define DEV
#define THREAD
#define SHM __shared__
#define FN __device__ __forceinline__
#define BARRIER() __syncthreads()
#define SHXOR(v, m) __shfl_xor_sync(0xffffffffu, v, m)
#define SHIDX(v, i) __shfl_sync(0xffffffffu, v, i)
#define FMA(a, b, c) __fmaf_rn(a, b, c)
#define MUL(a, b) __fmul_rn(a, b)
#define EXPF(x) expf(x)
#define LOGF(x) logf(x)
#define SQRTF(x) sqrtf(x)
#define UNROLL _Pragma("unroll")
#define ATOMIC_INC(p) atomicAdd(p, 1u)
#define ATOMIC_GET(p) (*(p))
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define NEXT() asm volatile("griddepcontrol.launch_dependents;")
#define AFTER() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define NEXT()
#define AFTER()
#endif
typedef unsigned int u32; typedef unsigned short u16; typedef unsigned long long u64; typedef unsigned char u8;
FN float asf(u32 v) { return __uint_as_float(v); }
FN u32 asu(float v) { return __float_as_uint(v); }
"""

# MX and MN are functions: a macro would evaluate a shuffle in one branch only.
_COMMON = """
FN float MX(float a, float b) { return a > b ? a : b; }
FN float MN(float a, float b) { return a < b ? a : b; }
FN u32 UMX(u32 a, u32 b) { return a > b ? a : b; }
FN u32 UMN(u32 a, u32 b) { return a < b ? a : b; }
FN float FABS(float a) { return asf(asu(a) & 0x7fffffffu); }
FN float bf2f(u32 h) { return asf(h << 16); }
FN u32 f2bf(float f) { u32 u = asu(f); return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16; }
FN float rbf(float f) { return bf2f(f2bf(f)); }
FN u32 pack2(float a, float b) { return f2bf(a) | (f2bf(b) << 16); }
FN float h2f(u32 h) {
  const u32 m = h & 0x7fffu;
  const float f = m < 0x400u ? asf(0x38800000u | (m << 13)) - asf(0x38800000u) : asf((m << 13) + 0x38000000u);
  return asf(asu(f) | ((h & 0x8000u) << 16));
}
FN float wsum(float v) {
  v += SHXOR(v, 16); v += SHXOR(v, 8); v += SHXOR(v, 4); v += SHXOR(v, 2); v += SHXOR(v, 1);
  return v;
}
FN float sigm(float x) { return 1.0f / (1.0f + EXPF(-x)); }
FN void bf2(u32 t, THREAD float* v) { v[0] = asf(t << 16); v[1] = asf(t & 0xffff0000u); }
FN void bf8(uint4 t, THREAD float* v) { bf2(t.x, v); bf2(t.y, v + 2); bf2(t.z, v + 4); bf2(t.w, v + 6); }
// N (2, 4 or 8) neighbouring values of an array of bf16 (WIDE 0) or fp32 (WIDE 1); p points at the array's words, i is an element
template <int N, int WIDE> FN void loadn(DEV const u32* p, u64 i, THREAD float* v) {
  if (WIDE) {
    if (N % 4 == 0) {
      UNROLL for (int j = 0; j < N; j += 4) {
        const float4 t = *(DEV const float4*)(p + i + j);
        v[j] = t.x; v[j + 1] = t.y; v[j + 2] = t.z; v[j + 3] = t.w;
      }
    } else {
      const float2 t = *(DEV const float2*)(p + i);
      v[0] = t.x; v[1] = t.y;
    }
  } else if (N == 8) {
    bf8(*(DEV const uint4*)(p + i / 2), v);
  } else if (N == 4) {
    const uint2 t = *(DEV const uint2*)(p + i / 2);
    bf2(t.x, v); bf2(t.y, v + 2);
  } else {
    bf2(p[i / 2], v);
  }
}
"""

# Metal declares an attribute only when its name occurs in the source, so they are all named here.
_METAL_PROLOGUE = """
  const u32 tid = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
  const u32 gx = threadgroup_position_in_grid.x, gy = threadgroup_position_in_grid.y, gz = threadgroup_position_in_grid.z;
  (void)tid; (void)lane; (void)sg; (void)gx; (void)gy; (void)gz;
"""

_CUDA_PROLOGUE = """
  const u32 tid = threadIdx.x, lane = threadIdx.x & 31u, sg = threadIdx.x >> 5;
  const u32 gx = blockIdx.x, gy = blockIdx.y, gz = blockIdx.z;
  (void)tid; (void)lane; (void)sg; (void)gx; (void)gy; (void)gz;
  NEXT();
"""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel text, compared by identity: it is looked up at every launch.

    base: its name; inputs, outputs: argument names in order; body: statements; helpers: functions before it.

    only: the one dialect that it can be compiled in, None for both. early: the body itself says AFTER() in every thread, before it reads or
    writes what another launch writes; until then it may fetch weights. bounds: for CUDA, the most threads of a group and how many such
    groups are to share a processor, which bounds their registers.
    """

    base: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    helpers: str = ""
    only: str | None = None
    early: bool = False
    bounds: tuple[int, int] | None = None


def header(kernel: Kernel, dialect: str) -> str:
    """What stands before the kernel function."""
    return (_METAL if dialect == "metal" else _CUDA) + _COMMON + kernel.helpers


def source(kernel: Kernel, dialect: str) -> str:
    """The statements of the kernel function."""
    if dialect == "metal":
        return _METAL_PROLOGUE + kernel.body
    return _CUDA_PROLOGUE + ("" if kernel.early else "  AFTER();\n") + kernel.body


def kernel_name(kernel: Kernel, dialect: str, kinds: tuple[str, ...]) -> str:
    """A name that no other text and no other argument types have: MLX finds compiled kernels by name.

    kinds: dtypes of inputs and outputs in order, and which inputs are small.
    """
    text = "\0".join((header(kernel, dialect), source(kernel, dialect), *kernel.inputs, *kernel.outputs, *kinds))
    return f"{kernel.base}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def float_bits(value: float) -> int:
    """A float32 as the int that stands for it among a kernel's constants, which are ints; `asf` gives it back."""
    import numpy as np

    return int(np.float32(value).view(np.int32))
