"""The halves of a layer as compiled graphs: a decode step on a GPU is then built from few calls instead of one per kernel.

A graph is traced through whatever the routes have put in place, so its bits are those of the calls one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from dsv41chat.engine.kernels.launch import MOST_ROWS
from dsv41chat.engine.kernels.sites import Routed, bare
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear

HALVES = ("before", "after")


class Joined:
    """A half of a layer, compiled per number of rows and form of its arguments in calls of at most MOST_ROWS rows."""

    def __init__(self, half: Callable):
        self.half = half
        self.graphs: dict[tuple, Callable] = {}
        # By form of the arguments: which results are None.
        self.absent: dict[tuple, tuple[bool, ...]] = {}

    def __call__(self, *args: Any) -> Any:
        if args[0].shape[0] > MOST_ROWS:
            return self.half(*args)
        form = tuple(a is None for a in args)
        graph = self.graphs.get(form)
        if graph is None:
            graph = self.graphs[form] = mx.compile(self._of_arrays(form))
        found = iter(graph(*(a for a in args if a is not None)))
        return tuple(None if gone else next(found) for gone in self.absent[form])

    def _of_arrays(self, form: tuple[bool, ...]) -> Callable:
        def call(*arrays: mx.array) -> tuple[mx.array, ...]:
            left = iter(arrays)
            found = self.half(*(None if gone else next(left) for gone in form))
            self.absent[form] = tuple(a is None for a in found)
            return tuple(a for a in found if a is not None)

        return call


def join(trunk: Any) -> None:
    """Put graphs in place of the halves of every layer, but for those in which trellis-coded experts are called one by one: which ones is
    looked up on the host, and no graph can wait for that."""
    for layer in trunk.layers:
        one_by_one = isinstance(bare(layer.moe.w1), Exl3ExpertLinear) and not isinstance(layer.moe.experts, Routed)
        for name in HALVES:
            if name != "after" or not one_by_one:
                setattr(layer, name, Joined(getattr(layer, name)))


def part(trunk: Any) -> None:
    """Take the graphs away again."""
    for layer in trunk.layers:
        for name in HALVES:
            vars(layer).pop(name, None)


def forget(trunk: Any) -> None:
    """What the layers call has changed: graphs are traced anew."""
    for layer in getattr(trunk, "layers", ()):
        for name in HALVES:
            if isinstance(half := vars(layer).get(name), Joined):
                half.graphs.clear()


@contextmanager
def parted(trunk: Any) -> Iterator[None]:
    """Inside, every step is built and the halves are called as they are, for measurements that look into them."""
    replay, trunk.routes.replay = trunk.routes.replay, None
    joined = any(name in vars(layer) for layer in trunk.layers for name in HALVES)
    part(trunk)
    try:
        yield
    finally:
        trunk.routes.replay = replay
        if joined:
            join(trunk)
