"""A decode step that is recorded once and played again: one graph of kernels per step instead of hundreds of calls.

A shadow of the trunk, the same modules with every operation recording its launches, is run once per `Form` and lane. What it recorded is
loaded on the device with the memory of the weights and of the lane, and every later step of that form only brings its numbers: ids,
rotations, slots, table rows. The launches write into the lane's own buffers. Wider calls, and calls for other results, take the
trunk's way.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from dsv41chat.engine.engram.fetch import Ticket
from dsv41chat.engine.engram.values import take_host_values
from dsv41chat.engine.kernels.fewer import fewer
from dsv41chat.engine.kernels.heritage import Heritage
from dsv41chat.engine.kernels.launch import MOST_ROWS
from dsv41chat.engine.kernels.recorder import Place, Recorder, Tape
from dsv41chat.engine.kernels.recording import Filler, Form, Given, RecordedLane, RecordedRows, form_of
from dsv41chat.engine.kernels.routes import Declined, nearest
from dsv41chat.engine.kernels.sites import Site, bare, sites, width
from dsv41chat.engine.lane import Lane
from dsv41chat.engine.rows import Rows
from dsv41chat.engine.rows_v4 import RowsV4
from dsv41chat.engine.trial import Trial

# Steps of other forms that a lane keeps ready: of each size of window the few that positions in a group and the length of the text make.
_KEPT_FORMS = 32
# A lane's buffers of at most so many bytes keep the memory that its steps were recorded for: what MLX makes of them in a prompt is copied back.
# As much is kept of lanes that are gone.
KEPT_BYTES = 128 << 20
_TRIES = 3
# Operations whose work is part of others in a trunk.
_UNUSED = frozenset({"mix", "head_mix", "core"})
_MODULES = ("dsv41chat.engine.nn.", "dsv41chat.engine.trunk_")


class Loaded(Protocol):
    """A tape that is ready to run. block: the given block in host memory, uint8."""

    block: np.ndarray

    def play(self, part: int) -> None:
        """Bring in the block as it is now and set the launches of a part running, after those of the parts before."""
        ...

    def results(self) -> list[np.ndarray]:
        """Wait for all parts; the bytes of each result, in memory of their own."""
        ...

    def kernel_seconds(self) -> dict[str, tuple[int, float]]:
        """By kernel, with what tells its shape: launches, and seconds of all of them one after the other. Needs a step that was played."""
        ...


@dataclass(frozen=True)
class Home:
    """Where a lane's buffers lie, which recorded launches write in place. addresses: as the player understands them. kept: handles of the
    buffers, with which they stay there whatever MLX writes; empty where they are left to MLX."""

    addresses: dict[str, Any]
    kept: dict[str, mx.array]

    def fits(self, buffers: Mapping[str, mx.array]) -> bool:
        return bool(self.kept) and all(buffers[name].shape == array.shape for name, array in self.kept.items())

    @property
    def nbytes(self) -> int:
        """Of the buffers that are kept."""
        return sum(array.nbytes for array in self.kept.values())


class Player(Protocol):
    """What runs tapes: a device, or in tests the CPU shim."""

    def settle(self, buffers: Mapping[str, mx.array], keep: bool) -> Home:
        """Look where buffers lie, by the name in their memory; evaluates them."""
        ...

    def bring_back(self, home: Home, buffers: dict[str, mx.array]) -> list[mx.array]:
        """Put the contents of `buffers` where those lie that `home` keeps, and these into `buffers`; home.fits(buffers). Comes after all that MLX was
        told to compute. Returns what has to be waited for before anybody looks at the buffers or writes to them."""
        ...

    def wait(self, arrays: list[mx.array]) -> None:
        """Until these are computed, and all before them; the next step begins at once."""
        ...

    def load(self, tape: Tape, given: Given, results: list[Place], home: Home) -> Loaded:
        """Ready to run on the buffers of `home`."""
        ...


def handles(buffers: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The same arrays as objects of their own: a write to a lane's array makes that object another array."""
    return {name: copy.copy(buffer) for name, buffer in buffers.items()}


@dataclass
class _Ready:
    """What is loaded for a lane, for buffers that lie where they lay in this version of it. leave: gives it up for other lanes."""

    version: int
    forms: dict[Form, Step]
    home: Home
    leave: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Step:
    """tables: byte and shape of the values of each slot of n-gram rows in the block."""

    loaded: Loaded
    fill: Filler
    tables: dict[int, tuple[int, tuple[int, ...]]]


