"""Trellis-coded products that follow one another in a layer: on CUDA what stands between two of them is one launch.

For at most MOST_ROWS rows; a row's bits do not depend on how many there are. Matrices in any other form are declined, and so is everything
on Metal, where each of these steps is a call of its own.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import SMALL_ELEMENTS, float_bits
from dsv41chat.engine.kernels.exl3 import PROCESSORS, Exl3TensorMatvec
from dsv41chat.engine.kernels.finish import Rounding
from dsv41chat.engine.kernels.launch import MOST_ROWS, Backend, number
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.sites import bare
from dsv41chat.engine.kernels.text_exl3_join import EXL3_JOIN_TURN, EXL3_LATENT, EXL3_QUERIES, EXL3_RAW
from dsv41chat.engine.kernels.text_exl3_tensor import BLOCK_WORDS
from dsv41chat.engine.nn.attention import AttentionWeights
from dsv41chat.engine.nn.exl3 import Exl3GroupedLinear, Exl3Linear, Exl3Stack
from dsv41chat.engine.ops.exl3 import BLOCK

# Outputs that a group can hold of a row.
_WIDEST = 32 * BLOCK


def _plain(backend: Backend, *modules: Any) -> list[Exl3Linear]:
    """The matrices, if each is trellis-coded, alone and without a bias. Raises Declined without a reason to tell."""
    found = [bare(m) for m in modules]
    if backend.dialect != "cuda" or not all(isinstance(m, Exl3Linear) and m.bias is None for m in found):
        raise Declined("")
    return found


class Exl3Project:
    """`AttentionWeights.project`: (x bfloat16 [n, D], (cos, sin)) -> qr [n, q_rank], q [n, H, C], kv [n, C], bfloat16.

    Query and latent are summed by the same launch, and joined, normed, and made ready for what reads them by another.
    """

    def __init__(self, backend: Backend, w: AttentionWeights, rope: int, rounding: Rounding, processors: int = PROCESSORS):
        """Raises Declined."""
        low, own, high = _plain(backend, w.wq_a, w.wkv, w.wq_b)
        self.backend, self.heads, self.channels = backend, w.heads, own.svh.shape[0]
        self.both = Exl3TensorMatvec(backend, low, processors=processors, second=own)
        self.high = Exl3TensorMatvec(backend, high, mx.bfloat16, processors)
        self.rank = low.svh.shape[0]
        if max(self.rank, self.channels) > _WIDEST or rounding.kind and (rounding.block > BLOCK or rounding.block % 4):
            raise Declined(f"rows of {self.rank} and {self.channels} outputs, rounded in blocks of {rounding.block}")
        self.simds = max(self.rank, self.channels) // BLOCK
        self.weights = [low.svh, own.svh, w.q_norm, w.kv_norm, high.suh, high.suh]
        self.places = mx.arange(MOST_ROWS)
        self.constants = {"NQ": self.rank, "C": self.channels, "KZ": self.both.parts, "MW": self.simds, "EPS": float_bits(w.eps), "RD": rope}
        self.constants |= _rounded(rounding, self.channels)

    def __call__(self, x: mx.array, table: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array, mx.array]:
        n = x.shape[0]
        parts = self.both.sums(self.both.turned(x), n)
        turned = (n, self.rank // BLOCK * BLOCK_WORDS), mx.uint32
        outputs = [((n, self.rank), mx.bfloat16), turned, ((n, self.channels), mx.bfloat16), ((SMALL_ELEMENTS,), mx.uint32)]
        # The last result is for one more product, if there is one (`fewer`).
        inputs, grid = [parts, *self.weights, *table, self.places, number(n)], (2, n, 1)
        qr, xh, kv, _ = self.backend.run(EXL3_LATENT, inputs, self.constants, grid, 32 * self.simds, outputs)
        return qr, self.high.outputs_of(xh, n, mx.bfloat16).reshape(n, self.heads, -1), kv


class Exl3Output:
    """`AttentionWeights.output`: o bfloat16 [n, H, C] -> [n, D]."""

    def __init__(self, backend: Backend, w: AttentionWeights, processors: int = PROCESSORS):
        """Raises Declined."""
        (last,), grouped = _plain(backend, w.wo_b), bare(w.wo_a)
        if not isinstance(grouped, Exl3GroupedLinear) or not isinstance(grouped.groups, Exl3Stack) or grouped.groups.bias is not None:
            raise Declined("")
        self.backend = backend
        self.first, self.last = (Exl3TensorMatvec(backend, m, mx.bfloat16, processors) for m in (grouped.groups, last))

    def __call__(self, o: mx.array) -> mx.array:
        n, first, last = o.shape[0], self.first, self.last
        inputs = [first.sums(first.turned(o.reshape(n, -1)), n), first.arrays[1], last.suh, number(n)]
        constants, blocks = {"W": first.total, "KZ": first.parts}, first.total // BLOCK
        outputs = [((n, blocks * BLOCK_WORDS), mx.uint32)]
        (xh,) = self.backend.run(EXL3_JOIN_TURN, inputs, constants, (blocks, n, 1), 32, outputs)
        return last.outputs_of(xh, n, mx.bfloat16)


class Exl3RawRows:
    """`raw_rows` of a compressor that pools: (x bfloat16 [n, D], positions int32 [n] with a table) -> value and gate rows float32 [n, 2, width]."""

    def __init__(self, backend: Backend, value: Any, gate: Any, table: mx.array | None, processors: int = PROCESSORS):
        """table float32 [r, width]: row positions[m] % r of it is added to the gate of row m. Raises Declined."""
        pair = _plain(backend, value, gate)
        self.backend, self.both = backend, Exl3TensorMatvec(backend, pair[0], processors=processors, second=pair[1])
        self.width, self.table, self.places = pair[0].svh.shape[0], table, mx.arange(MOST_ROWS)
        if pair[1].svh.shape[0] != self.width:
            raise Declined(f"value and gate have {self.width} and {pair[1].svh.shape[0]} outputs")
        self.scales = mx.concatenate([m.svh for m in pair])
        self.constants = {"W": self.both.total, "KZ": self.both.parts, "AR": 0 if table is None else table.shape[0]}

    def __call__(self, x: mx.array, positions: mx.array | None = None) -> mx.array:
        n, both = x.shape[0], self.both
        added = (self.places, self.places) if self.table is None else (self.table, positions)
        inputs, grid = [both.sums(both.turned(x), n), self.scales, *added, self.places, number(n)], (both.total // BLOCK, n, 1)
        return self.backend.run(EXL3_RAW, inputs, self.constants, grid, 32, [((n, 2, self.width), mx.float32)])[0]


class Exl3Queries:
    """The queries of an indexer with heads of 128 channels: (qr bfloat16 [n, q_rank], (cos, sin)) -> [n, H, 128] bfloat16, rotated, through the
    Hadamard matrix where `mixed`, rounded."""

    def __init__(self, backend: Backend, module: Any, channels: int, rope: int, mixed: bool, rounding: Rounding, processors: int = PROCESSORS):
        """Raises Declined."""
        (matrix,) = _plain(backend, module)
        if channels != BLOCK or rounding.kind and (rounding.block > BLOCK or rounding.block % 4):
            raise Declined(f"heads of {channels} channels, rounded in blocks of {rounding.block}")
        self.backend, self.product = backend, Exl3TensorMatvec(backend, matrix, mx.bfloat16, processors)
        self.constants = {"W": self.product.total, "KZ": self.product.parts, "RD": rope, "MIXED": int(mixed), **_rounded(rounding, channels)}

    def __call__(self, qr: mx.array, table: tuple[mx.array, mx.array]) -> mx.array:
        n, m = qr.shape[0], self.product
        inputs, blocks = [m.sums(m.turned(qr), n), m.arrays[1], *table, number(n)], m.total // BLOCK
        outputs = [((n, blocks, BLOCK), mx.bfloat16)]
        return self.backend.run(EXL3_QUERIES, inputs, self.constants, (blocks, n, 1), 32, outputs)[0]


def _rounded(rounding: Rounding, channels: int) -> dict[str, int]:
    """Constants of the texts, as of FINISH_ROWS."""
    ends = {"QN": channels - rounding.spares, "DIVIDE": int(rounding.divides), "FLOOR": float_bits(rounding.floor)}
    return {"QK": rounding.kind, "QB": rounding.block, **ends}
