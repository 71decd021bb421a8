"""Text of what happens to a row after its projection: norm, rotation, the model's rounding. Source: spec: kernels, 4 (f); V4.1 5.2, V4 5."""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel

# Rounding kinds of FINISH_ROWS
NONE, FP8, FP4, FP4_E4M3 = 0, 1, 2, 3

# The model's rounding of a block of channels, as `ops.fakequant` has it.
ROUND = r"""
// nearest, ties to even; below 2^-6 the step is 2^-9, which the fp32 sum rounds to
FN float round_e4m3(float y) {
  const float m = MN(FABS(y), 448.0f);
  const u32 u = asu(m);
  const float q = u < 0x3C800000u ? (m + 16384.0f) - 16384.0f : asf((u + 0x7ffffu + ((u >> 20) & 1u)) & 0xfff00000u);
  return asf(asu(q) | (asu(y) & 0x80000000u));
}
FN float round_e2m1(float y) {
  const float m = FABS(y);
  const int n = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
  const float q = 0.5f * (float)((0xC8643210u >> (4 * n)) & 15u);
  return y < 0.0f ? -q : q;
}
// The VEC values of a lane, channels `ch` on, and the block of QB channels that they are part of: rounded as QK says, but for channels from `end` on.
template <int QK, int QB, int DIVIDE, int VEC> FN void round_block(THREAD float* a, u32 ch, u32 end, float floor) {
  float m = 0.0f;
  UNROLL for (int i = 0; i < VEC; i++) m = MX(m, FABS(a[i]));
  UNROLL for (int o = 1; o * VEC < QB; o <<= 1) m = MX(m, SHXOR(m, o));
  m = MX(m, floor);
  m = DIVIDE ? m / (QK == 1 ? 448.0f : 6.0f) : m * (QK == 1 ? asf(0x3b124925u) : asf(0x3e2aaaabu));
  float sc = m, iv = 1.0f;
  if (QK == 3) {
    sc = round_e4m3(m);
  } else {
    u32 b = asu(m);
    b = ((b >> 23) + ((b & 0x7fffffu) ? 1u : 0u)) << 23;
    sc = asf(b);
    iv = asf((254u << 23) - b);
  }
  UNROLL for (int i = 0; i < VEC; i++) {
    const float limit = QK == 1 ? 448.0f : 6.0f, y = MN(MX(QK == 3 ? a[i] / sc : a[i] * iv, -limit), limit);
    const float q = (QK == 1 ? round_e4m3(y) : round_e2m1(y)) * sc;
    if (ch + i < end) a[i] = rbf(q);
  }
}
"""

