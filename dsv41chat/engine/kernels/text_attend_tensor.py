"""CUDA texts of decode attention on the matrix unit. Source: spec: kernels, 4 (d).

All heads of a row attend to one list, so 16 heads are the rows of `mma`. A list is split into pieces of CH slots, whose keys a group
stages in shared memory; piece results are merged in an order that is fixed by their places, so empty pieces at the end change no bit.
Keys lie in 16-byte units of 8 channels; unit u of key k stands at place u ^ (k & 7), so that both products read without bank conflicts.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_exl3 import MIX
from dsv41chat.engine.kernels.text_exl3_tensor import SPLIT
from dsv41chat.engine.kernels.text_tensor import MMA

UNIT = MMA + r"""
#ifdef SHIM_CUDA
FN void fetch(uint4* to, const u16* from, bool there) { const uint4 none = {0, 0, 0, 0}; *to = there ? *(const uint4*)from : none; }
FN void fetched() {}
FN u32 pair(float a, float b) { return pack2(a, b); }
FN void packed(u32& v) {}
#else
// 16 bytes to shared memory in the background, zeros for what is absent
FN void fetch(uint4* to, const u16* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
FN void fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }
FN u32 pair(float a, float b) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
  return d;
}
// Keeps the compiler from holding both halves of a word in registers of their own.
FN void packed(u32& v) { asm volatile("" : "+r"(v)); }
#endif
FN float low(u32 v) { return asf(v << 16); }
FN float high(u32 v) { return asf(v & 0xffff0000u); }
FN u32 turned(u32 v, float c, float s) {
  const float a = low(v), b = high(v);
  return pair(MUL(a, c) - MUL(b, s), MUL(a, s) + MUL(b, c));
}
"""

# q [M, H, C] bf16 as it leaves its projection; HEADNORM: each head is first normed without a weight; then the last RD channels are
# rotated by cosv, sinv fp32 [M, RD / 2]. Scores are scaled by C^-0.5 (SCALE).
# ring [*, C], pool [*, C] bf16; slots int32 [M, W] rows of the ring where present, index int32 [M, P] rows of the pool where picked,
# dims int32 [0] = P. POOL 0: the ring alone, P = 0.
# -> po fp32 [M, H, SP, C], not written where a sum is 0, pm fp32 [M, H, SP, 2] (maximum, sum). CH: 16 or 32.
# Groups (SP or more, H / 16 rounded up, M) of C / 2 threads: C / 64 SIMD groups, each with 64 channels of the second product. In the
# first one, two of them share 128 channels and each takes half of the keys.
TENSOR_ATTEND = Kernel(
    "tensor_attend",
    ("q", "ring", "pool", "slots", "present", "index", "picked", "dims", "cosv", "sinv"),
    ("po", "pm"),
    r"""
  constexpr int NW = C / 64, PAIR = NW % 2 ? 1 : 2, NB = NW / PAIR, KT = CH / (8 * PAIR), U = C / 8;
  constexpr int ST = CH + 8, PT = CH / 2 + 4;
  SHM uint4 keys[CH * U];
  SHM float part[NB][16 * ST];
  SHM float squares[HEADNORM ? NB : 1][16];
  SHM u32 upper[16 * PT]; SHM u32 lower[16 * PT];
  const u32 g = lane >> 2, t = lane & 3u, block = sg / PAIR, h0 = gy * 16 + g, h1 = h0 + 8;
  // Heads h0 and h1 of this thread: 16 neighbouring channels of every 64 of its block.
  u32 a[PAIR * 8], b[PAIR * 8];
  UNROLL for (int s = 0; s < PAIR; s++) UNROLL for (int i = 0; i < 2; i++) {
    const u64 at = (u64)gz * H * C + (block * PAIR + s) * 64 + t * 16 + i * 8;
    uint4 u = {0, 0, 0, 0}, v = {0, 0, 0, 0};
    if (H % 16 == 0 || h0 < H) u = *(const uint4*)((const u16*)q + at + h0 * C);
    if (H % 16 == 0 || h1 < H) v = *(const uint4*)((const u16*)q + at + h1 * C);
    u32* x = a + s * 8 + i * 4; u32* y = b + s * 8 + i * 4;
    x[0] = u.x; x[1] = u.y; x[2] = u.z; x[3] = u.w;
    y[0] = v.x; y[1] = v.y; y[2] = v.z; y[3] = v.w;
  }
  // Every lane has a key: twice its row, one more for the pool; -1 where there is none. A piece of the window does not wait for dims.
  const int first = (int)gx * CH, slot = first + (int)lane;
  int e = -1;
  if (lane < CH && slot < W) {
    const int r = slots[gz * W + slot];
    const bool there = present[gz * W + slot];
    e = there ? 2 * r : -1;
  }
  const int P = POOL ? dims[0] : 0, SP = (W + P + CH - 1) / CH;
  if (POOL && first + CH > W) {
    if ((int)gx >= SP) return;
    if (lane < CH && slot >= W && slot < W + P) {
      const u64 i = (u64)gz * P + slot - W;
      const int r = index[i];
      const bool there = picked[i];
      e = there ? 2 * r + 1 : -1;
    }
  }
  if (!__any_sync(0xffffffffu, e >= 0)) {
    if (tid < 16 && gy * 16 + tid < H) {
      const u64 at = ((u64)gz * H + gy * 16 + tid) * SP + gx;
      pm[at * 2] = -1e30f; pm[at * 2 + 1] = 0.0f;
    }
    return;
  }
  UNROLL for (int i = 0; i < CH / 4; i++) {
    const int k = i * 4 + (int)(lane >> 3), r = SHIDX(e, k);
    const u16* from = (const u16*)(r > 0 && (r & 1) ? pool : ring) + (u64)(r < 0 ? 0 : r >> 1) * C;
    fetch(keys + k * U + sg * 8 + ((lane ^ k) & 7u), from + sg * 64 + (lane & 7u) * 8, r >= 0);
  }
  if (HEADNORM) {
    float y = 0.0f, z = 0.0f;
    UNROLL for (int i = 0; i < PAIR * 8; i++) {
      y = FMA(low(a[i]), low(a[i]), y); y = FMA(high(a[i]), high(a[i]), y);
      z = FMA(low(b[i]), low(b[i]), z); z = FMA(high(b[i]), high(b[i]), z);
    }
    y += SHXOR(y, 1); y += SHXOR(y, 2);
    z += SHXOR(z, 1); z += SHXOR(z, 2);
    if (t == 0 && sg % PAIR == 0) { squares[block][g] = y; squares[block][g + 8] = z; }
    BARRIER();
    y = z = 0.0f;
    UNROLL for (int i = 0; i < NB; i++) { y += squares[i][g]; z += squares[i][g + 8]; }
    y = 1.0f / SQRTF(y / (float)C + asf((u32)EPS)); z = 1.0f / SQRTF(z / (float)C + asf((u32)EPS));
    UNROLL for (int i = 0; i < PAIR * 8; i++) {
      packed(a[i]); packed(b[i]);
      a[i] = pair(low(a[i]) * y, high(a[i]) * y);
      b[i] = pair(low(b[i]) * z, high(b[i]) * z);
    }
  }
  UNROLL for (int s = 0; s < PAIR; s++) if (((NB - 1) * PAIR + s + 1) * 64 > C - RD) {
    const int at = (int)(block * PAIR + s) * 64 + (int)t * 16 - (C - RD);
    if (at > -16) UNROLL for (int i = 0; i < 8; i++) if (RD % 16 == 0 || at + 2 * i >= 0) {
      const float c = cosv[gz * (RD / 2) + at / 2 + i], d = sinv[gz * (RD / 2) + at / 2 + i];
      a[s * 8 + i] = turned(a[s * 8 + i], c, d); b[s * 8 + i] = turned(b[s * 8 + i], c, d);
    }
  }
  fetched();
  BARRIER();
  const u32 key0 = sg % PAIR * KT * 8;
  float c[KT][PAIR][4];
  UNROLL for (int j = 0; j < KT; j++) UNROLL for (int s = 0; s < PAIR; s++) {
    UNROLL for (int i = 0; i < 4; i++) c[j][s][i] = 0.0f;
    UNROLL for (int i = 0; i < 2; i++) {
      const uint4 v = keys[(key0 + j * 8 + g) * U + (block * PAIR + s) * 8 + ((t * 2 + i) ^ g)];
      const u32* x = a + s * 8 + i * 4; const u32* y = b + s * 8 + i * 4;
      mma(c[j][s], x[0], y[0], x[1], y[1], v.x, v.y);
      mma(c[j][s], x[2], y[2], x[3], y[3], v.z, v.w);
    }
  }
  UNROLL for (int j = 0; j < KT; j++) {
    float2 u, v;
    u.x = c[j][0][0] + (PAIR > 1 ? c[j][PAIR - 1][0] : 0.0f); u.y = c[j][0][1] + (PAIR > 1 ? c[j][PAIR - 1][1] : 0.0f);
    v.x = c[j][0][2] + (PAIR > 1 ? c[j][PAIR - 1][2] : 0.0f); v.y = c[j][0][3] + (PAIR > 1 ? c[j][PAIR - 1][3] : 0.0f);
    *(float2*)(part[block] + g * ST + key0 + j * 8 + t * 2) = u;
    *(float2*)(part[block] + (g + 8) * ST + key0 + j * 8 + t * 2) = v;
  }
  BARRIER();
  // CH / 2 threads have the scores of a head, two each. Weights become sums of two bf16 numbers, which the second product takes apart.
  for (u32 p = tid; p < 8 * CH; p += NW * 32) {
    const u32 head = p / (CH / 2), k = p % (CH / 2) * 2;
    float x = 0.0f, y = 0.0f;
    UNROLL for (int i = 0; i < NB; i++) { const float2 v = *(const float2*)(part[i] + head * ST + k); x += v.x; y += v.y; }
    const int r = SHIDX(e, k), s = SHIDX(e, k + 1);
    x = r < 0 ? -1e30f : MUL(x, asf((u32)SCALE)); y = s < 0 ? -1e30f : MUL(y, asf((u32)SCALE));
    float top = MX(x, y);
    UNROLL for (int o = 1; o < CH / 2; o <<= 1) top = MX(top, SHXOR(top, o));
    x = r < 0 ? 0.0f : EXPF(x - top); y = s < 0 ? 0.0f : EXPF(y - top);
    float sum = x + y;
    UNROLL for (int o = 1; o < CH / 2; o <<= 1) sum += SHXOR(sum, o);
    const u32 w = pair(x, y);
    upper[head * PT + k / 2] = w;
    lower[head * PT + k / 2] = pair(x - low(w), y - high(w));
    if (k == 0 && (H % 16 == 0 || gy * 16 + head < H)) {
      float2 v; v.x = top; v.y = sum;
      *(float2*)(pm + (((u64)gz * H + gy * 16 + head) * SP + gx) * 2) = v;
    }
  }
  BARRIER();
  // Column n of tile j is channel 8 * n + j of this SIMD group's 64: the halves of four keys' words make the operands of two tiles.
  float o[8][4];
  UNROLL for (int j = 0; j < 8; j++) UNROLL for (int i = 0; i < 4; i++) o[j][i] = 0.0f;
  _Pragma("unroll 1") for (int n = 0; n < CH / 16; n++) {
    u32 w[4][4];
    UNROLL for (int i = 0; i < 4; i++) {
      const u32 k = n * 16 + t * 2 + (i & 1) + (i >> 1) * 8;
      const uint4 v = keys[k * U + sg * 8 + (g ^ (k & 7u))];
      w[i][0] = v.x; w[i][1] = v.y; w[i][2] = v.z; w[i][3] = v.w;
    }
    const u32 p0 = g * PT + n * 8 + t, p1 = p0 + 8 * PT;
    const u32 u0 = upper[p0], u1 = upper[p1], u2 = upper[p0 + 4], u3 = upper[p1 + 4];
    const u32 l0 = lower[p0], l1 = lower[p1], l2 = lower[p0 + 4], l3 = lower[p1 + 4];
    UNROLL for (int j = 0; j < 8; j++) {
      const u32 pick = j & 1 ? 0x7632u : 0x5410u;
      const u32 x = __byte_perm(w[0][j / 2], w[1][j / 2], pick), y = __byte_perm(w[2][j / 2], w[3][j / 2], pick);
      mma(o[j], u0, u1, u2, u3, x, y);
      mma(o[j], l0, l1, l2, l3, x, y);
    }
  }
  UNROLL for (int r = 0; r < 2; r++) {
    const u32 head = r ? h1 : h0;
    if (H % 16 == 0 || head < H) {
      float* to = po + (((u64)gz * H + head) * SP + gx) * C + sg * 64 + t * 16;
      UNROLL for (int i = 0; i < 4; i++) {
        const int j = i % 2 * 4, k = r * 2 + i / 2;
        float4 v; v.x = o[j][k]; v.y = o[j + 1][k]; v.z = o[j + 2][k]; v.w = o[j + 3][k];
        *(float4*)(to + i * 4) = v;
      }
    }
  }
