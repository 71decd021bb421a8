"""CUDA texts for trellis-coded matrices on the matrix unit. Source: spec: kernels, 4 (g).

The ring order of a tile is the order in which `mma` wants its first operand, of which a row is a column of the tile: a lane's eight values are
the whole operand, for columns t >> 2 and (t >> 2) + 8. Rows of x are the second operand. They are split into two half-precision numbers each,
which are neighbouring columns, so four rows cost the same as one and 22 bits of x are kept. A run of 128 inputs is scaled by a power of
two, which is taken back after its sums. Every SIMD group streams its own tiles through a ring in shared memory, two rows of tiles at a time.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_exl3 import DECODE8, MIX

# Words of 128 rotated inputs of a row: 4 pairs of tiles x 2 halves x 4 lanes x 4 words, the scale, and three that are not used.
BLOCK_WORDS = 132
# Bytes of a stage of a ring for each half bit of a value: two rows of two tiles.
STAGE_BYTES = 64

SPLIT = r"""
#ifdef SHIM_CUDA
// float -> half, to nearest, ties to even
FN u32 f2h(float f) {
  const u32 u = asu(f), a = u & 0x7fffffffu, sign = (u >> 16) & 0x8000u;
  if (a > 0x7f800000u) return 0x7e00u;
  if (a >= 0x477ff000u) return sign | 0x7c00u;
  if (a < 0x38800000u) return sign | (asu(asf(a) + 0.5f) - 0x3f000000u);
  return sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13);
}
#else
FN u32 f2h(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
#endif
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
  DEV u32* p = out + run * 132 + (lane >> 3) * 32 + (lane & 1u) * 8 + (lane & 4u) / 2 + (lane >> 1 & 1u);
  p[0] = high[0] | high[1] << 16; p[4] = high[2] | high[3] << 16;
  p[16] = low[0] | low[1] << 16; p[20] = low[2] | low[3] << 16;
  if (lane == 0) { uint4 t; t.x = asu(asf((e - 14u) << 23)); t.y = 0; t.z = 0; t.w = 0; *(DEV uint4*)(out + run * 132 + 128) = t; }
}
"""

# What will be wanted from memory later.
SOON = r"""
#ifdef SHIM_CUDA
FN void soon(const void* p) {}
#else
FN void soon(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }
#endif
"""

# Sums of products of rotated rows by tiles, on the matrix unit.
UNIT = (
    DECODE8
    + SOON
    + r"""
