"""A drafter's pass that is recorded once and played again, as `replay` does it with the steps of the trunk.

A pass brings the pending token, rotations and slots of the rings; streams, stages, head, the Markov chain and greedy choices happen on
the device, and what comes home are guesses. Committed rows go into the rings in the same way, `MOST_ROWS` at a time; those of a prompt
are built, and then put in their places, so that nothing but recorded launches ever writes into a ring's memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from dsv41chat.engine.draft.base import Taps, check_spread, host_choice
from dsv41chat.engine.draft.dspark import DSparkModel
from dsv41chat.engine.draft.rings import DraftRings
from dsv41chat.engine.kernels.fewer import fewer
from dsv41chat.engine.kernels.glue import STREAMS, Collapse, Embed, Guess, HeadMix, RowNorm, Scatter, Settle
from dsv41chat.engine.kernels.gpu import core, wide_product
from dsv41chat.engine.kernels.heritage import Heritage
from dsv41chat.engine.kernels.hyper import Enter
from dsv41chat.engine.kernels.launch import MOST_ROWS
from dsv41chat.engine.kernels.recorder import Memory, Place, Recorder, Tape
from dsv41chat.engine.kernels.recording import Given
from dsv41chat.engine.kernels.replay import KEPT_BYTES, Home, Loaded, Replay, shadow
from dsv41chat.engine.kernels.routes import Declined, nearest
from dsv41chat.engine.kernels.sites import Site, bare, stored, width
from dsv41chat.engine.ops.rope import host_table
from dsv41chat.engine.sampling import SamplingParams

_TRIES = 3
Recorded = tuple[Tape, Given, list[Place]]


@dataclass(frozen=True)
class Pass:
    """What a pass brings. slots int32, present bool [window]: ring rows that its rows see."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    present: np.ndarray


@dataclass(frozen=True)
class Committed:
    """Rows for the rings. taps: bits of bfloat16 [MOST_ROWS, layers * D]; at int32 [MOST_ROWS]: their slots, -1 for none."""

    taps: np.ndarray
    positions: np.ndarray
    at: np.ndarray


@dataclass(frozen=True)
class Written:
    """Ring rows that are made already. rows: bits of bfloat16 [window, C] of each ring; at int32 [window], -1 for none."""

    rows: Sequence[np.ndarray]
    at: np.ndarray


@dataclass(frozen=True)
class Drawn:
    """The token before a guess that is drawn on the host."""

    token: np.ndarray


@dataclass(frozen=True)
class _Ready:
    """What is loaded for rings, by form: a step and what writes its block."""

    home: Home
    steps: dict[tuple, tuple[Loaded, Callable]]


class RecordedStage:
    """A stage of `draft.stage` with places in and out, wired like a layer of the trunk."""

    def __init__(self, recorder: Recorder, model: DSparkModel, stage: Any, index: tuple[mx.array, mx.array], shadowed: Callable, rope: int):
        """index: entry numbers and presence of the block's own rows, int32 and bool [block, block]. Raises Declined."""
        self.lagged, self.index = model.lagged, index
        self.into_attention = Enter(recorder, bare(stage.attn_mix), stage.attn_norm, model.eps, model.lagged)
        self.into_experts = Enter(recorder, bare(stage.ffn_mix), stage.ffn_norm, model.eps, model.lagged)
        self.attention, self.moe = shadowed([stage.attention, stage.moe])
        self.core = core(recorder, stage.attention, rope, model.window)

    def __call__(self, streams: tuple, table: tuple[Place, Place], ring: Place, slots: Place, present: Place) -> tuple:
        """`Streams` of the stage before -> those of this one. Every row sees the window and all rows of its block."""
        h, x, pre, post, comb = self.into_attention(*streams)
        _, q, own = self.attention.project(x, table)
        y = self.attention.output(self.core(q, table, ring, slots, present, own, *self.index))
        h, x, pre, post, comb = self.into_experts(h, pre if self.lagged else None, y, post, comb)
        return h, pre if self.lagged else None, self.moe(x, None), post, comb


