"""NVIDIA's driver interface, as far as a recorded step needs it: memory with fixed addresses, kernels, and graphs of launches.

A step of decoding is some thousand launches. MLX builds and encodes them anew for every token; a `Graph` is built once and started
with a single call. All of it shares the primary context with MLX, so that kernels reach MLX's arrays, but not MLX's streams: whoever
goes from one to the other waits in between (`mx.synchronize()` before a launch that reads what MLX wrote, `Driver.synchronize()`
before MLX reads what a graph wrote). Sources: NVIDIA, CUDA driver API, and its cuda.h (12.0 to 13.0) for layouts and symbols.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import RouteUnavailable
from dsv41chat.engine.kernels.nvrtc import architecture, code_folder

_log = logging.getLogger(__name__)
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_INPUTS = 120  # of the kernel that tells addresses
_COPIES, _RUN = 60, 16  # of the kernel that copies: pairs of arrays; bytes that a thread moves at once
_COPY_GROUPS, _COPY_THREADS = 16, 256  # for each pair
_HINT = 'the stock operations run without it: set engine.routes to "stock"'


class DriverFailed(RuntimeError):
    """A call of the driver failed: its name, the error's name and the driver's words. A RuntimeError, as MLX's failures are, so that
    `errors.device_failure` sees in it a device without memory or a lost one."""


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2, 72 bytes. kernelParams: void**, one pointer to each argument's value, which the driver copies."""

    _fields_ = [
        ("func", c_void_p), ("gridDimX", c_uint), ("gridDimY", c_uint), ("gridDimZ", c_uint), ("blockDimX", c_uint), ("blockDimY", c_uint),
        ("blockDimZ", c_uint), ("sharedMemBytes", c_uint), ("kernelParams", c_void_p), ("extra", c_void_p), ("kern", c_void_p), ("ctx", c_void_p),
    ]  # fmt: skip


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData, 8 bytes."""

    _fields_ = [("from_port", c_ubyte), ("to_port", c_ubyte), ("type", c_ubyte), ("reserved", c_ubyte * 5)]


# CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC of the earlier node, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC: from when all its groups have said NEXT().
_EARLY = _EdgeData(from_port=1, type=1)
# griddepcontrol, of which NEXT() and AFTER() are made, came with this architecture.
_EARLY_ARCHITECTURE = 90

_OUT = ctypes.POINTER(c_void_p)
# The calls and their arguments; all give a CUresult. Names without their _v2 are older calls with narrower arguments.
_CALLS = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (ctypes.POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuStreamCreate": (_OUT, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (_OUT, c_char_p),
    "cuModuleGetFunction": (_OUT, c_void_p, c_char_p),
    "cuMemAlloc_v2": (ctypes.POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (_OUT, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuGraphCreate": (_OUT, c_uint),
    "cuGraphAddKernelNode_v2": (c_void_p, c_void_p, c_void_p, c_size_t, ctypes.POINTER(_KernelNode)),
    "cuGraphInstantiateWithFlags": (_OUT, c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
}


class Driver:
    """The first device's primary context and one stream of its own, on which everything here happens in order.

    Any thread may call: each public call makes the context current in its thread first. Calls return before the device is done, unless
    they say otherwise, and a failure of earlier work may show in any of them. They raise DriverFailed.
    """

    def __init__(self, library: str = "libcuda.so.1"):
        """library: the driver's file or its name. Raises RouteUnavailable without a driver, or with one older than CUDA 12, and DriverFailed."""
        try:
            self._cu = ctypes.CDLL(library)
        except OSError as error:
            raise RouteUnavailable(f"NVIDIA's driver could not be opened ({error}).", _HINT) from None
        for name, arguments in _CALLS.items():
            function = getattr(self._cu, name, None)
            if function is None:
                raise RouteUnavailable(f"NVIDIA's driver is older than CUDA 12: it has no {name}.", f"update the driver, or {_HINT}")
            function.argtypes, function.restype, function.errcheck = arguments, c_int, self._checked
        device = c_int()
        self._context, self._stream = c_void_p(), c_void_p()
        self._cu.cuInit(0)
        self._cu.cuDeviceGet(byref(device), 0)
        self._cu.cuDevicePrimaryCtxRetain(byref(self._context), device)
        self._current().cuStreamCreate(byref(self._stream), _NON_BLOCKING)
        self._functions: dict[str, int] = {}
        self._in_flight: set[PinnedMemory] = set()

    def _checked(self, result: int, function: Callable, arguments: tuple) -> int:
        if result:
            words = []
            for ask in (self._cu.cuGetErrorName, self._cu.cuGetErrorString):
                found = c_char_p()
                ask(c_int(result), byref(found))
                words.append((found.value or b"unknown error").decode(errors="replace"))
            raise DriverFailed(f"{function.__name__}: {words[0]} ({result}): {words[1]}")
        return result

    def _current(self) -> ctypes.CDLL:
        """The calls, once the context is this thread's."""
        self._cu.cuCtxSetCurrent(self._context)
        return self._cu

    def function(self, name: str, code: bytes) -> int:
        """Handle of a kernel for `Node`. code: a cubin, or PTX ended by a zero byte, with an extern "C" function `name`. Loaded once for
        each name, which therefore stands for its code, and kept for the process."""
        if (found := self._functions.get(name)) is None:
            cu, module, function = self._current(), c_void_p(), c_void_p()
            cu.cuModuleLoadData(byref(module), code)
            cu.cuModuleGetFunction(byref(function), module, name.encode())
            found = self._functions[name] = function.value
        return found

    def parameters(self, function: int) -> int | None:
        """How many arguments a kernel takes, None when the driver does not tell: the call is CUDA 12.4's."""
        ask, count = getattr(self._current(), "cuFuncGetParamInfo", None), 0
        if ask is None:
            return None
        offset, size = c_size_t(), c_size_t()
        while not (result := ask(c_void_p(function), c_size_t(count), byref(offset), byref(size))):
            count += 1
        return count if result == _INVALID_VALUE else None

    def starts_early(self) -> bool:
        """Whether edges of a graph can let a node start before the one that it follows is done."""
        add = getattr(self._cu, "cuGraphAddDependencies_v2", None)
        if add is None:
            return False
        add.argtypes, add.restype, add.errcheck = (c_void_p, c_void_p, c_void_p, ctypes.POINTER(_EdgeData), c_size_t), c_int, self._checked
        return int(architecture().removeprefix("sm_").removesuffix("a")) >= _EARLY_ARCHITECTURE

    def allocate(self, nbytes: int) -> int:
        """Address of `nbytes` > 0 bytes of the device's own memory, all zero (this waits for the stream), on a border of at least 256
        bytes. They stay until `free`; a `DeviceMemory` frees them by itself."""
        cu, address = self._current(), c_uint64()
        cu.cuMemAlloc_v2(byref(address), nbytes)
        try:
            # On this stream: a plain cuMemsetD8 runs on the default stream, which this one does not wait for.
            cu.cuMemsetD8Async(address, 0, nbytes, self._stream)
            cu.cuStreamSynchronize(self._stream)
        except DriverFailed:
            _quietly(cu.cuMemFree_v2, address)
            raise
        return address.value

    def free(self, address: int) -> None:
        """Gives back what `allocate` gave, after waiting for the stream, which may still use it."""
        cu = self._current()
        cu.cuStreamSynchronize(self._stream)
        cu.cuMemFree_v2(address)

    def copy_in(self, address: int, pinned: PinnedMemory, nbytes: int, offset: int = 0) -> None:
        """`nbytes` bytes from byte `offset` of `pinned` to the device. They are read when the stream comes to it: leave them as they are
        until `synchronize`. Raises ValueError beyond the end."""
        source = pinned.part(offset, nbytes)
        self._in_flight.add(pinned)
        self._current().cuMemcpyHtoDAsync_v2(address, source, nbytes, self._stream)

    def copy_out(self, pinned: PinnedMemory, address: int, nbytes: int, offset: int = 0) -> None:
        """`nbytes` bytes from the device to byte `offset` of `pinned`, where they are after `synchronize`. Raises ValueError beyond the end."""
        target = pinned.part(offset, nbytes)
        self._in_flight.add(pinned)
        self._current().cuMemcpyDtoHAsync_v2(target, address, nbytes, self._stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """`nbytes` bytes between two addresses of the device that do not overlap."""
        self._current().cuMemcpyDtoDAsync_v2(target, source, nbytes, self._stream)

    def synchronize(self) -> None:
        """Waits until all that was started here is done. Other Python threads run meanwhile."""
        done, self._in_flight = self._in_flight, set()
        try:
            self._current().cuStreamSynchronize(self._stream)
        except DriverFailed:
            self._in_flight |= done
            raise

    def finish(self) -> None:
        """Waits until all that anybody started on the device is done, MLX's work included. Other Python threads run meanwhile; this one stays
        awake, where a wait of MLX's sleeps and the host is slow for a while afterwards."""
        self._current().cuCtxSynchronize()

    def _free_pinned(self, address: int) -> None:
        self._current().cuMemFreeHost(address)

    def _destroy(self, executable: c_void_p) -> None:
        self._current().cuGraphExecDestroy(executable)


class DeviceMemory:
    """Owns memory of `Driver.allocate`: address (an int), nbytes. Freed by `free` or with its owner; a graph does not keep it."""

    def __init__(self, address: int, nbytes: int, on: Driver | None = None):
        self.address, self.nbytes = address, nbytes
        self.free = _finalizer(self, (on or driver()).free, address)


class PinnedMemory:
    """`nbytes` > 0 bytes of page-locked host memory, the only kind that is copied without a stop on the way.

    array: its bytes, np.uint8 [nbytes], not cleared. The memory is freed when neither this object nor a view of the array is left, nor
    a copy that was not waited for. Raises DriverFailed.
    """

    def __init__(self, nbytes: int, on: Driver | None = None):
        owner, address = on or driver(), c_void_p()
        owner._current().cuMemHostAlloc(byref(address), nbytes, 0)
        held = (c_ubyte * nbytes).from_address(address.value)
        _finalizer(held, owner._free_pinned, address.value)  # every view of the array ends in `held`
        self.address, self.nbytes = address.value, nbytes
        self.array = np.frombuffer(held, np.uint8)

    def part(self, offset: int, nbytes: int) -> int:
        """Host address of `nbytes` bytes at `offset`. Raises ValueError when they do not lie inside."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of a page-locked block of {self.nbytes}")
        return self.address + offset


class Node(NamedTuple):
    """One launch. function: of `Driver.function`; grid: groups in x, y, z; threads: of a group; pointers: the kernel's arguments, device
    addresses in its order, as many as it has; after: indices of earlier nodes whose results it reads or whose inputs it overwrites."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    pointers: tuple[int, ...]
    after: tuple[int, ...] = ()


class Graph:
    """Launches that are started together, as often as wanted, each after the nodes that it names.

    early: all kernels say NEXT() and AFTER() (`dialect`). Groups of a node that comes after one other may then start while that one still
    runs, up to their AFTER(); what comes after several waits for their ends, as without it. Drivers before CUDA 12.3 and devices before
    compute capability 9.0 do not have it, and nothing changes there.

    A graph knows addresses only: the memory behind them has to live as long as it is launched. Raises ValueError for a node that comes
    after itself or a later one, or has another number of pointers than its kernel, and DriverFailed.
    """

    def __init__(self, nodes: Sequence[Node], on: Driver | None = None, early: bool = False):
        self._driver = on or driver()
        cu, graph, self._executable = self._driver._current(), c_void_p(), c_void_p()
        cu.cuGraphCreate(byref(graph), 0)
        try:
            takes = {function: self._driver.parameters(function) for function in {node.function for node in nodes}}
            _add(cu, graph, nodes, takes, early and self._driver.starts_early())
            cu.cuGraphInstantiateWithFlags(byref(self._executable), graph, 0)
        finally:
            _quietly(cu.cuGraphDestroy, graph)
        self._close = _finalizer(self, self._driver._destroy, self._executable)

    def launch(self) -> None:
        """Starts all nodes; two launches run one after the other. Raises ValueError after `close`."""
        if not self._close.alive:
            raise ValueError("this graph is closed")
        self._driver._current().cuGraphLaunch(self._executable, self._driver._stream)

    def close(self) -> None:
        """Gives the graph back, which otherwise happens with its last reference; the driver ends a launch under way first."""
        self._close()


def _add(cu: ctypes.CDLL, graph: c_void_p, nodes: Sequence[Node], takes: dict[int, int | None], early: bool) -> None:
    # One array of all arguments, and one of pointers to them, in which each node has its stretch.
    values = np.fromiter((pointer for node in nodes for pointer in node.pointers), np.uint64)
    places = np.uint64(values.ctypes.data) + np.arange(values.size, dtype=np.uint64) * np.uint64(8)
    handles = (c_void_p * len(nodes))()
    place, handle = places.ctypes.data, ctypes.addressof(handles)
    params, add = _KernelNode(blockDimY=1, blockDimZ=1), cu.cuGraphAddKernelNode_v2
    by_reference = byref(params)
    for index, (function, (x, y, z), threads, pointers, after) in enumerate(nodes):
        params.func, params.gridDimX, params.gridDimY, params.gridDimZ, params.blockDimX = function, x, y, z, threads
        params.kernelParams = place
        before, count = None, takes[function]
        if count is not None and count != len(pointers):
            raise ValueError(f"node {index} passes {len(pointers)} pointers to a kernel of {count} arguments")
        if after:
            after = sorted(set(after))
            if after[0] < 0 or after[-1] >= index:
                raise ValueError(f"node {index} comes after the nodes {after}, which are not all before it")
            before = (c_void_p * len(after))(*[handles[i] for i in after])
        chained = early and len(after) == 1
        add(handle + 8 * index, graph, None if chained else before, 0 if chained else len(after), by_reference)
        if chained:
            cu.cuGraphAddDependencies_v2(graph, before, handle + 8 * index, byref(_EARLY), 1)
        place += 8 * len(pointers)


def _finalizer(owner: object, call: Callable, *arguments: object) -> weakref.finalize:
    made = weakref.finalize(owner, _quietly, call, *arguments)
    made.atexit = False  # the process's end frees all of it, and may come after the driver's
    return made


def _quietly(call: Callable, *arguments: object) -> None:
    """After a lost device every call fails, and giving back is no place to say so."""
    try:
        call(*arguments)
    except DriverFailed as error:
        _log.debug("giving back: %s", error)


@cache
def driver() -> Driver:
    """This process's. Raises as `Driver` does, every time."""
    return Driver()


def address_program() -> tuple[str, str]:
    """(name, text) of the kernel that writes its inputs' addresses to its output, unsigned 64-bit numbers."""
    inputs = ", ".join(f"const void* p{i}" for i in range(_INPUTS))
    lines = "".join(f"  out[{i}] = (unsigned long long)p{i};\n" for i in range(_INPUTS))
    return _named("addresses", f"({inputs}, unsigned long long* out) {{\n{lines}}}\n")


def _named(kind: str, rest: str) -> tuple[str, str]:
    """A kernel's name, which stands for its text, and the text."""
    name = f"{kind}_{hashlib.sha256(rest.encode()).hexdigest()[:16]}"
    return name, f'extern "C" __global__ void {name}{rest}'


@cache
def _address_code() -> tuple[str, bytes]:
    name, text = address_program()
    return name, code_folder().load(name, text, architecture())


def addresses(arrays: Sequence[mx.array], whole: bool = False) -> list[int]:
    """Where MLX keeps the arrays on the device, a view's first element included. Evaluates them and waits for MLX. whole: they are known to
    be results of operations that fill their memory row by row, which is not looked into then.

    An address holds while its array lives, is not assigned into, and stays on the device: the first look at it from the host (np.array,
    tolist, item) and its first use on MLX's CPU move an array that an operation made on the device to other memory, which a view of it
    shares. Arrays of host data do not move. Source: MLX 0.32, backend/cuda/allocator. Raises ValueError for an array that
    has no dimension or no element, or whose elements do not follow one another; nvrtc.CompileFailed; OSError without a driver.
    """
    arrays, found = list(arrays), []
    for index, array in enumerate(arrays):
        if not array.ndim or not array.size:
            raise ValueError(f"array {index} of shape {array.shape} has no memory of its own: give it a dimension and an element")
    mx.eval(arrays)
    mx.synchronize()
    told = lambda inputs, contiguous: np.array(_launched(_address_code(), inputs, (_INPUTS, mx.uint64), contiguous=contiguous)).tolist()
    for count, inputs in _filled_up(arrays, _INPUTS):
        # MLX copies an array whose elements do not follow one another when it is told to: then the address is another one.
        own = told(inputs, False)
        passed = own if whole else told(inputs, True)
        for a, b in zip(own[:count], passed):
            if a != b:
                raise ValueError(f"the elements of array {len(found)} do not follow one another: pass mx.contiguous of it")
            found.append(a)
    return found


def copy_program() -> tuple[str, str]:
    """(name, text) of the kernel that copies p0 into p1, p2 into p3, ..., each of so many runs of 16 bytes as the last arguments say."""
    pairs = range(_COPIES)
    arguments = ", ".join([*(f"const void* p{i}" for i in range(2 * _COPIES)), "unsigned int* done", *(f"int n{i}" for i in pairs)])
    cases = "".join(f"    case {i}: from = (const uint4*)p{2 * i}; to = (uint4*)p{2 * i + 1}; count = n{i}; break;\n" for i in pairs)
    body = f"""  const uint4* from = 0;
  uint4* to = 0;
  int count = 0;
  switch (blockIdx.y) {{
{cases}  }}
  if (from != to) for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];
  if (!blockIdx.x && !blockIdx.y && !threadIdx.x) *done = 1;
"""
    return _named("copies", f"({arguments}) {{\n{body}}}\n")


@cache
def _copy_code() -> tuple[str, bytes]:
    name, text = copy_program()
    return name, code_folder().load(name, text, architecture())


def copy_into(pairs: Sequence[tuple[mx.array, mx.array]]) -> list[mx.array]:
    """Starts to copy the first array of each pair into the memory of the second, which keeps its place. Returns arrays that are there when it is
    done. The host asks for no address: what it reads from the device moves there, which stops everything.

    What MLX was told to compute before, on this thread, comes first: it may read the second ones. From then on nobody else may, until the copies
    are done; no graph of a `Driver` may be running. What is one memory already is left alone. Raises ValueError for two that differ in size, or are
    not whole runs of 16 bytes."""
    pairs = list(pairs)
    for source, target in pairs:
        if source.nbytes != target.nbytes or source.nbytes % _RUN:
            raise ValueError(f"{source.nbytes} bytes into {target.nbytes}: equal numbers of whole runs of {_RUN} bytes are copied")
    # MLX orders kernels by what they say that they write, and these do not say it. But what it was told to compute is handed to the device as a
    # whole, and the device takes one such part after the other.
    mx.async_eval([a for pair in pairs for a in pair])
    found = []
    for count, filled in _filled_up(pairs, _COPIES):
        runs = [source.nbytes // _RUN if i < count else 0 for i, (source, _) in enumerate(filled)]
        inputs = [a for pair in filled for a in pair]
        found.append(_launched(_copy_code(), inputs, (1, mx.uint32), runs, (_COPY_GROUPS, count), _COPY_THREADS))
    mx.async_eval(found)
    return found


def _filled_up(items: list, most: int) -> Iterator[tuple[int, list]]:
    """Runs of at most `most` items, for a kernel with arguments for just so many: how many there are, and these filled up with the first."""
    for first in range(0, len(items), most):
        part = items[first : first + most]
        yield len(part), part + part[:1] * (most - len(part))


def _launched(
    code: tuple[str, bytes], inputs: list[mx.array], out: tuple[int, mx.Dtype], scalars: Sequence[int] = (), groups: tuple[int, int] = (1, 1),
    threads: int = 1, contiguous: bool = False,
) -> mx.array:  # fmt: skip
    """What a kernel writes in a launch by MLX. code: its name and its code; out: numbers and their type; contiguous: inputs may be copied."""
    name, compiled = code
    (found,) = mx.fast.precompiled_cuda_kernel(
        name=name,
        compiled_source=compiled,
        inputs=inputs,
        output_shapes=[out[:1]],
        output_dtypes=[out[1]],
        scalars=list(scalars),
        grid=(groups[0] * threads, groups[1], 1),
        threadgroup=(threads, 1, 1),
        ensure_row_contiguous=contiguous,
    )
    return found
