"""The figures of the status line and of the receipt are the engine's."""

from __future__ import annotations

from types import SimpleNamespace

from dsv41chat.ui.present import age, day_group, duration, receipt
from dsv41chat.ui.status import DRAFT_WINDOW, Status
from dsv41chat.ui.turn_events import DraftRound, Failed, Finished, Loading, Piece, Prefill, Ready, Residency, Resuming, Started, TableState
from dsv41chat.ui.units import size


def texts(status):
    return [text for text, _ in status.fields()]


def started(status):
    status.apply(Started("c", None, None, {}, "cpu", "0"), 0.0)
    status.apply(Ready(None, {}, "cpu", "0", 0.0, 21_966, 65_536), 0.0)


def test_phases_follow_the_events():
    status = Status()
    assert texts(status) == ["idle"]
    started(status)
    status.apply(Loading("weights", 38_000_000_000, 93_000_000_000, "bytes"), 0.1)
    assert texts(status)[0] == "loading 40% 38.0 GB/93.0 GB"
    status.apply(Resuming(21_888), 0.15)
    assert texts(status)[0] == "resuming 21,888"
    status.apply(Prefill(21_888, 40, 78, 1240.0), 0.2)
    assert texts(status)[0] == "prefill 40/78 51% 1,240 tok/s eta 1 s" and "cached 21,888 +40" in texts(status)
    status.apply(Prefill(21_888, 78, 78, 1240.0), 0.3)
    for step in range(40):
        status.apply(Piece("thinking", "x", (1, 2)), 0.4 + step * 0.05)
    assert texts(status)[0] == "thinking 80" and 1.9 < status.thinking_s < 2.0
    for step in range(100):
        status.apply(Piece("answer", "x", (1, 2)), 2.5 + step * 0.05)
    assert texts(status)[0].startswith("gen ") and texts(status)[0].endswith("tok/s 200") and 38 < status.rate.value < 41
    assert f"ctx {21_966 + 280:,}/65,536 34%" in texts(status)
    status.stopping = True
    assert texts(status)[0] == "stopping"
    usage = {"context_used": 22_246, "cached_tokens": 21_888, "prefilled_tokens": 78}
    status.apply(Finished("c", "cancelled", None, "", "", (), "", 0, usage, {}, {}, {}), 9.0)
    assert texts(status)[:3] == ["idle", "ctx 22,246/65,536 34%", "cached 21,888 +78"]
    started(status)
    status.apply(Failed("internal", "x"), 9.0)
    assert texts(status)[0] == "error"


def test_context_warns_in_words():
    status = Status(context_limit=1000)
    for used, style, word in ((100, "", "10%"), (800, "warning", "near limit"), (960, "error", "full")):
        status.context_used = used
        text, found = status.fields()[1]
        assert found == style and text.endswith(word)
    status.context_used, status.forecast = 700, 150
    assert "near limit" in status.fields()[1][0]


def test_drafting_counts_the_last_proposals():
    status = Status()
    started(status)
    for _ in range(100):
        status.apply(DraftRound(3, 3, 0), 0.0)
    for _ in range(DRAFT_WINDOW):
        status.apply(DraftRound(3, 3, 3), 0.0)
    assert "draft 3 · 100%" in texts(status)
    started(status)
    status.apply(DraftRound(0, 0, 0), 0.0)
    assert "draft off" in texts(status)


def test_tables_and_queue():
    status = Status(queued=2)
    status.apply(Residency(()), 0)
    assert "engram n/a" in texts(status) and texts(status)[1] == "queued 2"
    status.apply(Residency((TableState("a", "warm"), TableState("b", "cold", 100, 63))), 0)
    assert "engram cold→warm 63%" in texts(status)
    status.apply(Residency((TableState("a", "probing"),)), 0)
    assert "engram probing" in texts(status)


def message(**fields):
    plain = {"usage": {}, "timing": {}, "params": {}, "finish": "stop", "state": "complete", "thinking": ""}
    return SimpleNamespace(**(plain | fields))


def test_receipts():
    usage = {"thinking_tokens": 0, "answer_tokens": 312, "cached_tokens": 21_888, "prefilled_tokens": 78}
    timing = {"decode_tok_s": 44.83, "first_token_s": 0.61, "prefill_s": 0.55}
    assert receipt(message(usage=usage, timing=timing)) == "312 tok · 44.8 tok/s · first 0.6 s · resumed 21,888, prefilled 78 (0.55 s)"
    for finish, words in (("cancelled", "stopped by you"), ("length", "length limit"), ("loop", "loop stopped"), ("error", "error")):
        assert receipt(message(usage=usage, finish=finish)).endswith(words)
    assert receipt(message(usage=usage | {"context_used": 99, "context_limit": 100}, finish="length")).endswith("length limit")
    assert receipt(message(usage=usage | {"context_used": 100, "context_limit": 100}, finish="length")).endswith("context full")
    assert "seed 7" in receipt(message(params={"temperature": 0.8, "seed": 7})) and receipt(message(params={"temperature": 0, "seed": 7})) == ""
    thought = receipt(message(usage=usage | {"thinking_tokens": 9}, thinking="hm"))
    assert thought.startswith("9 thinking + 312 tok")


def test_ages_and_sizes():
    now = 1_700_000_000.0
    assert age(now - 5, now) == "now" and age(now - 600, now) == "10 min" and day_group(now - 90_000 * 3, now) == "Older"
    assert size(93_000_000_000) == "93.0 GB" and size(12) == "12 B" and duration(3.21) == "3.2 s" and duration(75) == "75 s"
