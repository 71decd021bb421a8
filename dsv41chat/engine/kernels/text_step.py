"""Texts of what stands between the large kernels of a decode step: rows in, taps, gates, pooling, places. Source: spec: kernels, 4; V4.1 5.2.

Four streams. A row's bits depend on nothing but its own inputs. Arrays that may be small (ids, lengths, coefficients) are only indexed.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_matrix import DECODE, RUN8

# ids int32 [M], a table [V, D] in a form of `text_matrix`, or MODE 5: fp16 -> h bf16 [M, 4, D], the row four times; computed in fp32 and
# rounded once. A thread decodes a run of 8, 16 bytes of the result beside those of its neighbours. Groups (ceil(D / (8 * NTH)), M) of NTH threads.
EMBED = Kernel(
    "embed",
    ("ids", "w", "sc", "bi"),
    ("h",),
    r"""
  const u32 run = gx * NTH + tid;
  if (run >= D / 8) return;
  const u64 id = (u64)ids[gy], group = id * (D / GS) + run * 8 / GS;
  u32 a[8];
  run8<BITS>((DEV const u32*)w, id * (D / 8) + run, a);
  float s = 1.0f, b = 0.0f, v[8];
  if (MODE == 0) { s = number<SF>((DEV const u16*)sc, group); b = number<SF>((DEV const u16*)bi, group); }
  else if (MODE < 3) scales<MODE, BITS, SF>((DEV const u16*)sc, (DEV const u16*)bi, group, s, b);
  UNROLL for (int i = 0; i < 8; i++) {
    const float c = MODE == 5 ? h2f((a[i / 2] >> (16 * (i & 1))) & 0xffffu) : code<MODE, BITS>(a, i);
    // Without its 2^BITS an affine code is exact, so that the sum is rounded once.
    v[i] = MODE == 0 ? FMA(c - (float)(1u << (BITS & 31)), s, b) : MODE < 3 ? MUL(c, s) : c;
  }
  uint4 t;
  t.x = pack2(v[0], v[1]); t.y = pack2(v[2], v[3]); t.z = pack2(v[4], v[5]); t.w = pack2(v[6], v[7]);
  UNROLL for (int k = 0; k < 4; k++) *(DEV uint4*)((DEV u16*)h + ((u64)gy * 4 + k) * D + run * 8) = t;
""",
    DECODE + RUN8,
)

# h [M, 4, D], y [M, D] bf16, post fp32 [M, 4], comb fp32 [M, 4 (summed), 4] -> hn bf16 [M, 4, D], the bits of HYPER_SPREAD, and mean bf16
# [M, D] of the rounded streams. EXPAND 0: the streams are h, and hn is not written. Groups (ceil(D / (2 * NTH)), M) of NTH threads.
SETTLE = Kernel(
    "settle",
    ("h", "y", "post", "comb"),
    ("hn", "mean"),
    r"""
  const u32 d = (gx * NTH + tid) * 2;
  if (d >= D) return;
  float old[4][2], in[2], sum[2] = {0.0f, 0.0f};
  if (EXPAND) loadn<2, 0>((DEV const u32*)y, (u64)gy * D + d, in);
  UNROLL for (int j = 0; j < 4; j++) loadn<2, 0>((DEV const u32*)h, ((u64)gy * 4 + j) * D + d, old[j]);
  UNROLL for (int k = 0; k < 4; k++) {
    float r[2];
    UNROLL for (int i = 0; i < 2; i++) {
      r[i] = old[k][i];
      if (EXPAND) {
        float o = MUL(post[gy * 4 + k], in[i]);
        UNROLL for (int j = 0; j < 4; j++) o = FMA(comb[gy * 16 + 4 * j + k], old[j][i], o);
        r[i] = rbf(o);
      }
      sum[i] += r[i];
    }
    if (EXPAND) ((DEV u32*)hn)[(((u64)gy * 4 + k) * D + d) / 2] = pack2(r[0], r[1]);
  }
  ((DEV u32*)mean)[((u64)gy * D + d) / 2] = pack2(0.25f * sum[0], 0.25f * sum[1]);
