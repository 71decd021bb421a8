"""A V4 build behind the doors that both front ends use: sessions, drafted rounds, the scripted mode, the full screen."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from dsv41chat.engine import SamplingParams, open_engine
from dsv41chat.engine.draft.base import PlainDrafter, Proposal
from dsv41chat.engine.draft.depth import FixedDepth
from dsv41chat.engine.events import DraftRound, Piece
from dsv41chat.settings import load_settings
from dsv41chat.store import Store
from dsv41chat.ui.app import ChatApp
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.turn import TurnController
from tests.engine.v4 import tiny
from tests.sessions import done, prompt
from tests.small_tokenizer import small_tokenizer, small_tokenizer_json
from tests.ui.tui import say, shows

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    """A V4 pack that can be talked to; its weights are random."""
    folder = tmp_path_factory.mktemp("builds") / "tiny-v4"
    tiny.write_pack(folder, {"vocab_size": small_tokenizer().vocab_size})
    (folder / "tokenizer.json").write_text(small_tokenizer_json(), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_tokens": 12}))
    return folder


@pytest.fixture(scope="module")
def engine(build):
    return open_engine(build)


class Scripted(PlainDrafter):
    """Proposes the true continuation with every third guess wrong."""

    block, window, needs_taps = 5, 4096, True

    def __init__(self, ids, prompt_length):
        self.ids, self.prompt_length, self.taps = ids, prompt_length, []

    def ingest(self, taps, first_pos, next_tokens):
        self.taps.append((first_pos, tuple(taps.shape), len(next_tokens)))

    def propose(self, pending, n, want, sampling):
        at = n + 1 - self.prompt_length
        true = self.ids[at : at + want]
        return Proposal(tuple(t if (n + j) % 3 else (t + 1) % 90 for j, t in enumerate(true)))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_drafted_equals_plain(engine, monkeypatch, sampling, depth):
    p = prompt(engine, "Hello there, " * 9)
    plain = done(engine.new_session().generate(p, sampling, max_tokens=60, loop_stop=False))
    assert len(plain.ids) > 25
    monkeypatch.setattr(engine.drafting, "depth", lambda mode, policy: FixedDepth(depth))
    session = engine.new_session()
    drafter = session.drafter = Scripted(plain.ids, len(p.ids))
    events = list(session.generate(p, sampling, max_tokens=60, draft=depth, loop_stop=False))
    assert events[-1].ids == plain.ids
    rounds = [e for e in events if isinstance(e, DraftRound)]
    assert 0 < sum(r.accepted for r in rounds) < sum(r.proposed for r in rounds)
    width = tiny.CONFIG["hidden_size"] * tiny.CONFIG["hc_mult"]
    assert all(shape == (count, width) for _, shape, count in drafter.taps), "MTP reads the streams of every committed row"
    positions = [first for first, _, _ in drafter.taps]
    assert positions == sorted(positions) and sum(count for _, _, count in drafter.taps) == len(p.ids) - 1 + len(plain.ids)


def test_turns_reuse_the_lane_and_equal_a_fresh_session(engine):
    session = engine.new_session()
    first = done(session.generate(prompt(engine, "One"), SAMPLED, max_tokens=20))
    again = prompt(engine, "One", first, "Two")
    second = done(session.generate(again, SAMPLED, max_tokens=20))
    fresh = done(engine.new_session().generate(again, SAMPLED, max_tokens=20))
    assert second.ids == fresh.ids and second.usage["cached_tokens"] > 0 == fresh.usage["cached_tokens"]


@pytest.mark.parametrize("polls", [1, 6])
def test_cancelled_equals_never_asked(engine, polls):
    p = prompt(engine, "word " * 150)
    whole = done(engine.new_session().generate(p, SAMPLED, max_tokens=16))
    session, asked = engine.new_session(), iter(range(10**6))
    cut = done(session.generate(p, SAMPLED, max_tokens=16, cancel=lambda: next(asked) >= polls))
    assert cut.finish == "cancelled" and whole.ids[: len(cut.ids)] == cut.ids
    assert done(session.generate(p, SAMPLED, max_tokens=16)).ids == whole.ids


def test_interleaved_sessions_answer_as_alone(engine):
    prompts = [prompt(engine, "First"), prompt(engine, "A second and longer question, " * 5)]
    alone = [done(engine.new_session().generate(p, SAMPLED, max_tokens=16)).ids for p in prompts]
    running = {i: engine.new_session().generate(p, SAMPLED, max_tokens=16) for i, p in enumerate(prompts)}
    last = {}
    while running:
        for i, events in list(running.items()):
            event = next(events, None)
            if event is None:
                del running[i]
            else:
                last[i] = event
    assert [last[i].ids for i in (0, 1)] == alone


def test_memory_stays_flat(engine):
    """260 tokens: no growing graph, no leaking array; rings keep their size and pools grow by blocks."""
    session, marks, produced = engine.new_session(), [], 0
    for event in session.generate(prompt(engine, "Hello there, " * 9), SamplingParams(temperature=0.9, seed=9), max_tokens=260, loop_stop=False):
        produced += len(event.ids) if isinstance(event, Piece) else 0
        if isinstance(event, Piece) and produced >= 60 * (len(marks) + 1):
            gc.collect()
            arrays = sum(isinstance(o, mx.array) for o in gc.get_objects())
            marks.append((arrays, mx.get_active_memory() - sum(a.nbytes for a in session.target.lane.arrays())))
    assert len(marks) == 4
    assert max(m[0] for m in marks[1:]) <= marks[0][0] + 2
    assert max(m[1] for m in marks[1:]) <= marks[0][1] + 64 * 1024


def test_scripted_mode(build, engine, tmp_path):
    """`--model FOLDER` from a fresh process: the same ids as the engine in this one, the build named in the result."""
    environ = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "dsv41chat", "--headless", "--json", "--no-save", "--model", str(build), "-p", "Hello", "--effort", "off"]
    root = Path(__file__).parents[2]
    run = subprocess.run(words, capture_output=True, text=True, env=environ, cwd=root, timeout=120, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    here = done(engine.new_session().generate(prompt(engine, "Hello"), GREEDY, max_tokens=12))
    assert result["text"] == here.text and result["build"]["family"] == "v4" and result["usage"]["completion_tokens"] == len(here.ids)


async def test_full_screen(build, engine, tmp_path):
    (tmp_path / "config.toml").write_text("")
    settings = load_settings(config=tmp_path / "config.toml", data_dir=tmp_path / "data", environ={"DSV41CHAT_ENGINE_MODEL": str(build)})
    store = Store.memory(background=False)
    host = EngineHost(settings, store)
    app = ChatApp(TurnController(store, host, settings))
    try:
        async with app.run_test(size=(100, 30)) as pilot:
            await say(pilot, app, "Hello")
            await shows(app, "tiny-v4")
            assert host.engine.family == "v4"
    finally:
        host.close()
        store.close()
