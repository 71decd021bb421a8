"""Recorded steps, played under the CPU shim in any order that they allow: the bits of built steps of the same kernels, in every form."""

from __future__ import annotations

import gc
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.draft.base import numbers
from dsv41chat.engine.errors import EngramReadError, RouteUnavailable
from dsv41chat.engine.kernels import glue, matrix
from dsv41chat.engine.kernels import recorder as recorder_module
from dsv41chat.engine.kernels import replay as replay_module
from dsv41chat.engine.kernels.gpu import builders, gpu_route
from dsv41chat.engine.kernels.heritage import Heritage
from dsv41chat.engine.kernels.recorder import Memory, Place, Recorder, Tape, arrange
from dsv41chat.engine.kernels.recording import form_of
from dsv41chat.engine.kernels.replay import Replay
from dsv41chat.engine.kernels.routes import Declined, install
from dsv41chat.engine.lane import Lane, PoolSpec
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.engine.target import Target
from dsv41chat.nano import embedded_pack
from tests.engine.kernels.play import ShimPlayer
from tests.engine.kernels.shim import Shim, needs_compiler
from tests.engine.kernels.test_gpu_route import V4, nano, planted, state, tiny_v4, tokens
from tests.engine.v4.tiny import write_pack

pytestmark = needs_compiler
# More rows than a recorded step takes.
PROMPT = 9


def replays(trunk, refused):
    notes = Recorder("cuda")
    return Replay(trunk, notes, ShimPlayer(), builders(notes), refused)


def put(trunk, wanted: str = "cuda"):
    route = gpu_route("cuda", Shim("cuda"), lambda: None, frozenset({"cpu"}), replays)
    trunk.routes = install(trunk, trunk, wanted, routes=(route,), device="cpu")
    return trunk


def small(family: str, folder):
    """V4.1: a window alone, an owner of pairs, and two that choose among blocks of the second one's entries, few of each, after n-gram rows.
    V4: a hashed router, entries of both kinds."""
    if family == "v4":
        return tiny_v4(folder)
    trunk = build_trunk(open_pack(embedded_pack()), dtype=mx.bfloat16, packed=True)
    layers = [layer for layer in trunk.layers if layer.plan.index in (0, 2, 4, 6)]
    for layer in layers:
        if (indexer := layer.attention.indexer) is not None:
            indexer.topk, indexer.block, indexer.blocks = 6, 4, 3
    c = replace(trunk.config, index_topk=6, candidate_block_size=4, candidate_topk_blocks=3)
    return replace(trunk, config=c, plan=tuple(layer.plan for layer in layers), layers=layers, tap_layers=(2, 4))


@pytest.fixture(scope="module", params=["v41", "v4"])
def trunk(request, tmp_path_factory):
    return put(small(request.param, tmp_path_factory.mktemp("v4")))


# What becomes of lanes is the same code for both families; the steps of V4.1 take four times as long here.
of_lanes = pytest.mark.parametrize("trunk", [pytest.param("v41", marks=pytest.mark.slow), "v4"], indirect=True)


def feed(trunk, ids, cuts, recorded: bool = True, taps: bool = False) -> tuple[np.ndarray, Target, list]:
    """Logits after the prompt, which is as long as the first cut."""
    kept, out, found = trunk.routes.replay, [], []
    trunk.routes.replay = kept if recorded else None
    target = Target(trunk)
    for a, b in zip([0, *cuts], cuts):
        trial = target.rows(ids[a:b], want_taps=taps, ahead=ids[b : b + 1])
        out.append(np.array(trial.logits))
        found.append(None if trial.taps is None else np.array(numbers(trial.taps).astype(mx.float32)))
        target.commit(trial, b - a)
    trunk.routes.replay = kept
    return np.concatenate(out[1:]), target, found[1:]


# A row of every form that rows of a family have here, with windows and a prompt up to the next new form. V4.1: both places in a pair, the
# first block choice of the owner's entries and the first choice of the others', their first block choice. V4: groups of both kinds, the
# first choice, the end of the ring.
ROWS = {"v41": [PROMPT, *range(PROMPT + 1, 16), 23, 25, 26, 27], "v4": [PROMPT, 10, 11, 12, 15, 16, 23, 24, 27, 28, 29, 62, 63, 64, 65]}


