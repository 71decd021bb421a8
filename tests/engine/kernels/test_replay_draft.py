"""Recorded passes of a drafter under the CPU shim: the bits of the same kernels called one by one, whatever happened to the rings before."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.draft.base import host_choice
from dsv41chat.engine.draft.depth import FixedDepth
from dsv41chat.engine.draft.doctor import examine
from dsv41chat.engine.draft.load import new_drafter
from dsv41chat.engine.draft.rings import DraftRings
from dsv41chat.engine.draft.shared import Drafting
from dsv41chat.engine.errors import EngineError
from dsv41chat.engine.kernels import glue
from dsv41chat.engine.kernels.glue import Guess
from dsv41chat.engine.kernels.gpu import builders, gpu_route
from dsv41chat.engine.kernels.launch import MOST_ROWS
from dsv41chat.engine.kernels.recorder import Recorder
from dsv41chat.engine.kernels.replay import Replay
from dsv41chat.engine.kernels.replay_draft import Committed, DraftReplay, Pass
from dsv41chat.engine.kernels.routes import Declined, KernelRoutes, extend
from dsv41chat.engine.kernels.sites import Site, bare, width
from dsv41chat.engine.pack.build import build_drafter, build_trunk, open_pack
from dsv41chat.engine.sampling import SamplingParams
from dsv41chat.nano import embedded_pack
from tests import drafting
from tests.engine.kernels.play import ShimPlayer
from tests.engine.kernels.shim import Shim, needs_compiler
from tests.engine.kernels.test_gpu_route import V4, apart, planted, tokens
from tests.engine.kernels.test_replay import put
from tests.engine.v4.tiny import write_pack

pytestmark = needs_compiler
GREEDY, WARM = SamplingParams(), SamplingParams(temperature=0.8, seed=3)
# Committed rows of a prompt, more than are recorded, and the rows after it.
PROMPT, ROWS = 17, 31


def parts(family: str, folder, routes: str = "stock"):
    """(trunk, drafter) in bfloat16, packed. V4.1: the embedded pack's, lagged. V4: a tiny one with its own last collapse."""
    if family == "v41":
        pack = open_pack(embedded_pack())
    else:
        write_pack(folder / "plain", V4)
        pack = open_pack(drafting.write_with_drafter(folder / "plain", folder / "drafted", "dspark", stages=2))
    trunk = build_trunk(pack, dtype=mx.bfloat16, packed=True, routes=routes)
    return trunk, build_drafter(pack, trunk, rounded=True, packed=True)


def recorded(trunk, model, wanted: str = "cuda") -> KernelRoutes:
    """The routes after the drafter has been put on a trunk whose steps are recorded."""
    notes = Recorder("cuda")
    trunk.routes = KernelRoutes(wanted, "cpu", replay=Replay(trunk, notes, ShimPlayer(), builders(notes), {}))
    extend(trunk.routes, model, trunk, routes=(gpu_route("cuda", Shim("cuda"), lambda: None, frozenset({"cpu"})),))
    return trunk.routes


@pytest.fixture(scope="module", params=["v41", "v4"])
def model(request, tmp_path_factory):
    trunk, model = parts(request.param, tmp_path_factory.mktemp(request.param))
    routes = recorded(trunk, model)
    assert model.replay is routes.draft_replay is not None, routes.draft_built
    assert "passes of the drafter are recorded once and played again" in routes.summary()
    return model


def committed(model, seed: int = 5, rows: int = ROWS) -> mx.array:
    taps = np.random.default_rng(seed).standard_normal((rows, width(bare(model.main_proj))))
    return mx.array(taps.astype(np.float32)).astype(mx.bfloat16)


def fed(model, taps: mx.array, cuts: tuple[int, ...]):
    drafter = new_drafter(model)
    for a, b in zip((0, *cuts), cuts):
        drafter.ingest(taps[a:b], a, [7] * (b - a))
        drafter.flush()
    return drafter


def seen(drafter) -> dict[str, bytes]:
    return {k: np.array(v.view(mx.uint8)).tobytes() for k, v in drafter.state().items()}


def base(drafter, n: int, pending: int = 9) -> np.ndarray:
    drafter.flush()
    return drafter.compute.base(pending, n, drafter.block, drafter.rings)[0]


