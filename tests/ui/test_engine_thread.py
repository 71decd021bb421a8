"""The one thread that touches the engine: order, results, errors, joining of events, abandoning."""

from __future__ import annotations

import threading
import time

import pytest

from dsv41chat.engine.events import DraftRound, Piece, Prefill
from dsv41chat.ui.engine_thread import Abandoned, EngineThread
from dsv41chat.ui.turn_events import merge_events


@pytest.fixture
def thread():
    made = EngineThread()
    yield made
    assert made.close(60.0)


def test_jobs_run_in_order_on_one_thread(thread):
    seen = []
    futures = [thread.submit(lambda i=i: seen.append((i, threading.current_thread().name))) for i in range(20)]
    for future in futures:
        future.result(60)
    assert [i for i, _ in seen] == list(range(20)) and {name for _, name in seen} == {"engine"}
    assert thread.call(lambda: thread.call(lambda: 7)) == 7, "a job may call"


def test_errors_reach_the_caller(thread):
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 / 0)

    def job(emit):
        emit(1)
        raise KeyError("x")

    events = iter(thread.stream(job))
    assert next(events) == 1
    with pytest.raises(KeyError):
        next(events)
    assert thread.call(lambda: "still there") == "still there"


def test_a_stream_ends_with_the_result(thread):
    stream = thread.stream(lambda emit: [emit(i) for i in range(3)] and "end")
    assert list(stream) == [0, 1, 2] and stream.result == "end" and stream.ended.wait(60)


def test_fast_events_are_joined_and_nothing_is_lost(thread):
    def job(emit):
        for i in range(2000):
            emit(Piece("answer" if i < 1500 else "thinking", str(i % 10), (i,)))
            emit(DraftRound(2, 2, i % 3))
            if i == 700:
                emit(Prefill(0, 1, 2, 3.0))
            if i % 50 == 0:
                time.sleep(0.005)

    began = time.monotonic()
    events = list(thread.stream(job, merge=merge_events))
    seconds = time.monotonic() - began
    pieces = [e for e in events if isinstance(e, Piece)]
    assert sum((p.ids for p in pieces), ()) == tuple(range(2000))
    assert "".join(p.text for p in pieces) == "".join(str(i % 10) for i in range(2000))
    rounds = [e for e in events if isinstance(e, DraftRound)]
    assert (sum(r.proposed for r in rounds), sum(r.accepted for r in rounds)) == (4000, sum(i % 3 for i in range(2000)))
    assert len(pieces) <= 60 * seconds + 5
    before = [p for p in events[: events.index(Prefill(0, 1, 2, 3.0))] if isinstance(p, Piece)]
    assert before[-1].ids[-1] == 700, "an event that cannot be joined keeps its place"


def test_a_lone_event_is_not_held_back(thread):
    release = threading.Event()

    def job(emit):
        emit(Piece("answer", "a", (1,)))
        emit(Piece("answer", "b", (2,)))
        release.wait(60)

    events = iter(thread.stream(job, merge=merge_events))
    assert next(events).text + next(events).text == "ab"
    release.set()
    assert list(events) == []


def test_abandoning_ends_the_reading_at_once(thread):
    release = threading.Event()
    stream = thread.stream(lambda emit: (emit(1), release.wait(60)))
    events = iter(stream)
    assert next(events) == 1
    stream.abandon()
    with pytest.raises(Abandoned):
        next(events)
    assert not stream.ended.is_set()
    release.set()
    assert stream.ended.wait(60)


def test_close_says_whether_a_job_still_runs():
    thread = EngineThread()
    release = threading.Event()
    thread.submit(release.wait, 60)
    assert not thread.close(0.05)
    release.set()
    assert thread.close(60)
    with pytest.raises(RuntimeError):
        thread.submit(print)