def test_rows_have_the_bits_of_built_steps(trunk):
    """Past the first entries, the first choice and the first block choice, past groups that close and the end of the ring."""
    ids, cuts = list(tokens(96, 70)), ROWS[trunk.config.family]
    forms = lambda starts: {form_of(trunk, start, 1, True, True) for start in starts}
    assert forms(a for a, b in zip(cuts, cuts[1:]) if b == a + 1) == forms(range(PROMPT, 31))
    want, built, taps = feed(trunk, ids, cuts, recorded=False, taps=True)
    trunk.routes.replay.player.played.clear()
    got, target, mine = feed(trunk, ids, cuts, taps=True)
    np.testing.assert_array_equal(got, want)
    assert state(target) == state(built)
    assert all(a is not None and np.array_equal(a, b) for a, b in zip(mine, taps, strict=True))
    played = set(trunk.routes.replay.player.played)
    assert played >= {"embed", "hyper_spread", "tensor_attend", "scatter", "pool_groups", "top_k", "index_scores", "first_visible", "route"}
    assert trunk.config.family == "v4" or played >= {"block_top", "keep_blocks", "engram", "collapse"}
    tape, *_ = trunk.routes.replay.record(target.lane, target.n, 1, True, False)
    assert len(tape.parts) == (trunk.config.family == "v41"), "n-gram rows come in while the first layers run"


def test_windows_have_the_bits_of_single_rows(trunk):
    """What drafting stands on: whatever rows share a step, and whatever of them is taken back."""
    ids, prompt, end = list(tokens(96, 40)), 11, 26 if trunk.config.family == "v41" else 28  # past the last row of a new form
    alone, one, _ = feed(trunk, ids, [prompt, *range(prompt + 1, end + 1)])
    windows, many, _ = feed(trunk, ids, [prompt, 13, 21, 22, end])
    np.testing.assert_array_equal(windows, alone)
    assert state(many) == state(one)
    target, at = Target(trunk), prompt
    target.commit(target.rows(ids[:prompt]), prompt)
    while at < 14:
        wrong = [ids[at], *(3 + i % 5 for i in ids[at + 1 : at + 4])]
        trial = target.rows(wrong)
        np.testing.assert_array_equal(np.array(trial.logits)[0], alone[at - prompt])
        target.commit(trial, 1)
        at += 1


@of_lanes
def test_lanes_and_prompts_in_turn(trunk):
    """Two conversations in turn, a prompt in between, a return to a mark: buffers that MLX has written are found again."""
    ids = list(tokens(96, 60))
    alone, *_ = feed(trunk, ids, [PROMPT, *range(PROMPT + 1, PROMPT + 6)])
    a, b = Target(trunk), Target(trunk)
    for target in (a, b):
        target.commit(target.rows(ids[:PROMPT]), PROMPT)
    mark = a.lane.mark()
    for at in range(PROMPT, PROMPT + 4):
        for target in (a, b):
            trial = target.rows(ids[at : at + 1])
            np.testing.assert_array_equal(np.array(trial.logits)[0], alone[at - PROMPT])
            target.commit(trial, 1)
    recorded = a.recorded
    # A prompt that counts, back to where it began, and the same rows: steps that were recorded serve what MLX has made of the buffers.
    here, again = a.lane.mark(), a.lane.n
    a.commit(a.rows(ids[again : again + PROMPT]), PROMPT)
    assert a.lane.rewind(here)
    trial = a.rows(ids[again : again + 1])
    np.testing.assert_array_equal(np.array(trial.logits)[0], alone[4])
    a.drop()
    assert a.recorded - recorded <= 1, "but for the form of this position"
    b.commit(b.rows(ids[again : again + 1]), 1)
    steps = b.recorded
    b.rows(ids[again + 1 : again + 1 + PROMPT])
    b.drop()
    for _ in range(2):
        b.rows(ids[again + 1 : again + 2])
        b.drop()
    b.rows(ids[again + 1 : again + 1 + PROMPT])
    b.drop()
    b.rows(ids[again + 1 : again + 2])
    b.drop()
    assert b.recorded <= steps + 1
    saved = {k: np.array(v) if not isinstance(v, mx.array) else mx.array(v) for k, v in a.lane.state().items()}
    long = ids[PROMPT + 4 : PROMPT + 13]
    built = np.array(a.rows(long).logits)
    a.drop()
    assert a.lane.rewind(mark)
    trial = a.rows(ids[PROMPT : PROMPT + 2])
    np.testing.assert_array_equal(np.array(trial.logits), alone[:2])
    a.drop()
    a.lane.load(saved)
    np.testing.assert_array_equal(np.array(a.rows(long).logits), built)


