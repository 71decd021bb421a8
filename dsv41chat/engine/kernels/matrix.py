"""Products by stored matrices on a device: one matrix for up to eight rows, and the experts of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import float_bits
from dsv41chat.engine.kernels.launch import MOST_ROWS, Backend, number
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.text_matrix import EXPERTS_DOWN, EXPERTS_UP, MATVEC
from dsv41chat.engine.nn.linear import Packed

_MODES = {"affine": 0, "mxfp4": 1, "mxfp8": 2}
_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_SCALES = {mx.bfloat16: 0, mx.float32: 1, mx.float16: 2}
_PLAIN = {mx.bfloat16: (3, 16), mx.float32: (4, 32)}
# By id of a weight: the weight and its bfloat16 copy, for as long as somebody uses them.
_narrow: dict[int, tuple[ref, ref]] = {}


@dataclass(frozen=True)
class Form:
    """How a matrix is stored, as constants of the texts (`text_matrix` explains them)."""

    mode: int
    bits: int
    group: int
    scales: int

    def constants(self, suffix: str = "") -> dict[str, int]:
        return {f"MODE{suffix}": self.mode, f"BITS{suffix}": self.bits, f"GS{suffix}": self.group, f"SF{suffix}": self.scales}


@dataclass(frozen=True)
class Stored:
    """A matrix [..., out, in] for a kernel: its form, and weight, scales and biases; forms without one of these repeat the weight."""

    form: Form
    arrays: tuple[mx.array, mx.array, mx.array]
    outputs: int
    inputs: int


def stored(module: Any) -> Stored:
    """A matrix module of `nn.linear`, packed or plain. Raises Declined for a form that the texts do not read."""
    if getattr(module, "round_input", False):
        raise Declined("inputs are rounded first (engine.linear_input_fp8)")
    packed = getattr(module, "packed", None)
    if isinstance(packed, Packed):
        found = _packed(packed)
    else:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, mx.array) or weight.dtype not in _PLAIN:
            raise Declined(f"{type(module).__name__} is neither in MLX's packed layouts nor plain bfloat16 or float32")
        mode, bits = _PLAIN[weight.dtype]
        found = Stored(Form(mode, bits, 32, 0), (weight, weight, weight), weight.shape[-2], weight.shape[-1])
    if found.inputs % 32:
        raise Declined(f"{found.inputs} inputs are not a multiple of 32")
    return found


def narrowed(module: Any) -> Any:
    """A plain matrix with bfloat16 values if that is what its float32 values are: half the bytes to read, one copy for all who ask."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, mx.array) or weight.dtype != mx.float32:
        return module
    key = id(weight)
    known = _narrow.get(key)
    narrow = known[1]() if known is not None and known[0]() is weight else None
    if narrow is None:
        narrow = weight.astype(mx.bfloat16)
        if not bool(mx.all(narrow.astype(mx.float32) == weight)):
            return module
        _narrow[key] = ref(weight, lambda _: _narrow.pop(key, None)), ref(narrow)
    return type(module)(narrow)


def _packed(p: Packed) -> Stored:
    if p.mode not in _MODES or (p.mode == "affine" and p.bits not in _AFFINE_BITS):
        raise Declined(f"the kernels do not read {p.mode} {p.bits} bits")
    if p.group % 32:
        raise Declined(f"groups of {p.group} are not a multiple of 32")
    scales = 0
    if p.mode == "affine":
        if p.scales.dtype not in _SCALES:
            raise Declined(f"scales of {p.scales.dtype}")
        scales = _SCALES[p.scales.dtype]
    form = Form(_MODES[p.mode], p.bits, p.group, scales)
    biases = p.scales if p.biases is None else p.biases
    return Stored(form, (p.weight, p.scales, biases), p.weight.shape[-2], p.scales.shape[-1] * p.group)


def compiled_rows(n: int) -> int:
    """The size that a text is compiled for to serve n rows: few sizes, because the first use of each compiles it."""
    return next(size for size in (1, 2, 4, MOST_ROWS) if n <= size)


def _largest(count: int, *choices: int) -> int:
    """The first of the choices that divides `count`; the last one is 1."""
    return next(c for c in choices if count % c == 0)


