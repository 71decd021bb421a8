"""Drafted answers through the session: cuts at every index of a block, cancel, resume, options, figures."""

from __future__ import annotations

import json
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.cli import main
from dsv41chat.engine import SamplingParams, answer, open_engine, verify_goldens
from dsv41chat.engine.draft.guard import GuardedDrafter
from dsv41chat.engine.errors import EngineError
from dsv41chat.engine.events import Done, DraftRound
from dsv41chat.engine.golden_drafts import continuation
from dsv41chat.engine.kernels import compiled
from dsv41chat.nano import embedded_pack
from tests import drafting, weights
from tests.engine.test_session import GREEDY, done, prompt

pytestmark = pytest.mark.usefixtures("shared_weights")
SAMPLED = SamplingParams(temperature=0.8, seed=7)


@pytest.fixture(scope="module")
def engine():
    return open_engine(embedded_pack())


@pytest.fixture(scope="module")
def p(engine):
    return prompt(engine, "Tell me something")


@pytest.fixture(scope="module")
def plain(engine, p):
    session = engine.new_session()
    return done(session.generate(p, SAMPLED, max_tokens=18, draft="off"))


def oracle_session(engine, p, plain):
    session = engine.new_session()
    session.drafter = drafting.oracle([*p.ids, *plain.ids, 3], engine.pack.config.vocab_size)
    return session


def check_end(session, p, got: Done, want: tuple[int, ...]) -> None:
    """Ids, usage, lane and drafter all end at the cut."""
    assert got.ids == want
    assert got.usage["completion_tokens"] == len(want) and got.usage["context_used"] == len(p.ids) + len(want)
    assert session.target.n == len(p.ids) + len(want) - 1
    assert session.target.lane.ids == [*p.ids, *want[:-1]]
    assert sorted(session.drafter.rows) == list(range(session.target.n))
    assert got.draft["accepted"] == len(want) - got.draft["rounds"]


def test_the_budget_falls_on_every_index_of_a_block(engine, p, plain):
    for count in range(1, 9):
        session = oracle_session(engine, p, plain)
        got = done(session.generate(p, SAMPLED, max_tokens=count, draft=5))
        assert got.finish == "length"
        check_end(session, p, got, plain.ids[:count])


def test_a_stop_id_falls_on_every_index_of_a_block(engine, p, plain, monkeypatch):
    for at in range(8):
        if plain.ids[at] in plain.ids[:at]:
            continue
        monkeypatch.setattr(answer, "stop_ids", lambda tokenizer, family, at=at: (plain.ids[at], frozenset()))
        session = oracle_session(engine, p, plain)
        got = done(session.generate(p, SAMPLED, max_tokens=18, draft=5))
        assert got.finish == "stop"
        check_end(session, p, got, plain.ids[: at + 1])


def test_a_stop_string_falls_on_every_index_of_a_block(engine, p, plain):
    """The string ends with the text of token `at`, so that this token completes it."""
    pieces, cut = [], 0
    for at in range(1, 9):
        whole = done(engine.new_session().generate(p, SAMPLED, max_tokens=at + 1, draft="off")).text
        pieces.append(whole)
    for at, text in enumerate(pieces[1:], 2):
        grown = text[len(pieces[at - 2]) :]
        if not grown or "\ufffd" in text or text.find(text[-3:]) != len(text) - 3 or len(text) < 3:
            continue
        stop = text[-3:]
        want = done(engine.new_session().generate(p, SAMPLED, max_tokens=18, draft="off", stop=(stop,)))
        session = oracle_session(engine, p, plain)
        got = done(session.generate(p, SAMPLED, max_tokens=18, draft=5, stop=(stop,)))
        assert (got.finish, got.text) == (want.finish, want.text) == ("stop_string", want.text)
        check_end(session, p, got, want.ids)
        cut += 1
    assert cut, "no token of this answer could be used"


def test_cancel_between_verify_and_commit(engine, p, plain):
    """Nothing of the round counts, and going on is as if it had never begun (test T6)."""
    for poll in (4, 6, 8):
        session, polls = oracle_session(engine, p, plain), iter(range(10**6))
        session.drafter.guess = lambda position, true: true if position % 4 else (true + 1) % 4000
        got = done(session.generate(p, SAMPLED, max_tokens=18, draft=5, cancel=lambda: next(polls) == poll))  # noqa: B023
        assert got.finish == "cancelled" and 0 < len(got.ids) < 18 and got.ids == plain.ids[: len(got.ids)]
        check_end(session, p, got, got.ids)
        again = done(session.generate(p, SAMPLED, max_tokens=18, draft=5))
        assert again.ids == plain.ids


