"""NVIDIA's run-time compiler, where it is installed (the package nvidia-cuda-nvrtc; no GPU is needed): what MLX would hand to it, to machine code."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

from dsv41chat.engine.kernels.dialect import Kernel, header, source

_TYPES = {
    mx.float32: "float", mx.uint32: "unsigned int", mx.int32: "int", mx.bfloat16: "bfloat16_t", mx.float16: "float16_t",
    mx.uint8: "unsigned char", mx.bool_: "bool",
}  # fmt: skip
# The bodies only cast pointers to these.
_STANDINS = "struct bfloat16_t { unsigned short bits; };\nstruct float16_t { unsigned short bits; };\n"


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of a kernel. spills: bytes that went to local memory for want of registers."""

    registers: int
    spills: int
    shared: int


@cache
def library() -> ctypes.CDLL | None:
    """The compiler, None when it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            return ctypes.CDLL(str(path))
    return None


def compile_kernel(
    kernel: Kernel, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype], constants: Mapping[str, int], architecture: str = "sm_90"
) -> Compiled:
    """Machine code for `architecture`; AssertionError with the compiler's words when it refuses."""
    arguments = [f"const {_TYPES[d]}* {n}" for n, d in zip(kernel.inputs, inputs)] + [f"{_TYPES[d]}* {n}" for n, d in zip(kernel.outputs, outputs)]
    lines = "".join(f"  constexpr int {name} = {value};\n" for name, value in constants.items())
    body = f"{lines}{source(kernel, 'cuda')}"
    function = f'extern "C" __global__ void {kernel.base}({", ".join(arguments)}) {{\n{body}\n}}\n'
    text = f"{_STANDINS}{header(kernel, 'cuda')}\nnamespace mlx_cu {{\n{function}}}\n"
    nvrtc, program = library(), ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), kernel.base.encode(), 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    words = log.value.decode()
    assert status == 0, f"{kernel.base} {dict(constants)}:\n{words[:3000]}"
    number = lambda pattern: sum(int(found) for found in re.findall(pattern, words))
    return Compiled(number(r"Used (\d+) registers"), number(r"(\d+) bytes spill"), number(r"(\d+) bytes smem"))
