"""The chat screen on a scripted engine: type, stream, stop, follow, resume, and what remains after failures."""

from __future__ import annotations

import pytest

from dsv41chat.engine.errors import EngramReadError, PackIncomplete
from dsv41chat.store import Store
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script
from tests.ui.tui import chat_of, make_app, say, screen_text, until


def slow(answer="word " * 200, **options) -> Script:
    return Script(answer=answer, delay_s=0.005, **options)


async def test_first_start_says_what_answers_and_a_turn_runs(tmp_path):
    app = make_app(tmp_path, Script(answer="Hello **there**.\n\n```python\nprint(1)\n```\n"))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        assert "embedded model" in screen_text(app) and "models add" in screen_text(app)
        await pilot.press(*"hi")
        await pilot.press("enter")
        await until(lambda: not chat_of(app).pump.running and "prefilled" in screen_text(app))
        shown = screen_text(app)
        assert "Hello there." in shown and "┌─ python" in shown and "[1]" in shown and "tok/s" in shown
        assert app.store.conversation("hi").title == "hi"
        assert "ctx" in shown and "cached 0 +" in shown and "engram warm" in shown


async def test_enter_sends_once_and_refuses_nothing(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await pilot.press("enter")
        assert "Nothing to send" in screen_text(app)
        await pilot.press("a", "ctrl+j", "b", "enter")
        await until(lambda: chat_of(app)._finish is not None)
        assert [m.text for m in app.store.path_to(app.store.last_conversation().leaf_id)][0] == "a\nb"
        assert chat_of(app).composer.text == ""


async def test_paste_is_one_message_bracketed_or_not(tmp_path):
    from textual import events

    app = make_app(tmp_path, Script())
    async with app.run_test(size=(80, 24)) as pilot:
        app.post_message(events.Paste("l1\rl2\rl3\r"))
        await pilot.pause()
        assert chat_of(app).composer.text == "l1\nl2\nl3\n"
        chat_of(app).composer.reset()
        for key in ["a", "b", "c", "d", "enter", "e", "f", "g", "h", "enter", "x"]:
            chat_of(app).composer.post_message(events.Key(key, key if len(key) == 1 else None))
        await pilot.pause()
        assert chat_of(app).composer.text == "abcd\nefgh\nx" and app.store.last_conversation() is None


async def test_big_pastes_become_chips_and_are_sent_whole(tmp_path):
    from textual import events

    app = make_app(tmp_path, Script(context_limit=100_000))
    big = "\n".join(f"line {n}" for n in range(3012))
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        app.post_message(events.Paste(big))
        await pilot.pause()
        assert chat.composer.text == "[paste 1: 3,012 lines]"
        await pilot.press("left", "enter")
        await pilot.pause()
        assert "line 0" in screen_text(app)
        await pilot.press("escape")
        await pilot.press("end", "backspace")
        assert chat.composer.text == ""
        app.post_message(events.Paste(big))
        await pilot.pause()
        chat._finish = None
        await pilot.press("!", "enter")
        await until(lambda: chat._finish is not None)
        assert app.store.path_to(chat.leaf_id)[0].text == big + "!"


async def test_stop_keeps_what_was_shown_and_the_next_turn_works(tmp_path):
    script = slow()
    app = make_app(tmp_path, script)
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: chat._answer is not None and len(chat._answer.text) > 40)
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)
        await pilot.pause()
        assert "stopped by you" in screen_text(app)
        message = app.store.message(chat.leaf_id)
        assert message.state == "stopped" and message.text and message.text == chat.transcript.entries[-1].text
        script.answer, script.delay_s = "short", 0
        await say(pilot, app, "again")
        assert app.store.message(chat.leaf_id).text == "short"


