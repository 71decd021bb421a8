"""Plays recorded steps on an NVIDIA device: a tape becomes graphs of launches with the addresses of weights, lane and scratch memory."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels.driver import DeviceMemory, Driver, Graph, Node, PinnedMemory, addresses, driver
from dsv41chat.engine.kernels.nvrtc import NvrtcBackend
from dsv41chat.engine.kernels.recorder import Memory, Place, Tape, arrange
from dsv41chat.engine.kernels.recording import Given


class CudaPlayer:
    """A `Player`. Tapes run one after the other, so they share one block of scratch memory and one that results are brought home in."""

    def __init__(self, backend: NvrtcBackend):
        self.backend = backend
        self._fixed: dict[Memory, int] = {}
        self._scratch: DeviceMemory | None = None
        self._home: PinnedMemory | None = None

    def load(self, tape: Tape, given: Given, results: list[Place], buffers: Mapping[str, mx.array]) -> CudaStep:
        """Compiles what is new, asks for the addresses and builds the graphs. Raises CompileFailed, DriverFailed."""
        on, plan = driver(), arrange(tape)
        codes = self.backend.codes([(x.kernel, [p.dtype for p in x.inputs], [p.dtype for p in x.outputs], x.constants) for x in tape.launches])
        if self._scratch is None or self._scratch.nbytes < plan.nbytes:
            self._scratch = DeviceMemory(on.allocate(plan.nbytes), plan.nbytes)
        nbytes = sum(p.nbytes for p in results)
        if self._home is None or self._home.nbytes < nbytes:
            self._home = PinnedMemory(nbytes)
        block = DeviceMemory(on.allocate(given.memory.nbytes), given.memory.nbytes)
        where = {memory: self._scratch.address + at for memory, at in plan.offsets.items()} | {given.memory: block.address}
        where |= self._addresses(tape, buffers)
        nodes = [
            Node(on.function(*code), x.groups, x.threads, tuple(where[p.memory] + p.at for p in (*x.inputs, *x.outputs)), waits)
            for x, code, waits in zip(tape.launches, codes, plan.waits)
        ]
        cuts = [0, *tape.parts, len(nodes)]
        graphs = [Graph([n._replace(after=tuple(i - a for i in n.after)) for n in nodes[a:b]]) for a, b in zip(cuts, cuts[1:])]
        parts = [(0, given.memory.nbytes)] + [(at, 2 * int(np.prod(shape))) for at, shape in given.tables.values()]
        found = [(where[p.memory] + p.at, p.nbytes) for p in results]
        return CudaStep(on, graphs, parts, block, PinnedMemory(given.memory.nbytes), found, self._home, self._scratch)

    def _addresses(self, tape: Tape, buffers: Mapping[str, mx.array]) -> dict[Memory, int]:
        used = {p.memory: None for launch in tape.launches for p in (*launch.inputs, *launch.outputs)}
        new = [m for m in used if m.kind == "fixed" and m not in self._fixed]
        self._fixed.update(zip(new, addresses([m.array for m in new])))
        lane = [m for m in used if m.kind == "lane"]
        return self._fixed | dict(zip(lane, addresses([buffers[m.name] for m in lane])))


class CudaStep:
    """A `Loaded`. found: (address, bytes) of each result."""

    def __init__(
        self, on: Driver, graphs: list[Graph], parts: list[tuple[int, int]], device: DeviceMemory, pinned: PinnedMemory,
        found: list[tuple[int, int]], home: PinnedMemory, scratch: DeviceMemory,
    ):  # fmt: skip
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