""",
)

# h bf16 [M, 4, D], kv bf16 [M, 5 * D] (a key per stream, then the value), dead bool [M], qk fp32 [4, D] -> out = h + gate * value, bf16
# [M, 4, D]; SCALE: D^-0.5. Groups (4, M) of NTH threads, a stream each; threads own runs of 8 channels.
ENGRAM = Kernel(
    "engram",
    ("h", "kv", "dead", "qk"),
    ("out",),
    r"""
  constexpr int PER = (D + NTH * 8 - 1) / (NTH * 8);
  SHM float sums[3][32];
  DEV const u32* KV = (DEV const u32*)kv;
  const u64 stream = ((u64)gy * 4 + gx) * D, row = (u64)gy * 5 * D;
  float x[PER * 8], v[PER * 8], t[3] = {0.0f, 0.0f, 0.0f};
  UNROLL for (int p = 0; p < PER; p++) {
    const u32 d = (p * NTH + tid) * 8;
    if (d < D) {
      float k[8], q[8];
      loadn<8, 0>((DEV const u32*)h, stream + d, x + p * 8);
      loadn<8, 0>(KV, row + gx * D + d, k);
      loadn<8, 0>(KV, row + 4 * D + d, v + p * 8);
      loadn<8, 1>((DEV const u32*)qk, (u64)gx * D + d, q);
      UNROLL for (int i = 0; i < 8; i++) {
        const float a = x[p * 8 + i];
        t[0] = FMA(a, a, t[0]); t[1] = FMA(k[i], k[i], t[1]); t[2] = FMA(MUL(a, q[i]), k[i], t[2]);
      }
    }
  }
  UNROLL for (int j = 0; j < 3; j++) { t[j] = wsum(t[j]); if (lane == 0) sums[j][sg] = t[j]; }
  BARRIER();
  UNROLL for (int j = 0; j < 3; j++) { t[j] = 0.0f; for (int i = 0; i < NTH / 32; i++) t[j] += sums[j][i]; }
  const float eps = asf((u32)EPS), rh = 1.0f / SQRTF(t[0] / (float)D + eps), rk = 1.0f / SQRTF(t[1] / (float)D + eps);
  const float dot = t[2] * rh * rk * asf((u32)SCALE), root = SQRTF(MX(FABS(dot), 1e-6f));
  const float gate = dead[gy] ? 0.0f : sigm(dot >= 0.0f ? root : -root);
  UNROLL for (int p = 0; p < PER; p++) {
    const u32 d = (p * NTH + tid) * 8;
    if (d < D) {
      float o[8];
      UNROLL for (int i = 0; i < 8; i++) o[i] = x[p * 8 + i] + MUL(gate, v[p * 8 + i]);
      uint4 w;
      w.x = pack2(o[0], o[1]); w.y = pack2(o[2], o[3]); w.z = pack2(o[4], o[5]); w.w = pack2(o[6], o[7]);
      *(DEV uint4*)((DEV u16*)out + stream + d) = w;
    }
  }
""",
)

# h bf16 [M, 4, D] and fn fp32 [4, 4 * D] -> part fp32 [M, G, 5]: over a slice of DS channels, 4 products with fn, and the streams' sum of
# squares. Groups (G = D / DS, M) of 160 threads.
HEAD_MIX = Kernel(
    "head_mix",
    ("h", "fn"),
    ("part",),
    r"""
  constexpr int G = D / DS;
  float s = 0.0f;
  UNROLL for (int k = 0; k < 4; k++) for (u32 d = lane * 2; d < DS; d += 64) {
    float v[2], f[2];
    loadn<2, 0>((DEV const u32*)h, ((u64)gy * 4 + k) * D + gx * DS + d, v);
    f[0] = v[0]; f[1] = v[1];
    if (sg < 4) loadn<2, 1>((DEV const u32*)fn, ((u64)sg * 4 + k) * D + gx * DS + d, f);
    s = FMA(f[0], v[0], s); s = FMA(f[1], v[1], s);
  }
  s = wsum(s);
  if (lane == 0) part[((u64)gy * G + gx) * 5 + sg] = s;
