"""CUDA texts for the many rows of a prompt on the matrix unit: experts, and plain matrices with fp32 results. Source: spec: kernels, 4 (h).

A group of threads multiplies a tile of rows with a run of outputs. The rows come into shared memory in steps of 64 inputs, the weights
into registers, decoded to bfloat16 and rounded once; both are on their way during the step before. A row's sums are one chain of steps
over all inputs, so that they depend on nothing but the row.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_matrix import DECODE, PAIR
from dsv41chat.engine.kernels.text_tensor import UNIT
from dsv41chat.engine.kernels.text_warpgroup import WARPGROUP

# ids int32 [n, P], n = dims[0] -> picks sorted by expert, a pick after those before it: order int32 [n * P], what pick is where; back, its
# inverse; tiles int32 [n * P / ROWS + E, 4] = (expert, first, count, 0) of at most ROWS picks of one expert each. Expert e's tiles lie from
# place (picks of earlier experts) / ROWS + e on, so that nobody has to know how many the others have; some of them are empty.
# Groups E of NTH threads, an expert each.
TILE_ORDER = Kernel(
    "tile_order",
    ("ids", "dims"),
    ("order", "back", "tiles"),
    r"""
  SHM u32 equal[32]; SHM u32 lower[32];
  const u32 R = (u32)dims[0] * P, e = gx, per = (R + NTH - 1) / NTH, a = UMN(tid * per, R), z = UMN(a + per, R);
  u32 mine = 0, less = 0;
  for (u32 i = a; i < z; i++) {
    const u32 id = (u32)ids[i];
    mine += id == e; less += id < e;
  }
  u32 run = mine;
  UNROLL for (int o = 1; o < 32; o <<= 1) { const u32 v = SHIDX(run, (lane - o) & 31u); if (lane >= (u32)o) run += v; }
  UNROLL for (int o = 16; o; o >>= 1) less += SHXOR(less, o);
  if (lane == 31) { equal[sg] = run; lower[sg] = less; }
  BARRIER();
  u32 start = 0, count = 0, to = run - mine;
  for (u32 i = 0; i < NTH / 32; i++) {
    if (i < sg) to += equal[i];
    start += lower[i]; count += equal[i];
  }
  to += start;
  for (u32 i = a; i < z; i++) {
    if ((u32)ids[i] == e) { order[to] = (int)i; back[i] = (int)to; to++; }
  }
  const u32 first = start / ROWS + e, last = (start + count) / ROWS + e + 1;
  for (u32 k = first + tid; k < last; k += NTH) {
    const u32 done = (k - first) * ROWS;
    tiles[k * 4] = (int)e; tiles[k * 4 + 1] = (int)(start + done); tiles[k * 4 + 2] = done < count ? (int)UMN(count - done, ROWS) : 0;
    tiles[k * 4 + 3] = 0;
  }
""",
    only="cuda",
)

_RUNS = (
    DECODE
    + UNIT
    + PAIR
    + WARPGROUP
    + r"""
