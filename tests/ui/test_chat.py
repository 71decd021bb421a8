"""The chat screen on a scripted engine: type, stream, stop, follow, resume, and what remains after failures."""

from __future__ import annotations

import re
import threading

import pytest

from dsv41chat.engine.errors import EngramReadError, PackIncomplete
from dsv41chat.store import Store
from dsv41chat.ui.screens.conversations import ConversationsScreen
from dsv41chat.ui.screens.dialogs import AskScreen, LineScreen
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script
from tests.ui.tui import chat_of, drawn, ended, make_app, say, screen_text, shows, stored, until


def slow(answer="word " * 2000, **options) -> Script:
    return Script(answer=answer, delay_s=0.005, **options)


async def test_first_start_says_what_answers_and_a_turn_runs(tmp_path):
    app = make_app(tmp_path, Script(answer="Hello **there**.\n\n```python\nprint(1)\n```\n"))
    async with app.run_test(size=(100, 30)) as pilot:
        await shows(app, "embedded model", "models add")
        await pilot.press(*"hi")
        await pilot.press("enter")
        await ended(chat_of(app))
        await shows(app, "prefilled", "Hello there.", "┌─ python", "[1]", "tok/s", "ctx", "cached 0 +", "engram warm")
        assert app.store.conversation("hi").title == "hi"


async def test_enter_sends_once_and_refuses_nothing(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(lambda: not chat_of(app).starting)
        await pilot.press("enter")
        await shows(app, "Nothing to send")
        await pilot.press("a", "ctrl+j", "b", "enter")
        await ended(chat_of(app))
        assert [m.text for m in app.store.path_to(app.store.last_conversation().leaf_id)][0] == "a\nb"
        assert chat_of(app).composer.text == ""


async def test_paste_is_one_message_bracketed_or_not(tmp_path):
    from textual import events

    app = make_app(tmp_path, Script())
    async with app.run_test(size=(80, 24)):
        await until(lambda: not chat_of(app).starting)
        app.post_message(events.Paste("l1\rl2\rl3\r"))
        await until(lambda: chat_of(app).composer.text == "l1\nl2\nl3\n")
        chat_of(app).composer.reset()
        now = chat_of(app).composer._last_key + 1.0
        for number, key in enumerate(["a", "b", "c", "d", "enter", "e", "f", "g", "h", "enter", "x"]):
            event = events.Key(key, key if len(key) == 1 else None)
            event.time = now + number * 0.001  # read from the terminal in one go, however busy this process is
            chat_of(app).composer.post_message(event)
        await until(lambda: chat_of(app).composer.text == "abcd\nefgh\nx")
        assert app.store.last_conversation() is None


async def test_big_pastes_become_chips_and_are_sent_whole(tmp_path):
    from textual import events

    app = make_app(tmp_path, Script(context_limit=100_000))
    big = "\n".join(f"line {n}" for n in range(3012))
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        app.post_message(events.Paste(big))
        await until(lambda: chat.composer.text == "[paste 1: 3,012 lines]")
        await pilot.press("left", "enter")
        await shows(app, "line 0")
        await pilot.press("escape")
        await until(lambda: app.screen is chat)
        await pilot.press("end", "backspace")
        await until(lambda: chat.composer.text == "")
        app.post_message(events.Paste(big))
        await until(lambda: chat.composer.text.endswith(": 3,012 lines]"))
        await pilot.press("!", "enter")
        await ended(chat)
        assert app.store.path_to(chat.leaf_id)[0].text == big + "!"


async def test_a_chip_says_the_lines_of_its_own_text(tmp_path):
    attached = (("a.txt", "alpha\n"), ("empty", ""), ("stdin", "x\ny"))
    app = make_app(tmp_path, Script(context_limit=100_000), AppStart(attachments=attached))
    async with app.run_test(size=(100, 24)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        assert chat.composer.text == "[file 1: a.txt, 1 line] [file 2: empty, 0 lines] [file 3: stdin, 2 lines] "
        for lines, end in ((201, "\n"), (603, "\n"), (603, "")):
            chat.composer.take("\n".join(["words enough to make a chip of it, in each of the lines"] * lines) + end)
        assert [mark.split(": ")[1] for mark in list(chat.composer.chips)[3:]] == ["201 lines]", "603 lines]", "603 lines]"]
        chat.composer.reset(list(chat.composer.chips)[0])
        await pilot.press("enter")
        await ended(chat)
        assert app.store.path_to(chat.leaf_id)[0].text == "File: a.txt\n```\nalpha\n```", "a file of the command line is sent as /read sends it"


async def test_stop_keeps_what_was_shown_and_the_next_turn_works(tmp_path):
    script = slow()
    app = make_app(tmp_path, script)
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: chat._answer is not None and len(chat._answer.text) > 40)
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)
        await shows(app, "stopped by you")
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
        await until(lambda: chat.composer.text == "x" * 2000)
        script.prefill_s = 0
        chat.composer.reset("shorter")
        chat._finish = None
        await pilot.press("enter")
        await ended(chat)
        answer = app.store.message(chat.leaf_id)
        assert chat._finish.message == answer and app.store.message(answer.parent_id).text == "shorter"
        first = [m for m in app.store.tree(chat.conversation.id) if m.role == "user"]
        assert [m.parent_id for m in first] == [None, None]
        await until(lambda: chat.transcript.entries[-2].branch == "2/2")


