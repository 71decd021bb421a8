"""Plays recorded steps under the CPU shim: launches run in any order that their waits allow, in memory that starts as garbage."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels.recorder import Memory, Place, Tape, arrange
from dsv41chat.engine.kernels.recording import Given
from dsv41chat.engine.kernels.replay import Home, handles
from tests.engine.kernels.shim import _aligned, _library, _program, _raw


class ShimPlayer:
    """A `Player`. played: names of the kernels of all launches. late: lanes that come home when that is waited for, and no sooner."""

    def __init__(self, seed: int = 1):
        self.random, self.fixed, self.played = random.Random(seed), {}, []
        self.late: list[tuple[Home, dict[str, mx.array]]] = []

    def settle(self, buffers: Mapping[str, mx.array], keep: bool) -> Home:
        return Home({name: _memory(buffer) for name, buffer in buffers.items()}, handles(buffers) if keep else {})

    def load(self, tape: Tape, given: Given, results: list[Place], home: Home) -> ShimStep:
        return ShimStep(self, tape, given, results, home)

    def bring_back(self, home: Home, buffers: dict[str, mx.array]) -> list[mx.array]:
        mx.eval(list(buffers.values()))
        self.late.append((home, dict(buffers)))
        buffers.update(handles(home.kept))
        return []

    def wait(self, arrays: list[mx.array]) -> None:
        mx.eval(arrays)
        while self.late:
            home, buffers = self.late.pop(0)
            for name, array in home.kept.items():
                new, old = _memory(buffers[name]), home.addresses[name]
                assert new.shape == old.shape and buffers[name].shape == array.shape
                if new.ctypes.data != old.ctypes.data:
                    ctypes.memmove(old.ctypes.data, new.ctypes.data, new.nbytes)


def _memory(array: mx.array) -> np.ndarray:
    """uint8: where MLX keeps an array."""
    mx.eval(array)
    return np.array(array.view(mx.uint8), copy=False).reshape(-1)


class ShimStep:
    """Reads and writes the memory that the lane's buffers had when it was loaded, as a device does."""

    def __init__(self, player: ShimPlayer, tape: Tape, given: Given, results: list[Place], home: Home):
        self.player, self.tape, self.wanted, self.given = player, tape, results, given.memory
        self.plan = arrange(tape)
        self.block = _aligned(np.full(given.memory.nbytes, 0x7B, np.uint8))
        self.scratch = _aligned(np.full(self.plan.nbytes, 0x7B, np.uint8))
        used = {p.memory for x in tape.launches for p in (*x.inputs, *x.outputs) if p.memory.kind == "lane"}
        self.memory = {m: home.addresses[m.name] for m in used}
        self.lane: dict[Memory, np.ndarray] = {}

    def play(self, part: int) -> None:
        assert not self.player.late, "a lane is not home yet"
        cuts = [0, *self.tape.parts, len(self.tape.launches)]
        first, last = cuts[part : part + 2]
        if part == 0:
            self.lane = {m: _aligned(raw.copy()) for m, raw in self.memory.items()}
        left = set(range(first, last))
        while left:
            ready = sorted(i for i in left if not left & set(self.plan.waits[i]))
            i = self.player.random.choice(ready)
            self._launch(i)
            left.remove(i)
        if last == len(self.tape.launches):
            for memory, raw in self.lane.items():
                ctypes.memmove(self.memory[memory].ctypes.data, raw.ctypes.data, raw.nbytes)

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
