"""CUDA texts for the experts of a decode call, 4-bit affine in groups of 64, on the matrix unit. Source: spec: kernels, 4 (b), (h).

A SIMD group streams 16 rows of weights through a ring in shared memory, in blocks of 256 inputs, so that many bytes are on their way at
any time. Columns of the matrix unit are the rows of the call: an expert that several rows picked is read once. Which rows share a column
block changes no bit: a column depends on its own inputs alone, and inputs are added in one order.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_tensor import UNIT

# Of a block of 256 inputs: 16 rows of 128 bytes of codes, 16 x 4 scales, 16 x 4 biases.
STAGE_BYTES = 2304

_STREAM = r"""
#define ONCE _Pragma("unroll 1")
#ifdef SHIM_CUDA
FN void copy16(void* to, const void* from) { *(uint4*)to = *(const uint4*)from; }
FN void copy8(void* to, const void* from) { *(uint2*)to = *(const uint2*)from; }
FN void sent() {}
template <int N> FN void arrived() {}
FN void together() { shim::yield(); }
#else
FN void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
FN void copy8(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
FN void sent() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> FN void arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
FN void together() { __syncwarp(); }
#endif
// 256 inputs of 16 rows, 2048 bytes: rows lane / 8 and four further at `low`, of the last eight rows at `high`. 32 bytes of a row change
// places by its number, so that four rows are read without a conflict of banks.
template <int K> FN void fetch(uint4* to, const u32* low, const u32* high, u32 lane) {
  uint4* o = to + ((lane & ~7u) | ((lane & 7u) ^ ((lane >> 3) << 1)));
  copy16(o, low); copy16(o + 32, low + K / 2); copy16(o + 64, high); copy16(o + 96, high + K / 2);
}
FN float four(const uint2& v, int j) { const u32 u = j < 2 ? v.x : v.y; return asf(j & 1 ? u & 0xffff0000u : u << 16); }
// 256 inputs: rows g and g + 8 times columns 2 t and 2 t + 1. side: four scales of each of 16 rows, then biases, a row every EACH. The first
// HELD of four frags of the inputs X of column g are there already.
template <int EACH, int HELD> FN void block256(const uint4* at, const uint2* side, frag* f, const u16* X, u32 g, u32 t, float* acc) {
  const uint2* w = (const uint2*)at + g * 16 + t;
  side += g * EACH;
  const uint2 sa = side[0], sb = side[8 * EACH], za = side[16 * EACH], zb = side[24 * EACH];
  UNROLL for (int j = 0; j < 4; j++) {
    const u32 o = ((u32)j ^ (g & 3u)) * 4;
    const uint2 a = w[o], b = w[o + 128];
    // The sums of x over 64 inputs, in the layout of the result: a product with ones.
    float ones[4] = {0.0f, 0.0f, 0.0f, 0.0f}, c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const u32 one = 0x3F803F80u;
    if (j >= HELD) row16(X + j * 64, true, f[j]);
    const u32* p = f[j].p;
    UNROLL for (int q = 0; q < 8; q += 2) mma(ones, one, one, one, one, p[q], p[q + 1]);
    mma(c, nib(a.x, 0), nib(b.x, 0), nib(a.x, 4), nib(b.x, 4), p[0], p[1]);
    mma(c, nib(a.x, 8), nib(b.x, 8), nib(a.x, 12), nib(b.x, 12), p[2], p[3]);
    mma(c, nib(a.y, 0), nib(b.y, 0), nib(a.y, 4), nib(b.y, 4), p[4], p[5]);
    mma(c, nib(a.y, 8), nib(b.y, 8), nib(a.y, 12), nib(b.y, 12), p[6], p[7]);
    const float r = four(sa, j), s = four(sb, j), u = FMA(-128.0f, r, four(za, j)), v = FMA(-128.0f, s, four(zb, j));
    acc[0] = FMA(r, c[0], FMA(u, ones[0], acc[0])); acc[1] = FMA(r, c[1], FMA(u, ones[1], acc[1]));
    acc[2] = FMA(s, c[2], FMA(v, ones[2], acc[2])); acc[3] = FMA(s, c[3], FMA(v, ones[3], acc[3]));
  }
}
// The slot in which row r has the expert of pick q of the call, -1 without one. Equal picks of one row go with their like, in order.
template <int P> FN int like(const int* idx, u32 q, u32 r) {
  const u32 first = q / P * P;
  const int e = idx[q];
  int nth = 0, slot = -1;
  UNROLL for (u32 j = 0; j < P; j++) nth += first + j < q && idx[first + j] == e;
  UNROLL for (u32 j = 0; j < P; j++) if (idx[r * P + j] == e && nth-- == 0) slot = (int)j;
  return slot;
}
// The lowest row with a slot, of the eight rows lane / 4.
FN u32 lowest(int slot, u32 g) {
  u32 row = slot < 0 ? 8u : g;
  row = UMN(row, SHXOR(row, 4)); row = UMN(row, SHXOR(row, 8)); row = UMN(row, SHXOR(row, 16));
  return row;
}
"""

# Gate, up and activation: arguments as in `text_matrix.EXPERTS_UP`, rows = dims[0] <= 8. out [rows, S, I] bf16. A SIMD group owns the
# gate and up rows of eight outputs of one expert: the shared one, or that of pick gy - 1 if no earlier row has it. Its ring has ST stages
# of 256 inputs; scales and biases come for SB blocks at once, because 8 bytes of a row would each time read 32. ST - 1 <= SB <= 4.
# Groups (I / (8 * NSG), rows * (S - 1) + 1).
TENSOR_EXPERTS_UP = Kernel(
    "tensor_experts_up",
    ("x", "idx", "wt", "w1", "s1", "b1", "w3", "s3", "b3", "v1", "t1", "c1", "v3", "t3", "c3", "dims"),
    ("out",),
    r"""
  constexpr int P = S - 1;
  SHM uint4 ring[NSG * (ST + 1) * 128];
  const u32 g = lane >> 2, t = lane & 3u, tile = gx * NSG + sg;
  // Whose group this is shows before the number of rows is there: only earlier rows matter.
  const bool shared = gy == 0;
  if (!shared) AFTER();
  const u32 q = shared ? 0 : gy - 1, owner = q / P;
  if (!shared && lowest(g > owner ? -1 : like<P>(idx, q, UMN(g, owner)), g) != owner) return;
  const u64 row = (shared ? 0 : (u64)idx[q] * I) + tile * 8;
  const u64 first = (row + (lane >> 3)) * (K / 8) + (lane & 7u) * 4;
  const u32* low = (const u32*)(shared ? v1 : w1) + first;
  const u32* high = (const u32*)(shared ? v3 : w3) + first;
  // Eight lanes copy scales of the gate, eight of the up rows, then the biases: two rows at a time, 8 bytes a lane.
  const bfloat16_t* factors = lane < 8 ? (shared ? t1 : s1) : lane < 16 ? (shared ? t3 : s3) : lane < 24 ? (shared ? c1 : b1) : (shared ? c3 : b3);
  const u16* side = (const u16*)factors + (row + (lane >> 2 & 1u)) * (K / 64) + t * 4;
  uint4* mine = ring + sg * (ST + 1) * 128;
  uint2* sides = (uint2*)(mine + ST * 128);
  auto fill = [&](int stage, int block) {
    if (block < K / 256) {
      fetch<K>(mine + stage * 128, low + block * 32, high + block * 32, lane);
      if (block % SB == 0 && t < SB) {
        uint2* o = sides + (block / SB & 1) * 128 + (lane >> 3) * 32 + (lane & 7u);
        UNROLL for (int r = 0; r < 4; r++) copy8(o + r * 8, side + block * 4 + r * (K / 32));
      }
    }
    sent();
  };
  UNROLL for (int s = 0; s < ST - 1; s++) fill(s, s);
  if (shared) AFTER();
  const u32 M = (u32)dims[0];
  int slot = shared ? P : like<P>(idx, q, UMN(g, M - 1));
  if (g >= M) slot = -1;
  const int slots[2] = {SHIDX(slot, t * 8), SHIDX(slot, t * 8 + 4)};
  float weights[2] = {1.0f, 1.0f};
  UNROLL for (u32 i = 0; i < 2; i++) if (!shared && slots[i] >= 0) weights[i] = wt[(2 * t + i) * P + slots[i]];
  // A column without a row here repeats another one: it costs no further reading.
  const u16* X = (const u16*)x + (slot < 0 ? owner : g) * K + t * 16;
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  int here = 0, next = ST - 1;
  ONCE for (int i = 0; i < K / 256; i++) {
    frag f[4];
    UNROLL for (int j = 0; j < 4; j++) row16(X + i * 256 + j * 64, true, f[j]);
    arrived<ST - 2>();
    together();
    fill(next, i + ST - 1);
    block256<4, 4>(mine + here * 128, sides + (i / SB & 1) * 128 + i % SB, f, X, g, t, acc);
    here = here == ST - 1 ? 0 : here + 1; next = next == ST - 1 ? 0 : next + 1;
  }
  const float limit = asf((u32)LIMIT);
  UNROLL for (u32 i = 0; i < 2; i++) if (slots[i] >= 0) {
    const u32 m = 2 * t + i, j = (u32)slots[i];
    float a = acc[i], b = acc[2 + i];
    if (LIMIT > 0) { a = MN(a, limit); b = MN(MX(b, -limit), limit); }
    ((u16*)out)[(u64)(m * S + j) * I + tile * 8 + g] = (u16)f2bf(a * sigm(a) * b * weights[i]);
  }
""",
    UNIT + _STREAM,
    only="cuda",
    early=True,
)

# act [rows, S, I] bf16 -> out [rows, N] bf16, rows = dims[0] <= R: products of all slots, summed in fp32 by slot, the shared one last,
# rounded once. A group owns 16 outputs and reads every expert of the call once; NSG SIMD groups take one expert after the other, the first
# ones row 0's picks (NSG < S if R > 1). Their rings have ST <= I / 256 stages of 256 inputs. Groups (N / 16) of 32 * NSG threads.
TENSOR_EXPERTS_DOWN = Kernel(
    "tensor_experts_down",
    ("act", "idx", "w2", "s2", "b2", "v2", "t2", "c2", "dims"),
    ("out",),
    r"""
  constexpr int P = S - 1, NB = I / 256;
  SHM uint4 ring[NSG * ST * 144];
  SHM float part[R * S * 16];
  SHM int ids[R * P];
  SHM u8 owns[R * P], list[R * P], slots[R * P][8];
  const u32 M = R > 1 ? (u32)dims[0] : 1, g = lane >> 2, t = lane & 3u;
  u32 experts = P;
  uint4* mine = ring + sg * ST * 144;
  const u32* low = 0;
  const u16* side = 0;
  u32 filled = sg;  // what is on its way: block `at` of this expert comes next
  int at = 0, here = 0, next = ST - 1;
  auto begin = [&]() {
    // Row 0's picks come first in any list, so that they can be on their way before it is made.
    const bool routed = filled < P || filled < experts;
    const u64 row = (routed ? (u64)idx[filled < P ? filled : list[filled]] * N : 0) + gx * 16;
    low = (const u32*)(routed ? w2 : v2) + (row + (lane >> 3)) * (I / 8) + (lane & 7u) * 4;
    side = (const u16*)(lane < 16 ? (routed ? s2 : t2) : (routed ? b2 : c2)) + (row + (lane & 15u)) * (I / 64);
  };
  auto fill = [&](int stage) {
    if (filled <= experts) {
      uint4* o = mine + stage * 144;
      fetch<I>(o, low, low + I, lane);
      copy8((uint2*)(o + 128) + lane, side);
      low += 32; side += 4;
      if (++at == NB) { at = 0; filled += NSG; if (filled <= experts) begin(); }
    }
    sent();
  };
  begin();
  UNROLL for (int s = 0; s < ST - 1; s++) fill(s);
  if (R > 1) {
    // The picks whose expert no earlier row has, and the slots that the rows have it in.
    for (u32 q = tid; q < M * P; q += NSG * 32) ids[q] = idx[q];
    BARRIER();
    ONCE for (u32 q = sg; q < M * P; q += NSG) {
      int slot = like<P>(ids, q, UMN(g, M - 1));
      if (g >= M) slot = -1;
      const u32 owner = lowest(slot, g);
      if (t == 0) slots[q][g] = (u8)(slot + 1);
      if (lane == 0) owns[q] = owner == q / P;
    }
    BARRIER();
    u32 count = 0;
    _Pragma("unroll 8") for (u32 q = 0; q < M * P; q++) {
      if (tid == 0 && owns[q]) list[count] = (u8)q;
      count += owns[q];
    }
    experts = count;
    BARRIER();
  }
  ONCE for (u32 e = sg; e <= experts; e += NSG) {
    // A column without a row here repeats another one: it costs no further reading.
    int slot = (int)e;
    if (R > 1) slot = e == experts ? P : (int)slots[list[e]][g] - 1;
    if (g >= M) slot = -1;
    const u32 lender = lowest(slot, g), lent = SHIDX(slot, lender * 4);
    const u16* X = (const u16*)act + (slot < 0 ? lender * S + lent : g * S + slot) * I + t * 16;
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    ONCE for (int i = 0; i < NB; i++) {
      frag f[4];
      UNROLL for (int j = 0; j < 2; j++) row16(X + i * 256 + j * 64, true, f[j]);
      arrived<ST - 2>();
      together();
      fill(next);
      const uint4* o = mine + here * 144;
      block256<1, 2>(o, (const uint2*)(o + 128), f, X + i * 256, g, t, acc);
      here = here == ST - 1 ? 0 : here + 1; next = next == ST - 1 ? 0 : next + 1;
    }
    UNROLL for (u32 i = 0; i < 2; i++) {
      const int j = SHIDX(slot, (2 * t + i) * 4);
      float* o = part + ((2 * t + i) * S + j) * 16 + g;
      if (j >= 0) { o[0] = acc[i]; o[8] = acc[2 + i]; }
    }
  }
  BARRIER();
  for (u32 i = tid; i < 16 * M; i += 32 * NSG) {
    float sum = 0.0f;
    UNROLL for (int j = 0; j < S; j++) sum += part[((i >> 4) * S + j) * 16 + (i & 15u)];
    ((u16*)out)[(u64)(i >> 4) * N + gx * 16 + (i & 15u)] = (u16)f2bf(sum);
  }
""",
    UNIT + _STREAM,
    only="cuda",
)
