"""The CUDA text of a prompt's attention: a group of threads takes a row from its list to its result. Source: spec: kernels, 4 (d).

Of a list the slots in use are put together first, in order, so absent ones cost nothing and change no bit wherever they lie. They are
taken sixteen at a time with a running maximum. A SIMD group owns 64 channels of all heads of its group: queries and sums stay in its
registers, its part of the keys in memory that it alone fills and reads. What the SIMD groups share are parts of scores, and weights.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_attend_tensor import UNIT

# Steps of sixteen slots that are on their way.
RING = 3


def room(channels: int, tiles: int) -> int:
    """Bytes of shared memory for `tiles` times 16 heads: keys, parts of scores, weights, factors, list, and its runs of 32."""
    groups, heads = channels // 64, 16 * tiles
    return groups * (RING * 2048 + heads * 64) + heads * (48 + 4) + (128 * groups + 16) * 4 + groups * 16


# Arguments as in `text_attend_tensor`, sink fp32 [H] -> out [M, H, C] bf16. A row sees what is present of its W slots of the ring and
# of its P entries. The running maximum starts with the sink, and moves only when it grows by more than 8: weights up to e^8 are as good.
# Groups (H / (16 * MT) rounded up, M) of C / 2 threads, MT 1 or 2; SHARED_BYTES as `room` says.
TENSOR_PROMPT = Kernel(
    "tensor_prompt",
    ("q", "ring", "pool", "slots", "present", "index", "picked", "dims", "cosv", "sinv", "sink"),
    ("out",),
    r"""
  constexpr int NW = C / 64, HG = 16 * MT, BLOCKS = 4 * MT, EACH = (BLOCKS + NW - 1) / NW, PT = 12, OWN = 4, RUNS = OWN * NW, LIST = RUNS * 32;
  ROOM(SHARED_BYTES);
  uint4* keys = room + sg * (RING * 128);
  float* part = (float*)(room + NW * RING * 128);
  u32* weights = (u32*)(part + NW * HG * 16);
  float* factors = (float*)(weights + HG * PT);
  int* list = (int*)(factors + HG);
  u32* found = (u32*)(list + LIST + 16);
  const u32 g = lane >> 2, t = lane & 3u, first = gx * HG;
  // Heads g and g + 8 of every 16: 16 neighbouring channels of this SIMD group's 64.
  u32 a[MT][16];
  UNROLL for (int m = 0; m < MT; m++) UNROLL for (int i = 0; i < 4; i++) {
    const u32 head = first + m * 16 + (i >> 1) * 8 + g;
    uint4 u = {0, 0, 0, 0};
    if (H % HG == 0 || head < H) u = *(const uint4*)((const u16*)q + ((u64)gy * H + head) * C + sg * 64 + t * 16 + (i & 1) * 8);
    u32* x = a[m] + i * 4;
    x[0] = u.x; x[1] = u.y; x[2] = u.z; x[3] = u.w;
  }
  if (HEADNORM) {
    UNROLL for (int i = 0; i < 2 * MT; i++) {
      float y = 0.0f;
      UNROLL for (int j = 0; j < 8; j++) { const u32 v = a[i >> 1][(i & 1) * 8 + j]; y = FMA(low(v), low(v), y); y = FMA(high(v), high(v), y); }
      y += SHXOR(y, 1); y += SHXOR(y, 2);
      if (t == 0) part[sg * HG + i * 8 + g] = y;
    }
    BARRIER();
    UNROLL for (int i = 0; i < 2 * MT; i++) {
      float y = 0.0f;
      UNROLL for (int j = 0; j < NW; j++) y += part[j * HG + i * 8 + g];
      y = 1.0f / SQRTF(y / (float)C + asf((u32)EPS));
      UNROLL for (int j = 0; j < 8; j++) {
        u32& v = a[i >> 1][(i & 1) * 8 + j];
        packed(v);
        v = pair(low(v) * y, high(v) * y);
      }
    }
  }
  {
    const int at = (int)sg * 64 + (int)t * 16 - (C - RD);
    if (at > -16) UNROLL for (int i = 0; i < 8; i++) if (RD % 16 == 0 || at + 2 * i >= 0) {
      const float c = cosv[gy * (RD / 2) + at / 2 + i], d = sinv[gy * (RD / 2) + at / 2 + i];
      UNROLL for (int m = 0; m < MT; m++) { a[m][i] = turned(a[m][i], c, d); a[m][8 + i] = turned(a[m][8 + i], c, d); }
    }
  }
  // Column n of tile j is channel 8 * j + n of the 64. Eight lanes have a head's scores, two each: a block is four heads.
  float o[MT][8][4], top[EACH], sum[EACH];
  UNROLL for (int m = 0; m < MT; m++) UNROLL for (int j = 0; j < 8; j++) UNROLL for (int i = 0; i < 4; i++) o[m][j][i] = 0.0f;
  UNROLL for (int i = 0; i < EACH; i++) {
    const u32 head = first + (sg + i * NW) * 4 + (lane >> 3);
    top[i] = head < H ? sink[head] : 0.0f;
    sum[i] = lane & 7u ? 0.0f : 1.0f;
  }
  // This SIMD group's 64 channels of sixteen keys; unit u of key k stands at place u ^ (k & 7).
  const auto copy = [&](int step, int stage) {
    UNROLL for (int i = 0; i < 4; i++) {
      const u32 k = i * 4 + (lane >> 3);
      const int r = list[step * 16 + k];
      const u16* row = (const u16*)(POOL && r > 0 && (r & 1) ? pool : ring) + (u64)(r < 0 ? 0 : r >> 1) * C;
      fetch(keys + stage * 128 + k * 8 + ((lane ^ k) & 7u), row + sg * 64 + (lane & 7u) * 8, r >= 0);
    }
  };
  // Their scores over 64 channels; pair p of a head stands at place p or p ^ 4, so that heads do not meet in a bank.
  const auto scores = [&](int stage) {
    arrived<RING - 1>();
    UNROLL for (int j = 0; j < 2; j++) {
      float c[MT][4];
      UNROLL for (int m = 0; m < MT; m++) UNROLL for (int i = 0; i < 4; i++) c[m][i] = 0.0f;
      UNROLL for (int i = 0; i < 2; i++) {
        const uint4 v = keys[stage * 128 + (j * 8 + g) * 8 + ((t * 2 + i) ^ g)];
        UNROLL for (int m = 0; m < MT; m++) {
          const u32* x = a[m] + i * 4; const u32* y = x + 8;
          mma(c[m], x[0], y[0], x[1], y[1], v.x, v.y);
          mma(c[m], x[2], y[2], x[3], y[3], v.z, v.w);
        }
      }
      UNROLL for (int m = 0; m < MT; m++) UNROLL for (int r = 0; r < 2; r++) {
        float2 v; v.x = c[m][r * 2]; v.y = c[m][r * 2 + 1];
        ((float2*)part)[(sg * HG + m * 16 + r * 8 + g) * 8 + ((j * 4 + t) ^ (g >> 1 & 1u) * 4)] = v;
      }
    }
  };
  const int P = POOL ? dims[0] : 0, total = W + P;
  ROLLED for (int from = 0; from < total; from += LIST) {
    // The slots in use: twice a row of the ring, or twice one of the pool and one more; -1 behind the last.
    int e[OWN];
    UNROLL for (int i = 0; i < OWN; i++) {
      const int run = i * NW + (int)sg, slot = from + run * 32 + (int)lane;
      e[i] = -1;
      if (slot < W) {
        if (present[gy * W + slot]) e[i] = 2 * slots[gy * W + slot];
      } else if (POOL && slot < total) {
        const u64 k = (u64)gy * P + (slot - W);
        if (picked[k]) e[i] = 2 * index[k] + 1;
      }
      const u32 those = ballot(e[i] >= 0);
      if (lane == 0) found[run] = those;
    }
    BARRIER();
    u32 before = lane < RUNS ? ones(found[lane]) : 0u;
    const u32 mine = before;
    ROLLED for (int k = 1; k < 32; k <<= 1) { const u32 v = SHIDX(before, (lane - k) & 31u); before += lane >= k ? v : 0u; }
    const int count = (int)SHIDX(before, 31), steps = (count + 15) / 16;
    before -= mine;
    UNROLL for (int i = 0; i < OWN; i++) {
      const int run = i * NW + (int)sg;
      const u32 start = SHIDX(before, run);
      if (e[i] >= 0) list[start + ones(found[run] & ((1u << lane) - 1u))] = e[i];
    }
    if (tid < 16) list[count + tid] = -1;
    BARRIER();
    ROLLED for (int i = 0; i < RING; i++) { if (i < steps) copy(i, i); sent(); }
    int stage = 0;
    // Scores are made a step ahead, first of all those of step 0.
    ROLLED for (int step = -1; step < steps; step++) {
      if (step >= 0) {
        BARRIER();
        UNROLL for (int i = 0; i < EACH; i++) if (BLOCKS % NW == 0 || (int)sg + i * NW < BLOCKS) {
          const u32 head = (sg + i * NW) * 4 + (lane >> 3), p = lane & 7u;
          const int left = count - step * 16 - 2 * (int)p;
          const float2* s = (const float2*)part + head * 8 + (p ^ (head >> 1 & 1u) * 4);
          float x = 0.0f, y = 0.0f, grown = 1.0f;
          _Pragma("unroll 4") for (int j = 0; j < NW; j++) { const float2 v = s[j * (HG * 8)]; x += v.x; y += v.y; }
          x = left > 0 ? MUL(x, asf((u32)SCALE)) : -1e30f; y = left > 1 ? MUL(y, asf((u32)SCALE)) : -1e30f;
          float most = MX(x, y);
          most = MX(most, SHXOR(most, 1)); most = MX(most, SHXOR(most, 2)); most = MX(most, SHXOR(most, 4));
          if (most > top[i] + 8.0f) { grown = EXPF(top[i] - most); top[i] = most; }
          const u32 w = pair(EXPF(x - top[i]), EXPF(y - top[i]));
          // The denominator takes the weights as they are rounded.
          sum[i] = FMA(sum[i], grown, low(w) + high(w));
          weights[head * PT + p] = w;
          if (p == 0) factors[head] = grown;
        }
        BARRIER();
        float f[2 * MT];
        bool same = true;
        UNROLL for (int i = 0; i < 2 * MT; i++) { f[i] = factors[i * 8 + g]; same = same && f[i] == 1.0f; }
        if (__any_sync(0xffffffffu, !same))
          UNROLL for (int m = 0; m < MT; m++) UNROLL for (int j = 0; j < 8; j++) UNROLL for (int i = 0; i < 4; i++) o[m][j][i] *= f[m * 2 + (i >> 1)];
        {
          const uint4* here = keys + stage * 128 + (lane & 15u) * 8;
          u32 w[MT][4];
          UNROLL for (int m = 0; m < MT; m++)
            UNROLL for (int i = 0; i < 4; i++) w[m][i] = weights[(m * 16 + (i & 1) * 8 + g) * PT + t + (i >> 1) * 4];
          UNROLL for (int j = 0; j < 8; j += 2) {
            u32 v[4];
            columns(v, here + ((j + (lane >> 4)) ^ (lane & 7u)));
            UNROLL for (int m = 0; m < MT; m++) {
              mma(o[m][j], w[m][0], w[m][1], w[m][2], w[m][3], v[0], v[1]);
              mma(o[m][j + 1], w[m][0], w[m][1], w[m][2], w[m][3], v[2], v[3]);
            }
          }
        }
        __syncwarp();
        if (step + RING < steps) copy(step + RING, stage);
        sent();
        stage = stage + 1 == RING ? 0 : stage + 1;
      }
      if (step + 1 < steps) scores(stage);
    }
  }
  UNROLL for (int i = 0; i < EACH; i++) { sum[i] += SHXOR(sum[i], 1); sum[i] += SHXOR(sum[i], 2); sum[i] += SHXOR(sum[i], 4); }
  BARRIER();
  UNROLL for (int i = 0; i < EACH; i++) if ((lane & 7u) == 0 && (int)sg + i * NW < BLOCKS) factors[(sg + i * NW) * 4 + (lane >> 3)] = 1.0f / sum[i];
  BARRIER();
  if ((int)sg * 64 + 64 > C - RD) UNROLL for (int j = 0; j < 8; j++) {
    const int at = (int)sg * 64 + j * 8 + (int)t * 2 - (C - RD);
    if (at >= 0) {
      const float c = cosv[gy * (RD / 2) + at / 2], d = sinv[gy * (RD / 2) + at / 2];
      UNROLL for (int m = 0; m < MT; m++) UNROLL for (int i = 0; i < 4; i += 2) {
        const float x = o[m][j][i], y = o[m][j][i + 1];
        o[m][j][i] = MUL(x, c) + MUL(y, d);
        o[m][j][i + 1] = MUL(y, c) - MUL(x, d);
      }
    }
  }
  // Through the place of the keys, so that 128 bytes of a head are written at a time.
  UNROLL for (int m = 0; m < MT; m++) {
    UNROLL for (int r = 0; r < 2; r++) {
      const float z = factors[m * 16 + r * 8 + g];
      u32* to = (u32*)(keys + (r * 8 + g) * 8) + t;
      UNROLL for (int j = 0; j < 8; j++) to[(j ^ g) * 4] = pair(o[m][j][r * 2] * z, o[m][j][r * 2 + 1] * z);
    }
    __syncwarp();
    UNROLL for (int i = 0; i < 4; i++) {
      const u32 row = i * 4 + (lane >> 3), head = first + m * 16 + row;
      if (H % HG == 0 || head < H) *(uint4*)((u16*)out + ((u64)gy * H + head) * C + sg * 64 + (lane & 7u) * 8) = keys[row * 8 + ((lane ^ row) & 7u)];
    }
    __syncwarp();
  }
