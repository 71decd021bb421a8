"""`Lane`: one timeline. Its ids and, per layer, the rows that later tokens can see.

Every buffer is a function position -> row. A ring holds position p at slot p % rows; an append-only buffer holds group g at row g.
What a query may see follows from its own position, so rolling back is setting one integer: rows at and beyond `n` are garbage that
no query reaches before it is rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import SnapshotMismatch

# Tokens that the pools of a lane hold at least once it has room made for it.
_FIRST_ROOM = 4096


@dataclass(frozen=True)
class RingSpec:
    """A ring of `rows` slots (a power of two). A later row at position n can see positions n - lookback(n) .. n - 1."""

    name: str
    rows: int
    tail: tuple[int, ...]
    dtype: mx.Dtype
    window: int = 0
    group: int = 0
    overlap: int = 0

    def visible(self, n: int) -> range:
        """window > 0: that many rows; group > 0: the open group at n and `overlap` rows before it."""
        start = n - self.window if self.window else n - n % self.group - self.overlap
        return range(max(0, start), n)


@dataclass(frozen=True)
class PoolSpec:
    """An append-only buffer with one row per full group of `ratio` tokens; grows by `block` rows."""

    name: str
    ratio: int
    tail: tuple[int, ...]
    dtype: mx.Dtype
    block: int


@dataclass(frozen=True)
class LaneMark:
    """A position of one lane: its ids and its rings as they were."""

    serial: int
    n: int
    ids: tuple[int, ...]
    rings: dict[str, Any]


def _pool_rows(spec: PoolSpec, tokens: int) -> int:
    """Of a pool that holds so many tokens, in whole blocks."""
    return -(-tokens // (spec.ratio * spec.block)) * spec.block


class Lane:
    """host: buffers are numpy arrays that are written in place, else MLX arrays. in_place: a device writes into the memory of these as
    well, so what is held of them is copied. version: counts the times that MLX gave a buffer new contents, and maybe another place.

    ids: the committed token ids, plus those of an open trial beyond `n`. high: the highest position ever written (ruling 1 of
    the specification): rows before `high - roll` may be overwritten, so a trim below that is refused."""

    def __init__(self, specs: tuple[RingSpec | PoolSpec, ...], roll: int, host: bool = False, in_place: bool = False):
        self.specs = {s.name: s for s in specs}
        self.roll, self.host, self.in_place = roll, host, in_place
        self.version = 0
        self._serial = 0
        self.buffers: dict[str, Any] = {}
        self.reset()

    def reset(self, lost: bool = False) -> None:
        """Back to an empty timeline; the buffers start small again. Where a device writes in place those of no more than the first room stay:
        its kernels do not read rows beyond `n`, and it would fill each with zeros by a launch of its own. Elsewhere a number there that is
        not finite would be seen, weighed with 0. lost: what they hold cannot be computed, so all are new."""
        self.ids: list[int] = []
        self.n = self.high = 0
        self._room = 0
        self._marks: dict[int, int] = {}  # serial -> n of the marks that can be returned to
        most = {name: s.rows if isinstance(s, RingSpec) else _pool_rows(s, _FIRST_ROOM) for name, s in self.specs.items()}
        stay = self.in_place and not lost
        new = [name for name in self.specs if not (stay and name in self.buffers and self.buffers[name].shape[0] <= most[name])]
        self.version += bool(new)
        for spec in map(self.specs.get, new):
            self.buffers[spec.name] = self._zeros((spec.rows if isinstance(spec, RingSpec) else spec.block, *spec.tail), spec.dtype)

    def _zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> Any:
        # A host lane is only made for float32, the one dtype that its route computes in.
        return np.zeros(shape, np.float32) if self.host else mx.zeros(shape, dtype=dtype)

    def arrays(self) -> list[mx.array]:
        """What has to be evaluated with a forward."""
        return [] if self.host else list(self.buffers.values())

    def rows(self, name: str, index: Any) -> mx.array:
        """Rows of a buffer, by slice or slots; of a host lane and of one that a device writes into, a copy."""
        if self.host:
            return mx.array(self.buffers[name][np.asarray(index) if not isinstance(index, slice) else index])
        if isinstance(index, slice) and self.in_place:
            # Whoever reads a slice on the host would take the whole buffer's memory there, away from what is recorded for it.
            index = np.arange(*index.indices(self.buffers[name].shape[0]), dtype=np.int32)
        return self.buffers[name][index if isinstance(index, slice) else mx.array(index)]

    def write(self, name: str, slots: Any, rows: Any) -> None:
        """Put rows [k, ...] at ring slots [k], or at a slice of them; slots are distinct."""
        self.version += 1
        self.buffers[name][slots] = rows

    def before(self, name: str, first: int, count: int) -> list[Any]:
        """The rows of the `count` positions before `first`, which ring `name` holds: one or two runs of them, the oldest first."""
        return [self.buffers[name][slots] for slots, _ in self._runs(name, first - count, count)]

    def keep(self, name: str, first: int, rows: Any) -> None:
        """Put rows [k, ...] of positions first, first + 1, ... where ring `name` has them; of more than it holds the last ones."""
        self.version += 1
        size, count = self.specs[name].rows, rows.shape[0]
        if count < size or self.host:
            skipped = max(0, count - size)
            for slots, part in self._runs(name, first + skipped, count - skipped):
                self.buffers[name][slots] = rows[skipped + part.start : skipped + part.stop]
            return
        # All of it is new, so the old one is not even read. A copy, because rows may be many times the ring.
        turn = count - (first + count) % size
        parts = [rows[turn:], rows[count - size : turn]] if turn < count else [rows[count - size :]]
        self.buffers[name] = mx.concatenate(parts) if len(parts) > 1 else mx.contiguous(*parts)

    def _runs(self, name: str, first: int, count: int) -> list[tuple[slice, slice]]:
        """(slots of ring `name`, places among the positions) of `count` positions from `first` on, no more than the ring has."""
        size = self.specs[name].rows
        at = first % size
        cuts = [(at, 0, min(count, size - at)), (0, size - at, count)]
        return [(slice(slot, slot + b - a), slice(a, b)) for slot, a, b in cuts if a < b]

    def append(self, name: str, first: int, rows: Any) -> None:
        """Put rows at pool rows first, first + 1, ... and grow the buffer when they do not fit."""
        last, block = first + rows.shape[0], self.specs[name].block
        if last > self.buffers[name].shape[0]:
            self._grow(name, -(-last // block) * block)
        self.version += 1
        self.buffers[name][first:last] = rows

    def reserve(self, tokens: int) -> None:
        """Grow the pools to hold `tokens` tokens, to one of few sizes that are the same for all lanes: what is recorded for a lane is
        recorded anew when they grow, and serves other lanes of its sizes."""
        if tokens <= self._room:
            return
        self._room = _FIRST_ROOM
        while self._room < tokens:
            self._room += self._room // 8
        for name, spec in self.specs.items():
            if isinstance(spec, PoolSpec) and (rows := _pool_rows(spec, self._room)) > self.buffers[name].shape[0]:
                self._grow(name, rows)

    def _grow(self, name: str, count: int) -> None:
        """To `count` rows. On the host the memory itself grows; MLX has no such call, there the buffer is copied once."""
        self.version += 1
        old = self.buffers[name]
        if not self.host:
            self.buffers[name] = mx.concatenate([old, self._zeros((count - old.shape[0], *old.shape[1:]), self.specs[name].dtype)])
        elif old.flags.owndata and old.base is None:
            # Nobody holds a view of a pool beyond a call: `rows` and `state` copy.
            old.resize((count, *old.shape[1:]), refcheck=False)
        else:
            grown = self.buffers[name] = np.zeros((count, *old.shape[1:]), old.dtype)
            grown[: len(old)] = old

    def hold_rings(self) -> dict[str, Any]:
        """The rings as they are now, for `restore_rings`, until a device writes in place. Holding those of MLX makes its next write copy
        each ring once."""
        return {name: self.buffers[name].copy() if self.host else self.buffers[name][:] for name in self._rings()}

    def _rings(self) -> list[str]:
        return [name for name, spec in self.specs.items() if isinstance(spec, RingSpec)]

    def _copies(self, rings: dict[str, Any]) -> dict[str, Any]:
        """The same rings in memory of their own. A slice of MLX's shares it, and so does whatever does not compute."""
        if not self.in_place:
            return {name: ring.copy() if self.host else ring for name, ring in rings.items()}
        copies = {name: ring * mx.array(1, ring.dtype) for name, ring in rings.items()}
        mx.eval(list(copies.values()))
        return copies

    def move(self) -> None:
        """All buffers into memory that nobody else holds."""
        self.buffers.update(self._copies(self.buffers))

    def restore_rings(self, held: dict[str, Any]) -> None:
        """May be called again with the same rings."""
        self.version += 1
        self.buffers.update(self._copies(held))

    def mark(self) -> LaneMark:
        """Position n, to come back to with `rewind` however far the lane goes on. Pools are not copied: rows below n stay as they are."""
        self._serial += 1
        self._marks[self._serial] = self.n
        rings = self._copies({name: self.buffers[name] for name in self._rings()}) if self.in_place else self.hold_rings()
        return LaneMark(self._serial, self.n, tuple(self.ids[: self.n]), rings)

    def holds(self, mark: LaneMark) -> bool:
        """Whether the lane can still go back to its mark: it was never below it since."""
        return mark.serial in self._marks

    def rewind(self, mark: LaneMark) -> bool:
        """Go back to a mark of this lane. False, and nothing changes, if the lane was below it since."""
        if not self.holds(mark):
            return False
        self.restore_rings(mark.rings)
        self.ids = list(mark.ids)
        self._fall_back(mark.n)
        self.high = mark.n + self.roll
        return True

    def _fall_back(self, n: int) -> None:
        """n is the position now; pool rows that a later mark stands on will be overwritten."""
        self.n = n
        self._marks = {serial: at for serial, at in self._marks.items() if at <= n}

    def truncate(self, n: int) -> bool:
        """Go back to n <= self.n. False, and nothing changes, when the rings no longer hold what position n needs."""
        if not 0 <= n <= self.n or (n < self.high - self.roll and n > 0):
            return False
        if n == 0:
            self.reset()
        self._fall_back(n)
        del self.ids[n:]
        return True

    def common_prefix(self, ids: tuple[int, ...] | list[int]) -> int:
        """How many leading ids this lane shares with `ids`."""
        limit = min(self.n, len(ids))
        mine, theirs = np.asarray(self.ids[:limit]), np.asarray(ids[:limit])
        differ = np.flatnonzero(mine != theirs)
        return int(differ[0]) if len(differ) else limit

    def state(self) -> dict[str, np.ndarray | mx.array]:
        """Copies of what a saved conversation needs: `ids` int32 [n], and per buffer the rows below n that a later row can see,
        oldest first. Buffers without such rows are left out."""
        out: dict[str, np.ndarray | mx.array] = {"ids": np.array(self.ids[: self.n], np.int32)}
        for name, spec in self.specs.items():
            rows = self.saved_rows(spec)
            if len(rows):
                out[name] = self.rows(name, rows)
        mx.eval([v for v in out.values() if isinstance(v, mx.array)])
        return out

    def load(self, state: dict[str, np.ndarray | mx.array]) -> None:
        """Inverse of `state`, into any lane of the same specs. What lies before the saved rows is gone, so nothing below n can be
        trimmed afterwards. Raises SnapshotMismatch, and leaves an empty lane, when the arrays do not fit."""
        self.reset()
        ids = [int(i) for i in np.asarray(state["ids"])]
        self.n = len(ids)
        for name, spec in self.specs.items():
            rows, saved = self.saved_rows(spec), state.get(name)
            found = None if saved is None else (saved.shape, saved.dtype)
            if len(rows) and found != ((len(rows), *spec.tail), spec.dtype):
                self.reset()
                raise SnapshotMismatch(f"stored state: {name} is {found}, this pack needs {(len(rows), *spec.tail)} {spec.dtype}")
            if not len(rows):
                continue
            saved = np.asarray(saved) if self.host else saved
            if isinstance(spec, RingSpec):
                self.write(name, rows if self.host else mx.array(rows), saved)
            else:
                self.append(name, 0, saved)
        self.ids, self.high = ids, self.n + self.roll
        mx.eval(self.arrays())

    def saved_rows(self, spec: RingSpec | PoolSpec) -> np.ndarray:
        """int32 slots of the rows below n that a later row can see, oldest first."""
        if isinstance(spec, RingSpec):
            visible = spec.visible(self.n)
            return np.arange(visible.start, visible.stop, dtype=np.int32) % spec.rows
        return np.arange(self.n // spec.ratio, dtype=np.int32)
