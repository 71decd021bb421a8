"""CUDA texts on the matrix unit: the multi-row product of 4-bit affine matrices, and prompt tiles. Source: spec: kernels, 4 (a'), (h).

`mma` multiplies 16 rows of weights with 8 columns, the rows of x; absent rows are zero columns, and column n of a result depends on
column n of x alone. Inputs are taken in the order (0,4)(1,5)(2,6)(3,7) of every 8, in which a shift brings two 4-bit codes into place.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_matrix import DECODE

_UNIT = r"""
#ifdef SHIM_CUDA
FN void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { shim::matrix(c, a0, a1, a2, a3, b0, b1); }
#else
FN void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
struct frag { u32 p[8]; };
// 16 neighbouring bf16 of a row of x as pairs, zeros for an absent row
FN void row16(const u16* p, bool there, frag& f) {
  uint4 u = {0, 0, 0, 0}, v = {0, 0, 0, 0};
  if (there) { u = *(const uint4*)p; v = *(const uint4*)(p + 8); }
  f.p[0] = __byte_perm(u.x, u.z, 0x5410); f.p[1] = __byte_perm(u.x, u.z, 0x7632);
  f.p[2] = __byte_perm(u.y, u.w, 0x5410); f.p[3] = __byte_perm(u.y, u.w, 0x7632);
  f.p[4] = __byte_perm(v.x, v.z, 0x5410); f.p[5] = __byte_perm(v.x, v.z, 0x7632);
  f.p[6] = __byte_perm(v.y, v.w, 0x5410); f.p[7] = __byte_perm(v.y, v.w, 0x7632);
}
// Two codes as the bf16 numbers 128 + q, exact; the 128 is taken back through the bias.
FN u32 nib(u32 w, int s) { return ((w >> s) & 0x000F000Fu) | 0x43004300u; }
"""

# x [M, XS] bf16, M = dims[0] <= 8, w [N, K / 8], sc and bi bf16 [N, K / 64] -> out [M, N] bf16. RG as in `text_matrix`. KS SIMD groups
# split K in strides of 256. Groups (N / 16) of 32 * KS threads.
TENSOR_MATVEC = Kernel(
    "tensor_matvec",
    ("x", "w", "sc", "bi", "dims"),
    ("out",),
    r"""
  SHM float part[KS][128];
  const u32 M = (u32)dims[0];
  const u32 g = lane >> 2, t = lane & 3u;
  const u16* X = (const u16*)x + (RG ? gx * 16 / (RG ? RG : 1) * K : 0) + g * XS;
  const u64 row = (u64)gx * 16 + g;
  const u32* w0 = (const u32*)w + row * (K / 8); const u32* w1 = w0 + K;
  const u16* s0 = (const u16*)sc + row * (K / 64); const u16* s1 = s0 + K / 8;
  const u16* z0 = (const u16*)bi + row * (K / 64); const u16* z1 = z0 + K / 8;
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int it = sg; it < K / 256; it += KS) {
    uint2 a[4], b[4];
    UNROLL for (int j = 0; j < 4; j++) {
      a[j] = *(const uint2*)(w0 + it * 32 + j * 8 + t * 2);
      b[j] = *(const uint2*)(w1 + it * 32 + j * 8 + t * 2);
    }
    const uint2 sa = *(const uint2*)(s0 + it * 4), za = *(const uint2*)(z0 + it * 4);
    const uint2 sb = *(const uint2*)(s1 + it * 4), zb = *(const uint2*)(z1 + it * 4);
    UNROLL for (int j = 0; j < 4; j++) {
      frag f;
      row16(X + it * 256 + j * 64 + t * 16, g < M, f);
      // The sums of x over 64 inputs, in the layout of the result: a product with ones.
      float ones[4] = {0.0f, 0.0f, 0.0f, 0.0f}, c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      const u32 one = 0x3F803F80u;
      UNROLL for (int q = 0; q < 8; q += 2) mma(ones, one, one, one, one, f.p[q], f.p[q + 1]);
      mma(c, nib(a[j].x, 0), nib(b[j].x, 0), nib(a[j].x, 4), nib(b[j].x, 4), f.p[0], f.p[1]);
      mma(c, nib(a[j].x, 8), nib(b[j].x, 8), nib(a[j].x, 12), nib(b[j].x, 12), f.p[2], f.p[3]);
      mma(c, nib(a[j].y, 0), nib(b[j].y, 0), nib(a[j].y, 4), nib(b[j].y, 4), f.p[4], f.p[5]);
      mma(c, nib(a[j].y, 8), nib(b[j].y, 8), nib(a[j].y, 12), nib(b[j].y, 12), f.p[6], f.p[7]);
      const float p = four(sa, j), q = four(sb, j), u = FMA(-128.0f, p, four(za, j)), v = FMA(-128.0f, q, four(zb, j));
      acc[0] = FMA(p, c[0], FMA(u, ones[0], acc[0])); acc[1] = FMA(p, c[1], FMA(u, ones[1], acc[1]));
      acc[2] = FMA(q, c[2], FMA(v, ones[2], acc[2])); acc[3] = FMA(q, c[3], FMA(v, ones[3], acc[3]));
    }
  }
  part[sg][g * 8 + 2 * t] = acc[0]; part[sg][g * 8 + 2 * t + 1] = acc[1];
  part[sg][(g + 8) * 8 + 2 * t] = acc[2]; part[sg][(g + 8) * 8 + 2 * t + 1] = acc[3];
  BARRIER();
  for (u32 i = tid; i < 16 * M; i += KS * 32) {
    const u32 r = i & 15u, m = i >> 4;
    float v = 0.0f;
    UNROLL for (int s = 0; s < KS; s++) v += part[s][r * 8 + m];
    ((u16*)out)[(u64)m * N + gx * 16 + r] = (u16)f2bf(v);
  }
