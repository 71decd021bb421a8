"""What stands between the large kernels of a decode step on a device, without an operation of MLX: for a recorder of launches.

Calls look at shapes and dtypes of their arrays and at nothing else, so that a recorder may pass what stands for arrays. Rows are few
(`launch.MOST_ROWS`); a row's bits do not depend on how many share its call. `dims` int32 [1 or more]: its first number says how many
columns of a score are in use and are the stride of its rows; arrays keep the shape of all columns.
"""

from __future__ import annotations

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import SMALL_ELEMENTS, float_bits
from dsv41chat.engine.kernels.launch import Backend, Constants, number
from dsv41chat.engine.kernels.matrix import Form, Stored, stored
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_step import (
    BLOCK_TOP,
    COLLAPSE,
    EMBED,
    ENGRAM,
    FIRST_VISIBLE,
    GUESS,
    GUESS_PARTS,
    HADAMARD,
    HEAD_MIX,
    KEEP_BLOCKS,
    POOL_GROUPS,
    SCALED,
    SCATTER,
    SETTLE,
)
from dsv41chat.engine.nn.engram import Engram
from dsv41chat.engine.nn.hyper_connection import HyperHead
from dsv41chat.engine.nn.linear import QuantizedLookup

STREAMS, _THREADS = 4, 128
_PLAIN = {mx.bfloat16: (3, 16), mx.float32: (4, 32), mx.float16: (5, 16)}


def _row_threads(width: int) -> int:
    """Of a group that sums over a row: the same on all devices, because it orders the sum."""
    return 256 if width <= 2048 else 512


