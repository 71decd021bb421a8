"""Texts for trellis-coded matrices (EXL3): the input's rotation, and the product with decoding in registers. Source: spec: exl3, 4 to 7, 10.1.

A tile is 16 x 16 values in a ring of 4 * K2 words (K2 = 2 * K, bits per value times two); lane t decodes ring positions 8t .. 8t + 7, which are
rows r, r + 1, r + 8, r + 9 (r = 2 * (t & 3)) of columns t >> 2 and (t >> 2) + 8. Nothing is decoded twice and nothing but sums is shared.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel

# Butterflies over the 128 values of a SIMD group, four neighbours per lane; the result is not yet scaled.
MIX = r"""
FN void mix128(THREAD float* v, u32 lane) {
  UNROLL for (int o = 1; o < 4; o <<= 1) UNROLL for (int i = 0; i < 4; i++) if (!(i & o)) {
    const float a = v[i], b = v[i | o];
    v[i] = a + b; v[i | o] = a - b;
  }
  UNROLL for (int o = 1; o < 32; o <<= 1) UNROLL for (int i = 0; i < 4; i++) {
    const float z = SHXOR(v[i], o);
    v[i] = (lane & (u32)o) ? z - v[i] : v[i] + z;
  }
}
"""

# A lane's eight values of a tile.
DECODE8 = r"""
// A sum of two halves, or a small multiple, back to half precision; its magnitude is 0 or far above half precision's subnormals.
FN float rhalf(float f) { const u32 u = asu(f); return asf((u + 0xfffu + ((u >> 13) & 1u)) & 0xffffe000u); }
template <int BOOK> FN float value(u32 state) {
  if (BOOK == 2) {
    const u32 x = state * 0x83DCD12Du, p = (x & 0x00FF00FFu) + ((x >> 8) & 0x00FF00FFu), s = (p + (p >> 16)) & 0xFFFFu;
    return rhalf(FMA((float)s, 0.00676727294921875f, -3.453125f));
  }
  const u32 x = BOOK == 0 ? state * 89226354u + 64248484u : state * 0xCBAC1FEDu, y = (x & 0x8FFF8FFFu) ^ 0x3B603B60u;
  return rhalf(h2f(y & 0xFFFFu) + h2f(y >> 16));
}
// Ring positions 8 * lane + j of a tile. The lane's last position ends at bit 4 * K2 * (lane + 1), counted from the top of the first word;
// the words before that bit are shifted so that it becomes the lowest, and then every position sits at a place known in advance.
template <int K2, int BOOK> FN void decode8(DEV const u32* w, u32 lane, THREAD float* v) {
  constexpr int NV = (7 * K2 / 2 + 1 + 16 + 31) / 32, WORDS = 4 * K2;
  const u32 end = 4 * K2 * (lane + 1), last = (end - 1) >> 5, shift = 32 * (last + 1) - end;
  u32 raw[NV + 1], a[NV + 1];
  UNROLL for (int i = 0; i <= NV; i++) raw[i] = w[(last + WORDS - i) % WORDS];
  UNROLL for (int i = 0; i < NV; i++) a[i] = (raw[i] >> shift) | ((raw[i + 1] << 1) << (31 - shift));
  a[NV] = 0;
  UNROLL for (int j = 0; j < 8; j++) {
    const int below = (7 - j) * (K2 / 2) + (K2 % 2) * (4 - (j + 1) / 2), sh = below & 31;
    u32 s = a[below >> 5] >> sh;
    if (sh > 16) s |= (a[(below >> 5) + 1] << 1) << (31 - sh);
    v[j] = value<BOOK>(s & 0xFFFFu);
  }
}
"""

# x [M, K] bf16 or fp32 (XF), suh fp16 [K] -> xh fp32 [M, K]: every run of 128 inputs, times suh, through the orthonormal Hadamard matrix.
# Groups (K / 128, M) of 32 threads.
EXL3_ROTATE = Kernel(
    "exl3_rotate",
    ("x", "suh"),
    ("xh",),
    r"""
  const u32 at = gx * 128 + lane * 4;
  float v[4];
  loadn<4, XF>((DEV const u32*)x, (u64)gy * K + at, v);
  UNROLL for (int i = 0; i < 4; i++) v[i] *= h2f(((DEV const u16*)suh)[at + i]);
  mix128(v, lane);
  float4 o;
  o.x = v[0] * 0.08838834764831845f; o.y = v[1] * 0.08838834764831845f; o.z = v[2] * 0.08838834764831845f; o.w = v[3] * 0.08838834764831845f;
  *(DEV float4*)(xh + (u64)gy * K + at) = o;
