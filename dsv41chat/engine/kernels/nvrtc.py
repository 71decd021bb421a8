"""Kernel texts to machine code by NVIDIA's run-time compiler, which MLX's CUDA builds bring with them, and their launches.

MLX would compile a text together with its own headers, several seconds each, again in every process, and assemble the text anew at
every call. Here a text is compiled alone in about a tenth of a second and kept on disk; a launch passes the finished code.
Multiply-adds are contracted only where a text says so, as under the CPU shim.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import mlx.core as mx
import platformdirs

from dsv41chat.engine.kernels.dialect import Kernel, header, source
from dsv41chat.engine.kernels.launch import Constants, Outputs

_log = logging.getLogger(__name__)
_TYPES = {
    mx.float32: "float", mx.uint32: "unsigned int", mx.int32: "int", mx.bfloat16: "bfloat16_t", mx.float16: "float16_t",
    mx.uint8: "unsigned char", mx.bool_: "bool",
}  # fmt: skip
# The bodies only cast pointers to these.
_STANDINS = "struct bfloat16_t { unsigned short bits; };\nstruct float16_t { unsigned short bits; };\n"
# Without the last, compilers before 13.1 take a lambda inside a generic one for a function of the host.
_OPTIONS = ("--fmad=false", "--std=c++17", "--device-as-default-execution-space")
_DIGEST = 32
# Of CUDA's driver interface: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_MAJOR, _MINOR = 75, 76


class CompileFailed(Exception):
    """The compiler's words on a text that it does not take."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiler: the one that this process uses already, else the installed package's; None when there is none."""
    try:
        loaded = re.findall(r"\S*/libnvrtc\.so[.\d]*", Path("/proc/self/maps").read_text())
    except OSError:
        loaded = []
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    installed = [str(path) for folder in folders for path in sorted(folder.glob("*/lib/libnvrtc.so.*"))]
    for name in (*dict.fromkeys(loaded), *installed, "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def architecture() -> str:
    """Of the first device, such as sm_80; sm_90a for generation 9, whose own instructions no other has. Raises OSError without NVIDIA's driver."""
    driver, device, values = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        raise OSError("NVIDIA's driver finds no device")
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        values.append(value.value)
    return f"sm_{values[0]}{values[1]}{'a' * (values == [9, 0])}"


def program(kernel: Kernel, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype], constants: Mapping[str, int]) -> tuple[str, str]:
    """(name of the function, the whole text of the file)."""
    arguments = [f"const {_TYPES[d]}* {n}" for n, d in zip(kernel.inputs, inputs)] + [f"{_TYPES[d]}* {n}" for n, d in zip(kernel.outputs, outputs)]
    lines = "".join(f"  constexpr int {name} = {value};\n" for name, value in constants.items())
    rest = f"({', '.join(arguments)}) {{\n{lines}{source(kernel, 'cuda')}\n}}\n"
    text = f"{_STANDINS}{header(kernel, 'cuda')}\n"
    name = f"{kernel.base}_{hashlib.sha256((text + rest).encode()).hexdigest()[:16]}"
    bounds = f"__launch_bounds__({kernel.bounds[0]}, {kernel.bounds[1]}) " if kernel.bounds else ""
    return name, f'{text}extern "C" __global__ void {bounds}{name}{rest}'