class Embed:
    """ids int32 [n] -> h bfloat16 [n, streams, D]: rows of the table, in all streams alike."""

    def __init__(self, backend: Backend, table: mx.array | QuantizedLookup, streams: int = STREAMS):
        """Raises Declined for a table that the kernel does not read."""
        self.backend, self.matrix = backend, _table(table)
        if streams != STREAMS:
            raise Declined(f"{streams} streams; the kernels have {STREAMS}")
        self.constants = {"D": self.matrix.inputs, "NTH": _THREADS, **self.matrix.form.constants()}

    def __call__(self, ids: mx.array) -> mx.array:
        n, width = ids.size, self.matrix.inputs
        grid = -(-width // (8 * _THREADS)), n, 1
        return self.backend.run(EMBED, [ids, *self.matrix.arrays], self.constants, grid, _THREADS, [((n, STREAMS, width), mx.bfloat16)])[0]


def _table(table: mx.array | QuantizedLookup) -> Stored:
    if isinstance(table, QuantizedLookup):
        return stored(table)
    if not isinstance(table, mx.array) or table.dtype not in _PLAIN or table.shape[1] % 32:
        raise Declined(f"{type(table).__name__} is no table that the kernels read")
    mode, bits = _PLAIN[table.dtype]
    return Stored(Form(mode, bits, 32, 0), (table, table, table), *table.shape)


class Settle:
    """(h bfloat16 [n, 4, D], y bfloat16 [n, D], post float32 [n, 4], comb float32 [n, 4, 4]) -> h with y spread over it, bfloat16, with
    the bits that `hyper.Enter` gives it."""

    def __init__(self, backend: Backend, width: int):
        if width % 2:
            raise Declined(f"a width of {width} is odd")
        self.backend, self.constants = backend, {"D": width, "NTH": _THREADS}

    def __call__(self, h: mx.array, y: mx.array, post: mx.array, comb: mx.array) -> mx.array:
        return self._run(h, y, post, comb, 1)[0]

    def _run(self, h: mx.array, y: mx.array, post: mx.array, comb: mx.array, expand: int) -> list[mx.array]:
        n, width = h.shape[0], self.constants["D"]
        grid = -(-width // (2 * _THREADS)), n, 1
        outputs = [((n, STREAMS, width) if expand else (8,), mx.bfloat16), ((n, width), mx.bfloat16)]
        return self.backend.run(SETTLE, [h, y, post, comb], {**self.constants, "EXPAND": expand}, grid, _THREADS, outputs)


class StreamMean(Settle):
    """h bfloat16 [n, 4, D] -> bfloat16 [n, D]: the mean over the streams."""

    def __init__(self, backend: Backend, width: int):
        super().__init__(backend, width)
        self.unused = mx.zeros((8,), mx.float32)

    def __call__(self, h: mx.array) -> mx.array:
        return self._run(h, h, self.unused, self.unused, 0)[1]


class EngramGate:
    """(h bfloat16 [n, 4, D], kv bfloat16 [n, 5 * D], dead bool [n]) -> h + gate * value, bfloat16: an Engram after its product."""

    def __init__(self, backend: Backend, engram: Engram):
        """Raises Declined."""
        streams, width = engram.qk.shape
        if streams != STREAMS or width % 8 or engram.qk.dtype != mx.float32:
            raise Declined(f"a gate of shape {list(engram.qk.shape)}, {engram.qk.dtype}; the kernels have {STREAMS} streams")
        self.backend, self.qk, self.threads = backend, engram.qk, _row_threads(width)
        self.constants = {"D": width, "NTH": self.threads, "EPS": float_bits(engram.eps), "SCALE": float_bits(width**-0.5)}

    def __call__(self, h: mx.array, kv: mx.array, dead: mx.array) -> mx.array:
        inputs, grid = [h, kv, dead, self.qk], (STREAMS, h.shape[0], 1)
        return self.backend.run(ENGRAM, inputs, self.constants, grid, self.threads, [(h.shape, mx.bfloat16)])[0]


class Collapse:
    """(h bfloat16 [n, 4, D], pre float32 [n, 4]) -> bfloat16 [n, D]: the last collapse of V4.1 and the final norm.

    normed: False leaves the norm out."""

    streams = STREAMS

    def __init__(self, backend: Backend, norm: mx.array, eps: float, normed: bool = True):
        """norm float32 [D]. Raises Declined."""
        width = norm.shape[0]
        if width % 8:
            raise Declined(f"a width of {width} is not a multiple of 8")
        self.backend, self.norm, self.width, self.threads = backend, norm, width, _row_threads(width)
        self.constants = {"D": width, "NTH": self.threads, "G": 0, "EPS": float_bits(eps), "MIXEPS": 0, "HCEPS": 0}
        self.constants |= {"S": self.streams, "NORM": int(normed)}

    def __call__(self, h: mx.array, pre: mx.array) -> mx.array:
        return self._finish(h, pre, self.norm, self.norm)

    def _finish(self, h: mx.array, pre: mx.array, scale: mx.array, base: mx.array) -> mx.array:
        n = h.shape[0]
        inputs, outputs = [h, pre, self.norm, scale, base], [((n, self.width), mx.bfloat16)]
        return self.backend.run(COLLAPSE, inputs, self.constants, (n, 1, 1), self.threads, outputs)[0]


class HeadMix(Collapse):
    """h bfloat16 [n, 4, D] -> bfloat16 [n, D]: the last collapse of V4, by the streams' own coefficients, and the final norm."""

    def __init__(self, backend: Backend, head_mix: HyperHead, norm: mx.array, eps: float, normed: bool = True):
        """norm float32 [D]. Raises Declined."""
        super().__init__(backend, norm, eps, normed)
        if head_mix.fn.shape != (STREAMS, STREAMS * self.width) or self.width % 32:
            raise Declined(f"coefficients of shape {list(head_mix.fn.shape)} for a width of {self.width}; the kernels have {STREAMS} streams")
        self.mix, slice_width = head_mix, 64 if self.width % 64 == 0 else 32
        self.slices = self.width // slice_width
        self.mix_constants = {"D": self.width, "DS": slice_width}
        self.constants |= {"G": self.slices, "MIXEPS": float_bits(head_mix.norm_eps), "HCEPS": float_bits(head_mix.eps)}

    def __call__(self, h: mx.array) -> mx.array:
        n = h.shape[0]
        outputs = [((n, self.slices, STREAMS + 1), mx.float32)]
        (parts,) = self.backend.run(HEAD_MIX, [h, self.mix.fn], self.mix_constants, (self.slices, n, 1), 32 * (STREAMS + 1), outputs)
        return self._finish(h, parts, self.mix.scale, self.mix.base)


class RowNorm(Collapse):
    """x bfloat16 [n, D] -> the same, normed with a weight; rows of any width that `Collapse` has."""

    streams = 1

    def __init__(self, backend: Backend, norm: mx.array, eps: float):
        super().__init__(backend, norm, eps)
        self.ones = mx.ones((SMALL_ELEMENTS, 1), mx.float32)

    def __call__(self, x: mx.array) -> mx.array:
        """n at most 8."""
        return self._finish(x, self.ones, self.norm, self.norm)


class Guess:
    """(base, add float32 [1, V], id int32 [1], spread float32 [1]): where the first of the largest sums is, and largest minus smallest, -1
    where one is not finite, into the last two. Its backend writes in place, as that of `Scatter`."""

    def __init__(self, backend: Backend, vocabulary: int):
        self.backend, self.groups = backend, max(1, min(128, vocabulary // 1024))
        self.constants = {"V": vocabulary, "G": self.groups, "NTH": 256}

    def into(self, base: mx.array, add: mx.array, found: mx.array, spread: mx.array) -> list[mx.array]:
        """-> (id, spread) as they are then."""
        outputs = [((self.groups, 4), mx.float32), ((self.groups,), mx.int32)]
        part, at = self.backend.run(GUESS_PARTS, [base, add], self.constants, (self.groups, 1, 1), 256, outputs)
        constants = {"G": self.groups, "VOCAB": self.constants["V"]}
        return self.backend.run_into(GUESS, [part, at], constants, (1, 1, 1), 32, [found, spread])


class PoolGroups:
    """(ring float32 [R, 2, halves * width], slots int32 [g, halves * ratio]) -> bfloat16 [g, width], one softmax per channel.

    slots: rows of the ring, -1 for none, in the order of the tokens; with overlap (two halves) first those of the group before, which
    lends its first half of the channels.
    """

    def __init__(self, backend: Backend, ratio: int, width: int, overlap: bool):
        """Raises Declined."""
        halves = 2 if overlap else 1
        if ratio * halves > 256:
            raise Declined(f"groups of {ratio} tokens are more than the kernel holds")
        self.backend, self.width, self.simds = backend, width, min(8, ratio * halves)
        self.constants = Constants({"W": width, "RATIO": ratio, "HALVES": halves, "NSG": self.simds})

    def __call__(self, ring: mx.array, slots: mx.array) -> mx.array:
        groups = slots.shape[0]
        grid, outputs = (-(-self.width // 32), groups, 1), [((groups, self.width), mx.bfloat16)]
        return self.backend.run(POOL_GROUPS, [ring, slots], self.constants, grid, 32 * self.simds, outputs)[0]


class Scatter:
    """Rows into their places in an array that exists. Its backend writes in place: `run_into`, which a recorder has."""

    def __init__(self, backend: Backend):
        self.backend = backend

    def into(self, rows: mx.array, at: mx.array, target: mx.array) -> mx.array:
        """rows [n, ...], at int32 [n]: row i becomes row at[i] of target [R, ...], and none where at[i] < 0. Returns the target.

        Raises Declined for rows that are not whole words of 4 bytes.
        """
        n = rows.shape[0]
        size = rows.size // n * rows.dtype.size
        if size % 4 or rows.size < SMALL_ELEMENTS:
            raise Declined(f"rows of {size} bytes are no whole words")
        words = size // 4
        grid = -(-words // _THREADS), n, 1
        return self.backend.run_into(SCATTER, [rows, at], {"WORDS": words, "NTH": _THREADS}, grid, _THREADS, [target])[0]


class FirstVisible:
    """(length int32 [n, 1], slots) -> (index int32 [n, slots], present bool [n, slots]): all entries of rows that see at most `slots`."""

    def __init__(self, backend: Backend):
        self.backend = backend

    def __call__(self, length: mx.array, slots: int, dims: mx.array | None = None) -> tuple[mx.array, mx.array]:
        n, inputs = length.shape[0], [length, number(slots) if dims is None else dims]
        outputs, grid = [((n, slots), mx.int32), ((n, slots), mx.bool_)], (-(-slots // _THREADS), n, 1)
        index, present = self.backend.run(FIRST_VISIBLE, inputs, {"NTH": _THREADS}, grid, _THREADS, outputs)
        return index, present


class BlockTop:
    """(score float32 [n, T], length int32 [n, 1], dims) -> float32 [n, T / block]: each block's best, +inf for the one of entry length - 1.

    Columns in use, of the score and so of the result, as `dims` says: a multiple of `block`.
    """

    def __init__(self, backend: Backend, block: int):
        lanes = min(32, block & -block)
        self.backend, self.block, self.each = backend, block, _THREADS // lanes
        self.constants = {"BLOCK": block, "LANES": lanes, "NTH": _THREADS}

    def __call__(self, score: mx.array, length: mx.array, dims: mx.array | None = None) -> mx.array:
        n, blocks = score.shape[0], score.shape[1] // self.block
        dims = number(score.shape[1]) if dims is None else dims
        grid, outputs = (-(-blocks // self.each), n, 1), [((n, blocks), mx.float32)]
        return self.backend.run(BLOCK_TOP, [score, length, dims], self.constants, grid, _THREADS, outputs)[0]


class KeepBlocks:
    """(score float32 [n, T], index int32 [n, slots] ascending blocks, present bool [n, slots], absent ones last, dims) -> the score with -inf
    outside these blocks."""

    def __init__(self, backend: Backend, block: int):
        self.backend, self.block = backend, block

    def __call__(self, score: mx.array, index: mx.array, present: mx.array, dims: mx.array | None = None) -> mx.array:
        n, total = score.shape
        dims = number(total) if dims is None else dims
        constants = {"BLOCK": self.block, "SLOTS": index.shape[1], "NTH": _THREADS}
        grid = -(-total // _THREADS), n, 1
        return self.backend.run(KEEP_BLOCKS, [score, index, present, dims], constants, grid, _THREADS, [(score.shape, mx.float32)])[0]


class Scaled:
    """x float32 [n, C] -> x * factor."""

    def __init__(self, backend: Backend, factor: float):
        self.backend, self.factor = backend, float_bits(factor)

    def __call__(self, x: mx.array) -> mx.array:
        n, width = x.shape
        constants = {"C": width, "FACTOR": self.factor, "NTH": _THREADS}
        return self.backend.run(SCALED, [x], constants, (-(-width // _THREADS), n, 1), _THREADS, [(x.shape, mx.float32)])[0]


class Hadamard:
    """x bfloat16 [..., width] -> the same shape: each row through `ops.hadamard`'s matrix in float32, rounded once."""

    def __init__(self, backend: Backend, width: int):
        """Raises Declined for a width that is not a power of two from 8 to 512."""
        if width & (width - 1) or not SMALL_ELEMENTS <= width <= 512:
            raise Declined(f"a width of {width} is no power of two from {SMALL_ELEMENTS} to 512")
        self.backend, self.constants = backend, Constants({"W": width, "FACTOR": float_bits(width**-0.5)})

    def __call__(self, x: mx.array) -> mx.array:
        rows = x.size // x.shape[-1]
        return self.backend.run(HADAMARD, [x], self.constants, (rows, 1, 1), 32, [(x.shape, mx.bfloat16)])[0]
