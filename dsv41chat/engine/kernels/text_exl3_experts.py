"""Texts for trellis-coded experts: what goes in is turned for every slot, gate and up with the activation, down, and the sum of the slots.

A slot is a row and one of its S experts, the shared one last when SHARED. Each is computed alone, so a row does not depend on the others.
A group owns 128 outputs, which is a run of the next product's rotation, so gate and up end with the rotated input of down. Tiles are summed
by a SIMD group's own multiply-adds, or on CUDA by the matrix unit (`text_exl3_tensor`).
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_exl3 import DECODE8, MIX
from dsv41chat.engine.kernels.text_exl3_tensor import SPLIT, UNIT

# `put4` keeps a rotated run, `sums4` multiplies `runs` of row `row` by two tile columns: s[4] of lanes 4 * c are columns c, c + 8, c + 16, c + 24.
_PLAIN_PUT = r"""
FN void put4(DEV float* out, u64 run, u32 lane, const THREAD float* v) {
  float4 o;
  o.x = v[0]; o.y = v[1]; o.z = v[2]; o.w = v[3];
  *(DEV float4*)(out + run * 128 + lane * 4) = o;
}
"""
_PLAIN_SUMS = (
    DECODE8
    + r"""
template <int K, int N, int K2, int BOOK, int KS>
FN void sums4(DEV const float* xh, u64 row, DEV const u32* words, u32 from, u32 runs, u32 first, u32 split, u32 lane, THREAD float* s) {
  UNROLL for (int i = 0; i < 4; i++) s[i] = 0.0f;
  const u32 end = UMN((from + runs) * 8, K / 16);
  for (u32 kt = from * 8 + split; kt < end; kt += KS) {
    DEV const float* p = xh + row * K + kt * 16 + 2 * (lane & 3u);
    const float x[4] = {p[0], p[1], p[8], p[9]};
    UNROLL for (int u = 0; u < 2; u++) {
      float v[8];
      decode8<K2, BOOK>(words + ((u64)kt * (N / 16) + first + u) * (4 * K2), lane, v);
      UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < 4; i++) s[u * 2 + h] = FMA(x[i], v[h * 4 + i], s[u * 2 + h]);
    }
  }
  UNROLL for (int i = 0; i < 4; i++) { s[i] += SHXOR(s[i], 1); s[i] += SHXOR(s[i], 2); }
}
"""
)
# x [M, K] bf16, idx [M, S - SHARED], suh1 and suh3 fp16 [E, K], v1 and v3 [K] of the shared expert -> xh: rows 2 * slot (gate) and 2 * slot + 1
# (up). Groups (K / 128, M * S, 2) of 32 threads.
_TURN = r"""
  const u32 m = gy / S, j = gy % S, at = gx * 128 + lane * 4;
  const bool own = SHARED && j == S - 1;
  const u64 e = own ? 0 : (u64)idx[m * (S - SHARED) + j];
  DEV const u16* suh = (DEV const u16*)(gz ? own ? v3 : suh3 : own ? v1 : suh1) + e * K + at;
  float v[4];
  loadn<4, 0>((DEV const u32*)x, (u64)m * K + at, v);
  UNROLL for (int i = 0; i < 4; i++) v[i] *= h2f(suh[i]);
  mix128(v, lane);
  UNROLL for (int i = 0; i < 4; i++) v[i] *= 0.08838834764831845f;
  put4(xh, ((u64)gy * 2 + gz) * (K / 128) + gx, lane, v);
"""

# Sums a of the gate and b of up, 4 * lane .. of the group's 128 outputs, to the rotated input of down.
_ACT = r"""
    mix128(a, lane); mix128(b, lane);
    const u64 at = e * I + gx * 128 + lane * 4;
    DEV const u16* scale1 = (DEV const u16*)(own ? z1 : svh1) + at;
    DEV const u16* scale3 = (DEV const u16*)(own ? z3 : svh3) + at;
    DEV const u16* next = (DEV const u16*)(own ? z2 : suh2) + at;
    float weight = 1.0f;
    if (!own) weight = wt[m * (S - SHARED) + j];
    const float limit = asf((u32)LIMIT);
    float v[4];
    UNROLL for (int i = 0; i < 4; i++) {
      float gate = a[i] * 0.08838834764831845f * h2f(scale1[i]), up = b[i] * 0.08838834764831845f * h2f(scale3[i]);
      if (LIMIT > 0) { gate = MN(gate, limit); up = MN(MX(up, -limit), limit); }
      v[i] = gate * sigm(gate) * up * weight * h2f(next[i]);
    }
    mix128(v, lane);
    UNROLL for (int i = 0; i < 4; i++) v[i] *= 0.08838834764831845f;
    put4(act, (u64)gy * (I / 128) + gx, lane, v);
