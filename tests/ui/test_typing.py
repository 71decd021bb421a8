"""Keys that reach a busy screen all at once: what is typed behind an Enter is neither sent with it, nor twice, nor lost."""

from __future__ import annotations

import threading

import pytest
from textual import events

from dsv41chat.store import Store
from dsv41chat.ui.messages import TypedPaste
from dsv41chat.ui.screens.conversations import ConversationsScreen
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script
from tests.ui.tui import chat_of, drawn, ended, make_app, say, shows, stored, until

FAST_S, SLOW_S = 0.005, 0.05  # a gap that counts as one of a paste, and one that does not


def press(app, *keys: str, gap_s: float = SLOW_S) -> None:
    """All keys at once, as when the screen was busy while they came; to the composer they came `gap_s` apart."""
    names = {"\n": "enter", " ": "space"}
    when = chat_of(app).composer._last_key + 1.0
    for number, key in enumerate(keys):
        event = events.Key(names.get(key, key), {"enter": "\r"}.get(key, key.replace("\n", "\r")) if len(key) == 1 or key == "enter" else None)
        event.time = when + number * gap_s
        app.post_message(event)


def questions(app) -> list[str]:
    chat = chat_of(app)
    return [message.text for message in app.store.path_to(chat.leaf_id) if message.role == "user"]


async def all_ended(chat) -> None:
    await ended(chat)
    await until(lambda: not chat.pump.running and not chat.queue)


async def test_what_is_typed_behind_an_enter_stays(tmp_path):
    app = make_app(tmp_path, Script(answer="answer"))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "first")
        press(app, *"q1 long enough\nq2 long enough\nq3")
        await until(lambda: len(chat.composer.prompts) == 3)
        await until(lambda: chat.composer.text == "q3")
        await until(lambda: len(questions(app)) == 3 and not chat.queue)
        await all_ended(chat)
        assert questions(app) == ["first", "q1 long enough", "q2 long enough"] and chat.composer.text == "q3"
        # The same keys, fast: a paste of three lines.
        chat.composer.reset()
        press(app, *"q1 long enough\nq2 long enough\nq3", gap_s=FAST_S)
        await until(lambda: chat.composer.text == "q1 long enough\nq2 long enough\nq3")


async def test_an_enter_at_the_end_of_a_paste_that_came_as_keys_does_not_send(tmp_path):
    app = make_app(tmp_path, Script(answer="answer"))
    async with app.run_test(size=(100, 30)):
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        for paste, text in ((TypedPaste("first line\rsecond line"), "first line\nsecond line\n"), (events.Paste("sent"), "")):
            chat.composer.reset()
            paste.time = chat.composer._last_key + 1.0
            enter = events.Key("enter", "\r")
            enter.time = paste.time + FAST_S
            app.post_message(paste)
            app.post_message(enter)
            await drawn(app)
            await until(lambda text=text: chat.composer.text == text)
        await all_ended(chat)
        assert questions(app) == ["sent"], "between its marks a paste ends where it says"


async def test_two_enters_send_once(tmp_path):
    app = make_app(tmp_path, Script(answer="answer"))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "first")
        chat._finish = None
        press(app, *"once\n\n")
        await all_ended(chat)
        await drawn(app)
        await all_ended(chat)
        assert questions(app) == ["first", "once"]


async def test_a_command_takes_only_itself_out(tmp_path):
    app = make_app(tmp_path, Script(answer="answer"))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "first")
        press(app, *"/effort high\nmore")
        await until(lambda: app.store.conversation(chat.conversation.id).settings.get("effort") == "high")
        await until(lambda: chat.composer.text == "more")


@pytest.mark.parametrize("command", ["/new", "/new\n", "/open other", "/open", "/quit"])
async def test_a_command_that_leaves_a_conversation_is_not_its_draft(tmp_path, command):
    store, key = stored("first", "answer")
    other = store.new_conversation("other").id
    app = make_app(tmp_path, Script(answer="answer"), store=store)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        await chat.open_conversation(key)
        chat.composer.insert(command)
        chat.save_draft(now=True)
        assert store.draft(key).text == command
        await pilot.press("enter")
        if command == "/open":
            await until(lambda: isinstance(app.screen, ConversationsScreen))
            await pilot.press("escape")
            await until(lambda: app.screen is chat)
            chat.action_new_conversation()
        if command == "/quit":
            await until(lambda: app._exit)
        else:
            wanted = other if command == "/open other" else None
            await until(lambda: (chat.conversation and chat.conversation.id) == wanted)
            await chat.open_conversation(key)
            await until(lambda: chat.conversation is not None and chat.conversation.id == key)
            assert chat.composer.text == ""
        assert store.draft(key) is None or store.draft(key).text == ""


