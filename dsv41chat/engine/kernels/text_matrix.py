"""Texts for matrices in MLX's packed layouts and plain ones: decoding, the multi-row product, experts. Source: spec: kernels, 4 (a), (b).

A SIMD group owns whole output rows. A lane owns runs of 32 neighbouring inputs, strided by 1,024, and adds them in order; the lanes'
sums are joined by `wsum`. So a result depends on nothing but its own row of inputs, however many rows share the call.

MODE: 0 affine, 1 mxfp4, 2 mxfp8, 3 bf16, 4 fp32. BITS: of one code. GS: inputs per scale. SF: scales are 0 bf16, 1 fp32, 2 fp16.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel

# Code i of 32 as a float. Affine codes come as 2^BITS + q, with the 2^BITS taken back through the bias: no conversion of integers.
# No fp32 subnormals on the way: some devices flush them.
DECODE = r"""
template <int MODE, int BITS> FN float code(const THREAD u32* a, int i) {
  if (MODE == 4) return asf(a[i]);
  const int p = i * BITS, sh = p & 31, span = BITS < 32 ? BITS : 1, rest = BITS < 23 ? 23 - BITS : 0;
  u32 v = a[p >> 5] >> sh;
  if (sh + BITS > 32) v |= a[(p >> 5) + 1] << (32 - sh);
  v &= (1u << span) - 1u;
  if (MODE == 3) return bf2f(v);
  if (MODE == 0) return asf(((127u + BITS) << 23) | (v << rest));
  if (MODE == 1) {
    const u32 t = (0xC8643210u >> ((v & 7u) << 2)) & 15u;
    return asf(asu(asf(0x41800000u | (t << 19)) - 16.0f) ^ ((v & 8u) << 28));
  }
  const u32 m = v & 127u;
  const float f = m < 8u ? (asf(0x41800000u | (m << 19)) - 16.0f) * 0.001953125f : asf((m << 20) + 0x3C000000u);
  return asf(asu(f) | ((v & 128u) << 24));
}
template <int SF> FN float number(DEV const u16* p, u64 i) {
  return SF == 1 ? ((DEV const float*)p)[i] : SF == 2 ? h2f(p[i]) : bf2f(p[i]);
}
template <int MODE, int BITS, int SF> FN void scales(DEV const u16* sc, DEV const u16* bi, u64 i, THREAD float& s, THREAD float& b) {
  s = 1.0f; b = 0.0f;
  if (MODE == 0) { s = number<SF>(sc, i); b = FMA(-(float)(1u << (BITS & 31)), s, number<SF>(bi, i)); }
  if (MODE == 1) s = asf(UMX(((DEV const u8*)sc)[i], 1u) << 23) * 0.5f;
  if (MODE == 2) s = asf(UMX(((DEV const u8*)sc)[i], 1u) << 23);
}
template <int BITS> FN void run32(DEV const u32* p, THREAD u32* a) {
  if (BITS % 4 == 0) {
    UNROLL for (int j = 0; j < BITS; j += 4) {
      const uint4 t = *(DEV const uint4*)(p + j);
      a[j] = t.x; a[j + 1] = t.y; a[j + 2] = t.z; a[j + 3] = t.w;
    }
  } else if (BITS % 2 == 0) {
    UNROLL for (int j = 0; j < BITS; j += 2) { const uint2 t = *(DEV const uint2*)(p + j); a[j] = t.x; a[j + 1] = t.y; }
  } else {
    UNROLL for (int j = 0; j < BITS; j++) a[j] = p[j];
  }
}
"""

# The codes of run i of 8 inputs, which are BITS bytes, from bit 0 of `a` on, an array of 2 words, or 8 where a code may have 16 or 32 bits.
RUN8 = r"""
template <int BITS> FN void run8(DEV const u32* w, u64 i, THREAD u32* a) {
  if (BITS >= 16) {
    UNROLL for (int j = 0; j < BITS / 4; j += 4) {
      const uint4 t = *(DEV const uint4*)(w + i * (BITS / 4) + j);
      a[j] = t.x; a[j + 1] = t.y; a[j + 2] = t.z; a[j + 3] = t.w;
    }
  } else if (BITS == 8) {
    const uint2 t = *(DEV const uint2*)(w + i * 2);
    a[0] = t.x; a[1] = t.y;
  } else if (BITS == 4) {
    a[0] = w[i]; a[1] = 0;
  } else {
    const u64 byte = i * BITS;
    const u32 from = (u32)(byte & 3u) * 8;
    DEV const u32* p = w + byte / 4;
    const u32 low = p[0], high = from + 8 * BITS > 32 ? p[1] : 0;
    a[0] = from ? (low >> from) | (high << (32 - from)) : low;
    a[1] = high >> from;
  }
}
"""

# Two floats as bf16, a in the low half: `pack2`, by the instruction that NVIDIA's devices have for it.
PAIR = r"""
#ifdef __CUDACC__
FN u32 pair(float a, float b) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r; }
#else
FN u32 pair(float a, float b) { return pack2(a, b); }
#endif
"""

# x [rows, XS] bf16 or fp32 (XF), w [N, K], out [rows, N] bf16 or fp32 (OF). RG > 0: output rows n * RG .. use inputs n * K .. of a row.
# rows = dims[0] <= M: the text is compiled for few sizes M, and rows beyond the last repeat it.
# N2 > 0: a second matrix [N2, K] of the same form, whose outputs follow; out is [rows, N + N2]. AR > 0: to the second outputs of row m the
# row at[m] % AR of add fp32 [AR, N2] is added.
MATVEC = Kernel(
    "matvec",
    ("x", "w", "sc", "bi", "dims", "w2", "sc2", "bi2", "add", "at"),
    ("out",),
    r"""
  const u32 last = (u32)dims[0] - 1, first = (gx * NSG + sg) * R;
  const bool second = N2 && first >= N;
  const u32 row0 = second ? first - N : first;
  DEV const u32* weights = (DEV const u32*)(second ? w2 : w);
  DEV const u16* factors = (DEV const u16*)(second ? sc2 : sc);
  DEV const u16* offsets = (DEV const u16*)(second ? bi2 : bi);
  DEV const u32* X = (DEV const u32*)x;
  const u64 slice = RG ? (u64)(row0 / (RG ? RG : 1)) * K : 0;
  float acc[R][M];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) acc[r][m] = 0.0f;
  for (u32 k = lane * 32; k < K; k += 1024) {
    u32 a[R][BITS]; float s[R], b[R];
    UNROLL for (int r = 0; r < R; r++) {
      run32<BITS>(weights + ((u64)(row0 + r) * (K / 32) + k / 32) * BITS, a[r]);
      scales<MODE, BITS, SF>(factors, offsets, (u64)(row0 + r) * (K / GS) + k / GS, s[r], b[r]);
    }
    UNROLL for (int c = 0; c < 4; c++) {
      float d[R][8];
      UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < 8; i++) d[r][i] = FMA((code<MODE, BITS>(a[r], c * 8 + i)), s[r], b[r]);
      UNROLL for (int m = 0; m < M; m++) {
        float v[8];
        loadn<8, XF>(X, (u64)UMN(m, last) * XS + slice + k + c * 8, v);
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < 8; i++) acc[r][m] = FMA(d[r][i], v[i], acc[r][m]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) {
    float v = wsum(acc[r][m]);
    if (lane == 0 && (u32)m <= last) {
      if (AR && second) v += add[(u64)((u32)at[m] % (AR ? AR : 1)) * N2 + row0 + r];
      if (OF) ((DEV float*)out)[(u64)m * (N + N2) + first + r] = v;
      else ((DEV u16*)out)[(u64)m * (N + N2) + first + r] = (u16)f2bf(v);
    }
  }
""",
    DECODE,
)

# Two products of one bf16 input row at X + at, by row p of one matrix and row q of another of the same format; per lane, not yet summed.
_PAIR = r"""
template <int K, int MODE, int BITS, int GS, int SF>
FN void two_rows(DEV const u32* w, DEV const u16* sc, DEV const u16* bi, u64 p, DEV const u32* w2, DEV const u16* sc2, DEV const u16* bi2, u64 q,
             DEV const u32* X, u64 at, u32 lane, THREAD float* acc) {
  for (u32 k = lane * 32; k < K; k += 1024) {
    u32 a[BITS], e[BITS]; float s, b, s2, b2;
    run32<BITS>(w + (p * (K / 32) + k / 32) * BITS, a);
    run32<BITS>(w2 + (q * (K / 32) + k / 32) * BITS, e);
    scales<MODE, BITS, SF>(sc, bi, p * (K / GS) + k / GS, s, b);
    scales<MODE, BITS, SF>(sc2, bi2, q * (K / GS) + k / GS, s2, b2);
    UNROLL for (int c = 0; c < 4; c++) {
      float v[8];
      loadn<8, 0>(X, at + k + c * 8, v);
      UNROLL for (int i = 0; i < 8; i++) acc[0] = FMA(FMA((code<MODE, BITS>(a, c * 8 + i)), s, b), v[i], acc[0]);
      UNROLL for (int i = 0; i < 8; i++) acc[1] = FMA(FMA((code<MODE, BITS>(e, c * 8 + i)), s2, b2), v[i], acc[1]);
    }
  }
}
"""

# Gate, up and activation of every slot: x [M, K] bf16, idx and wt [M, S - SHARED], w1 and w3 [E, I, K], v1 and v3 [I, K] of the shared expert,
# which is the last of the S slots when SHARED. out [M, S, I] bf16: the routing weight is applied here. Groups (I / NSG, M * S).
EXPERTS_UP = Kernel(
    "experts_up",
    ("x", "idx", "wt", "w1", "s1", "b1", "w3", "s3", "b3", "v1", "t1", "c1", "v3", "t3", "c3"),
    ("out",),
    r"""
  const u32 row = gx * NSG + sg, m = gy / S, j = gy % S;
  float acc[2] = {0.0f, 0.0f}, weight = 1.0f;
  if (SHARED && j == S - 1) {
    two_rows<K, MODE2, BITS2, GS2, SF2>((DEV const u32*)v1, (DEV const u16*)t1, (DEV const u16*)c1, row,
                                    (DEV const u32*)v3, (DEV const u16*)t3, (DEV const u16*)c3, row, (DEV const u32*)x, (u64)m * K, lane, acc);
  } else {
    const u64 at = (u64)idx[m * (S - SHARED) + j] * I + row;
    weight = wt[m * (S - SHARED) + j];
    two_rows<K, MODE, BITS, GS, SF>((DEV const u32*)w1, (DEV const u16*)s1, (DEV const u16*)b1, at,
                                (DEV const u32*)w3, (DEV const u16*)s3, (DEV const u16*)b3, at, (DEV const u32*)x, (u64)m * K, lane, acc);
  }
  float a = wsum(acc[0]), b = wsum(acc[1]);
  const float limit = asf((u32)LIMIT);
  if (LIMIT > 0) { a = MN(a, limit); b = MN(MX(b, -limit), limit); }
  if (lane == 0) ((DEV u16*)out)[(u64)gy * I + row] = (u16)f2bf(a * sigm(a) * b * weight);
""",
    DECODE + _PAIR,
)

# act [M, S, I] bf16 -> out [M, N] bf16: products of all slots, summed in fp32 by slot (ascending expert, shared last), rounded once.
# Groups (N / (2 * NSG), M): a SIMD group owns two neighbouring output rows.
EXPERTS_DOWN = Kernel(
    "experts_down",
    ("act", "idx", "w2", "s2", "b2", "v2", "t2", "c2"),
    ("out",),
    r"""
  const u32 row = (gx * NSG + sg) * 2, m = gy;
  float sum[2] = {0.0f, 0.0f};
  for (int j = 0; j < S; j++) {
    float acc[2] = {0.0f, 0.0f};
    const u64 at = (u64)(m * S + j) * I;
    if (SHARED && j == S - 1) {
      two_rows<I, MODE2, BITS2, GS2, SF2>((DEV const u32*)v2, (DEV const u16*)t2, (DEV const u16*)c2, row,
                                      (DEV const u32*)v2, (DEV const u16*)t2, (DEV const u16*)c2, row + 1, (DEV const u32*)act, at, lane, acc);
    } else {
      const u64 first = (u64)idx[m * (S - SHARED) + j] * N + row;
      two_rows<I, MODE, BITS, GS, SF>((DEV const u32*)w2, (DEV const u16*)s2, (DEV const u16*)b2, first,
                                  (DEV const u32*)w2, (DEV const u16*)s2, (DEV const u16*)b2, first + 1, (DEV const u32*)act, at, lane, acc);
    }
    sum[0] += wsum(acc[0]); sum[1] += wsum(acc[1]);
  }
  if (lane == 0) ((DEV u32*)out)[((u64)m * N + row) / 2] = pack2(sum[0], sum[1]);
""",
    DECODE + _PAIR,
)

# Runs of 8 inputs of a matrix as bfloat16, each value computed in fp32 and rounded once: `runs` of them, from `first` on a thread's four, which lie
# 256 apart. Each is 16 bytes of the result, so that a SIMD group writes 512 bytes at once.
_DECODED = (
    DECODE
    + RUN8
    + PAIR
    + r"""
template <int MODE, int BITS, int GS, int SF> FN void decode_runs(
  DEV const u32* w, DEV const u16* sc, DEV const u16* bi, DEV u16* out, u32 first, u32 runs
) {
  constexpr int EACH = 4;
  u32 a[EACH][2];
  float s[EACH], b[EACH];
  UNROLL for (int j = 0; j < EACH; j++) if (first + j * 256 < runs) {
    run8<BITS>(w + j * 64 * BITS, first, a[j]);
    scales<MODE, BITS, SF>(sc, bi, (u64)(first / (GS / 8)) + j * (2048 / GS), s[j], b[j]);
  }
  UNROLL for (int j = 0; j < EACH; j++) if (first + j * 256 < runs) {
    float d[8];
    uint4 o;
    UNROLL for (int i = 0; i < 8; i++) d[i] = FMA((code<MODE, BITS>(a[j], i)), s[j], b[j]);
    o.x = pair(d[0], d[1]); o.y = pair(d[2], d[3]); o.z = pair(d[4], d[5]); o.w = pair(d[6], d[7]);
    *(DEV uint4*)(out + (u64)first * 8 + j * 2048) = o;
  }
}
"""
)

# A whole matrix [N, K]. Groups (ceil(K / 8 * N / 1024)) of 256 threads; `dims` int32 [0] = number of runs.
DECODE_MATRIX = Kernel(
    "decode_matrix",
    ("w", "sc", "bi", "dims"),
    ("out",),
    r"""
  decode_runs<MODE, BITS, GS, SF>((DEV const u32*)w, (DEV const u16*)sc, (DEV const u16*)bi, (DEV u16*)out, gx * 1024 + tid, (u32)dims[0]);
""",
    _DECODED,
)

# Three matrices of one form: the first two [N, K] and [N2, K] one below the other, the third by itself. Each begins with a group of threads, SECOND
# and THIRD; `dims` int32 [3] = runs of each.
DECODE_THREE = Kernel(
    "decode_three",
    ("w", "sc", "bi", "w2", "sc2", "bi2", "w3", "sc3", "bi3", "dims"),
    ("out", "out3"),
    r"""
  const int which = gx >= THIRD ? 2 : gx >= SECOND ? 1 : 0;
  const u32 begin = which == 2 ? THIRD : which == 1 ? SECOND : 0;
  DEV const u32* W = (DEV const u32*)(which == 2 ? w3 : which == 1 ? w2 : w);
  DEV const u16* S = (DEV const u16*)(which == 2 ? sc3 : which == 1 ? sc2 : sc);
  DEV const u16* B = (DEV const u16*)(which == 2 ? bi3 : which == 1 ? bi2 : bi);
  DEV u16* O = which == 2 ? (DEV u16*)out3 : (DEV u16*)out + (which ? (u64)dims[0] * 8 : 0);
  decode_runs<MODE, BITS, GS, SF>(W, S, B, O, (gx - begin) * 1024 + tid, (u32)dims[which]);
""",
    _DECODED,
)