async def test_stop_in_prefill_gives_the_prompt_back_and_editing_it_makes_a_sibling(tmp_path):
    script = Script(prefill_s=0.05)
    app = make_app(tmp_path, script)
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        chat.composer.insert("x" * 2000)
        await pilot.press("enter")
        await until(lambda: "prefill" in screen_text(app))
        await pilot.press("ctrl+c")
        await until(lambda: not chat.pump.running)
        assert chat.composer.text == "x" * 2000
        script.prefill_s = 0
        chat.composer.reset("shorter")
        chat._finish = None
        await pilot.press("enter")
        await until(lambda: chat._finish is not None and chat._finish.message is not None)
        await pilot.pause()
        first = [m for m in app.store.tree(chat.conversation.id) if m.role == "user"]
        assert [m.parent_id for m in first] == [None, None]
        await until(lambda: chat.transcript.entries[-2].branch == "2/2")


async def test_scrolling_up_stops_following_and_end_resumes(tmp_path):
    app = make_app(tmp_path, slow("line\n\n" * 300))
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: chat.transcript.virtual_size.height > 60)
        await pilot.press("pageup", "pageup")
        at = chat.transcript.scroll_offset.y
        height = chat.transcript.virtual_size.height
        await until(lambda: chat.transcript.virtual_size.height > height + 10)
        assert chat.transcript.scroll_offset.y == at and "new text below" in screen_text(app)
        await pilot.press("ctrl+end")
        await pilot.pause()
        assert chat.transcript.follow and "new text below" not in screen_text(app)
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)


async def test_messages_queue_while_a_turn_runs(tmp_path):
    app = make_app(tmp_path, slow("x " * 1000))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        chat = chat_of(app)
        await pilot.press(*"one", "enter")
        await until(lambda: chat._answer is not None and bool(chat._answer.text))
        await pilot.press(*"two", "enter")
        await pilot.press(*"three", "enter")
        assert "queued 1: two" in screen_text(app) and "queued 2" in screen_text(app)
        await pilot.press("up")
        assert chat.composer.text == "three" and len(app.store.queued(chat.conversation.id)) == 1
        app.host.engine.script.delay_s = 0
        await until(lambda: not chat.pump.running and not chat.queue)
        assert [m.text for m in app.store.path_to(chat.leaf_id) if m.role == "user"] == ["one", "two"]


async def test_the_queue_waits_after_a_stop(tmp_path):
    app = make_app(tmp_path, slow())
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await pilot.press(*"one", "enter")
        await until(lambda: chat._answer is not None and bool(chat._answer.text))
        await pilot.press(*"two", "enter")
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)
        await pilot.pause(0.2)
        assert len(chat.queue) == 1 and not chat.pump.running
        app.host.engine.script.answer = "ok"
        chat.action_send_queued()
        await until(lambda: not chat.queue and not chat.pump.running)
        assert app.store.queued(chat.conversation.id) == []


FAILURES = [
    (PackIncomplete("a shard is missing.", hint="dsv41chat models verify x"), 0),
    (EngramReadError("A row could not be read."), 7),
]


@pytest.mark.parametrize("error, at", FAILURES)
async def test_failures_are_one_sentence_and_the_text_stays(tmp_path, error, at):
    app = make_app(tmp_path, Script(answer="abcdefgh", error=error, error_at=at))
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        shown = screen_text(app)
        assert str(error) in shown and "hello" in shown and "Traceback" not in shown
        assert ("abcdef" in shown) == (at > 0)
        app.host.engine.script.error = None
        chat._finish = None
        await pilot.press("ctrl+r")
        await until(lambda: chat._finish is not None)
        await pilot.pause()
        assert "abcdefgh" in screen_text(app)


async def test_resume_shows_the_conversation_and_goes_on(tmp_path):
    store = Store.memory(background=False)
    first = make_app(tmp_path, Script(answer="answer one"), store=store)
    async with first.run_test(size=(80, 24)) as pilot:
        await say(pilot, first, "question one")
        await pilot.press(*"draft")
    again = make_app(tmp_path, Script(answer="answer two"), store=store)
    again.begin = AppStart(view=again.controller.open(None))
    async with again.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "question one" in screen_text(again) and "answer one" in screen_text(again)
        await until(lambda: chat_of(again).conversation is not None)
        await say(pilot, again, " two")
        path = store.path_to(store.last_conversation().leaf_id)
        assert [m.text for m in path][:2] == ["question one", "answer one"] and path[-1].text == "answer two"


