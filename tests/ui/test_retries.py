"""A retry, a continuation or an edit that ends with nothing stored: the screen shows again what it showed, and the next message goes on there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv41chat.engine.errors import PackIncomplete
from dsv41chat.store import Locked
from tests.ui.fakes import HELLO, Script
from tests.ui.test_plain import chat as line_mode
from tests.ui.tui import drawn, ended, make_app, running, say, screen_text, shows, stored, until

TEXTS = ("first " * 200, "an answer", "second question", "its answer")
BROKEN = "a shard is missing."
WAYS = {
    "the last answer": ["ctrl+r"],
    "a selected answer": ["tab", "g", "down", "r"],
    "a selected question": ["tab", "g", "r"],
    "an edit without a change": ["tab", "g", "e", "enter"],
    "going on with a cut answer": ["tab", "e"],
}


def opened(tmp_path, script, texts=TEXTS, cut=False):
    """An application with a conversation of these messages; the last answer has a sibling. cut: it was stopped."""
    store, key = stored(*texts)
    if len(texts) % 2 == 0:
        writer = store.begin_answer(key, store.message(store.conversation(key).leaf_id).parent_id, "fake", "f" * 64, {})
        writer.update("cut off")
        writer.finish("stopped" if cut else "complete", "cancelled" if cut else "stop")
    app = make_app(tmp_path, script, store=store)
    app.begin = replace(app.begin, view=app.controller.open(key))
    return app


def messages(chat):
    return [(entry.key, entry.text, entry.branch) for entry in chat.transcript.entries if entry.message is not None]


def failures(chat):
    return [entry.text for entry in chat.transcript.entries if entry.style == "error"]


async def end_with_nothing(pilot, chat, keys, stop: bool):
    """Presses the keys, and Esc before the first token; or the engine fails there."""
    script = chat.app.host.engine.script
    script.prefill_s, script.error = (0.05, None) if stop else (0.0, PackIncomplete(BROKEN))
    chat._finish = chat._failure = None
    chat.status.prefilled = 0
    for session in script.sessions:
        session.lane = ()  # all of it is read again
    await pilot.press(*keys)
    if stop:
        await until(lambda: chat.status.prefilled >= 128)
        await pilot.press("escape")
    await ended(chat)
    await pilot.pause()
    script.prefill_s, script.error = 0.0, None


@pytest.mark.parametrize("end", ["stopped", "failed"])
@pytest.mark.parametrize("way", WAYS)
async def test_what_was_on_the_screen_is_there_again(tmp_path, way, end):
    app = opened(tmp_path, Script(), cut=way.startswith("going on"))
    async with running(app, size=(100, 40), notifications=True) as (pilot, chat):
        before, leaf = messages(chat), chat.leaf_id
        assert [text for _, text, _ in before] == [*TEXTS[:3], "cut off"] and before[-1][2] == "2/2"
        await pilot.press(*WAYS[way][:-1])
        chosen = chat.transcript.selected_entry
        for _ in range(2 if end == "failed" else 1):
            if chat.focused is chat.composer and chat.editing is None and "e" in WAYS[way][:-1]:
                await pilot.press(*WAYS[way][:-1])
            await end_with_nothing(pilot, chat, WAYS[way][-1:], end == "stopped")
            assert messages(chat) == before
            assert chat.leaf_id == leaf == app.store.conversation(chat.conversation.id).leaf_id
            assert chat.transcript.selected_entry is chosen
        assert not any("on the other branch" in toast.message for toast in app._notifications)
        shown = await shows(app, "cut off")
        assert "Not answered" not in shown and "…" not in chat.transcript.entries[-1].state_note
        last = way in ("the last answer", "going on with a cut answer")
        said = f"{BROKEN}\nctrl+R tries again." if last else BROKEN
        assert failures(chat) == ([said] if end == "failed" else [])
        await say(pilot, app, "next")
        path = app.store.path_to(app.store.conversation(chat.conversation.id).leaf_id)
        assert [m.text for m in path] == [*TEXTS[:3], "cut off", "next", HELLO]
        assert [m.id for m in path] == [key for key, _, _ in messages(chat)]


@pytest.mark.parametrize("end", ["stopped", "failed"])
async def test_a_question_without_an_answer_keeps_its_hint(tmp_path, end):
    app = opened(tmp_path, Script(), TEXTS[:1])
    async with running(app, size=(100, 40)) as (pilot, chat):
        await shows(app, "Not answered: ctrl+R answers it.")
        for _ in range(2):
            await end_with_nothing(pilot, chat, ["ctrl+r"], end == "stopped")
            await until(lambda: screen_text(app).count("Not answered: ctrl+R answers it.") == 1)
        assert failures(chat) == ([f"{BROKEN}\nctrl+R tries again."] if end == "failed" else [])
        chat._finish = chat._failure = None
        await pilot.press("ctrl+r")
        await ended(chat)
        await shows(app, HELLO)
        shown = await drawn(app)
        assert "Not answered" not in shown and BROKEN not in shown


async def test_the_place_of_the_view_comes_back(tmp_path):
    app = opened(tmp_path, Script(), ("first\n\n" * 60, "line\n\n" * 60, "second", "line\n\n" * 60))
    async with running(app) as (pilot, chat):
        await pilot.press("tab", "g", "down")
        await drawn(app)
        place = chat.transcript.place()
        assert not chat.transcript.follow and chat.transcript.selected == 1
        await end_with_nothing(pilot, chat, ["r"], stop=True)
        await drawn(app)
        assert chat.transcript.place() == place and chat.transcript.selected == 1 and not chat.transcript.follow


async def test_a_retry_that_fails_later_is_what_the_next_message_goes_on_from(tmp_path):
    """Its text stays, as a branch of its own, and nothing hangs below the answer that is not on the screen."""
    app = opened(tmp_path, Script(answer="abcdefgh", error_at=5))
    async with running(app, size=(100, 40)) as (pilot, chat):
        app.host.engine.script.error = PackIncomplete(BROKEN)
        chat._finish = chat._failure = None
        await pilot.press("ctrl+r")
        await ended(chat)
        app.host.engine.script.error = None
        assert messages(chat)[-1][1] == "abcd" and chat.leaf_id == messages(chat)[-1][0]
        await until(lambda: messages(chat)[-1][2] == "3/3")
        assert failures(chat) == [f"{BROKEN}\nctrl+R tries again."]
        await say(pilot, app, "next")
        path = app.store.path_to(app.store.conversation(chat.conversation.id).leaf_id)
        assert [m.text for m in path][2:] == ["second question", "abcd", "next", "abcdefgh"]


async def test_an_edit_that_could_not_be_stored_is_an_edit_again(tmp_path, monkeypatch):
    app = opened(tmp_path, Script())
    async with running(app, size=(100, 40)) as (pilot, chat):
        before, leaf = messages(chat), chat.leaf_id
        chat.begin_edit(chat.transcript.entries[2])
        chat.composer.reset("third question")
        add = app.store.add_message

        def refuse(*_, **__):
            raise Locked("it is open elsewhere", "close it there")

        monkeypatch.setattr(app.store, "add_message", refuse)
        await pilot.press("enter")
        await ended(chat)
        await shows(app, "it is open elsewhere", "editing message 3")
        assert messages(chat) == before and chat.leaf_id == leaf
        assert chat.editing == before[2][0] and chat.composer.text == "third question"
        monkeypatch.setattr(app.store, "add_message", add)
        chat._finish = chat._failure = None
        await pilot.press("enter")
        await ended(chat)
        assert [text for _, text, _ in messages(chat)] == [*TEXTS[:2], "third question", HELLO]


async def test_an_answer_without_a_text_is_on_the_screen_as_it_is_stored(tmp_path):
    app = opened(tmp_path, Script(answer=""))
    async with running(app, size=(100, 40)) as (pilot, chat):
        await say(pilot, app, "next")
        assert app.store.message(chat.leaf_id).role == "assistant" and messages(chat)[-1][0] == chat.leaf_id


@pytest.mark.parametrize("end", ["stopped", "failed"])
def test_in_lines_the_earlier_answer_stays(tmp_path, end):
    store, key = stored(*TEXTS)
    leaf = store.conversation(key).leaf_id
    script = Script()
    plain = line_mode(tmp_path, [], script, store=store)

    def troubled(word):
        def line():
            if end == "failed":
                script.error = PackIncomplete(BROKEN)
            else:
                script.answer = lambda *_: plain.controller.cancel() or "never"
            return word

        return line

    def mended():
        script.error, script.answer = None, HELLO
        return "next"

    lines = iter([f"/open {key}", troubled("/retry"), mended, troubled("unanswered"), "/quit"])
    plain.read = lambda prompt: line() if callable(line := next(lines)) else line
    plain.run()
    shown = plain.out.getvalue()
    assert shown.count("The earlier answer stays.") == 1 and shown.count("The last message is not answered: /retry answers it.") == 1
    assert (f"error: {BROKEN}" in shown) == (end == "failed")
    path = store.path_to(store.conversation(key).leaf_id)
    assert [m.text for m in path] == [*TEXTS, "next", HELLO, "unanswered"] and path[3].id == leaf


def test_in_lines_a_retry_that_fails_later_is_gone_on_from(tmp_path):
    store, key = stored(*TEXTS)
    script = Script(answer="abcdefgh", error=PackIncomplete(BROKEN), error_at=5)
    plain = line_mode(tmp_path, [], script, store=store)

    def mended():
        script.error = None
        return "next"

    lines = iter([f"/open {key}", "/retry", mended, "/quit"])
    plain.read = lambda prompt: line() if callable(line := next(lines)) else line
    plain.run()
    path = store.path_to(store.conversation(key).leaf_id)
    assert [m.text for m in path][2:] == ["second question", "abcd", "next", "abcdefgh"]
    assert "stays" not in plain.out.getvalue() and "not answered" not in plain.out.getvalue()


async def test_one_hidden_message_is_one(tmp_path):
    app = opened(tmp_path, Script(), ("first", "an answer", "not answered"))
    async with running(app, size=(100, 40), notifications=True) as (pilot, chat):
        said = lambda text: any(text in toast.message for toast in app._notifications)
        await pilot.press("tab", "g", "down", "r")
        await ended(chat)
        await until(lambda: said("1 later message stays on the other branch; [ and ] switch."))
        await pilot.press("g", "down", "left_square_bracket")
        await shows(app, "not answered")
        await pilot.press("g", "down", "right_square_bracket")
        await until(lambda: said("1 later message lives on branch 1/2; [ and ] return there."))


LONG_TEXTS = ("first " * 70, "an answer " * 60, "second question", "its answer", "third question", "the last answer")


@pytest.mark.parametrize("way", ["a selected answer", "a selected question", "an edit without a change"])
@pytest.mark.parametrize("choice", ["drop", "raise", "edit", "none"])
async def test_a_retry_that_does_not_fit_is_about_its_own_branch(tmp_path, way, choice):
    """What the dialog offers is for the question that was to be answered again, not for the end of the conversation."""
    store, key = stored(*LONG_TEXTS)
    app = make_app(tmp_path, Script(), store=store, config="[engine]\ncontext = 1000\n")
    app.begin = replace(app.begin, view=app.controller.open(key))
    async with running(app, size=(100, 40)) as (pilot, chat):
        before = messages(chat)
        question = before[2][0]
        await pilot.press("tab", "g", "down", "down")
        await pilot.press(*{"a selected answer": ["down", "r"], "a selected question": ["r"]}.get(way, ["e", "enter"]))
        await ended(chat)
        shown = await shows(app, "The context is full.", "raise the context")
        assert "copy without the 2 oldest messages" in shown and messages(chat) == before
        chat._finish = chat._failure = None
        if choice == "none":
            await pilot.press("escape")
            await until(lambda: app.screen is chat)
            assert chat.composer.text == "" and chat.editing is None and messages(chat) == before
            return
        await pilot.press({"drop": "2", "raise": "3", "edit": "4"}[choice])
        if choice == "edit":
            await until(lambda: chat.composer.text == "second question")
            assert chat.editing == question and messages(chat) == before
            return
        await ended(chat)
        path = app.store.path_to(chat.leaf_id)
        if choice == "drop":
            assert chat.conversation.id != key and [m.text for m in path] == ["second question", HELLO]
        else:
            assert [m.text for m in path] == [*LONG_TEXTS[:3], HELLO] and path[2].id == question
        assert [m.text for m in app.store.path_to(before[-1][0])] == list(LONG_TEXTS)


async def test_going_on_where_it_does_not_fit_goes_on_in_a_larger_context(tmp_path):
    store, key = stored(*LONG_TEXTS[:3])
    writer = store.begin_answer(key, store.conversation(key).leaf_id, "fake", "f" * 64, {})
    writer.update("cut off")
    writer.finish("stopped", "cancelled")
    app = make_app(tmp_path, Script(), store=store, config="[engine]\ncontext = 1000\n")
    app.begin = replace(app.begin, view=app.controller.open(key))
    async with running(app, size=(100, 40)) as (pilot, chat):
        await pilot.press("tab", "e")
        await ended(chat)
        await shows(app, "raise the context")
        chat._finish = chat._failure = None
        await pilot.press("3")
        await ended(chat)
        assert app.store.message(chat.leaf_id).text == "cut off" + HELLO