class Direct(DraftReplay):
    """The same kernels, each called at once, on rings that do not change: what is written is kept beside them."""

    def __init__(self, trunk, model):
        kernels = Shim("cuda")
        super().__init__(SimpleNamespace(player=None, recorder=kernels, trunk=trunk, builders=builders(kernels)), model, {})
        self.written: list[mx.array] = []
        self.scatter = SimpleNamespace(into=lambda rows, at, ring: self.written.append(rows))

    def record(self, rings, form):
        return SimpleNamespace(launches=[]), None, []

    def now(self, brought, rings: DraftRings, form: tuple):
        place = lambda key, shape, dtype, make: mx.array(np.broadcast_to(make(brought), shape)).view(dtype)
        places = lambda key, count, shape, dtype, make: tuple(map(mx.array, make(brought)))
        call = self._record_pass if form[0] == "pass" else self._record_extend
        return call(SimpleNamespace(place=place, places=places), list(rings.buffers.values()), *form[1:])


def test_a_pass_has_the_bits_of_its_kernels_called_one_by_one(model):
    replay, taps = model.replay, committed(model)
    direct = Direct(model.replay.trunk, model)
    drafter = fed(model, taps, (PROMPT, PROMPT + 1, PROMPT + 6))
    n, rings, f = drafter.rings.end, drafter.rings, replay.model
    slots, present = rings.seen(np.arange(n - f.window, n), n)
    tokens = np.array([9] + [f.noise] * (f.block - 1), np.int32)
    brought = Pass(tokens, n + np.arange(f.block), np.broadcast_to(slots, (f.block, f.window)), np.broadcast_to(present, (f.block, f.window)))
    want, z = direct.now(brought, rings, ("pass", f.block, False))
    got, bits = replay.base(9, n, f.block, rings)
    np.testing.assert_array_equal(got, np.array(want))
    np.testing.assert_array_equal(bits.view(np.uint16).reshape(z.shape), np.array(z.view(mx.uint16)))
    rows = slice(PROMPT + 1, PROMPT + 1 + MOST_ROWS)
    at = rings.places(rows.start, MOST_ROWS)
    direct.now(Committed(np.array(taps[rows].view(mx.uint16)), np.arange(rows.start, rows.stop), at), rings, ("extend",))
    for made, ring in zip(direct.written, rings.buffers.values(), strict=True):
        assert mx.array_equal(made[:5], ring[mx.array(at[:5])])
    assert replay.player.played.count("scatter") and {"tensor_attend", "collapse", "guess", "route"} <= set(replay.player.played)


def test_a_pass_is_close_to_one_that_is_built(model):
    taps, built = committed(model), replace(model, replay=None)
    cuts = (PROMPT, PROMPT + 3, ROWS)
    mine, theirs = fed(model, taps, cuts), fed(built, taps, cuts)
    for a, b in zip(mine.rings.buffers.values(), theirs.rings.buffers.values(), strict=True):
        assert apart(np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32))) < 2e-2
    want = np.array(built.base(built.forward(9, ROWS, theirs.rings)))
    assert apart(base(mine, ROWS), want) < 2e-2


def test_rows_of_another_position_are_not_seen(model):
    """A pass that does not follow the committed rows sees its own block alone."""
    drafter, empty = fed(model, committed(model), (PROMPT,)), new_drafter(model)
    np.testing.assert_array_equal(base(drafter, PROMPT + 2), base(empty, PROMPT + 2))
    assert not np.array_equal(base(drafter, PROMPT), base(empty, PROMPT))


def test_guesses_follow_from_the_logits(model):
    """Greedy ones are chosen on the device, drawn ones on the host; fewer are the first ones of more."""
    drafter = fed(model, committed(model), (PROMPT, ROWS))
    rows, bits = drafter.compute.base(9, ROWS, drafter.block, drafter.rings)
    z = np.array(mx.array(bits.view(np.uint16)).view(mx.bfloat16).astype(mx.float32)).reshape(drafter.block, -1)
    chain = lambda prev: np.array(model.markov_head(model.markov_embed[mx.array([prev])].astype(mx.float32)))[0]
    for sampling in (GREEDY, WARM):
        found = drafter.propose(9, ROWS, drafter.block, sampling)
        prev = 9
        for j, guess in enumerate(found.ids):
            row = rows[j] + chain(prev)
            chosen = host_choice(row, ROWS + 1 + j, sampling)
            assert guess == chosen or row[chosen] - row[guess] < 1e-4 * np.ptp(row)
            told = np.concatenate([z[j], np.array(model.markov_embed[prev].astype(mx.float32))]) @ np.array(model.confidence)
            assert found.confidence[j] == pytest.approx(told, rel=1e-4, abs=1e-4)
            prev = guess
        fewer = drafter.propose(9, ROWS, 2, sampling)
        assert fewer.ids == found.ids[:2] and fewer.confidence == pytest.approx(found.confidence[:2], abs=1e-5)


