"""What happens to a row after its projection, on a device: norm, rotation and the model's rounding in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import float_bits
from dsv41chat.engine.kernels.launch import Backend, Constants
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_finish import FINISH_ROWS, FINISH_TWO, FP4, FP4_E4M3, FP8, NONE


@dataclass(frozen=True)
class Rounding:
    """kind: of `text_finish`; block: channels of one scale; floor: the smallest block maximum; divides: by the code's limit, else
    multiplied by its inverse; spares: channels at the end that stay as they are."""

    kind: int
    block: int
    floor: float
    divides: bool
    spares: int = 0


# Like `ops.fakequant`, where each is described.
NO_ROUNDING = Rounding(NONE, 32, 0.0, False)
FP8_UE8M0 = Rounding(FP8, 32, 1e-4, False)
FP4_UE8M0 = Rounding(FP4, 32, 6 * 2.0**-126, False)
FP4_SCALED = Rounding(FP4_E4M3, 16, 6 * 2.0**-9, True)
V4_FP4 = Rounding(FP4, 32, 6 * 2.0**-126, True)


def v4_fp8(rope_dims: int) -> Rounding:
    return Rounding(FP8, 64, 1e-4, True, rope_dims)


class Finish:
    """x [n, ..., C] bfloat16 -> the same shape. Any number of rows; a row's bits do not depend on it."""

    def __init__(
        self, backend: Backend, channels: int, *, weight: mx.array | None = None, eps: float | None = None, rope: int = 0,
        rounding: Rounding = NO_ROUNDING,
    ):  # fmt: skip
        """weight float32 [C]: of the norm; eps None: no norm. rope: channels at the end to rotate. Raises Declined."""
        vector = 8 if channels % 256 == 0 else 4 if channels % 128 == 0 else 2
        lanes = rounding.block // vector
        if channels % 2 or rope % 2 or channels > 4096:
            raise Declined(f"rows of {channels} channels, {rope} of them rotated")
        if rounding.kind and (lanes & (lanes - 1) or not 1 <= lanes <= 32 or (channels - rounding.spares) % rounding.block):
            raise Declined(f"rounding in blocks of {rounding.block} does not fit rows of {channels} channels")
        self.backend, self.rope, self.channels = backend, rope, channels
        self.unused = mx.zeros((8,), mx.float32)
        self.weight = self.unused if weight is None else weight
        constants = {"C": channels, "NORM": 0 if eps is None else 2 if weight is None else 1, "EPS": float_bits(eps or 0.0), "RD": rope}
        constants |= {"QK": rounding.kind, "QB": rounding.block, "QN": channels - rounding.spares, "DIVIDE": int(rounding.divides)}
        self.constants = Constants({**constants, "FLOOR": float_bits(rounding.floor), "XS": channels, "X0": 0})


    def __call__(self, x: mx.array, table: tuple[mx.array, mx.array] | None = None) -> mx.array:
        """table: (cos, sin) float32 [n, rope / 2], for a finish that rotates."""
        rows = x.size // self.channels
        cos, sin = (self.unused, self.unused) if table is None else table
        inputs = [x, self.weight, cos, sin]
        constants = self.constants.plus(HEADS=rows // x.shape[0])
        return self.backend.run(FINISH_ROWS, inputs, constants, (rows, 1, 1), 32, [(x.shape, mx.bfloat16)])[0]

    def beside(self, after: Finish) -> FinishTwo:
        """Both, of rows that hold the channels of one behind those of the other. Raises Declined."""
        return FinishTwo(self, after)


class FinishTwo:
    """x [n, C + C2] bfloat16 -> the finish of the first C channels [n, C], and of the others [n, C2]. One of them may rotate."""

    def __init__(self, first: Finish, second: Finish):
        """Raises Declined."""
        self.parts, widths = (first, second), (first.channels, second.channels)
        if any(w % 8 for w in widths) or (first.rope and second.rope):
            raise Declined(f"rows of {widths[0]} and {widths[1]} channels, {first.rope} and {second.rope} of them rotated")
        common = {"XS": sum(widths), "HEADS": 1}
        more = {f"{name}2": value for name, value in {**second.constants, **common, "X0": widths[0]}.items()}
        self.constants = Constants({**first.constants, **common, "X0": 0, **more})

    def __call__(self, x: mx.array, table: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
        """table: (cos, sin) float32 [n, rope / 2] of the part that rotates."""
        (a, b), n = self.parts, x.shape[0]
        outputs = [((n, p.channels), mx.bfloat16) for p in self.parts]
        first, second = a.backend.run(FINISH_TWO, [x, a.weight, b.weight, *table], self.constants, (n, 2, 1), 32, outputs)
        return first, second