def test_options_and_figures(engine, p, plain):
    """One answer whatever drafts; the figures say how it came about."""
    seen = {}
    for mode in ("off", 0, 1, 2, 3, 4, 5, 64, "auto"):
        events = list(engine.new_session().generate(p, SAMPLED, max_tokens=18, draft=mode))
        got, rounds = events[-1], [e for e in events if isinstance(e, DraftRound)]
        assert got.ids == plain.ids and got.draft["mode"] == str(mode)
        assert got.draft["proposed"] == sum(r.proposed for r in rounds) and got.draft["accepted"] == sum(r.accepted for r in rounds)
        assert sum(a for _, a in got.draft["by_depth"]) == got.draft["accepted"]
        if mode in ("off", 0):
            assert [(r.depth, r.proposed) for r in rounds] == [(0, 0)]
        elif mode != "auto":
            assert max(r.depth for r in rounds) == min(mode, 5) == len(got.draft["by_depth"])
        seen[mode] = json.dumps(got.draft["by_depth"])
    assert len({seen[k] for k in (0, 1, 2, 3, 4, 5)}) == 6 and seen[5] == seen[64]


@pytest.mark.parametrize("setting", ["greedy", "warm"])
def test_the_embedded_drafter_at_every_depth(engine, setting):
    """Contracts C1 and C2 on the embedded pack and its own drafter; stops are ignored."""
    ids, sampling = prompt(engine, "What is a guitar?").ids, drafting.settings(setting, 7)
    plain = drafting.decode(engine.trunk, ids, sampling, 40, states=True)
    for depth in (1, 2, 3, 4, 5):
        run = drafting.decode(engine.trunk, ids, sampling, 40, engine.drafting.new_drafter(), drafting.FixedDepth(depth), states=True)
        assert run.text == plain.text and run.states == {n: plain.states[n] for n in run.states}
        assert run.deepest == depth and run.accepts and run.rejects
    run = drafting.decode(engine.trunk, ids, sampling, 40, engine.drafting.new_drafter(), engine.drafting.new_policy())
    assert run.text == plain.text


def test_plain_turns_do_no_work_for_a_drafter(engine, p, monkeypatch):
    session = engine.new_session()
    monkeypatch.setattr(GuardedDrafter, "propose", lambda *a: pytest.fail("proposed"))
    monkeypatch.setattr(GuardedDrafter, "ingest", lambda *a: pytest.fail("ingested"))
    wanted, rows = [], type(session.target).rows
    monkeypatch.setattr(type(session.target), "rows", lambda self, *a, **k: (wanted.append(k.get("want_taps")), rows(self, *a, **k))[1])
    done(session.generate(p, GREEDY, max_tokens=4, draft="off"))
    assert not any(wanted)


def test_only_the_last_window_of_a_prompt_is_ingested(engine, monkeypatch):
    long, session = prompt(engine, "word " * 200), engine.new_session()
    assert len(long.ids) > engine.prefill_chunk + session.drafter.window
    given = []
    ingest = GuardedDrafter.ingest
    keep = lambda self, taps, first, tokens: (given.append((first, len(tokens))), ingest(self, taps, first, tokens))
    monkeypatch.setattr(GuardedDrafter, "ingest", keep)
    done(session.generate(long, GREEDY, max_tokens=1, draft=5))
    prefill = [g for g in given if g[0] + g[1] <= len(long.ids) - 1]
    assert prefill[0][0] == len(long.ids) - 1 - session.drafter.window and sum(c for _, c in prefill) == session.drafter.window


def test_a_plain_turn_in_between_leaves_a_gap_and_no_harm(engine, p):
    session = engine.new_session()
    first = done(session.generate(p, SAMPLED, max_tokens=8, draft=3))
    turns = ["Tell me something", first, "More"]
    second = done(session.generate(prompt(engine, *turns), SAMPLED, max_tokens=8, draft="off"))
    turns += [second, "And more"]
    third = done(session.generate(prompt(engine, *turns), SAMPLED, max_tokens=8, draft=3))
    assert third.ids == done(engine.new_session().generate(prompt(engine, *turns), SAMPLED, max_tokens=8, draft="off")).ids
    assert third.draft["proposed"]


def test_broken_logits_end_the_turn(engine, p, plain, monkeypatch):
    """Test T12: rows of zeros are what a failed device leaves behind."""
    head = engine.trunk.logits
    for value in (0.0, float("nan")):
        session = oracle_session(engine, p, plain)
        monkeypatch.setattr(engine.trunk, "logits", lambda h, pre, value=value: mx.full((h.shape[0], 4096), value))
        with pytest.raises(EngineError, match="all equal or not finite"):
            list(session.generate(p, GREEDY, max_tokens=8, draft=5))
        monkeypatch.setattr(engine.trunk, "logits", head)
        assert session.target.n == len(session.target.lane.ids) == len(p.ids) - 1
        assert done(session.generate(p, SAMPLED, max_tokens=8, draft=5)).ids == plain.ids[:8]