def test_rings_through_a_conversation(model):
    """Rows one by one and in windows, rows that are taken back, a return to a stored state, another conversation in between, a reset."""
    taps, other = committed(model), committed(model, 6)
    want = fed(model, taps, (PROMPT, *range(PROMPT + 1, ROWS + 1)))
    drafter, between = new_drafter(model), new_drafter(model)
    drafter.ingest(taps[:PROMPT], 0, [7] * PROMPT)
    saved, at = drafter.state(), PROMPT
    for step in (1, 4, 2, 7):
        wrong = committed(model, 70 + step, 3)
        drafter.ingest(wrong, at, [1] * 3)
        drafter.flush()
        drafter.truncate(at)
        between.ingest(other[at - PROMPT : at - PROMPT + step], at - PROMPT, [3] * step)
        between.propose(4, at - PROMPT + step, 2, GREEDY)
        drafter.ingest(taps[at : at + step], at, [7] * step)
        at += step
        drafter.propose(9, at, 3, GREEDY)
    assert at == ROWS and seen(drafter) == seen(want)
    np.testing.assert_array_equal(base(drafter, ROWS), base(want, ROWS))
    drafter.load(saved, PROMPT)
    drafter.ingest(taps[PROMPT : PROMPT + 4], PROMPT, [7] * 4)
    drafter.ingest(taps[PROMPT + 4 :], PROMPT + 4, [7] * (ROWS - PROMPT - 4))
    again = fed(model, taps, (PROMPT, ROWS))
    assert seen(drafter) == seen(again)
    np.testing.assert_array_equal(base(drafter, ROWS), base(again, ROWS))
    drafter.reset()
    drafter.ingest(other[:PROMPT], 0, [3] * PROMPT)
    fresh = fed(model, other, (PROMPT,))
    np.testing.assert_array_equal(base(drafter, PROMPT), base(fresh, PROMPT))


def test_rows_of_recorded_steps_wait_as_bits(model):
    """Whatever number of them has come since the last pass goes in by the same recorded launches, also behind rows of a prompt."""
    taps, recorded = committed(model), model.replay.recorded
    bits = np.array(taps.view(mx.uint16))
    want, drafter, mixed = fed(model, taps, (PROMPT, *range(PROMPT + 1, ROWS + 1))), fed(model, taps, (PROMPT,)), new_drafter(model)
    for n in range(PROMPT, ROWS):
        drafter.ingest(bits[n : n + 1], n, [7])
    assert len(drafter.queue.tokens) > MOST_ROWS
    drafter.flush()
    assert seen(drafter) == seen(want)
    mixed.ingest(taps[:PROMPT], 0, [7] * PROMPT)
    mixed.ingest(bits[PROMPT:], PROMPT, [7] * (ROWS - PROMPT))
    mixed.flush()
    for a, b in zip(mixed.rings.buffers.values(), want.rings.buffers.values(), strict=True):
        assert apart(np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32))) < 2e-2
    assert model.replay.recorded <= recorded + 6, "at most an extension and a put of each conversation"


def test_rings_take_over_what_others_left(model):
    taps, gone = committed(model), fed(model, committed(model, 6), (PROMPT, ROWS))
    gone.propose(9, ROWS, 3, GREEDY)
    want = fed(replace(model, replay=None), taps, (PROMPT,))
    del gone
    gc.collect()
    recorded, drafter = model.replay.recorded, fed(model, taps, (PROMPT,))
    assert seen(drafter) == seen(want) and len(drafter.propose(9, PROMPT, 3, GREEDY).ids) == 3
    assert model.replay.recorded == recorded


def test_a_stored_state_goes_to_a_built_pass_and_back(model):
    built = replace(model, replay=None)
    drafter = fed(model, committed(model), (PROMPT, ROWS))
    back = new_drafter(built)
    back.load(drafter.state(), ROWS)
    again = new_drafter(model)
    again.load(back.state(), ROWS)
    assert seen(again) == seen(drafter)


@pytest.mark.slow
def test_drafted_text_of_recorded_steps_and_passes_is_plain_text(tmp_path):
    """Taps of recorded steps go into recorded passes; both players' launches write into their own buffers."""
    trunk, model = parts("v4", tmp_path)
    player = put(trunk).routes.replay.player
    extend(trunk.routes, model, trunk, routes=(gpu_route("cuda", Shim("cuda"), lambda: None, frozenset({"cpu"})),))
    assert model.replay.player is player
    prompt = list(tokens(96, PROMPT))
    plain = drafting.decode(trunk, prompt, GREEDY, 14)
    player.played.clear()
    drafted = drafting.decode(trunk, prompt, GREEDY, 14, new_drafter(model), FixedDepth(3))
    assert drafted.ids == plain.ids and sum(r.proposed for r in drafted.rounds) >= 9
    assert drafted.drafter.rings.end > PROMPT and player.played.count("guess") >= 9


