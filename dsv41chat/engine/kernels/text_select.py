"""Texts of choices: index scores, the deterministic top k, and the router's choice. Source: spec: kernels, 4 (e), (f).

A choice is a set: higher score first, then the smaller index, written in ascending order. It does not depend on the width of the list.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel

# sum over heads of relu(q . key) * weight: q [M, IH, IC], keys [T, IC] bf16, hw fp32 [M, IH], len int32 [M], dims int32 [0] = T
# -> sc fp32 [M, T], -inf from len on. A lane owns heads lane, lane + 32, ..; a SIMD group KPS keys.
# Groups (ceil(T / (NSG * KPS)) or more, M) of 32 * NSG threads.
INDEX_SCORES = Kernel(
    "index_scores",
    ("q", "hw", "keys", "len", "dims"),
    ("sc",),
    r"""
  const int T = dims[0], n = len[gy], first = (int)(gx * NSG + sg) * KPS;
  if ((int)(gx * NSG) * KPS >= T) return;
  float acc[KPS];
  UNROLL for (int j = 0; j < KPS; j++) acc[j] = 0.0f;
  for (u32 head = lane; head < IH; head += 32) {
    float qv[IC];
    UNROLL for (int i = 0; i < IC; i += 8) loadn<8, 0>((DEV const u32*)q, ((u64)gy * IH + head) * IC + i, qv + i);
    const float w = hw[gy * IH + head];
    UNROLL for (int j = 0; j < KPS; j++) {
      if (first + j < n && first + j < T) {
        float a = 0.0f;
        UNROLL for (int i = 0; i < IC; i += 8) {
          float v[8];
          loadn<8, 0>((DEV const u32*)keys, (u64)(first + j) * IC + i, v);
          UNROLL for (int e = 0; e < 8; e++) a = FMA(qv[i + e], v[e], a);
        }
        acc[j] = FMA(MX(a, 0.0f), w, acc[j]);
      }
    }
  }
  UNROLL for (int j = 0; j < KPS; j++) {
    const float s = wsum(acc[j]);
    if (lane == 0 && first + j < T) sc[(u64)gy * T + first + j] = first + j < n ? s : asf(0xff800000u);
  }
""",
)

# sc fp32 [M, T], dims int32 [0] = T -> index int32 [M, SLOTS] of the K largest, ascending, and present bool [M, SLOTS]; slots without
# one come last and hold 0; -inf is never taken.
# Four passes over 8 bits of a sortable key find the last pick and how many of its equals are taken (with fewer than K to take: all);
# then every thread writes the picks of its own run. One group of NTH threads per row.
TOP_K = Kernel(
    "top_k",
    ("sc", "dims"),
    ("index", "present"),
    r"""
  SHM u32 hist[256]; SHM u32 ws[2][32]; SHM u32 st[4];
  const u32 T = (u32)dims[0], per = (T + NTH - 1) / NTH;
  DEV const float* S = sc + (u64)gx * T;
  u32 prefix = 0, need = K;
  for (int pass = 3; pass >= 0; pass--) {
    for (u32 i = tid; i < 256; i += NTH) hist[i] = 0;
    if (tid == 0) { st[0] = 0; st[1] = 0; }
    BARRIER();
    for (u32 i = tid; i < T; i += NTH) {
      const u32 key = sortable(S[i]);
      const bool same = pass == 3 || (key >> (8 * pass + 8)) == (prefix >> (8 * pass + 8));
      if (same && key != NOTHING) ATOMIC_INC(&hist[(key >> (8 * pass)) & 255u]);
    }
    BARRIER();
    if (tid < 32) {
      u32 c[8], t = 0;
      UNROLL for (int b = 0; b < 8; b++) { c[b] = ATOMIC_GET(&hist[255 - (lane * 8 + b)]); t += c[b]; }
      u32 inc = t;
      UNROLL for (int o = 1; o < 32; o <<= 1) { const u32 z = SHIDX(inc, (lane - o) & 31u); if (lane >= (u32)o) inc += z; }
      u32 run = inc - t;
      UNROLL for (int b = 0; b < 8; b++) {
        if (run < need && run + c[b] >= need) { st[0] = 255 - (lane * 8 + b); st[1] = need - run; }
        run += c[b];
      }
    }
    BARRIER();
    prefix |= st[0] << (8 * pass);
    need = st[1];
    BARRIER();
  }
  const u32 a = UMN(tid * per, T), z = UMN(a + per, T);
  u32 gt = 0, eq = 0;
  for (u32 i = a; i < z; i++) {
    const u32 key = sortable(S[i]);
    const bool seen = key != NOTHING;
    gt += seen && key > prefix; eq += seen && key == prefix;
  }
  u32 gi = gt, ei = eq;
  UNROLL for (int o = 1; o < 32; o <<= 1) {
    const u32 x = SHIDX(gi, (lane - o) & 31u), y = SHIDX(ei, (lane - o) & 31u);
    if (lane >= (u32)o) { gi += x; ei += y; }
  }
  if (lane == 31) { ws[0][sg] = gi; ws[1][sg] = ei; }
  BARRIER();
  u32 before = gi - gt, e = ei - eq;
  u32 all = 0, equal = 0;
  for (u32 i = 0; i < NTH / 32; i++) {
    if (i < sg) { before += ws[0][i]; e += ws[1][i]; }
    all += ws[0][i]; equal += ws[1][i];
  }
  all += UMN(equal, need);
  u32 pos = before + UMN(e, need);
  for (u32 i = a; i < z; i++) {
    const u32 key = sortable(S[i]);
    const bool seen = key != NOTHING, tie = seen && key == prefix;
    if ((seen && key > prefix) || (tie && e < need)) { index[gx * SLOTS + pos] = (int)i; present[gx * SLOTS + pos++] = true; }
    e += tie;
  }
  for (u32 i = all + tid; i < SLOTS; i += NTH) { index[gx * SLOTS + i] = 0; present[gx * SLOTS + i] = false; }