def test_costs_and_verdicts_are_kept(p, plain):
    facts: dict[str, str] = {}
    engine = open_engine(embedded_pack(), facts=facts)
    assert done(engine.new_session().generate(p, SAMPLED, max_tokens=8)).ids == plain.ids[:8]
    kept = {k.split(".")[0] for k in facts}
    assert {"rows", "draft"} <= kept
    again = open_engine(embedded_pack(), facts=facts)
    assert again.drafting.costs.to_json() == engine.drafting.costs.to_json()
    facts[next(k for k in facts if k.startswith("rows"))] = "damaged"
    assert [str(v) for v in again.drafting.verdicts()] == [str(v) for v in engine.drafting.verdicts()]
    lines, single = engine.drafting.summary(), [v for v in engine.drafting.verdicts() if v.tokenwise]
    assert lines[0] == "dspark, up to 5 tokens a round" and lines[1].endswith(f"{len(single)} row by row")


def test_costs_belong_to_the_route_that_they_were_timed_on(monkeypatch):
    """Figures of one route are no news for another, nor for a build whose operations run row by row; what texts taught is for all."""
    monkeypatch.setattr(weights, "_KEPT", dict(weights._KEPT))
    facts: dict[str, str] = {}
    first = open_engine(embedded_pack(), facts=facts, routes="stock")
    guess = first.drafting.costs.to_json()
    assert first.drafting.calibrate(position=16)  # answers may not: a busy machine stops their drafting before a pass was timed
    timed = first.drafting.costs.to_json()
    assert timed != guess and json.loads(timed)["draft_samples"]
    assert open_engine(embedded_pack(), facts=facts, routes="stock").drafting.costs.to_json() == timed
    fast = open_engine(embedded_pack(), facts=facts, routes="stock", exact="fast").drafting.costs
    assert fast.samples == [0] * 6 and fast.to_json() == guess
    # Of a machine without a route of its own, one operation makes another route; for all of them MLX has a hundred texts compiled.
    best = open_engine(embedded_pack(), facts=facts)
    if not best.trunk.routes.names:
        for op in set(compiled.ROUTE.builders) - {"router"}:
            monkeypatch.delitem(compiled.ROUTE.builders, op)
        best = open_engine(embedded_pack(), facts=facts, routes="compiled")
    assert best.trunk.routes.names and best.drafting.costs.samples == [0] * 6 and best.drafting.costs.to_json() != timed
    if best.trunk.routes.host:
        assert best.drafting.costs.rows[-1] < json.loads(guess)["rows"][-1], "a further row costs less there"


def test_what_texts_taught_is_kept(p):
    facts: dict[str, str] = {}
    engine = open_engine(embedded_pack(), facts=facts)
    fresh, session = engine.drafting.new_policy(), engine.new_session()
    done(session.generate(p, SAMPLED, max_tokens=18))
    assert session.policy.judged and session.policy.acceptance != fresh.acceptance
    half = [(a + b) / 2 for a, b in zip(session.policy.acceptance, fresh.acceptance)]
    for begun in (engine.drafting, open_engine(embedded_pack(), facts=facts).drafting):
        assert begun.new_policy().acceptance == pytest.approx(half)
    done(engine.new_session().generate(p, SAMPLED, max_tokens=4, draft="off"))
    assert engine.drafting.new_policy().acceptance == pytest.approx(half), "a plain answer teaches nothing"


def test_calibration_gives_way_and_then_counts(p):
    facts: dict[str, str] = {}
    drafting = open_engine(embedded_pack(), facts=facts).drafting
    before, polls = drafting.costs.to_json(), iter(range(10**6))
    assert drafting.wants_calibration and not drafting.calibrate(lambda: next(polls) > 8)
    assert drafting.costs.to_json() == before and not any(k.startswith("draft") for k in facts)
    assert drafting.calibrate() and not drafting.wants_calibration and drafting.costs.known
    assert open_engine(embedded_pack(), facts=facts).drafting.costs.to_json() == drafting.costs.to_json()


def test_exact_fast_says_so():
    engine = open_engine(embedded_pack(), exact="fast")
    assert engine.drafting.verdicts() == [] and "near-ties" in engine.drafting.summary()[1]


_RESUME = """
import json, sys
import mlx.core as mx
from dsv41chat.engine import answer, open_engine, SamplingParams
from dsv41chat.engine.chat.encode import EncodedPrompt
from dsv41chat.nano import embedded_pack

answer.stop_ids = lambda tokenizer, family: (-1, frozenset())
folder, ids = sys.argv[1], tuple(json.loads(sys.argv[2]))
engine = open_engine(embedded_pack())
session = engine.new_session()
session.target.lane.load(mx.load(folder + "/lane.safetensors"))
session.drafter.load(mx.load(folder + "/drafter.safetensors"), session.target.n)
p = EncodedPrompt(ids=ids, family="v41", start="content", system_end=0, header_start=0, tools=False, opened=None)
got = list(session.generate(p, SamplingParams(temperature=0.8, seed=7), max_tokens=40, draft=5))[-1]
print(json.dumps([got.ids, got.draft["by_depth"], got.usage["cached_tokens"]]))
"""


