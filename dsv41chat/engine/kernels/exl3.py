"""Products by trellis-coded matrices on a device, without decoding them in memory."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import SMALL_ELEMENTS
from dsv41chat.engine.kernels.launch import Backend, number
from dsv41chat.engine.kernels.matrix import compiled_rows
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_exl3 import EXL3_MATVEC, EXL3_ROTATE
from dsv41chat.engine.kernels.text_exl3_join import EXL3_JOIN
from dsv41chat.engine.kernels.text_exl3_tensor import BLOCK_WORDS, EXL3_SPLIT, EXL3_TENSOR, STAGE_BYTES
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3GroupedLinear, Exl3Linear, Exl3Stack
from dsv41chat.engine.ops.exl3 import BLOCK, CODEBOOKS

# SIMD groups along the inputs; a constant, because it orders a sum.
_SPLITS = 4
# Processors of a large device, among which groups are dealt out; and what a group costs besides its runs of 128 inputs, in such runs.
PROCESSORS, _START = 132, 1
# Shared memory that a group may have, and the stages that a ring may have.
_SHARED_BYTES, _STAGES = 48 << 10, (8, 4)


def stack_constants(module: Exl3Linear | Exl3Stack) -> dict[str, int]:
    """Width and codebook as constants of the texts. Raises Declined for what they do not compute."""
    if module.round_input:
        raise Declined("inputs are rounded first (engine.linear_input_fp8)")
    inputs, outputs = module.suh.shape[-1], module.svh.shape[-1]
    if inputs % BLOCK or outputs % BLOCK:
        raise Declined(f"{inputs} inputs and {outputs} outputs are not multiples of {BLOCK}")
    return {"K2": module.words.shape[-1] // 4, "BOOK": CODEBOOKS.index(module.codebook)}


def parts_of(runs: int, wide: int, processors: int = PROCESSORS) -> int:
    """Into how many parts `runs` runs of 128 inputs are cut, so that `wide` groups for each are dealt out evenly."""
    up = lambda a, b: -(-a // b)
    # Parts of equal size but for the last, and none empty.
    sizes = sorted({up(runs, parts) for parts in range(1, runs + 1)}, reverse=True)
    return min((up(runs, size) for size in sizes), key=lambda parts: up(wide * parts, processors) * (up(runs, parts) + _START))


def rings(simds: int, halves: int, taken: int = 0) -> int:
    """Stages of the rings of `simds` SIMD groups for matrices of halves / 2 bits per value, beside `taken` bytes; 0 when they are too few."""
    return next((stages for stages in _STAGES if simds * stages * STAGE_BYTES * halves + taken <= _SHARED_BYTES), 0)


class Exl3Matvec:
    """y = x @ matrix.T for at most 8 rows: x [n, G * in] bfloat16 or float32 -> [n, G * out] in `dtype`, by default x's. A row's bits do not
    depend on n.

    Of one matrix, or of a stack of G that make a block-diagonal one.
    """

    def __init__(self, backend: Backend, module: Exl3Linear | Exl3Stack, dtype: mx.Dtype | None = None):
        self.backend, self.dtype = backend, dtype
        self.inputs, self.outputs = module.suh.shape[-1], module.svh.shape[-1]
        self.groups = len(module) if isinstance(module, Exl3Stack) else 1
        self.constants = {"K": self.inputs, "N": self.outputs, "G": self.groups, **stack_constants(module), "BIAS": int(module.bias is not None)}
        self.suh, self.arrays = module.suh, [module.words, module.svh, module.svh if module.bias is None else module.bias]

    def __call__(self, x: mx.array) -> mx.array:
        n, wide, width, dtype = x.shape[0], x.dtype == mx.float32, self.groups * self.inputs, self.dtype or x.dtype
        grid = width // BLOCK, n, 1
        (turned,) = self.backend.run(EXL3_ROTATE, [x, self.suh], {"K": width, "XF": int(wide)}, grid, 32, [((n, width), mx.float32)])
        constants = {**self.constants, "KS": _SPLITS, "M": compiled_rows(n), "OF": int(dtype == mx.float32)}
        grid, outputs = (self.outputs // BLOCK, 1, self.groups), [((n, self.groups * self.outputs), dtype)]
        return self.backend.run(EXL3_MATVEC, [turned, *self.arrays, number(n)], constants, grid, 128 * _SPLITS, outputs)[0]


class Exl3TensorMatvec(Exl3Matvec):
    """The same on CUDA's matrix unit. Inputs of a matrix with few outputs are cut into parts, whose sums another launch joins.

    second: a matrix on the same row, whose outputs come after those of the first; only `sums` are to be had then.
    """

    def __init__(
        self, backend: Backend, module: Exl3Linear | Exl3Stack, dtype: mx.Dtype | None = None, processors: int = PROCESSORS,
        second: Exl3Linear | None = None,
    ):  # fmt: skip
        super().__init__(backend, module, dtype)
        self.second = module if second is None else second
        if second is not None and (second.suh.shape != module.suh.shape or stack_constants(second) != stack_constants(module)):
            raise Declined("two matrices on one row have different inputs, widths or codebooks")
        more = 0 if second is None else second.svh.shape[-1]
        self.constants |= {"N2": more}
        self.total, self.products = self.groups * self.outputs + more, 1 if second is None else 2
        runs, wide = self.inputs // BLOCK, self.total // BLOCK
        # All fixed by the shape, because they order a sum.
        self.parts = parts_of(runs, wide, processors)
        self.per = -(-runs // self.parts)
        # Two groups of half the size for a processor where there are so many.
        most = min(self.per, 4 if wide * self.parts <= processors else 2)
        self.splits = next(n for n in (4, 3, 2, 1) if n <= most and rings(4 * n, self.constants["K2"]))

    def _stages(self, rows: int) -> int:
        """Stages of a ring for that many rows. 0 where they do not fit."""
        stages = rings(4 * self.splits, self.constants["K2"])
        # Sums of the rows take their place.
        return stages if stages * self.constants["K2"] >= 2 * rows else 0

    def __call__(self, x: mx.array) -> mx.array:
        dtype = self.dtype or x.dtype
        return self.outputs_of(self.turned(x), x.shape[0], dtype)

    def turned(self, x: mx.array) -> mx.array:
        """x -> uint32: its rows as the products take them, one for each matrix on a row.

        Turning inputs in each group that uses them would save this launch, and costs more: groups would begin to wait when others end."""
        (n, width), p, scales = x.shape, self.products, (self.suh, self.second.suh)
        constants, grid = {"K": width, "XF": int(x.dtype == mx.float32), "P": p, "P2": 0, "P3": 0}, (width // BLOCK, n, p)
        # What a recorded step may turn besides (`fewer`) is not there.
        outputs = [((n, p * width // BLOCK * BLOCK_WORDS), mx.uint32), *[((SMALL_ELEMENTS,), mx.uint32)] * 2]
        return self.backend.run(EXL3_SPLIT, [x, *scales * 3], constants, grid, 32, outputs)[0]

    def outputs_of(self, xh: mx.array, n: int, dtype: mx.Dtype) -> mx.array:
        """The result for `turned` rows."""
        if self.parts == 1:
            return self._product(xh, n, int(dtype == mx.float32), ((n, self.total), dtype))
        constants = {"W": self.total, "KZ": self.parts, "BIAS": self.constants["BIAS"], "OF": int(dtype == mx.float32)}
        inputs, outputs = [self.sums(xh, n), *self.arrays[1:], number(n)], [((n, self.total), dtype)]
        return self.backend.run(EXL3_JOIN, inputs, constants, (self.total // BLOCK, n, 1), 32, outputs)[0]

    def sums(self, xh: mx.array, n: int) -> mx.array:
        """`turned` rows -> float32 [parts, n, outputs], not joined and not turned back."""
        return self._product(xh, n, 2, ((self.parts, n, self.total), mx.float32))

    def _product(self, xh: mx.array, n: int, form: int, output: tuple[tuple[int, ...], mx.Dtype]) -> mx.array:
        most = 4 if n <= 4 else 8
        constants = {**self.constants, "KS": self.splits, "KZ": self.parts, "PER": self.per, "OF": form, "R": most, "ST": self._stages(most)}
        words, *rest = self.arrays
        inputs, grid = [xh, words, self.second.words, *rest, number(n)], (self.total // self.groups // BLOCK, self.parts, self.groups)
        return self.backend.run(EXL3_TENSOR, inputs, constants, grid, 128 * self.splits, [output])[0]


class _Products(Sequence):
    """The products of a stack's matrices, each made when it is asked for."""

    def __init__(self, matrices: Sequence[Exl3Linear], make):
        self.matrices, self.make = matrices, make
        make(matrices[0])

    def __len__(self) -> int:
        return len(self.matrices)

    def __getitem__(self, index: int):
        one = self.matrices[index]
        few = self.make(one)
        return lambda x: few(x) if x.shape[0] <= 8 else one(x)


def exl3_product(backend: Backend, module: Exl3Linear | Exl3GroupedLinear | Exl3ExpertLinear, dtype: mx.Dtype | None = None):
    """The kernel's product in place of `module`'s, for at most 8 rows; experts are called one by one. dtype: of one matrix's results. Raises
    Declined."""
    kind = Exl3TensorMatvec if backend.dialect == "cuda" else Exl3Matvec
    make = lambda part: kind(backend, part)
    if isinstance(module, Exl3Linear):
        return kind(backend, module, dtype)
    if isinstance(module, Exl3GroupedLinear):
        return make(module.groups) if isinstance(module.groups, Exl3Stack) else Exl3GroupedLinear([make(part) for part in module.groups])
    if isinstance(module.matrices, Exl3Stack):
        return Exl3ExpertLinear(_Products(module.matrices, make), module.dtype)
    few = [make(matrix) for matrix in module.matrices]
    pick = lambda one, kernel: lambda x: kernel(x) if x.shape[0] <= 8 else one(x)
    return Exl3ExpertLinear([pick(one, kernel) for one, kernel in zip(module.matrices, few)], module.dtype)
