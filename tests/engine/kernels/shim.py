"""The CPU shim: compiles the strings that MLX would compile for a device with a C++ compiler, and runs them on arrays."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.kernels.dialect import SMALL_ELEMENTS, Kernel, header, source
from dsv41chat.engine.kernels.launch import Constants, Outputs

HERE = Path(__file__).parent
_TYPES = {
    mx.float32: "float", mx.uint32: "unsigned int", mx.int32: "int", mx.bfloat16: "bfloat16_t", mx.float16: "float16_t", mx.uint8: "unsigned char",
    mx.bool_: "bool",
}  # fmt: skip
_ATTRIBUTES = {
    "thread_position_in_threadgroup": ("uint3", "uint3{(uint)shim::now, 0, 0}"),
    "threadgroup_position_in_grid": ("uint3", "shim::group"),
    "thread_index_in_simdgroup": ("uint", "(uint)shim::now & 31u"),
    "simdgroup_index_in_threadgroup": ("uint", "(uint)shim::now >> 5"),
}


@cache
def compiler() -> str | None:
    """A C++20 compiler, None without one."""
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path and subprocess.run([path, "-std=c++20", "-x", "c++", "-fsyntax-only", os.devnull], capture_output=True).returncode == 0:
            return path
    return None


needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++20 compiler (g++ or clang++); on Debian: apt-get install g++")


class Shim:
    """A `Backend` that runs on the CPU. Outputs start as garbage, so a value that a kernel forgets to write is seen."""

    lazy = False

    def __init__(self, dialect: str, warpgroups: bool = False):
        self.dialect, self.warpgroups = dialect, warpgroups
        self.launches: list[str] = []

    def run(
        self, kernel: Kernel, inputs: Sequence[mx.array], constants: Mapping[str, int], groups: tuple[int, int, int], threads: int, outputs: Outputs
    ) -> list[mx.array]:
        assert kernel.only in (None, self.dialect), f"{kernel.base} is no {self.dialect} kernel"
        assert threads % 32 == 0 and threads <= 1024 and len(inputs) == len(kernel.inputs) and len(outputs) == len(kernel.outputs)
        assert all(type(v) is int and -(2**31) <= v < 2**31 for v in constants.values()), constants
        self.launches.append(kernel.base)
        if type(constants) is Constants:
            types = [str(a.dtype) for a in inputs] + [str(dtype) for _, dtype in outputs]
            assert constants.found.setdefault(("types", kernel), types) == types, "launches remembered by one object have the same types"
        assert all(a.ndim for a in inputs)
        inputs = [mx.contiguous(a) for a in inputs]
        mx.eval(inputs)
        results = [_aligned(np.full(max(1, int(np.prod(shape))) * dtype.size, 0x7B, np.uint8)) for shape, dtype in outputs]
        return self._launch(kernel, inputs, constants, groups, threads, outputs, results)

    def run_into(
        self, kernel: Kernel, inputs: Sequence[mx.array], constants: Mapping[str, int], groups: tuple[int, int, int], threads: int,
        targets: Sequence[mx.array],
    ) -> list[mx.array]:  # fmt: skip
        """Copies of the targets with what the kernel writes; a recorder writes in place."""
        self.launches.append(kernel.base)
        results = [_aligned(_raw(mx.contiguous(a))) for a in targets]
        return self._launch(kernel, [mx.contiguous(a) for a in inputs], constants, groups, threads, [(a.shape, a.dtype) for a in targets], results)

    def _launch(
        self, kernel: Kernel, inputs: Sequence[mx.array], constants: Mapping[str, int], groups: tuple[int, int, int], threads: int,
        outputs: Outputs, results: Sequence[np.ndarray],
    ) -> list[mx.array]:  # fmt: skip
        held = [_aligned(_raw(a)) for a in inputs]
        library = _library(_program(kernel, self.dialect, [(a.dtype, a.size < SMALL_ELEMENTS) for a in inputs], [d for _, d in outputs], constants))
        pointers = (ctypes.c_void_p * (len(held) + len(results)))(*[a.ctypes.data for a in (*held, *results)])
        library.run(pointers, *map(ctypes.c_int, (*groups, threads)))
        return [mx.array(r).view(dtype).reshape(shape) for r, (shape, dtype) in zip(results, outputs)]


def _raw(a: mx.array) -> np.ndarray:
    return np.array(a.view(mx.uint8), copy=False).reshape(-1)


def _aligned(raw: np.ndarray) -> np.ndarray:
    """The bytes, starting on a 64-byte border as device buffers do."""
    whole = np.empty(raw.size + 64, np.uint8)
    start = -whole.ctypes.data % 64
    whole[start : start + raw.size] = raw
    return whole[start : start + raw.size]


def _program(kernel: Kernel, dialect: str, inputs: list[tuple[mx.Dtype, bool]], outputs: list[mx.Dtype], constants: Mapping[str, int]) -> str:
    """The file that MLX would hand to the device's compiler, and an entry point."""
    text = source(kernel, dialect)
    pointer = lambda d, small: f"shim::constant<{_TYPES[d]}>" if small and dialect == "metal" else f"const {_TYPES[d]}*"
    arguments = [(n, pointer(*kind)) for n, kind in zip(kernel.inputs, inputs)] + [(n, f"{_TYPES[d]}*") for n, d in zip(kernel.outputs, outputs)]
    seen = [(name, *_ATTRIBUTES[name]) for name in _ATTRIBUTES if dialect == "metal" and name in text]
    parameters = ", ".join([f"{kind} {name}" for name, kind in arguments] + [f"{kind} {name}" for name, kind, _ in seen])
    values = ", ".join([f"({kind})pointers[{i}]" for i, (_, kind) in enumerate(arguments)] + [value for *_, value in seen])
    lines = "".join(f"  constexpr int {name} = {value};\n" for name, value in constants.items())
    return (
        f'#define SHIM_{dialect.upper()} 1\n#include "shim.h"\n{header(kernel, dialect)}\n'
        f"static void kernel_function({parameters}) {{\n{lines}{text}\n}}\n"
        f"static void** pointers;\nstatic void entry() {{ kernel_function({values}); }}\n"
        'extern "C" void run(void** p, int x, int y, int z, int threads) { pointers = p; shim::launch(entry, x, y, z, threads); }\n'
    )


@cache
def _library(program: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(built(program)))


# Most texts are compiled for a launch or a few: what -O1 does beyond this takes the compiler longer than it saves. Nothing is thrown or unwound.
_PLAIN = ("-Og", "-fno-exceptions", "-fno-asynchronous-unwind-tables")


def built(program: str, libraries: bool = False) -> Path:
    """The library that a C++ text makes, in the temporary folder by the hash of all that goes into it.

    libraries: it uses those of C++, which take a linker as long as half of a text takes the compiler; others find what they need of C
    in this process. macOS wants them named.
    """
    link = ["-shared", "-fPIC", *(["-nostdlib"] if not libraries and sys.platform == "linux" else [])]
    command = [compiler(), "-std=c++20", *_PLAIN, "-ffp-contract=off", "-fno-strict-aliasing", "-w", *link, "-I", str(HERE)]
    key = hashlib.sha256("\0".join([program, (HERE / "shim.h").read_text(), *command]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"dsv41chat-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{key}.so"
    if not path.exists():
        text = folder / f"{key}.{os.getpid()}.cpp"
        text.write_text(program)
        done = subprocess.run([*command, str(text), "-o", f"{text}.so"], capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"the text does not compile ({text}):\n{done.stderr[:4000]}")
        os.replace(f"{text}.so", path)
        text.unlink()
    return path
