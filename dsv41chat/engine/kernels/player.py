"""Plays recorded steps on an NVIDIA device: a tape becomes graphs of launches with the addresses of weights, lane and scratch memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels.driver import DeviceMemory, Driver, DriverFailed, Graph, Node, PinnedMemory, addresses, copy_into, driver
from dsv41chat.engine.kernels.nvrtc import NvrtcBackend
from dsv41chat.engine.kernels.recorder import BORDER, Launch, Memory, Place, Tape, arrange
from dsv41chat.engine.kernels.recording import Given
from dsv41chat.engine.kernels.replay import Home, handles

# Constants that tell the shape of a launch.
_SHAPE = ("K", "N", "C", "D", "I", "CH", "IH", "QK", "W")
_CHAIN, _REPEATS = 200, 5
# Bytes of an array of which the device gets a copy of its own.
_SMALL = 1 << 16


class CudaPlayer:
    """A `Player`. Tapes run one after the other, so they share one block of scratch memory and one that results are brought home in."""

    def __init__(self, backend: NvrtcBackend):
        self.backend = backend
        self._fixed: dict[Memory, int] = {}
        self._copies: list[DeviceMemory] = []
        self._scratch: DeviceMemory | None = None
        self._home: PinnedMemory | None = None

    def settle(self, buffers: Mapping[str, mx.array], keep: bool) -> Home:
        found = addresses(list(buffers.values()), whole=True)
        return Home(dict(zip(buffers, found)), handles(buffers) if keep else {})

    def load(self, tape: Tape, given: Given, results: list[Place], home: Home) -> CudaStep:
        """Compiles what is new, asks for the addresses of weights that are new and builds the graphs. Raises CompileFailed, DriverFailed."""
        on, plan = driver(), arrange(tape)
        codes = self.backend.codes([(x.kernel, [p.dtype for p in x.inputs], [p.dtype for p in x.outputs], x.constants) for x in tape.launches])
        if self._scratch is None or self._scratch.nbytes < plan.nbytes:
            self._scratch = _device(on, plan.nbytes)
        nbytes = sum(p.nbytes for p in results) + 1
        if self._home is None or self._home.nbytes < nbytes:
            self._home = PinnedMemory(nbytes)
        block = _device(on, given.memory.nbytes)
        where = {memory: self._scratch.address + at for memory, at in plan.offsets.items()} | {given.memory: block.address}
        where |= self._addresses(tape, home)
        nodes = [
            Node(on.function(*code), x.groups, x.threads, tuple(where[p.memory] + p.at for p in (*x.inputs, *x.outputs)), waits)
            for x, code, waits in zip(tape.launches, codes, plan.waits)
        ]
        cuts = [0, *tape.parts, len(nodes)]
        graphs = [Graph([n._replace(after=tuple(i - a for i in n.after)) for n in nodes[a:b]], early=True) for a, b in zip(cuts, cuts[1:])]
        parts = [(0, given.memory.nbytes)] + [(at, 2 * int(np.prod(shape))) for at, shape in given.tables.values()]
        found = [(where[p.memory] + p.at, p.nbytes) for p in results]
        labels = [_label(x) for x in tape.launches]
        return CudaStep(on, graphs, parts, block, PinnedMemory(given.memory.nbytes), found, self._home, self._scratch, nodes, labels)

    def bring_back(self, home: Home, buffers: dict[str, mx.array]) -> list[mx.array]:
        """By launches of MLX, each for dozens of buffers."""
        found = copy_into([(buffers[name], array) for name, array in home.kept.items()])
        buffers.update(handles(home.kept))
        return found

    def wait(self, arrays: list[mx.array]) -> None:
        driver().finish()
        mx.eval(arrays)  # which says what failed

    def _addresses(self, tape: Tape, home: Home) -> dict[Memory, int]:
        used = {p.memory: None for launch in tape.launches for p in (*launch.inputs, *launch.outputs)}
        new = [m for m in used if m.kind == "fixed" and m not in self._fixed]
        self._fixed.update(zip(new, addresses([m.array for m in new])))
        self._bring_in([m for m in new if m.nbytes <= _SMALL])
        return self._fixed | {m: home.addresses[m.name] for m in used if m.kind == "lane"}

    def _bring_in(self, small: list[Memory]) -> None:
        """MLX keeps small arrays in the host's memory, where every group of a kernel would fetch them from."""
        if not small:
            return
        on, offsets, total = driver(), [], 0
        for memory in small:
            offsets.append(total)
            total += -(-memory.nbytes // BORDER) * BORDER
        block = _device(on, total)
        self._copies.append(block)
        for memory, at in zip(small, offsets):
            on.copy(block.address + at, self._fixed[memory], memory.nbytes)
            self._fixed[memory] = block.address + at
        on.synchronize()


def _device(on: Driver, nbytes: int) -> DeviceMemory:
    """MLX keeps freed memory for itself; where that is what is missing, it is given back first."""
    try:
        return DeviceMemory(on.allocate(nbytes), nbytes)
    except DriverFailed:
        mx.clear_cache()
        return DeviceMemory(on.allocate(nbytes), nbytes)


def _label(launch: Launch) -> str:
    shape = [f"{k} {v}" for k, v in launch.constants.items() if k in _SHAPE]
    return f"{launch.kernel.base} {' '.join(shape)}".strip()


class CudaStep:
    """A `Loaded`. found: (address, bytes) of each result; labels: of the launches, by kernel and shape."""

    def __init__(
        self, on: Driver, graphs: list[Graph], parts: list[tuple[int, int]], device: DeviceMemory, pinned: PinnedMemory,
        found: list[tuple[int, int]], home: PinnedMemory, scratch: DeviceMemory, nodes: list[Node], labels: list[str],
    ):  # fmt: skip
        self._nodes, self._labels = nodes, labels
        self._on, self._graphs, self._parts, self._device, self._pinned = on, graphs, parts, device, pinned
        self._found, self._home, self._scratch = found, home, scratch
        self.block = pinned.array

    def play(self, part: int) -> None:
        at, nbytes = self._parts[part]
        self._on.copy_in(self._device.address + at, self._pinned, nbytes, at)
        self._graphs[part].launch()

    def results(self) -> list[np.ndarray]:
        at, out = 0, []
        for address, nbytes in self._found:
            self._on.copy_out(self._home, address, nbytes, at)
            out.append(self._home.array[at : at + nbytes])
            at += nbytes
        self._on.synchronize()
        return [a.copy() for a in out]

    def kernel_seconds(self) -> dict[str, tuple[int, float]]:
        """Of chains that are long enough for launches to follow one another; a kernel's launches read the weights of all layers in turn. The
        same rows are written again and again, which leaves a lane as it is."""
        kinds: dict[str, list[Node]] = {}
        for label, node in zip(self._labels, self._nodes):
            kinds.setdefault(label, []).append(node)
        found = {}
        for label, nodes in kinds.items():
            many = nodes * max(1, _CHAIN // len(nodes))
            chain = Graph([n._replace(after=(i - 1,) if i else ()) for i, n in enumerate(many)])
            times = [self._seconds(chain) for _ in range(_REPEATS + 1)][1:]
            found[label] = len(nodes), statistics.median(times) / len(many) * len(nodes)
        return found

    def _seconds(self, graph: Graph) -> float:
        began = time.perf_counter()
        graph.launch()
        self._on.synchronize()
        return time.perf_counter() - began