#define ROLLED _Pragma("unroll 1")
#ifdef SHIM_CUDA
FN void mma16(float* c, const u32* a, u32 b0, u32 b1) { shim::matrix_half(c, a[0], a[2], a[1], a[3], b0, b1); }
FN u32 funnel(u32 low, u32 high, u32 shift) { return (low >> shift) | ((high << 1) << (31 - shift)); }
FN u32 up(u32 x, int by) { return x << by; }
FN u32 exact(float f) { const u32 u = asu(f), a = u & 0x7fffffffu; return (u >> 16 & 0x8000u) | (a ? (a - 0x38000000u) >> 13 : 0u); }
template <int BOOK> FN u32 two(u32 s, u32 t, u32 mask) { return exact(value<BOOK>(s)) | exact(value<BOOK>(t)) << 16; }
FN u32 kept(u32 number) { return number; }
FN u32 shared_at(const void* p) { return shim::shared_at((void*)p); }
FN void copy16(u32 to, const u8* from) { *(uint4*)shim::shared(to) = *(const uint4*)from; }
FN void sent() {}
template <int N> FN void arrived() { __syncwarp(); }
#else
FN void mma16(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "r"(b0), "r"(b1));
}
FN u32 funnel(u32 low, u32 high, u32 shift) {
  u32 d;
  asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(shift));
  return d;
}
// A shift to the left as a product, which the units for products do: those for shifts have enough to do.
FN u32 up(u32 x, int by) {
  u32 d;
  asm("mul.lo.u32 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(1u << by));
  return d;
}
FN u32 bytes(u32 x) {
  u32 d;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(0x01010101u), "r"(0x6400u));
  return d;
}
// A number that the compiler would otherwise put into a register again for each use. No group has such a place.
FN u32 kept(u32 number) {
  u32 d;
  asm volatile("{ .reg .u32 t; mov.u32 t, %%ctaid.z; shr.u32 t, t, 16; or.b32 %0, t, %1; }" : "=r"(d) : "r"(number));
  return d;
}
// The values of two states, as a pair of halves. mask: 0x8FFF8FFF. 0x6400 + s is the half 1024 + s, so one multiply-add makes the mul1 value.
template <int BOOK> FN u32 two(u32 s, u32 t, u32 mask) {
  u32 d;
  if (BOOK == 2) {
    const u32 both = __byte_perm(bytes(s * 0x83DCD12Du), bytes(t * 0x83DCD12Du), 0x5410);
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(both), "r"(0x1EEE1EEEu), "r"(0xC931C931u));
    return d;
  }
  const u32 x = ((BOOK == 0 ? s * 89226354u + 64248484u : s * 0xCBAC1FEDu) & mask) ^ 0x3B603B60u;
  const u32 y = ((BOOK == 0 ? t * 89226354u + 64248484u : t * 0xCBAC1FEDu) & mask) ^ 0x3B603B60u;
  asm("{ .reg .f16 a, b, c, d; mov.b32 {a, b}, %1; mov.b32 {c, d}, %2; add.rn.f16 a, a, b; add.rn.f16 c, c, d; mov.b32 %0, {a, c}; }"
      : "=r"(d) : "r"(x), "r"(y));
  return d;
}
FN u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
FN void copy16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
FN void sent() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest N copies are there, of every lane.
template <int N> FN void arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); __syncwarp(); }
#endif
// The 16 bits from bit AT of `a` on.
template <int AT> FN u32 window(u32 a) {
  if constexpr (AT == 0) return a & 0xFFFFu;
  else if constexpr (AT == 16) return a >> 16;
  else return up(a, 16 - AT) >> 16;
}
// Where a lane finds its eight values: from bit `shift` of the words at places[NW - 1] .. places[0] of a tile, the lowest last.
template <int K2> struct trellis {
  static constexpr int WORDS = 4 * K2, STEP = K2 % 8 == 0 ? 32 : K2 % 4 == 0 ? 16 : K2 % 2 == 0 ? 8 : 4;  // of the lanes' shifts
  static constexpr int TOP = 7 * (K2 / 2) + K2 % 2 * 4 + 16, NW = (32 - STEP + TOP + 31) / 32, NA = (TOP + 31) / 32;
  // All windows of up to 48 bits lie in the first 32 bits or in the last 32, if each lane can shift so far.
  static constexpr int LAST = TOP - 32;
  static constexpr bool NARROW = TOP <= 32 || (LAST <= 16 && LAST < STEP);
  u32 shift, places[NW], mask;
  FN trellis(u32 lane) : mask(kept(0x8FFF8FFFu)) {
    const u32 end = WORDS * (lane + 1), last = (end - 1) >> 5;
    shift = 32 * (last + 1) - end;
    UNROLL for (int i = 0; i < NW; i++) places[i] = (last + WORDS - i) % WORDS;
  }
  FN static constexpr int below(int j) { return (7 - j) * (K2 / 2) + (K2 % 2) * (4 - (j + 1) / 2); }
  template <int J> FN static u32 state(const u32* a) {
    constexpr int B = below(J);
    if constexpr (NARROW) return B <= 16 ? window<B <= 16 ? B : 0>(a[0]) : window<B <= 16 ? 0 : B - LAST>(a[1]);
    else if constexpr (B % 32 <= 16) return window<B % 32>(a[B / 32]);
    else return funnel(a[B / 32], a[B / 32 + 1], B % 32) & 0xFFFFu;
  }
  // The eight values of tile w as four pairs, as `decode8` finds them.
  template <int BOOK> FN void pairs8(const u32* w, u32* pairs) const {
    u32 raw[NW + 1], a[NA + 1];
    UNROLL for (int i = 0; i < NW; i++) raw[i] = w[places[i]];
    raw[NW] = 0;
    if constexpr (NARROW) {
      a[0] = funnel(raw[0], raw[1], shift);
      a[1] = TOP > 32 ? funnel(raw[0], raw[1], shift + (TOP > 32 ? LAST : 0)) : 0u;
    } else {
      UNROLL for (int i = 0; i < NA; i++) a[i] = funnel(raw[i], raw[i + 1], shift);
      a[NA] = 0;
    }
    pairs[0] = two<BOOK>(state<0>(a), state<1>(a), mask); pairs[1] = two<BOOK>(state<2>(a), state<3>(a), mask);
    pairs[2] = two<BOOK>(state<4>(a), state<5>(a), mask); pairs[3] = two<BOOK>(state<6>(a), state<7>(a), mask);
  }
};
// Two rows of two tiles of a matrix with N outputs, at `from`, to shared memory.
template <int N, int K2> FN void fetch(u32 to, const u8* from, u32 lane) {
  UNROLL for (int i = 0; i < (4 * K2 + 31) / 32; i++) {
    const u32 c = i * 32 + lane;
    if (4 * K2 % 32 == 0 || c < 4 * K2) copy16(to + c * 16, from + c * 16 + (c >= 2 * K2 ? (N - 32) * K2 : 0));
  }
}
// Two tiles of outputs times two of inputs. x[b]: of rows 4 * b .. and their halves. c[b][u]: columns lane >> 2, and 8 further, of tile u, times the
// high (0, 2) and the low half (1, 3) of row 4 * b + (lane & 3).
template <int K2, int BOOK, int NB> FN void stage(const trellis<K2>& where, const u32* w, const uint4* x, float (*c)[2][4]) {
  UNROLL for (int q = 0; q < 2; q++) UNROLL for (int u = 0; u < 2; u++) {
    u32 v[4];
    where.template pairs8<BOOK>(w + (q * 2 + u) * (4 * K2), v);
    UNROLL for (int b = 0; b < NB; b++) mma16(c[b][u], v, q ? x[b].z : x[b].x, q ? x[b].w : x[b].y);
  }
}
// A run of 128 inputs of two columns of tiles: where it starts, null for none, and whether it is the other kind of matrix, with K2S for K2.
struct place { const u8* at; bool other; };
// A SIMD group's ring of ST = 4 or 8 stages, EACH sixteens each; a run is four stages. `old` is the four that are used up, `now` those in use.
template <int N, int K2, int K2S, int ST, int EACH> struct stream {
  static_assert(ST == 4 || ST == 8);
  const uint4 *now, *old;
  place a, b;  // of the last run of which all but a stage is on its way, of the one after it
  u32 lane;
  FN void send(const uint4* to, const place& p, int s) const {
    if (p.at) {
      if (K2S != K2 && p.other) fetch<N, K2S>(shared_at(to), p.at + s * (2 * N * K2S), lane);
      else fetch<N, K2>(shared_at(to), p.at + s * (2 * N * K2), lane);
    }
    sent();
  }
  // next(): the places of the runs in order.
  template <class NEXT> FN stream(const uint4* ring, u32 lane, NEXT& next) : now(ring), old(ring + (ST - 4) * EACH), lane(lane) {
    b = next();
    if (ST == 8) {
      UNROLL for (int s = 0; s < 4; s++) send(now + s * EACH, b, s);
      b = next();
    }
    UNROLL for (int s = 0; s < 3; s++) send(old + s * EACH, b, s);
  }
  // acc[b][u][h]: row 4 * b + (lane & 3) of x times column lane >> 2 of half h of tile u, over the next `runs` runs, whose kind KIND is K2 or K2S.
  // X: the rows of x whose halves this lane gives, B: those whose sums it has; words from one run to the next are XS.
  template <int XS, int KIND, int BOOK, int NB, class NEXT>
  FN void sums(NEXT& next, const u32* const* X, const u32* const* B, int runs, float (*acc)[2][2]) {
    const trellis<KIND> where(lane);
    const u32 mine = (lane >> 2 & 1u) * 16 + (lane & 3u) * 4;
    const u32 *row[NB], *scale[NB];
    uint4 x[NB];
    UNROLL for (int b = 0; b < NB; b++) {
      UNROLL for (int u = 0; u < 2; u++) acc[b][u][0] = acc[b][u][1] = 0.0f;
      row[b] = X[b] + mine; scale[b] = B[b] + 128;
      x[b] = *(const uint4*)row[b];
    }
    ROLLED for (int run = 0; run < runs; run++) {
      float c[NB][2][4], back[NB];
      UNROLL for (int b = 0; b < NB; b++) {
        back[b] = asf(*scale[b]);
        scale[b] += XS;
        UNROLL for (int u = 0; u < 2; u++) UNROLL for (int i = 0; i < 4; i++) c[b][u][i] = 0.0f;
      }
      a = b; b = next();
      UNROLL for (int s = 0; s < 4; s++) {
        uint4 here[NB];
        UNROLL for (int i = 0; i < NB; i++) {
          here[i] = x[i];
          // Inputs of the next stage; the last run has none after it, and takes any.
          if (s == 3 && run + 1 < runs) row[i] += XS;
          x[i] = *(const uint4*)(row[i] + (s + 1) % 4 * 32);
        }
        arrived<ST - 2>();
        if (s == 0) send(old + 3 * EACH, a, 3);
        else send(now + (s - 1) * EACH, b, s - 1);
        stage<KIND, BOOK, NB>(where, (const u32*)(now + s * EACH), here, c);
      }
      const uint4* other = now;
      now = old; old = other;
      UNROLL for (int b = 0; b < NB; b++) UNROLL for (int u = 0; u < 2; u++) UNROLL for (int h = 0; h < 2; h++)
        acc[b][u][h] = FMA(c[b][u][2 * h] + c[b][u][2 * h + 1], back[b], acc[b][u][h]);
    }
  }
};
// `left` runs one after the other, from `at` on.
template <int N, int K2> struct in_order {
  const u8* at;
  int left;
  FN place operator()() {
    const place p = {left > 0 ? at : 0, false};
    left--; at += 8 * N * K2;
    return p;
  }
};
"""
)

# Sums of a run of 128 outputs, turned back.
FINISH = r"""
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