// 16 neighbouring inputs of a row of weights as they are stored, with the scale and bias of RUN steps.
template <int MODE, int BITS, int SF, int RUN> struct codes16 {
  static constexpr int N = BITS / 2, SIDES = (RUN + 1) / 2;  // the places below are within these where they are used
  u32 a[N], s[SIDES], z[SIDES];
  FN void load(const void* w, u32 run) {
    const u32* p = (const u32*)w + run * N;
    if (BITS % 8 == 0) {
      UNROLL for (int i = 0; i < N; i += 4) {
        const uint4 t = *(const uint4*)(p + i);
        a[i] = t.x; a[(i + 1) % N] = t.y; a[(i + 2) % N] = t.z; a[(i + 3) % N] = t.w;
      }
    } else if (BITS == 4) {
      const uint2 t = *(const uint2*)p;
      a[0] = t.x; a[1 % N] = t.y;
    } else {
      UNROLL for (int i = 0; i < N; i++) a[i] = p[i];
    }
  }
  // scale: of the first step.
  FN void load_sides(const void* sc, const void* bi, u32 scale) {
    if (RUN == 4) {
      const uint2 t = *(const uint2*)((const u16*)sc + scale), u = *(const uint2*)((const u16*)bi + scale);
      s[0] = t.x; s[SIDES - 1] = t.y; z[0] = u.x; z[SIDES - 1] = u.y;
      return;
    }
    s[0] = z[0] = 0;
    if (MODE == 0) {
      s[0] = SF == 1 ? ((const u32*)sc)[scale] : ((const u16*)sc)[scale];
      z[0] = SF == 1 ? ((const u32*)bi)[scale] : ((const u16*)bi)[scale];
    } else if (MODE < 3) {
      s[0] = ((const u8*)sc)[scale];
    }
  }
  // Operands of one row in step `it`: A[0], A[2], .., A[14] hold the 8 pairs of its inputs; the row 8 further down fills the odd places.
  FN void turn(u32* A, int it) const {
    if (MODE == 3) {
      UNROLL for (int i = 0; i < 8; i++) A[i * 2] = a[i % N];
    } else if (MODE == 0 && BITS == 4 && SF == 0) {
      // The scale and the bias twice, as pairs are computed.
      const u32 which = RUN == 4 ? 0x1010u + (u32)(it & 3) * 0x2222u : 0x1010u;
      const u32 f = __byte_perm(s[0], s[SIDES - 1], which), b = __byte_perm(z[0], z[SIDES - 1], which);
      UNROLL for (int i = 0; i < 4; i++) {
        A[i * 2] = affine_pair(nib(a[0], 4 * i), f, b);
        A[8 + i * 2] = affine_pair(nib(a[1 % N], 4 * i), f, b);
      }
    } else {
      float f = 1.0f, b = 0.0f;
      if (MODE == 0) { f = factor(s[0]); b = FMA(-(float)(1u << (BITS & 31)), f, factor(z[0])); }
      else f = asf(UMX(s[0], 1u) << 23) * (MODE == 1 ? 0.5f : 1.0f);
      UNROLL for (int i = 0; i < 8; i++) {
        const int p = i < 4 ? i : i + 4;
        A[i * 2] = pair(FMA((code<MODE, BITS>(a, p)), f, b), FMA((code<MODE, BITS>(a, p + 4)), f, b));
      }
    }
  }
  static FN float factor(u32 v) { return SF == 1 ? asf(v) : SF == 2 ? h2f(v) : bf2f(v); }
  // scale * (code pair as 128 + q - 128) + bias, rounded once per value; both twice
  static FN u32 affine_pair(u32 q, u32 s, u32 z) {
#ifdef SHIM_CUDA
    return pack2(FMA(asf(q << 16) - 128.0f, asf(s << 16), asf(z << 16)), FMA(asf(q & 0xffff0000u) - 128.0f, asf(s << 16), asf(z << 16)));
#else
    u32 d;
    // q * 1 - 128: the subtraction itself came to the instruction set a generation later.
    asm("{ .reg .b32 t; fma.rn.bf16x2 t, %1, %2, %3; fma.rn.bf16x2 %0, t, %4, %5; }"
        : "=r"(d) : "r"(q), "r"(0x3F803F80u), "r"(0xC300C300u), "r"(s), "r"(z));
    return d;
#endif
  }
};
// Where row `row` of a matrix begins, and its scales or biases. Rows of one matrix are counted from there with 32 bits.
template <int K, int BITS> FN const void* row_at(const void* w, u64 row) { return (const u32*)w + row * (K / 32 * BITS); }
template <int K, int MODE, int GS, int SF> FN const void* side_at(const void* s, u64 row) {
  return (const u8*)s + row * (K / GS * (MODE ? 1 : SF == 1 ? 4 : 2));
}
// `count` rows of M * 16 sums each as bf16, `stride` apart. A lane writes one row of the two that it has sums of, and its neighbour's sums of it.
template <int NT, int M> FN void write_sums(u16* O, const float (*acc)[NT][4], int count, u32 stride, u32 g, u32 t) {
  UNROLL for (int n = 0; n < NT; n++) {
    const int mine = n * 8 + 2 * t + (g & 1u);
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int h = 0; h < 2; h++) {
      const float keep = g & 1u ? acc[m][n][2 * h + 1] : acc[m][n][2 * h];
      const float got = SHXOR((g & 1u ? acc[m][n][2 * h] : acc[m][n][2 * h + 1]), 4);
      if (mine < count) *(u32*)(O + (u64)mine * stride + m * 16 + h * 8) = g & 1u ? pair(got, keep) : pair(keep, got);
    }
  }
}
"""
)

# The sums of a SIMD group: 16 rows of wa from row ra on and 16 of wb from rb on, by 8 * NT rows of x, of which row i begins at element
# place(i) and `count` are there. W SIMD groups stage the rows together; WG: W is a multiple of four, which multiply together on a device that can.
# -> acc[2][NT][4]. Absent rows repeat one that is there.
_SUMS = r"""
  constexpr int EACH = NT / W;
  // Scales of several steps come at once where tiles are small: a load costs as much as it touches rows, whatever it takes of each. In the
  // largest ones the products hide that, and it was slower.
  constexpr int RUN = MODE == 0 && BITS == 4 && SF == 0 && GS == 64 && K % 256 == 0 && NT <= 8 ? 4 : 1;
  SHM uint4 staged[2][NT * 64];
  const u32 g = lane >> 2, t = lane & 3u;
  float acc[2][NT][4];
  UNROLL for (int m = 0; m < 2; m++) UNROLL for (int n = 0; n < NT; n++) UNROLL for (int i = 0; i < 4; i++) acc[m][n][i] = 0.0f;
  const u16* X[EACH];
  wide16 next[EACH];
  UNROLL for (int j = 0; j < EACH; j++) {
    const int i = (int)(tid >> 2) + j * W * 8;
    X[j] = (const u16*)x + place(i < count ? i : 0) + (tid & 3u) * 16;
    next[j].load(X[j], true);
  }
  codes16<MODE, BITS, SF, RUN> c[2][2];
  UNROLL for (int h = 0; h < 2; h++) {
    c[0][h].load(wa, (ra + g + 8 * h) * (K / 16) + t); c[0][h].load_sides(sa, ba, (ra + g + 8 * h) * (K / GS) + t * 16 / GS);
    c[1][h].load(wb, (rb + g + 8 * h) * (K / 16) + t); c[1][h].load_sides(sb, bb, (rb + g + 8 * h) * (K / GS) + t * 16 / GS);
  }
  ROLLED for (int it = 0; it < K / 64; it++) {
    uint4* o = staged[it & 1];
    UNROLL for (int j = 0; j < EACH; j++) {
      frag f;
      if (MODE == 3) {
        const uint4 u = next[j].u, v = next[j].v;
        f = {{u.x, u.y, u.z, u.w, v.x, v.y, v.z, v.w}};
      } else {
        next[j].turn(f);
      }
      if (WG) {
        UNROLL for (int i = 0; i < 8; i++) ((u32*)o)[(i * NT + j * W) * 32 + tid] = f.p[i];
      } else {
        const uint4 u = {f.p[0], f.p[1], f.p[2], f.p[3]}, v = {f.p[4], f.p[5], f.p[6], f.p[7]};
        o[j * W * 32 + tid] = u; o[NT * 32 + j * W * 32 + tid] = v;
      }
    }
    if (WG) staged_for_unit();
    u32 A[2][16];
    UNROLL for (int m = 0; m < 2; m++) { c[m][0].turn(A[m], it); c[m][1].turn(A[m] + 1, it); }
    if (it + 1 < K / 64) {
      const u32 k = (it + 1) * 64 + t * 16;
      UNROLL for (int j = 0; j < EACH; j++) next[j].load(X[j] + (it + 1) * 64, true);
      UNROLL for (int h = 0; h < 2; h++) {
        c[0][h].load(wa, (ra + g + 8 * h) * (K / 16) + k / 16);
        c[1][h].load(wb, (rb + g + 8 * h) * (K / 16) + k / 16);
        if (RUN == 1 || (it & 3) == 3) {
          c[0][h].load_sides(sa, ba, (ra + g + 8 * h) * (K / GS) + k / GS);
          c[1][h].load_sides(sb, bb, (rb + g + 8 * h) * (K / GS) + k / GS);
        }
      }
    }
    BARRIER();
    if (WG) {
      // All rows of the tile: a branch for fewer would keep the compiler from letting products overlap.
      run64<NT>(acc, A, (const u32*)o, lane);
    } else {
      // Pairs of eight rows that are not there cost nothing.
      UNROLL for (int n = 0; n < NT; n += 2) {
        if (n * 8 < count) {
          UNROLL for (int q = 0; q < 2; q++) {
            const uint4 u = o[q * NT * 32 + n * 32 + lane], v = o[q * NT * 32 + n * 32 + 32 + lane];
            UNROLL for (int m = 0; m < 2; m++) {
              const u32* B = A[m] + q * 8;
              mma(acc[m][n], B[0], B[1], B[2], B[3], u.x, u.y); mma(acc[m][n + 1], B[0], B[1], B[2], B[3], v.x, v.y);
            }
            UNROLL for (int m = 0; m < 2; m++) {
              const u32* B = A[m] + q * 8 + 4;
              mma(acc[m][n], B[0], B[1], B[2], B[3], u.z, u.w); mma(acc[m][n + 1], B[0], B[1], B[2], B[3], v.z, v.w);
            }
          }
        }
      }
    }
  }