async def test_a_command_that_fails_stays_as_it_was(tmp_path):
    app = make_app(tmp_path, Script(answer="answer"))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        chat.composer.insert("/effort " + chat.composer.add_chip("paste", "no such effort"))
        text, chips = chat.composer.text, dict(chat.composer.chips)
        await pilot.press("home", "enter")
        await shows(app, "effort must be")
        assert chat.composer.text == text and chat.composer.chips == chips and chat.composer.cursor_location == (0, 0)
        chat.composer.reset()
        chat.composer.insert("/system " + chat.composer.add_chip("paste", "be brief"))
        await pilot.press("home", "enter")
        await until(lambda: chat.new_settings.get("system") == "be brief" and chat.composer.text == "")


async def test_an_edit_takes_only_itself_out(tmp_path):
    app = make_app(tmp_path, Script(answer="answer"))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "first")
        chat.begin_edit(chat.transcript.entries[-2])
        chat._finish = None
        press(app, *" changed\nmore")
        await all_ended(chat)
        await until(lambda: chat.composer.text == "more")
        assert questions(app) == ["first changed"]


async def test_a_waiting_message_does_not_come_back_over_what_was_typed(tmp_path):
    app = make_app(tmp_path, Script(answer="word " * 2000, delay_s=0.005))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        press(app, *"go\n")
        await until(lambda: chat.leaf_id is not None)
        press(app, *"waits\n")
        await until(lambda: bool(chat.queue))
        press(app, "up", *"x")
        await until(lambda: not chat.queue)
        await until(lambda: chat.composer.text == "waitsx")
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)


@pytest.mark.parametrize("resumed", [False, True])
async def test_lines_that_come_before_the_start_is_over_are_one_message(tmp_path, monkeypatch, resumed):
    store, key = stored("question", "answer")
    go_on, history = threading.Event(), store.prompt_history
    monkeypatch.setattr(store, "prompt_history", lambda conversation: go_on.wait(60) and history(conversation))
    app = make_app(tmp_path, Script(answer="answer"), store=store)
    if resumed:
        app.begin = AppStart(view=app.controller.open(key))
    async with app.run_test(size=(100, 30)):
        chat = chat_of(app)
        press(app, *"q1\nq2\nq3")
        await until(lambda: chat.composer.text.endswith("q3"))
        assert chat.starting
        go_on.set()
        await all_ended(chat)
        assert questions(app) == [*(["question"] if resumed else []), "q1\nq2\nq3"]


async def test_a_message_that_could_not_be_stored_comes_back_before_what_was_typed_since(tmp_path, monkeypatch):
    app = make_app(tmp_path, Script(answer="answer"))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "first")
        chat._finish, go_on = None, threading.Event()

        def refuse(*_, **__):
            go_on.wait(60)
            raise ValueError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(app.store, "add_message", refuse)
            press(app, *"second\nthird")
            await until(lambda: chat.composer.text == "third")
            go_on.set()
            await until(lambda: chat._failure is not None and not chat.pump.running)
        await until(lambda: chat.composer.text == "second\n\nthird")
        assert questions(app) == ["first"]


async def test_what_was_typed_while_a_message_is_stored_is_a_draft_again(tmp_path, monkeypatch):
    """The commit that makes the draft a message takes it away; what stands in the composer by then is written anew."""
    app = make_app(tmp_path, Script(answer="answer"), store=Store.open(tmp_path / "data"))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "first")
        chat._finish, go_on, add = None, threading.Event(), app.store.add_message

        def late(conversation, parent, role, *more, **options):
            if role == "user":
                go_on.wait(60)
            return add(conversation, parent, role, *more, **options)

        monkeypatch.setattr(app.store, "add_message", late)
        press(app, *"second\nthird")
        await until(lambda: (draft := app.store.draft(chat.conversation.id)) is not None and draft.text == "third")
        go_on.set()
        await all_ended(chat)
        await until(lambda: (draft := app.store.draft(chat.conversation.id)) is not None and draft.text == "third")
    app.store.close()


async def test_the_first_draft_goes_however_late_another_thread_comes_to_it(tmp_path, monkeypatch):
    """The first message is no draft any more, although its conversation has a newer draft by the time that is written."""
    app = make_app(tmp_path, Script(answer="answer"))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting and not chat.switching)
        chat.composer.insert("first")
        chat.save_draft(now=True)
        assert app.store.draft(None).text == "first"
        late, spawn = [], chat.spawn
        monkeypatch.setattr(chat, "spawn", lambda work, group, **more: late.append(work) if group == "draft" else spawn(work, group, **more))
        chat._finish = None
        await pilot.press("enter")
        await ended(chat)
        chat.composer.insert("second")
        chat.save_draft()
        for work in late:
            await work
        assert app.store.draft(None) is None and app.store.draft(chat.conversation.id).text == "second"


async def test_a_first_message_whose_build_does_not_load_comes_back_before_what_was_typed_since(tmp_path, monkeypatch):
    app, go_on = make_app(tmp_path, Script()), threading.Event()

    def load(*_):
        go_on.wait(60)
        raise ValueError("planted")

    monkeypatch.setattr(app.host, "load", load)
    async with app.run_test(size=(100, 30)):
        chat = chat_of(app)
        await until(lambda: not chat.starting and chat.switching)
        press(app, *"first\nsecond")
        await until(lambda: chat.held == "first" and chat.composer.text == "second")
        go_on.set()
        await until(lambda: not chat.switching)
        await until(lambda: chat.composer.text == "first\n\nsecond" and not chat.held)