"""

# xh [M * S * 2, K], w1 and w3 [E, K / 16, I / 16, 4 * K2], svh1 and svh3 fp16 [E, I], suh2 fp16 [E, I]; v1, v3, z1, z3 and z2 the same of the
# shared expert, of K2S and BOOKS -> act [M * S, I]: activation times routing weight, rotated for down. Groups (I / 128, M * S), 256 * KS threads.
_UP = (
    r"""
  SHM float part[KS][2][128];
  const u32 m = gy / S, j = gy % S, lift = (sg >> 2) & 1u, pairs = sg & 3u, split = sg >> 3;
  const bool own = SHARED && j == S - 1;
  const u64 e = own ? 0 : (u64)idx[m * (S - SHARED) + j];
  const u64 row = (u64)gy * 2 + lift, words = e * (u64)(K / 16 * (I / 16)) * (4 * K2);
  float s[4];
  if (own) sums4<K, I, K2S, BOOKS, KS>(xh, row, lift ? v3 : v1, 0, K / 128, gx * 8 + pairs * 2, split, lane, s);
  else sums4<K, I, K2, BOOK, KS>(xh, row, (lift ? w3 : w1) + words, 0, K / 128, gx * 8 + pairs * 2, split, lane, s);
  if ((lane & 3u) == 0) UNROLL for (int i = 0; i < 4; i++) part[split][lift][pairs * 32 + i * 8 + (lane >> 2)] = s[i];
  BARRIER();
  if (sg == 0) {
    float a[4] = {0.0f, 0.0f, 0.0f, 0.0f}, b[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int p = 0; p < KS; p++) UNROLL for (int i = 0; i < 4; i++) { a[i] += part[p][0][lane * 4 + i]; b[i] += part[p][1][lane * 4 + i]; }
"""
    + _ACT
    + "  }\n"
)

# act [M * S, I], w2 [E, I / 16, N / 16, 4 * K2], svh2 fp16 [E, N]; v2 and z2 of the shared expert -> out fp32 [M * S, KZ, N]: the
# inputs are cut into KZ parts of PER runs, whose results are summed with those of the slots. Groups (N / 128, M * S, KZ) of 128 * KS threads.
_DOWN = r"""
  SHM float part[KS][128];
  const u32 m = gy / S, j = gy % S, pairs = sg & 3u, split = sg >> 2;
  const bool own = SHARED && j == S - 1;
  const u64 e = own ? 0 : (u64)idx[m * (S - SHARED) + j];
  float s[4];
  if (own) sums4<I, N, K2S, BOOKS, KS>(act, (u64)gy, v2, gz * PER, PER, gx * 8 + pairs * 2, split, lane, s);
  else sums4<I, N, K2, BOOK, KS>(act, (u64)gy, w2 + e * (u64)(I / 16 * (N / 16)) * (4 * K2), gz * PER, PER, gx * 8 + pairs * 2, split, lane, s);
  if ((lane & 3u) == 0) UNROLL for (int i = 0; i < 4; i++) part[split][pairs * 32 + i * 8 + (lane >> 2)] = s[i];
  BARRIER();
  if (sg == 0) {
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int p = 0; p < KS; p++) UNROLL for (int i = 0; i < 4; i++) v[i] += part[p][lane * 4 + i];
    mix128(v, lane);
    DEV const u16* scale = (DEV const u16*)(own ? z2 : svh2) + e * N + gx * 128 + lane * 4;
    float4 o;
    o.x = v[0] * 0.08838834764831845f * h2f(scale[0]); o.y = v[1] * 0.08838834764831845f * h2f(scale[1]);
    o.z = v[2] * 0.08838834764831845f * h2f(scale[2]); o.w = v[3] * 0.08838834764831845f * h2f(scale[3]);
    *(DEV float4*)(out + ((u64)gy * KZ + gz) * N + gx * 128 + lane * 4) = o;
  }