async def test_scrolling_up_stops_following_and_end_resumes(tmp_path):
    app = make_app(tmp_path, slow("line\n\n" * 2000))
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: chat.transcript.virtual_size.height > 60)
        await pilot.press("pageup", "pageup")
        await until(lambda: not chat.transcript.follow)
        at = chat.transcript.scroll_offset.y
        height = chat.transcript.virtual_size.height
        await until(lambda: chat.transcript.virtual_size.height > height + 10)
        await shows(app, "new text below")
        assert chat.transcript.scroll_offset.y == at
        await pilot.press("ctrl+end")
        await until(lambda: chat.transcript.follow and "new text below" not in screen_text(app))
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)


async def test_messages_queue_while_a_turn_runs(tmp_path):
    app = make_app(tmp_path, slow("x " * 2000))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        chat = chat_of(app)
        await pilot.press(*"one", "enter")
        await until(lambda: chat._answer is not None and bool(chat._answer.text))
        await pilot.press(*"two", "enter")
        await pilot.press(*"three", "enter")
        await shows(app, "queued 1: two", "queued 2")
        await pilot.press("up")
        await until(lambda: chat.composer.text == "three" and len(app.store.queued(chat.conversation.id)) == 1)
        app.host.engine.script.delay_s = 0
        await until(lambda: not chat.pump.running and not chat.queue)
        assert [m.text for m in app.store.path_to(chat.leaf_id) if m.role == "user"] == ["one", "two"]


async def test_the_queue_waits_after_a_stop(tmp_path):
    app = make_app(tmp_path, slow())
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        chat = chat_of(app)
        await pilot.press(*"one", "enter")
        await until(lambda: chat._answer is not None and bool(chat._answer.text))
        await pilot.press(*"two", "enter")
        await until(lambda: len(chat.queue) == 1)
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)
        # It says so, and the next would have been started before that is drawn.
        await shows(app, "1 queued: send them?")
        await drawn(app)
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
        shown = await shows(app, str(error), "hello")
        assert "Traceback" not in shown
        assert ("abcdef" in shown) == (at > 0)
        app.host.engine.script.error = None
        chat._finish = None
        await pilot.press("ctrl+r")
        await until(lambda: chat._finish is not None)
        await shows(app, "abcdefgh")


