"""A lane on disk is the lane: both families, every border, other processes, other drafters."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import open_engine
from dsv41chat.engine.errors import SnapshotMismatch
from dsv41chat.engine.invariance import RowsTest
from dsv41chat.engine.snapshot import fixed, growing, restore, state_facts, to_bytes
from tests.engine.v4 import tiny
from tests.v41 import PACK, lane_bits

ROOT = Path(__file__).parents[2]
BORDERS = (1, 2, 3, 11, 12, 13, 15, 16, 17, 127, 128, 129, 130, 255)


@pytest.fixture(scope="module", params=["v41", "v4"])
def engine(request, tmp_path_factory):
    if request.param == "v41":
        return open_engine(PACK)
    folder = tmp_path_factory.mktemp("v4")
    tiny.write_pack(folder)
    return open_engine(folder)


def ids_of(engine, count: int) -> list[int]:
    return np.random.default_rng(5).integers(3, engine.trunk.config.vocab_size, count).tolist()


def forward(session, ids) -> np.ndarray:
    target = session.target
    trial = target.rows(ids)
    target.commit(trial, len(ids))
    return np.array(trial.logits)


def stored(session, cuts=()):
    """(ids, tensors, meta) with the growing parts cut into segments at `cuts` and joined again, as the store does."""
    lane = session.target.lane
    borders = [0, *(c for c in cuts if c < lane.n), lane.n]
    parts = [growing(lane, a, b) for a, b in zip(borders, borders[1:])]
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        found = [part[name] for part in parts if name in part]
        rows = sum(t[1][0] for t in found)
        joined[name] = found[0][0], (rows, *found[0][1][1:]), b"".join(bytes(t[2]) for t in found)
    tail, meta = fixed(session)
    return list(lane.ids), joined | tail, meta


def test_round_trip_and_resumed_equals_uninterrupted(engine):
    """At every border: all arrays come back bit for bit, and what follows is bit for bit what would have followed."""
    ids = ids_of(engine, 300)
    session, other = engine.new_session(), engine.new_session()
    want = forward(engine.new_session(), ids)
    done = 0
    for border in BORDERS:
        forward(session, ids[done:border])
        done = border
        restore(other, *stored(session, cuts=(7, 64, 128)))
        assert lane_bits(other.target) == lane_bits(session.target)
        np.testing.assert_array_equal(forward(other, ids[border : border + 20]), want[border : border + 20])
        assert not other.target.lane.truncate(border - 1) or border == 1


@pytest.fixture(scope="module", params=["v41", "v4"])
def roomy(request, tmp_path_factory):
    """The same two with room for more than 4,097 tokens."""
    folder = tmp_path_factory.mktemp("roomy") / "pack"
    if request.param == "v41":
        shutil.copytree(PACK, folder)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = 8192
        (folder / "config.json").write_text(json.dumps(config))
    else:
        tiny.write_pack(folder, {"max_position_embeddings": 8192})
    return open_engine(folder)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1000, 4097])
def test_round_trip_far_out(roomy, n):
    engine = roomy
    ids, session, other = ids_of(engine, n + 20), engine.new_session(), engine.new_session()
    for a in range(0, n, 128):
        forward(session, ids[a : min(n, a + 128)])
    restore(other, *stored(session, cuts=(128, 1000)))
    assert lane_bits(other.target) == lane_bits(session.target)
    np.testing.assert_array_equal(forward(other, ids[n:]), forward(session, ids[n:]))


def test_copies_not_views(engine):
    """What was saved does not move with the lane, and the lane does not move with what was saved."""
    ids, session = ids_of(engine, 260), engine.new_session()
    forward(session, ids[:130])
    saved = stored(session)
    before = {name: bytes(t[2]) for name, t in saved[1].items()}
    forward(session, ids[130:])
    assert {name: bytes(t[2]) for name, t in saved[1].items()} == before
    loaded = {name: (d, s, bytearray(b)) for name, (d, s, b) in saved[1].items()}
    other = engine.new_session()
    restore(other, saved[0], loaded, saved[2])
    bits = lane_bits(other.target)
    for _, _, data in loaded.values():
        data[:] = b"\xff" * len(data)
    assert lane_bits(other.target) == bits


def test_a_mark_in_memory_is_the_state_it_was(engine):
    ids, session = ids_of(engine, 300), engine.new_session()
    forward(session, ids[:150])
    bits, mark = lane_bits(session.target), session.target.lane.mark()
    forward(session, ids[150:])
    assert not session.target.lane.truncate(150), "this far back only the mark goes"
    assert session.target.lane.rewind(mark) and lane_bits(session.target) == bits
    fork = [5] * 40
    got = forward(session, fork)
    fresh = engine.new_session()
    forward(fresh, ids[:150])
    np.testing.assert_array_equal(forward(fresh, fork), got)
    assert session.target.lane.rewind(mark)
    assert not session.target.lane.truncate(149), "nothing below a mark is held"
    forward(session, [6, 7, 8])
    session.target.lane.reset()
    assert not session.target.lane.rewind(mark), "a lane that was emptied since has other rows below it"


def test_states_that_do_not_fit(engine):
    session, other = engine.new_session(), engine.new_session()
    forward(session, ids_of(engine, 140))
    ids, tensors, meta = stored(session)
    name = next(iter(tensors))
    dtype, shape, data = tensors[name]
    for wrong in (
        tensors | {"pool.99": tensors[name]},
        {k: v for k, v in tensors.items() if k != name},
        tensors | {name: (dtype, (shape[0] - 1, *shape[1:]), bytes(data)[: len(data) // shape[0] * (shape[0] - 1)])},
    ):
        with pytest.raises(SnapshotMismatch):
            restore(other, ids, wrong, meta)
        assert other.target.n == 0
    if "eng.hist" in tensors:
        with pytest.raises(SnapshotMismatch, match="n-gram history"):
            restore(other, [*ids[:-1], (ids[-1] + 1) % 100 + 3], tensors, meta)


class Scripted:
    """A drafter with a ring, to see that its rows go and come with the lane."""

    kind, block, window, needs_taps, rings = "scripted", 3, 8, False, None

    def __init__(self):
        self.seen = mx.zeros((4, 2))

    def state(self):
        return {"draft.0.win": self.seen, "draft.pos": mx.array([1, 2], mx.int32)}

    def load(self, state, n):
        self.loaded = state

    def reset(self):
        self.loaded = None


def test_rings_of_a_drafter(engine):
    session, other, blind = (engine.new_session() for _ in range(3))
    for one in (session, other, blind):
        one.drafter = Scripted()
    session.drafter.seen = mx.arange(8).reshape(4, 2).astype(mx.float32)
    forward(session, ids_of(engine, 20))
    ids, tensors, meta = stored(session)
    restore(other, ids, tensors, meta)
    assert to_bytes(other.drafter.loaded["draft.0.win"]) == to_bytes(session.drafter.seen)
    blind.drafter.block = 5
    restore(blind, ids, tensors, meta)
    assert blind.drafter.loaded == {} and blind.target.n == 20, "another drafter starts blind, the tokens are the same"


def test_the_facts_of_a_state(engine, tmp_path):
    facts = state_facts(engine)
    assert json.loads(json.dumps(facts)) == facts
    if engine.family == "v41":
        other = open_engine(PACK, cache_quant=False)
        assert state_facts(other) != facts
        assert state_facts(open_engine(PACK)) == facts


def test_rows_are_independent_of_their_neighbours_here(engine):
    """The self-test that decides where marks may stand; on this route it passes."""
    assert RowsTest(engine.trunk).run() is True


def test_fault_a_route_that_depends_on_the_width(engine, monkeypatch):
    forward_rows = type(engine.trunk).forward

    def planted(self, lane, ids, start, *args, **options):
        trial = forward_rows(self, lane, ids, start, *args, **options)
        if trial.logits is not None and len(ids) > 40:
            trial.logits = trial.logits * (1 + 1e-6)
        return trial

    monkeypatch.setattr(type(engine.trunk), "forward", planted)
    assert RowsTest(engine.trunk).run() is False


CHILD = """
import sys, pickle, numpy as np
sys.path.insert(0, {root!r})
from tests.contracts.test_states import forward, open_engine, restore
engine, out = open_engine(sys.argv[1]), []
for ids, tensors, meta, more in pickle.load(open(sys.argv[2], 'rb')):
    session = engine.new_session()
    restore(session, ids, tensors, meta)
    out.append(forward(session, more))