""",
)

# x bf16 [M, D] = rms(sum of pre * streams, rounded) * nw: h bf16 [M, S, D], S 1 or 4, nw fp32 [D], pre fp32 [M, S], or with G > 0
# HEAD_MIX's parts [M, G, 5], scale fp32 [1] and base fp32 [4] that give it. NORM 0: the rounded sum itself. One group of NTH (a multiple
# of 32, at least 160) threads per row.
COLLAPSE = Kernel(
    "collapse",
    ("h", "pre", "nw", "scale", "base"),
    ("x",),
    r"""
  constexpr int PER = (D + NTH * 8 - 1) / (NTH * 8);
  SHM float tot[8]; SHM float squares[32];
  float mine[4];
  if (G) {
    float s = 0.0f;
    if (sg < 5) for (u32 g = lane; g < G; g += 32) s += pre[((u64)gx * G + g) * 5 + sg];
    s = wsum(s);
    if (lane == 0 && sg < 5) tot[sg] = s;
    BARRIER();
    const float rs = 1.0f / SQRTF(tot[4] / (float)(4 * D) + asf((u32)MIXEPS));
    UNROLL for (int k = 0; k < 4; k++) mine[k] = sigm(FMA(tot[k] * rs, scale[0], base[k])) + asf((u32)HCEPS);
  } else {
    UNROLL for (int k = 0; k < S; k++) mine[k] = pre[gx * S + k];
  }
  float c[PER * 8], sq = 0.0f;
  UNROLL for (int p = 0; p < PER; p++) {
    const u32 d = (p * NTH + tid) * 8;
    if (d < D) {
      float o[8];
      UNROLL for (int i = 0; i < 8; i++) c[p * 8 + i] = 0.0f;
      UNROLL for (int k = 0; k < S; k++) {
        loadn<8, 0>((DEV const u32*)h, ((u64)gx * S + k) * D + d, o);
        UNROLL for (int i = 0; i < 8; i++) c[p * 8 + i] = FMA(mine[k], o[i], c[p * 8 + i]);
      }
      UNROLL for (int i = 0; i < 8; i++) { const float z = rbf(c[p * 8 + i]); c[p * 8 + i] = z; sq = FMA(z, z, sq); }
    }
  }
  sq = wsum(sq);
  if (lane == 0) squares[sg] = sq;
  BARRIER();
  sq = 0.0f;
  for (int i = 0; i < NTH / 32; i++) sq += squares[i];
  const float r = 1.0f / SQRTF(sq / (float)D + asf((u32)EPS));
  UNROLL for (int p = 0; p < PER; p++) {
    const u32 d = (p * NTH + tid) * 8;
    if (d < D) {
      float n[8], o[8];
      loadn<8, 1>((DEV const u32*)nw, d, n);
      UNROLL for (int i = 0; i < 8; i++) o[i] = NORM ? c[p * 8 + i] * r * n[i] : c[p * 8 + i];
      uint4 w;
      w.x = pack2(o[0], o[1]); w.y = pack2(o[2], o[3]); w.z = pack2(o[4], o[5]); w.w = pack2(o[6], o[7]);
      *(DEV uint4*)((DEV u16*)x + (u64)gx * D + d) = w;
    }
  }
""",
)

# ring fp32 [R, 2 (value, gate), HALVES * W], slots int32 [N, HALVES * RATIO] rows of it, -1 for none -> pooled bf16 [N, W]:
# per channel the values under the softmax of the gates. HALVES 2: the first RATIO slots lend their first W channels, the others their
# second. A SIMD group owns PER neighbouring slots; their sums are joined in order. Groups (ceil(W / 32), N) of 32 * NSG threads, a lane
# per channel.
POOL_GROUPS = Kernel(
    "pool_groups",
    ("ring", "slots"),
    ("pooled",),
    r"""
  constexpr int ROWS = HALVES * RATIO, PER = (ROWS + NSG - 1) / NSG;
  SHM float tops[NSG][32]; SHM float sums[NSG][32]; SHM float values[NSG][32];
  const float none = asf(0xff800000u);
  const u32 c = gx * 32 + lane;
  const bool inside = c < W;
  DEV u16* P = (DEV u16*)pooled + (u64)gy * W + c;
  float g[PER], v[PER], top = none;
  UNROLL for (int i = 0; i < PER; i++) {
    const int at = (int)sg * PER + i, r = at < ROWS ? slots[gy * ROWS + at] : -1;
    g[i] = none; v[i] = 0.0f;
    if (r >= 0 && inside) {
      const u64 p = (u64)r * 2 * HALVES * W + (at < (HALVES - 1) * RATIO ? 0 : (HALVES - 1) * W) + c;
      v[i] = ring[p]; g[i] = ring[p + HALVES * W];
    }
    top = MX(top, g[i]);
  }
  tops[sg][lane] = top;
  BARRIER();
  UNROLL for (int i = 0; i < NSG; i++) top = MX(top, tops[i][lane]);
  float z = 0.0f, o = 0.0f;
  UNROLL for (int i = 0; i < PER; i++) {
    const float e = g[i] > none ? EXPF(g[i] - top) : 0.0f;
    z += e;
    o = FMA(e, v[i], o);
  }
  sums[sg][lane] = z; values[sg][lane] = o;
  BARRIER();
  if (sg) return;
  z = 0.0f; o = 0.0f;
  UNROLL for (int i = 0; i < NSG; i++) { z += sums[i][lane]; o += values[i][lane]; }
  if (inside) *P = (u16)f2bf(z > 0.0f ? o / z : 0.0f);
