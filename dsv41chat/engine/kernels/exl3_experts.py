"""The trellis-coded experts of a layer for few rows: which expert a slot has is read on the device."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dsv41chat.engine.kernels import text_exl3_experts as texts
from dsv41chat.engine.kernels.dialect import float_bits
from dsv41chat.engine.kernels.exl3 import PROCESSORS, parts_of, rings, stack_constants
from dsv41chat.engine.kernels.launch import Backend
from dsv41chat.engine.kernels.matrix import stored
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_exl3_tensor import BLOCK_WORDS
from dsv41chat.engine.kernels.text_matrix import EXPERTS_DOWN, EXPERTS_UP
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3Linear, Exl3Stack
from dsv41chat.engine.ops.exl3 import BLOCK

# SIMD groups along the inputs; of gate and up each has four for its columns. Constants, because they order a sum. The matrix unit has at most
# so many, as its rings let it.
_UP_SPLITS, _DOWN_SPLITS = 2, 1
_TENSOR_UP_SPLITS, _TENSOR_DOWN_SPLITS = 3, 4


class Exl3Experts:
    """Routed experts and the shared one: x [n, D] bfloat16, ids int32 and weight float32 [n, picks] -> [n, D], for at most MOST_ROWS rows.

    All in float32 but the rotated rows on the matrix unit, which have 22 bits. Outputs are summed by slot, the shared expert last. A
    shared expert in one of MLX's layouts is computed beside them and comes in rounded, as the stock operation has it.
    """

    def __init__(
        self, backend: Backend, up: tuple[Any, Any], down: Any, shared_up: tuple[Any, Any], shared_down: Any, limit: float,
        processors: int = PROCESSORS,
    ):  # fmt: skip
        """up: gate and up of all experts (w1, w3); limit: of the activation, 0 without one. Raises Declined."""
        self.backend, self.tensor, self.processors = backend, backend.dialect == "cuda", processors
        gate, lift, lower = (_stack(m) for m in (*up, down))
        self.width, self.inner, self.outputs = gate.suh.shape[-1], gate.svh.shape[-1], lower.svh.shape[-1]
        shared, self.beside = (*shared_up, shared_down), None
        if all(isinstance(m, Exl3Linear) for m in shared):
            own = shared
        elif any(isinstance(m, Exl3Linear) for m in shared):
            raise Declined("the matrices of the shared expert are stored in different forms")
        else:
            # Nothing reads what stands in its place.
            own, self.beside = (gate, lift, lower), SharedExpert(backend, shared_up, shared_down, limit)
        forms = [_constants(m) for m in (gate, lift, lower, *own)]
        if forms[0] != forms[1] or forms[3] != forms[4]:
            raise Declined("gate and up of an expert have different widths or codebooks")
        shapes = [(m.suh.shape[-1], m.svh.shape[-1]) for m in (gate, lift, lower, *own)]
        if shapes[:3] != shapes[3:]:
            raise Declined("the shared expert has another shape than the routed ones")
        named = lambda form: {f"{key}S": value for key, value in form.items()}
        shape = {"K": self.width, "I": self.inner, "SHARED": int(self.beside is None)}
        self.turn_constants = {"K": self.width, "SHARED": shape["SHARED"]}
        self.up_constants = shape | {"LIMIT": float_bits(max(limit, 0.0)), **forms[0], **named(forms[3])}
        self.down_constants = {"I": self.inner, "N": self.outputs, "SHARED": shape["SHARED"], **forms[2], **named(forms[5])}
        a, b, c = own
        self.turn_arrays = [gate.suh, lift.suh, a.suh, b.suh]
        self.up_arrays = [gate.words, gate.svh, lift.words, lift.svh, lower.suh, a.words, a.svh, b.words, b.svh, c.suh]
        self.down_arrays = [lower.words, lower.svh, c.words, c.svh]

    def __call__(self, x: mx.array, ids: mx.array, weight: mx.array) -> mx.array:
        n, slots, run = x.shape[0], ids.shape[1] + self.up_constants["SHARED"], self.backend.run
        turn, up, down = texts.EXL3_TURN, texts.EXL3_UP, texts.EXL3_DOWN
        if self.tensor:
            turn, up, down = texts.EXL3_TENSOR_TURN, texts.EXL3_TENSOR_UP, texts.EXL3_TENSOR_DOWN
        size = {"S": slots}
        grid, turned = (self.width // BLOCK, n * slots, 2), self._turned(n * slots * 2, self.width)
        (xh,) = run(turn, [x, ids, *self.turn_arrays], self.turn_constants | size, grid, 32, [turned])
        splits = self._splits(2, 0)
        grid, turned = (self.inner // BLOCK, n * slots, 1), self._turned(n * slots, self.inner)
        (act,) = run(up, [xh, ids, weight, *self.up_arrays], self.up_constants | size | splits, grid, 256 * splits["KS"], [turned])
        runs, wide = self.inner // BLOCK, self.outputs // BLOCK
        # As for one row, whose bits are those of rows among others.
        cut, splits = parts_of(runs, wide if self.tensor else wide * slots, self.processors), self._splits(1, slots)
        constants = self.down_constants | size | splits | {"KZ": cut, "PER": -(-runs // cut)}
        # On the matrix unit a group sums all slots of a row.
        rows = n if self.tensor else n * slots
        outputs = [((rows * cut, self.outputs), mx.float32)]
        (parts,) = run(down, [act, ids, *self.down_arrays], constants, (wide, rows, cut), 128 * splits["KS"], outputs)
        addend = parts if self.beside is None else self.beside(x, ids, weight)
        constants, grid = {"N": self.outputs, "ADD": int(self.beside is not None), "S": rows * cut // n}, (self.outputs // BLOCK, n, 1)
        return run(texts.EXL3_SUM, [parts, addend], constants, grid, 32, [((n, self.outputs), mx.bfloat16)])[0]

    def _splits(self, kinds: int, slots: int) -> dict[str, int]:
        """How many SIMD groups share a sum, and on the matrix unit the stages of their rings. kinds: matrices of a group, 2 for gate and up;
        slots: whose sums it keeps beside the rings."""
        if not self.tensor:
            return {"KS": _UP_SPLITS if kinds == 2 else _DOWN_SPLITS}
        form = self.up_constants if kinds == 2 else self.down_constants
        halves = max(form["K2"], form["K2S"])
        for splits in range(_TENSOR_UP_SPLITS if kinds == 2 else _TENSOR_DOWN_SPLITS, 0, -1):
            if stages := rings(4 * kinds * splits, halves, 4 * splits * slots * BLOCK):
                return {"KS": splits, "ST": stages}
        raise ValueError(f"rings of {halves / 2:g} bits do not fit beside the sums of {slots} slots")

    def _turned(self, rows: int, width: int) -> tuple[tuple[int, int], mx.Dtype]:
        """Shape and dtype of rotated rows."""
        return ((rows, width // BLOCK * BLOCK_WORDS), mx.uint32) if self.tensor else ((rows, width), mx.float32)


class SharedExpert:
    """A shared expert in one of MLX's layouts by itself: x [n, D] bfloat16 -> [n, D]. ids and weight, of the routed ones, are not read."""

    def __init__(self, backend: Backend, up: tuple[Any, Any], down: Any, limit: float):
        """Raises Declined."""
        self.backend = backend
        (gate, lift), self.down = (stored(m) for m in up), stored(down)
        if gate.form != lift.form:
            raise Declined("gate and up of the shared expert are stored in different forms")
        if self.down.outputs % 2:
            raise Declined(f"{self.down.outputs} outputs are odd")
        self.inner, self.arrays = gate.outputs, [*gate.arrays, *lift.arrays]
        self.up_simds, self.down_simds = (next(n for n in (4, 2, 1) if rows % n == 0) for rows in (self.inner, self.down.outputs // 2))
        forms = lambda form: {**form.constants(), **form.constants("2"), "SHARED": 1, "S": 1}
        self.up_constants = {"K": gate.inputs, "I": self.inner, "NSG": self.up_simds, "LIMIT": float_bits(max(limit, 0.0)), **forms(gate.form)}
        self.down_constants = {"I": self.inner, "N": self.down.outputs, "NSG": self.down_simds, **forms(self.down.form)}

    def __call__(self, x: mx.array, ids: mx.array, weight: mx.array) -> mx.array:
        n, down = x.shape[0], self.down
        inputs, grid = [x, ids, weight, *self.arrays, *self.arrays], (self.inner // self.up_simds, n, 1)
        (act,) = self.backend.run(EXPERTS_UP, inputs, self.up_constants, grid, 32 * self.up_simds, [((n, 1, self.inner), mx.bfloat16)])
        inputs, grid = [act, ids, *down.arrays, *down.arrays], (down.outputs // 2 // self.down_simds, n, 1)
        return self.backend.run(EXPERTS_DOWN, inputs, self.down_constants, grid, 32 * self.down_simds, [((n, down.outputs), mx.bfloat16)])[0]


def _stack(module: Any) -> Exl3Stack:
    if not isinstance(module, Exl3ExpertLinear):
        raise Declined(f"{type(module).__name__} beside trellis-coded experts")
    if not isinstance(module.matrices, Exl3Stack):
        raise Declined("the experts of a layer have different widths or codebooks")
    return module.matrices


def _constants(module: Exl3Linear | Exl3Stack) -> dict[str, int]:
    if module.bias is not None:
        raise Declined("an expert has a bias")
    return stack_constants(module)
