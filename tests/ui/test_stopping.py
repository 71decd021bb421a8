"""Esc and ctrl+C while a prompt is read or an answer streams: what is kept, what the lines around it say, what goes on afterwards."""

from __future__ import annotations

import re

import pytest

from tests.ui.fakes import Script
from tests.ui.tui import chat_of, drawn, ended, make_app, ready, running, screen_text, shows, until


async def stopped_in_prefill(pilot, chat, text: str = "word " * 200) -> int:
    """Sends `text` and stops when some of it was read; returns how many tokens."""
    chat.composer.insert(text)
    await pilot.press("enter")
    await until(lambda: chat.status.prefilled >= 128)
    await pilot.press("escape")
    await ended(chat)
    return chat._finish.usage["prefilled_tokens"]


def question_of(chat, text: str) -> str:
    """Id of the stored question that says `text`."""
    (found,) = [m.id for m in chat.app.store.tree(chat.conversation.id) if m.role == "user" and m.text == text]
    return found


async def test_the_status_line_says_what_was_read_before_the_stop(tmp_path):
    app = make_app(tmp_path, Script(prefill_s=0.05))
    async with running(app) as (pilot, chat):
        read = await stopped_in_prefill(pilot, chat)
        assert 128 <= read < 800, "the prompt has a thousand tokens"
        await until(lambda: [int(shown.replace(",", "")) for shown in re.findall(r"cached 0 \+([\d,]+)", screen_text(app))] == [read])


@pytest.mark.parametrize("where", ["new", "other"])
async def test_the_notice_about_a_queue_stays_with_its_conversation(tmp_path, where):
    app = make_app(tmp_path, Script(answer="word " * 2000, delay_s=0.01))
    async with running(app, notifications=True) as (pilot, chat):
        other = app.store.new_conversation("the other one").id
        chat.composer.insert("question")
        await pilot.press("enter")
        await until(lambda: chat.status.answer > 3)
        chat.composer.insert("waits")
        await pilot.press("enter")
        await until(lambda: len(chat.queue) == 1)
        await pilot.press("escape")
        await until(lambda: any("1 queued: send" in toast.message for toast in app._notifications))
        await until(lambda: "1 queued: send" in screen_text(app))
        chat.tell("something else")
        await until(lambda: any(toast.message == "something else" for toast in app._notifications))
        key = chat.conversation.id
        if where == "new":
            await pilot.press("ctrl+n")
        else:
            assert await chat.open_conversation(other)
        await until(lambda: chat.conversation is None or chat.conversation.id == other)
        await until(lambda: [toast.message for toast in app._notifications] == ["something else"])
        await until(lambda: "queued" not in screen_text(app))
        assert await chat.open_conversation(key)
        await until(lambda: any("1 queued: send" in toast.message for toast in app._notifications))


async def test_a_queue_says_how_it_is_sent_while_a_message_is_written_again(tmp_path, monkeypatch):
    """Below the message, for as long as it is so: another queue, the edit's end and sending change what is said."""
    monkeypatch.setattr("dsv41chat.ui.screens.chat_turns.STOPPED_S", 0.01)
    app = make_app(tmp_path, Script(prefill_s=0.05))
    async with app.run_test(size=(100, 40)) as pilot:
        chat = chat_of(app)
        await until(lambda: app.host.engine is not None and not chat.switching)
        chat.composer.insert("word " * 200)
        await pilot.press("enter")
        await until(lambda: chat.status.prefilled >= 128)
        for text in ("one", "two"):
            chat.submit(text)
        await pilot.press("escape")
        await ended(chat)
        sends = '%d queued: ctrl+P, "Send queued messages" sends'
        shown = await shows(app, sends % 2, "Enter creates a branch")
        assert "Not answered" not in shown and chat.editing is not None
        chat.on_remove_queued()
        assert sends % 2 not in await shows(app, sends % 1)
        await pilot.press("escape")
        await shows(app, f"Not answered: ctrl+R answers it. {sends % 1}")
        app.host.engine.script.prefill_s = 0.0
        chat._finish = None
        chat.action_send_queued()
        await ended(chat)
        assert "Send queued messages" not in await drawn(app) and not chat.queue


async def streaming(pilot, app, text: str = "question"):
    """The chat while an answer streams."""
    chat = await ready(app)
    chat.composer.insert(text)
    await pilot.press("enter")
    await until(lambda: chat._answer is not None and bool(chat._answer.text))
    return chat


def stop_and_send(chat, text: str) -> None:
    """Esc, `text` and Enter before the turn has stopped."""
    chat.action_escape()
    assert chat.pump.running and chat.status.stopping
    chat.composer.insert(text)
    chat.composer.submit()


