"""The turn runner: what is stored when, what goes back into the prompt, how a turn ends."""

from __future__ import annotations

import threading

import pytest

from dsv41chat.engine.errors import EngramReadError
from dsv41chat.settings import load_settings
from dsv41chat.store import Locked, Store, StoreFull
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.prompting import ids_hash
from dsv41chat.ui.turn import TurnBusy, TurnController
from dsv41chat.ui.turn_events import (
    Failed,
    Finished,
    Loading,
    Noticed,
    Piece,
    Prefill,
    Ready,
    Residency,
    Saved,
    Started,
    TurnRequest,
    Warned,
    exit_code,
)
from tests.ui.fakes import Script, fake_host


class Setup:
    def __init__(self, folder, script: Script | None = None, **options):
        self.script = script or Script("Hello.")
        self.settings = load_settings(data_dir=folder, environ={}, **options)
        self.store = Store.open(self.settings.paths.data)
        self.host = EngineHost(self.settings, self.store, **fake_host(self.script, folder / "pack"))
        self.controller = TurnController(self.store, self.host, self.settings)

    def run(self, text: str | None = None, conversation: str | None = None, **request):
        return list(self.controller.run(TurnRequest(conversation, text=text, **request)))

    def ids(self) -> list[tuple[int, ...]]:
        return [call.prompt.ids for session in self.script.sessions for call in session.calls]

    def close(self) -> None:
        self.host.close()
        self.store.close()


