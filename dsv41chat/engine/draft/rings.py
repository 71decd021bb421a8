"""The drafter's lanes: positional rings of the newest rows. Position p sits at slot p % rows, so rolling back is setting integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import SnapshotMismatch


def ring_rows(window: int) -> int:
    """Slots of a ring: the smallest power of two >= max(2W, W + 8), as for the trunk's windows."""
    return 1 << (max(2 * window, window + 8) - 1).bit_length()


class DraftRings:
    """`count` rings of [rows, width] that move together. Committed rows are valid_from .. end - 1; all others are garbage.

    Rows written at or beyond `end` (guesses) are never visible to a later pass unless `advance` commits them. high: one past the
    highest position ever written, because a row below high - rows has been overwritten even where a rollback has passed it.

    host: buffers and what goes in and out are numpy's, float32; stored states are MLX arrays all the same. put: writes (rings, slots
    int32 [r], rows of each ring) into the memory of the buffers, which then lie where they are for as long as the rings exist.
    """

    def __init__(self, count: int, window: int, width: int, dtype: mx.Dtype, host: bool = False, put: Callable | None = None):
        self.count, self.window, self.width, self.dtype, self.host, self._put = count, window, width, dtype, host, put
        self._array = np.asarray if host else mx.array
        self.rows = ring_rows(window)
        self.buffers: dict[str, mx.array | np.ndarray] = {}
        self.reset()

    def reset(self) -> None:
        self.valid_from = self.end = self.high = 0
        if self._put is not None and self.buffers:
            return
        zeros = lambda: np.zeros((self.rows, self.width), np.float32) if self.host else mx.zeros((self.rows, self.width), dtype=self.dtype)
        self.buffers = {f"ring.{i}": zeros() for i in range(self.count)}
        if self._put is not None:
            mx.eval(list(self.buffers.values()))

    def begin(self, first: int) -> None:
        """Committed rows follow at `first`. Rows before a gap are not the context of rows after it, so they are given up."""
        if first < self.end:
            self.truncate(first)
        elif first > self.end:
            self.valid_from = self.end = first

    def write(self, first: int, rows: Sequence[mx.array | np.ndarray]) -> None:
        """Of each ring rows [r, width], r <= rows, at positions first ..; whether they count is decided by `advance`."""
        count = rows[0].shape[0]
        slots = self.places(first, count)
        if self._put is not None:
            self._put(self, slots, rows)
        else:
            for name, new in zip(self.buffers, rows, strict=True):
                self.buffers[name][self._array(slots)] = new
        self.written(first, count)

    def places(self, first: int, count: int) -> np.ndarray:
        """int32 [count]: slots of the positions first .."""
        return ((first + np.arange(count)) % self.rows).astype(np.int32)

    def written(self, first: int, count: int) -> None:
        """Rows at positions first .. are in the buffers, whoever put them there."""
        self.high = max(self.high, first + count)

    def advance(self, end: int) -> None:
        self.end = end
        self.valid_from = max(self.valid_from, self.high - self.rows)

    def truncate(self, n: int) -> None:
        """Only rows below n remain; fewer than a window when they had been overwritten."""
        self.end = min(self.end, n)
        self.valid_from = min(max(self.valid_from, self.high - self.rows), self.end)

    def slots(self, at: np.ndarray, limit: int, own: int = 0) -> tuple[mx.array | np.ndarray, mx.array | np.ndarray]:
        """(slots int32, present) of absolute positions `at`; present are those of valid_from .. limit - 1.

        own: so many rows that are always present follow those of a one-dimensional `at`.
        """
        slots, present = self.seen(at, limit)
        if own:
            present = np.concatenate([present, np.ones(own, bool)])
        return self._array(slots), self._array(present)

    def seen(self, at: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """`slots` without rows of its own, in numpy."""
        return (np.maximum(at, 0) % self.rows).astype(np.int32), (at >= self.valid_from) & (at < limit)

    def state(self) -> dict[str, mx.array]:
        """The newest rows that a later pass can see, oldest first, and their positions [first, end]."""
        first = max(self.valid_from, self.end - self.window, 0)
        slots = self._array((np.arange(first, self.end) % self.rows).astype(np.int32))
        out = {f"draft.{i}.win": mx.array(buffer[slots]) for i, buffer in enumerate(self.buffers.values())}
        out["draft.pos"] = mx.array(np.array([first, self.end], np.int32))
        mx.eval(list(out.values()))
        return out

    def load(self, state: dict[str, mx.array], n: int) -> None:
        """Inverse of `state` at position n. Without rows of that position drafting starts blind: slower at first, same tokens.

        Raises SnapshotMismatch, and starts blind, when the arrays are not of this drafter.
        """
        self.reset()
        self.valid_from = self.end = self.high = n
        if "draft.pos" not in state:
            return
        first, end = (int(v) for v in np.array(state["draft.pos"]))
        if end != n:
            return
        for i in range(self.count):
            rows = state.get(f"draft.{i}.win")
            found = None if rows is None else (rows.shape, rows.dtype)
            if found != ((end - first, self.width), self.dtype) or end - first > self.window:
                raise SnapshotMismatch(f"stored drafter state: ring {i} is {found}, expected {(end - first, self.width)} {self.dtype}")
        if end > first:
            rows = [state[f"draft.{i}.win"] for i in range(self.count)]
            self.write(first, [np.asarray(a) for a in rows] if self.host else rows)
        self.valid_from, self.end = first, end
        mx.eval([] if self.host else list(self.buffers.values()))