@pytest.mark.parametrize("older", [False, True])
async def test_what_is_sent_behind_esc_goes_off_when_the_answer_has_stopped(tmp_path, older):
    """Unless something waited before: then the queue waits for its user, as after every stop."""
    app = make_app(tmp_path, Script(answer="word " * 400, delay_s=0.02))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = await streaming(pilot, app)
        if older:
            chat.submit("older")
            assert [item.text for item in chat.queue] == ["older"]
        stop_and_send(chat, "next")
        await until(lambda: chat._finish is not None and chat._finish.finish == "cancelled" or chat._sent == "next")
        asked = lambda: [m.text for m in app.store.path_to(chat.leaf_id) if m.role == "user"]
        if older:
            await until(lambda: not chat.pump.running)
            await pilot.pause(0.2)
            assert [item.text for item in chat.queue] == ["older", "next"] and asked() == ["question"]
        else:
            await until(lambda: asked() == ["question", "next"])
            app.host.engine.script.delay_s = 0
            await until(lambda: not chat.pump.running)
            answers = [m for m in app.store.path_to(chat.leaf_id) if m.role == "assistant"]
            assert [m.state for m in answers] == ["stopped", "complete"] and not chat.queue


async def test_what_is_sent_behind_esc_waits_where_the_stopped_message_comes_back(tmp_path):
    app = make_app(tmp_path, Script(prefill_s=0.2))
    async with running(app) as (pilot, chat):
        chat.composer.insert("long " * 100)
        await pilot.press("enter")
        await until(lambda: chat.status.prefilled > 0)
        stop_and_send(chat, "next")
        await until(lambda: not chat.pump.running)
        await pilot.pause(0.2)
        assert not chat.pump.running and [item.text for item in chat.queue] == ["next"]
        assert chat.composer.text == "long " * 100 and chat.editing == question_of(chat, "long " * 100)


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_a_key_pressed_again_to_stop_takes_nothing_away(tmp_path, monkeypatch, key):
    """What was typed while the answer streamed, the message that came back, and the program stay."""
    monkeypatch.setattr("dsv41chat.ui.screens.chat_turns.STOPPED_S", 3600.0)
    app = make_app(tmp_path, Script(answer="word " * 400, delay_s=0.01))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = await streaming(pilot, app)
        chat.composer.insert("half typed")
        await pilot.press(key)
        await until(lambda: not chat.pump.running)
        await pilot.press(key, key, key)
        await pilot.pause()
        assert app.is_running and app._exit is False and chat.composer.text == "half typed"
        chat.composer.reset()
        app.host.engine.script.prefill_s = 0.05
        text = "word " * 200
        await stopped_in_prefill(pilot, chat, text)
        await pilot.press(key, key)
        assert app._exit is False and chat.composer.text == text and chat.editing == question_of(chat, text)
        # A moment later the keys are what they always are.
        monkeypatch.setattr("dsv41chat.ui.screens.chat_turns.STOPPED_S", 0.0)
        await pilot.press(key)
        assert chat.composer.text == ""


async def test_the_label_says_esc_cancels_when_it_does(tmp_path, monkeypatch):
    """For a moment after a stop another Esc is taken for the one that stopped."""
    monkeypatch.setattr("dsv41chat.ui.screens.chat_turns.STOPPED_S", 3600.0)
    app = make_app(tmp_path, Script(prefill_s=0.05))
    async with running(app) as (pilot, chat):
        await stopped_in_prefill(pilot, chat)
        assert "Esc cancels" not in await shows(app, "editing message 1 · Enter creates a branch")
        await pilot.press("escape")
        assert chat.editing is not None
        await pilot.press("x")
        await shows(app, "editing message 1 · Enter creates a branch · Esc cancels")
        monkeypatch.setattr("dsv41chat.ui.screens.chat_turns.STOPPED_S", 0.1)
        await pilot.press("escape")
        await until(lambda: chat.editing is None)
        await stopped_in_prefill(pilot, chat)
        await shows(app, "Enter creates a branch · Esc cancels")


async def test_a_message_left_without_an_answer_says_so_at_once(tmp_path, monkeypatch):
    """When its edit is cancelled, and when answering it is stopped before the first token; not while it is written again, nor once answered."""
    monkeypatch.setattr("dsv41chat.ui.screens.chat_turns.STOPPED_S", 0.01)
    app = make_app(tmp_path, Script(prefill_s=0.05))
    async with running(app) as (pilot, chat):
        await stopped_in_prefill(pilot, chat)
        assert "Not answered" not in await drawn(app)
        await pilot.press("escape")
        await shows(app, "Not answered: ctrl+R answers it.")
        chat._finish = None
        chat.status.prefilled = 0
        for session in app.host.engine.script.sessions:
            session.lane = ()  # all of it is read again
        await pilot.press("ctrl+r")
        await until(lambda: chat.status.prefilled >= 128)
        assert "Not answered" not in await drawn(app)
        await pilot.press("escape")
        await ended(chat)
        await shows(app, "Not answered: ctrl+R answers it.")
        app.host.engine.script.prefill_s = 0.0
        chat._finish = None
        await pilot.press("ctrl+r")
        await ended(chat)
        assert "Not answered" not in await shows(app, "Hello from the fake engine.")
        chat.begin_edit(chat._last("user"))
        await pilot.press("escape")
        await until(lambda: chat.editing is None)
        assert "Not answered" not in await drawn(app)