class Replay:
    """Of one trunk. refused: sites whose kernels were found wrong, by op and key, with the reason. recorded: steps so far. Raises Declined
    where something of the trunk is not made of kernels alone."""

    def __init__(
        self, trunk: Any, recorder: Recorder, player: Player, builders: Mapping[str, Callable[[Site], Callable]],
        refused: Mapping[tuple[str, str], str],
    ):  # fmt: skip
        self.trunk, self.recorder, self.player, self.builders = trunk, recorder, player, builders
        self.shadow = shadow(trunk, builders, refused)
        engrams = {layer.plan.engram_slot: layer.engram for layer in trunk.layers if getattr(layer, "engram", None) is not None}
        self._widths = _Widths({slot: width(bare(bare(engram).wkv)) for slot, engram in engrams.items()})
        self._lanes: WeakKeyDictionary[Lane, _Ready] = WeakKeyDictionary()
        self._heritage: Heritage[_Ready] = Heritage(KEPT_BYTES)
        self.recorded = 0
        try:
            launches = len(self.record(self._lane(), 0, 1, True, False)[0].launches)
        except (TypeError, AttributeError) as error:
            raise Declined(f"something between the kernels is not one: {error}") from error
        self.key = f"{len(trunk.layers)} layers, {launches} launches, plan {hashlib.sha256(repr(trunk.plan).encode()).hexdigest()[:12]}"

    def _lane(self) -> Lane:
        return Lane(self.trunk.lane_specs(), self.trunk.config.roll_rows, in_place=True)

    def check(self) -> float:
        """The relative L2 distance of logits to those of steps that are built, after a short prompt; the first of several tries that is near
        enough, else the least, because a near tie may choose other experts. Without table rows; their kernels were checked by themselves."""
        return nearest(self._distance, _TRIES)

    def _distance(self, seed: int) -> float:
        c = self.trunk.config
        ids = np.random.default_rng(seed).integers(0, c.vocab_size, 2 * MOST_ROWS + 3)
        found = []
        for replayed in (True, False):
            lane, at, rows = self._lane(), 0, []
            for count in (2 * MOST_ROWS - 1, 1, 3):
                part = ids[at : at + count]
                step = self.forward if replayed and count <= MOST_ROWS else self._built
                rows.append(np.array(step(lane, part, at, None, 0, False).logits)[-3:])
                at += count
            found.append(np.concatenate(rows[1:]))
        return float(np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[1]))

    def _built(self, lane: Lane, ids: np.ndarray, start: int, ticket: None, logits_from: int, taps: bool) -> Trial:
        trial = self.trunk.run(lane, rows_of(self.trunk, ids, start), ticket, logits_from, taps)
        mx.eval(trial.arrays(), lane.arrays())
        return trial

    def takes(self, count: int, logits_from: int | None) -> bool:
        c = self.trunk.config
        return count <= min(MOST_ROWS, c.ring_rows - c.sliding_window) and logits_from in (0, None)

    def forward(self, lane: Lane, ids: np.ndarray, start: int, ticket: Ticket | None, logits_from: int | None, want_taps: bool) -> Trial:
        """As the trunk's, for a call that it takes: logits of all rows or of none. The results are there on return."""
        form = len(ids), logits_from == 0, want_taps
        step = self.ready(lane, start, *form)
        loaded = step.loaded
        step.fill(ids, start)
        try:
            loaded.play(0)
            for part, (slot, (at, shape)) in enumerate(step.tables.items(), 1):
                # Values of tables are bfloat16 numbers in float32; rows of zeros add nothing.
                found = 0 if ticket is None else np.ascontiguousarray(take_host_values(ticket, slot), np.float32).view(np.uint32) >> 16
                loaded.block[at : at + 2 * math.prod(shape)].view(np.uint16).reshape(shape)[...] = found
                loaded.play(part)
            if len(ids) == 1:
                self._prepare(self._lanes[lane], start + 1, *form)
        finally:
            # Also when a table row cannot be read: the block and the lane belong to the parts that run until they are done.
            results = loaded.results()
        logits = results.pop(0).view(np.float32).reshape(len(ids), -1) if logits_from == 0 else None
        taps = [tap.view(np.uint16).reshape(len(ids), -1) for tap in results]
        return Trial(start, len(ids), logits, np.concatenate(taps, axis=-1) if taps else None, None, None, True)

    def compute(self, arrays: list[mx.array], lane: Lane, start: int, count: int, taps: bool) -> None:
        """Compute what was built for a lane, where a step of `count` rows at `start` is what comes next. While the device works, its buffers are
        set on their way to where the step wants them, and what the step brings is made."""
        lane.reserve(start + count)
        mx.async_eval(arrays, lane.arrays())
        before = self._lanes.get(lane)
        fits = lambda found: found.home.fits(lane.buffers)
        ready = self._heritage.take(fits) if before is None else before if fits(before) else None
        if ready is None:
            # Where its buffers will lie is found when the step is there, by waiting.
            mx.eval(arrays, lane.arrays())
            return
        moved = self.player.bring_back(ready.home, lane.buffers)
        if ready is not before:
            self._own(lane, ready)
        self._prepare(ready, start, count, True, taps)
        self.player.wait([*arrays, *moved])
        ready.version = lane.version

    def _own(self, lane: Lane, ready: _Ready) -> None:
        self._lanes[lane] = ready
        ready.leave = self._heritage.will(lane, ready, ready.home.nbytes)

    def _prepare(self, ready: _Ready, start: int, count: int, logits: bool, taps: bool) -> None:
        """What a step that is loaded brings to a position, but for its ids."""
        step = ready.forms.get(form_of(self.trunk, start, count, logits, taps))
        if step is not None:
            step.fill.prepare(start)

    def ready(self, lane: Lane, start: int, count: int, logits: bool, taps: bool) -> Step:
        """The step of a position of a lane, loaded."""
        lane.reserve(start + count)
        ready = self._lanes.get(lane)
        if ready is None or ready.version != lane.version:
            ready = self._settled(lane, ready)
        form = form_of(self.trunk, start, count, logits, taps)
        if form not in ready.forms:
            if len(ready.forms) >= _KEPT_FORMS:
                ready.forms.pop(next(iter(ready.forms)))
            ready.forms[form] = self._load(lane, ready.home, start, count, logits, taps)
        return ready.forms[form]

    def _settled(self, lane: Lane, before: _Ready | None) -> _Ready:
        """What is loaded for a lane that MLX wrote to: all that was, where its buffers can lie where they lay; else what another lane of
        its shapes has left."""
        ready = before
        if before is None or not before.home.fits(lane.buffers):
            ready = self._heritage.take(lambda left: left.home.fits(lane.buffers))
            if before is not None:
                # What MLX has not written since lies in the memory that other lanes may have from now on.
                lane.move()
                before.leave()
        if ready is not None:
            self.player.wait(self.player.bring_back(ready.home, lane.buffers))
            ready.version = lane.version
        else:
            # Buffers that are too large to be there twice are left to MLX.
            keep = sum(b.nbytes for b in lane.buffers.values()) <= KEPT_BYTES
            ready = _Ready(lane.version, {}, self.player.settle(lane.buffers, keep))
        if ready is not before:
            self._own(lane, ready)
        return ready

    def _load(self, lane: Lane, home: Home, start: int, count: int, logits: bool, taps: bool) -> Step:
        self.recorded += 1
        tape, given, results = self.record(lane, start, count, logits, taps)
        loaded = self.player.load(tape, given, results, home)
        rows = lambda at: rows_of(self.trunk, np.zeros(count, np.int64), at, host=True)
        return Step(loaded, Filler(given, loaded.block, rows), given.tables)

    def record(
        self, lane: Lane, start: int, count: int, logits: bool, taps: bool, layers: int | None = None
    ) -> tuple[Tape, Given, list[Place]]:
        """(launches, the block that they need, results: logits, then taps). layers: of the first ones only."""
        c, tape = self.trunk.config, self.recorder.begin()
        given = Given(getattr(c, "candidate_block_size", 1))
        rows = RecordedRows(self.trunk, self.recorder, given, start, count, lane)
        recorded = RecordedLane(lane, self.recorder, given)
        trunk = copy.copy(self.shadow)
        trunk.layers = trunk.layers[:layers]
        trial = trunk.run(recorded, rows, self._widths, 0 if logits else None, taps)
        found = trial.taps if isinstance(trial.taps, tuple) else () if trial.taps is None else (trial.taps,)
        results = [*([trial.logits] if logits else []), *found]
        for place in results:
            place.memory.kind = "result"
        return fewer(tape), given, results