class DraftReplay:
    """Of one drafter, in the place of its model: `extend` and `propose`. refused: sites whose kernels were found wrong, with the reason.
    recorded: passes so far.

    Raises Declined where something of the pass is not made of kernels alone."""

    def __init__(self, replay: Replay, model: Any, refused: Mapping[tuple[str, str], str]):
        if not isinstance(model, DSparkModel):
            raise Declined("only passes of DSpark are recorded")
        if model.dtype != mx.bfloat16 or model.streams != STREAMS or not 1 <= model.block <= MOST_ROWS:
            raise Declined(f"{model.streams} streams, blocks of {model.block}, {model.dtype}: not what the kernels have")
        for name in ("main_proj", "head", "markov_head"):
            if reason := refused.get(("matrix", Site("matrix", model, name, replay.trunk).key)):
                raise Declined(reason)
        self.model, self.trunk, self.player, self.recorder = model, replay.trunk, replay.player, replay.recorder
        m, notes, trunk = model, replay.recorder, replay.trunk
        index = np.tile(np.arange(m.block, dtype=np.int32), (m.block, 1))
        rows = mx.array(index), mx.ones((m.block, m.block), mx.bool_)
        shadowed = lambda modules: shadow(modules, replay.builders, refused, trunk)
        self.stages = [RecordedStage(notes, m, stage, rows, shadowed, 2 * len(m.frequencies)) for stage in m.stages]
        self.embed, self.markov_embed = Embed(notes, m.embed), Embed(notes, m.markov_embed)
        self.first = mx.array([[1.0] + [0.0] * (STREAMS - 1)] * m.block) if m.lagged else None
        self.settle, self.norm = Settle(notes, m.norm.shape[0]), RowNorm(notes, m.norm, m.eps)
        # The confidence reads the streams before the norm.
        if m.lagged:
            self.collapse = Collapse(notes, m.norm, m.eps, normed=False)
        else:
            mix = HeadMix(notes, bare(m.collapse_head), m.norm, m.eps, normed=False)
            self.collapse = lambda h, pre: mix(h)
        self.head, self.markov_head = wide_product(notes, bare(m.head)), wide_product(notes, bare(m.markov_head))
        self.guess, self.scatter = Guess(notes, m.markov_embed.shape[0]), Scatter(notes)
        self.main_proj = replay.builders["matrix"](Site("matrix", m, "main_proj", trunk))
        self.main_norm = RowNorm(notes, m.main_norm, m.eps)
        own, following = m.confidence[: m.norm.shape[0]], m.confidence[m.norm.shape[0] :]
        self.confidence = np.array(own), np.array(m.markov_embed.astype(mx.float32) @ following)
        self.recorded = 0
        self._rings: WeakKeyDictionary[DraftRings, _Ready] = WeakKeyDictionary()
        self._heritage: Heritage[_Ready] = Heritage(KEPT_BYTES)
        try:
            launches = [len(self.record(self.rings(), form)[0].launches) for form in (("pass", m.block, True), ("extend",), ("put",))]
        except (TypeError, AttributeError) as error:
            raise Declined(f"something between the kernels is not one: {error}") from error
        form = " ".join((stored(bare(m.head)), stored(bare(m.main_proj)), str(m.block), str(m.window)))
        self.key = f"{len(m.stages)} stages, {launches} launches, {hashlib.sha256(form.encode()).hexdigest()[:12]}"

    def rings(self) -> DraftRings:
        m = self.model
        return DraftRings(len(m.stages), m.window, m.stages[0].width, m.dtype, put=self.put)

    # what the drafter calls

    def extend(self, taps: Taps, first: int, rings: DraftRings) -> None:
        """As `DSparkModel.extend`. Rows of recorded steps, however many, go in `MOST_ROWS` at a time: what a drafter that was not asked for
        a while has before it would else be built, with kernels for every number of rows."""
        count = len(taps)
        if isinstance(taps, mx.array) and count > MOST_ROWS:
            rings.write(first, self.model.context(taps, first))
            return
        bits, places = taps if isinstance(taps, np.ndarray) else _bits(taps), rings.places(first, count)
        for a in range(0, count, MOST_ROWS):
            rows = bits[a : a + MOST_ROWS]
            filled, at = np.zeros((MOST_ROWS, rows.shape[1]), np.uint16), np.full(MOST_ROWS, -1, np.int32)
            filled[: len(rows)], at[: len(rows)] = rows, places[a : a + MOST_ROWS]
            self._play(rings, ("extend",), Committed(filled, first + a + np.arange(MOST_ROWS), at))
        rings.written(first, count)

    def put(self, rings: DraftRings, slots: np.ndarray, rows: Sequence[mx.array]) -> None:
        """Rows that are made already into their slots, a window of them at a time."""
        found = [_bits(a) for a in rows]
        for a in range(0, len(slots), self.model.window):
            at = np.full(self.model.window, -1, np.int32)
            part = slots[a : a + self.model.window]
            at[: len(part)] = part
            self._play(rings, ("put",), Written([r[a : a + len(part)] for r in found], at))

    def propose(
        self, pending: int, n: int, want: int, rings: DraftRings, sampling: SamplingParams
    ) -> tuple[list[int], np.ndarray | None, np.ndarray]:
        """As `DSparkModel.propose`; logits that the device has chosen by stay there: None."""
        if sampling.temperature == 0:
            (found, spread, z), logits = self._pass(pending, n, rings, ("pass", want, True)), None
            ids, spread = found.view(np.int32).tolist(), spread.view(np.float32)
        else:
            logits, z = self.base(pending, n, want, rings)
            ids, spread = self._sampled(pending, n, logits, rings, sampling)
        check_spread(spread, n)
        own, following = self.confidence
        return ids, logits, _floats(z, want) @ own + following[[pending, *ids[:-1]]]

    def base(self, pending: int, n: int, want: int, rings: DraftRings) -> tuple[np.ndarray, np.ndarray]:
        """(the head's logits float32 [want, vocab], before the Markov chain; bits of z)."""
        base, z = self._pass(pending, n, rings, ("pass", want, False))
        return base.view(np.float32).reshape(want, -1), z

    def _sampled(self, pending: int, n: int, logits: np.ndarray, rings: DraftRings, sampling: SamplingParams) -> tuple[list[int], np.ndarray]:
        """Guesses of a turn that draws them, on the host; adds the chain to the logits."""
        prev, ids = pending, []
        for j, row in enumerate(logits):
            row += self._play(rings, ("chain",), Drawn(np.array([prev], np.int32)))[0].view(np.float32)
            prev = host_choice(row, n + 1 + j, sampling)
            ids.append(prev)
        return ids, np.ptp(logits, axis=-1)

    def _pass(self, pending: int, n: int, rings: DraftRings, form: tuple) -> list[np.ndarray]:
        m = self.model
        slots, present = rings.seen(np.arange(n - m.window, n), n if rings.end == n else 0)
        tokens = np.array([pending] + [m.noise] * (m.block - 1), np.int32)
        return self._play(rings, form, Pass(tokens, n + np.arange(m.block), slots, present))

    def _play(self, rings: DraftRings, form: tuple, brought: Pass | Committed | Written | Drawn) -> list[np.ndarray]:
        """Waits for all of it: the block in the host's memory is used again, and MLX may read the rings next."""
        ready = self._rings.get(rings) or self._settled(rings)
        if form not in ready.steps:
            self.recorded += 1
            tape, given, results = self.record(rings, form)
            loaded = self.player.load(tape, given, results, ready.home)
            ready.steps[form] = loaded, given.filler(loaded.block)
        loaded, fill = ready.steps[form]
        fill(brought)
        loaded.play(0)
        return loaded.results()

    def _settled(self, rings: DraftRings) -> _Ready:
        """Of rings that are new: what others left, or nothing yet. From here on only recorded launches write to them."""
        ready = self._heritage.take(lambda left: left.home.fits(rings.buffers))
        if ready is not None:
            self.player.wait(self.player.bring_back(ready.home, rings.buffers))
        else:
            ready = _Ready(self.player.settle(rings.buffers, True), {})
        self._heritage.will(rings, ready, ready.home.nbytes)
        self._rings[rings] = ready
        return ready

    # recording

    def record(self, rings: DraftRings, form: tuple) -> Recorded:
        """(launches, the block that they need, results). form: (pass, guesses, greedy), (chain,), (extend,) or (put,)."""
        kind, *rest = form
        places = [Place(Memory("lane", b.nbytes, name), b.shape, b.dtype) for name, b in rings.buffers.items()]
        tape, given = self.recorder.begin(), Given()
        ways = {"pass": self._record_pass, "chain": self._record_chain, "extend": self._record_extend, "put": self._record_put}
        results = ways[kind](given, places, *rest)
        for place in results:
            place.memory.kind = "result"
        return fewer(tape), given, results

    def _table(self, given: Given, rows: int) -> tuple[Place, ...]:
        f = self.model.frequencies
        return given.places("table", 2, (rows, len(f)), mx.float32, lambda r: host_table(f, r.positions))

    def _record_pass(self, given: Given, rings: list[Place], want: int, greedy: bool) -> list[Place]:
        m = self.model
        tokens = given.place("tokens", (m.block,), mx.int32, lambda r: r.tokens)
        slots = given.place("slots", (m.block, m.window), mx.int32, lambda r: r.slots)
        present = given.place("present", (m.block, m.window), mx.bool_, lambda r: r.present)
        table = self._table(given, m.block)
        streams = self.embed(tokens), self.first, None, None, None
        for stage, ring in zip(self.stages, rings):
            streams = stage(streams, table, ring, slots, present)
        h, pre, y, post, comb = streams
        z = self.collapse(self.settle(h, y, post, comb)[:want], pre if pre is None else pre[:want])
        base = self.head(self.norm(z))
        if not greedy:
            return [base, z]
        found = Place(Memory("result", 4 * want), (want,), mx.int32)
        spread = Place(Memory("result", 4 * want), (want,), mx.float32)
        prev = tokens[:1]
        for j in range(want):
            row = self.markov_embed(prev).reshape(STREAMS, -1)[:1]
            prev, _ = self.guess.into(base[j : j + 1], self.markov_head(row), found[j : j + 1], spread[j : j + 1])
        return [found, spread, z]

    def _record_chain(self, given: Given, rings: list[Place]) -> list[Place]:
        token = given.place("token", (1,), mx.int32, lambda r: r.token)
        return [self.markov_head(self.markov_embed(token).reshape(STREAMS, -1)[:1])]

    def _record_extend(self, given: Given, rings: list[Place]) -> list[Place]:
        taps = given.place("taps", (MOST_ROWS, width(bare(self.model.main_proj))), mx.bfloat16, lambda r: r.taps)
        at = given.place("at", (MOST_ROWS,), mx.int32, lambda r: r.at)
        x, table = self.main_norm(self.main_proj(taps)), self._table(given, MOST_ROWS)
        for stage, ring in zip(self.stages, rings):
            self.scatter.into(stage.attention.latent(x, table), at, ring)
        return []

    def _record_put(self, given: Given, rings: list[Place]) -> list[Place]:
        at = given.place("at", (self.model.window,), mx.int32, lambda r: r.at)
        shape = self.model.window, self.model.stages[0].width
        filled = lambda rows: np.concatenate([rows, np.zeros((shape[0] - len(rows), shape[1]), np.uint16)])
        rows = given.places("rows", len(rings), shape, mx.bfloat16, lambda r: tuple(map(filled, r.rows)))
        for new, ring in zip(rows, rings):
            self.scatter.into(new, at, ring)
        return []

    # the check

    def check(self) -> float:
        """The relative L2 distance of the head's logits to those of a pass that is built, after committed rows of both ways; inf where a
        guess is not the best of its own logits. The first of several tries that is near enough, else the least, because a near tie may choose
        other experts."""
        return nearest(self._distance, _TRIES)

    def _distance(self, seed: int) -> float:
        m, rng = self.model, np.random.default_rng(seed)
        counts = 2 * MOST_ROWS + 1, 3
        taps = mx.array(rng.standard_normal((sum(counts), width(bare(m.main_proj)))).astype(np.float32)).astype(m.dtype)
        mine, theirs = self.rings(), DraftRings(len(m.stages), m.window, m.stages[0].width, m.dtype)
        for rings, compute in ((mine, self), (theirs, m)):
            first = 0
            for count in counts:
                rings.begin(first)
                compute.extend(taps[first : first + count], first, rings)
                first += count
                rings.advance(first)
        pending = int(rng.integers(0, m.markov_embed.shape[0]))
        got, _ = self.base(pending, first, m.block, mine)
        want = np.array(m.base(m.forward(pending, first, theirs)))
        ids, _, _ = self.propose(pending, first, m.block, mine, SamplingParams())
        for row, prev, found in zip(got.copy(), [pending, *ids], ids):
            row += np.array(m.markov_head(m.markov_embed[mx.array([prev])].astype(mx.float32)))[0]
            if not row.max() - row[found] <= 1e-2 * np.ptp(row):
                return float("inf")
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _bits(rows: mx.array) -> np.ndarray:
    """uint16: the bits of bfloat16 rows."""
    return np.array(rows.astype(mx.bfloat16).view(mx.uint16))


def _floats(bits: np.ndarray, rows: int) -> np.ndarray:
    """bytes of bfloat16 numbers -> float32 [rows, ...]."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(rows, -1)
