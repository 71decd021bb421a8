"""CUDA texts on the matrix unit: multi-row products of 4-bit affine and of plain matrices. Source: spec: kernels, 4 (a'), (h).

`mma` multiplies 16 rows of weights with 8 columns, the rows of x; absent rows are zero columns, and column n of a result depends on
column n of x alone. Inputs are taken in the order (0,4)(1,5)(2,6)(3,7) of every 8, in which a shift brings two 4-bit codes into place.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel

# One instruction of the matrix unit.
MMA = r"""
#ifdef SHIM_CUDA
FN void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { shim::matrix(c, a0, a1, a2, a3, b0, b1); }
#else
FN void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
"""

UNIT = (
    MMA
    + r"""
#define ROLLED _Pragma("unroll 1")
struct frag { u32 p[8]; };
// 16 neighbouring bf16 of a row of x, zeros for an absent row; as pairs once they are turned
struct wide16 {
  uint4 u, v;
  FN void load(const u16* p, bool there) {
    const uint4 zero = {0, 0, 0, 0};
    u = v = zero;
    if (there) { u = *(const uint4*)p; v = *(const uint4*)(p + 8); }
  }
  FN void turn(frag& f) const {
    f.p[0] = __byte_perm(u.x, u.z, 0x5410); f.p[1] = __byte_perm(u.x, u.z, 0x7632);
    f.p[2] = __byte_perm(u.y, u.w, 0x5410); f.p[3] = __byte_perm(u.y, u.w, 0x7632);
    f.p[4] = __byte_perm(v.x, v.z, 0x5410); f.p[5] = __byte_perm(v.x, v.z, 0x7632);
    f.p[6] = __byte_perm(v.y, v.w, 0x5410); f.p[7] = __byte_perm(v.y, v.w, 0x7632);
  }
};
FN void row16(const u16* p, bool there, frag& f) {
  wide16 r;
  r.load(p, there); r.turn(f);
}
// Two codes as the bf16 numbers 128 + q, exact; the 128 is taken back through the bias.
FN u32 nib(u32 w, int s, u32 mask = 0x000F000Fu) { return ((w >> s) & mask) | 0x43004300u; }
"""
)

# x [M, XS] bf16, M = dims[0] <= 8, w [N, K / 8], sc and bi bf16 [N, K / 64] -> out [M, N] bf16 or fp32 (OF). RG as in `text_matrix`.
# Groups (N / (16 * RT)) of 32 * KS threads. A step is 256 inputs of 16 * RT rows; the steps of K go round the KS SIMD groups, each of
# which copies its own ahead, RING of them, and shares nothing with the others before their sums are joined. KS * RING * RT <= 21.
TENSOR_MATVEC = Kernel(
    "tensor_matvec",
    ("x", "w", "sc", "bi", "dims"),
    ("out",),
    r"""
  constexpr int STEPS = (K / 256 + KS - 1) / KS, TILE = 144, G = RT == 1 ? 2 : 1;
  SHM uint4 ring[KS * RING * RT * TILE];
  const u32 M = (u32)dims[0], g = lane >> 2, t = lane & 3u;
  const int mine = K / 256 % KS ? (K / 256 - 1 - (int)sg) / KS + 1 : STEPS;
  const u64 row = (u64)gx * (16 * RT);
  const u32 mask = 0x000F000Fu | gy;  // gy is 0, but the compiler would put a known number into a register again for each use
  uint4* own = ring + sg * (RING * RT * TILE);
  // Of a step this lane copies 16 bytes of every fourth row, and 4 scales or biases of one, which lie in turn, two by two. Sixteens change
  // places by row, because eight rows are read together.
  const u8* codes = (const u8*)w + (row + (lane >> 3)) * (K / 2) + sg * 128 + (lane & 7u) * 16;
  const u8* factors = (const u8*)(lane < 16 ? sc : bi) + (row + (lane & 15u)) * (K / 32) + sg * 8;
  const u32 to = shared_at(own) + (lane >> 3) * 128 + ((lane & 7u) ^ (lane >> 3) * 2) * 16;
  const u32 to2 = shared_at(own) + 2048 + (lane & 15u) * 16 + (lane >> 4) * 4;
  UNROLL for (int i = 0; i < RING; i++) {
    if (i < mine) copy_step<K, RT>(to + i * RT * TILE * 16, to2 + i * RT * TILE * 16, codes, factors);
    sent();
    codes += KS * 128; factors += KS * 8;
  }
  AFTER();
  const u16* X = (const u16*)x + (RG ? row / (RG ? RG : 1) * K : 0) + g * XS + sg * 256 + t * 16;
  float acc[RT][4];
  UNROLL for (int r = 0; r < RT; r++) UNROLL for (int i = 0; i < 4; i++) acc[r][i] = 0.0f;
  wide16 ahead[2];
  ahead[0].load(X, g < M); ahead[1].load(X + 64, g < M);
  __syncwarp();
  int slot = 0;
  ROLLED for (int i = 0; i < mine; i++) {
    const uint4* here = own + slot * (RT * TILE);
    UNROLL for (int h = 0; h < 4; h += G) {
      // The sums of x over 64 inputs, in the layout of the result: a product with ones.
      frag f[G];
      float n[G][4];
      UNROLL for (int j = 0; j < G; j++) {
        wide16& next = ahead[(h + j) & 1];
        next.turn(f[j]);
        if (h + j < 2) next.load(X + (h + j + 2) * 64, g < M);
        else if (i + 1 < mine) next.load(X + KS * 256 + (h + j - 2) * 64, g < M);
        UNROLL for (int k = 0; k < 4; k++) n[j][k] = 0.0f;
      }
      const u32 one = 0x3F803F80u;
      UNROLL for (int q = 0; q < 8; q += 2) UNROLL for (int j = 0; j < G; j++) mma(n[j], one, one, one, one, f[j].p[q], f[j].p[q + 1]);
      if (h == 0) arrived<RING - 1>();
      // Two chains of products side by side: two runs of 64 inputs, or two tiles.
      UNROLL for (int r = 0; r < RT; r += 3 - G) {
        if (RT > 1) __syncwarp();  // one pair of tiles after the other, or the compiler takes too many registers
        uint2 a[2], b[2];
        float c[2][4];
        UNROLL for (int j = 0; j < 2; j++) {
          const uint2* W = (const uint2*)(here + (G == 2 ? r : r + j) * TILE) + g * 16 + t;
          const u32 at = ((G == 2 ? h + j : h) ^ (g & 3u)) * 4;
          a[j] = W[at]; b[j] = W[128 + at];
          UNROLL for (int k = 0; k < 4; k++) c[j][k] = 0.0f;
        }
        UNROLL for (int k = 0; k < 2; k++) UNROLL for (int q = 0; q < 16; q += 8) UNROLL for (int j = 0; j < 2; j++) {
          const u32 d = k ? a[j].y : a[j].x, e = k ? b[j].y : b[j].x;
          const u32* p = f[G == 2 ? j : 0].p + k * 4 + q / 4;
          mma(c[j], nib(d, q, mask), nib(e, q, mask), nib(d, q + 4, mask), nib(e, q + 4, mask), p[0], p[1]);
        }
        UNROLL for (int j = 0; j < 2; j++) {
          const int k = G == 2 ? r : r + j, m = G == 2 ? j : 0;
          const uint2* Z = (const uint2*)(here + k * TILE + 128) + g * 2 + (h + m) / 2;
          const uint2 sa = Z[0], sb = Z[16];
          const float p = half(sa.x, h + m), q = half(sb.x, h + m), u = FMA(-128.0f, p, half(sa.y, h + m)), v = FMA(-128.0f, q, half(sb.y, h + m));
          acc[k][0] = FMA(p, c[j][0], FMA(u, n[m][0], acc[k][0])); acc[k][1] = FMA(p, c[j][1], FMA(u, n[m][1], acc[k][1]));
          acc[k][2] = FMA(q, c[j][2], FMA(v, n[m][2], acc[k][2])); acc[k][3] = FMA(q, c[j][3], FMA(v, n[m][3], acc[k][3]));
        }
      }
    }
    X += KS * 256;
    if (STEPS > RING && i + RING < mine) {
      __syncwarp();
      copy_step<K, RT>(to + slot * (RT * TILE * 16), to2 + slot * (RT * TILE * 16), codes, factors);
      codes += KS * 128; factors += KS * 8;
    }
    sent();
    slot = slot + 1 == RING ? 0 : slot + 1;
  }
  // Sums take the place of what was copied: rows of 16 for each row of x, 4 apart.
  __syncwarp();
  float* sums = (float*)own + 2 * t * 20 + g;
  UNROLL for (int r = 0; r < RT; r++) {
    sums[r * 160] = acc[r][0]; sums[r * 160 + 20] = acc[r][1]; sums[r * 160 + 8] = acc[r][2]; sums[r * 160 + 28] = acc[r][3];
  }
  BARRIER();
  ROLLED for (u32 i = tid; i < 16 * RT * M; i += KS * 32) {
    const u32 k = i % (16 * RT), m = i / (16 * RT);
    const float* part = (const float*)ring + (k >> 4) * 160 + m * 20 + (k & 15u);
    float v = 0.0f;
    UNROLL for (int s = 0; s < KS; s++) v += part[s * (RING * RT * TILE * 4)];
    if (OF) ((float*)out)[(u64)m * N + row + k] = v;
    else ((u16*)out)[(u64)m * N + row + k] = (u16)f2bf(v);
  }
