"""Running a kernel text on a device through MLX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Protocol

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import SMALL_ELEMENTS, Kernel, header, kernel_name, source

Outputs = Sequence[tuple[tuple[int, ...], mx.Dtype]]


class Backend(Protocol):
    """What executes kernel texts: a device, or in tests the CPU shim. dialect: metal or cuda."""

    dialect: str

    def run(
        self, kernel: Kernel, inputs: Sequence[mx.array], constants: Mapping[str, int], groups: tuple[int, int, int], threads: int, outputs: Outputs
    ) -> list[mx.array]:
        """One dispatch of `groups` groups of `threads` threads.

        inputs: contiguous arrays in the kernel's order, of at least one dimension, never slices: a slice is copied whole.
        constants: compile-time values, of which few sets should exist, because each is compiled. outputs: (shape, dtype) in the
        kernel's order.
        """
        ...


@lru_cache(maxsize=256)
def number(value: int) -> mx.array:
    """int32 [1]: a length for a kernel. Kept, because the same ones come back in every layer and step."""
    return mx.array([value], dtype=mx.int32)


class MlxBackend:
    """Kernels through `mx.fast.metal_kernel` or `mx.fast.cuda_kernel`. The first use of a text with a set of constants compiles it."""

    def __init__(self, dialect: str):
        self.dialect = dialect

    def run(
        self, kernel: Kernel, inputs: Sequence[mx.array], constants: Mapping[str, int], groups: tuple[int, int, int], threads: int, outputs: Outputs
    ) -> list[mx.array]:
        kinds = *(str(a.dtype) for a in inputs), *(str(dtype) for _, dtype in outputs), *(str(a.size < SMALL_ELEMENTS) for a in inputs)
        built = _built(kernel, self.dialect, kinds)
        return built(
            inputs=list(inputs),
            template=list(constants.items()),
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )


@cache
def _built(kernel: Kernel, dialect: str, kinds: tuple[str, ...]):
    make = mx.fast.metal_kernel if dialect == "metal" else mx.fast.cuda_kernel
    return make(
        name=kernel_name(kernel, dialect, kinds),
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=source(kernel, dialect),
        header=header(kernel, dialect),
    )
