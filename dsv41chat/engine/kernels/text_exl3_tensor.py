"""CUDA texts for trellis-coded matrices on the matrix unit. Source: spec: kernels, 4 (g).

The ring order of a tile is the order in which `mma` wants its second operand: a lane's eight values are two operands of two, for columns
t >> 2 and (t >> 2) + 8. Rows of x are the first operand. They are split into two half-precision numbers each, in the two halves of the
operand's 16 rows, so a product of up to eight rows costs the same as of one and keeps 22 bits of x. A run of 128 inputs is scaled by
a power of two, which is taken back after its sums.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_exl3 import DECODE8, MIX

# Words of 128 rotated inputs of a row: 4 lanes x 8 tiles x the 4 words of an operand, the scale, and three that are not used.
BLOCK_WORDS = 132

# float -> half, to nearest, ties to even; on the device as well, because it is not where the time goes.
SPLIT = r"""
FN u32 f2h(float f) {
  const u32 u = asu(f), a = u & 0x7fffffffu, sign = (u >> 16) & 0x8000u;
  if (a > 0x7f800000u) return 0x7e00u;
  if (a >= 0x477ff000u) return sign | 0x7c00u;
  if (a < 0x38800000u) return sign | (asu(asf(a) + 0.5f) - 0x3f000000u);
  return sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13);
}
// Values 4 * lane .. of a run of 128, in operand order; the largest magnitude of the run is brought to 2^14 .. 2^15.
FN void put4(DEV u32* out, u64 run, u32 lane, const THREAD float* v) {
  float top = MX(MX(FABS(v[0]), FABS(v[1])), MX(FABS(v[2]), FABS(v[3])));
  UNROLL for (int o = 1; o < 32; o <<= 1) { const float z = SHXOR(top, o); top = MX(top, z); }
  const u32 e = UMX(asu(top) >> 23, 27u);
  const float factor = asf((268u - e) << 23);
  u32 high[4], low[4];
  UNROLL for (int i = 0; i < 4; i++) {
    const float x = v[i] * factor;
    high[i] = f2h(x);
    low[i] = f2h(x - h2f(high[i]));
  }
  DEV u32* p = out + run * 132 + (lane & 1u) * 64 + (lane >> 2) * 4 + (lane & 2u);
  p[0] = high[0] | high[1] << 16; p[1] = low[0] | low[1] << 16;
  p[32] = high[2] | high[3] << 16; p[33] = low[2] | low[3] << 16;
  if (lane == 0) { uint4 t; t.x = asu(asf((e - 14u) << 23)); t.y = 0; t.z = 0; t.w = 0; *(DEV uint4*)(out + run * 132 + 128) = t; }
}
"""

# Sums of products of rotated rows by tiles, on the matrix unit.
UNIT = (
    DECODE8
    + r"""
