"""The drafter's lanes: positional rings of the newest rows. Position p sits at slot p % rows, so rolling back is setting integers."""

from __future__ import annotations

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

    host: buffers and what goes in and out are numpy's, float32; stored states are MLX arrays all the same.
    """

    def __init__(self, count: int, window: int, width: int, dtype: mx.Dtype, host: bool = False):
        self.count, self.window, self.width, self.dtype, self.host = count, window, width, dtype, host
        self._array = np.asarray if host else mx.array
        self.rows = ring_rows(window)
        self.reset()

    def reset(self) -> None:
        shape = self.rows, self.width
        self.buffers = [np.zeros(shape, np.float32) if self.host else mx.zeros(shape, dtype=self.dtype) for _ in range(self.count)]
        self.valid_from = self.end = self.high = 0

    def begin(self, first: int) -> None:
        """Committed rows follow at `first`. Rows before a gap are not the context of rows after it, so they are given up."""
        if first < self.end:
            self.truncate(first)
        elif first > self.end:
            self.valid_from = self.end = first

    def write(self, ring: int, first: int, rows: mx.array | np.ndarray) -> None:
        """rows [r, width], r <= rows, at positions first ..; whether they count is decided by `advance`."""
        slots = (first + np.arange(rows.shape[0])) % self.rows
        self.buffers[ring][self._array(slots.astype(np.int32))] = rows
        self.high = max(self.high, first + rows.shape[0])

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
        present = (at >= self.valid_from) & (at < limit)
        if own:
            present = np.concatenate([present, np.ones(own, bool)])
        return self._array((np.maximum(at, 0) % self.rows).astype(np.int32)), self._array(present)

    def state(self) -> dict[str, mx.array]:
        """The newest rows that a later pass can see, oldest first, and their positions [first, end]."""
        first = max(self.valid_from, self.end - self.window, 0)
        slots = self._array((np.arange(first, self.end) % self.rows).astype(np.int32))
        out = {f"draft.{i}.win": mx.array(buffer[slots]) for i, buffer in enumerate(self.buffers)}
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
        for i in range(self.count):
            if end > first:
                rows = state[f"draft.{i}.win"]
                self.write(i, first, np.asarray(rows) if self.host else rows)
        self.valid_from, self.end = first, end
        mx.eval([] if self.host else self.buffers)
