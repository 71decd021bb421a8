"""CUDA texts for the experts of a decode call, 4-bit affine in groups of 64, on the matrix unit. Source: spec: kernels, 4 (b), (h).

A SIMD group streams 16 rows of weights through a ring in shared memory, in blocks of 256 inputs, so that many bytes are on their way at
any time. Columns of the matrix unit are the rows of the call: an expert that several rows picked is read once. Which rows share a column
block changes no bit: a column depends on its own inputs alone, and inputs are added in one order.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_tensor import _UNIT

# Of a ring's stage: 16 rows of 128 bytes of codes, 16 x 4 scales, 16 x 4 biases.
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
// What a lane copies: row lane / 8 of the first and of the last eight rows, and the scales or biases of row lane % 16.
struct source { const u32* low; const u32* high; const u16* side; };
// rows: the first of the first eight rows in w, sc and bi; rows8: the first of the last eight in w8, sc8 and bi8.
template <int K> FN source sixteen(const void* w, const void* sc, const void* bi, u64 rows, const void* w8, const void* sc8, const void* bi8,
                                   u64 rows8, u32 lane) {
  source s;
  s.low = (const u32*)w + (rows + (lane >> 3)) * (K / 8) + (lane & 7u) * 4;
  s.high = (const u32*)w8 + (rows8 + (lane >> 3)) * (K / 8) + (lane & 7u) * 4;
  const u16* first = (const u16*)(lane < 16 ? sc : bi) + (rows + (lane & 7u)) * (K / 64);
  const u16* last = (const u16*)(lane < 16 ? sc8 : bi8) + (rows8 + (lane & 7u)) * (K / 64);
  s.side = lane & 8u ? last : first;
  return s;
}
// 32 bytes of a row change places by its number, so that four rows are read without a conflict of banks.
// NEXT: all sixteen rows are neighbours. Leaves `s` at the next block.
template <int K, int NEXT> FN void fetch(uint4* to, source& s, u32 lane) {
  uint4* o = to + ((lane & ~7u) | ((lane & 7u) ^ ((lane >> 3) << 1)));
  const u32* high = NEXT ? s.low + K : s.high;
  copy16(o, s.low); copy16(o + 32, s.low + K / 2); copy16(o + 64, high); copy16(o + 96, high + K / 2);
  copy8((uint2*)(to + 128) + lane, s.side);
  s.low += 32; s.high += 32; s.side += 4;
}
FN float four(const uint2& v, int j) { const u32 u = j < 2 ? v.x : v.y; return asf(j & 1 ? u & 0xffff0000u : u << 16); }
// 256 inputs: rows g and g + 8 times columns 2 t and 2 t + 1. f: the first half of the inputs X of column g.
FN void block256(const uint4* at, frag* f, const u16* X, u32 g, u32 t, float* acc) {
  const uint2* w = (const uint2*)at + g * 16 + t;
  const uint2* side = (const uint2*)(at + 128) + g;
  const uint2 sa = side[0], sb = side[8], za = side[16], zb = side[24];
  UNROLL for (int j = 0; j < 4; j++) {
    const u32 o = ((u32)j ^ (g & 3u)) * 4;
    const uint2 a = w[o], b = w[o + 128];
    // The sums of x over 64 inputs, in the layout of the result: a product with ones.
    float ones[4] = {0.0f, 0.0f, 0.0f, 0.0f}, c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const u32 one = 0x3F803F80u;
    if (j >= 2) row16(X + j * 64, true, f[j]);
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
# gate and up rows of eight outputs of one expert: the one of pick gy, if no earlier row has it, or the shared one. ST stages of its ring.
# Groups (I / (8 * NSG), rows * (S - 1) + 1).
TENSOR_EXPERTS_UP = Kernel(
    "tensor_experts_up",
    ("x", "idx", "wt", "w1", "s1", "b1", "w3", "s3", "b3", "v1", "t1", "c1", "v3", "t3", "c3", "dims"),
    ("out",),
    r"""
  SHM uint4 ring[NSG * ST * 144];
  const u32 M = (u32)dims[0], g = lane >> 2, t = lane & 3u, tile = gx * NSG + sg;
  const bool shared = gy == M * (S - 1);
  int slot = S - 1;
  source from;
  if (shared) {
    from = sixteen<K>(v1, t1, c1, tile * 8, v3, t3, c3, tile * 8, lane);
  } else {
    slot = like<S - 1>(idx, gy, UMN(g, M - 1));
    const u64 rows = (u64)idx[gy] * I + tile * 8;
    from = sixteen<K>(w1, s1, b1, rows, w3, s3, b3, rows, lane);
  }
  if (g >= M) slot = -1;
  const u32 owner = lowest(slot, g);
  if (!shared && owner != gy / (S - 1)) return;
  uint4* mine = ring + sg * ST * 144;
  UNROLL for (int s = 0; s < ST - 1; s++) { if (s < K / 256) fetch<K, 0>(mine + s * 144, from, lane); sent(); }
  // A column without a row here repeats another one: it costs no further reading.
  const u16* X = (const u16*)x + (slot < 0 ? owner : g) * K + t * 16;
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  int here = 0, next = ST - 1;
  ONCE for (int i = 0; i < K / 256; i++) {
    frag f[4];
    UNROLL for (int j = 0; j < 2; j++) row16(X + i * 256 + j * 64, true, f[j]);
    arrived<ST - 2>();
    together();
    if (i + ST - 1 < K / 256) fetch<K, 0>(mine + next * 144, from, lane);
    sent();
    block256(mine + here * 144, f, X + i * 256, g, t, acc);
    here = here == ST - 1 ? 0 : here + 1; next = next == ST - 1 ? 0 : next + 1;
  }
  const float limit = asf((u32)LIMIT);
  UNROLL for (u32 i = 0; i < 2; i++) {
    const u32 m = 2 * t + i;
    const int j = SHIDX(slot, m * 4);
    if (j >= 0) {
      const float weight = shared ? 1.0f : wt[m * (S - 1) + j];
      float a = acc[i], b = acc[2 + i];
      if (LIMIT > 0) { a = MN(a, limit); b = MN(MX(b, -limit), limit); }
      ((u16*)out)[(u64)(m * S + j) * I + tile * 8 + g] = (u16)f2bf(a * sigm(a) * b * weight);
    }
  }
