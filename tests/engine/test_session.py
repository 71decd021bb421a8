"""Answering on the embedded pack: reuse, cancel, interleaving, seeds, and memory that stays flat."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from dsv41chat.engine import SamplingParams, answer, open_engine
from dsv41chat.engine.errors import ContextFull, EngramReadError, PackIncomplete, PackUnsupported
from dsv41chat.engine.events import Done, Piece, Prefill, Residency
from dsv41chat.nano import embedded_pack
from tests.sessions import done, prompt

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=7)


@pytest.fixture(scope="module")
def engine():
    return open_engine(embedded_pack())


def test_events_in_order(engine):
    events = list(engine.new_session().generate(prompt(engine, "Hello"), GREEDY, max_tokens=12))
    assert isinstance(events[0], Residency) and isinstance(events[1], Prefill) and isinstance(events[-1], Done)
    last = events[-1]
    pieces = [e for e in events if isinstance(e, Piece)]
    assert "".join(p.text for p in pieces if p.channel == "answer") == last.text
    assert tuple(i for p in pieces for i in p.ids) == last.ids
    assert last.usage["prompt_tokens"] == last.usage["cached_tokens"] + last.usage["prefilled_tokens"]
    assert last.usage["completion_tokens"] == len(last.ids) == last.usage["thinking_tokens"] + last.usage["answer_tokens"]


def test_the_next_turn_reuses_the_lane_and_equals_a_fresh_session(engine):
    session = engine.new_session()
    first = done(session.generate(prompt(engine, "Hello"), SAMPLED, max_tokens=20))
    second_prompt = prompt(engine, "Hello", first, "And then?")
    before = session.rows_run
    second = done(session.generate(second_prompt, SAMPLED, max_tokens=20, draft="off"))
    fresh = done(engine.new_session().generate(second_prompt, SAMPLED, max_tokens=20))
    assert second.ids == fresh.ids and fresh.usage["cached_tokens"] == 0
    assert second.usage["cached_tokens"] >= len(second_prompt.ids) - len(prompt(engine, "And then?").ids) - 8
    rows = session.rows_run - before
    assert rows == second.usage["prefilled_tokens"] + len(second.ids) - 1, "the usage figures are the trunk's own row count"


def test_an_edit_far_back_starts_again(engine):
    session, long = engine.new_session(), "word " * 60
    done(session.generate(prompt(engine, long + "one"), GREEDY, max_tokens=4))
    edited = prompt(engine, "Other " + long + "two")
    got = done(session.generate(edited, GREEDY, max_tokens=8))
    assert got.ids == done(engine.new_session().generate(edited, GREEDY, max_tokens=8)).ids


def test_seeds(engine):
    """A prompt that the embedded model is not sure about: on others every seed gives its one answer."""
    p = prompt(engine, "First question")
    run = lambda seed: done(engine.new_session().generate(p, SamplingParams(temperature=0.8, seed=seed), max_tokens=24)).ids
    assert run(7) == run(7) and len({run(seed) for seed in (7, 8, 9)}) > 1


@pytest.mark.parametrize("at", ["prefill", "answer"])
def test_cancel_keeps_what_was_said_and_harms_nothing(engine, at):
    session, p = engine.new_session(), prompt(engine, "lorem ipsum " * 40)
    assert len(p.ids) > engine.prefill_chunk
    polls = iter(range(10**6))
    limit = 1 if at == "prefill" else 9
    got = done(session.generate(p, GREEDY, max_tokens=16, cancel=lambda: next(polls) >= limit))
    assert got.finish == "cancelled" and (len(got.ids) == 0) == (at == "prefill")
    read = min(session.rows_run, len(p.ids)) if at == "answer" else engine.prefill_chunk
    assert got.usage["prefilled_tokens"] == read and got.usage["cached_tokens"] == 0, "what was read, not what was to be read"
    whole = done(engine.new_session().generate(p, GREEDY, max_tokens=16))
    assert whole.ids[: len(got.ids)] == got.ids
    assert done(session.generate(p, GREEDY, max_tokens=16)).ids == whole.ids


def test_interleaved_sessions_answer_as_alone(engine):
    prompts = [prompt(engine, "First question"), prompt(engine, "A second, longer question about things")]
    alone = [done(engine.new_session().generate(p, SAMPLED, max_tokens=16)).ids for p in prompts]
    running = [engine.new_session().generate(p, SAMPLED, max_tokens=16) for p in prompts]
    last: list = [None, None]
    while any(e is not None for e in running):
        for i, events in enumerate(running):
            if events is not None and (event := next(events, None)) is not None:
                last[i] = event
            else:
                running[i] = None
    assert [e.ids for e in last] == alone


def test_a_table_that_cannot_be_read_ends_the_turn_at_the_last_commit(engine, monkeypatch):
    session, p = engine.new_session(), prompt(engine, "Hello there, how are you?")
    whole = done(engine.new_session().generate(p, GREEDY, max_tokens=12)).ids
    layer = next(layer for layer in engine.trunk.layers if layer.engram is not None)
    step, calls = layer.engram, iter(range(10**6))

    def failing(h, table_rows, dead):
        if next(calls) >= 1:
            raise EngramReadError("rows.safetensors: read at offset 123 failed")
        return step(h, table_rows, dead)

    monkeypatch.setattr(layer, "engram", failing)
    with pytest.raises(EngramReadError, match="offset 123"):
        list(session.generate(p, GREEDY, max_tokens=12))
    assert len(session.target.lane.ids) == session.target.n
    monkeypatch.setattr(layer, "engram", step)
    assert done(session.generate(p, GREEDY, max_tokens=12)).ids == whole


def test_context_limits(engine):
    small = open_engine(embedded_pack(), context=32)
    with pytest.raises(ContextFull, match="context holds 32"):
        list(small.new_session().generate(prompt(small, "word " * 40), GREEDY, max_tokens=5))
    p = prompt(small, "word " * 8)
    got = done(small.new_session().generate(p, GREEDY, max_tokens=500))
    assert got.finish == "length" and len(p.ids) + len(got.ids) == 32
    with pytest.raises(PackUnsupported, match="context of 99,999"):
        open_engine(embedded_pack(), context=99_999)


def test_a_pack_without_a_tokenizer_cannot_chat(engine, monkeypatch):
    monkeypatch.setattr(engine, "tokenizer", None)
    with pytest.raises(PackIncomplete, match="no tokenizer.json"):
        list(engine.new_session().generate(None, GREEDY, max_tokens=5))


def live_arrays() -> int:
    gc.collect()
    return sum(isinstance(o, mx.array) for o in gc.get_objects())


@pytest.mark.parametrize("tokens", [320, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_stays_flat(engine, monkeypatch, tokens):
    """No growing graph, no leaking array, no trace per step; the pools grow as planned and no more.

    Noise at a temperature that drowns the model, and no stop ids, so that the answer does not end.
    """
    monkeypatch.setattr(answer, "stop_ids", lambda tokenizer, family: (-1, frozenset()))
    traces, compile_ = [], mx.compile
    monkeypatch.setattr(mx, "compile", lambda *args, **options: traces.append(args) or compile_(*args, **options))
    session, noise = engine.new_session(), SamplingParams(temperature=100.0, seed=7)
    marks, produced = [], 0
    for event in session.generate(prompt(engine, "Hello"), noise, max_tokens=tokens, loop_stop=False):
        produced += len(event.ids) if isinstance(event, Piece) else 0
        if produced >= tokens // 4 * (len(marks) + 1):
            # Rows that wait for a parked drafter, at most its window, are no growth: it works them off here.
            waiting = live_arrays()
            session.drafter.state()
            arrays = live_arrays()
            assert waiting - arrays <= session.drafter.window
            pools = sum(a.nbytes for a in session.target.lane.arrays())
            marks.append((arrays, mx.get_active_memory() - pools, len(traces)))
    assert len(marks) == 4
    for live, held, compiled in marks[1:]:
        assert live <= marks[0][0] + 2 and held <= marks[0][1] + 16 * 1024 and compiled == marks[0][2]
