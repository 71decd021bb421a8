"""A fault planted in a kernel text is seen: the limits of the cases are no decoration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv41chat.engine.kernels import (
    attend,
    choose,
    dialect,
    exl3,
    exl3_chains,
    experts,
    finish,
    glue,
    hyper,
    matrix,
    tensor,
    text_exl3_experts,
    tiles,
)
from tests.engine.kernels.cases import cases
from tests.engine.kernels.shim import Shim, needs_compiler

pytestmark = needs_compiler

# what it is: (case, module, kernel, text, what stands there instead)
FAULTS = {
    "a wrong offset of the codes": ("matvec affine 4 g64 bfloat16 1280", matrix, "MATVEC", "(1u << (BITS & 31))", "(1u << BITS) + 1.0f"),
    "a wrong scale": ("matvec mxfp4 4 g32 bfloat16 1280", matrix, "MATVEC", "<< 23) * 0.5f", "<< 23) * 0.505f"),
    "a scale of the group before": ("matvec affine 3 g64 bfloat16 1280", matrix, "MATVEC", "(K / GS) + k / GS", "(K / GS) + (k ? k - 1 : 0) / GS"),
    "a dropped row": ("matvec affine 8 g64 bfloat16 1280", matrix, "MATVEC", "m < M; m++) acc[r][m] = 0.0f", "m < M; m++) acc[r][m] = m == 6"),
    "a dropped tail of the inputs": ("matvec affine 6 g64 bfloat16 1280", matrix, "MATVEC", "k < K; k += 1024", "k < K - 32; k += 1024"),
    "the inputs of another group": ("matvec grouped", matrix, "MATVEC", "(u64)(row0 / (RG ? RG : 1)) * K", "0"),
    "the table of another position": ("matvec pair", matrix, "MATVEC", "% (AR ? AR : 1)", "% (AR ? 1 : 1)"),
    "no routing weight": ("experts affine 4 shared affine 4", matrix, "EXPERTS_UP", "sigm(a) * b * weight", "sigm(a) * b"),
    "no clamp of the gate": ("experts affine 4 shared affine 4", matrix, "EXPERTS_UP", "a = MN(a, limit);", ""),
    "the expert of another slot": ("experts affine 4 shared affine 4", matrix, "EXPERTS_UP", "idx[m * (S - SHARED) + j]", "idx[m * (S - SHARED)]"),
    "a lost shared expert": ("experts mxfp4 4 shared mxfp8 8", matrix, "EXPERTS_DOWN", "j < S; j++", "j < S - 1; j++"),
    "a transposed mix": ("enter lagged", hyper, "HYPER_SPREAD", "comb[gy * 16 + 4 * j + k]", "comb[gy * 16 + 4 * k + j]"),
    "a transposed mix of a prompt": ("prompt enter lagged", hyper, "TENSOR_SPREAD", "co[4 * j + k]", "co[4 * k + j]"),
    "the middle bits of the coefficients lost": ("prompt enter own", hyper, "TENSOR_SPREAD", "word(b, p), word(b, p + 1)", "0u, 0u"),
    "the rows of the other half": ("prompt enter lagged", hyper, "TENSOR_SPREAD", "acc[n][2 * r];", "acc[n][2 - 2 * r];"),
    "squares of one lane": ("prompt enter own", hyper, "TENSOR_SPREAD", "sq[r] += SHXOR(sq[r], 2);", ""),
    "a norm of the streams for the row's": ("prompt enter lagged", hyper, "TENSOR_SPREAD", "t == 1 ? cq[r]", "t == 1 ? sq[r]"),
    "eight columns of the stream before": ("prompt enter own", hyper, "TENSOR_SPREAD", "i / 3 % 4) * D", "(i / 3 + 1) % 4) * D"),
    "the channels before": ("prompt enter lagged first", hyper, "TENSOR_SPREAD", "(held * 4 + k) * 3", "k * 3"),
    "a dropped slice of the sums": ("enter lagged", hyper, "HYPER_FINISH", "if (g < G) s +=", "if (g < G - 1) s +="),
    "one iteration less": ("enter own", hyper, "HYPER_FINISH", "it < ITERS", "it < ITERS - 1"),
    "the collapse of another family": ("enter own", hyper, "HYPER_FINISH", "FMA(mine[k], o[i], c[i])", "FMA(mine[3 - k], o[i], c[i])"),
    "a lost sink": ("attend 8 x 64, 64 + 128", attend, "ATTEND_MERGE", "float z = EXPF(sk - top)", "float z = 0.0f"),
    "a wrong scale of the query": ("attend 8 x 64, 64 + 128", attend, "ATTEND_SPLIT", "asf((u32)SCALE)", "1.02f * asf((u32)SCALE)"),
    "an absent slot that is read": ("attend 8 x 64, 64 + 128", attend, "ATTEND_SPLIT", "if (picked[i]) r[c]", "r[c]"),
    "a dropped slot": ("attend 8 x 64, 64 + 0", attend, "ATTEND_SPLIT", "sum += a[3];", ""),
    "rotated the wrong way": ("attend 4 x 512, 32 + 20", attend, "ATTEND_MERGE", "MUL(x, c) + MUL(y, s)", "MUL(x, c) - MUL(y, s)"),
    "no norm of the heads": ("attend 4 x 128, 32 + 30 normed", attend, "ATTEND_SPLIT", "rbf(qv[i] * r)", "rbf(qv[i])"),
    "a lost sink of the unit": ("tensor attend 8 x 64, 64 + 128", attend, "TENSOR_MERGE", "z = EXPF(sk - top);", "z = 0.0f;"),
    "a scale of the unit": ("tensor attend 8 x 64, 64 + 128", attend, "TENSOR_ATTEND", "asf((u32)SCALE)", "1.02f * asf((u32)SCALE)"),
    "an absent entry that is read": ("tensor attend 8 x 64, 64 + 128", attend, "TENSOR_ATTEND", "e = there ? 2 * r + 1 : -1;", "e = 2 * r + 1;"),
    "an absent slot that weighs": ("tensor attend 16 x 128, 40 + 0", attend, "TENSOR_ATTEND", "y = s < 0 ? 0.0f :", "y = s < 0 ? 1.0f :"),
    "half of the channels": ("tensor attend 32 x 512, 32 + 20", attend, "TENSOR_ATTEND", "c[j][PAIR - 1][1] : 0.0f", "0.0f : 0.0f"),
    "a row of the ring for one of the pool": ("tensor attend 32 x 512, 32 + 20", attend, "TENSOR_ATTEND", "r > 0 && (r & 1) ?", "r < 0 ?"),
    "the heads of the group before": ("tensor attend 32 x 512, 32 + 20", attend, "TENSOR_ATTEND", "h0 = gy * 16 + g", "h0 = g"),
    "channels of the tile before": ("tensor attend 16 x 128, 40 + 0", attend, "TENSOR_ATTEND", "j & 1 ? 0x7632u", "j & 1 ? 0x5410u"),
    "no norm on the unit": ("tensor attend 24 x 256, 48 + 30 normed", attend, "TENSOR_ATTEND", "low(b[i]) * z", "low(b[i])"),
    "a merger that is left out": ("tensor attend 8 x 64, 64 + 128", attend, "TENSOR_MERGE", "int i = 0; i < NM;", "int i = 1; i < NM;"),
    "a merge that turns the wrong way": ("tensor attend 32 x 512, 32 + 20", attend, "TENSOR_MERGE", "MUL(x, c) + MUL(y, s)", "MUL(x, c) - MUL(y, s)"),
    "a piece of the unit too few": ("tensor attend to 40 in use", attend, "TENSOR_ATTEND", "((int)gx >= SP) return", "((int)gx >= SP - 1) return"),
    "a lost sink of a prompt": ("prompt attend 16 x 64, 64 + 128", attend, "TENSOR_PROMPT", "lane & 7u ? 0.0f : 1.0f;", "0.0f;"),
    "a scale of a prompt": ("prompt attend 16 x 64, 64 + 128", attend, "TENSOR_PROMPT", "MUL(x, asf((u32)SCALE))", "MUL(x, 1.04f * asf((u32)SCALE))"),
    "a row of a prompt for another": ("prompt attend 64 x 128, 40 + 0", attend, "TENSOR_PROMPT", "present[gy * W + slot]", "present[slot]"),
    "absent entries of a prompt": ("prompt attend 16 x 64, 64 + 128", attend, "TENSOR_PROMPT", "if (picked[k]) e[i]", "e[i]"),
    "a slot behind the last that weighs": ("prompt attend 64 x 128, 40 + 0", attend, "TENSOR_PROMPT", "left > 1 ?", "left > 0 ?"),
    "places that are counted twice": ("prompt attend 128 x 64, 64 + 128", attend, "TENSOR_PROMPT", "before -= mine;", ""),
    "the start of a list again": ("prompt attend 24 x 192, 48 + 500 normed", attend, "TENSOR_PROMPT", "slot = from + run", "slot = run"),
    "a step that is too early in its place": (
        "prompt attend 128 x 64, 64 + 128", attend, "TENSOR_PROMPT", "copy(step + RING, stage)", "copy(step + 1, stage)",
    ),
    "the pool for the ring": ("prompt attend 20 x 512, 32 + 20", attend, "TENSOR_PROMPT", "POOL && r > 0 && (r & 1) ?", "POOL && r > 0 ?"),
    "sums that do not follow the maximum": ("prompt attend 128 x 64, 64 + 128", attend, "TENSOR_PROMPT", "o[m][j][i] *= f[m * 2 + (i >> 1)];", ";"),
    "a swapped lane of the maximum": (
        "prompt attend 16 x 64, 64 + 128", attend, "TENSOR_PROMPT", "MX(most, SHXOR(most, 4))", "MX(most, SHXOR(most, 8))",
    ),
    "a swapped lane of the sum": ("prompt attend 16 x 64, 64 + 128", attend, "TENSOR_PROMPT", "SHXOR(sum[i], 4)", "SHXOR(sum[i], 8)"),
    "keys of other channels": ("prompt attend 64 x 128, 40 + 0", attend, "TENSOR_PROMPT", "(lane >> 4)) ^ (lane & 7u)", "(lane >> 4))"),
    "a prompt that is not normed": (
        "prompt attend 24 x 192, 48 + 500 normed", attend, "TENSOR_PROMPT", "pair(low(v) * y, high(v) * y)", "pair(low(v) * y, high(v))",
    ),
    "a prompt that turns the wrong way": (
        "prompt attend 20 x 512, 32 + 20", attend, "TENSOR_PROMPT", "MUL(x, c) + MUL(y, d)", "MUL(x, c) - MUL(y, d)",
    ),
    "the other stride of a prompt's lists": (
        "prompt attend to 40 in use", attend, "TENSOR_PROMPT", "(u64)gy * P + (slot - W)", "(u64)gy * 128 + (slot - W)",
    ),
    "negative products that count": ("scores 32 x 128", choose, "INDEX_SCORES", "MX(a, 0.0f)", "a"),
    "the second half of the heads": ("scores 64 x 128", choose, "INDEX_SCORES", "head < IH", "head < 32"),
    "equal scores from the other end": ("top 64 of 300", choose, "TOP_K", "(tie && e < need)", "(tie && e + need >= equal)"),
    "zeros that differ": ("top 512 of 2100", choose, "TOP_K", "f == 0.0f ? 0u : asu(f)", "asu(f)"),
    "the bias in the weight": ("router scores", choose, "ROUTE", "which = e; score = s[i]", "which = e; score = v[i]"),
    "the wrong bias": ("router images", choose, "ROUTE", "image[gx] ? bias2[e] : bias[e]", "image[gx] ? bias[e] : bias2[e]"),
    "a block of another size": ("finish 1 x 64 kind 1 g32 turned", finish, "FINISH_ROWS", "o * VEC < QB", "2 * o * VEC < QB"),
    "a tie that goes the other way": ("finish 3 x 128 kind 2 g32", finish, "FINISH_ROWS", "(m > 2.5f)", "(m >= 2.5f)"),
    "the window of the next position": ("exl3 mcg 3 bits bfloat16", exl3, "EXL3_MATVEC", "const int below = (7 - j)", "const int below = (6 - j)"),
    "a lane's sums that are not joined": ("exl3 3inst 2 bits biased", exl3, "EXL3_MATVEC", "s += SHXOR(s, 2);", ""),
    "a butterfly left out": ("exl3 mul1 2.5 bits", exl3, "EXL3_ROTATE", "o < 32; o <<= 1", "o < 16; o <<= 1"),
    "the trellis of another group": ("exl3 grouped", exl3, "EXL3_MATVEC", "((u64)gz * (K / 16) + kt)", "((u64)kt)"),
    "the low halves of the inputs lost": (
        "exl3 tensor mcg 3 bits 256 x 128", exl3, "EXL3_TENSOR", "c[b][u][2 * h] + c[b][u][2 * h + 1]", "c[b][u][2 * h]",
    ),
    "a scale of the inputs not taken back": (
        "exl3 tensor 3inst 2 bits 640 x 256 bfloat16", exl3, "EXL3_TENSOR", "scale[b] += XS;", "",
    ),
    "inputs of another part": ("exl3 tensor mul1 3.5 bits 1024 x 128", exl3, "EXL3_TENSOR", "(from + begin) * 8)", "begin * 8)"),
    "a lost group of inputs": ("exl3 tensor mul1 3 bits 2176 x 128", exl3, "EXL3_JOIN", "z < KZ", "z < KZ - 1"),
    "a part of a trellis twice": (
        "exl3 tensor mul1 3 bits 2176 x 128", exl3, "EXL3_TENSOR", "+ (s - 1) * EACH, b, s - 1)", "+ (s - 1) * EACH, a, s - 1)",
    ),
    "the other half of a ring": ("exl3 tensor mul1 3 bits 2176 x 128", exl3, "EXL3_TENSOR", "now = old; old = other;", ""),
    "inputs of the run before": ("exl3 tensor mul1 3 bits 2176 x 128", exl3, "EXL3_TENSOR", "if (s == 3 && run + 1 < runs) row[i] += XS;", ""),
    "a lost split of a trellis": ("exl3 tensor mul1 3 bits 2176 x 128", exl3, "EXL3_TENSOR", "s < KS; s++", "s < KS - 1; s++"),
    "a norm over the outputs of another": ("exl3 project, kind 0 g32", exl3_chains, "EXL3_LATENT", "sq / (float)width", "sq / (float)NQ"),
    "squares of the first run alone": ("exl3 project, kind 0 g32", exl3_chains, "EXL3_LATENT", "i < MW; i++", "i < 1; i++"),
    "a query for the latent": ("exl3 project, kind 1 g32", exl3_chains, "EXL3_LATENT", "(own ? NQ : 0) + column", "column"),
    "a latent that is not turned": ("exl3 project, kind 1 g64", exl3_chains, "EXL3_LATENT", "if (RD) rotated4", "if (!RD) rotated4"),
    "scales of another product": ("exl3 project, kind 0 g32", exl3_chains, "EXL3_LATENT", "v[i] *= next[i];", "v[i] *= back[i];"),
    "the first of two trellises twice": ("exl3 project, kind 0 g32", exl3, "EXL3_TENSOR", "(const u8*)words2", "(const u8*)words"),
    "rows turned for the first matrix": ("exl3 project, kind 0 g32", exl3, "EXL3_SPLIT", "(z ? other : first)", "(z ? first : first)"),
    "rows of another set": ("exl3 project, kind 0 g32", exl3, "EXL3_TENSOR", "(N2 ? second : gz)", "(N2 ? 0 : gz)"),
    "scales that are left out between products": ("exl3 output", exl3_chains, "EXL3_JOIN_TURN", "rbf(v[i] * back[i]) * next[i]", "v[i] * back[i]"),
    "a part left out between products": ("exl3 output", exl3_chains, "EXL3_JOIN_TURN", "z < KZ", "z < KZ - 1"),
    "channels that are not rotated": (
        "exl3 queries kind 2 g32", exl3_chains, "EXL3_QUERIES", "(int)lane * 4 - (128 - RD)", "(int)lane * 4 - (256 - RD)",
    ),
    "queries that are not mixed": ("exl3 queries mixed kind 0 g32", exl3_chains, "EXL3_QUERIES", "if (MIXED)", "if (!MIXED)"),
    "a block of queries of another size": ("exl3 queries kind 2 g32", exl3_chains, "EXL3_QUERIES", "o * VEC < QB", "2 * o * VEC < QB"),
    "the bias of another place": ("exl3 raw rows 4", exl3_chains, "EXL3_RAW", "% (AR ? AR : 1)", "% (AR ? 1 : 1)"),
    "gates scaled as values": ("exl3 raw rows 0", exl3_chains, "EXL3_RAW", "half4(svh, column, back)", "half4(svh, column % (W / 2), back)"),
    "results that are not weighed": ("tensor plain times 0.25", tensor, "TENSOR_PLAIN", "if (FACTOR) v =", "if (!FACTOR) v ="),
    "the trellis of the slot before": (
        "exl3 tensor experts mcg shared mul1", text_exl3_experts, "EXL3_TENSOR_DOWN", "slot++; if (left > 0) aim();", "slot++;",
    ),
    "a slot scaled as another": (
        "exl3 tensor experts mcg shared mul1", text_exl3_experts, "EXL3_TENSOR_DOWN", "(S - SHARED) + j]) * N", "(S - SHARED)]) * N",
    ),
    "inputs turned for another expert": (
        "exl3 tensor experts mcg shared mul1", text_exl3_experts, "EXL3_TENSOR_TURN", "idx[m * (S - SHARED) + j]", "idx[m * (S - SHARED)]",
    ),
    "the trellis of another expert": (
        "exl3 experts mcg shared mul1", text_exl3_experts, "EXL3_DOWN", "w2 + e * (u64)", "w2 + (e ? e - 1 : 0) * (u64)",
    ),
    "no routing weight of a trellis": ("exl3 experts mul1 shared affine", text_exl3_experts, "EXL3_UP", "* up * weight", "* up"),
    "a shared expert that is not added": ("exl3 experts mul1 shared affine", text_exl3_experts, "EXL3_SUM", "v[i] += a[i];", "v[i] += 0.0f * a[i];"),
    "no clamp of up": ("exl3 tensor experts mcg shared mul1", text_exl3_experts, "EXL3_TENSOR_UP", "up = MN(MX(up, -limit), limit);", ""),
    "a lost split of the inputs": ("tensor matvec 512 to 1 x 32", tensor, "TENSOR_MATVEC", "s < KS; s++) v +=", "s < KS - 1; s++) v +="),
    "an offset of the codes": ("tensor matvec 256 to 4 x 16", tensor, "TENSOR_MATVEC", "FMA(-128.0f, q,", "FMA(-127.0f, q,"),
    "the scales of the step before": ("tensor matvec 1792 to 1 x 64 wide", tensor, "TENSOR_MATVEC", "factors += KS * 8;\n    }", "}"),
    "a step that is not copied": ("tensor matvec 1792 to 1 x 64 wide", tensor, "TENSOR_MATVEC", "i + RING < mine", "i + RING + 1 < mine"),
    "the rows of another tile": ("tensor matvec 1280 to 1 x 128", tensor, "TENSOR_MATVEC", "F = R * 16 * (K / 2)", "F = 0"),
    "the inputs of the first group": ("tensor matvec 256 to 4 x 16", tensor, "TENSOR_MATVEC", "(RG ? row / (RG ? RG : 1) * K : 0)", "0"),
    "a chain that is left out": ("tensor plain 512 to 1 x 24", tensor, "TENSOR_PLAIN", "(d[0][2 + i] + d[1][2 + i])", "d[0][2 + i]"),
    "a split left out of a plain matrix": ("tensor plain 5632 to 1 x 8 wide", tensor, "TENSOR_PLAIN", "s < KS; s++", "s < KS - 1; s++"),
    "the inputs of the first group of plain ones": ("tensor plain 256 to 4 x 16", tensor, "TENSOR_PLAIN", "(RG ? row / (RG ? RG : 1) * K : 0)", "0"),
    "the first of two matrices twice": ("tensor pair 0", tensor, "TENSOR_PLAIN", "(second ? w2 : w)", "(w)"),
    "the table at another position": ("tensor pair 4", tensor, "TENSOR_PLAIN", "% (AR ? AR : 1)", "% (AR ? 1 : 1)"),
    "scales of the gate for the up rows": ("experts on the unit", experts, "TENSOR_EXPERTS_UP", "(shared ? t3 : s3)", "(shared ? t1 : s1)"),
    "scales of the blocks before": ("experts on the unit", experts, "TENSOR_EXPERTS_UP", "(i / SB & 1) * 128 + i % SB", "i % SB"),
    "a stage that is read too early": ("experts on the unit", experts, "TENSOR_EXPERTS_UP", "here == ST - 1 ? 0 : here + 1", "here"),
    "a row that takes another's slot": ("experts on the unit", experts, "TENSOR_EXPERTS_UP", "(m * S + j) * I", "(m * S + (j ? j - 1 : 0)) * I"),
    "an expert of one row alone": ("experts on the unit", experts, "TENSOR_EXPERTS_DOWN", "(u8)(slot + 1)", "(u8)(g == owner ? slot + 1 : 0)"),
    "the stream of the expert before": ("experts on the unit", experts, "TENSOR_EXPERTS_DOWN", "if (filled <= experts) begin();", ""),
    "a row of another tile": ("tensor experts affine 4", tiles, "TENSOR_TILES", "(u32)tiles[gy * 4 + 1]", "(u32)tiles[gy * 4 + 1] / 2"),
    "pairs in another order": ("tensor experts mxfp8 8", tiles, "TENSOR_TILES", "(a, p + 4)", "(a, p ^ 1)"),
    "the row of another pick": ("tensor experts affine 4", tiles, "TENSOR_TILES", "(u32)order[r] / (P ? P : 1)", "(u32)order[r] % (P ? P : 1)"),
    "the weight of another pick": ("tensor experts affine 4", tiles, "TENSOR_TILES", "wt[order[first + r]]", "wt[first + r]"),
    "up rows of the gate": ("tensor experts affine 8", tiles, "TENSOR_TILES", "row_at<K, BITS>(shared ? v2 : w2, base) : wa", "wa : wa"),
    "scales of the routed gate for the shared one": ("tensor experts affine 6", tiles, "TENSOR_TILES", "(shared ? vs : sc, base)", "(sc, base)"),
    "sums that change places": ("tensor experts affine 4", tiles, "TENSOR_TILES", "pair(got, keep)", "pair(keep, got)"),
    "up that is not clamped": ("tensor experts affine 4", tiles, "TENSOR_TILES", "b = MN(MX(b, -limit), limit);", ""),
    "the scale of the step before": ("tensor experts affine 4", tiles, "TENSOR_TILES", "* (K / GS) + k / GS", "* (K / GS)"),
    "half of the rows of a tile": ("tensor experts affine 4", tiles, "TENSOR_TILES", "n * 8 < count", "n * 16 < count - 4"),
    "a pick that goes to another row": ("tensor experts affine 4", tiles, "TILE_ORDER", "back[i] = (int)to;", "back[i] = (int)(to ? to - 1 : to);"),
    "a pick of a neighbour": ("tensor experts affine 2", tiles, "TILE_ORDER", "order[to] = (int)i;", "order[to] = (int)(i ^ 1u);"),
    "a pick that is not summed": ("tensor experts affine 4", tiles, "JOIN_PICKS", "int j = 0; j <= P; j++) {", "int j = 1; j <= P; j++) {"),
    "the first shared row for all": ("tensor experts affine 4 beside another", tiles, "JOIN_PICKS", "(u64)gy * D + d : (", "d : ("),
    "the inputs of a prompt's first group": ("prompt groups affine 4", tiles, "TENSOR_GROUPS", "(G * K) + gz * K", "(G * K)"),
    "the scale of a run's first step": ("prompt groups affine 4 of 512", tiles, "TENSOR_GROUPS", "(u32)(it & 3) * 0x2222u", "0u"),
    "scales of a run before": ("prompt groups affine 4 of 512", tiles, "TENSOR_GROUPS", "(it & 3) == 3", "(it & 3) == 4"),
    "the outputs of a prompt's first group": ("prompt groups mxfp8 8", tiles, "TENSOR_GROUPS", "(G * N) + gz * N + column", "(G * N) + column"),
    "the table's row of another position": ("prompt rows 192 to 32 and 4", tiles, "TENSOR_ROWS", "% (AR ? AR : 1)", "% (AR ? 1 : 1)"),
    "inputs of a step too few": ("prompt rows 128 to 1056", tiles, "TENSOR_ROWS", "it < K / 64; it++", "it < K / 64 - 1; it++"),
    "the first matrix twice": ("prompt rows 192 to 32 and 0", tiles, "TENSOR_ROWS", "N2 ? (const void*)w2 : wa", "wa"),
    "a split that is not joined": ("prompt rows 640 to 40", tiles, "TENSOR_NARROW", "j < KS; j++", "j < KS - 1; j++"),
    "outputs of the other half": ("prompt rows 640 to 40", tiles, "TENSOR_NARROW", "m * 16 + (i >> 1) * 8", "(m ^ 1) * 16 + (i >> 1) * 8"),
    "a scale of the group before in a matrix": ("decoded affine 4 g64", tensor, "DECODE_MATRIX", "/ (GS / 8)", "/ (GS / 4)"),
    "the first of three matrices twice": ("decoded three affine 4", tensor, "DECODE_THREE", "? w2 : w", "? w : w"),
    "scales of another matrix": ("decoded three mxfp8 8", tensor, "DECODE_THREE", "which == 2 ? sc3", "which == 2 ? sc2"),
    "a second matrix over the first": ("decoded three affine 4", tensor, "DECODE_THREE", "(which ? (u64)dims[0] * 8 : 0)", "0"),
    "codes that lie across two words": ("decoded affine 5 g64", tensor, "DECODE_MATRIX", "| (high << (32 - from))", ""),
    "a byte too early": ("decoded affine 3 g32", tensor, "DECODE_MATRIX", "(u32)(byte & 3u) * 8", "(u32)(byte & 2u) * 8"),
    "channels of the other part": ("finish of two parts", finish, "FINISH_TWO", "row * XS + X0 + ch", "row * XS + ch"),
    "the weight of the other part": ("finish of two parts", finish, "FINISH_TWO", "(DEV const u32*)nw2", "(DEV const u32*)nw"),
    "no rotation": ("finish 4 x 128 kind 2 g32 turned", finish, "FINISH_ROWS", "rbf(MUL(u, c) - MUL(v, s))", "u"),
    "an offset of an embedding": ("embed affine 6 32", glue, "EMBED", "c - (float)(1u << (BITS & 31))", "c - (float)(1u << (BITS & 31)) + 1.0f"),
    "a scale of the next group": ("embed mxfp8 8 32", glue, "EMBED", "run * 8 / GS", "(run ^ 4) * 8 / GS"),
    "the other half of a word": ("embed float16", glue, "EMBED", "16 * (i & 1)", "16 * (~i & 1)"),
    "a stream that is not written": ("embed bfloat16", glue, "EMBED", "for (int k = 0; k < 4; k++)", "for (int k = 0; k < 3; k++)"),
    "a mix that is transposed": ("settle", glue, "SETTLE", "comb[gy * 16 + 4 * j + k]", "comb[gy * 16 + 4 * k + j]"),
    "a stream that the mean leaves out": ("mean of streams", glue, "SETTLE", "sum[i] += r[i];", "sum[i] += k ? r[i] : 0.0f;"),
    "a mean that is too large": ("mean of streams", glue, "SETTLE", "0.25f * sum[0]", "0.251f * sum[0]"),
    "a dead row that lives": ("engram 96", glue, "ENGRAM", "dead[gy] ? 0.0f :", ""),
    "a gate without its sign": ("engram 96", glue, "ENGRAM", "dot >= 0.0f ? root : -root", "root"),
    "the key of the first stream": ("engram 2176", glue, "ENGRAM", "row + gx * D + d", "row + d"),
    "sums of one SIMD group": ("engram 2176", glue, "ENGRAM", "i < NTH / 32", "i < 1"),
    "no norm of the keys": ("engram 96", glue, "ENGRAM", "t[2] * rh * rk", "t[2] * rh"),
    "the weights of other streams": ("collapse 96", glue, "COLLAPSE", "pre[gx * S + k]", "pre[gx * S + 3 - k]"),
    "a norm that was left out": ("row norm 2176", glue, "COLLAPSE", "NORM ? c", "S == 4 ? c"),
    "a norm too many": ("collapse 96 alone", glue, "COLLAPSE", "NORM ? c", "S == 4 ? c"),
    "a tail without its norm": ("collapse 2176", glue, "COLLAPSE", "for (int i = 0; i < NTH / 32; i++) sq +=", "for (int i = 0; i < 8; i++) sq +="),
    "a lost base": ("head mix 96", glue, "COLLAPSE", "scale[0], base[k]", "scale[0], 0.0f"),
    "a slice that is left out": ("head mix 2176", glue, "COLLAPSE", "g < G; g += 32", "g < 32; g += 32"),
    "a stream left out of the squares": ("head mix 96", glue, "HEAD_MIX", "f[0] = v[0];", "f[0] = k ? v[0] : 0.0f;"),
    "the channels of the other half": ("pool 4 x 64 overlapping", glue, "POOL_GROUPS", "at < (HALVES - 1) * RATIO ?", "at >= (HALVES - 1) * RATIO ?"),
    "a slot that is not there": ("pool 4 x 64 overlapping", glue, "POOL_GROUPS", "if (r >= 0 && inside)", "if (inside)"),
    "a sum of fewer slots": ("pool 128 x 64", glue, "POOL_GROUPS", "i < NSG; i++) { z", "i < NSG - 1; i++) { z"),
    "one entry too many": ("first 130 visible", glue, "FIRST_VISIBLE", "i < len[gy]", "i <= len[gy]"),
    "the block after the newest": ("best of blocks of 8, 96 of 160", glue, "BLOCK_TOP", "(u32)(n - 1) / BLOCK", "(u32)n / BLOCK"),
    "lanes that are not joined": ("best of blocks of 12, 96 of 120", glue, "BLOCK_TOP", "o < LANES; o <<= 1", "2 * o < LANES; o <<= 1"),
    "the stride of another width": ("best of blocks of 8, 96 of 160", glue, "BLOCK_TOP", "(u64)gy * T + b * BLOCK", "(u64)gy * (T + 64) + b * BLOCK"),
    "a list that is cut short": ("inside blocks of 8, 96 of 160", glue, "KEEP_BLOCKS", "high = SLOTS;", "high = SLOTS / 2;"),
    "absent blocks that count": ("inside blocks of 12, 96 of 120", glue, "KEEP_BLOCKS", "present[row + low] && ", ""),
    "a factor that is off": ("scaled 160", glue, "SCALED", "asf((u32)FACTOR)", "asf((u32)FACTOR + 1)"),
    "a butterfly of the wrong sign": ("hadamard 3 x 128", glue, "HADAMARD", "lane & o ? t - a[i]", "lane & o ? a[i] - t"),
    "a butterfly between registers": ("hadamard 1 x 512", glue, "HADAMARD", "o < EACH; o <<= 1", "o < EACH / 2; o <<= 1"),
    "another stride of the scores": ("scores of 37 in use", choose, "INDEX_SCORES", "sc[(u64)gy * T + first", "sc[(u64)gy * 100 + first"),
    "a piece too few": ("attend to 40 in use", attend, "ATTEND_SPLIT", "if ((int)gx >= SP) return;", "if ((int)gx >= SP - 1) return;"),
}


def caught(name: str) -> bool:
    case = next(c for c in cases() if c.name == name)
    return any(d > limit for d, limit in zip(case.distances(case.run(Shim(case.only or "metal"))), case.limits, strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_text(fault, monkeypatch):
    name, module, kernel, old, new = FAULTS[fault]
    text = getattr(module, kernel)
    assert old in text.body + text.helpers
    monkeypatch.setattr(module, kernel, replace(text, body=text.body.replace(old, new), helpers=text.helpers.replace(old, new)))
    assert caught(name)


@pytest.mark.parametrize("name", ["matvec affine 4 g64 bfloat16 1280", "attend 8 x 64, 64 + 128", "enter lagged"])
def test_a_swapped_lane(name, monkeypatch):
    assert "v += SHXOR(v, 4);" in dialect._COMMON
    monkeypatch.setattr(dialect, "_COMMON", dialect._COMMON.replace("v += SHXOR(v, 4);", "v += SHXOR(v, 8);"))
    assert caught(name)