#ifdef SHIM_CUDA
FN void mma16(float* c, const uint4& a, u32 b0, u32 b1) { shim::matrix_half(c, a.x, a.y, a.z, a.w, b0, b1); }
FN u32 funnel(u32 low, u32 high, u32 shift) { return (low >> shift) | ((high << 1) << (31 - shift)); }
FN u32 exact(float f) { const u32 u = asu(f), a = u & 0x7fffffffu; return (u >> 16 & 0x8000u) | (a ? (a - 0x38000000u) >> 13 : 0u); }
template <int BOOK> FN u32 two(u32 s, u32 t) { return exact(value<BOOK>(s)) | exact(value<BOOK>(t)) << 16; }
#else
FN void mma16(float* c, const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
FN u32 funnel(u32 low, u32 high, u32 shift) {
  u32 d;
  asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(shift));
  return d;
}
FN u32 bytes(u32 x) {
  u32 d;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(0x01010101u), "r"(0x6400u));
  return d;
}
// The values of two states, as a pair of halves. 0x6400 + s is the half 1024 + s, so one multiply-add makes the mul1 value.
template <int BOOK> FN u32 two(u32 s, u32 t) {
  u32 d;
  if (BOOK == 2) {
    const u32 both = bytes(s * 0x83DCD12Du) | bytes(t * 0x83DCD12Du) << 16;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(both), "r"(0x1EEE1EEEu), "r"(0xC931C931u));
    return d;
  }
  const u32 x = ((BOOK == 0 ? s * 89226354u + 64248484u : s * 0xCBAC1FEDu) & 0x8FFF8FFFu) ^ 0x3B603B60u;
  const u32 y = ((BOOK == 0 ? t * 89226354u + 64248484u : t * 0xCBAC1FEDu) & 0x8FFF8FFFu) ^ 0x3B603B60u;
  asm("{ .reg .f16 a, b, c, d; mov.b32 {a, b}, %1; mov.b32 {c, d}, %2; add.rn.f16 a, a, b; add.rn.f16 c, c, d; mov.b32 %0, {a, c}; }"
      : "=r"(d) : "r"(x), "r"(y));
  return d;
}
#endif
// The raw words of a lane in tile w, of which places[0] comes last in the ring.
template <int NV> FN void fetch(DEV const u32* w, const THREAD u32* places, THREAD u32* raw) {
  UNROLL for (int i = 0; i <= NV; i++) raw[i] = w[places[i]];
}
// Its eight values as four pairs, as `decode8` finds them.
template <int K2, int BOOK, int NV> FN void pairs8(const THREAD u32* raw, u32 shift, THREAD u32* pairs) {
  u32 a[NV + 1], s[8];
  UNROLL for (int i = 0; i < NV; i++) a[i] = funnel(raw[i], raw[i + 1], shift);
  a[NV] = 0;
  UNROLL for (int j = 0; j < 8; j++) {
    const int below = (7 - j) * (K2 / 2) + (K2 % 2) * (4 - (j + 1) / 2), sh = below & 31;
    s[j] = (sh > 16 ? funnel(a[below >> 5], a[(below >> 5) + 1], sh) : a[below >> 5] >> sh) & 0xFFFFu;
  }
  UNROLL for (int j = 0; j < 4; j++) pairs[j] = two<BOOK>(s[2 * j], s[2 * j + 1]);
}
// acc[u][h][i]: row lane >> 2 of x (at X, when `there`) times columns 2 * (lane & 3) + i of half h of tile columns first + u; of `count` runs of
// 128 inputs every KS-th from `split` on. XS: words from one run of X to the next.
template <int XS, int N, int K2, int BOOK, int KS>
FN void run_sums(DEV const u32* X, bool there, DEV const u32* words, u32 count, u32 first, u32 split, u32 lane, float (*acc)[2][2]) {
  constexpr int NV = (7 * K2 / 2 + 1 + 16 + 31) / 32, WORDS = 4 * K2;
  const u32 end = WORDS * (lane + 1), last = (end - 1) >> 5, shift = 32 * (last + 1) - end;
  u32 places[NV + 1];
  UNROLL for (int i = 0; i <= NV; i++) places[i] = (last + WORDS - i) % WORDS;
  UNROLL for (int u = 0; u < 2; u++) UNROLL for (int h = 0; h < 2; h++) acc[u][h][0] = acc[u][h][1] = 0.0f;
  for (u32 run = split; run < count; run += KS) {
    float c[2][2][4];
    UNROLL for (int u = 0; u < 2; u++) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < 4; i++) c[u][h][i] = 0.0f;
    for (u32 part = 0; part < 8; part += 4) {
      u32 raw[4][2][NV + 1];
      UNROLL for (int q = 0; q < 4; q++) UNROLL for (int u = 0; u < 2; u++)
        fetch<NV>(words + ((u64)(run * 8 + part + q) * (N / 16) + first + u) * WORDS, places, raw[q][u]);
      UNROLL for (int q = 0; q < 4; q++) {
        uint4 a = {0, 0, 0, 0};
        if (there) a = *(DEV const uint4*)(X + run * XS + (lane & 3u) * 32 + (part + q) * 4);
        UNROLL for (int u = 0; u < 2; u++) {
          u32 v[4];
          pairs8<K2, BOOK, NV>(raw[q][u], shift, v);
          mma16(c[u][0], a, v[0], v[1]); mma16(c[u][1], a, v[2], v[3]);
        }
      }
    }
    const float back = there ? asf(X[run * XS + 128]) : 0.0f;
    UNROLL for (int u = 0; u < 2; u++) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < 2; i++)
      acc[u][h][i] = FMA(c[u][h][i] + c[u][h][i + 2], back, acc[u][h][i]);
  }
}
"""
)

_FINISH = r"""
template <int BIAS, int OF> FN void finish4(float* v, const u16* svh, const u16* bias, u32 n, void* out, u64 at, u32 lane) {
  mix128(v, lane);
  UNROLL for (int i = 0; i < 4; i++) {
    float y = v[i] * 0.08838834764831845f * h2f(svh[n + i]);
    if (BIAS) y += h2f(bias[n + i]);
    if (OF) ((float*)out)[at + i] = y;
    else ((u16*)out)[at + i] = (u16)f2bf(y);
  }
}
"""

# As EXL3_ROTATE, with the result for the matrix unit: xh uint32 [M, K / 128 * BLOCK_WORDS].
EXL3_SPLIT = Kernel(
    "exl3_split",
    ("x", "suh"),
    ("xh",),
    r"""
  const u32 at = gx * 128 + lane * 4;
  float v[4];
  loadn<4, XF>((const u32*)x, (u64)gy * K + at, v);
  UNROLL for (int i = 0; i < 4; i++) v[i] *= h2f(((const u16*)suh)[at + i]);
  mix128(v, lane);
  UNROLL for (int i = 0; i < 4; i++) v[i] *= 0.08838834764831845f;
  put4(xh, (u64)gy * (K / 128) + gx, lane, v);
