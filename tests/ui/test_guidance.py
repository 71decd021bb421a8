"""What the full screen says about what to do next, and that keys do what it says."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from textual.widgets import Input

from dsv41chat.store import Store
from dsv41chat.ui.commands import COMMANDS, hint
from dsv41chat.ui.present import readonly_reason
from dsv41chat.ui.screens.dialogs import LineScreen
from dsv41chat.ui.screens.settings import SettingsScreen
from dsv41chat.ui.widgets.foot import Foot, packed
from tests.ui.fakes import Script
from tests.ui.test_mended import stored
from tests.ui.tui import chat_of, drawn, ended, make_app, say, screen_text, shows, until


def opened(tmp_path, store, key, script=None):
    app = make_app(tmp_path, script or Script(), store=store)
    app.begin = replace(app.begin, view=app.controller.open(key))
    return app


@pytest.mark.parametrize("word", ["needle", "nowhere"])
async def test_esc_after_find_returns_to_the_composer(tmp_path, word):
    app = make_app(tmp_path, Script(answer="needle in hay"))
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "where is the needle?")
        before = len(app.store.tree(chat.conversation.id))
        await pilot.press("ctrl+f", *word)
        await until(lambda: chat._find_timer is None and chat._query == word)
        await pilot.press("escape", *"read it")
        await until(lambda: chat.composer.text == "read it" and chat.focused is chat.composer)
        assert not chat.pump.running and len(app.store.tree(chat.conversation.id)) == before


async def test_esc_after_find_leaves_the_transcript_too(tmp_path):
    app = make_app(tmp_path, Script(answer="needle in hay"))
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "where?")
        await pilot.press("ctrl+f", *"needle")
        await until(lambda: bool(chat._hits))
        chat.transcript.focus()
        await until(lambda: chat.focused is chat.transcript)
        await pilot.press("escape", "d")
        await until(lambda: chat.composer.text == "d")


async def test_help_lists_every_command_with_its_sentence(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(110, 150)) as pilot:
        await until(lambda: not chat_of(app).starting)
        await pilot.press(*"/help", "enter")
        await shows(app, "Slash commands")
        shown = await drawn(app)
        assert not [one.name for one in COMMANDS if f"/{one.name} " not in shown or one.help not in shown]


async def test_a_slash_shows_the_commands_that_fit(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(140, 30)) as pilot:
        await until(lambda: not chat_of(app).starting)
        await pilot.press("slash")
        await until(lambda: all(f"/{one.name}" in screen_text(app) for one in COMMANDS))
        await pilot.press(*"exp")
        await until(lambda: "/export [md|json|jsonl|text] [FILE]: writes this conversation to a file" in screen_text(app))
        await pilot.press("tab")
        await until(lambda: chat_of(app).composer.text == "/export ")
        await shows(app, "writes this conversation")
        await pilot.press(*["backspace"] * 8, *"plain")
        await until(lambda: "writes this conversation" not in screen_text(app))


def test_what_a_line_with_a_slash_hints_at():
    assert hint("/co") == "/copy  /continue" and hint("/read x").startswith("/read FILE: ")
    assert [hint(text) for text in ("", "//new", "new", "/zzz", "/new\nline")] == [""] * 5


async def test_an_unanswered_message_says_what_to_do(tmp_path):
    store, key = stored("question")
    store.queue_push(key, "left over")
    app = opened(tmp_path, store, key)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: app.host.engine is not None and not chat.switching)
        await shows(app, "Not answered: ctrl+R answers it.", '1 queued: ctrl+P, "Send queued messages" sends it.')
        await pilot.press("ctrl+r")
        await ended(chat)
        assert "Not answered" not in await shows(app, "Hello from the fake engine.")


CUT = "The last answer was interrupted; what had arrived is kept."


def with_cut_answer(store):
    """A conversation whose only answer was left unfinished; its id and that of the answer."""
    key = store.new_conversation().id
    question = store.add_message(key, None, "user", "tell kill")
    writer = store.begin_answer(key, question.id, "nano", "f", {"seed": 7})
    writer.update("half of it")
    return key, writer.finish("interrupted").id


async def test_an_interrupted_answer_is_said_while_it_is_the_last(tmp_path):
    """Not once something comes after it, also when opened again."""
    store = Store.memory(background=False)
    key, cut = with_cut_answer(store)
    app = opened(tmp_path, store, key)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: app.host.engine is not None and not chat.switching)
        await shows(app, CUT, "ctrl+R answers again; Tab, then e")
        await say(pilot, app, "define cow")
        assert CUT not in await shows(app, "Hello from the fake engine.")
        assert await chat.open_conversation(key)
        assert CUT not in await drawn(app)
        assert await chat.open_conversation(key, leaf=cut)
        await shows(app, CUT)
        await pilot.press("ctrl+r")
        assert CUT not in await drawn(app)
        await ended(chat)
        assert CUT not in await drawn(app)


async def test_a_reader_of_an_interrupted_answer_is_offered_nothing(tmp_path):
    """It says what is so, without keys that do nothing here, and no longer once the other window goes on."""
    with Store.open(tmp_path / "data", background=False) as first, Store.open(tmp_path / "data", background=False) as second:
        key, cut = with_cut_answer(first)
        first.lock(key)
        app = opened(tmp_path, second, key)
        async with app.run_test(size=(100, 30)):
            shown = await shows(app, CUT, "read-only")
            assert "ctrl+R" not in shown.rpartition(CUT)[2].partition("\n")[0] and "answers again" not in shown
            first.add_message(key, cut, "user", "What is 7 + 8?")
            assert CUT not in await shows(app, "What is 7 + 8?")


async def test_an_answered_conversation_opens_without_such_a_line(tmp_path):
    store, key = stored("question", "answer")
    app = opened(tmp_path, store, key)
    async with app.run_test(size=(100, 30)):
        await until(lambda: not chat_of(app).starting)
        await shows(app, "question", "answer")
        assert "Not answered" not in await drawn(app)


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_leaving_a_message_that_is_too_long_takes_it_out(tmp_path, meanwhile):
    app = make_app(tmp_path, Script(context_limit=600))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        first, used = chat.leaf_id, chat.status.context_used
        await say(pilot, app, "x" * 700)
        await shows(app, "This message alone has 700 tokens")
        await until(lambda: chat.status.context_used > 700 and chat.status.context_limit == 600)
        if meanwhile:
            chat.composer.insert("short")
        await pilot.press("escape")
        await until(lambda: app.screen is chat and chat.focused is chat.composer)
        await until(lambda: chat.composer.expanded() == ("short" if meanwhile else "x" * 700))
        await until(lambda: chat.leaf_id == first == app.store.conversation(chat.conversation.id).leaf_id)
        await until(lambda: chat.status.context_used == used)
        chat.composer.reset("short")
        chat._finish = chat._failure = None
        await pilot.press("enter")
        await ended(chat)
        path = app.store.path_to(chat.leaf_id)
        assert [message.text for message in path] == ["hello", "Hello from the fake engine.", "short", "Hello from the fake engine."]
        assert any(message.text == "x" * 700 for message in app.store.tree(chat.conversation.id)), "the text stays stored"


async def test_a_conversation_of_one_message_that_was_taken_back_does_not_stay(tmp_path):
    """Its text is the draft of a new one, with the settings that were chosen for it, also at the next start."""
    text = "x" * 9000
    with Store.open(tmp_path / "data", background=False) as store:
        app = make_app(tmp_path, Script(context_limit=600), store=store)
        async with app.run_test(size=(100, 30)) as pilot:
            chat = chat_of(app)
            await until(lambda: app.host.engine is not None and not chat.switching)
            chat.change_option("temperature", 0.25)
            await say(pilot, app, text)
            await shows(app, "This message alone has 9,000 tokens")
            await pilot.press("escape")
            await until(lambda: chat.composer.expanded() == text and chat.conversation is None and chat.new_settings["temperature"] == 0.25)
            await until(lambda: store.list_conversations() == [] and chat.focused is chat.composer)
            assert app.controller.last_conversation_id is None and store.draft(None).meta["chips"]
        (gone,) = store.list_conversations(deleted=True)
        app = make_app(tmp_path, Script(context_limit=20_000), store=store)
        async with app.run_test(size=(100, 30)) as pilot:
            chat = chat_of(app)
            await until(lambda: chat.composer.expanded() == text and app.host.engine is not None and not chat.switching)
            await pilot.press("enter")
            await ended(chat)
            (kept,) = store.list_conversations()
            assert kept.id != gone.id and store.path_to(kept.leaf_id)[0].text == text and store.draft(None) is None


async def test_a_draft_without_a_conversation_waits_behind_one_that_is_opened_at_the_start(tmp_path):
    store, key = stored("question", "answer")
    store.save_draft(None, "left [paste 1: 2 lines]", meta={"chips": {"[paste 1: 2 lines]": "two\nlines"}})
    app = opened(tmp_path, store, key)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting and chat.composer.text == "")
        await pilot.press("ctrl+n")
        await until(lambda: chat.conversation is None and chat.composer.expanded() == "left two\nlines")


@pytest.mark.parametrize("keeps", ["typed meanwhile", "its title", "its queue"])
async def test_a_conversation_that_holds_something_else_stays(tmp_path, keeps):
    app = make_app(tmp_path, Script(context_limit=600))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "x" * 700)
        await shows(app, "This message alone has 700 tokens")
        key = chat.conversation.id
        if keeps == "typed meanwhile":
            chat.composer.insert("short")
        elif keeps == "its title":
            chat._renamed("Mine")
        else:
            app.store.queue_push(key, "wait")
            chat.reload_queue()
        await pilot.press("escape")
        await until(lambda: app.screen is chat and chat.leaf_id is None and chat.composer.text)
        assert chat.conversation.id == key == app.store.list_conversations()[0].id


async def test_the_key_line_names_edit_only_where_it_works(tmp_path):
    store, key = stored("question", "answer")
    store.add_message(key, store.conversation(key).leaf_id, "user", "more")
    app = opened(tmp_path, store, key)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        last = lambda: screen_text(app).splitlines()[-1]
        await until(lambda: app.host.engine is not None and not chat.switching)
        await until(lambda: not chat.starting)
        await pilot.press("tab", "g")
        await until(lambda: "e edit" in last())
        await pilot.press("down")
        await until(lambda: "c copy" in last() and "e edit" not in last())
        await pilot.press("up")
        await until(lambda: "e edit" in last())


async def test_a_stopped_answer_offers_to_continue(tmp_path):
    app = make_app(tmp_path, Script(answer="abc " * 3000, delay_s=0.005))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: chat._answer is not None and len(chat._answer.text) > 30)
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)
        await pilot.press("tab")
        await until(lambda: "e continue" in screen_text(app).splitlines()[-1])


def test_read_only_names_its_own_cause(tmp_path, monkeypatch):
    store = Store.open(tmp_path, background=False)
    assert "process 7" in readonly_reason(7, store)
    assert "--readonly" in readonly_reason(None, store)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"the folder {tmp_path} cannot be written" in readonly_reason(None, store)
    store.close()


async def test_a_reader_is_told_of_no_other_process(tmp_path):
    store = Store.open(tmp_path / "data", background=False)
    key = store.new_conversation("notes").id
    store.set_leaf(key, store.add_message(key, None, "user", "question").id)
    store.close()
    app = opened(tmp_path, Store.open(tmp_path / "data", readonly=True), key)
    async with app.run_test(size=(100, 30)):
        await shows(app, "--readonly")
        await until(lambda: not chat_of(app).starting)
        shown = await drawn(app)
        assert "elsewhere" not in shown and "Take over" not in shown and "Not answered" not in shown


def test_a_foot_breaks_between_its_keys_and_drops_the_last():
    items = ("enter open", "n new", "s sort")
    assert packed(items, 40, 1) == "enter open  n new  s sort"
    assert packed(items, 18, 3) == "enter open  n new\ns sort"
    assert packed(items, 18, 1) == "enter open  n new"


@pytest.mark.parametrize(("key", "size"), [("ctrl+o", (100, 20)), ("f2", (40, 16)), ("f2", (40, 10))])
async def test_the_keys_of_a_page_fit_its_width(tmp_path, key, size):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=size) as pilot:
        chat = chat_of(app)
        await until(lambda: app.host.engine is not None and not chat.switching)
        await pilot.press(key)
        await until(lambda: len(app.screen.query(Foot)) == 1)
        await shows(app, "enter ")
        foot = app.screen.query_one(Foot)

        def whole() -> bool:
            """Whole items, and all of them where there is room."""
            shown = " ".join(line.strip(" │╰╯─") for line in screen_text(app).splitlines())
            told = [item for item in foot._items if item in shown]
            enough = told == list(foot._items) if size[1] > 10 else len(told) >= 2
            return enough and " ".join(str(foot._shown).split()).endswith(told[-1])

        await until(whole)
        await drawn(app)
        assert whole()


def test_a_batch_says_once_which_model_answers(program):
    items = "".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(3))
    result = program("--batch", "-", stdin=items)
    assert result.code == 0 and len(result.out.splitlines()) == 3 and result.err.count("nano answers: ") == 1


@pytest.mark.parametrize(
    ("row", "typed", "said", "then"),
    [
        ("draft", "deep", "draft must be", "3"),
        ("temperature", "-1", "temperature must be", "0.5"),
        ("seed", "x", "seed must be a whole number, or random, not 'x'.", "7"),
    ],  # fmt: skip
)
async def test_a_wrong_value_is_named_and_the_dialog_stays(tmp_path, row, typed, said, then):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 36)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        await pilot.press("f8")
        await until(lambda: isinstance(app.screen, SettingsScreen) and app.screen._rows)
        index = [one.name for one in app.screen._rows].index(row)
        await pilot.press(*["down"] * index, "enter")
        await until(lambda: isinstance(app.screen, LineScreen) and app.screen.query(Input))
        field = app.screen.query_one(Input)
        field.value = typed
        await pilot.press("enter")
        await shows(app, said)
        assert isinstance(app.screen, LineScreen) and field.value == typed
        field.value = then
        await until(lambda: said not in screen_text(app))
        await pilot.press("enter")
        await until(lambda: isinstance(app.screen, SettingsScreen))
        await until(lambda: str(chat.option_values()[row][0]) == then)


async def test_a_wrong_option_is_named_and_the_dialog_stays(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 36)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        chat.action_ask_option("set")
        await until(lambda: isinstance(app.screen, LineScreen) and app.screen.query(Input))
        app.screen.query_one(Input).value = "temperature hot"
        await pilot.press("enter")
        await shows(app, "temperature must be", "'hot'")
        assert isinstance(app.screen, LineScreen)
        app.screen.query_one(Input).value = "temperature 0.5"
        await pilot.press("enter")
        await until(lambda: chat.option_values()["temperature"][0] == 0.5)