"""

# Rows of x times the matrices of their experts; slot r of the R = n * P (n = dims[0]) has the pick order[r]; the rows' slots R + m of the
# shared expert follow. tiles as TILE_ORDER makes them, then ones of the shared expert, whose matrices are v.. .
# UP: x [n, K], w and w2 [E, N, K]; out bf16 [slots, N] is the activation of both products, the routing weight wt [n, P] in it.
# Else: x [slots, K], w [E, N, K] -> out bf16 [slots, N]; the second matrices are not used.
# Groups (N / ((UP ? 16 : 32) * W), tiles) of 32 * W threads; tiles have 8 * NT rows; W divides NT, which is even.
TENSOR_TILES = Kernel(
    "tensor_tiles",
    ("x", "w", "sc", "bi", "w2", "sc2", "bi2", "v", "vs", "vb", "v2", "vs2", "vb2", "tiles", "order", "wt", "dims"),
    ("out",),
    r"""
  const u32 rows = (u32)dims[0], R = rows * P, routed = P ? R / (8 * NT) + E : 0;
  const bool shared = gy >= routed;
  u64 base = 0;
  u32 first = R + (gy - routed) * (8 * NT);
  int count = (int)(R + rows) - (int)first;
  if (!shared) {
    base = (u64)tiles[gy * 4] * N; first = (u32)tiles[gy * 4 + 1]; count = tiles[gy * 4 + 2];
    if (count <= 0) return;
  }
  if (count > 8 * NT) count = 8 * NT;
  auto place = [&](int i) { const u32 r = first + (u32)i; return (u64)(!UP ? r : shared ? r - R : (u32)order[r] / (P ? P : 1)) * K; };
  const void* wa = row_at<K, BITS>(shared ? v : w, base);
  const void* sa = side_at<K, MODE, GS, SF>(shared ? vs : sc, base);
  const void* ba = side_at<K, MODE, GS, SF>(shared ? vb : bi, base);
  const void* wb = UP ? row_at<K, BITS>(shared ? v2 : w2, base) : wa;
  const void* sb = UP ? side_at<K, MODE, GS, SF>(shared ? vs2 : sc2, base) : sa;
  const void* bb = UP ? side_at<K, MODE, GS, SF>(shared ? vb2 : bi2, base) : ba;
  const u32 column = (gx * W + sg) * (UP ? 16 : 32), ra = column, rb = UP ? ra : ra + 16;