@of_lanes
def test_a_lane_takes_over_what_another_left(trunk, monkeypatch):
    """No step is recorded again for the next conversation, which has its own rows all the same; two that live share nothing."""
    replay, cuts = trunk.routes.replay, [PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 5]
    first = list(tokens(96, 40))
    second = first[::-1]
    want, built, _ = feed(trunk, second, cuts, recorded=False)
    _, gone, _ = feed(trunk, first, cuts)
    del gone
    gc.collect()
    recorded = replay.recorded
    got, mine, _ = feed(trunk, second, cuts)
    assert replay.recorded == recorded
    np.testing.assert_array_equal(got, want)
    assert state(mine) == state(built)
    other, living, _ = feed(trunk, first, cuts)
    assert state(mine) == state(built) and state(living) != state(mine)
    del living
    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(replay.player, "bring_back", lambda home, buffers: buffers.update(home.kept) or [])
        assert not np.array_equal(feed(trunk, second, cuts)[0], want), "the planted fault: rows of the prompt are not copied there"


def test_lanes_have_few_sizes():
    """However a lane came to its length: what was recorded for one serves the others."""
    specs = PoolSpec("pool.0", 2, (4,), mx.bfloat16, 256), PoolSpec("pool.1", 128, (4,), mx.bfloat16, 256)
    new = lambda: Lane(specs, 8, in_place=True)
    shapes = lambda lane: tuple(b.shape for b in lane.buffers.values())
    grown, seen = new(), []
    for length in range(1, 40_000, 97):
        grown.reserve(length)
        fresh = new()
        fresh.reserve(length)
        assert shapes(fresh) == shapes(grown) and all(rows * s.ratio >= length for s, (rows, _) in zip(specs, shapes(grown)))
        seen.append(shapes(grown))
    assert len(set(seen)) < 40 and sum(b.nbytes for b in grown.buffers.values()) < 1.3 * 8 * (40_000 / 2 + 40_000 / 128 + 512)


class Owner:
    pass


def test_what_is_left_is_bounded():
    heritage, owners = Heritage(100), [Owner() for _ in range(4)]
    for i, owner in enumerate(owners):
        heritage.will(owner, i, 40 if i else 0)
    assert heritage.take(lambda value: True) is None
    del owner
    while owners:
        owners.pop(0)
    assert [heritage.take(lambda value: True) for _ in range(3)] == [3, 2, None], "the newest two; what holds nothing is not left"
    early, owner = Heritage(100), Owner()
    early.will(owner, 7, 1)()
    assert early.take(lambda value: value == 6) is None and early.take(lambda value: value == 7) == 7
    del owner
    assert early.take(lambda value: True) is None, "left once"


@of_lanes
def test_rows_after_a_second_prompt(trunk):
    """What a prompt wrote is there for the steps that were recorded before it."""
    ids, cuts = list(tokens(96, 60)), [PROMPT, PROMPT + 1, PROMPT + 2, 2 * PROMPT + 2, 2 * PROMPT + 3, 2 * PROMPT + 4]
    want, built, _ = feed(trunk, ids, cuts, recorded=False)
    got, target, _ = feed(trunk, ids, cuts)
    np.testing.assert_array_equal(got, want)
    assert state(target) == state(built)


