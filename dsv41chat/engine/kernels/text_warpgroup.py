"""CUDA text of the matrix unit as four SIMD groups use it together, on devices of generation 9. Source: PTX ISA, `wgmma`.

The rows of x come once from shared memory for all four, and the unit has twice the speed of `mma`. Other devices, and the CPU shim, compute the
same from the same places with `mma`.
"""

from __future__ import annotations

# Columns of 8 rows of the tiles that there are.
_COLUMNS = (4, 8, 16)


def _product(columns: int) -> str:
    """c[columns][4] += 16 rows of weights of each SIMD group, `a` as of `mma`, times 8 * columns rows of x."""
    sums = 4 * columns
    places = ",".join(f"%{i}" for i in range(sums))
    held = ", ".join(f'"+f"(c[{i // 4}][{i % 4}])' for i in range(sums))
    return f"""template <> FN void product64<{columns}>(float (*c)[4], const u32* a, u64 x) {{
  asm volatile("{{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n{8 * columns}k16.f32.bf16.bf16 {{{places}}},"
      "{{%{sums},%{sums + 1},%{sums + 2},%{sums + 3}}}, %{sums + 4}, p, 1, 1, 0; }}"
      : {held}
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}}
"""


# A run of 64 inputs of NT * 8 rows of x lies in shared memory as its 8 pairs of inputs: word (i * NT * 8 + row) * 4 + t is pair i of lanes t. So
# 8 rows of a pair are 128 bytes side by side, as the unit wants them.
# -> acc[m][n] += the rows A[m] (as `codes16` turns them) times the rows of x.
WARPGROUP = (
    r"""
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int C> FN void product64(float (*c)[4], const u32* a, u64 x);
"""
    + "".join(map(_product, _COLUMNS))
    + r"""
// What was written to shared memory before a barrier can be read by the unit behind it.
FN void staged_for_unit() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int NT> FN void run64(float (*acc)[NT][4], const u32 (*A)[16], const u32* x, u32) {
  // Where pairs begin; one pair to the next, and 8 rows to the next 8; all in 16 bytes.
  const u64 place = (u64)((u32)__cvta_generic_to_shared(x) >> 4 & 0x3fffu) | (u64)(NT * 8) << 16 | (u64)8 << 32;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  UNROLL for (int s = 0; s < 4; s++) UNROLL for (int m = 0; m < 2; m++) product64<NT>(acc[m], A[m] + 4 * s, place + s * (NT * 16));
  asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
#else
FN void staged_for_unit() {}
template <int NT> FN void run64(float (*acc)[NT][4], const u32 (*A)[16], const u32* x, u32 lane) {
  UNROLL for (int s = 0; s < 4; s++) UNROLL for (int m = 0; m < 2; m++) UNROLL for (int n = 0; n < NT; n++) {
    const u32* a = A[m] + 4 * s;
    mma(acc[m][n], a[0], a[1], a[2], a[3], x[(2 * s * NT + n) * 32 + lane], x[((2 * s + 1) * NT + n) * 32 + lane]);
  }
}
#endif
"""
)