"""
    + _SUMS
    + r"""
  u16* O = (u16*)out + (u64)first * N + column + (g & 6u);
  const float limit = asf((u32)LIMIT);
  if (UP) {
    UNROLL for (int n = 0; n < NT; n++) {
      float weight[2] = {1.0f, 1.0f};
      UNROLL for (int i = 0; i < 2; i++) {
        const int r = n * 8 + 2 * t + i;
        if (!shared && r < count) weight[i] = wt[order[first + r]];
      }
      UNROLL for (int i = 0; i < 4; i++) {
        float a = acc[0][n][i], b = acc[1][n][i];
        if (LIMIT > 0) { a = MN(a, limit); b = MN(MX(b, -limit), limit); }
        acc[0][n][i] = a * sigm(a) * b * weight[i & 1];
      }
    }
  }
  write_sums<NT, UP ? 1 : 2>(O, acc, count, N, g, t);
""",
    _RUNS,
    only="cuda",
)

# Block-diagonal matrices: x [rows, G * K] bf16, rows = dims[0], w [G, N, K] -> out bf16 [rows, G * N]. Groups (N / (32 * W),
# ceil(rows / (8 * NT)), G) of 32 * W threads.
TENSOR_GROUPS = Kernel(
    "tensor_groups",
    ("x", "w", "sc", "bi", "dims"),
    ("out",),
    r"""
  const u32 first = gy * (8 * NT), column = (gx * W + sg) * 32;
  const int count = (int)UMN((u32)dims[0] - first, 8 * NT);
  auto place = [&](int i) { return (u64)(first + (u32)i) * (G * K) + gz * K; };
  const void* wa = row_at<K, BITS>(w, gz * N);
  const void* sa = side_at<K, MODE, GS, SF>(sc, gz * N);
  const void* ba = side_at<K, MODE, GS, SF>(bi, gz * N);
  const void* wb = wa; const void* sb = sa; const void* bb = ba;
  const u32 ra = column, rb = ra + 16;