async def test_resume_shows_the_conversation_and_goes_on(tmp_path):
    store = Store.memory(background=False)
    first = make_app(tmp_path, Script(answer="answer one"), store=store)
    async with first.run_test(size=(80, 24)) as pilot:
        await say(pilot, first, "question one")
        await pilot.press(*"draft")
        await until(lambda: chat_of(first).composer.text == "draft")
    again = make_app(tmp_path, Script(answer="answer two"), store=store)
    again.begin = AppStart(view=again.controller.open(None))
    async with again.run_test(size=(80, 24)) as pilot:
        await shows(again, "question one", "answer one")
        await until(lambda: not chat_of(again).starting)
        assert [row.id for row in store.list_conversations(None)] == [chat_of(again).conversation.id]
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
    async with app.run_test(size=(80, 24)):
        await shows(app, "interrupted", "because")


async def test_the_context_of_an_answer_that_never_ended_is_counted(tmp_path):
    """A process that is killed leaves no figures: then the texts say what the conversation takes, behind what an earlier answer knew."""
    store, key = stored("question", "the answer so f")
    branch = store.add_message(key, None, "user", "first")
    writer = store.begin_answer(key, branch.id, "nano", "", {})
    known = writer.finish(state="complete", finish="stop", text="whole", usage={"context_used": 1000, "context_limit": 8192})
    store.set_leaf(key, store.add_message(key, known.id, "user", "second").id)
    store.set_settings(key, {"system": "sys"})
    app = make_app(tmp_path, Script(), store=store)
    app.begin = AppStart(view=app.controller.open(key))
    async with app.run_test(size=(80, 24)):
        chat = chat_of(app)
        await shows(app, "ctx 1,006/8,192")
        await until(lambda: not chat.switching)
        assert await chat.open_conversation(key, leaf=store.children(store.roots(key)[0].id)[0].id)
        await shows(app, "ctx 26/8,192")
        chat.clear_conversation()
        await shows(app, "ctx 0/8,192")


async def test_the_list_opens_conversations(tmp_path):
    store = Store.memory(background=False)
    for name in ("alpha", "beta"):
        conversation = store.new_conversation(name)
        store.add_message(conversation.id, None, "user", f"about {name}")
    app = make_app(tmp_path, Script(), store=store)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: not chat_of(app).starting)
        await pilot.press("ctrl+o")
        await shows(app, "alpha", "beta")
        await pilot.press("tab")
        await until(lambda: "about" in screen_text(app))
        await pilot.press("escape", "slash", *"alp")
        await until(lambda: "beta" not in screen_text(app))
        await pilot.press("enter")
        await until(lambda: "about alpha" in screen_text(app))


async def test_a_new_title_given_in_the_list_is_in_the_header(tmp_path):
    store, key = stored("question", "answer")
    app = make_app(tmp_path, Script(), store=store)
    app.begin = AppStart(view=app.controller.open(key))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: "question" in screen_text(app).splitlines()[0])
        await pilot.press("ctrl+o", "r")
        await until(lambda: isinstance(app.screen, LineScreen))
        await pilot.press("ctrl+u", *"other", "enter")
        await until(lambda: isinstance(app.screen, ConversationsScreen))
        await shows(app, "other")
        await pilot.press("escape")
        await until(lambda: "other" in screen_text(app).splitlines()[0])


async def test_ctrl_c_stops_clears_and_quits(tmp_path):
    app = make_app(tmp_path, slow())
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: chat._answer is not None and bool(chat._answer.text))
        await pilot.press("ctrl+c")
        await until(lambda: not chat.pump.running)
        await pilot.press(*"text")
        await until(lambda: chat.composer.text == "text")
        await pilot.press("ctrl+c")
        await until(lambda: chat.composer.text == "")
        await pilot.press("ctrl+z")
        await until(lambda: chat.composer.text == "text")
        await pilot.press("ctrl+c", "ctrl+c")
        await shows(app, "ctrl+Q quits")
        # Twice within two seconds, which a busy machine may miss.
        while app.return_value is None and app.is_running:
            await pilot.press("ctrl+c", "ctrl+c")
    assert app.return_value == 0