# As EXL3_ROTATE, with the result for the matrix unit: xh uint32 [M, P, K / 128 * BLOCK_WORDS], turned for P = 1 or 2 products on the row (suh, suh2).
# P2 and P3, 0 to 2: as many more for products whose rows lie elsewhere (suh3, suh4 and suh5, suh6). Groups (K / 128, M, P + P2 + P3) of 32 threads.
EXL3_SPLIT = Kernel(
    "exl3_split",
    ("x", "suh", "suh2", "suh3", "suh4", "suh5", "suh6"),
    ("xh", "xh2", "xh3"),
    r"""
  const u32 at = gx * 128 + lane * 4, set = gz < P ? 0 : gz < P + P2 ? 1 : 2, z = gz - (set == 0 ? 0 : set == 1 ? P : P + P2);
  const u16* first = (const u16*)(set == 0 ? suh : set == 1 ? suh3 : suh5);
  const u16* other = (const u16*)(set == 0 ? suh2 : set == 1 ? suh4 : suh6);
  const u16* scale = (z ? other : first) + at;
  float v[4], factor[4];
  UNROLL for (int i = 0; i < 4; i++) factor[i] = h2f(scale[i]);
  AFTER();
  loadn<4, XF>((const u32*)x, (u64)gy * K + at, v);
  UNROLL for (int i = 0; i < 4; i++) v[i] *= factor[i];
  mix128(v, lane);
  UNROLL for (int i = 0; i < 4; i++) v[i] *= 0.08838834764831845f;
  put4(set == 0 ? xh : set == 1 ? xh2 : xh3, ((u64)gy * (set == 0 ? P : set == 1 ? P2 : P3) + z) * (K / 128) + gx, lane, v);
""",
    MIX + SPLIT,
    only="cuda",
    early=True,
)