"""
    + _SUMS
    + r"""
  write_sums<NT, 2>((u16*)out + (u64)first * (G * N) + gz * N + column + (g & 6u), acc, count, G * N, g, t);
""",
    _RUNS,
    only="cuda",
)

# y bf16 [slots, D] and back int32 [n, P] of `TILE_ORDER` -> out bf16 [n, D]: the rows of a row's picks, summed in fp32 in their order, then that
# of the shared expert, rounded once. The latter is slot n * P + m of y, or with ALONE row m of s bf16 [n, D].
# Groups (ceil(D / (8 * NTH)), n) of NTH threads; dims int32 [0] = n.
JOIN_PICKS = Kernel(
    "join_picks",
    ("y", "back", "s", "dims"),
    ("out",),
    r"""
  const u32 d = (gx * NTH + tid) * 8;
  if (d >= D) return;
  uint4 u[P + 1];
  UNROLL for (int j = 0; j < P; j++) u[j] = *(const uint4*)((const u16*)y + (u64)back[gy * P + j] * D + d);
  u[P] = *(const uint4*)(ALONE ? (const u16*)s + (u64)gy * D + d : (const u16*)y + ((u64)dims[0] * P + gy) * D + d);
  float o[8];
  UNROLL for (int i = 0; i < 8; i++) o[i] = 0.0f;
  UNROLL for (int j = 0; j <= P; j++) {
    float a[8];
    bf8(u[j], a);
    UNROLL for (int i = 0; i < 8; i++) o[i] += a[i];
  }
  const uint4 w = {pair(o[0], o[1]), pair(o[2], o[3]), pair(o[4], o[5]), pair(o[6], o[7])};
  *(uint4*)((u16*)out + (u64)gy * D + d) = w;
""",
    PAIR,
    only="cuda",
)

# Plain matrices, x [rows, K] bf16, rows = dims[0], w (and with N2 > 0 w2) bf16 [N, K] -> out fp32 [rows, N + N2]; N2 is 0 or N. AR, add and at as in
# `text_matrix`. Groups (N / ((N2 ? 16 : 32) * W), ceil(rows / (8 * NT))) of 32 * W threads.
TENSOR_ROWS = Kernel(
    "tensor_rows",
    ("x", "w", "w2", "add", "at", "dims"),
    ("out",),
    r"""
  constexpr int MODE = 3, BITS = 16, SF = 0, GS = 16;
  const u32 first = gy * (8 * NT), column = (gx * W + sg) * (N2 ? 16 : 32);
  const int count = (int)UMN((u32)dims[0] - first, 8 * NT);
  auto place = [&](int i) { return (u64)(first + (u32)i) * K; };
  const void* wa = w;
  const void* wb = N2 ? (const void*)w2 : wa;
  const void* sa = w; const void* ba = w; const void* sb = w; const void* bb = w;
  const u32 ra = column, rb = N2 ? ra : ra + 16;