@pytest.fixture
def setup(tmp_path):
    made = []

    def make(script: Script | None = None, **options) -> Setup:
        made.append(Setup(tmp_path, script, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def text_of(ids) -> str:
    return bytes(i for i in ids if i < 256).decode()


def test_order_of_events(setup):
    s = setup(Script("Hi.", thinking="hm"))
    events = s.run("hello")
    kinds = [type(event) for event in events]
    order = [Started, Saved, Noticed, Loading, Ready, Residency, Prefill, Piece, Saved, Finished]
    assert [kinds.index(kind) for kind in (Started, Saved, Noticed, Loading, Ready, Residency, Prefill, Piece)] == sorted(
        kinds.index(kind) for kind in order[:8]
    )
    assert kinds[-2:] == [Saved, Finished] and kinds.count(Finished) == 1
    assert not any(isinstance(event, Loading) for event in s.run("again", events[0].conversation_id))


def test_the_user_message_is_committed_before_the_engine_is_touched(setup, tmp_path):
    s = setup()
    seen = []

    def prober(path, original=s.host._prober):
        with Store.open(tmp_path, readonly=True) as other:
            seen.extend(m.text for m in other.tree(other.last_conversation().id))
        return original(path)

    s.host._prober = prober
    s.run("keep me")
    assert seen == ["keep me"]


def test_what_is_stored(setup):
    s = setup(Script("Grüße", thinking="hm"))
    finished = s.run("hello", system="be brief")[-1]
    m = s.store.message(finished.message.id)
    end_think = s.script.tokenizer.marker("</think>")
    assert (m.text, m.thinking, m.state, m.finish) == ("Grüße", "hm", "complete", "stop")
    assert m.reasoning_ids == tuple(b"hm") and m.body_ids == tuple("Grüße".encode())
    assert m.ids == (*b"hm", end_think, *"Grüße".encode(), 257) and m.ids_hash == finished.ids_hash == ids_hash(m.ids)
    assert (m.build_name, m.build_fingerprint) == ("nano", "f" * 64)
    assert m.params["seed"] == finished.seed and m.params["tokenizer"] == s.script.tokenizer.sha256
    assert m.usage == finished.usage and m.timing["total_s"] >= m.timing["load_s"]
    question = s.store.message(m.parent_id)
    assert question.ids == tuple(b"hello") and question.meta == {"tokenizer": s.script.tokenizer.sha256}
    c = s.store.conversation(finished.conversation_id)
    assert c.settings["system"] == "be brief" and c.settings["build"] == "nano" and c.leaf_id == m.id


def test_the_next_turn_repeats_the_sampled_ids_and_reuses_the_lane(setup):
    s = setup(Script("\n\nodd newlines"), flags={"chat.effort": "off"})
    one = s.run("a")[-1]
    two = s.run("b", one.conversation_id)[-1]
    first, second = s.ids()
    assert second[: len(first)] == first and second[len(first) : len(first) + len(one.message.body_ids)] == one.message.body_ids
    assert two.usage["cached_tokens"] == len(first) + len(one.ids) - 1
    assert len(s.script.sessions) == 1


def test_each_conversation_has_its_own_session(setup):
    s = setup(flags={"chat.effort": "off"})
    a, b = s.run("a")[-1], s.run("b")[-1]
    again = s.run("more", a.conversation_id)[-1]
    assert len(s.script.sessions) == 2 and again.usage["cached_tokens"] > 0
    assert b.usage["cached_tokens"] == 0


def test_ids_of_another_tokenizer_are_not_repeated(setup):
    s = setup(flags={"chat.effort": "off"})
    one = s.run("a")[-1]
    s.host.engine.tokenizer = type("Other", (type(s.script.tokenizer),), {"sha256": "0" * 64, "encode_text": lambda self, text: [1] * len(text)})()
    s.run("b", one.conversation_id)
    assert set(i for i in s.ids()[-1] if i < 256) == {1}


def test_regenerate_is_a_sibling_with_the_next_seed(setup):
    s = setup(turn={"seed": 10})
    one = s.run("a")[-1]
    two = s.run(None, one.conversation_id, regenerate=one.message.id)[-1]
    three = s.run(None, one.conversation_id, regenerate=one.message.parent_id)[-1]
    assert [f.seed for f in (one, two, three)] == [10, 11, 12]
    assert {m.id for m in s.store.children(one.message.parent_id)} == {one.message.id, two.message.id, three.message.id}
    assert s.ids()[0] == s.ids()[1] == s.ids()[2]
    assert [type(e) for e in s.run(None, one.conversation_id, regenerate=one.message.id)].count(Saved) == 1


def test_edit_is_a_sibling_and_unchanged_text_is_regenerate(setup):
    s = setup()
    one = s.run("a")[-1]
    user = one.message.parent_id
    edited = list(s.controller.run(s.controller.edit_request(user, "b")))[-1]
    assert s.store.message(edited.message.parent_id).parent_id is None
    assert [m.text for m in s.store.roots(one.conversation_id)] == ["a", "b"]
    assert "a" not in text_of(s.ids()[-1])[:1]
    assert s.controller.edit_request(user, "a") == TurnRequest(one.conversation_id, regenerate=user)


def test_continue_goes_on_from_the_kept_text(setup):
    s = setup(Script("first part", finish="length"), flags={"chat.effort": "off"})
    one = s.run("a")[-1]
    s.script.answer = ", second part"
    two = s.run(None, one.conversation_id, continue_from=one.message.id)[-1]
    m = s.store.message(two.message.id)
    assert m.text == "first part, second part" and m.parent_id == one.message.parent_id and two.text == ", second part"
    assert m.body_ids == tuple(b"first part, second part") and s.store.message(one.message.id).text == "first part"
    assert text_of(s.ids()[-1]) == "afirst part"


def test_continue_inside_a_thought(setup):
    s = setup(Script("answer", thinking="let me think " * 50, delay_s=0.005))
    events = s.controller.run(TurnRequest(text="a"))
    for event in events:
        if isinstance(event, Piece):
            s.controller.cancel()
    cut = event.message
    assert cut.thinking and not cut.text and cut.state == "stopped"
    s.script.thinking, s.script.delay_s = "... on", 0.0
    two = s.run(None, event.conversation_id, continue_from=cut.id)[-1]
    assert two.message.thinking == cut.thinking + "... on" and two.message.text == "answer"


@pytest.mark.parametrize("thinking", ["", "a long thought " * 20])
def test_cancel_keeps_what_was_shown(setup, thinking):
    script = Script("word " * 400, thinking=thinking, delay_s=0.002)
    s = setup(script)
    shown = {"thinking": "", "answer": ""}
    for event in s.controller.run(TurnRequest(text="a")):
        if isinstance(event, Piece):
            shown[event.channel] += event.text
            s.controller.cancel()
    assert isinstance(event, Finished) and event.finish == "cancelled"
    m = s.store.message(event.message.id)
    assert (m.text, m.thinking, m.state) == (shown["answer"], shown["thinking"], "stopped")
    assert len(m.text) < 2000
    script.delay_s = 0.0
    assert s.run("next", event.conversation_id)[-1].finish == "stop", "the next turn works"


def test_cancel_before_a_token_leaves_no_answer(setup):
    s = setup(Script("x", prefill_s=0.05))
    for event in s.controller.run(TurnRequest(text="a" * 500)):
        if isinstance(event, Prefill):
            s.controller.cancel()
    assert event.finish == "cancelled" and event.message is None
    assert [m.role for m in s.store.tree(event.conversation_id)] == ["user"]


def test_cancel_while_loading(setup):
    s = setup(Script("x"))
    original = s.host._opener

    def opener(path, *, cancel, **options):
        from dsv41chat.engine.errors import Cancelled

        s.controller.cancel()
        assert cancel()
        s.host._opener = original
        raise Cancelled("stopped")

    s.host._opener = opener
    events = s.run("a")
    assert events[-1].finish == "cancelled" and events[-1].message is None
    assert s.run("b", events[0].conversation_id)[-1].finish == "stop"


def test_abort_does_not_wait_for_the_engine(setup):
    s = setup(Script("word " * 30, delay_s=0.01, ignore_cancel=True))
    for event in s.controller.run(TurnRequest(text="a", overrides={"effort": "off"})):
        if isinstance(event, Piece):
            s.controller.abort()
    assert isinstance(event, Failed) and event.code == "interrupted" and event.partial["text"].startswith("w")
    stored = s.store.message(s.store.conversation(event.conversation_id).leaf_id)
    assert stored.state == "interrupted" and stored.text == event.partial["text"]


def test_a_reader_that_stops_reading_keeps_the_text(setup):
    s = setup(Script("word " * 400, delay_s=0.002), flags={"chat.effort": "off"})
    events = s.controller.run(TurnRequest(text="a"))
    for event in events:
        if isinstance(event, Piece):
            break
    events.close()
    assert not s.controller.running
    m = s.store.message(s.store.last_conversation().leaf_id)
    assert m.state == "stopped" and m.text.startswith("w") and 0 < len(m.ids) < 400


def test_one_turn_at_a_time(setup):
    s = setup(Script("word " * 50, delay_s=0.01))
    events = s.controller.run(TurnRequest(text="a"))
    next(events)
    with pytest.raises(TurnBusy):
        next(s.controller.run(TurnRequest(text="b")))
    events.close()


def test_an_engine_error_keeps_the_text_and_the_next_turn_works(setup):
    s = setup(Script("Hello.", error=EngramReadError("row 5", hint="check the disk"), error_at=3), flags={"chat.effort": "off"})
    failed = s.run("a")[-1]
    assert (failed.code, failed.hint, failed.exit_code, failed.partial) == ("build_damaged", "check the disk", 4, {"text": "Hel", "thinking": ""})
    m = s.store.message(s.store.conversation(failed.conversation_id).leaf_id)
    assert (m.state, m.text) == ("error", "Hel")
    s.script.error = None
    assert s.run("b", failed.conversation_id)[-1].text == "Hello."


def test_a_disk_that_fills_up_is_reported_and_the_text_is_not_lost(setup, monkeypatch):
    s = setup(Script("word " * 30, delay_s=0.001))
    from dsv41chat.store.answers import AnswerWriter

    def refuse(self, *_, **__):
        self.failure = StoreFull("the disk is full")
        raise self.failure

    monkeypatch.setattr(AnswerWriter, "_write", refuse)
    events = s.run("a", overrides={"effort": "off"})
    assert [e.code for e in events if isinstance(e, Warned)] == ["not_saved"]
    assert events[-1].code == "store" and events[-1].partial["text"] == "word " * 30
    unstored = events[-1].unstored
    assert (unstored.text, unstored.state, unstored.finish) == ("word " * 30, "complete", "stop")
    assert unstored.usage["answer_tokens"] == 151 and unstored.timing["decode_tok_s"] and len(unstored.ids) == 151 and events[-1].answer is None


def test_a_conversation_that_another_process_holds(setup, monkeypatch):
    s = setup()
    one = s.run("a")[-1]

    def held(conversation_id):
        raise Locked("held by process 42", pid=42)

    monkeypatch.setattr(s.store, "lock", held)
    failed = s.run("b", one.conversation_id)[-1]
    assert failed.code == "locked" and exit_code(failed.code) == 6
    view = s.controller.open(one.conversation_id)
    assert view.readonly and view.holder == 42 and [m.text for m in view.messages] == ["a", "Hello."]


def test_context_full_is_known_before_the_engine_runs(setup):
    s = setup(Script(context_limit=50))
    events = s.run("x" * 100)
    assert events[-1].code == "context_full" and s.ids() == [] and isinstance(events[1], Saved)


def test_the_answer_never_passes_the_context(setup):
    s = setup(Script("y" * 500, context_limit=200), flags={"chat.effort": "off"})
    finished = s.run("x" * 100)[-1]
    assert finished.finish == "length" and finished.usage["context_used"] == 200


def test_settings_of_a_pack_count_for_conversations_made_on_it(setup, tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "generation_config.json").write_text('{"temperature": 0, "effort": "off", "max_tokens": 4, "other": 1}')
    s = setup(Script("abcdefgh"))
    finished = s.run("x")[-1]
    assert finished.text == "abcd" and finished.message.params["effort"] == "off"
    assert s.store.conversation(finished.conversation_id).settings["origin"]["defaults"] == {"temperature": 0, "effort": "off", "max_tokens": 4}


def test_no_answer_depends_on_how_pieces_were_joined(setup):
    s = setup(Script("Grüße 👋🏽 世界 " * 20), flags={"chat.effort": "off"})
    events = s.run("a")
    pieces = [e for e in events if isinstance(e, Piece)]
    assert "".join(p.text for p in pieces) == events[-1].text and sum((p.ids for p in pieces), ()) == events[-1].ids
    assert len(pieces) < len(events[-1].ids)


def test_estimate_runs_and_stores_nothing(setup):
    s = setup(flags={"chat.effort": "off"})
    one = s.run("a")[-1]
    count = len(s.store.tree(one.conversation_id))
    estimate = s.controller.estimate(TurnRequest(one.conversation_id, text="more"))
    assert estimate["prompt_tokens"] == estimate["cached_tokens"] + estimate["prefill_tokens"] and estimate["cached_tokens"] > 0
    assert len(s.store.tree(one.conversation_id)) == count and len(s.ids()) == 1
    two = s.run("more", one.conversation_id)[-1]
    assert (two.usage["prompt_tokens"], two.usage["cached_tokens"]) == (estimate["prompt_tokens"], estimate["cached_tokens"])


def test_a_turn_may_run_on_any_thread(setup):
    s = setup()
    results = []
    threads = [threading.Thread(target=lambda: results.append(s.run("a")[-1])) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert [r.text for r in results] == ["Hello."] * 2