@dataclass(frozen=True)
class _Widths:
    """Stands in a ticket's place: how wide the values of a slot are."""

    of: dict[int, int]

    def ready(self, slot: int) -> bool:
        return True


def rows_of(trunk: Any, ids: np.ndarray, start: int, host: bool = False) -> Rows:
    c = trunk.config
    if c.family == "v4":
        return RowsV4(ids, start, c.sliding_window, c.ring_rows, trunk.frequencies, host)
    return Rows(ids, start, c.sliding_window, c.ring_rows, trunk.frequencies, c.image_token_id, host)


def shadow(
    module: Any, builders: Mapping[str, Callable[[Site], Callable]], refused: Mapping[tuple[str, str], str], trunk: Any = None
) -> Any:  # fmt: skip
    """The modules again, around the same arrays, with all that `builders` build in place of their operations. trunk: that they belong to,
    where it is not the module itself. Raises Declined."""
    made = _copied(module)
    for site in list(sites(made, made if trunk is None else trunk)):
        if site.op not in builders:
            continue
        if (reason := refused.get((site.op, site.key))) and site.op not in _UNUSED:
            raise Declined(reason)
        try:
            call = builders[site.op](site)
        except Declined as reason:
            if str(reason):
                raise Declined(f"{site.op}, {site.key}: {reason}") from reason
            continue
        setattr(site.owner, site.field, call)
    return made


def _copied(value: Any) -> Any:
    """Modules anew, without what was put in place of their operations; all else as it is."""
    value = bare(value)
    if isinstance(value, (list, tuple)) and any(map(_is_module, value)):
        return type(value)(map(_copied, value))
    if not _is_module(value):
        return value
    made = copy.copy(value)
    vars(made).clear()
    for f in fields(value):
        vars(made)[f.name] = _copied(getattr(value, f.name))
    return made


def _is_module(value: Any) -> bool:
    value = bare(value)
    return is_dataclass(value) and type(value).__module__.startswith(_MODULES)