async def test_escape_sequences_of_any_text_never_reach_the_screen(tmp_path):
    nasty = "a\x1b[31mred\x07 \x9b2J\x00\n```\x1b]0;t\x07\n\x1b[2J\n```\n"
    app = make_app(tmp_path, Script(answer=nasty))
    async with app.run_test(size=(80, 30)) as pilot:
        await say(pilot, app, "x\x1b[2Jy")
        shown = await shows(app, "␛[31mred␇")
        assert not any(ord(c) < 32 and c != "\n" or 127 <= ord(c) < 160 for c in shown)
        assert app.store.message(chat_of(app).leaf_id).text == nasty


async def answering(app, pilot):
    """The chat screen, while the first part of an answer is shown."""
    chat = chat_of(app)
    await pilot.press(*"go", "enter")
    await until(lambda: chat._answer is not None and bool(chat._answer.text))
    return chat


async def test_a_tiny_terminal_shows_one_page_and_recovers(tmp_path):
    app = make_app(tmp_path, slow("line\n\n" * 2000))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = await answering(app, pilot)
        await pilot.resize_terminal(39, 9)
        await shows(app, "Terminal too small: 39x9", "Generation continues")
        await pilot.resize_terminal(100, 30)
        await until(lambda: "too small" not in screen_text(app) and "line" in screen_text(app))
        assert chat.pump.running
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)


def counted(app) -> int:
    return int(re.search("continues: ([0-9]+) tok", screen_text(app))[1])


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_a_tiny_terminal_names_its_keys_and_they_stop(tmp_path, key):
    app = make_app(tmp_path, slow("line\n\n" * 2000))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = await answering(app, pilot)
        await pilot.resize_terminal(50, 4)
        await shows(app, "Terminal too small: 50x4", "Generation continues", "esc stops, ctrl+Q quits")
        first = counted(app)
        await until(lambda: counted(app) > first)
        await pilot.press(key)
        await ended(chat)
        await until(lambda: "esc stops" not in screen_text(app) and "ctrl+Q quits" in screen_text(app))
        assert chat._finish.finish == "cancelled"


async def test_a_tiny_terminal_is_left_with_the_second_press_while_an_answer_runs(tmp_path):
    app = make_app(tmp_path, slow("line\n\n" * 2000))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = await answering(app, pilot)
        await pilot.resize_terminal(30, 3)
        await shows(app, "esc stops, ctrl+Q quits")
        await pilot.press("ctrl+q")
        await shows(app, "ctrl+Q again stops the answer", "and quits")
        assert chat.pump.running
        await pilot.press("ctrl+q")
        await until(lambda: app._exit)
    assert app.return_value == 0 and app.store.path_to(chat.leaf_id)[-1].text.startswith("line")


@pytest.mark.parametrize("keys", [["ctrl+q"], ["ctrl+c", "ctrl+c"]])
async def test_a_tiny_terminal_is_left_at_once_where_nothing_runs(tmp_path, keys):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(60, 5)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting and not chat.switching)
        await shows(app, "Terminal too small: 60x5", "ctrl+Q quits")
        for key in keys:
            assert not app._exit
            await pilot.press(key)
        await until(lambda: app._exit)
    assert app.return_value == 0


async def test_the_page_of_a_tiny_terminal_goes_when_it_is_met_again_in_a_large_one(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(60, 5)) as pilot:
        await shows(app, "Terminal too small: 60x5")
        app.push_screen(AskScreen("question", [("a", "an answer")]))
        await shows(app, "an answer")
        await pilot.resize_terminal(100, 30)
        await until(lambda: app.size.width == 100)
        await pilot.press("escape")
        await until(lambda: app.screen is chat_of(app))


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
            await until(lambda: rows_match(chat))
        chat._finish = None
        await pilot.press("ctrl+r")
        await ended(chat)
        await until(lambda: rows_match(chat))
        await pilot.press("pageup")
        await pilot.resize_terminal(90, 30)
        await until(lambda: app.size.width == 90 and rows_match(chat))
        await pilot.press("ctrl+home")
        await until(lambda: chat.transcript.scroll_y == 0)
        shown = await drawn(app)
        assert rows_match(chat) and shown.count("question 0") == 2 and shown.count("question 1") == 1