""",
)

# rows [M, WORDS words of 4 bytes], at int32 [M] -> row at[m] of target is row m; none where at[m] < 0. The rest of target stays.
# Groups (ceil(WORDS / NTH), M) of NTH threads.
SCATTER = Kernel(
    "scatter",
    ("rows", "at"),
    ("target",),
    r"""
  const u32 i = gx * NTH + tid;
  const int to = at[gy];
  if (to < 0 || i >= WORDS) return;
  ((DEV u32*)target)[(u64)to * WORDS + i] = ((DEV const u32*)rows)[(u64)gy * WORDS + i];
""",
)

# len int32 [M], dims int32 [0] = P -> index int32 [M, P] = 0, 1, 2, .. up to len, then 0; present bool [M, P]. Groups (ceil(P / NTH) or more,
# M) of NTH threads.
FIRST_VISIBLE = Kernel(
    "first_visible",
    ("len", "dims"),
    ("index", "present"),
    r"""
  const int P = dims[0], i = (int)(gx * NTH + tid);
  if (i >= P) return;
  const bool seen = i < len[gy];
  index[(u64)gy * P + i] = seen ? i : 0;
  present[(u64)gy * P + i] = seen;
""",
)

# sc fp32 [M, T], len int32 [M], dims int32 [0] = T, a multiple of BLOCK -> top fp32 [M, T / BLOCK]: a block's largest, +inf for the block
# of entry len - 1. LANES (a power of two) neighbouring lanes share a block. Groups (T / BLOCK / (NTH / LANES) or more, M) of NTH threads.
BLOCK_TOP = Kernel(
    "block_top",
    ("sc", "len", "dims"),
    ("top",),
    r"""
  constexpr u32 EACH = NTH / LANES;
  const u32 T = (u32)dims[0], B = T / BLOCK, b = gx * EACH + tid / LANES, part = tid % LANES;
  if (gx * EACH >= B) return;
  float m = asf(0xff800000u);
  if (b < B) for (u32 i = part; i < BLOCK; i += LANES) m = MX(m, sc[(u64)gy * T + b * BLOCK + i]);
  UNROLL for (int o = 1; o < LANES; o <<= 1) m = MX(m, SHXOR(m, o));
  const int n = len[gy];
  if (b < B && part == 0) top[(u64)gy * B + b] = n > 0 && (u32)(n - 1) / BLOCK == b ? asf(0x7f800000u) : m;
""",
)

# sc fp32 [M, T], index int32 [M, SLOTS] ascending blocks where present (absent ones last), dims int32 [0] = T -> out fp32 [M, T], -inf
# outside these blocks. Groups (ceil(T / NTH) or more, M) of NTH threads.
KEEP_BLOCKS = Kernel(
    "keep_blocks",
    ("sc", "index", "present", "dims"),
    ("out",),
    r"""
  const u32 T = (u32)dims[0], i = gx * NTH + tid;
  if (i >= T) return;
  const int b = (int)(i / BLOCK);
  const u64 row = (u64)gy * SLOTS;
  u32 low = 0, high = SLOTS;
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (present[row + middle] && index[row + middle] < b) low = middle + 1; else high = middle;
  }
  const bool kept = low < SLOTS && present[row + low] && index[row + low] == b;
  out[(u64)gy * T + i] = kept ? sc[(u64)gy * T + i] : asf(0xff800000u);
""",
)

# x fp32 [M, C] -> out fp32 [M, C] = x * FACTOR. Groups (ceil(C / NTH), M) of NTH threads.
SCALED = Kernel(
    "scaled",
    ("x",),
    ("out",),
    r"""
  const u32 c = gx * NTH + tid;
  if (c >= C) return;
  const u64 i = (u64)gy * C + c;
  out[i] = MUL(x[i], asf((u32)FACTOR));