"""
    + _SUMS
    + r"""
  UNROLL for (int n = 0; n < NT; n++) UNROLL for (int i = 0; i < 4; i++) {
    const int r = n * 8 + 2 * t + (i & 1);
    if (r < count) {
      const u32 row = column + g + (i >> 1) * 8;
      float* O = out + (u64)(first + r) * (N + N2) + row;
      O[0] = acc[0][n][i];
      if (N2) O[N] = AR ? acc[1][n][i] + add[(u64)((u32)at[first + r] % (AR ? AR : 1)) * N2 + row] : acc[1][n][i];
      else O[16] = acc[1][n][i];
    }
  }
""",
    _RUNS,
    only="cuda",
)

# The same for matrices of few outputs: x [rows, K], rows = dims[0], w bf16 [N, K] -> out fp32 [rows, N]. KS SIMD groups split K in strides of 64,
# and read both operands by themselves. Groups (ceil(N / 32), ceil(rows / 32)) of 32 * KS threads.
TENSOR_NARROW = Kernel(
    "tensor_narrow",
    ("x", "w", "dims"),
    ("out",),
    r"""
  SHM float part[KS][32 * 33];
  const u32 g = lane >> 2, t = lane & 3u, rows = (u32)dims[0];
  const u16* W[4];
  const u16* X[4];
  UNROLL for (int i = 0; i < 4; i++) {
    W[i] = (const u16*)w + (u64)UMN(gx * 32 + i * 8 + g, N - 1) * K + t * 16;
    X[i] = (const u16*)x + (u64)UMN(gy * 32 + i * 8 + g, rows - 1) * K + t * 16;
  }
  float acc[2][4][4];
  UNROLL for (int m = 0; m < 2; m++) UNROLL for (int n = 0; n < 4; n++) UNROLL for (int i = 0; i < 4; i++) acc[m][n][i] = 0.0f;
  ROLLED for (u32 k = sg * 64; k < K; k += KS * 64) {
    uint4 a[4][2], b[4][2];
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int q = 0; q < 2; q++) {
      a[i][q] = *(const uint4*)(W[i] + k + q * 8);
      b[i][q] = *(const uint4*)(X[i] + k + q * 8);
    }
    UNROLL for (int q = 0; q < 2; q++) {
      UNROLL for (int m = 0; m < 2; m++) UNROLL for (int n = 0; n < 4; n++)
        mma(acc[m][n], a[2 * m][q].x, a[2 * m + 1][q].x, a[2 * m][q].y, a[2 * m + 1][q].y, b[n][q].x, b[n][q].y);
      UNROLL for (int m = 0; m < 2; m++) UNROLL for (int n = 0; n < 4; n++)
        mma(acc[m][n], a[2 * m][q].z, a[2 * m + 1][q].z, a[2 * m][q].w, a[2 * m + 1][q].w, b[n][q].z, b[n][q].w);
    }
  }
  // Rows of x by outputs, one further apart than there are outputs.
  UNROLL for (int m = 0; m < 2; m++) UNROLL for (int n = 0; n < 4; n++) UNROLL for (int i = 0; i < 4; i++)
    part[sg][(n * 8 + 2 * t + (i & 1)) * 33 + m * 16 + (i >> 1) * 8 + g] = acc[m][n][i];
  BARRIER();
  ROLLED for (u32 i = tid; i < 32 * 32; i += 32 * KS) {
    const u32 row = gy * 32 + (i >> 5), column = gx * 32 + (i & 31u);
    float s = 0.0f;
    UNROLL for (int j = 0; j < KS; j++) s += part[j][(i >> 5) * 33 + (i & 31u)];
    if (row < rows && column < N) out[(u64)row * N + column] = s;
  }
""",
    UNIT,
    only="cuda",
)
