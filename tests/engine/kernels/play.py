"""Plays recorded steps under the CPU shim: launches run in any order that their waits allow, in memory that starts as garbage."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels.recorder import Memory, Place, Tape, arrange
from dsv41chat.engine.kernels.recording import Given
from tests.engine.kernels.shim import _aligned, _library, _program, _raw


class ShimPlayer:
    """A `Player`. played: names of the kernels of all launches."""

    def __init__(self, seed: int = 1):
        self.random, self.fixed, self.played = random.Random(seed), {}, []

    def load(self, tape: Tape, given: Given, results: list[Place], buffers: Mapping[str, mx.array]) -> ShimStep:
        return ShimStep(self, tape, given, results, buffers)


class ShimStep:
    def __init__(self, player: ShimPlayer, tape: Tape, given: Given, results: list[Place], buffers: dict[str, mx.array]):
        self.player, self.tape, self.wanted, self.buffers, self.given = player, tape, results, buffers, given.memory
        self.plan = arrange(tape)
        self.block = _aligned(np.full(given.memory.nbytes, 0x7B, np.uint8))
        self.scratch = _aligned(np.full(self.plan.nbytes, 0x7B, np.uint8))
        self.lane: dict[Memory, np.ndarray] = {}

    def play(self, part: int) -> None:
        cuts = [0, *self.tape.parts, len(self.tape.launches)]
        first, last = cuts[part : part + 2]
        if part == 0:
            used = {p.memory for x in self.tape.launches for p in (*x.inputs, *x.outputs) if p.memory.kind == "lane"}
            self.lane = {m: _aligned(_raw(self.buffers[m.name])) for m in used}
        left = set(range(first, last))
        while left:
            ready = sorted(i for i in left if not left & set(self.plan.waits[i]))
            i = self.player.random.choice(ready)
            self._launch(i)
            left.remove(i)
        if last == len(self.tape.launches):
            for memory, raw in self.lane.items():
                like = self.buffers[memory.name]
                self.buffers[memory.name] = mx.array(raw).view(like.dtype).reshape(like.shape)

    def _launch(self, index: int) -> None:
        x = self.tape.launches[index]
        self.player.played.append(x.kernel.base)
        library = _library(_program(x.kernel, "cuda", [(p.dtype, False) for p in x.inputs], [p.dtype for p in x.outputs], x.constants))
        pointers = (ctypes.c_void_p * (len(x.inputs) + len(x.outputs)))(*[self._address(p) for p in (*x.inputs, *x.outputs)])
        library.run(pointers, *map(ctypes.c_int, (*x.groups, x.threads)))

    def _address(self, place: Place) -> int:
        memory = place.memory
        if memory in self.plan.offsets:
            assert place.at + place.nbytes <= memory.nbytes
            return self.scratch.ctypes.data + self.plan.offsets[memory] + place.at
        if memory is self.given:
            return self.block.ctypes.data + place.at
        if memory.kind == "lane":
            return self.lane[memory].ctypes.data + place.at
        if memory not in self.player.fixed:
            assert memoryview(memory.array.view(mx.uint8)).c_contiguous, "kernels read rows that follow one another"
            self.player.fixed[memory] = _aligned(_raw(memory.array))
        return self.player.fixed[memory].ctypes.data + place.at

    def results(self) -> list[np.ndarray]:
        return [self.scratch[self.plan.offsets[p.memory] + p.at :][: p.nbytes].copy() for p in self.wanted]
