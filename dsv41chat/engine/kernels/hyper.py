"""The step between two sublayers on a device: spread, new coefficients, collapse and norm in two launches."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import float_bits
from dsv41chat.engine.kernels.launch import MOST_ROWS, Backend, Constants, number
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_hyper import HYPER_FINISH, HYPER_SPREAD, TENSOR_SPREAD, finish_of_many
from dsv41chat.engine.nn.hyper_connection import HyperConnection

_STREAMS = 4
# SIMD groups of 16 rows in a group of a prompt's spreading.
_SIMDS = 4


class Mixes:
    """h [n, 4, D] bfloat16 -> pre [n, 4], post [n, 4], comb [n, 4, 4] float32: the coefficients alone. Any number of rows."""

    def __init__(self, backend: Backend, mix: HyperConnection, row: bool = False, stagger: bool = False):
        """row, stagger: `Enter`, which also makes the sublayer's row. Raises Declined for a shape that the kernels do not have."""
        self.backend, self.mix, self.width, self.stagger = backend, mix, mix.fn.shape[1] // _STREAMS, stagger
        if mix.fn.shape[0] != _STREAMS * (2 + _STREAMS) or mix.fn.shape[1] % _STREAMS:
            raise Declined(f"coefficients of shape {list(mix.fn.shape)}; the kernels have {_STREAMS} streams")
        if self.width % 32:
            raise Declined(f"a width of {self.width} is not a multiple of 32")
        # Slices of few rows are short, because they are all that there is to share out; a device with a matrix unit has longer ones of many.
        self.slice = 64 if self.width % 64 == 0 else 32
        self.long = next(n for n in (128, 64, 32) if self.width % n == 0) if backend.dialect == "cuda" else None
        # Enough threads for one run of 8 channels each; the number is the same on all devices because it orders a sum. Many rows have fewer,
        # so that more of them are on the device at once.
        self.threads = 256 if self.width <= 2048 else 512
        self.many_threads = min(960, max(256, -(-self.width // 512) * 32))
        self.constants = Constants({"D": self.width, "STAGGER": int(stagger)})
        finish = {"ITERS": mix.iterations, "ROW": int(row), "EPS": float_bits(mix.norm_eps), "HCEPS": float_bits(mix.eps)}
        self.finish_constants = self.constants.plus(**finish)

    def __call__(self, h: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        unused = self.mix.base
        *_, parts = self._spread([h, h, unused, unused, unused], False)
        return tuple(self._finish(parts, h, h, unused, (8,))[:3])

    def _spread(self, inputs: Sequence[mx.array], expand: bool) -> list[mx.array]:
        """h, y, pre, post, comb -> the spread streams, their collapsed rows, and sums over slices [n, slices, 32]; the first two only where
        something is spread and where rows are collapsed on the way."""
        h, f32, bf16 = inputs[0], mx.float32, mx.bfloat16
        n, many = h.shape[0], self._many(h.shape[0])
        width = self.long if many else self.slice
        outputs = [(h.shape if expand else (8,), bf16), ((n, self.width) if self.stagger else (8,), bf16), ((n, self.width // width, 32), f32)]
        slices = self.width // width
        if not many:
            constants = self.constants.plus(DS=width, EXPAND=int(expand))
            return self.backend.run(HYPER_SPREAD, [*inputs, self.mix.fn], constants, (slices, n, 1), 256, outputs)
        constants = self.constants.plus(DS=width, EXPAND=int(expand), NSG=_SIMDS)
        grid = slices, -(-n // (16 * _SIMDS)), 1
        return self.backend.run(TENSOR_SPREAD, [*inputs, self.mix.fn, number(n)], constants, grid, 32 * _SIMDS, outputs)

    def _many(self, n: int) -> bool:
        return n > MOST_ROWS and self.long is not None

    def _finish(self, parts: mx.array, collapsed: mx.array, h: mx.array, norm: mx.array, shape: tuple[int, ...]) -> list[mx.array]:
        """-> pre, post, comb, and the sublayer's row, of `shape`."""
        n, f32 = h.shape[0], mx.float32
        outputs = [((n, 4), f32), ((n, 4), f32), ((n, 4, 4), f32), (shape, mx.bfloat16)]
        inputs = [parts, self.mix.scale, self.mix.base, collapsed, h, norm]
        kernel, width, threads = HYPER_FINISH, self.slice, self.threads
        if self._many(n):
            kernel, width, threads = finish_of_many(self.many_threads), self.long, self.many_threads
        constants = self.finish_constants.plus(DS=width, NTH=threads)
        return self.backend.run(kernel, inputs, constants, (n, 1, 1), threads + 32, outputs)


class Enter(Mixes):
    """(h [n, 4, D], pre, y [n, D] or None, post, comb) -> (h, x [n, D], pre [n, 4], post [n, 4], comb [n, 4, 4]); h, y, x bfloat16.

    y None: h is already spread. stagger: V4.1, whose streams are collapsed by the pre that comes in. Any number of rows; a row's bits
    do not depend on it among few rows (`launch.MOST_ROWS`), nor among more.
    """

    def __init__(self, backend: Backend, mix: HyperConnection, norm: mx.array, eps: float, stagger: bool):
        """norm float32 [D]. Raises Declined for a shape that the kernels do not have."""
        super().__init__(backend, mix, True, stagger)
        if mix.norm_eps != eps:
            raise Declined(f"the norms use two epsilons, {mix.norm_eps} and {eps}")
        self.norm = norm

    def __call__(
        self, h: mx.array, pre: mx.array | None, y: mx.array | None, post: mx.array | None, comb: mx.array | None
    ) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        expand, unused = y is not None, self.norm
        inputs = [h, y if expand else h, pre if self.stagger else unused, *((post, comb) if expand else (unused, unused))]
        spread, collapsed, parts = self._spread(inputs, expand)
        h = spread if expand else h
        pre, post, comb, x = self._finish(parts, collapsed, h, self.norm, (h.shape[0], self.width))
        return h, x, pre, post, comb
