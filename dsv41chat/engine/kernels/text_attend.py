"""Texts of decode attention: every row attends to listed rows of its window ring and of a pool. Source: spec: kernels, 4 (d).

One latent of C channels is key and value. A list is split into pieces of CH slots; piece results are merged in order, so the result
does not depend on how many empty pieces follow.
Lanes own VEC neighbouring channels, C / (32 * VEC) times.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel

# q [M, H, C] bf16 as it leaves its projection; HEADNORM: each head is first normed without a weight; then the last RD channels are
# rotated by cosv, sinv fp32 [M, RD / 2] and q is scaled by C^-0.5 (SCALE).
# ring [*, C], pool [*, C] bf16; slots int32 [M, W] rows of the ring where present, index int32 [M, P] rows of the pool where picked,
# dims int32 [0] = P.
# -> po fp32 [M, H, SP, C], pm fp32 [M, H, SP, 2] (maximum, sum). Groups (SP or more, H / HG, M) of 32 * HG threads, a SIMD group per head.
ATTEND_SPLIT = Kernel(
    "attend_split",
    ("q", "ring", "pool", "slots", "present", "index", "picked", "dims", "cosv", "sinv"),
    ("po", "pm"),
    r"""
  constexpr int VEC = C % 256 == 0 ? 8 : C % 128 == 0 ? 4 : 2, NC = C / (32 * VEC), EACH = C / 32;
  const u32 head = gy * HG + sg;
  const int P = dims[0], SP = (W + P + CH - 1) / CH, s0 = (int)gx * CH;
  if ((int)gx >= SP) return;
  float qv[EACH], o[EACH], top = -1e30f, sum = 0.0f;
  UNROLL for (int c = 0; c < NC; c++) loadn<VEC, 0>((DEV const u32*)q, ((u64)gz * H + head) * C + c * 32 * VEC + lane * VEC, qv + c * VEC);
  if (HEADNORM) {
    float z = 0.0f;
    UNROLL for (int i = 0; i < EACH; i++) z = FMA(qv[i], qv[i], z);
    z = wsum(z);
    const float r = 1.0f / SQRTF(z / (float)C + asf((u32)EPS));
    UNROLL for (int i = 0; i < EACH; i++) qv[i] = rbf(qv[i] * r);
  }
  UNROLL for (int i = 0; i < EACH; i += 2) {
    const int at = (i / VEC) * 32 * VEC + (int)lane * VEC + i % VEC - (C - RD);
    if (at >= 0) {
      const float c = cosv[gz * (RD / 2) + at / 2], s = sinv[gz * (RD / 2) + at / 2], a = qv[i], b = qv[i + 1];
      qv[i] = rbf(MUL(a, c) - MUL(b, s));
      qv[i + 1] = rbf(MUL(a, s) + MUL(b, c));
    }
  }
  UNROLL for (int i = 0; i < EACH; i++) { o[i] = 0.0f; qv[i] *= asf((u32)SCALE); }
  for (int s = 0; s < CH; s += 4) {
    int r[4]; float a[4]; u32 kv[4][EACH / 2];
    UNROLL for (int c = 0; c < 4; c++) {
      const int slot = s0 + s + c;
      r[c] = -1;
      if (slot < W) { if (present[gz * W + slot]) r[c] = slots[gz * W + slot]; }
      else if (slot < W + P) { const u64 i = (u64)gz * P + slot - W; if (picked[i]) r[c] = index[i]; }
      DEV const u32* rows = slot < W ? (DEV const u32*)ring : (DEV const u32*)pool;
      rows += ((u64)(r[c] < 0 ? 0 : r[c]) * C + lane * VEC) / 2;
      UNROLL for (int d = 0; d < NC; d++) words<VEC / 2>(rows + d * 16 * VEC, kv[c] + d * VEC / 2);
    }
    UNROLL for (int c = 0; c < 4; c++) {
      float t = 0.0f;
      UNROLL for (int i = 0; i < EACH; i += 2) { t = FMA(qv[i], low(kv[c][i / 2]), t); t = FMA(qv[i + 1], high(kv[c][i / 2]), t); }
      t = wsum(t);
      a[c] = r[c] < 0 ? -1e30f : t;
    }
    const float n = MX(MX(top, a[0]), MX(MX(a[1], a[2]), a[3])), f = EXPF(top - n);
    top = n;
    UNROLL for (int c = 0; c < 4; c++) a[c] = r[c] < 0 ? 0.0f : EXPF(a[c] - n);
    sum = FMA(sum, f, a[0]);
    sum += a[1]; sum += a[2]; sum += a[3];
    UNROLL for (int i = 0; i < EACH; i++) o[i] = MUL(o[i], f);
    UNROLL for (int c = 0; c < 4; c++) UNROLL for (int i = 0; i < EACH; i += 2) {
      o[i] = FMA(a[c], low(kv[c][i / 2]), o[i]);
      o[i + 1] = FMA(a[c], high(kv[c][i / 2]), o[i + 1]);
    }
  }
  const u64 b = ((u64)gz * H + head) * SP + gx;
  if (lane == 0) { pm[b * 2] = top; pm[b * 2 + 1] = sum; }
  UNROLL for (int i = 0; i < EACH; i += 2) {
    float2 t; t.x = o[i]; t.y = o[i + 1];
    *(DEV float2*)(po + b * C + (i / VEC) * 32 * VEC + lane * VEC + i % VEC) = t;
  }
