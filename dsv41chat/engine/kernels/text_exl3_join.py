"""CUDA texts of what follows products by trellis-coded matrices: their sums joined and turned, up to where the next product begins.

EXL3_TENSOR (OF 2) leaves sums fp32 [KZ, rows, W], rows = dims[0]: of KZ parts of the inputs. A SIMD group joins 128 outputs of a row, lanes
four neighbours each. What was rounded to bf16 between the steps that are one here still is.
"""

from __future__ import annotations

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.text_exl3 import MIX
from dsv41chat.engine.kernels.text_exl3_tensor import FINISH, SOON, SPLIT
from dsv41chat.engine.kernels.text_finish import ROUND

# Of row m, outputs `column` to column + 3.
JOINED = r"""
template <int KZ, int W> FN void joined4(const float* parts, u32 n, u32 m, u32 column, float* v) {
  UNROLL for (int i = 0; i < 4; i++) v[i] = 0.0f;
  UNROLL for (int z = 0; z < KZ; z++) {
    const float4 p = *(const float4*)(parts + ((u64)z * n + m) * W + column);
    v[0] += p.x; v[1] += p.y; v[2] += p.z; v[3] += p.w;
  }
}
FN void half4(const void* p, u32 at, float* v) { UNROLL for (int i = 0; i < 4; i++) v[i] = h2f(((const u16*)p)[at + i]); }
// Through the orthonormal Hadamard matrix.
FN void turn128(float* v, u32 lane) {
  mix128(v, lane);
  UNROLL for (int i = 0; i < 4; i++) v[i] *= 0.08838834764831845f;
}
FN void store4(u16* out, u64 at, const float* v) {
  uint2 o;
  o.x = pack2(v[0], v[1]); o.y = pack2(v[2], v[3]);
  *(uint2*)(out + at) = o;
}
// Channels `at` to at + 3 of a row, those from 0 on rotated; cosv and sinv of the row.
FN void rotated4(const float* cosv, const float* sinv, int at, float* v) {
  if (at < 0) return;
  UNROLL for (int i = 0; i < 4; i += 2) {
    const float c = cosv[(at + i) / 2], s = sinv[(at + i) / 2], x = v[i], y = v[i + 1];
    v[i] = rbf(MUL(x, c) - MUL(y, s));
    v[i + 1] = rbf(MUL(x, s) + MUL(y, c));
  }
}
"""

# -> out [rows, W] bf16 or fp32 (OF). Groups (W / 128, rows) of 32 threads.
EXL3_JOIN = Kernel(
    "exl3_join",
    ("parts", "svh", "bias", "dims"),
    ("out",),
    r"""
  const u32 column = gx * 128 + lane * 4;
  soon((const u16*)svh + column);
  if (BIAS) soon((const u16*)bias + column);
  AFTER();
  float v[4];
  joined4<KZ, W>(parts, (u32)dims[0], gy, column, v);
  finish4<BIAS, OF>(v, (const u16*)svh, (const u16*)bias, column, out, (u64)gy * W + column, lane);
""",
    MIX + SOON + FINISH + JOINED,
    only="cuda",
    early=True,
)

# The same rows, rounded to bf16 and turned for the next product, which has suh fp16 [W] -> xh as of EXL3_SPLIT.
EXL3_JOIN_TURN = Kernel(
    "exl3_join_turn",
    ("parts", "svh", "suh", "dims"),
    ("xh",),
    r"""
  const u32 column = gx * 128 + lane * 4;
  float v[4], back[4], next[4];
  half4(svh, column, back); half4(suh, column, next);
  AFTER();
  joined4<KZ, W>(parts, (u32)dims[0], gy, column, v);
  turn128(v, lane);
  UNROLL for (int i = 0; i < 4; i++) v[i] = rbf(v[i] * back[i]) * next[i];
  turn128(v, lane);
  put4(xh, (u64)gy * (W / 128) + gx, lane, v);
""",
    MIX + SPLIT + JOINED,
    only="cuda",
    early=True,
)