async def test_an_interrupted_answer_is_announced(tmp_path):
    store = Store.memory(background=False)
    conversation = store.new_conversation("cut")
    question = store.add_message(conversation.id, None, "user", "why?")
    writer = store.begin_answer(conversation.id, question.id, "nano", "f" * 64, {})
    writer.update("because", "", (), (1, 2))
    writer.finish(state="interrupted", finish="interrupted", text="because", thinking="", ids=(1, 2), reasoning_ids=(), body_ids=(1, 2))
    app = make_app(tmp_path, Script(), store=store)
    app.begin = AppStart(view=app.controller.open("cut"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await until(lambda: "interrupted" in screen_text(app))
        assert "because" in screen_text(app)


async def test_the_list_opens_conversations(tmp_path):
    store = Store.memory(background=False)
    for name in ("alpha", "beta"):
        conversation = store.new_conversation(name)
        store.add_message(conversation.id, None, "user", f"about {name}")
    app = make_app(tmp_path, Script(), store=store)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("ctrl+o")
        await until(lambda: "alpha" in screen_text(app))
        await pilot.press("tab")
        await until(lambda: "about" in screen_text(app))
        await pilot.press("escape", "slash", *"alp")
        await until(lambda: "beta" not in screen_text(app))
        await pilot.press("enter")
        await until(lambda: "about alpha" in screen_text(app))


async def test_ctrl_c_stops_clears_and_quits(tmp_path):
    app = make_app(tmp_path, slow())
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: chat._answer is not None and bool(chat._answer.text))
        await pilot.press("ctrl+c")
        await until(lambda: not chat.pump.running)
        await pilot.press(*"text", "ctrl+c")
        assert chat.composer.text == ""
        await pilot.press("ctrl+z")
        assert chat.composer.text == "text"
        await pilot.press("ctrl+c", "ctrl+c")
        assert "ctrl+Q quits" in screen_text(app)
        await pilot.press("ctrl+c")
        await pilot.pause()
    assert app.return_value == 0


async def test_escape_sequences_of_any_text_never_reach_the_screen(tmp_path):
    nasty = "a\x1b[31mred\x07 \x9b2J\x00\n```\x1b]0;t\x07\n\x1b[2J\n```\n"
    app = make_app(tmp_path, Script(answer=nasty))
    async with app.run_test(size=(80, 30)) as pilot:
        await say(pilot, app, "x\x1b[2Jy")
        shown = screen_text(app)
        assert not any(ord(c) < 32 and c != "\n" or 127 <= ord(c) < 160 for c in shown) and "␛[31mred␇" in shown
        assert app.store.message(chat_of(app).leaf_id).text == nasty


async def test_a_tiny_terminal_shows_one_page_and_recovers(tmp_path):
    app = make_app(tmp_path, slow("line\n\n" * 200))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: chat._answer is not None and bool(chat._answer.text))
        await pilot.resize_terminal(39, 9)
        await until(lambda: "Terminal too small: 39x9" in screen_text(app))
        assert "Generation continues" in screen_text(app)
        await pilot.resize_terminal(100, 30)
        await until(lambda: "too small" not in screen_text(app) and "line" in screen_text(app))
        assert chat.pump.running
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)


def rows_match(chat) -> bool:
    """Whether the view's heights are those of the lines it draws."""
    view = chat.transcript
    return all(not entry.heights or view._heights[index] == entry.height for index, entry in enumerate(view.entries))


async def test_what_is_drawn_is_each_message_once(tmp_path):
    app = make_app(tmp_path, Script(answer="an answer of\n\nsome lines " * 4))
    async with app.run_test(size=(60, 24)) as pilot:
        chat = chat_of(app)
        for number in range(4):
            await say(pilot, app, f"question {number}")
            assert rows_match(chat)
        chat._finish = None
        await pilot.press("ctrl+r")
        await until(lambda: chat._finish is not None and not chat.pump.running)
        await pilot.pause()
        assert rows_match(chat)
        await pilot.press("pageup")
        await pilot.resize_terminal(90, 30)
        await pilot.pause()
        assert rows_match(chat)
        await pilot.press("ctrl+home")
        await pilot.pause()
        shown = screen_text(app)
        assert rows_match(chat) and shown.count("question 0") == 2 and shown.count("question 1") == 1