""",
    r"""
// A key stays packed between its two uses: fewer registers, more groups at once.
template <int N> FN void words(DEV const u32* p, THREAD u32* w) {
  if (N == 4) { const uint4 t = *(DEV const uint4*)p; w[0] = t.x; w[1] = t.y; w[2] = t.z; w[3] = t.w; }
  else if (N == 2) { const uint2 t = *(DEV const uint2*)p; w[0] = t.x; w[1] = t.y; }
  else w[0] = p[0];
}
FN float low(u32 v) { return asf(v << 16); }
FN float high(u32 v) { return asf(v & 0xffff0000u); }
""",
)

# Pieces merged in order, the sink (fp32 [H]) added to the denominator, the last RD channels rotated back -> out [M, H * C] bf16.
# Groups (H, M) of NTH >= C / 4 threads.
ATTEND_MERGE = Kernel(
    "attend_merge",
    ("po", "pm", "sink", "dims", "cosv", "sinv"),
    ("out",),
    r"""
  const int SP = (W + dims[0] + CH - 1) / CH;
  const u64 b = ((u64)gy * H + gx) * SP;
  const float sk = sink[gx];
  float top = sk;
  for (int s = 0; s < SP; s++) top = MX(top, pm[(b + s) * 2]);
  float z = EXPF(sk - top), a[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const u32 ch = tid * 4;
  if (ch < C) {
    for (int s = 0; s < SP; s++) {
      const float f = EXPF(pm[(b + s) * 2] - top);
      z = FMA(f, pm[(b + s) * 2 + 1], z);
      const float4 t = *(DEV const float4*)(po + (b + s) * C + ch);
      a[0] = FMA(f, t.x, a[0]); a[1] = FMA(f, t.y, a[1]); a[2] = FMA(f, t.z, a[2]); a[3] = FMA(f, t.w, a[3]);
    }
    UNROLL for (int i = 0; i < 4; i++) a[i] /= z;
    UNROLL for (int i = 0; i < 4; i += 2) {
      const int at = (int)ch + i - (C - RD);
      if (at >= 0) {
        const float c = cosv[gy * (RD / 2) + at / 2], s = sinv[gy * (RD / 2) + at / 2], x = a[i], y = a[i + 1];
        a[i] = MUL(x, c) + MUL(y, s);
        a[i + 1] = MUL(y, c) - MUL(x, s);
      }
    }
    uint2 w; w.x = pack2(a[0], a[1]); w.y = pack2(a[2], a[3]);
    *(DEV uint2*)((DEV u16*)out + ((u64)gy * H + gx) * C + ch) = w;
  }
""",
)
