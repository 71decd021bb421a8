"""Products by trellis-coded matrices on a device, without decoding them in memory."""

from __future__ import annotations

import mlx.core as mx

from dsv41chat.engine.kernels.launch import Backend, number
from dsv41chat.engine.kernels.matrix import compiled_rows
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_exl3 import EXL3_MATVEC, EXL3_ROTATE
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3GroupedLinear, Exl3Linear
from dsv41chat.engine.ops.exl3 import BLOCK, CODEBOOKS

# SIMD groups along the inputs; a constant, because it orders a sum.
_SPLITS = 4


class Exl3Matvec:
    """y = x @ matrix.T for at most 8 rows: x [n, in] bfloat16 or float32 -> [n, out] in its dtype. A row's bits do not depend on n."""

    def __init__(self, backend: Backend, module: Exl3Linear):
        if module.round_input:
            raise Declined("inputs are rounded first (engine.linear_input_fp8)")
        self.backend, self.module = backend, module
        self.inputs, self.outputs = module.suh.shape[0], module.svh.shape[0]
        if self.inputs % BLOCK or self.outputs % BLOCK:
            raise Declined(f"{self.inputs} inputs and {self.outputs} outputs are not multiples of {BLOCK}")
        self.constants = {"K": self.inputs, "N": self.outputs, "K2": module.words.shape[-1] // 4, "BOOK": CODEBOOKS.index(module.codebook)}
        self.constants |= {"KS": _SPLITS, "BIAS": int(module.bias is not None)}

    def __call__(self, x: mx.array) -> mx.array:
        n, m, wide = x.shape[0], self.module, x.dtype == mx.float32
        grid = self.inputs // BLOCK, n, 1
        (turned,) = self.backend.run(EXL3_ROTATE, [x, m.suh], {"K": self.inputs, "XF": int(wide)}, grid, 32, [((n, self.inputs), mx.float32)])
        inputs = [turned, m.words, m.svh, m.svh if m.bias is None else m.bias, number(n)]
        constants = {**self.constants, "M": compiled_rows(n), "OF": int(wide)}
        grid = self.outputs // BLOCK, 1, 1
        return self.backend.run(EXL3_MATVEC, inputs, constants, grid, 128 * _SPLITS, [((n, self.outputs), x.dtype)])[0]


def exl3_product(backend: Backend, module: Exl3Linear | Exl3GroupedLinear | Exl3ExpertLinear):
    """The kernel's product in place of `module`'s, for at most 8 rows; experts are still called one by one. Raises Declined."""
    if isinstance(module, Exl3Linear):
        return Exl3Matvec(backend, module)
    if isinstance(module, Exl3GroupedLinear):
        return Exl3GroupedLinear([Exl3Matvec(backend, part) for part in module.groups])
    few = [Exl3Matvec(backend, matrix) for matrix in module.matrices]
    pick = lambda one, kernel: lambda x: kernel(x) if x.shape[0] <= 8 else one(x)
    return Exl3ExpertLinear([pick(one, kernel) for one, kernel in zip(module.matrices, few)], module.dtype)
