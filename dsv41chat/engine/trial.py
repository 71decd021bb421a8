"""What a forward gives, and what every trunk can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from dsv41chat.engine.lane import Lane


@dataclass
class Trial:
    """Nothing of it counts until the lane commits.

    logits float32 [rows asked for, vocab]; of a recorded step (`kernels.replay`) in numpy, and such a step has no streams to show.
    taps [n, width]: what the build's drafter reads of every row, None unless asked for: the mean over the streams at each tapped layer,
    side by side (DSpark), or the streams after the last layer (MTP). Of a recorded step the bits of bfloat16 numbers, uint16 in numpy.
    streams [n, S, D] after the last layer, None of rows of which neither logits nor taps were asked for; pre [n, S]: the coefficients that
    collapse them (V4.1), None where the head has its own. done: everything is computed already, as it is after a recorded step.
    """

    start: int
    count: int
    logits: mx.array | np.ndarray | None
    taps: mx.array | np.ndarray | None
    streams: mx.array | None
    pre: mx.array | None
    done: bool = False

    @classmethod
    def of(cls, start: int, count: int, logits: Any, taps: Any, streams: Any, pre: Any) -> Trial:
        """From the arrays of a forward, MLX's or numpy's."""
        return cls(start, count, *(mx.array(a) if isinstance(a, np.ndarray) else a for a in (logits, taps, streams, pre)))

    def arrays(self) -> list[mx.array]:
        """What is computed with the forward. Taps are left to the drafter that reads them: while it is parked nobody does."""
        return [a for a in (self.logits, self.streams, self.pre) if isinstance(a, mx.array)]


class Trunk(Protocol):
    """config: of the pack. tables: the n-gram tables, None without any."""

    config: Any
    tables: Any

    def new_lane(self) -> Lane: ...

    def prefetch(self, known: list[int], position: int, ids: Sequence[int]) -> None: ...

    def forward(
        self, lane: Lane, ids: list[int], start: int, logits_from: int | None = 0, want_taps: bool = False, ahead: Sequence[int] = ()
    ) -> Trial: ...
