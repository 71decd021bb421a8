"""The cases of trellis-coded matrices and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels import exl3, exl3_chains, finish
from dsv41chat.engine.kernels.exl3_experts import Exl3Experts
from dsv41chat.engine.nn import linear as nn
from dsv41chat.engine.nn.attention import AttentionWeights
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3GroupedLinear, Exl3Linear, Exl3Stack
from dsv41chat.engine.nn.moe_v4 import MoEV4
from dsv41chat.engine.ops import fakequant, rope
from dsv41chat.engine.ops.hadamard import hadamard_matrix
from tests.engine.kernels.cases import BF16, F32, ROWS, STOCK_ROUNDING, Case, Draw, values


def stack(d: Draw, count: int, inputs: int, outputs: int, book: str, halves: int, size: float = 1.0, biased: bool = False) -> Exl3Stack:
    """Random words and scales; products of unit rows have about that size."""
    words = mx.array(d.rng.integers(0, 2**32, (count, inputs // 16, outputs // 16, 4 * halves), dtype=np.uint32))
    half = lambda a: a.astype(mx.float16)
    suh, svh = half(d.normal(count, inputs)), half(d.normal(count, outputs, size=size * inputs**-0.5))
    return Exl3Stack(words, suh, svh, half(d.normal(count, outputs)) if biased else None, book)


def trellis(book: str, halves: int, wide: bool = True, biased: bool = False) -> Case:
    """halves: twice the bits of a value. wide: float32 rows and result."""
    d, K, N = Draw(14 + halves), 256, 128
    words = mx.array(d.rng.integers(0, 2**32, (K // 16, N // 16, 4 * halves), dtype=np.uint32))
    half = lambda a: a.astype(mx.float16)
    module = Exl3Linear(words, half(d.normal(K)), half(d.normal(N)), half(d.normal(N)) if biased else None, book)
    x = d.rows(ROWS, K).astype(F32 if wide else BF16)
    name = f"exl3 {book} {halves / 2:g} bits{'' if wide else ' bfloat16'}{' biased' if biased else ''}"
    return Case(name, lambda b: exl3.Exl3Matvec(b, module), lambda x: module(x.astype(F32)), (x,), (1e-5 if wide else 2.5e-3,))


def tensor_trellis(book: str, halves: int, K: int, N: int, wide: bool, biased: bool = False, processors: int = exl3.PROCESSORS) -> Case:
    """processors: of the device; few have longer sums."""
    d = Draw(50 + halves)
    module = stack(d, 1, K, N, book, halves, biased=biased)[0]

    # A row whose runs of 128 inputs differ by far, which half-precision numbers alone would not hold.
    x = np.array(d.rows(ROWS, K).astype(F32)) * np.exp2(np.where(np.arange(ROWS)[:, None] == 4, np.arange(K) // 128 % 3 * 24 - 24, 0))
    x = mx.array(x.astype(np.float32)).astype(F32 if wide else BF16)
    name = f"exl3 tensor {book} {halves / 2:g} bits {K} x {N}{'' if wide else ' bfloat16'}"
    build = lambda b: exl3.Exl3TensorMatvec(b, module, processors=processors)
    return Case(name, build, lambda x: module(x.astype(F32)), (x,), (1e-5 if wide else 2.5e-3,), close=frozenset({0}), only="cuda")


def grouped(tensor: bool) -> Case:
    d = Draw(60)
    module = Exl3GroupedLinear(stack(d, 3, 128, 256, "mcg", 6))
    kind = exl3.Exl3TensorMatvec if tensor else exl3.Exl3Matvec
    name, only, close = ("exl3 tensor grouped", "cuda", frozenset({0})) if tensor else ("exl3 grouped", None, frozenset())
    inputs = (d.rows(ROWS, 384),)
    return Case(name, lambda b: kind(b, module.groups), lambda x: module(x.astype(F32)), inputs, (2.5e-3,), close=close, only=only)


def weights(d: Draw, rounding: Callable[[mx.array], mx.array] | None, book: str = "mcg") -> AttentionWeights:
    """Of two heads, with queries of two runs of outputs and latents of one, and of two groups of outputs."""
    D, rank, heads, C = 640, 256, 2, 128
    one = lambda inputs, outputs: stack(d, 1, inputs, outputs, book, 6)[0]
    grouped = Exl3GroupedLinear(stack(d, 2, C * heads // 2, 128, book, 6))
    matrices = one(D, rank), d.positive(rank), one(rank, heads * C), one(D, C), d.positive(C), grouped, one(256, D)
    return AttentionWeights(*matrices, d.normal(heads), heads, C, 1e-6, False, rounding)


def projected(rounding: finish.Rounding, stock: Callable[[mx.array], mx.array] | None, processors: int) -> Case:
    d = Draw(62)
    w = weights(d, stock)
    build = lambda b: exl3_chains.Exl3Project(b, w, 64, rounding, processors)
    # A low bit of the query can become a whole step of the latent's rounding.
    limits = 4e-3, 6e-3, 4e-2 if stock else 6e-3
    inputs = d.rows(ROWS, 640), d.table(ROWS, 64)
    name = f"exl3 project, kind {rounding.kind} g{rounding.block}"
    return Case(name, build, lambda x, table: w.project(x.astype(F32), table), inputs, limits, close=frozenset({0, 1, 2}), only="cuda")


def given_out(processors: int) -> Case:
    d = Draw(63)
    w = weights(d, None)
    build = lambda b: exl3_chains.Exl3Output(b, w, processors)
    return Case("exl3 output", build, lambda o: w.output(o.astype(F32)), (d.rows(ROWS, 2, 128),), (5e-3,), close=frozenset({0}), only="cuda")


def queries(mixed: bool, rounding: finish.Rounding, processors: int) -> Case:
    d, heads = Draw(64), 3
    module = stack(d, 1, 384, 128 * heads, "mul1", 6)[0]
    matrix = mx.array(hadamard_matrix(128))

    def stock(qr, table):
        q = rope.rotate(module(qr.astype(F32)).reshape(qr.shape[0], heads, 128), table)
        return STOCK_ROUNDING[rounding](q @ matrix if mixed else q)

    build = lambda b: exl3_chains.Exl3Queries(b, module, 128, 64, mixed, rounding, processors)
    name = f"exl3 queries{' mixed' if mixed else ''} kind {rounding.kind} g{rounding.block}"
    limit = (5.5e-2 if mixed else 4e-2) if rounding.kind else 6e-3
    return Case(name, build, stock, (d.rows(ROWS, 384), d.table(ROWS, 64)), (limit,), close=frozenset({0}), only="cuda")


def raw_rows(table_rows: int | None, processors: int) -> Case:
    d = Draw(65)
    value, gate = (stack(d, 1, 640, 128, "3inst", 5)[0] for _ in range(2))
    table, at = d.normal(table_rows, 128) if table_rows else None, d.whole(0, 1000, ROWS)

    def stock(x, at):
        a, b = (m(x.astype(F32)) for m in (value, gate))
        return mx.stack([a, b if table is None else b + table[at % table_rows]], axis=1)

    build = lambda b: exl3_chains.Exl3RawRows(b, value, gate, table, processors)
    return Case(f"exl3 raw rows {table_rows or 0}", build, stock, (d.rows(ROWS, 640), at), (1e-5,), close=frozenset({0}), only="cuda")


def experts(book: str, bits: tuple[int, int], shared: tuple[str, int, int] | None, limit: float, dialect: str) -> Case:
    """bits: halves of gate and up, and of down; the shared expert has 8 halves of another codebook, or is packed. dialect: whose texts."""
    d, E, (picks, D, I) = Draw(61), 5, (4, 640, 384) if dialect == "cuda" else (3, 256, 128)
    halves, lower = bits
    w1, w3, w2 = stack(d, E, D, I, book, halves, 4.0), stack(d, E, D, I, book, halves, 4.0), stack(d, E, I, D, book, lower)
    if shared is None:
        s1, s3, s2 = stack(d, 1, D, I, "mul1", 8)[0], stack(d, 1, D, I, "mul1", 8)[0], stack(d, 1, I, D, "mul1", 7)[0]
        wide = (s1, s2, s3)
    else:
        s1, s3, s2 = (nn.QuantizedLinear(d.packed(shape, *shared)) for shape in ((I, D), (I, D), (D, I)))
        wide = tuple(nn.Linear(values(m)) for m in (s1, s2, s3))
    routed = [Exl3ExpertLinear(w, F32) for w in (w1, w2, w3)]
    moe = MoEV4(None, None, None, *routed, *wide, picks, 1.0, limit, "", F32)
    up, down = tuple(replace(m, dtype=BF16) for m in (routed[0], routed[2])), replace(routed[1], dtype=BF16)

    def build(backend):
        made = Exl3Experts(backend, up, down, (s1, s3), s2, limit, processors=1)
        made.tensor = dialect == "cuda"
        return made

    name = f"exl3 {'tensor ' if dialect == 'cuda' else ''}experts {book} shared {'mul1' if shared is None else shared[0]}"
    inputs = d.rows(ROWS, D), d.chosen(picks, E), d.positive(ROWS, picks)
    only = "cuda" if dialect == "cuda" else None
    return Case(name, build, lambda x, ids, w: moe.experts(x.astype(F32), ids, w), inputs, (4e-3,), close=frozenset({0}), only=only)


def exl3_cases() -> tuple[Case, ...]:
    return (
        trellis("3inst", 4, biased=True),
        trellis("mcg", 6, wide=False),
        trellis("mul1", 5),
        trellis("mcg", 16),
        grouped(False),
        experts("mcg", (6, 6), None, 2.0, "metal"),
        experts("mul1", (5, 7), ("affine", 4, 64), 0.0, "metal"),
        tensor_trellis("mcg", 6, 256, 128, True),
        tensor_trellis("3inst", 4, 640, 256, False, biased=True, processors=1),
        tensor_trellis("mul1", 7, 1024, 128, True, biased=True),
        tensor_trellis("mul1", 6, 2176, 128, True, processors=2),
        tensor_trellis("mcg", 16, 512, 128, False),
        grouped(True),
        projected(finish.NO_ROUNDING, None, 3),
        projected(finish.FP8_UE8M0, fakequant.fp8_ue8m0, 7),
        projected(finish.v4_fp8(64), lambda x: fakequant.v4_fp8(x, 64), exl3.PROCESSORS),
        given_out(2),
        queries(False, finish.FP4_UE8M0, 5),
        queries(True, finish.V4_FP4, 3),
        queries(True, finish.NO_ROUNDING, exl3.PROCESSORS),
        raw_rows(4, 3),
        raw_rows(None, 6),
        experts("mcg", (6, 6), None, 2.0, "cuda"),
        experts("3inst", (6, 8), ("mxfp8", 8, 32), 0.0, "cuda"),
    )
