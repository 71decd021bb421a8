"""What NVIDIA's assembler says of the programs, where its compiler is installed (the package nvidia-cuda-nvrtc; no GPU is needed)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.nvrtc import compiled, program


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of a kernel. spills: bytes that went to local memory for want of registers."""

    registers: int
    spills: int
    shared: int


def compile_kernel(
    kernel: Kernel, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype], constants: Mapping[str, int], architecture: str = "sm_90"
) -> Compiled:
    """Machine code for `architecture`; CompileFailed with the compiler's words when it refuses."""
    _, words = compiled(*program(kernel, inputs, outputs, constants), architecture, ("--ptxas-options=-v",))
    number = lambda pattern: sum(int(found) for found in re.findall(pattern, words))
    return Compiled(number(r"Used (\d+) registers"), number(r"(\d+) bytes spill"), number(r"(\d+) bytes smem"))
