"""Texts of the hyper-connection between two sublayers: two dispatches. Source: spec: kernels, 4 (c).

Four streams. Coefficients of a sublayer, all fp32: pre [M, 4], post [M, 4], comb [M, 4 (summed), 4]. post and comb of the sublayer that
produced `y` spread it over the streams; in V4.1 its pre also collapses them for the next sublayer (STAGGER), in V4 the new pre does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_exl3 import MIX
from dsv41chat.engine.kernels.text_matrix import PAIR
from dsv41chat.engine.kernels.text_tensor import MMA


def _spread(y: str, after: str = "", joined: str = "") -> str:
    """The body of HYPER_SPREAD. y: the sublayer's output at channel d0 + d of row gy; joined: what makes it, while the streams are on their way;
    after: what stands before anything is read that is no weight."""
    return (
        r"""
  constexpr int G = D / DS;
  SHM float v[4][DS]; SHM float col[DS];
  DEV const u16* H = (DEV const u16*)h + (u64)gy * 4 * D;
  DEV u16* HN = (DEV u16*)hn + (u64)gy * 4 * D;
  const u32 d0 = gx * DS, d = tid;
  // On the way while the streams are spread.
  float2 f[3][4];
  UNROLL for (int q = 0; q < 3; q++) UNROLL for (int k = 0; k < 4; k++) {
    f[q][k].x = f[q][k].y = 0.0f;
    if (lane * 2 < DS) f[q][k] = *(DEV const float2*)(fn + ((u64)(sg + 8 * q) * 4 + k) * D + d0 + lane * 2);
  }
"""
        + after
        + r"""
  float old[4], po[4], co[16];
  if (d < DS) {
    UNROLL for (int j = 0; j < 4; j++) old[j] = bf2f(H[j * D + d0 + d]);
    if (EXPAND) UNROLL for (int k = 0; k < 4; k++) {
      po[k] = post[gy * 4 + k];
      UNROLL for (int j = 0; j < 4; j++) co[4 * j + k] = comb[gy * 16 + 4 * j + k];
    }
  }
"""
        + joined
        + r"""
  if (d < DS) {
    float c = 0.0f;
    const float yv = """
        + y
        + r""";
    UNROLL for (int k = 0; k < 4; k++) {
      float o = old[k];
      if (EXPAND) {
        o = MUL(po[k], yv);
        UNROLL for (int j = 0; j < 4; j++) o = FMA(co[4 * j + k], old[j], o);
        const u32 q = f2bf(o);
        HN[k * D + d0 + d] = (u16)q;
        o = bf2f(q);
      }
      v[k][d] = o;
      if (STAGGER) c = FMA(pre[gy * 4 + k], o, c);
    }
    if (STAGGER) { const u32 q = f2bf(c); ((DEV u16*)xc)[(u64)gy * D + d0 + d] = (u16)q; col[d] = bf2f(q); }
  }
  BARRIER();
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  UNROLL for (int k = 0; k < 4; k++) if (lane * 2 < DS) {
    const float x = v[k][lane * 2], y = v[k][lane * 2 + 1];
    UNROLL for (int q = 0; q < 3; q++) { s[q] = FMA(f[q][k].x, x, s[q]); s[q] = FMA(f[q][k].y, y, s[q]); }
  }
  if (sg == 0) {
    UNROLL for (int k = 0; k < 4; k++) for (u32 i = lane; i < DS; i += 32) s[3] = FMA(v[k][i], v[k][i], s[3]);
  } else if (STAGGER && sg == 1) {
    for (u32 i = lane; i < DS; i += 32) s[3] = FMA(col[i], col[i], s[3]);
  }
  UNROLL for (int q = 0; q < 4; q++) {
    s[q] = wsum(s[q]);
    if (lane == 0) part[((u64)gy * G + gx) * 32 + sg + 8 * q] = s[q];
  }