""",
)

# x bf16 [N, W] -> out bf16 [N, W]: every row through the orthonormal Walsh-Hadamard matrix, in fp32, rounded once. W: a power of two;
# FACTOR: W^-0.5. Lanes own channels lane, lane + 32, .. Groups (N) of 32 threads.
HADAMARD = Kernel(
    "hadamard",
    ("x",),
    ("out",),
    r"""
  constexpr int EACH = W >= 32 ? W / 32 : 1;
  const u64 row = (u64)gx * W;
  float a[EACH];
  UNROLL for (int i = 0; i < EACH; i++) {
    const u32 c = i * 32 + lane;
    a[i] = c < W ? bf2f(((DEV const u16*)x)[row + c]) : 0.0f;
  }
  UNROLL for (int o = 1; o < 32 && o < W; o <<= 1) UNROLL for (int i = 0; i < EACH; i++) {
    const float t = SHXOR(a[i], o);
    a[i] = lane & o ? t - a[i] : a[i] + t;
  }
  UNROLL for (int o = 1; o < EACH; o <<= 1) UNROLL for (int i = 0; i < EACH; i++) if (!(i & o)) {
    const float u = a[i], v = a[i | o];
    a[i] = u + v;
    a[i | o] = u - v;
  }
  UNROLL for (int i = 0; i < EACH; i++) {
    const u32 c = i * 32 + lane;
    if (c < W) ((DEV u16*)out)[row + c] = (u16)f2bf(MUL(a[i], asf((u32)FACTOR)));
  }
""",
)

# What is known of a run of sums: the largest and where the first of these is, the smallest, and 1 where one is not finite.
_GUESS = r"""
struct guess { float top, low, fault; int place; };
FN guess nothing(int place) {
  guess g;
  g.top = -3.4e38f; g.low = 3.4e38f; g.fault = 0.0f; g.place = place;
  return g;
}
FN guess better(guess g, float top, float low, float fault, int place) {
  if (top > g.top || (top == g.top && place < g.place)) { g.top = top; g.place = place; }
  if (low < g.low) g.low = low;
  if (fault > g.fault) g.fault = fault;
  return g;
}
FN guess of_group(guess g) {
  for (int o = 16; o; o >>= 1) {
    const float t = SHXOR(g.top, o), l = SHXOR(g.low, o), f = SHXOR(g.fault, o);
    const int p = SHXOR(g.place, o);
    g = better(g, t, l, f, p);
  }
  return g;
}
"""

# base, add fp32 [V] -> of each of G runs of their sums: part fp32 [G, 4] = largest, smallest, and 1 where one is not finite; at int32 [G] =
# where the first of the largest is. Groups G of NTH threads.
GUESS_PARTS = Kernel(
    "guess_parts",
    ("base", "add"),
    ("part", "at"),
    r"""
  constexpr int RUN = (V + G - 1) / G;
  SHM float tops[32]; SHM float lows[32]; SHM float faults[32]; SHM int places[32];
  const int first = (int)gx * RUN, last = first + RUN < V ? first + RUN : V;
  guess g = nothing(V);
  for (int i = first + (int)tid; i < last; i += NTH) {
    const float v = base[i] + add[i];
    if (!(FABS(v) < 3.4e38f)) g.fault = 1.0f;
    if (v > g.top) { g.top = v; g.place = i; }
    if (v < g.low) g.low = v;
  }
  g = of_group(g);
  if (lane == 0) { tops[sg] = g.top; lows[sg] = g.low; faults[sg] = g.fault; places[sg] = g.place; }
  BARRIER();
  if (tid == 0) {
    for (int i = 1; i < NTH / 32; i++) g = better(g, tops[i], lows[i], faults[i], places[i]);
    part[gx * 4] = g.top; part[gx * 4 + 1] = g.low; part[gx * 4 + 2] = g.fault; part[gx * 4 + 3] = 0.0f;
    at[gx] = g.place;
  }
""",
    _GUESS,
)

# GUESS_PARTS' results -> id int32 [0]: where the first of the largest sums is; spread fp32 [0]: largest minus smallest, -1 where one is not
# finite. One group of 32 threads; G at most 128.
GUESS = Kernel(
    "guess",
    ("part", "at"),
    ("id", "spread"),
    r"""
  guess g = nothing(0x7fffffff);
  for (int i = (int)lane; i < G; i += 32) g = better(g, part[i * 4], part[i * 4 + 1], part[i * 4 + 2], at[i]);
  g = of_group(g);
  if (tid == 0) { id[0] = g.place < VOCAB ? g.place : 0; spread[0] = g.fault > 0.0f ? -1.0f : g.top - g.low; }
""",
    _GUESS,
)