""",
    _UNIT + _STREAM,
    only="cuda",
)

# act [rows, S, I] bf16 -> out [rows, N] bf16, rows = dims[0] <= R: products of all slots, summed in fp32 by slot, the shared one last,
# rounded once. A group owns 16 outputs and reads every expert of the call once; NSG SIMD groups take one expert after the other.
# Groups (N / 16) of 32 * NSG threads.
TENSOR_EXPERTS_DOWN = Kernel(
    "tensor_experts_down",
    ("act", "idx", "w2", "s2", "b2", "v2", "t2", "c2", "dims"),
    ("out",),
    r"""
  SHM uint4 ring[NSG * ST * 144];
  SHM float part[R * S * 16];
  SHM u8 owns[R * (S - 1)], list[R * (S - 1)], slots[R * (S - 1)][8];
  const u32 M = (u32)dims[0], g = lane >> 2, t = lane & 3u, picks = M * (S - 1);
  u32 experts = S - 1;
  if (R > 1) {
    // The picks whose expert no earlier row has.
    ONCE for (u32 q = sg; q < picks; q += NSG) {
      int slot = like<S - 1>(idx, q, UMN(g, M - 1));
      if (g >= M) slot = -1;
      const u32 owner = lowest(slot, g);
      if (t == 0) slots[q][g] = (u8)(slot + 1);
      if (lane == 0) owns[q] = owner == q / (S - 1);
    }
    BARRIER();
    experts = 0;
    ONCE for (u32 q = 0; q < picks; q++) {
      if (tid == 0 && owns[q]) list[experts] = (u8)q;
      experts += owns[q];
    }
    BARRIER();
  }
  uint4* mine = ring + sg * ST * 144;
  source from;
  from.low = from.high = 0; from.side = 0;
  u32 filled = sg;  // what is on its way: block `at` of this expert comes next
  int at = 0, here = 0, next = ST - 1;
  auto begin = [&]() {
    if (filled == experts) {
      from = sixteen<I>(v2, t2, c2, gx * 16, v2, t2, c2, gx * 16 + 8, lane);
    } else if (filled < experts) {
      const u64 rows = (u64)idx[R > 1 ? list[filled] : filled] * N + gx * 16;
      from = sixteen<I>(w2, s2, b2, rows, w2, s2, b2, rows + 8, lane);
    }
  };
  auto fill = [&](int stage) {
    if (filled <= experts) {
      fetch<I, 1>(mine + stage * 144, from, lane);
      if (++at == I / 256) { at = 0; filled += NSG; begin(); }
    }
    sent();
  };
  begin();
  UNROLL for (int s = 0; s < ST - 1; s++) fill(s);
  ONCE for (u32 e = sg; e <= experts; e += NSG) {
    // A column without a row here repeats another one: it costs no further reading.
    int slot = (int)e;
    if (R > 1) slot = e == experts ? S - 1 : (int)slots[list[e]][g] - 1;
    if (g >= M) slot = -1;
    const u32 lender = lowest(slot, g), lent = SHIDX(slot, lender * 4);
    const u16* X = (const u16*)act + (slot < 0 ? lender * S + lent : g * S + slot) * I + t * 16;
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    ONCE for (int i = 0; i < I / 256; i++) {
      frag f[4];
      UNROLL for (int j = 0; j < 2; j++) row16(X + i * 256 + j * 64, true, f[j]);
      arrived<ST - 2>();
      together();
      fill(next);
      block256(mine + here * 144, f, X + i * 256, g, t, acc);
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
    _UNIT + _STREAM,
    only="cuda",
)