@of_lanes
def test_a_lane_that_outgrows_its_memory_does_not_share_it_with_the_next(trunk):
    """Its rings stay where they are when its pools grow; a new lane takes what was recorded for the first one's sizes."""
    ids = list(tokens(96, 60))
    alone, *_ = feed(trunk, ids, [PROMPT, *range(PROMPT + 1, PROMPT + 5)])
    first = Target(trunk)
    first.commit(first.rows(ids[:PROMPT]), PROMPT)
    first.commit(first.rows(ids[PROMPT : PROMPT + 1]), 1)
    first.lane.reserve(5000)
    first.commit(first.rows(ids[PROMPT + 1 : PROMPT + 2]), 1)
    second = Target(trunk)
    second.commit(second.rows(ids[20 : 20 + PROMPT]), PROMPT)
    second.commit(second.rows(ids[30:31]), 1)
    for at in (PROMPT + 2, PROMPT + 3):
        trial = first.rows(ids[at : at + 1])
        np.testing.assert_array_equal(np.array(trial.logits)[0], alone[at - PROMPT])
        first.commit(trial, 1)


@of_lanes
def test_nothing_of_the_timeline_before_is_seen(trunk):
    """Whatever it left, finite or not: a reset lane goes on in the memory that its steps were recorded for."""
    ids, cuts = list(tokens(96, 60)), [0, 1, 4, 4 + PROMPT, 25, 26]
    fresh, used = Target(trunk), Target(trunk)
    used.commit(used.rows(ids[30:60]), 30)
    used.commit(used.rows(ids[:1]), 1)
    for a in used.lane.buffers.values():
        a[:] = mx.full(a.shape, float("nan"), a.dtype)
    used.lane.version += 1
    used.lane.reset()
    for a, b in zip(cuts, cuts[1:]):
        found = []
        for target in (fresh, used):
            trial = target.rows(ids[a:b])
            found.append(np.array(trial.logits))
            target.commit(trial, b - a)
        np.testing.assert_array_equal(*found)


def prompt(target: Target, ids: list[int], count: int, ahead: int = 1) -> None:
    """The first ids as a session brings them, before a step."""
    target.commit(target.rows(ids[:count], logits_from=None, ahead=ids[count : count + ahead]), count)


def row(target: Target, ids: list[int]) -> np.ndarray:
    """Of the next id, which counts."""
    trial = target.rows(ids[target.n : target.n + 1])
    target.commit(trial, 1)
    return np.array(trial.logits)[0]


def test_a_step_after_a_prompt_finds_all_ready(trunk, monkeypatch):
    """In a lane that has steps, in one that takes over those of another, in two lanes in turn."""
    replay, moved, made = trunk.routes.replay, [], []
    first = list(tokens(96, 40))
    second, rows_of, bring_back = first[::-1], replay_module.rows_of, replay.player.bring_back
    want, built = {}, {}
    for name, ids in (("first", first), ("second", second)):
        want[name], target, _ = feed(trunk, ids, [PROMPT, PROMPT + 1, PROMPT + 2], recorded=False)
        target.lane.truncate(PROMPT)
        built[name] = state(target)
    one = Target(trunk)
    for _ in range(2):  # the steps of these two positions are recorded
        prompt(one, first, PROMPT)
        np.testing.assert_array_equal([row(one, first), row(one, first)], want["first"])
        one.lane.reset()
    monkeypatch.setattr(replay.player, "bring_back", lambda *a: moved.append(len(made)) or bring_back(*a))
    monkeypatch.setattr(replay_module, "rows_of", lambda trunk, ids, start, **k: made.append(start) or rows_of(trunk, ids, start, **k))

    def check(target: Target, name: str, ids: list[int]) -> None:
        moved.clear(), made.clear()
        prompt(target, ids, PROMPT)
        assert len(moved) == 1 and set(made) == {PROMPT}, "home, and the numbers of the step are there"
        assert state(target) == built[name], "a lane can be saved between its prompt and a step"
        for at in range(2):
            made.clear()
            np.testing.assert_array_equal(row(target, ids), want[name][at])
            assert PROMPT + at not in made, "the step before has made them while the device worked"
        assert len(moved) == 1

    check(one, "first", first)
    del one
    gc.collect()
    recorded, two = replay.recorded, Target(trunk)
    check(two, "second", second)
    assert replay.recorded == recorded
    three = Target(trunk)
    prompt(three, first, PROMPT)
    two.lane.reset()
    prompt(two, second, PROMPT)
    for at in range(2):
        np.testing.assert_array_equal(row(three, first), want["first"][at])
        np.testing.assert_array_equal(row(two, second), want["second"][at])
    # A chunk that another one follows leaves its rows where MLX has them.
    moved.clear()
    two.lane.reset()
    prompt(two, second, PROMPT, ahead=PROMPT)
    assert not moved
    np.testing.assert_array_equal(row(two, second), want["second"][0])
    assert len(moved) == 1