def test_a_resumed_conversation_drafts_at_once(engine, tmp_path, monkeypatch):
    """40 tokens at depth 5 in a new process from stored lane and rings, or by prefill: the acceptance of the uninterrupted session.

    Stop ids are ignored, so that there are 40.
    """
    session = engine.new_session()
    first = done(session.generate(prompt(engine, "Tell me something"), SAMPLED, max_tokens=40, draft=5, loop_stop=False))
    monkeypatch.setattr(answer, "stop_ids", lambda tokenizer, family: (-1, frozenset()))
    follow = prompt(engine, "Tell me something", first, "Go on")
    lane = {k: v if isinstance(v, mx.array) else mx.array(v) for k, v in session.target.lane.state().items()}
    mx.save_safetensors(str(tmp_path / "lane.safetensors"), lane)
    mx.save_safetensors(str(tmp_path / "drafter.safetensors"), session.drafter.state())
    want = done(session.generate(follow, SAMPLED, max_tokens=40, draft=5))
    argv = [sys.executable, "-c", _RESUME, str(tmp_path), json.dumps(follow.ids)]
    ids, by_depth, cached = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    assert ids == list(want.ids) and by_depth == want.draft["by_depth"] and cached
    assert len(ids) == 40 and sum(p for p, _ in by_depth) >= 10 and by_depth[0][1]
    fresh = done(engine.new_session().generate(follow, SAMPLED, max_tokens=40, draft=5))
    assert fresh.ids == want.ids and fresh.draft["by_depth"] == want.draft["by_depth"] and not fresh.usage["cached_tokens"]


def test_models_verify_compares_drafts(tmp_path, capfd):
    """One wrong entry of greedy_ids or draft_ids, and the verdict is no: exit 4 on the command line."""
    plain = drafting.load(drafting.DATA / "v41")[0]
    ids = np.random.default_rng(3).integers(3, 150, 12).tolist()
    texts = [drafting.decode(plain, ids, drafting.settings("greedy"), 16).text]
    folder = drafting.write_with_drafter(drafting.DATA / "v41", tmp_path / "p", "dspark", drafting.succession(texts))
    trunk, model = drafting.load(folder)
    greedy, log = continuation(trunk, model, ids, ids[:-1], 14, drafting.FixedDepth(3))
    known = [*ids, *greedy]
    _, log = continuation(trunk, model, known, ids, 13, drafting.FixedDepth(3), rounds=3)
    golden = {
        "input_ids": np.array(ids, np.int32),
        "greedy_ids": np.array(greedy, np.int32),
        "draft_ids": np.array([r[1] for r in log], np.int32),
        "round_n": np.array([r[0] for r in log], np.int32),
        "round_accept": np.array([r[2].accepted for r in log], np.int32),
        "draft_ids_all": np.array([r[1] for r in log], np.int32),
        "draft_n_all": np.array([r[0] for r in log], np.int32),
    }
    assert golden["round_accept"].any()

    path = tmp_path / "golden.safetensors"

    def write(name=None, at=-1):
        """The goldens, with one wrong entry."""
        arrays = {k: v.copy() for k, v in golden.items()}
        if name is not None:
            arrays[name].flat[at] += 1
        mx.save_safetensors(str(path), {k: mx.array(v) for k, v in arrays.items()})

    def verify():
        """Exit code, and the checks by name."""
        code = main(["models", "verify", str(folder), "--goldens", str(path), "--json", "--data-dir", str(tmp_path / "data")]).code
        return code, {c["name"]: c for c in json.loads(capfd.readouterr().out)["checks"]}

    every = ["greedy_ids", *(f"greedy_ids (depth {k})" for k in range(1, 6)), "greedy_ids (adaptive)"]
    write()
    code, checks = verify()
    assert code == 0 and list(checks) == [*every, "draft_ids", "draft_ids_all"] and all(c["ok"] for c in checks.values())
    write("greedy_ids", 12)
    code, checks = verify()
    assert code == 4 and checks["greedy_ids (depth 1)"]["first_bad"] == len(ids) + 12 and not any(checks[name]["ok"] for name in every)
    write("draft_ids")
    code, checks = verify()
    assert code == 4 and [name for name, c in checks.items() if not c["ok"]] == ["draft_ids"]
    for name in ("draft_ids_all", "round_accept"):
        write(name)
        found = verify_goldens(folder, path)
        assert not found.ok and [c.name for c in found.checks if not c.ok] == [name.replace("round_accept", "draft_ids")]