# Of G matrices side by side, or of one with N outputs and one with N2 on the same row, in groups ((N + N2) / 128, KZ, G) of 128 * KS threads:
# each takes PER of the runs of 128 inputs, shared by its KS SIMD groups per two columns of tiles.
_PLACE = r"""
  constexpr int NB = (R + 3) / 4, SETS = N2 ? 2 : G;
  SHM uint4 ring[4 * KS * ST * 4 * K2];
  const u32 g = lane >> 2, t = lane & 3u, pairs = sg & 3u, split = sg >> 2;
  const u32 from = gy * PER, count = UMN(PER, K / 128 - from), begin = count * split / KS, runs = count * (split + 1) / KS - begin;
  const bool second = N2 && gx >= N / 128;
  if (OF < 2) {
    soon((const u16*)svh + gz * N + gx * 128 + lane * 4);
    if (BIAS) soon((const u16*)bias + gz * N + gx * 128 + lane * 4);
  }
  u32 n = 0;
  float acc[NB][2][2];
  auto sum = [&](auto& tiles, auto& next) {
    AFTER();
    n = (u32)dims[0];
    const u32 *X[NB], *B[NB];
    // A column without a row repeats the last one.
    auto row = [&](u32 m) { return xh + ((u64)(UMN(m, n - 1) * SETS + (N2 ? second : gz)) * (K / 128) + from + begin) * 132; };
    UNROLL for (u32 b = 0; b < NB; b++) { X[b] = row(b * 4 + g / 2); B[b] = row(b * 4 + t); }
    tiles.template sums<132, K2, BOOK, NB>(next, X, B, runs, acc);
  };
  const uint4* mine = ring + sg * (ST * 4 * K2);
  if (second) {
    constexpr int W = N2 ? N2 : N;
    in_order<W, K2> next = {(const u8*)words2 + ((u64)(from + begin) * 8 * (W / 16) + (gx - N / 128) * 8 + pairs * 2) * (16 * K2), (int)runs};
    stream<W, K2, K2, ST, 4 * K2> tiles(mine, lane, next);
    sum(tiles, next);
  } else {
    in_order<N, K2> next = {(const u8*)words + (((u64)gz * (K / 16) + (from + begin) * 8) * (N / 16) + gx * 8 + pairs * 2) * (16 * K2), (int)runs};
    stream<N, K2, K2, ST, 4 * K2> tiles(mine, lane, next);
    sum(tiles, next);
  }
"""
_COLLECT = r"""
  // What the rings held has been used: sums of the splits take their place.
  BARRIER();
  float* part = (float*)ring;
  UNROLL for (u32 b = 0; b < NB; b++) if (b * 4 + t < R) UNROLL for (int u = 0; u < 2; u++) UNROLL for (int h = 0; h < 2; h++)
    part[(split * R + b * 4 + t) * 128 + pairs * 32 + u * 16 + h * 8 + g] = acc[b][u][h];
  BARRIER();
  for (u32 m = sg; m < n; m += 4 * KS) {
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL for (int s = 0; s < KS; s++) {
      const float4 p = *(const float4*)(part + (s * R + m) * 128 + lane * 4);
      v[0] += p.x; v[1] += p.y; v[2] += p.z; v[3] += p.w;
    }
    const u32 column = gz * N + gx * 128 + lane * 4;
    if (OF == 2) {
      const float4 o = {v[0], v[1], v[2], v[3]};
      *(float4*)((float*)out + ((u64)gy * n + m) * (G * N + N2) + column) = o;
    } else {
      finish4<BIAS, OF>(v, (const u16*)svh, (const u16*)bias, column, out, (u64)m * (G * N) + column, lane);
    }
  }
"""

# As EXL3_MATVEC, with xh of EXL3_SPLIT; rows = dims[0] <= R, 4 or 8. OF 0 or 1: KZ is 1, N2 0, out [rows, G * N] bf16 or fp32; OF 2: sums fp32
# [KZ, rows, G * N + N2], to be joined and turned. Rings of ST stages, 4 or 8; R <= ST * K2 / 2.
EXL3_TENSOR = Kernel(
    "exl3_tensor",
    ("xh", "words", "words2", "svh", "bias", "dims"),
    ("out",),
    _PLACE + _COLLECT,
    MIX + UNIT + FINISH,
    only="cuda",
    early=True,
)