async def test_thinking_is_folded_while_it_runs_and_kept_when_stopped(tmp_path):
    app = make_app(tmp_path, Script(answer="never", thinking="deep thought " * 100, delay_s=0.005))
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: "▸ thinking" in screen_text(app) and "tokens" in screen_text(app))
        assert "deep thought" not in screen_text(app)
        await pilot.press("ctrl+t")
        await until(lambda: "deep thought" in screen_text(app))
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)
        message = app.store.message(chat.leaf_id)
        assert message.state == "stopped" and message.thinking.startswith("deep thought") and message.text == ""
        chat.action_thinking_all("hide")
        await pilot.pause()
        assert "thinking" not in "\n".join(screen_text(app).splitlines()[:-3]).replace("thinking +", "")


async def test_the_line_at_the_top_stays_when_the_width_changes(tmp_path):
    words = "\n\n".join(" ".join(f"p{paragraph}w{word}" for word in range(40)) for paragraph in range(60))
    app = make_app(tmp_path, Script(answer=words))
    async with app.run_test(size=(100, 30)) as pilot:
        await say(pilot, app, "go")
        await pilot.press("pageup", "pageup", "pageup")
        await pilot.pause()
        first = screen_text(app).splitlines()[1].split()[0]
        await pilot.resize_terminal(61, 30)
        await pilot.pause()
        assert first in screen_text(app).splitlines()[1]
        await pilot.resize_terminal(100, 20)
        await pilot.pause()
        assert first in screen_text(app).splitlines()[1]


async def test_the_sidebar_follows_the_width(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(130, 30), notifications=True) as pilot:
        await pilot.pause()
        assert "Conversations ─" in screen_text(app)
        await pilot.press("f3")
        assert "Conversations ─" not in screen_text(app)
        await pilot.press("f3")
        await pilot.resize_terminal(95, 30)
        await pilot.pause()
        assert "Conversations ─" in screen_text(app)
        await pilot.resize_terminal(80, 30)
        await pilot.pause()
        assert "Conversations ─" not in screen_text(app)
        await pilot.press("f3")
        assert "needs 90 columns" in screen_text(app)


async def test_writing_while_a_build_loads(tmp_path):
    app = make_app(tmp_path, Script(answer="here I am", load_s=2.5))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: chat.switching)
        await pilot.press(*"early", "enter")
        # The draft is written in another thread.
        await until(lambda: "queued 1: early" in screen_text(app) and (draft := app.store.draft(None)) is not None and draft.text == "early")
        await until(lambda: "loading" in screen_text(app))
        await until(lambda: chat._finish is not None and not chat.pump.running)
        await pilot.pause()
        assert [m.text for m in app.store.path_to(chat.leaf_id)] == ["early", "here I am"] and app.store.draft(None) is None


async def test_reduced_motion_and_hidden_things(tmp_path):
    app = make_app(tmp_path, Script(), config="[ui]\nreduced_motion = true\n")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert app.animation_level == "none" and not chat_of(app).composer.cursor_blink


async def test_del_removes_the_last_queued_message(tmp_path):
    app = make_app(tmp_path, slow())
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        chat = chat_of(app)
        await pilot.press(*"one", "enter")
        await until(lambda: chat._answer is not None and bool(chat._answer.text))
        for number in range(6):
            await pilot.press(str(number), "enter")
        assert len(chat.queue) == 5 and chat.composer.text == "5" and "wait already" in screen_text(app)
        await pilot.press("backspace", "delete")
        await pilot.pause()
        assert len(chat.queue) == 4
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)


async def test_history_walks_and_keeps_what_was_being_written(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "first")
        await say(pilot, app, "second")
        await pilot.press(*"new", "up", "up")
        assert chat.composer.text == "first"
        await pilot.press("down", "down")
        assert chat.composer.text == "new"