def compiled(name: str, text: str, target: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """(machine code for `target`, the compiler's words). For a target newer than the compiler: its intermediate code, which the driver
    finishes. Raises CompileFailed."""
    nvrtc, handle, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    if nvrtc is None:
        raise CompileFailed("NVIDIA's run-time compiler (libnvrtc) was not found")
    known = _known_targets(nvrtc)
    number = target.removeprefix("sm_").removesuffix("a")
    real = number.isdigit() and int(number) in known
    flags = [f"--gpu-architecture={target if real else f'compute_{max(known)}'}", *_OPTIONS, *options]
    if nvrtc.nvrtcCreateProgram(ctypes.byref(handle), text.encode(), name.encode(), 0, None, None):
        raise CompileFailed(f"{name}: the compiler does not start")
    try:
        status = nvrtc.nvrtcCompileProgram(handle, len(flags), (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags)))
        nvrtc.nvrtcGetProgramLogSize(handle, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(handle, log)
        words = log.value.decode(errors="replace")
        if status:
            raise CompileFailed(f"{name}:\n{words[:3000]}")
        length, code = (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if real else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        length(handle, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        code(handle, found)
        return found.raw, words
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(handle))


def _known_targets(nvrtc: ctypes.CDLL) -> list[int]:
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(found)
    return list(found)


class CodeFolder:
    """Machine code by its text, target and compiler, in files that carry their own digest; one that does not fit it counts as absent."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, name: str, text: str, target: str) -> Path:
        version = [ctypes.c_int(), ctypes.c_int()]
        if (nvrtc := library()) is not None:
            nvrtc.nvrtcVersion(*map(ctypes.byref, version))
        key = "\0".join((text, target, *_OPTIONS, *(str(v.value) for v in version)))
        return self.folder / f"{name}.{hashlib.sha256(key.encode()).hexdigest()[:16]}.bin"

    def load(self, name: str, text: str, target: str) -> bytes:
        """From the folder, else compiled and put there; without a writable folder it is compiled each time. Raises CompileFailed."""
        path = self.path(name, text, target)
        try:
            raw = path.read_bytes()
        except OSError:
            raw = b""
        code = raw[_DIGEST:]
        if code and hashlib.sha256(code).digest() == raw[:_DIGEST]:
            return code
        code, _ = compiled(name, text, target)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
            part.write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(part, path)
        except OSError as error:
            _log.debug("machine code is not kept: %s", error)
        return code


def code_folder(folder: Path | None = None) -> CodeFolder:
    """folder: by default in the user's cache folder."""
    return CodeFolder(folder or platformdirs.user_cache_path("dsv41chat", appauthor=False) / "kernels")


Wanted = tuple[Kernel, Sequence[mx.Dtype], Sequence[mx.Dtype], Mapping[str, int]]


def _key(kernel: Kernel, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype], constants: Mapping[str, int]) -> tuple:
    return kernel, tuple(constants.items()), *inputs, *outputs


class NvrtcBackend:
    """A `Backend` for NVIDIA's devices. folder: where machine code is kept, by default in the user's cache folder."""

    dialect = "cuda"
    lazy = True

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._programs: dict[tuple, tuple[str, bytes]] = {}
        self._waiting: dict[tuple, tuple[str, str]] | None = None

    def run(
        self, kernel: Kernel, inputs: Sequence[mx.array], constants: Mapping[str, int], groups: tuple[int, int, int], threads: int, outputs: Outputs
    ) -> list[mx.array]:
        # A prompt comes here hundreds of times, and the device waits for it: so no generators, and nothing twice.
        shapes, dtypes = [shape for shape, _ in outputs], [dtype for _, dtype in outputs]
        kept = constants.found if type(constants) is Constants else {}
        found = kept.get((self, kernel))
        if found is None:
            found = self._found(kernel, [a.dtype for a in inputs], dtypes, constants)
            if found is None:
                return [mx.zeros(shape, dtype) for shape, dtype in outputs]
            kept[self, kernel] = found
        return mx.fast.precompiled_cuda_kernel(
            name=found[0],
            compiled_source=found[1],
            inputs=inputs,
            output_shapes=shapes,
            output_dtypes=dtypes,
            scalars=[],
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
            shared_memory=constants.get("SHARED_BYTES", 0),
            ensure_row_contiguous=True,
        )

    def _found(
        self, kernel: Kernel, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype], constants: Mapping[str, int]
    ) -> tuple[str, bytes] | None:
        """(name, machine code); None where it is compiled on leaving `collecting`."""
        key = _key(kernel, inputs, outputs, constants)
        found = self._programs.get(key)
        if found is None:
            name, text = program(kernel, inputs, outputs, constants)
            if self._waiting is not None:
                self._waiting[key] = name, text
                return None
            found = self._programs[key] = name, self._code.load(name, text, architecture())
        return found

    @property
    def warpgroups(self) -> bool:
        return architecture() == "sm_90a"

    @property
    def _code(self) -> CodeFolder:
        return code_folder(self._folder)

    def codes(self, wanted: Sequence[Wanted]) -> list[tuple[str, bytes]]:
        """(name, machine code) of each (kernel, dtypes of inputs, of outputs, constants); what is new is compiled side by side. Raises
        CompileFailed."""
        new = {key: program(*w) for w in wanted if (key := _key(*w)) not in self._programs}
        if new:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                codes = pool.map(lambda item: self._code.load(*item, architecture()), new.values())
                self._programs.update({key: (name, code) for (key, (name, _)), code in zip(new.items(), codes)})
        return [self._programs[_key(*w)] for w in wanted]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, kernels that are not there yet give zeros and are noted; on leaving they are all compiled side by side."""
        self._waiting = {}
        try:
            yield
        finally:
            waiting, self._waiting = self._waiting, None
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for (key, (name, _)), code in zip(waiting.items(), pool.map(self._tried, waiting.values())):
                    if code is not None:
                        self._programs[key] = name, code

    def _tried(self, item: tuple[str, str]) -> bytes | None:
        try:
            return self._code.load(*item, architecture())
        except CompileFailed:
            return None  # the call that needs it says so