""",
    UNIT
    + r"""
#define ROLLED _Pragma("unroll 1")
#ifdef SHIM_CUDA
#define ROOM(bytes) SHM uint4 room[(bytes) / 16]
FN void sent() {}
template <int N> FN void arrived() { __syncwarp(); }
FN u32 ballot(bool v) {
  u32 b = v ? 1u << (threadIdx.x & 31u) : 0u;
  for (int o = 1; o < 32; o <<= 1) b |= SHXOR(b, o);
  return b;
}
FN u32 ones(u32 v) { u32 n = 0; for (; v; v &= v - 1) n++; return n; }
FN void columns(u32* d, const uint4* row) {
  const u32 at = shim::shared_at((void*)row), g = threadIdx.x >> 2 & 7u, t = threadIdx.x & 3u;
  for (u32 i = 0; i < 4; i++) {
    const u32 k = SHIDX(at, i * 8 + 2 * t), n = SHIDX(at, i * 8 + 2 * t + 1);
    d[i] = ((const u16*)shim::shared(k))[g] | (u32)((const u16*)shim::shared(n))[g] << 16;
  }
}
#else
#define ROOM(bytes) extern SHM uint4 room[]
FN void sent() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest N copies are there, of every lane.
template <int N> FN void arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); __syncwarp(); }
FN u32 ballot(bool v) { return __ballot_sync(0xffffffffu, v); }
FN u32 ones(u32 v) { return (u32)__popc(v); }
// Four matrices of 8 x 8 numbers, each lane with a row's place: lane (g, t) gets numbers g of rows 2 t and 2 t + 1 of each.
FN void columns(u32* d, const uint4* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
}
#endif
""",
    only="cuda",
    bounds=(256, 2),
)