""",
    """
// Unsigned keys in the order of the floats; the two zeros are equal, as they are to a comparison.
#define NOTHING 0x007fffffu
FN u32 sortable(float f) {
  const u32 u = f == 0.0f ? 0u : asu(f);
  return u ^ ((u >> 31) ? 0xffffffffu : 0x80000000u);
}
""",
)

# Router: lg fp32 [M, E] logits, bias and bias2 fp32 [E], image [M] (rows that use bias2, when IMAGES; int32 token ids, when HASHED), ids int32
# [vocab, PK] ascending (the choice of a token id, when HASHED). Scores: SCORING 0 sqrt(softplus), 1 sigmoid, of logits / TEMP. The PK best by
# score + bias, by ascending id -> idx int32, wt fp32 [M, PK]: score / (sum + 1e-20) * FACTOR. One SIMD group per row.
ROUTE = Kernel(
    "route",
    ("lg", "bias", "bias2", "image", "ids"),
    ("idx", "wt"),
    r"""
  constexpr int PER = (E + 31) / 32;
  const float none = asf(0xff800000u);
  float s[PER], v[PER];
  UNROLL for (int i = 0; i < PER; i++) {
    const u32 e = i * 32 + lane;
    s[i] = 0.0f; v[i] = none;
    if (e < E) {
      const float z = lg[(u64)gx * E + e] / asf((u32)TEMP);
      if (SCORING == 0) {
        const float t = EXPF(-FABS(z)), u = 1.0f + t;
        s[i] = SQRTF(MX(z, 0.0f) + (u == 1.0f ? t : LOGF(u) * (t / (u - 1.0f))));
      } else {
        s[i] = sigm(z);
      }
      v[i] = s[i] + (IMAGES && image[gx] ? bias2[e] : bias[e]);
    }
  }
  u32 id[PK]; float w[PK]; float tot = 0.0f;
  UNROLL for (int r = 0; r < PK; r++) {
    float best = none, score = 0.0f; u32 which = 0xffffffffu;
    UNROLL for (int i = 0; i < PER; i++) {
      const u32 e = i * 32 + lane;
      const bool here = HASHED ? e == (u32)ids[(u64)image[gx] * PK + r] : v[i] > best;
      if (here) { best = v[i]; which = e; score = s[i]; }
    }
    UNROLL for (int o = 16; o > 0; o >>= 1) {
      const float ob = SHXOR(best, o), os = SHXOR(score, o); const u32 ow = SHXOR(which, o);
      const bool other = HASHED ? ow < which : ob > best || (ob == best && ow < which);
      if (other) { best = ob; which = ow; score = os; }
    }
    id[r] = which; w[r] = score;
    UNROLL for (int i = 0; i < PER; i++) if ((u32)(i * 32) + lane == which) v[i] = none;
  }
  // Summed by ascending id, like everything that the choice orders.
  u32 rank[PK]; float sorted[PK];
  UNROLL for (int r = 0; r < PK; r++) {
    u32 p = 0;
    UNROLL for (int q = 0; q < PK; q++) p += id[q] < id[r] || (id[q] == id[r] && q < r);
    rank[r] = p;
  }
  UNROLL for (int p = 0; p < PK; p++) {
    sorted[p] = 0.0f;
    UNROLL for (int r = 0; r < PK; r++) if (rank[r] == (u32)p) sorted[p] = w[r];
    tot += sorted[p];
  }
  if (lane < PK) {
    int me = 0; float mw = 0.0f;
    UNROLL for (int r = 0; r < PK; r++) if (rank[r] == lane) { me = id[r] < E ? (int)id[r] : 0; mw = w[r] / (tot + 1e-20f) * asf((u32)FACTOR); }
    idx[gx * PK + lane] = me;
    wt[gx * PK + lane] = mw;
  }
""",
)