""",
    UNIT
    + r"""
#ifdef SHIM_CUDA
FN u32 shared_at(uint4* p) { return shim::shared_at(p); }
template <int TO, int FROM> FN void copy16(u32 to, const u8* from) { *(uint4*)shim::shared(to + TO) = *(const uint4*)(from + FROM); }
template <int TO, int FROM> FN void copy4(u32 to, const u8* from) { *(u32*)shim::shared(to + TO) = *(const u32*)(from + FROM); }
FN void sent() {}
template <int N> FN void arrived() { __syncwarp(); }
#else
FN u32 shared_at(uint4* p) { return (u32)__cvta_generic_to_shared(p); }
template <int TO, int FROM> FN void copy16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0+%2], [%1+%3], 16;" :: "r"(to), "l"(from), "n"(TO), "n"(FROM) : "memory");
}
template <int TO, int FROM> FN void copy4(u32 to, const u8* from) {
  asm volatile("cp.async.ca.shared.global [%0+%2], [%1+%3], 4;" :: "r"(to), "l"(from), "n"(TO), "n"(FROM) : "memory");
}
FN void sent() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest N copies are there, of every lane.
template <int N> FN void arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); __syncwarp(); }
#endif
// Bytes of RT tiles of 16 rows, each 2,048 of codes and 256 of factors in shared memory.
template <int K, int RT, int R = 0> FN void copy_step(u32 to, u32 to2, const u8* codes, const u8* factors) {
  constexpr int T = R * 2304, F = R * 16 * (K / 2);
  copy16<T, F>(to, codes); copy16<T + 512, F + 2 * K>(to, codes); copy16<T + 1024, F + 4 * K>(to, codes); copy16<T + 1536, F + 6 * K>(to, codes);
  copy4<T, R * 16 * (K / 32)>(to2, factors); copy4<T + 8, R * 16 * (K / 32) + 4>(to2, factors);
  if constexpr (R + 1 < RT) copy_step<K, RT, R + 1>(to, to2, codes, factors);
}
FN float half(u32 u, int j) { return asf(j & 1 ? u & 0xffff0000u : u << 16); }
""",
    only="cuda",
    early=True,
)

# Plain matrices, x [M, XS] bf16, M = dims[0] <= 8, w bf16 [N, K] -> out [M, N + N2] bf16 or fp32 (OF), times FACTOR unless that is 0. RG, N2, AR,
# add and at as in `text_matrix`. Such matrices are small, and more groups finish sooner: a group has 8 rows. Half of the unit's work is wasted:
# its 16 rows are the 8 rows with one half of the inputs and with the other, multiplied with the inputs of the one and then of the other half.
# KS SIMD groups split K in strides of 256. Groups ((N + N2) / 8) of 32 * KS threads.
TENSOR_PLAIN = Kernel(
    "tensor_plain",
    ("x", "w", "dims", "w2", "add", "at"),
    ("out",),
    r"""
  SHM float part[KS][64];
  const u32 M = (u32)dims[0], g = lane >> 2, t = lane & 3u, first = gx * 8;
  const bool second = N2 && first >= N;
  const u32 row = second ? first - N : first;
  const u16* W = (const u16*)(second ? w2 : w) + (u64)(row + g) * K + t * 8;
  const u16* X = (const u16*)x + (RG ? row / (RG ? RG : 1) * K : 0) + g * XS + t * 8;
  float c[2][4], d[2][4];
  UNROLL for (int q = 0; q < 2; q++) UNROLL for (int i = 0; i < 4; i++) c[q][i] = d[q][i] = 0.0f;
  ROLLED for (int it = sg; it < K / 256; it += KS) {
    uint4 a[8], b[8];
    // The compiler would put each load before its use; it moves none across these, and all are on their way together.
    UNROLL for (int i = 0; i < 8; i++) a[i] = *(const uint4*)(W + it * 256 + i * 32);
    __syncwarp();
    if (it < KS) AFTER();
    UNROLL for (int i = 0; i < 8; i++) {
      const uint4 zero = {0, 0, 0, 0};
      b[i] = zero;
      if (g < M) b[i] = *(const uint4*)(X + it * 256 + i * 32);
    }
    __syncwarp();
    UNROLL for (int i = 0; i < 8; i++) {
      mma(c[i & 1], a[i].x, a[i].y, a[i].z, a[i].w, b[i].x, b[i].z);
      mma(d[i & 1], a[i].x, a[i].y, a[i].z, a[i].w, b[i].y, b[i].w);
    }
  }
  UNROLL for (int i = 0; i < 2; i++) part[sg][(2 * t + i) * 8 + g] = c[0][i] + c[1][i] + (d[0][2 + i] + d[1][2 + i]);
  BARRIER();
  ROLLED for (u32 i = tid; i < 8 * M; i += KS * 32) {
    const u32 m = i >> 3, n = i & 7u;
    float v = 0.0f;
    UNROLL for (int s = 0; s < KS; s++) v += part[s][i];
    if (AR && second) v += add[(u64)((u32)at[m] % (AR ? AR : 1)) * N2 + row + n];
    if (FACTOR) v = MUL(v, asf((u32)FACTOR));
    if (OF) ((float*)out)[(u64)m * (N + N2) + first + n] = v;
    else ((u16*)out)[(u64)m * (N + N2) + first + n] = (u16)f2bf(v);
  }
""",
    UNIT,
    only="cuda",
    early=True,
)