# Sums of two products of a row, NQ outputs for queries and C for the row's own latent -> qr bf16 [rows, NQ] normed with nw, xh: qr turned for the
# next product (suh), kv bf16 [*, C]: normed with nw2, rotated and rounded as in FINISH_ROWS, to row at[m], none where at[m] < 0. Groups (2, rows)
# of MW SIMD groups, or (3, rows): xh2 is qr turned for one more product (suh2).
EXL3_LATENT = Kernel(
    "exl3_latent",
    ("parts", "svh", "svh2", "nw", "nw2", "suh", "suh2", "cosv", "sinv", "at", "dims"),
    ("qr", "xh", "kv", "xh2"),
    r"""
  SHM float squares[MW];
  const bool own = gx == 1;
  const u32 width = own ? C : NQ, column = sg * 128 + lane * 4;
  const bool mine = column < width;
  float v[4], back[4], norm[4], next[4];
  if (mine) {
    half4(own ? svh2 : svh, column, back);
    loadn<4, 1>((const u32*)(own ? nw2 : nw), column, norm);
    if (!own) half4(gx ? suh2 : suh, column, next);
  }
  AFTER();
  float sq = 0.0f;
  if (mine) {
    joined4<KZ, NQ + C>(parts, (u32)dims[0], gy, (own ? NQ : 0) + column, v);
    turn128(v, lane);
    UNROLL for (int i = 0; i < 4; i++) { v[i] = rbf(v[i] * back[i]); sq = FMA(v[i], v[i], sq); }
  }
  sq = wsum(sq);
  if (lane == 0) squares[sg] = sq;
  BARRIER();
  if (!mine) return;
  sq = 0.0f;
  UNROLL for (int i = 0; i < MW; i++) sq += squares[i];
  const float r = 1.0f / SQRTF(sq / (float)width + asf((u32)EPS));
  UNROLL for (int i = 0; i < 4; i++) v[i] = rbf(v[i] * r * norm[i]);
  if (own) {
    const int to = at[gy];
    if (RD) rotated4(cosv + gy * (RD / 2), sinv + gy * (RD / 2), (int)column - (C - RD), v);
    if (QK) round_block<QK, QB, DIVIDE, 4>(v, column, QN, asf((u32)FLOOR));
    if (to >= 0) store4((u16*)kv, (u64)to * C + column, v);
    return;
  }
  if (gx == 0) store4((u16*)qr, (u64)gy * NQ + column, v);
  UNROLL for (int i = 0; i < 4; i++) v[i] *= next[i];
  turn128(v, lane);
  put4(gx ? xh2 : xh, (u64)gy * (NQ / 128) + sg, lane, v);
""",
    MIX + SPLIT + JOINED + ROUND,
    only="cuda",
    early=True,
)

# Value and gate rows of a compressor, W / 2 each, whose scales lie one after the other in svh -> out fp32 [*, W]: row m to row at[m], none where
# at[m] < 0. AR: row positions[m] % AR of table fp32 [AR, W / 2] is added to the gate. Groups (W / 128, rows) of 32 threads.
EXL3_RAW = Kernel(
    "exl3_raw",
    ("parts", "svh", "table", "positions", "at", "dims"),
    ("out",),
    r"""
  const u32 column = gx * 128 + lane * 4;
  float v[4], back[4];
  half4(svh, column, back);
  AFTER();
  const int to = at[gy];
  joined4<KZ, W>(parts, (u32)dims[0], gy, column, v);
  turn128(v, lane);
  UNROLL for (int i = 0; i < 4; i++) v[i] *= back[i];
  if (AR && column >= W / 2) {
    float a[4];
    loadn<4, 1>((const u32*)table, (u64)((u32)positions[gy] % (AR ? AR : 1)) * (W / 2) + column - W / 2, a);
    UNROLL for (int i = 0; i < 4; i++) v[i] += a[i];
  }
  const float4 o = {v[0], v[1], v[2], v[3]};
  if (to >= 0) *(float4*)(out + (u64)to * W + column) = o;
""",
    MIX + JOINED,
    only="cuda",
    early=True,
)

# Index queries, heads of 128 channels, W of all -> out bf16 [rows, W]: rotated, through the Hadamard matrix (MIXED), rounded as in FINISH_ROWS.
# Groups (W / 128, rows) of 32 threads.
EXL3_QUERIES = Kernel(
    "exl3_queries",
    ("parts", "svh", "cosv", "sinv", "dims"),
    ("out",),
    r"""
  const u32 column = gx * 128 + lane * 4;
  float v[4], back[4];
  half4(svh, column, back);
  AFTER();
  joined4<KZ, W>(parts, (u32)dims[0], gy, column, v);
  turn128(v, lane);
  UNROLL for (int i = 0; i < 4; i++) v[i] = rbf(v[i] * back[i]);
  rotated4(cosv + gy * (RD / 2), sinv + gy * (RD / 2), (int)lane * 4 - (128 - RD), v);
  if (MIXED) {
    turn128(v, lane);
    UNROLL for (int i = 0; i < 4; i++) v[i] = rbf(v[i]);
  }
  if (QK) round_block<QK, QB, DIVIDE, 4>(v, lane * 4, QN, asf((u32)FLOOR));
  store4((u16*)out, (u64)gy * W + column, v);
""",
    MIX + JOINED + ROUND,
    only="cuda",
    early=True,
)