async def test_thinking_is_folded_while_it_runs_and_kept_when_stopped(tmp_path):
    app = make_app(tmp_path, Script(answer="never", thinking="deep thought " * 1000, delay_s=0.005))
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await shows(app, "▸ thinking", "tokens")
        assert "deep thought" not in screen_text(app)
        await pilot.press("ctrl+t")
        await until(lambda: "deep thought" in screen_text(app))
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)
        message = app.store.message(chat.leaf_id)
        assert message.state == "stopped" and message.thinking.startswith("deep thought") and message.text == ""
        chat.action_thinking_all("hide")
        await shows(app, "stopped by you")
        await until(lambda: "thinking" not in "\n".join(screen_text(app).splitlines()[:-3]).replace("thinking +", ""))


async def test_the_line_at_the_top_stays_when_the_width_changes(tmp_path):
    words = "\n\n".join(" ".join(f"p{paragraph}w{word}" for word in range(40)) for paragraph in range(60))
    app = make_app(tmp_path, Script(answer=words))
    async with app.run_test(size=(100, 30)) as pilot:
        await say(pilot, app, "go")
        await pilot.press("pageup", "pageup", "pageup")
        await until(lambda: not chat_of(app).transcript.follow)
        first = (await drawn(app)).splitlines()[1].split()[0]
        for size in ((61, 30), (100, 20)):
            await pilot.resize_terminal(*size)
            await until(lambda size=size: len(screen_text(app).splitlines()) == size[1] and first in screen_text(app).splitlines()[1])
            assert first in (await drawn(app)).splitlines()[1], "and it stays there"


async def test_the_sidebar_follows_the_width(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(130, 30), notifications=True) as pilot:
        await shows(app, "Conversations ─")
        await pilot.press("f3")
        await until(lambda: "Conversations ─" not in screen_text(app))
        await pilot.press("f3")
        await shows(app, "Conversations ─")
        await pilot.resize_terminal(95, 30)
        await until(lambda: chat_of(app).size.width == 95)
        assert "Conversations ─" in await drawn(app)
        await pilot.resize_terminal(80, 30)
        await until(lambda: chat_of(app).size.width == 80 and "Conversations ─" not in screen_text(app))
        await pilot.press("f3")
        await shows(app, "needs 90 columns")


async def test_writing_while_a_build_loads(tmp_path):
    script = Script(answer="here I am", loading=threading.Event())
    app = make_app(tmp_path, script)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: chat.switching)
        await pilot.press(*"early", "enter")
        # The draft is written in another thread.
        await until(lambda: "queued 1: early" in screen_text(app) and (draft := app.store.draft(None)) is not None and draft.text == "early")
        await shows(app, "loading")
        script.loading.set()
        await ended(chat)
        assert [m.text for m in app.store.path_to(chat.leaf_id)] == ["early", "here I am"]
        await until(lambda: app.store.draft(None) is None)


async def test_reduced_motion_and_hidden_things(tmp_path):
    app = make_app(tmp_path, Script(), config="[ui]\nreduced_motion = true\n")
    async with app.run_test(size=(80, 24)):
        await until(lambda: not chat_of(app).starting)
        assert app.animation_level == "none" and not chat_of(app).composer.cursor_blink


async def test_del_removes_the_last_queued_message(tmp_path):
    app = make_app(tmp_path, slow())
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        chat = chat_of(app)
        await pilot.press(*"one", "enter")
        await until(lambda: chat._answer is not None and bool(chat._answer.text))
        for number in range(6):
            await pilot.press(str(number), "enter")
            await until(lambda number=number: len(chat.queue) == min(number + 1, 5))
        await shows(app, "wait already")
        assert len(chat.queue) == 5 and chat.composer.text == "5"
        await pilot.press("backspace", "delete")
        await until(lambda: len(chat.queue) == 4)
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)


async def test_history_walks_and_keeps_what_was_being_written(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "first")
        await say(pilot, app, "second")
        await pilot.press(*"new", "up", "up")
        await until(lambda: chat.composer.text == "first")
        await pilot.press("down", "down")
        await until(lambda: chat.composer.text == "new")
