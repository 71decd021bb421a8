"""The experts of a decode call on the matrix unit of a CUDA device."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import float_bits
from dsv41chat.engine.kernels.launch import MOST_ROWS, Backend, number
from dsv41chat.engine.kernels.matrix import stored
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_experts import STAGE_BYTES, TENSOR_EXPERTS_DOWN, TENSOR_EXPERTS_UP

# Static shared memory of a group, which every launch can have.
_SHARED = 48 << 10


class TensorExperts:
    """`matrix.Experts` for 4-bit affine matrices in groups of 64 with bfloat16 scales: x [n, D] bfloat16, ids int32 and weight float32
    [n, picks] -> [n, D], for at most MOST_ROWS rows.

    Products and activation in float32; the activation, with the routing weight in it, is rounded once, before the down product. Outputs
    are summed in float32 by slot, the shared expert last. An expert that several rows picked is read once; a row's bits do not depend on
    the others.
    """

    def __init__(self, backend: Backend, up: tuple[Any, Any], down: Any, shared_up: tuple[Any, Any], shared_down: Any, limit: float):
        """As of `matrix.Experts`. Raises Declined."""
        self.backend = backend
        gate, lift = (stored(m) for m in up)
        shared_gate, shared_lift = (stored(m) for m in shared_up)
        self.down, self.shared_down = stored(down), stored(shared_down)
        every = gate, lift, shared_gate, shared_lift, self.down, self.shared_down
        if any((m.form.mode, m.form.bits, m.form.group, m.form.scales) != (0, 4, 64, 0) for m in every):
            raise Declined("the matrix unit takes experts that are 4-bit affine in groups of 64")
        self.width, self.inner, self.outputs = gate.inputs, gate.outputs, self.down.outputs
        if self.width % 256 or self.inner % 256 or self.inner < 512:
            raise Declined(f"experts of {self.width} x {self.inner} are no multiples of 256, or fewer than 512")
        if len({(m.inputs, m.outputs) for m in every[:4]} | {(m.outputs, m.inputs) for m in every[4:]}) > 1:
            raise Declined("the shared expert has another shape than the routed ones")
        self.up_arrays = [m for part in every[:4] for m in part.arrays]
        self.up_constants = {"K": self.width, "I": self.inner, "LIMIT": float_bits(max(limit, 0.0)), "NSG": 4}
        blocks = next(n for n in (4, 3, 2, 1) if self.width // 256 % n == 0)
        self.up_constants |= {"SB": blocks, "ST": blocks + 1}
        self.down_constants = {"I": self.inner, "N": self.outputs}

    def __call__(self, x: mx.array, ids: mx.array, weight: mx.array) -> mx.array:
        n, picks = ids.shape
        rows, slots = number(n), picks + 1
        constants = {**self.up_constants, "S": slots}
        grid = self.inner // (8 * constants["NSG"]), n * picks + 1, 1
        inputs, outputs = [x, ids, weight, *self.up_arrays, rows], [((n, slots, self.inner), mx.bfloat16)]
        (act,) = self.backend.run(TENSOR_EXPERTS_UP, inputs, constants, grid, 32 * constants["NSG"], outputs)
        constants = {**self.down_constants, "S": slots, **rings(n, slots, self.inner)}
        inputs, outputs = [act, ids, *self.down.arrays, *self.shared_down.arrays, rows], [((n, self.outputs), mx.bfloat16)]
        (y,) = self.backend.run(TENSOR_EXPERTS_DOWN, inputs, constants, (self.outputs // 16, 1, 1), 32 * constants["NSG"], outputs)
        return y


def rings(rows: int, slots: int, inner: int) -> dict[str, int]:
    """SIMD groups of the down product, a ring each, and the stages of one, by what shared memory holds next to the slots' sums and the
    list of experts. They are in no row's sums."""
    most = 1 if rows == 1 else MOST_ROWS
    left = (_SHARED - most * (64 * slots + 14 * (slots - 1)) - 64) // STAGE_BYTES
    simds = min(slots - (most > 1), left // 3)
    return {"R": most, "NSG": simds, "ST": min(left // simds, 4, inner // 256)}