async def test_leaving_stores_a_draft_that_another_thread_was_to_write(tmp_path, monkeypatch):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        chat.composer.insert("draft")
        # The thread does not come to it.
        with monkeypatch.context() as patch:
            patch.setattr(chat, "spawn", lambda work, *_, **__: work.close())
            chat.save_draft()
        await pilot.press("ctrl+q")
        await until(lambda: app.leaving)
        assert app.store.draft(None).text == "draft"


@pytest.mark.parametrize("keys,text", [
    ((*"abc", "backspace", "backspace", *"XY"), "aXY"),
    ((*"abc", "ctrl+u", *"XY"), "XY"),
    ((*"abc", "home", *"XY"), "XYabc"),
    ((*"abc", "left", *"X", "end", *"Y"), "abXcY"),
    ((*"one two", "ctrl+w", *"2"), "one 2"),
])  # fmt: skip
async def test_keys_act_in_the_order_in_which_they_came(tmp_path, keys, text):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 30)):
        press(app, *keys, gap_s=FAST_S)
        await until(lambda: len(chat_of(app).composer.text) == len(text) and chat_of(app).composer.text[-1] == text[-1])
        await drawn(app)
        assert chat_of(app).composer.text == text


async def test_what_was_begun_waits_for_the_next_new_conversation(tmp_path):
    app = make_app(tmp_path, Script(answer="answer"))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "first")
        opened = chat.conversation.id
        await pilot.press("ctrl+n")
        await until(lambda: chat.conversation is None)
        press(app, *"precious")
        await until(lambda: chat.composer.text == "precious")
        await chat.open_conversation(opened)
        await until(lambda: chat.conversation is not None and chat.composer.text == "")
        await pilot.press("ctrl+n")
        await until(lambda: chat.conversation is None and chat.composer.text == "precious")
        chat._finish = None
        await pilot.press("enter")
        await ended(chat)
        await pilot.press("ctrl+n")
        await until(lambda: chat.conversation is None)
        assert chat.composer.text == "", "it was sent"


async def test_an_edit_gives_back_the_draft_whose_place_it_took(tmp_path):
    """When it is left, when it is sent, and when the program ends in between."""
    app = make_app(tmp_path, Script(answer="answer"))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "first")
        press(app, *"a thought")
        await until(lambda: chat.composer.text == "a thought")
        chat.begin_edit(chat.transcript.entries[-2])
        assert chat.composer.text == "first"
        await pilot.press("escape")
        await until(lambda: chat.composer.text == "a thought" and chat.editing is None)
        chat.begin_edit(chat.transcript.entries[-2])
        chat.save_draft(now=True)
        chat.restore_draft(app.store.draft(chat.conversation.id))
        assert chat.composer.text == "first" and chat.editing == chat.transcript.entries[-2].message.id
        chat._finish = None
        press(app, *" changed\n")
        await all_ended(chat)
        await until(lambda: chat.composer.text == "a thought")
        assert questions(app) == ["first changed"]


async def test_a_stopped_message_comes_back_before_what_was_typed_since(tmp_path):
    """Nothing of either is out of sight: the edit strip stands over both."""
    app = make_app(tmp_path, Script(answer="word", prefill_s=2))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        press(app, *"go\n")
        await until(lambda: chat.pump.running)
        press(app, *"since")
        await until(lambda: chat.composer.text == "since")
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)
        (question,) = [m for m in app.store.tree(chat.conversation.id) if m.role == "user"]
        await until(lambda: chat.composer.text == "go\n\nsince" and chat.editing == question.id)


@pytest.mark.parametrize("gap_s", [SLOW_S, FAST_S])
async def test_what_is_typed_behind_ctrl_o_reaches_the_filter(tmp_path, gap_s):
    """All in one go: the filter has every letter in order, and Enter opens what it finds, not what stood there before."""
    store = Store.memory(background=False)
    for name, text in (("alpha", "about 987654 apples"), ("beta", "about pears"), ("gamma", "about plums")):
        store.add_message(store.new_conversation(name).id, None, "user", text)
    app = make_app(tmp_path, Script(answer="answer"), store=store)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        press(app, "ctrl+o", "slash", *"987654", gap_s=gap_s)
        await until(lambda: len(app.screen.query("#list-filter")) == 1 and app.screen.query_one("#list-filter").value == "987654")
        await until(lambda: [row.title for row in app.screen._rows] == ["alpha"])
        await pilot.press("escape")
        await until(lambda: app.screen is chat)
        press(app, "ctrl+o", "slash", *"987654\n", gap_s=gap_s)
        await until(lambda: app.screen is chat and chat.conversation is not None)
        await drawn(app)
        assert chat.conversation.title == "alpha" and chat.composer.text == ""