""",
    _UNIT
    + r"""
FN float four(const uint2& v, int j) { const u32 u = j < 2 ? v.x : v.y; return asf(j & 1 ? u & 0xffff0000u : u << 16); }
""",
    only="cuda",
)

# Rows of x [*, K] bf16 times the matrices of their experts [E, N, K] -> out [R, N] bf16. Rows are sorted by expert: row r takes x at
# tok[r]; tiles int32 [n, 4] = (expert, first row, rows, -) with at most 8 * NT rows each, none for a tile that is not used.
# Weights are decoded to bfloat16, rounded once. Groups (N / (16 * W), tiles) of 32 * W threads, W = NT: they stage 8 * NT rows x 64 inputs.
TENSOR_TILES = Kernel(
    "tensor_tiles",
    ("x", "w", "sc", "bi", "tiles", "tok"),
    ("out",),
    r"""
  SHM uint4 staged[2][NT * 64];
  const u32 g = lane >> 2, t = lane & 3u;
  const int e = tiles[gy * 4], first = tiles[gy * 4 + 1], count = tiles[gy * 4 + 2];
  if (count <= 0) return;
  const u64 row = (u64)e * N + (gx * NT + sg) * 16 + g;
  float acc[NT][4];
  UNROLL for (int n = 0; n < NT; n++) UNROLL for (int i = 0; i < 4; i++) acc[n][i] = 0.0f;
  const int mine = tid >> 2;
  const bool there = mine < count;
  const u16* X = (const u16*)x + (u64)(there ? tok[first + mine] : 0) * K + (tid & 3u) * 16;
  frag f;
  row16(X, there, f);
  half_run<BITS> a, b;
  a.load(w, (row * (K / 16) + t)); b.load(w, ((row + 8) * (K / 16) + t));
  for (int it = 0; it < K / 64; it++) {
    uint4* o = staged[it & 1];
    { const uint4 u = {f.p[0], f.p[1], f.p[2], f.p[3]}, v = {f.p[4], f.p[5], f.p[6], f.p[7]}; o[tid] = u; o[NT * 32 + tid] = v; }
    u32 A[16];
    const u64 at = (it * 64 + t * 16) / GS;
    weights16<MODE, BITS, SF>(a, sc, bi, row * (K / GS) + at, A);
    weights16<MODE, BITS, SF>(b, sc, bi, (row + 8) * (K / GS) + at, A + 1);
    if (it + 1 < K / 64) {
      row16(X + (it + 1) * 64, there, f);
      a.load(w, row * (K / 16) + (it + 1) * 4 + t); b.load(w, (row + 8) * (K / 16) + (it + 1) * 4 + t);
    }
    BARRIER();
    UNROLL for (int n = 0; n < NT; n++) {
      const uint4 u = o[n * 32 + lane], v = o[NT * 32 + n * 32 + lane];
      mma(acc[n], A[0], A[1], A[2], A[3], u.x, u.y); mma(acc[n], A[4], A[5], A[6], A[7], u.z, u.w);
      mma(acc[n], A[8], A[9], A[10], A[11], v.x, v.y); mma(acc[n], A[12], A[13], A[14], A[15], v.z, v.w);
    }
  }
  u16* O = (u16*)out + (u64)first * N + (gx * NT + sg) * 16 + g;
  UNROLL for (int n = 0; n < NT; n++) UNROLL for (int i = 0; i < 4; i++) {
    const int c = n * 8 + 2 * t + (i & 1);
    if (c < count) O[(u64)c * N + (i >> 1) * 8] = (u16)f2bf(acc[n][i]);
  }