@of_lanes
def test_numbers_of_another_position_are_not_taken(trunk):
    """A row that is taken back, and one that another number of rows follows."""
    ids = list(tokens(96, 40))
    alone, *_ = feed(trunk, ids, [PROMPT, *range(PROMPT + 1, PROMPT + 6)])
    target = Target(trunk)
    prompt(target, ids, PROMPT)
    for at in range(3):
        wrong = target.rows([ids[0]])
        target.drop()
        assert not np.array_equal(np.array(wrong.logits)[0], alone[at])
        np.testing.assert_array_equal(row(target, ids), alone[at])
    trial = target.rows(ids[PROMPT + 3 : PROMPT + 5])
    np.testing.assert_array_equal(np.array(trial.logits), alone[3:5])
    target.drop()
    np.testing.assert_array_equal(row(target, ids), alone[3])


@of_lanes
def test_a_prompt_that_fails_leaves_a_lane(trunk, monkeypatch):
    """While it is built: the lane is as it was. While the device computes: the lane is empty. Steps are right afterwards."""
    ids, count = list(tokens(96, 40)), 3 * PROMPT
    alone, *_ = feed(trunk, ids, [PROMPT, PROMPT + 1, PROMPT + 2])
    target, layers = Target(trunk), []
    prompt(target, ids, PROMPT)
    np.testing.assert_array_equal(row(target, ids), alone[0])
    inner = type(trunk)._layer

    def breaks(self, layer, *args):
        layers.append(layer)
        if len(layers) == len(trunk.layers):
            raise EngramReadError("the drive is gone")
        return inner(self, layer, *args)

    with monkeypatch.context() as patch, pytest.raises(EngramReadError):
        patch.setattr(type(trunk), "_layer", breaks)
        target.rows(ids[PROMPT + 1 : count], logits_from=None, ahead=ids[count : count + 1])
    assert target.n == PROMPT + 1
    np.testing.assert_array_equal(row(target, ids), alone[1])
    player, lane = trunk.routes.replay.player, target.lane
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(player, "wait", device_lost)
        target.rows(ids[PROMPT + 2 : count], logits_from=None, ahead=ids[count : count + 1])
    player.late.clear()
    assert target.n == 0 and target.lane is lane
    prompt(target, ids, PROMPT)
    np.testing.assert_array_equal([row(target, ids), row(target, ids)], alone)


def device_lost(arrays):
    raise RuntimeError("the device is lost")


def test_a_wrong_text_between_the_kernels_is_refused(tmp_path, monkeypatch):
    with planted(glue, "SCATTER", "(u64)to * WORDS", "(u64)(to ^ 1) * WORDS"):
        trunk = put(tiny_v4(tmp_path), "auto")
        assert trunk.routes.replay is None and "from one that is built" in trunk.routes.built
        assert any("built anew" in line for line in trunk.routes.summary())
        monkeypatch.setattr(replay_module, "_TRIES", 1)  # all of them were too far just now
        with pytest.raises(RouteUnavailable, match="a recorded step is"):
            put(tiny_v4(tmp_path))
    with planted(matrix, "MATVEC", "asf(UMX(((DEV const u8*)sc)[i], 1u) << 23);", "1.01f * asf(UMX(((DEV const u8*)sc)[i], 1u) << 23);"):
        trunk = put(nano(), "auto")
        assert trunk.routes.replay is None and "cuda for matrix" in trunk.routes.built, trunk.routes.built


@of_lanes
def test_a_row_that_cannot_be_read_leaves_the_lane_as_it_was(trunk):
    """The first part of the step has run by then."""
    if trunk.config.family == "v4":
        pytest.skip("reads no tables")
    ids = list(tokens(96, 12))
    target = Target(trunk)
    target.commit(target.rows(ids[:PROMPT]), PROMPT)
    want = np.array(target.rows(ids[PROMPT : PROMPT + 2]).logits)
    target.drop()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EngramReadError):
        patch.setattr(replay_module, "take_host_values", fails)
        target.rows(ids[PROMPT : PROMPT + 1])
    assert target.n == PROMPT and target.lane.ids == ids[:PROMPT]
    np.testing.assert_array_equal(np.array(target.rows(ids[PROMPT : PROMPT + 2]).logits), want)