@pytest.mark.parametrize("dialect", ["metal", "cuda"])
@pytest.mark.parametrize("vocabulary", [5, 96, 5001])
def test_the_best_sum_of_a_row(dialect, vocabulary):
    """The first of equal ones, wherever they are; a row that is not finite says so."""
    rng = np.random.default_rng(vocabulary)
    one = mx.zeros((8,), mx.int32), mx.zeros((8,), mx.float32)
    guess = Guess(Shim(dialect), vocabulary)
    last = vocabulary - 1
    # The third pair: the first of the two is found by a later SIMD group, in its first round.
    for first, second in ((0, last), (vocabulary // 2, last), (min(40, last), min(256, last)), (last, last)):
        base, add = (rng.standard_normal((1, vocabulary)).astype(np.float32) for _ in range(2))
        base[0, [first, second]], add[0, [first, second]] = 30, 3
        found, spread = guess.into(mx.array(base), mx.array(add), *one)
        assert found[0].item() == first and spread[0].item() == np.ptp(base + add)
    for wrong in (np.nan, np.inf, -np.inf):
        base[0, second] = wrong
        assert guess.into(mx.array(base), mx.array(add), *one)[1][0].item() == -1
    assert guess.into(mx.zeros((1, vocabulary)), mx.zeros((1, vocabulary)), *one)[1][0].item() == 0


def test_a_failed_device_is_noticed(model, monkeypatch):
    drafter = fed(model, committed(model), (PROMPT,))
    play = model.replay._play
    monkeypatch.setattr(model.replay, "_play", lambda *a: [r * 0 for r in play(*a)])
    with pytest.raises(EngineError, match="the drafter's logits"):
        drafter.propose(9, PROMPT, 2, GREEDY)


def test_a_wrong_text_leaves_the_built_pass(tmp_path):
    trunk, model = parts("v4", tmp_path)
    with planted(glue, "GUESS", "g.place < VOCAB ? g.place : 0", "g.place ? g.place - 1 : 1"):
        routes = recorded(trunk, model)
    assert model.replay is None and "from one that is built" in routes.draft_built
    assert any(line.startswith("passes of the drafter are built anew") for line in routes.summary())
    lines = examine(Drafting(trunk, model, exact="fast", facts={}, build="b", machine="m"), measure=False)
    assert any(routes.draft_built in line.text for line in lines)
    assert len(fed(model, committed(model), (PROMPT,)).propose(9, PROMPT, 3, GREEDY).ids) == 3


def test_what_is_no_kernel_leaves_the_built_pass(tmp_path):
    trunk, model = parts("v4", tmp_path)
    trunk.routes = KernelRoutes("stock", "cpu", replay=Replay(trunk, notes := Recorder("cuda"), ShimPlayer(), builders(notes), {}))
    extend(trunk.routes, replace(model, dtype=mx.float32), trunk)
    assert "not what the kernels have" in trunk.routes.draft_built
    for op, owner, field in (("matrix", model, "markov_head"), ("router", model.stages[0].moe, "choose")):
        with pytest.raises(Declined, match="it is wrong"):
            DraftReplay(trunk.routes.replay, model, {(op, Site(op, owner, field, trunk).key): "it is wrong"})
    model.stages[0].moe.experts = lambda *args: mx.zeros((1, 4))
    trunk.routes.replay.builders = {k: v for k, v in builders(notes).items() if k != "router"}
    extend(trunk.routes, model, trunk)
    assert "something between the kernels" in trunk.routes.draft_built and model.replay is None


@pytest.mark.device
def test_on_a_device(tmp_path):
    """The graphs of a real device: rows in the rings and logits as built by the same kernels, guesses of either kind."""
    if not mx.cuda.is_available():
        pytest.skip("needs a GPU of NVIDIA's that MLX computes on")
    for family in ("v41", "v4"):
        trunk, model = parts(family, tmp_path / family, routes="cuda")
        assert model.replay is not None, trunk.routes.draft_built
        taps, built, cuts = committed(model), replace(model, replay=None), (PROMPT, PROMPT + 1, PROMPT + 6, ROWS)
        mine, theirs = fed(model, taps, cuts), fed(built, taps, cuts)
        for a, b in zip(mine.rings.buffers.values(), theirs.rings.buffers.values(), strict=True):
            assert mx.array_equal(a, b)
        assert apart(base(mine, ROWS), np.array(built.base(built.forward(9, ROWS, theirs.rings)))) < 2e-2
        again = fed(model, committed(model, 6), (PROMPT,))
        again.propose(9, PROMPT, 2, GREEDY)
        again.load(mine.state(), ROWS)
        for sampling in (GREEDY, WARM):
            assert again.propose(9, ROWS, 5, sampling) == mine.propose(9, ROWS, 5, sampling)
        np.testing.assert_array_equal(base(again, ROWS), base(mine, ROWS))
