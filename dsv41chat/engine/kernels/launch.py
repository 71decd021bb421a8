"""What runs a kernel text, and how MLX runs one on Metal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import mlx.core as mx

from dsv41chat.engine.device import device_kind
from dsv41chat.engine.kernels.dialect import SMALL_ELEMENTS, Kernel, header, kernel_name, source

# Rows of one launch: a weight that is read once serves all of them. Wider calls take another way.
MOST_ROWS = 8
Outputs = Sequence[tuple[tuple[int, ...], mx.Dtype]]


class Constants(dict):
    """Constants of a text that a caller keeps for its launches, which then cost the host less: a back end remembers by the object (`found`) what it
    launches. So nothing of it changes, and all launches with one object have inputs and outputs of the same types."""

    def __init__(self, values: Mapping[str, int]):
        super().__init__(values)
        self.found: dict = {}
        self._plus: dict[tuple, Constants] = {}

    def plus(self, **more: int) -> Constants:
        """These and more, the same object each time."""
        key = (*more, *more.values())
        made = self._plus.get(key)
        if made is None:
            made = self._plus[key] = Constants({**self, **more})
        return made

    def __setitem__(self, name: str, value: int) -> None:
        raise TypeError("constants that launches are remembered by do not change")

    def update(self, *args, **more) -> None:
        raise TypeError("constants that launches are remembered by do not change")

    __ior__ = update


class Backend(Protocol):
    """What executes kernel texts: a device, or in tests the CPU shim.

    dialect: metal or cuda. lazy: `run` only builds a graph, so that calls can be joined to compiled graphs. warpgroups: four SIMD groups
    use the matrix unit together.
    """

    dialect: str
    lazy: bool
    warpgroups: bool

    def run(
        self, kernel: Kernel, inputs: Sequence[mx.array], constants: Mapping[str, int], groups: tuple[int, int, int], threads: int, outputs: Outputs
    ) -> list[mx.array]:
        """One dispatch of `groups` groups of `threads` threads.

        inputs: contiguous arrays in the kernel's order, of at least one dimension, never slices: a slice is copied whole.
        constants: compile-time values, of which few sets should exist, because each is compiled; SHARED_BYTES among them: of shared
        memory that the launch brings, for a text that does not declare them; `Constants` where there are many
        launches. outputs: (shape, dtype) in the kernel's order.
        """
        ...


@lru_cache(maxsize=256)
def number(value: int) -> mx.array:
    """int32 [1 or 4], all the same: a length for a kernel. Kept, because the same ones come back in every layer and step."""
    if device_kind() != "cuda":
        return mx.array([value], dtype=mx.int32)
    # What the host wrote, and anything of at most 8 bytes, MLX leaves in the host's memory there, from where each group of every launch
    # would fetch it. Source: MLX 0.32, backend/cuda/allocator.
    made = mx.full((4,), value, dtype=mx.int32)
    mx.async_eval(made)
    return made


class MetalBackend:
    """Kernels through `mx.fast.metal_kernel`. The first use of a text with a set of constants compiles it."""

    dialect = "metal"
    lazy = True
    warpgroups = False

    def __init__(self):
        self._built: dict[tuple, Callable] = {}

    def run(
        self, kernel: Kernel, inputs: Sequence[mx.array], constants: Mapping[str, int], groups: tuple[int, int, int], threads: int, outputs: Outputs
    ) -> list[mx.array]:
        key = kernel, *(a.dtype for a in inputs), *(dtype for _, dtype in outputs), *(a.size < SMALL_ELEMENTS for a in inputs)
        built = self._built.get(key)
        if built is None:
            built = self._built[key] = _metal_kernel(kernel, tuple(map(str, key[1:])))
        return built(
            inputs=list(inputs),
            template=list(constants.items()),
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )


def _metal_kernel(kernel: Kernel, kinds: tuple[str, ...]) -> Callable:
    return mx.fast.metal_kernel(
        name=kernel_name(kernel, "metal", kinds),
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=source(kernel, "metal"),
        header=header(kernel, "metal"),
    )
