"""Where an answer ends, and what of it may be shown."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from dsv41chat.engine.answer import LOOP_WINDOW, Answer, LoopDetector, StopStrings
from dsv41chat.engine.chat.markers import END_THINK, EOS, USER
from tests.small_tokenizer import small_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def answer(tokenizer, start="content", stops=(), budget=10**6, loop_stop=True, answer_budget=None):
    prompt = SimpleNamespace(family="v41", start=start, tools=False, opened=())
    return Answer(tokenizer, prompt, tuple(stops), budget, loop_stop, answer_budget)


def feed(a: Answer, ids) -> str | None:
    for id in ids:
        if (ended := a.emit(id)) is not None:
            a.finish(ended)
            return ended
    a.finish("cancelled")
    return None


def shown(a: Answer) -> dict[str, str]:
    out = {"thinking": "", "answer": ""}
    for piece in a.take():
        out[piece.channel] += piece.text
    return out


def test_the_stop_id_counts_and_is_not_shown(tokenizer):
    a = answer(tokenizer)
    ids = tokenizer.encode_text("Hello there") + [tokenizer.marker(EOS)]
    assert feed(a, ids) == "stop"
    assert a.ids == ids and list(a.body_ids) == ids[:-1] and shown(a)["answer"] == a.texts["answer"] == "Hello there"


def test_a_role_marker_ends_the_answer(tokenizer):
    a = answer(tokenizer)
    assert feed(a, [*tokenizer.encode_text("x"), tokenizer.marker(USER)]) == "stop" and a.texts["answer"] == "x"


def test_thinking_and_answer_are_counted_apart(tokenizer):
    a = answer(tokenizer, start="reasoning")
    thought, said = tokenizer.encode_text("hm, yes"), tokenizer.encode_text("Yes.")
    assert feed(a, [*thought, tokenizer.marker(END_THINK), *said, tokenizer.marker(EOS)]) == "stop"
    assert (a.texts["thinking"], a.texts["answer"]) == ("hm, yes", "Yes.")
    assert a.thinking_tokens == len(thought) + 1 and list(a.reasoning_ids) == thought and list(a.body_ids) == said


def test_the_answers_own_limit_leaves_the_thinking_alone(tokenizer):
    thought, said = tokenizer.encode_text("a thought of some length"), tokenizer.encode_text("Yes, and much more than that.")
    ids = [*thought, tokenizer.marker(END_THINK), *said, tokenizer.marker(EOS)]
    for limit in (1, 3, len(said)):
        a = answer(tokenizer, start="reasoning", answer_budget=limit)
        assert feed(a, ids) == "length" and list(a.body_ids) == said[:limit] and a.texts["thinking"] == "a thought of some length"
        assert a.remaining == 0 and len(a.ids) - a.thinking_tokens == limit
    assert feed(answer(tokenizer, start="reasoning", answer_budget=len(said) + 1), ids) == "stop"
    # Without thinking, and beside the limit of all ids, the smaller one counts.
    assert len(_ids(answer(tokenizer, answer_budget=2), said)) == 2
    assert len(_ids(answer(tokenizer, budget=3, answer_budget=5), said)) == 3
    assert answer(tokenizer, start="reasoning", budget=9, answer_budget=2).remaining == 9, "a round of thinking may draft on"


def _ids(a: Answer, ids) -> list[int]:
    assert feed(a, ids) == "length"
    return a.ids


def test_pieces_carry_every_id_once(tokenizer):
    a, ids = answer(tokenizer, start="reasoning"), [*tokenizer.encode_text("a b\n\n"), tokenizer.marker(END_THINK), *tokenizer.encode_text("c")]
    carried = []
    for id in ids:
        a.emit(id)
        carried += [i for piece in a.take() for i in piece.ids]
    a.finish("cancelled")
    carried += [i for piece in a.take() for i in piece.ids]
    assert carried == ids


def test_stop_strings_cut_the_shown_text_and_only_the_answer(tokenizer):
    a = answer(tokenizer, start="reasoning", stops=["END"])
    ids = [*tokenizer.encode_text("an END here"), tokenizer.marker(END_THINK), *tokenizer.encode_text("one EN two END three")]
    assert feed(a, ids) == "stop_string"
    assert a.texts == {"thinking": "an END here", "answer": "one EN two "}


def test_stop_strings_do_not_depend_on_the_cuts():
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(20))
        stops = tuple("".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(2))
        first = min((at for s in stops if (at := text.find(s)) >= 0), default=None)
        matcher, out, rest = StopStrings(stops), "", text
        while rest and not matcher.hit:
            n = rng.randint(1, 5)
            out, rest = out + matcher.feed(rest[:n]), rest[n:]
        out += matcher.finish()
        # The earliest match wins; a later stop that completes first in time may cut no earlier than it begins.
        assert matcher.hit == (first is not None)
        assert out == (text if first is None else out) and text.startswith(out) and not any(s in out for s in stops)


def test_the_budget_counts_every_id(tokenizer):
    a = answer(tokenizer, budget=3)
    assert feed(a, [*tokenizer.encode_text("one two three four five six")]) == "length" and len(a.ids) == 3


@pytest.mark.parametrize("period", [1, 2, 7, 64])
def test_loops_are_found(period):
    detector, rng = LoopDetector(), random.Random(period)
    pattern = rng.sample(range(1000), period)
    prefix = [rng.randrange(1000, 2000) for _ in range(50)]
    ids = prefix + [pattern[i % period] for i in range(2 * LOOP_WINDOW)]
    at = next(i for i, id in enumerate(ids) if detector.feed(id))
    assert at == 50 + LOOP_WINDOW - 1


def test_longer_periods_and_near_loops_go_on():
    for ids in ([i % 65 for i in range(2000)], [7 if i % 200 else i for i in range(2000)]):
        detector = LoopDetector()
        assert not any(detector.feed(id) for id in ids)


def test_loop_stop_can_be_switched_off(tokenizer):
    token = tokenizer.encode_text("a")[0]
    assert feed(answer(tokenizer), [token] * 400) == "loop"
    assert feed(answer(tokenizer, loop_stop=False), [token] * 400) is None