""",
    DECODE
    + _UNIT
    + r"""
// The codes of 16 neighbouring inputs: run `i` of a matrix.
template <int BITS> struct half_run {
  u32 a[BITS / 2];
  FN void load(const void* w, u64 i) {
    const u32* p = (const u32*)w + i * (BITS / 2);
    constexpr int N = BITS / 2;  // the places below are within it where they are used
    if (BITS == 8) {
      const uint4 t = *(const uint4*)p;
      a[0] = t.x; a[1 % N] = t.y; a[2 % N] = t.z; a[3 % N] = t.w;
    } else if (BITS == 4) {
      const uint2 t = *(const uint2*)p;
      a[0] = t.x; a[1 % N] = t.y;
    } else {
      UNROLL for (int j = 0; j < N; j++) a[j] = p[j];
    }
  }
};
// scale * (code pair as 128 + q - 128) + bias, rounded once per value
FN u32 affine_pair(u32 q, u32 s, u32 z) {
#ifdef SHIM_CUDA
  return pack2(FMA(asf(q << 16) - 128.0f, bf2f(s), bf2f(z)), FMA(asf(q & 0xffff0000u) - 128.0f, bf2f(s), bf2f(z)));
#else
  u32 d; s |= s << 16; z |= z << 16;
  // q * 1 - 128: the subtraction itself came to the instruction set a generation later.
  asm("{ .reg .b32 t; fma.rn.bf16x2 t, %1, %2, %3; fma.rn.bf16x2 %0, t, %4, %5; }"
      : "=r"(d) : "r"(q), "r"(0x3F803F80u), "r"(0xC300C300u), "r"(s), "r"(z));
  return d;
#endif
}
// Operands of one row: A[0], A[2], .., A[14] hold the 8 pairs of its 16 inputs; the row 8 further down fills the odd places.
template <int MODE, int BITS, int SF> FN void weights16(const half_run<BITS>& r, const void* sc, const void* bi, u64 at, u32* A) {
  if (MODE == 0 && BITS == 4 && SF == 0) {
    const u32 s = ((const u16*)sc)[at], z = ((const u16*)bi)[at];
    UNROLL for (int i = 0; i < 4; i++) {
      A[i * 2] = affine_pair(nib(r.a[0], 4 * i), s, z);
      A[8 + i * 2] = affine_pair(nib(r.a[1 % (BITS / 2)], 4 * i), s, z);
    }
  } else {
    float s, b, v[16];
    scales<MODE, BITS, SF>((const u16*)sc, (const u16*)bi, at, s, b);
    UNROLL for (int i = 0; i < 16; i++) v[i] = FMA((code<MODE, BITS>(r.a, i)), s, b);
    UNROLL for (int i = 0; i < 4; i++) { A[i * 2] = pack2(v[i], v[i + 4]); A[8 + i * 2] = pack2(v[8 + i], v[12 + i]); }
  }
}
""",
    only="cuda",
)