""",
    MIX,
)

# xh [rows, G, K], rows = dims[0] <= M as in `text_matrix`; words [G, K / 16, N / 16, 4 * K2], svh fp16 [G, N], bias fp16 [G, N] (BIAS)
# -> out [rows, G, N] bf16 or fp32 (OF). BOOK: 0 3inst, 1 mcg, 2 mul1.
# A group owns 128 outputs: SIMD group 4 * s + p works on column tiles 2p and 2p + 1, and on every KS-th row tile from s. Groups (N / 128, 1, G).
EXL3_MATVEC = Kernel(
    "exl3_matvec",
    ("xh", "words", "svh", "bias", "dims"),
    ("out",),
    r"""
  SHM float part[KS][128];
  const u32 last = (u32)dims[0] - 1;
  const u32 pairs = sg & 3u, split = sg >> 2, row = 2 * (lane & 3u), column = lane >> 2;
  float acc[2][2][M];
  UNROLL for (int u = 0; u < 2; u++) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int m = 0; m < M; m++) acc[u][h][m] = 0.0f;
  for (u32 kt = split; kt < K / 16; kt += KS) {
    float x[M][4];
    UNROLL for (int m = 0; m < M; m++) {
      DEV const float* p = xh + ((u64)UMN(m, last) * G + gz) * K + kt * 16 + row;
      x[m][0] = p[0]; x[m][1] = p[1]; x[m][2] = p[8]; x[m][3] = p[9];
    }
    UNROLL for (int u = 0; u < 2; u++) {
      float v[8];
      decode8<K2, BOOK>(words + (((u64)gz * (K / 16) + kt) * (N / 16) + gx * 8 + pairs * 2 + u) * (4 * K2), lane, v);
      UNROLL for (int m = 0; m < M; m++) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < 4; i++)
        acc[u][h][m] = FMA(x[m][i], v[h * 4 + i], acc[u][h][m]);
    }
  }
  for (u32 m = 0; m <= last; m++) {
    UNROLL for (int u = 0; u < 2; u++) UNROLL for (int h = 0; h < 2; h++) {
      float s = 0.0f;
      UNROLL for (int q = 0; q < M; q++) if ((u32)q == m) s = acc[u][h][q];
      s += SHXOR(s, 1); s += SHXOR(s, 2);
      if ((lane & 3u) == 0) part[split][(pairs * 2 + u) * 16 + h * 8 + column] = s;
    }
    BARRIER();
    if (sg == 0) {
      float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      UNROLL for (int i = 0; i < 4; i++) for (int s = 0; s < KS; s++) v[i] += part[s][lane * 4 + i];
      mix128(v, lane);
      UNROLL for (int i = 0; i < 4; i++) {
        const u32 n = gx * 128 + lane * 4 + i;
        float y = v[i] * 0.08838834764831845f * h2f(((DEV const u16*)svh)[gz * N + n]);
        if (BIAS) y += h2f(((DEV const u16*)bias)[gz * N + n]);
        if (OF) ((DEV float*)out)[((u64)m * G + gz) * N + n] = y;
        else ((DEV u16*)out)[((u64)m * G + gz) * N + n] = (u16)f2bf(y);
      }
    }
    BARRIER();
  }
""",
    MIX + DECODE8,
)