def fails(ticket, slot):
    raise EngramReadError("the drive is gone")


def test_what_is_no_kernel_cannot_be_recorded():
    with pytest.raises(TypeError, match="no part"):
        Place(Memory("scratch", 64), (4, 8), mx.bfloat16)[:, 2:5]
    trunk = nano()
    layer = trunk.layers[0]
    layer.moe.experts = lambda *args: mx.zeros((1, 4))
    with pytest.raises(Declined, match="something between the kernels"):
        made = builders(notes := Recorder("cuda"))
        Replay(trunk, notes, ShimPlayer(), {k: v for k, v in made.items() if k != "router"}, {})


def test_forms_are_all_that_differs_between_positions(trunk):
    """At positions of one form the same launches are recorded."""
    lane, shapes = trunk.new_lane(), {}
    replay = trunk.routes.replay
    lane.reserve(70)
    for start in range(0, 60):
        tape, given, _ = replay.record(lane, start, 3, True, False)
        what = [(x.kernel.base, sorted(x.constants.items()), x.groups, [p.shape for p in x.outputs]) for x in tape.launches], given.memory.nbytes
        assert shapes.setdefault(form_of(trunk, start, 3, True, False), what) == what
    assert 1 < len(shapes) < 30


def test_launches_wait_for_what_they_need_and_for_nothing_else(monkeypatch):
    """Results are written where nobody reads any more, and no sooner."""
    monkeypatch.setattr(recorder_module, "_REUSED_BYTES", 0)
    monkeypatch.setattr(recorder_module, "_REST", 1)
    a, b, c, d = (Place(Memory("scratch", 256), (64,), mx.float32) for _ in range(4))
    lane, fixed = Place(Memory("lane", 64, "x"), (16,), mx.float32), Place(Memory("fixed", 64), (16,), mx.float32)
    launch = lambda reads, writes: recorder_module.Launch(None, {}, (1, 1, 1), 32, tuple(reads), tuple(writes))
    steps = ([fixed], a), ([fixed], b), ([a, b], c), ([c], lane), ([lane, fixed], d), ([d], lane)
    tape = Tape([launch(reads, [write]) for reads, write in steps])
    plan = arrange(tape)
    assert plan.waits == [(), (), (0, 1), (2,), (3,), (4,)], "d lies where a was, which was written by 0 and read by 2; 3 comes after both"
    assert plan.offsets[d.memory] in (plan.offsets[a.memory], plan.offsets[b.memory]) and plan.offsets[a.memory] != plan.offsets[b.memory]
    tape.parts.append(3)
    assert arrange(tape).waits[3] == ()


@pytest.mark.device
def test_on_a_device(tmp_path):
    """The graphs of a real device give the bits of built steps: rows alone and in windows, taps, after prompts in between."""
    if not mx.cuda.is_available():
        pytest.skip("needs a GPU of NVIDIA's that MLX computes on")
    for trunk in (build_trunk(open_pack(embedded_pack()), dtype=mx.bfloat16, packed=True, routes="cuda"), _tiny_on_device(tmp_path)):
        assert trunk.routes.replay is not None, trunk.routes.built
        ids = list(tokens(96, 60))
        cuts = [PROMPT, *range(PROMPT + 1, 20), 23, 31, 40, 41, 45]
        want, built, taps = feed(trunk, ids, cuts, recorded=False, taps=True)
        got, target, mine = feed(trunk, ids, cuts, taps=True)
        np.testing.assert_array_equal(got, want)
        assert state(target) == state(built) and all(np.array_equal(a, b) for a, b in zip(mine, taps, strict=True))
        target.rows(ids[45:46])  # the block of a step that was never played is empty, and its choices are no experts
        kinds = trunk.routes.replay.ready(target.lane, target.n, 1, True, False).loaded.kernel_seconds()
        assert all(count >= 1 and seconds > 0 for count, seconds in kinds.values())


def _tiny_on_device(folder):
    write_pack(folder, V4)
    return build_trunk(open_pack(folder), dtype=mx.bfloat16, packed=True, qat_sim=True, routes="cuda")