class Matvec:
    """y = x @ matrix.T for at most MOST_ROWS rows: x [n, groups * in] bfloat16 or float32 -> [n, out] in `dtype`, or in x's.

    A grouped matrix [groups, rank, in] is block-diagonal. A row's bits do not depend on n.
    """

    def __init__(self, backend: Backend, module: Any, dtype: mx.Dtype | None = None):
        self.backend, self.dtype, self.matrix = backend, dtype, stored(module)
        weight, form = self.matrix.arrays[0], self.matrix.form
        self.groups = weight.shape[0] if weight.ndim == 3 else 1
        self.outputs = self.matrix.outputs * self.groups
        rows = _largest(self.matrix.outputs, *((4, 2, 1) if form.bits <= 4 else (2, 1) if form.bits <= 16 else (1,)))
        self.simds = _largest(self.outputs // rows, 4, 2, 1)
        self.constants = {"K": self.matrix.inputs, "N": self.outputs, **form.constants(), "R": rows, "NSG": self.simds}
        self.constants |= {"XS": self.matrix.inputs * self.groups, "RG": self.matrix.outputs if self.groups > 1 else 0, "N2": 0, "AR": 0}

    def __call__(self, x: mx.array) -> mx.array:
        dtype, n = self.dtype or x.dtype, x.shape[0]
        constants = {**self.constants, "M": compiled_rows(n), "XF": int(x.dtype == mx.float32), "OF": int(dtype == mx.float32)}
        grid = self.outputs // (self.constants["R"] * self.simds), 1, 1
        weights, rows = self.matrix.arrays, number(n)
        (y,) = self.backend.run(MATVEC, [x, *weights, rows, *weights, rows, rows], constants, grid, 32 * self.simds, [((n, self.outputs), dtype)])
        return y


class PairMatvec:
    """Two matrices of one form on the same rows in one launch: x [n, in] -> [n, first + second] in `dtype`, for at most MOST_ROWS rows.

    table float32 [r, second]: row positions[m] % r of it is added to the second outputs of row m. split: the result is [n, 2, first].
    """

    def __init__(self, backend: Backend, first: Any, second: Any, dtype: mx.Dtype, table: mx.array | None = None, split: bool = False):
        """Raises Declined."""
        a, b = stored(first), stored(second)
        if a.form != b.form or a.inputs != b.inputs or a.arrays[0].ndim != 2 or b.arrays[0].ndim != 2:
            raise Declined("the two matrices are stored in different forms")
        self.backend, self.dtype, self.first, self.second, self.table = backend, dtype, a, b, table
        rows = next(r for r in ((4, 2, 1) if a.form.bits <= 4 else (2, 1) if a.form.bits <= 16 else (1,)) if not (a.outputs % r or b.outputs % r))
        self.outputs = a.outputs + b.outputs
        self.shape = (2, a.outputs) if split else (self.outputs,)
        self.simds = _largest(self.outputs // rows, 4, 2, 1)
        self.constants = {"K": a.inputs, "N": a.outputs, **a.form.constants(), "R": rows, "NSG": self.simds, "XS": a.inputs, "RG": 0}
        self.constants |= {"N2": b.outputs, "AR": 0 if table is None else table.shape[0], "OF": int(dtype == mx.float32)}

    def __call__(self, x: mx.array, positions: mx.array | None = None) -> mx.array:
        n, rows = x.shape[0], number(x.shape[0])
        constants = {**self.constants, "M": compiled_rows(n), "XF": int(x.dtype == mx.float32)}
        added = (rows, rows) if self.table is None else (self.table, positions)
        inputs = [x, *self.first.arrays, rows, *self.second.arrays, *added]
        grid = self.outputs // (self.constants["R"] * self.simds), 1, 1
        return self.backend.run(MATVEC, inputs, constants, grid, 32 * self.simds, [((n, *self.shape), self.dtype)])[0]


class Experts:
    """Routed experts and the shared one: x [n, D] bfloat16, ids int32 and weight float32 [n, picks] -> [n, D], for at most MOST_ROWS rows.

    Products and activation in float32; the activation is rounded once, before the down product. Outputs are summed in float32 by
    slot, the shared expert last.
    """

    def __init__(self, backend: Backend, up: tuple[Any, Any], down: Any, shared_up: tuple[Any, Any], shared_down: Any, limit: float):
        """up: gate and up of all experts (w1, w3); limit: of the activation, 0 without one. Raises Declined."""
        self.backend, self.limit = backend, limit
        gate, lift = (stored(m) for m in up)
        shared_gate, shared_lift = (stored(m) for m in shared_up)
        self.down, self.shared_down = stored(down), stored(shared_down)
        if gate.form != lift.form or shared_gate.form != shared_lift.form:
            raise Declined("gate and up of an expert are stored in different forms")
        if (shared_gate.inputs, shared_gate.outputs) != (gate.inputs, gate.outputs):
            raise Declined("the shared expert has another shape than the routed ones")
        if self.down.outputs % 2:
            raise Declined(f"{self.down.outputs} outputs are odd")
        self.width, self.inner = gate.inputs, gate.outputs
        self.up_arrays = [*gate.arrays, *lift.arrays, *shared_gate.arrays, *shared_lift.arrays]
        self.up_simds, self.down_simds = _largest(self.inner, 4, 2, 1), _largest(self.down.outputs // 2, 4, 2, 1)
        self.up_constants = {"K": self.width, "I": self.inner, "SHARED": 1, "NSG": self.up_simds, "LIMIT": float_bits(max(limit, 0.0))}
        self.up_constants |= {**gate.form.constants(), **shared_gate.form.constants("2")}
        self.down_constants = {"I": self.inner, "N": self.down.outputs, "SHARED": 1, "NSG": self.down_simds}
        self.down_constants |= {**self.down.form.constants(), **self.shared_down.form.constants("2")}

    def __call__(self, x: mx.array, ids: mx.array, weight: mx.array) -> mx.array:
        n, slots = x.shape[0], ids.shape[1] + 1
        grid = self.inner // self.up_simds, n * slots, 1
        inputs = [x, ids, weight, *self.up_arrays]
        (act,) = self.backend.run(
            EXPERTS_UP, inputs, {**self.up_constants, "S": slots}, grid, 32 * self.up_simds, [((n, slots, self.inner), mx.bfloat16)]
        )
        inputs, grid = [act, ids, *self.down.arrays, *self.shared_down.arrays], (self.down.outputs // 2 // self.down_simds, n, 1)
        (y,) = self.backend.run(
            EXPERTS_DOWN, inputs, {**self.down_constants, "S": slots}, grid, 32 * self.down_simds, [((n, self.down.outputs), mx.bfloat16)]
        )
        return y