# Row `row` of x bf16 [N, XS], of which the C channels from X0 on count; nw fp32 [C], cosv and sinv fp32 [N / HEADS, RD / 2] -> the row of
# out bf16 [N, C], step by step in fp32, rounded to bf16 after each:
# NORM: 0 none, 1 with the weight, 2 without one. RD: channels at the end to rotate, 0 none.
# QK: rounding of the first QN channels in blocks of QB: FP8 e4m3 and FP4 e2m1 under a power of two, FP4_E4M3 under an e4m3 number; the
# block's largest magnitude, at least FLOOR, is divided by the code's limit (DIVIDE) or multiplied by its fp32 inverse.
# Lanes own VEC neighbouring channels, several times; blocks are powers of two of at least VEC channels.
_ROW = (
    ROUND
    + r"""
template <int N> FN void put(DEV u32* p, THREAD const u32* w) {
  if (N == 4) { uint4 t; t.x = w[0]; t.y = w[1 % N]; t.z = w[2 % N]; t.w = w[3 % N]; *(DEV uint4*)p = t; }
  else if (N == 2) { uint2 t; t.x = w[0]; t.y = w[1 % N]; *(DEV uint2*)p = t; }
  else p[0] = w[0];
}
template <int C, int XS, int X0, int HEADS, int NORM, int EPS, int RD, int QK, int QB, int QN, int DIVIDE, int FLOOR> FN void finish_row(
  DEV const u32* x, DEV const u32* nw, DEV const float* cosv, DEV const float* sinv, DEV u32* out, u32 row, u32 lane
) {
  constexpr int VEC = C % 256 == 0 ? 8 : C % 128 == 0 ? 4 : 2, NC = (C + 32 * VEC - 1) / (32 * VEC), EACH = NC * VEC;
  const u32 at = row / HEADS;
  // The weights come early where registers hold them beside the row.
  constexpr bool EARLY = NORM == 1 && EACH <= 64;
  float a[EACH], n[EARLY ? EACH : VEC];
  UNROLL for (int c = 0; c < NC; c++) {
    const u32 ch = c * 32 * VEC + lane * VEC;
    UNROLL for (int i = 0; i < VEC; i++) a[c * VEC + i] = 0.0f;
    if (ch < C) loadn<VEC, 0>(x, (u64)row * XS + X0 + ch, a + c * VEC);
  }
  if (EARLY) {
    UNROLL for (int c = 0; c < NC; c++) {
      const u32 ch = c * 32 * VEC + lane * VEC;
      loadn<VEC, 1>(nw, ch < C ? ch : 0, n + (EARLY ? c * VEC : 0));
    }
  }
  if (NORM) {
    float s = 0.0f;
    UNROLL for (int i = 0; i < EACH; i++) s = FMA(a[i], a[i], s);
    s = wsum(s);
    const float r = 1.0f / SQRTF(s / (float)C + asf((u32)EPS));
    UNROLL for (int c = 0; c < NC; c++) {
      const u32 ch = c * 32 * VEC + lane * VEC;
      if (NORM == 1 && !EARLY) loadn<VEC, 1>(nw, ch < C ? ch : 0, n);
      UNROLL for (int i = 0; i < VEC; i++) {
        const float y = a[c * VEC + i] * r;
        a[c * VEC + i] = rbf(NORM == 1 ? y * n[(EARLY ? c * VEC : 0) + i] : y);
      }
    }
  }
  if (RD) {
    constexpr int HALF = RD ? RD / 2 : 1;
    UNROLL for (int i = 0; i < EACH; i += 2) {
      const int ch = (i / VEC) * 32 * VEC + (int)lane * VEC + i % VEC, pair = (ch - (C - RD)) / 2;
      if (ch >= C - RD && ch < C) {
        const float c = cosv[at * HALF + pair], s = sinv[at * HALF + pair], u = a[i], v = a[i + 1];
        a[i] = rbf(MUL(u, c) - MUL(v, s));
        a[i + 1] = rbf(MUL(u, s) + MUL(v, c));
      }
    }
  }
  if (QK) {
    UNROLL for (int c = 0; c < NC; c++) round_block<QK, QB, DIVIDE, VEC>(a + c * VEC, c * 32 * VEC + lane * VEC, QN, asf((u32)FLOOR));
  }
  UNROLL for (int c = 0; c < NC; c++) {
    const u32 ch = c * 32 * VEC + lane * VEC;
    if (ch < C) {
      u32 w[VEC / 2];
      UNROLL for (int i = 0; i < VEC; i += 2) w[i / 2] = pack2(a[c * VEC + i], a[c * VEC + i + 1]);
      put<VEC / 2>(out + ((u64)row * C + ch) / 2, w);
    }
  }
}
"""
)
CONSTANTS = ("C", "XS", "X0", "HEADS", "NORM", "EPS", "RD", "QK", "QB", "QN", "DIVIDE", "FLOOR")


def _finish(suffix: str = "") -> str:
    return f"finish_row<{', '.join(name + suffix for name in CONSTANTS)}>"


# Groups (N) of 32 threads.
FINISH_ROWS = Kernel(
    "finish_rows",
    ("x", "nw", "cosv", "sinv"),
    ("out",),
    f"""
  {_finish()}((DEV const u32*)x, (DEV const u32*)nw, cosv, sinv, (DEV u32*)out, gx, lane);
""",
    _ROW,
)

# Two parts of every row, each with constants of its own, those of the second with a 2 behind their names. Groups (N, 2) of 32 threads.
FINISH_TWO = Kernel(
    "finish_two",
    ("x", "nw", "nw2", "cosv", "sinv"),
    ("out", "out2"),
    f"""
  if (gy == 0) {_finish()}((DEV const u32*)x, (DEV const u32*)nw, cosv, sinv, (DEV u32*)out, gx, lane);
  else {_finish("2")}((DEV const u32*)x, (DEV const u32*)nw2, cosv, sinv, (DEV u32*)out2, gx, lane);
""",
    _ROW,
)
