"""The step between two sublayers on a device: spread, new coefficients, collapse and norm in two launches."""

from __future__ import annotations

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import float_bits
from dsv41chat.engine.kernels.launch import Backend
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_hyper import HYPER_FINISH, HYPER_SPREAD
from dsv41chat.engine.nn.hyper_connection import HyperConnection

_STREAMS = 4


class Mixes:
    """h [n, 4, D] bfloat16 -> pre [n, 4], post [n, 4], comb [n, 4, 4] float32: the coefficients alone. Any number of rows."""

    def __init__(self, backend: Backend, mix: HyperConnection, row: bool = False, stagger: bool = False):
        """row, stagger: `Enter`, which also makes the sublayer's row. Raises Declined for a shape that the kernels do not have."""
        self.backend, self.mix, self.width = backend, mix, mix.fn.shape[1] // _STREAMS
        if mix.fn.shape[0] != _STREAMS * (2 + _STREAMS) or mix.fn.shape[1] % _STREAMS:
            raise Declined(f"coefficients of shape {list(mix.fn.shape)}; the kernels have {_STREAMS} streams")
        if self.width % 32:
            raise Declined(f"a width of {self.width} is not a multiple of 32")
        slice_width = 64 if self.width % 64 == 0 else 32
        self.slices = self.width // slice_width
        # Enough threads for one run of 8 channels each; the number is the same on all devices because it orders a sum.
        self.threads = 256 if self.width <= 2048 else 512
        self.spread_constants = {"D": self.width, "DS": slice_width, "STAGGER": int(stagger)}
        self.finish_constants = {**self.spread_constants, "NTH": self.threads, "ITERS": mix.iterations, "ROW": int(row)}
        self.finish_constants |= {"EPS": float_bits(mix.norm_eps), "HCEPS": float_bits(mix.eps)}

    def __call__(self, h: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        n, f32, unused = h.shape[0], mx.float32, self.mix.base
        shapes = [((8,), mx.bfloat16), ((8,), mx.bfloat16), ((n, self.slices, 32), f32)]
        *_, parts = self.backend.run(
            HYPER_SPREAD, [h, h, unused, unused, unused, self.mix.fn], {**self.spread_constants, "EXPAND": 0}, (self.slices, n, 1), 256, shapes
        )
        outputs = [((n, 4), f32), ((n, 4), f32), ((n, 4, 4), f32), ((8,), mx.bfloat16)]
        inputs = [parts, self.mix.scale, self.mix.base, h, h, unused]
        pre, post, comb, _ = self.backend.run(HYPER_FINISH, inputs, self.finish_constants, (n, 1, 1), self.threads + 32, outputs)
        return pre, post, comb


class Enter(Mixes):
    """(h [n, 4, D], pre, y [n, D] or None, post, comb) -> (h, x [n, D], pre [n, 4], post [n, 4], comb [n, 4, 4]); h, y, x bfloat16.

    y None: h is already spread. stagger: V4.1, whose streams are collapsed by the pre that comes in. Any number of rows; a row's bits
    do not depend on it.
    """

    def __init__(self, backend: Backend, mix: HyperConnection, norm: mx.array, eps: float, stagger: bool):
        """norm float32 [D]. Raises Declined for a shape that the kernels do not have."""
        super().__init__(backend, mix, True, stagger)
        if mix.norm_eps != eps:
            raise Declined(f"the norms use two epsilons, {mix.norm_eps} and {eps}")
        self.norm, self.stagger = norm, stagger

    def __call__(
        self, h: mx.array, pre: mx.array | None, y: mx.array | None, post: mx.array | None, comb: mx.array | None
    ) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        n, expand, bf16, f32 = h.shape[0], y is not None, mx.bfloat16, mx.float32
        unused = self.norm
        inputs = [h, y if expand else h, pre if self.stagger else unused, *((post, comb) if expand else (unused, unused)), self.mix.fn]
        shapes = [(h.shape if expand else (8,), bf16), ((n, self.width) if self.stagger else (8,), bf16), ((n, self.slices, 32), f32)]
        spread, collapsed, parts = self.backend.run(
            HYPER_SPREAD, inputs, {**self.spread_constants, "EXPAND": int(expand)}, (self.slices, n, 1), 256, shapes
        )
        h = spread if expand else h
        outputs = [((n, 4), f32), ((n, 4), f32), ((n, 4, 4), f32), ((n, self.width), bf16)]
        inputs = [parts, self.mix.scale, self.mix.base, collapsed, h, self.norm]
        pre, post, comb, x = self.backend.run(HYPER_FINISH, inputs, self.finish_constants, (n, 1, 1), self.threads + 32, outputs)
        return h, x, pre, post, comb