""",
    MIX + SPLIT,
    only="cuda",
)

# Of G matrices side by side, in groups (N / 128, KZ, G) of 128 * KS threads: each takes PER of the runs of 128 inputs, shared by its KS
# SIMD groups per tile columns.
_PLACE = r"""
  SHM float part[KS][R][128];
  const u32 n = (u32)dims[0], g = lane >> 2, pairs = sg & 3u, split = sg >> 2;
  const u32 from = gy * PER, count = UMN(PER, K / 128 - from);
  DEV const u32* W = words + ((u64)gz * (K / 16) + from * 8) * (N / 16) * (4 * K2);
  float acc[2][2][2];
"""
_COLLECT = r"""
  if (g < R) UNROLL for (int u = 0; u < 2; u++) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < 2; i++)
    part[split][g][pairs * 32 + u * 16 + h * 8 + (lane & 3u) * 2 + i] = acc[u][h][i];
  BARRIER();
  for (u32 m = sg; m < n; m += 4 * KS) {
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int s = 0; s < KS; s++) UNROLL for (int i = 0; i < 4; i++) v[i] += part[s][m][lane * 4 + i];
    const u32 column = gz * N + gx * 128 + lane * 4;
    if (KZ > 1) {
      const float4 o = {v[0], v[1], v[2], v[3]};
      *(float4*)((float*)out + ((u64)gy * n + m) * (G * N) + column) = o;
    } else {
      finish4<BIAS, OF>(v, (const u16*)svh, (const u16*)bias, column, out, (u64)m * (G * N) + column, lane);
    }
  }
"""

# As EXL3_MATVEC, with xh of EXL3_SPLIT; rows = dims[0] <= R = 8. KZ 1: out [rows, G * N] bf16 or fp32 (OF); else fp32 [KZ, rows, G * N], to be
# joined.
EXL3_TENSOR = Kernel(
    "exl3_tensor",
    ("xh", "words", "svh", "bias", "dims"),
    ("out",),
    _PLACE
    + r"""
  const u64 row = ((u64)(g < n ? g : 0) * G + gz) * (K / 128) + from;
  run_sums<132, N, K2, BOOK, KS>(xh + row * 132, g < n, W, count, gx * 8 + pairs * 2, split, lane, acc);
"""
    + _COLLECT,
    MIX + UNIT + _FINISH,
    only="cuda",
)

# The same from x [rows, G * K] bf16 or fp32 (XF) itself, for few rows: each group turns its inputs, with the very bits of EXL3_SPLIT, which
# costs less than a launch. rows <= R.
EXL3_TENSOR_FEW = Kernel(
    "exl3_tensor_few",
    ("x", "suh", "words", "svh", "bias", "dims"),
    ("out",),
    _PLACE
    + r"""
  SHM uint4 turned[PER * R * 33];
  for (u32 i = sg; i < count * n; i += 4 * KS) {
    const u32 run = i / n, m = i % n, at = gz * K + (from + run) * 128 + lane * 4;
    float v[4];
    loadn<4, XF>((const u32*)x, (u64)m * (G * K) + at, v);
    UNROLL for (int q = 0; q < 4; q++) v[q] *= h2f(((const u16*)suh)[at + q]);
    mix128(v, lane);
    UNROLL for (int q = 0; q < 4; q++) v[q] *= 0.08838834764831845f;
    put4((u32*)turned, run * R + m, lane, v);
  }
  BARRIER();
  run_sums<R * 132, N, K2, BOOK, KS>((const u32*)turned + (g < n ? g : 0) * 132, g < n, W, count, gx * 8 + pairs * 2, split, lane, acc);
"""
    + _COLLECT,
    MIX + SPLIT + UNIT + _FINISH,
    only="cuda",
)

# parts fp32 [KZ, rows, W] of EXL3_TENSOR, rows = dims[0] -> out [rows, W] bf16 or fp32 (OF). Groups (W / 128, rows) of 32 threads.
EXL3_JOIN = Kernel(
    "exl3_join",
    ("parts", "svh", "bias", "dims"),
    ("out",),
    r"""
  const u32 n = (u32)dims[0], column = gx * 128 + lane * 4;
  float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int z = 0; z < KZ; z++) {
    const float4 p = *(const float4*)(parts + ((u64)z * n + gy) * W + column);
    v[0] += p.x; v[1] += p.y; v[2] += p.z; v[3] += p.w;
  }
  finish4<BIAS, OF>(v, (const u16*)svh, (const u16*)bias, column, out, (u64)gy * W + column, lane);
""",
    MIX + _FINISH,
    only="cuda",
)