""",
    UNIT,
    only="cuda",
)

# The pieces of a list, the sink (fp32 [H]) added to the denominator, the last RD channels rotated back -> out [M, H * C] bf16. A SIMD
# group sums every NM-th piece, a lane four channels; the first MOST of its pieces are on the way before anything is waited for.
# TURN, with C in runs of 128: instead of out, what EXL3_SPLIT makes of it with suh fp16 [H * C] is xh. Groups (H * (C / 128 rounded up), M) of
# 32 * NM threads.
TENSOR_MERGE = Kernel(
    "tensor_merge",
    ("po", "pm", "sink", "dims", "cosv", "sinv", "suh"),
    ("out", "xh"),
    r"""
  constexpr int PARTS = (C + 127) / 128;
  SHM float4 sums[NM][32]; SHM float below[NM];
  const u32 head = gx / PARTS, ch = gx % PARTS * 128 + lane * 4;
  const float sk = sink[head];
  const int SP = (W + (POOL ? dims[0] : 0) + CH - 1) / CH;
  const float* O = po + ((u64)gy * H + head) * SP * C + (ch < C ? ch : 0);
  const float2* S = (const float2*)pm + ((u64)gy * H + head) * SP;
  float factor[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (TURN && sg == 0) UNROLL for (int i = 0; i < 4; i++) factor[i] = h2f(((const u16*)suh)[head * C + ch + i]);
  float4 t[MOST], a = {0.0f, 0.0f, 0.0f, 0.0f};
  UNROLL for (int i = 0; i < MOST; i++) { const int s = i * NM + (int)sg; t[i] = *(const float4*)(O + (u64)(s < SP ? s : 0) * C); }
  float top = sk, z = 0.0f;
  _Pragma("unroll 2") for (int s = lane; s < SP; s += 32) top = MX(top, S[s].x);
  top = MX(top, SHXOR(top, 16)); top = MX(top, SHXOR(top, 8)); top = MX(top, SHXOR(top, 4)); top = MX(top, SHXOR(top, 2));
  top = MX(top, SHXOR(top, 1));
  _Pragma("unroll 1") for (int s0 = 0; s0 < SP; s0 += 32 * NM) {
    const int own = s0 + (int)lane * NM + (int)sg;
    float f = 0.0f;
    if (own < SP) { const float2 v = S[own]; f = v.y > 0.0f ? EXPF(v.x - top) : 0.0f; z = FMA(f, v.y, z); }
    _Pragma("unroll 1") for (int i0 = 0; i0 < 32; i0 += MOST) {
      const int begin = s0 + i0 * NM + (int)sg;
      if (begin >= SP) break;
      if (begin >= NM) {
        UNROLL for (int i = 0; i < MOST; i++) { const int s = begin + i * NM; t[i] = *(const float4*)(O + (u64)(s < SP ? s : 0) * C); }
      }
      UNROLL for (int i = 0; i < MOST; i++) {
        // What has no weight was not written.
        const float w = SHIDX(f, i0 + i);
        if (w > 0.0f) { a.x = FMA(w, t[i].x, a.x); a.y = FMA(w, t[i].y, a.y); a.z = FMA(w, t[i].z, a.z); a.w = FMA(w, t[i].w, a.w); }
      }
    }
  }
  z = wsum(z);
  sums[sg][lane] = a;
  if (lane == 0) below[sg] = z;
  BARRIER();
  if (sg == 0 && ch < C) {
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    z = EXPF(sk - top);
    UNROLL for (int i = 0; i < NM; i++) {
      const float4 u = sums[i][lane];
      v[0] += u.x; v[1] += u.y; v[2] += u.z; v[3] += u.w;
      z += below[i];
    }
    z = 1.0f / z;
    UNROLL for (int i = 0; i < 4; i++) v[i] *= z;
    UNROLL for (int i = 0; i < 4; i += 2) {
      const int at = (int)ch + i - (C - RD);
      if (at >= 0) {
        const float c = cosv[gy * (RD / 2) + at / 2], s = sinv[gy * (RD / 2) + at / 2], x = v[i], y = v[i + 1];
        v[i] = MUL(x, c) + MUL(y, s);
        v[i + 1] = MUL(y, c) - MUL(x, s);
      }
    }
    if (TURN) {
      UNROLL for (int i = 0; i < 4; i++) v[i] = rbf(v[i]) * factor[i];
      mix128(v, lane);
      UNROLL for (int i = 0; i < 4; i++) v[i] *= 0.08838834764831845f;
      put4(xh, (u64)gy * (H * C / 128) + gx, lane, v);
    } else {
      uint2 w; w.x = pack2(v[0], v[1]); w.y = pack2(v[2], v[3]);
      *(uint2*)((u16*)out + ((u64)gy * H + head) * C + ch) = w;
    }
  }
""",
    MIX + SPLIT,
    only="cuda",
)