"""

# The same on the matrix unit: four SIMD groups for the gate's columns and four for those of up, KS times. Rings of ST stages.
_TENSOR_UP = (
    r"""
  constexpr int KM = SHARED && K2S > K2 ? K2S : K2;
  SHM uint4 ring[8 * KS * ST * 4 * KM];
  const u32 m = gy / S, j = gy % S, lift = (sg >> 2) & 1u, pairs = sg & 3u, split = sg >> 3, t = lane & 3u;
  const bool own = SHARED && j == S - 1;
  if (!own) AFTER();
  const u64 e = own ? 0 : (u64)idx[m * (S - SHARED) + j];
  const u32 begin = K / 128 * split / KS, runs = K / 128 * (split + 1) / KS - begin;
  if (sg == 0) {
    const u64 at = e * I + gx * 128 + lane * 4;
    soon((const u16*)(own ? z1 : svh1) + at); soon((const u16*)(own ? z3 : svh3) + at); soon((const u16*)(own ? z2 : suh2) + at);
  }
  const u32* X[1] = {xh + (((u64)gy * 2 + lift) * (K / 128) + begin) * 132};
  uint4* mine = ring + sg * (ST * 4 * KM);
  float acc[1][2][2];
  // Tiles of the same kind take the same way: less text.
  const u64 tile = begin * 8 * (I / 16) + gx * 8 + pairs * 2;
  if (own && (K2S != K2 || BOOKS != BOOK)) {
    in_order<I, K2S> next = {(const u8*)(lift ? v3 : v1) + tile * (16 * K2S), (int)runs};
    stream<I, K2S, K2S, ST, 4 * KM> tiles(mine, lane, next);
    AFTER();
    tiles.template sums<132, K2S, BOOKS, 1>(next, X, X, runs, acc);
  } else {
    in_order<I, K2> next = {(const u8*)(own ? lift ? v3 : v1 : lift ? w3 : w1) + (e * (K / 16) * (I / 16) + tile) * (16 * K2), (int)runs};
    stream<I, K2, K2, ST, 4 * KM> tiles(mine, lane, next);
    if (own) AFTER();
    tiles.template sums<132, K2, BOOK, 1>(next, X, X, runs, acc);
  }
  // What the rings held has been used: sums take their place.
  BARRIER();
  float* part = (float*)ring;
  if (t == 0) UNROLL for (int u = 0; u < 2; u++) UNROLL for (int h = 0; h < 2; h++)
    part[(split * 2 + lift) * 128 + pairs * 32 + u * 16 + h * 8 + (lane >> 2)] = acc[0][u][h];
  BARRIER();
  if (sg == 0) {
    float a[4] = {0.0f, 0.0f, 0.0f, 0.0f}, b[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL for (int p = 0; p < KS; p++) UNROLL for (int i = 0; i < 4; i++) {
      a[i] += part[p * 256 + lane * 4 + i]; b[i] += part[p * 256 + 128 + lane * 4 + i];
    }
"""
    + _ACT
    + "  }\n"
)

# act of EXL3_TENSOR_UP, w2, svh2, v2, z2 as below -> out fp32 [M, KZ, N]: sums of all slots, each of PER runs of 128 inputs of part gz. The runs of
# all slots are dealt out to KS SIMD groups per two columns of tiles. Groups (N / 128, M, KZ) of 128 * KS threads.
_TENSOR_DOWN = r"""
  constexpr int KM = SHARED && K2S > K2 ? K2S : K2;
  SHM uint4 ring[4 * KS * ST * 4 * KM];
  SHM float part[KS][S][128];
  const u32 pairs = sg & 3u, split = sg >> 2, t = lane & 3u;
  const u32 from = gz * PER, count = UMN(PER, I / 128 - from), first = S * count * split / KS, end = S * count * (split + 1) / KS;
  AFTER();
  uint4* mine = ring + sg * (ST * 4 * KM);
  u32 slot = first / count, at = first % count;
  int left = (int)(end - first);
  const u8* run = 0;
  auto aim = [&]() {
    const bool own = SHARED && slot == S - 1;
    const u64 e = own ? 0 : (u64)idx[gy * (S - SHARED) + slot];
    run = (const u8*)(own ? v2 : w2) + ((e * (I / 128) + from + at) * 8 * (N / 16) + gx * 8 + pairs * 2) * (16 * (own ? K2S : K2));
  };
  if (left > 0) aim();
  // The runs of one slot after the other.
  auto next = [&]() {
    const bool own = SHARED && slot == S - 1;
    const place p = {left > 0 ? run : 0, own};
    left--; at++; run += 8 * N * (own ? K2S : K2);
    if (at == count) { at = 0; slot++; if (left > 0) aim(); }
    return p;
  };
  stream<N, K2, SHARED ? K2S : K2, ST, 4 * KM> tiles(mine, lane, next);
  // A slot of which these SIMD groups have no run.
  UNROLL for (int j = 0; j < S; j++) part[split][j][pairs * 32 + lane] = 0.0f;
  auto scales = [&](u32 j) {
    const bool own = SHARED && j == S - 1;
    return (const u16*)(own ? z2 : svh2) + (own ? 0 : (u64)idx[gy * (S - SHARED) + j]) * N + gx * 128 + lane * 4;
  };
  if (sg < S) soon(scales(sg));
  __syncwarp();
  ROLLED for (u32 i = first; i < end;) {
    const u32 j = i / count, run = i % count, runs = UMN(end - i, count - run);
    const u32* X[1] = {act + (((u64)gy * S + j) * (I / 128) + from + run) * 132};
    float acc[1][2][2];
    if (SHARED && j == S - 1 && (K2S != K2 || BOOKS != BOOK)) tiles.template sums<132, K2S, BOOKS, 1>(next, X, X, runs, acc);
    else tiles.template sums<132, K2, BOOK, 1>(next, X, X, runs, acc);
    if (t == 0) UNROLL for (int u = 0; u < 2; u++) UNROLL for (int h = 0; h < 2; h++)
      part[split][j][pairs * 32 + u * 16 + h * 8 + (lane >> 2)] = acc[0][u][h];
    i += runs;
  }
  BARRIER();
  for (u32 j = sg; j < S; j += 4 * KS) {
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL for (int p = 0; p < KS; p++) UNROLL for (int i = 0; i < 4; i++) v[i] += part[p][j][lane * 4 + i];
    mix128(v, lane);
    const u16* scale = scales(j);
    UNROLL for (int i = 0; i < 4; i++) part[0][j][lane * 4 + i] = v[i] * 0.08838834764831845f * h2f(scale[i]);
  }
  BARRIER();
  if (sg == 0) {
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL for (int j = 0; j < S; j++) {
      const float* p = part[0][j] + lane * 4;
      o.x += p[0]; o.y += p[1]; o.z += p[2]; o.w += p[3];
    }
    *(float4*)(out + ((u64)gy * KZ + gz) * N + gx * 128 + lane * 4) = o;
  }
"""

_TURN_INPUTS = ("x", "idx", "suh1", "suh3", "v1", "v3")
_UP_INPUTS = ("xh", "idx", "wt", "w1", "svh1", "w3", "svh3", "suh2", "v1", "z1", "v3", "z3", "z2")
_DOWN_INPUTS = ("act", "idx", "w2", "svh2", "v2", "z2")

EXL3_TURN = Kernel("exl3_turn", _TURN_INPUTS, ("xh",), _TURN, MIX + _PLAIN_PUT)
EXL3_UP = Kernel("exl3_up", _UP_INPUTS, ("act",), _UP, MIX + _PLAIN_PUT + _PLAIN_SUMS)
EXL3_DOWN = Kernel("exl3_down", _DOWN_INPUTS, ("out",), _DOWN, MIX + _PLAIN_SUMS)
EXL3_TENSOR_TURN = Kernel("exl3_tensor_turn", _TURN_INPUTS, ("xh",), _TURN, MIX + SPLIT, "cuda")
EXL3_TENSOR_UP = Kernel("exl3_tensor_up", _UP_INPUTS, ("act",), _TENSOR_UP, MIX + SPLIT + UNIT, "cuda", early=True)
EXL3_TENSOR_DOWN = Kernel("exl3_tensor_down", _DOWN_INPUTS, ("out",), _TENSOR_DOWN, MIX + UNIT, "cuda", early=True)

# parts fp32 [M, S, N] by ascending slot, then addend bf16 [M, N] (ADD), summed in fp32 -> out bf16 [M, N]. Groups (N / 128, M) of 32 threads.
EXL3_SUM = Kernel(
    "exl3_sum",
    ("parts", "addend"),
    ("out",),
    r"""
  const u32 at = gx * 128 + lane * 4;
  float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int j = 0; j < S; j++) {
    const float4 p = *(DEV const float4*)(parts + ((u64)gy * S + j) * N + at);
    v[0] += p.x; v[1] += p.y; v[2] += p.z; v[3] += p.w;
  }
  if (ADD) {
    float a[4];
    loadn<4, 0>((DEV const u32*)addend, (u64)gy * N + at, a);
    UNROLL for (int i = 0; i < 4; i++) v[i] += a[i];
  }
  uint2 o;
  o.x = pack2(v[0], v[1]); o.y = pack2(v[2], v[3]);
  *(DEV uint2*)((DEV u16*)out + (u64)gy * N + at) = o;
""",
)