np.save(sys.argv[3], np.concatenate(out))
"""


def test_in_another_process(engine, tmp_path):
    """Saved at each border, cut into segments, loaded by a new process: the next rows are bit for bit those of the lane that went on."""
    import pickle

    ids, session, states, done = ids_of(engine, 300), engine.new_session(), [], 0
    for border in BORDERS:
        forward(session, ids[done:border])
        done = border
        states.append((*stored(session, cuts=(7, 64, 128)), ids[border : border + 20]))
    whole = forward(engine.new_session(), ids)
    want = np.concatenate([whole[border : border + 20] for border in BORDERS])
    with open(tmp_path / "state", "wb") as file:
        pickle.dump(states, file)
    words = [sys.executable, "-c", CHILD.format(root=str(ROOT)), str(engine.pack.folder), str(tmp_path / "state"), str(tmp_path / "out.npy")]
    subprocess.run(words, check=True, cwd=ROOT, timeout=300)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), want)


def test_where_marks_stand(engine, tmp_path, monkeypatch):
    """S on the grid, P before the pending id or on the grid, grid marks far from both; the ends of wide open groups stay on the grid."""
    from dsv41chat.engine.chat.encode import EncodedPrompt
    from dsv41chat.engine.engine import Engine
    from dsv41chat.ui import states as module

    states, session = module.States(tmp_path / "states", 1 << 30, min_free_bytes=0), engine.new_session()
    states.bind(engine, "tiny")
    prompt = lambda n, system=0: EncodedPrompt(tuple(range(n)), "content", system, n - 1, engine.family)
    try:
        assert states.plan(session, prompt(9000, 700), 0) == {8999: "P", 640: "S", 4096: "G"}
        assert states.plan(session, prompt(9000, 700), 5000) == {8999: "P"}
        assert states.plan(session, prompt(20), 0) == {}, "too short to be worth a file"
        assert states.plan(session, prompt(200), 198) == {199: "P"} and states.plan(session, prompt(200), 199) == {}
        monkeypatch.setattr(module, "EXTRA_TAIL_BYTES", -(1 << 40))
        assert states.plan(session, prompt(1000), 0) == {896: "P"}, "open groups that weigh much are left on the grid"
        monkeypatch.setattr(Engine, "row_invariant", property(lambda self: False))
        assert states.plan(session, prompt(1000), 0) == {896: "P"} and states.plan(session, prompt(904), 0) == {768: "P"}
        states._strict = True
        engine_chunk, engine.prefill_chunk = engine.prefill_chunk, 512
        assert states.plan(session, prompt(1000, 700), 0) == {512: "P"}
        engine.prefill_chunk = engine_chunk
    finally:
        states.close()