"""
    )


# h [M, 4, D], y [M, D], pre, post, comb, fn fp32 [24, 4 * D] -> hn [M, 4, D], xc [M, D] collapsed (STAGGER), part fp32 [M, G, 32]: over a
# slice of DS (32 or 64) channels, 24 products with fn, 24: the streams' sum of squares, 25: that of the collapsed row. EXPAND 0: hn is not written
# (the streams are h). Groups (G = D / DS, M) of 256 threads.
HYPER_SPREAD = Kernel(
    "hyper_spread",
    ("h", "y", "pre", "post", "comb", "fn"),
    ("hn", "xc", "part"),
    _spread("EXPAND ? bf2f(((DEV const u16*)y)[(u64)gy * D + d0 + d]) : 0.0f"),
)

# The same with y as it is before its parts are summed: fp32 [KZ, M, D] of EXL3_TENSOR, to be joined and turned (TURN) with svh and bias (BIAS), or
# fp32 [M, KZ, D] and addend bf16 (ADD) as EXL3_SUM has them; M = dims[0]. It is rounded to bf16.
HYPER_JOINED = Kernel(
    "hyper_joined",
    ("h", "parts", "svh", "bias", "addend", "pre", "post", "comb", "fn", "dims"),
    ("hn", "xc", "part"),
    _spread(
        "joined[(d0 & 127u) + d]",
        r"""
  float back[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (TURN && sg == 7) UNROLL for (int i = 0; i < 4; i++) back[i] = h2f(((const u16*)svh)[(d0 & ~127u) + lane * 4 + i]);
  AFTER();
""",
        r"""
  SHM float joined[128];
  if (sg == 7) {
    const u32 column = (d0 & ~127u) + lane * 4, n = TURN ? (u32)dims[0] : 0;
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL for (int z = 0; z < KZ; z++) {
      const float4 p = *(const float4*)(parts + (TURN ? (u64)z * n + gy : (u64)gy * KZ + z) * D + column);
      v[0] += p.x; v[1] += p.y; v[2] += p.z; v[3] += p.w;
    }
    if (TURN) {
      mix128(v, lane);
      UNROLL for (int i = 0; i < 4; i++) {
        v[i] = v[i] * 0.08838834764831845f * back[i];
        if (BIAS) v[i] += h2f(((const u16*)bias)[column + i]);
      }
    }
    if (ADD) {
      float a[4];
      loadn<4, 0>((const u32*)addend, (u64)gy * D + column, a);
      UNROLL for (int i = 0; i < 4; i++) v[i] += a[i];
    }
    UNROLL for (int i = 0; i < 4; i++) joined[lane * 4 + i] = rbf(v[i]);
  }
  BARRIER();
""",
    ),
    MIX,
    only="cuda",
    early=True,
)

# part -> pre, post, comb after Sinkhorn (ITERS column passes); x [M, D] = rms(collapsed row) * nw, from xc (STAGGER) or from the streams
# hn and the new pre; not at all when ROW is 0. scale fp32 [3 or more], base fp32 [24], nw fp32 [D]. One group per row: NTH threads (a
# multiple of 32, 256 to 960) for the sums and the row, and 32 for the coefficients, which take about as long.
HYPER_FINISH = Kernel(
    "hyper_finish",
    ("part", "scale", "base", "xc", "hn", "nw"),
    ("pre", "post", "comb", "x"),
    r"""
  constexpr int G = D / DS, L = (G + 7) / 8, PER = ROW ? (D + NTH * 8 - 1) / (NTH * 8) : 0;
  SHM float seg[8][32]; SHM float tot[32]; SHM float mine[4]; SHM float squares[32];
  // The SIMD group behind those of the row makes the coefficients.
  const bool mixer = sg == NTH / 32;
  const u32 m = lane < 24 ? lane : 0;
  float sc = 0.0f, ba = 0.0f;
  if (mixer) { sc = scale[m < 4 ? 0 : m < 8 ? 1 : 2]; ba = base[m]; }
  // This thread's runs of 8 channels of the collapsed row, or of the streams that it is made of, on the way during the sums.
  const u32 d0 = mixer ? D : tid * 8;
  uint4 row[PER + 1], u[PER + 1][4];
  float n[PER + 1][8];
  UNROLL for (int p = 0; p < PER; p++) if (d0 + p * NTH * 8 < D) {
    if (STAGGER) row[p] = *(DEV const uint4*)((DEV const u32*)xc + ((u64)gx * D + d0 + p * NTH * 8) / 2);
    else load4<D>((DEV const u32*)hn, (u64)gx * 4 * D + d0 + p * NTH * 8, u[p]);
  }
  if (sg < 8) {
    float s = 0.0f;
    UNROLL for (int i = 0; i < L; i++) { const int g = (int)sg * L + i; if (g < G) s += part[((u64)gx * G + g) * 32 + lane]; }
    seg[sg][lane] = s;
  }
  BARRIER();
  if (tid < 32) {
    float s = 0.0f;
    UNROLL for (int i = 0; i < 8; i++) s += seg[i][tid];
    tot[tid] = s;
  }
  BARRIER();
  const float hce = asf((u32)HCEPS), eps = asf((u32)EPS);
  float mix = 0.0f;
  if (mixer) {
    const float rs = 1.0f / SQRTF(tot[24] / (float)(4 * D) + eps);
    mix = FMA(tot[m] * rs, sc, ba);
    if (lane < 4) { const float p = sigm(mix) + hce; mine[lane] = p; pre[gx * 4 + lane] = p; }
    else if (lane < 8) post[gx * 4 + lane - 4] = 2.0f * sigm(mix);
  }
  if (ROW) {
    float sq = STAGGER ? tot[25] : 0.0f;
    if (!STAGGER) BARRIER();
    if (!STAGGER) UNROLL for (int p = 0; p < PER; p++) if (d0 + p * NTH * 8 < D) {
      float c[8], o[8];
      UNROLL for (int i = 0; i < 8; i++) c[i] = 0.0f;
      UNROLL for (int k = 0; k < 4; k++) {
        bf8(u[p][k], o);
        UNROLL for (int i = 0; i < 8; i++) c[i] = FMA(mine[k], o[i], c[i]);
      }
      row[p].x = pack2(c[0], c[1]); row[p].y = pack2(c[2], c[3]); row[p].z = pack2(c[4], c[5]); row[p].w = pack2(c[6], c[7]);
      bf8(row[p], c);
      UNROLL for (int i = 0; i < 8; i++) sq = FMA(c[i], c[i], sq);
    }
    UNROLL for (int p = 0; p < PER; p++) if (d0 + p * NTH * 8 < D) loadn<8, 1>((DEV const u32*)nw, d0 + p * NTH * 8, n[p]);
    if (!STAGGER) {
      sq = wsum(sq);
      if (lane == 0) squares[sg] = sq;
      BARRIER();
      sq = 0.0f;
      for (int i = 0; i < NTH / 32; i++) sq += squares[i];
    }
    const float r = 1.0f / SQRTF(sq / (float)D + eps);
    UNROLL for (int p = 0; p < PER; p++) if (d0 + p * NTH * 8 < D) {
      float c[8];
      bf8(row[p], c);
      uint4 w;
      w.x = pack2(c[0] * r * n[p][0], c[1] * r * n[p][1]); w.y = pack2(c[2] * r * n[p][2], c[3] * r * n[p][3]);
      w.z = pack2(c[4] * r * n[p][4], c[5] * r * n[p][5]); w.w = pack2(c[6] * r * n[p][6], c[7] * r * n[p][7]);
      *(DEV uint4*)((DEV u16*)x + (u64)gx * D + d0 + p * NTH * 8) = w;
    }
  }
  if (!mixer) return;
  float c = SHIDX(mix, 8 + (lane & 15u));
  float top = MX(c, SHXOR(c, 1));
  top = MX(top, SHXOR(top, 2));
  c = EXPF(c - top);
  float sum = c + SHXOR(c, 1);
  sum += SHXOR(sum, 2);
  c = c / sum + hce;
  // Every lane has the whole matrix, so that none waits for another.
  float a[16];
  UNROLL for (int i = 0; i < 16; i++) a[i] = SHIDX(c, i);
  for (int it = 0; it < ITERS; it++) {
    if (it) {
      UNROLL for (int i = 0; i < 4; i++) {
        const float r = inverse((a[i * 4] + a[i * 4 + 1]) + (a[i * 4 + 2] + a[i * 4 + 3]) + hce);
        UNROLL for (int j = 0; j < 4; j++) a[i * 4 + j] = MUL(a[i * 4 + j], r);
      }
    }
    UNROLL for (int j = 0; j < 4; j++) {
      const float r = inverse((a[j] + a[4 + j]) + (a[8 + j] + a[12 + j]) + hce);
      UNROLL for (int i = 0; i < 4; i++) a[i * 4 + j] = MUL(a[i * 4 + j], r);
    }
  }
  if (lane < 16) {
    c = a[0];
    UNROLL for (int i = 1; i < 16; i++) if (lane == (u32)i) c = a[i];
    comb[gx * 16 + lane] = c;
  }
""",
    r"""
// 8 channels of each stream
template <int D> FN void load4(DEV const u32* p, u64 at, THREAD uint4* u) {
  UNROLL for (int k = 0; k < 4; k++) u[k] = *(DEV const uint4*)(p + (at + (u64)k * D) / 2);
}
#ifdef __CUDACC__
FN float inverse(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
#else
FN float inverse(float x) { return 1.0f / x; }
#endif
""",
)


@cache
def finish_of_many(threads: int) -> Kernel:
    """HYPER_FINISH for many rows on CUDA, with NTH = threads: so few registers that the groups of a prompt of 512 tokens run all at once."""
    return replace(HYPER_FINISH, only="cuda", bounds=(threads + 32, 4 if threads <= 320 else 2))


# HYPER_SPREAD for the many rows of a prompt, on the matrix unit: the same arguments and results, over slices of DS (a multiple of 32) channels;
# rows = dims[0]. fn is split into three bf16 numbers whose sum it is, so that products are exact; a row's sums depend on the row alone.
# A SIMD group has 16 rows, lanes t = lane % 4 of each take every fourth run of 8 channels. Groups (G = D / DS, ceil(rows / (16 * NSG))) of
# 32 * NSG threads, which split the fn of up to 64 channels at a time for all of them.
TENSOR_SPREAD = Kernel(
    "tensor_spread",
    ("h", "y", "pre", "post", "comb", "fn", "dims"),
    ("hn", "xc", "part"),
    r"""
  constexpr int G = D / DS, HELD = DS % 64 ? 32 : 64, RUNS = HELD / 32 * 12;
  SHM uint4 thirds[RUNS * 96];
  const u32 g = lane >> 2, t = lane & 3u, M = (u32)dims[0], first = (gy * NSG + sg) * 16 + g;
  float acc[3][4], sq[2] = {0.0f, 0.0f}, cq[2] = {0.0f, 0.0f};
  UNROLL for (int n = 0; n < 3; n++) UNROLL for (int i = 0; i < 4; i++) acc[n][i] = 0.0f;
  // Rows beyond the last repeat it and are not written.
  const u32 row[2] = {UMN(first, M - 1), UMN(first + 8, M - 1)};
  u32 d = gx * DS + t * 8;
  uint4 old[2][4], in[2];
  auto fetch = [&]() {
    UNROLL for (int r = 0; r < 2; r++) {
      UNROLL for (int k = 0; k < 4; k++) old[r][k] = *(const uint4*)((const u16*)h + ((u64)row[r] * 4 + k) * D + d);
      if (EXPAND) in[r] = *(const uint4*)((const u16*)y + (u64)row[r] * D + d);
    }
  };
  fetch();
  _Pragma("unroll 1") for (u32 turn = 0; turn < DS / 32; turn++) {
    const u32 held = turn % (HELD / 32);
    if (held == 0) {
      if (turn) BARRIER();
      // Run i: 32 channels (i / 12) of a stream (i / 3 % 4), eight rows of fn (i % 3).
      UNROLL for (u32 j = 0; j < RUNS; j += NSG) {
        const u32 i = j + sg;
        if (i < RUNS) {
          const float4* F = (const float4*)(fn + ((u64)(i % 3 * 8 + g) * 4 + i / 3 % 4) * D + d + i / 12 * 32);
          const float4 u = F[0], v = F[1];
          uint4 a, b, c;
          three(u.x, u.y, a.x, b.x, c.x); three(u.z, u.w, a.y, b.y, c.y);
          three(v.x, v.y, a.z, b.z, c.z); three(v.z, v.w, a.w, b.w, c.w);
          thirds[i * 96 + lane] = a; thirds[i * 96 + 32 + lane] = b; thirds[i * 96 + 64 + lane] = c;
        }
      }
      BARRIER();
    }
    // Channels 2 p and 2 p + 1 of all streams.
    u32 now[2][4][4];
    UNROLL for (int r = 0; r < 2; r++) {
      u32 sum[4];
      // Read again each turn: there are not registers enough to keep them.
      float co[16], po[4], pr[4];
      if (EXPAND) UNROLL for (int j = 0; j < 4; j++) loadn<4, 1>((const u32*)comb, row[r] * 16 + j * 4, co + j * 4);
      if (EXPAND) loadn<4, 1>((const u32*)post, row[r] * 4, po);
      if (STAGGER) loadn<4, 1>((const u32*)pre, row[r] * 4, pr);
      UNROLL for (int p = 0; p < 4; p++) {
        float o[4][2], c[2] = {0.0f, 0.0f};
        UNROLL for (int k = 0; k < 4; k++) bf2(word(old[r][k], p), o[k]);
        if (EXPAND) {
          float v[2];
          bf2(word(in[r], p), v);
          UNROLL for (int k = 0; k < 4; k++) {
            float n[2];
            UNROLL for (int i = 0; i < 2; i++) {
              n[i] = MUL(po[k], v[i]);
              UNROLL for (int j = 0; j < 4; j++) n[i] = FMA(co[4 * j + k], o[j][i], n[i]);
            }
            now[r][k][p] = pair(n[0], n[1]);
          }
        } else {
          UNROLL for (int k = 0; k < 4; k++) now[r][k][p] = word(old[r][k], p);
        }
        UNROLL for (int k = 0; k < 4; k++) {
          float n[2];
          bf2(now[r][k][p], n);
          sq[r] = FMA(n[0], n[0], sq[r]); sq[r] = FMA(n[1], n[1], sq[r]);
          if (STAGGER) { c[0] = FMA(pr[k], n[0], c[0]); c[1] = FMA(pr[k], n[1], c[1]); }
        }
        if (STAGGER) {
          sum[p] = pair(c[0], c[1]);
          bf2(sum[p], c);
          cq[r] = FMA(c[0], c[0], cq[r]); cq[r] = FMA(c[1], c[1], cq[r]);
        }
      }
      if (first + 8 * r < M) {
        if (EXPAND) {
          UNROLL for (int k = 0; k < 4; k++) {
            const uint4 w = {now[r][k][0], now[r][k][1], now[r][k][2], now[r][k][3]};
            *(uint4*)((u16*)hn + ((u64)row[r] * 4 + k) * D + d) = w;
          }
        }
        if (STAGGER) { const uint4 w = {sum[0], sum[1], sum[2], sum[3]}; *(uint4*)((u16*)xc + (u64)row[r] * D + d) = w; }
      }
    }
    // The next streams are on their way during the products.
    d += 32;
    if (turn + 1 < DS / 32) fetch();
    UNROLL for (int k = 0; k < 4; k++) UNROLL for (int n = 0; n < 3; n++) {
      const uint4* F = thirds + ((held * 4 + k) * 3 + n) * 96 + lane;
      const uint4 a = F[0], b = F[32], c = F[64];
      UNROLL for (int p = 0; p < 4; p += 2) {
        mma(acc[n], now[0][k][p], now[1][k][p], now[0][k][p + 1], now[1][k][p + 1], word(c, p), word(c, p + 1));
        mma(acc[n], now[0][k][p], now[1][k][p], now[0][k][p + 1], now[1][k][p + 1], word(b, p), word(b, p + 1));
        mma(acc[n], now[0][k][p], now[1][k][p], now[0][k][p + 1], now[1][k][p + 1], word(a, p), word(a, p + 1));
      }
    }
  }
  UNROLL for (int r = 0; r < 2; r++) {
    sq[r] += SHXOR(sq[r], 1); sq[r] += SHXOR(sq[r], 2);
    cq[r] += SHXOR(cq[r], 1); cq[r] += SHXOR(cq[r], 2);
    if (first + 8 * r < M) {
      float* P = part + ((u64)row[r] * G + gx) * 32;
      UNROLL for (int n = 0; n < 3; n++) { P[n * 8 + 2 * t] = acc[n][2 * r]; P[n * 8 + 2 * t + 1] = acc[n][2 * r + 1]; }
      P[24 + t] = t == 0 ? sq[r] : t == 1 ? cq[r] : 0.0f;
      P[28 + t] = 0.0f;
    }
  }
""",
    MMA
    + PAIR
    + r"""
FN u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// Two floats as three pairs of bf16 whose sums they are: each takes the next 8 bits.
FN void three(float x, float y, u32& a, u32& b, u32& c) {
  float v[2];
  a = pair(x, y); bf2(a, v);
  x -= v[0]; y -= v[1];
  b = pair(x, y); bf2(b, v);
  c = pair(x - v[0], y - v[1]);
}
""",
    only="cuda",
)
