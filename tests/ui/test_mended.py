"""Ends and edges of the full screen that somebody met in use."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from dataclasses import replace

import pytest
from textual import events
from textual.command import CommandList, CommandPalette

from dsv41chat.store import NotFound, Store
from dsv41chat.ui.commands import CommandError, parse
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script
from tests.ui.test_plain import chat as line_mode
from tests.ui.tui import chat_of, drawn, ended, make_app, say, screen_text, shows, stored, until


@pytest.mark.parametrize("enter", [False, True])
async def test_quitting_while_a_build_loads_is_quiet_and_keeps_the_text(tmp_path, enter):
    script = Script(loading=threading.Event())
    app = make_app(tmp_path, script)
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: chat.switching)
        chat.composer.insert("words")
        if enter:
            chat.composer.submit()
        await pilot.press("ctrl+q")
        if enter:
            # A message waits to be sent: the program asks once.
            await until(lambda: "A message waits for the build. It is kept, and not sent." in screen_text(app))
            await pilot.press("enter")
        await until(lambda: app.return_code is not None)
    # The load goes on reporting for a while.
    script.loading.set()
    await asyncio.to_thread(app.host.thread.call, lambda: None)
    await asyncio.sleep(0.1)
    assert app.return_code == 0 and not complaints
    assert app.store.draft(None).text == "words"


async def test_a_message_longer_than_the_context_is_named_as_such(tmp_path):
    app = make_app(tmp_path, Script(context_limit=600))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "x" * 700)
        shown = await shows(app, "This message alone has 700 tokens; the context holds 600.", "It is saved")
        assert "summary" not in shown and "--context" not in shown
        await pilot.press("enter")
        await until(lambda: chat.leaf_id is None and chat.composer.expanded() == "x" * 700 and app.screen is chat)
        chat.composer.reset("short")
        chat._finish = chat._failure = None
        await pilot.press("enter")
        await ended(chat)
        assert [message.text for message in app.store.path_to(chat.leaf_id)] == ["short", "Hello from the fake engine."]


async def test_a_full_conversation_still_offers_a_new_one(tmp_path):
    app = make_app(tmp_path, Script(context_limit=600))
    async with app.run_test(size=(100, 30)) as pilot:
        await say(pilot, app, "x" * 300)
        await say(pilot, app, "y" * 400)
        assert "--context" not in await shows(app, "The context is full.", "summary")


async def test_a_queue_of_an_earlier_run_waits_for_its_user(tmp_path):
    store, key = stored("question", "answer")
    store.queue_push(key, "left over")
    app = make_app(tmp_path, Script(load_s=0.3), store=store)
    app.begin = replace(app.begin, view=app.controller.open(key))
    async with app.run_test(size=(100, 30), notifications=True):
        chat = chat_of(app)
        await until(lambda: app.host.engine is not None and not chat.switching and not chat.starting)
        await shows(app, "1 queued: send them?")
        await drawn(app)
        assert not chat.pump.running and [item.text for item in chat.queue] == ["left over"]


async def test_what_is_queued_while_a_build_loads_is_sent(tmp_path):
    store, key = stored("question", "answer")
    script = Script(loading=threading.Event())
    app = make_app(tmp_path, script, store=store)
    app.begin = replace(app.begin, view=app.controller.open(key))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: chat.switching and chat.conversation is not None)
        await pilot.press(*"more", "enter")
        await shows(app, "queued 1: more")
        script.loading.set()
        await ended(chat)
        assert [message.text for message in store.path_to(chat.leaf_id)][2:] == ["more", "Hello from the fake engine."]


async def test_an_earlier_answer_again_leaves_the_selection_on_it(tmp_path):
    store, key = stored("one", "first", "two", "second")
    app = make_app(tmp_path, Script(), store=store)
    app.begin = replace(app.begin, view=app.controller.open(key))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await until(lambda: app.host.engine is not None and not chat.switching and len(chat.transcript.entries) == 4)
        chat.select_message(chat.transcript.entries[1].key)
        await pilot.press("r")
        await until(lambda: chat._finish is not None and not chat.pump.running)
        await until(lambda: "2/2" in screen_text(app))
        await until(lambda: (entry := chat.transcript.selected_entry) is not None and entry.text == "Hello from the fake engine.")
        await pilot.press("left_square_bracket")
        await until(lambda: "second" in screen_text(app))
        await until(lambda: (entry := chat.transcript.selected_entry) is not None and entry.text == "first")
        await pilot.press("right_square_bracket")
        await until(lambda: "Hello from" in screen_text(app))
        # From the user's message: what follows goes, the answer is selected.
        chat.select_message(chat.transcript.entries[0].key)
        await pilot.press("r")
        await until(lambda: "3/3" in screen_text(app))
        chat.transcript.selected = None
        await pilot.press("left_square_bracket")
        await until(lambda: "2/3" in screen_text(app))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("contniue", "continue"), ("cont", "continue"), ("exit", "quit"), ("Quit", "quit"), ("modell", "build"), ("exprot", "export"), ("zzzz", None)],
)
def test_what_an_unknown_command_may_mean(typed, meant):
    with pytest.raises(CommandError, match=f"Did you mean /{meant}" if meant else "/help lists all"):
        parse(f"/{typed} rest")


async def test_continue_is_a_command(tmp_path):
    app = make_app(tmp_path, Script(answer="word " * 400, delay_s=0.01))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: chat._answer is not None and len(chat._answer.text) > 10)
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)
        kept = app.store.message(chat.leaf_id).text
        app.host.engine.script.delay_s = 0.0
        await pilot.press(*"/continue", "enter")
        await until(lambda: chat._finish is not None and not chat.pump.running and chat._finish.finish == "stop")
        assert app.store.message(chat.leaf_id).text.startswith(kept) and len(app.store.message(chat.leaf_id).text) > len(kept)
        await pilot.press(*"/continue", "enter")
        await until(lambda: "This answer is complete" in screen_text(app))


def test_continue_in_the_line_mode(tmp_path):
    plain = line_mode(tmp_path, ["go", "/continue", "/continue", "/quit"], Script(answer="short", finish="length"))
    assert plain.run() == 0
    assert plain.store.message(plain.leaf_id).text == "short" * 3


async def test_toasts_leave_room(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        for number in range(8):
            chat.tell(f"toast {number}")
        chat.tell("trouble", "error")
        chat.tell("toast 8")
        shown = await shows(app, "toast 8", "trouble")
        assert sum("toast" in line for line in shown.splitlines()) == 1
        await pilot.resize_terminal(40, 10)
        await until(lambda: chat.size.width == 40)
        await drawn(app)
        for number in range(9, 13):
            chat.tell(f"toast {number} with a text that is much longer than one line of so small a terminal can ever be, or two")
        await shows(app, "toast 12")
        lines = (await drawn(app)).splitlines()
        covered = [number for number, line in enumerate(lines) if "toast" in line or "small" in line or "ever be" in line or "trouble" in line]
        assert len(covered) <= 2 and max(covered) <= 2 and "idle" in lines[-1], screen_text(app)
        await pilot.resize_terminal(30, 5)
        chat.tell("toast 13")
        await shows(app, "Terminal too small: 30x5")
        assert "toast" not in await drawn(app)


async def test_the_header_claims_no_effort_before_the_build_is_known(tmp_path):
    script = Script(loading=threading.Event())
    app = make_app(tmp_path, script)
    async with app.run_test(size=(100, 30)):
        chat = chat_of(app)
        await until(lambda: chat.switching)
        header = (await shows(app, "nano")).splitlines()[0]
        assert app.host.view is None and "effort" not in header
        script.loading.set()
        await until(lambda: "effort high" in screen_text(app).splitlines()[0])


async def test_an_interrupted_answer_is_said_once(tmp_path):
    store, key = stored("question")
    writer = store.begin_answer(key, store.last_conversation().leaf_id, "fake", "f" * 64, {})
    writer.update("cut", "")
    store.set_leaf(key, writer.finish(state="interrupted", finish="interrupted", text="cut", thinking="").id)
    app = make_app(tmp_path, Script(), store=store)
    view = app.controller.open(key)
    app.begin = replace(app.begin, view=view, notices=(f"interrupted: an answer in conversation {key} was cut", "interrupted: another"))
    async with app.run_test(size=(100, 30)):
        assert key not in await shows(app, "another", "ctrl+R answers again")


@pytest.mark.parametrize("resumed", [True, False])
async def test_enter_before_the_start_is_over_waits_for_its_conversation(tmp_path, resumed):
    """A slow disk: what is typed and sent meanwhile goes into the conversation that the command line asked for, behind its draft."""
    store = Store.memory(background=False)
    first = store.add_message(store.new_conversation("old").id, None, "user", "old question") if resumed else None
    store.save_draft(first.conversation_id if first else None, "drafted ")
    real = store.draft
    store.draft = lambda key: (time.sleep(0.5), real(key))[1]
    app = make_app(tmp_path, Script(answer="answer"), store=store)
    app.begin = AppStart(view=app.controller.open("old")) if resumed else AppStart()
    async with app.run_test(size=(80, 24)):
        chat = chat_of(app)
        chat.composer.insert("typed early")
        chat.composer.submit()
        await until(lambda: chat._finish is not None and not chat.pump.running)
        path = store.path_to(chat.leaf_id)
        assert [message.text for message in path] == [*(["old question"] if resumed else []), "drafted typed early", "answer"]
        assert len(store.list_conversations()) == 1 and chat.composer.text == ""


async def test_an_edit_stays_an_edit_over_a_restart_and_ends_with_its_conversation(tmp_path):
    store, key = stored("question")
    app = make_app(tmp_path, Script(answer="one"), store=store)
    app.begin = AppStart(view=app.controller.open(key))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        await pilot.press("tab", "g", "e")
        await until(lambda: chat.editing is not None and chat.focused is chat.composer)
        await pilot.press(*" changed")
        await until(lambda: chat.composer.text == "question changed")
        await pilot.press("ctrl+q")
        await until(lambda: app.return_code is not None)
    again = make_app(tmp_path, Script(answer="one"), store=store)
    again.begin = AppStart(view=again.controller.open(key))
    async with again.run_test(size=(100, 30)) as pilot:
        chat = chat_of(again)
        await shows(again, "editing message 1")
        await until(lambda: chat.composer.text == "question changed" and not chat.starting)
        await pilot.press("ctrl+n")
        await until(lambda: chat.editing is None and "editing" not in screen_text(again))
        await say(pilot, again, "something new")
        assert chat.conversation.id != key and len(store.tree(key)) == 1
        await chat.open_conversation(key)
        assert chat.composer.text == "question changed" and chat.editing == store.tree(key)[0].id
        await until(lambda: "editing" in screen_text(again))
        chat._finish = None
        await pilot.press("enter")
        await until(lambda: chat._finish is not None and not chat.pump.running)
        assert sorted(message.text for message in store.tree(key)) == ["one", "question", "question changed"]


async def test_a_page_closes_once_however_fast_the_keys_come(tmp_path):
    store, _ = stored("question", "answer")
    app = make_app(tmp_path, Script(), store=store)
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        await pilot.press("ctrl+o")
        await until(lambda: "question" in screen_text(app))
        page = app.screen
        # As when n, e and n again were read from the terminal before the first of them took effect.
        page.call_later(lambda: (page._new(), page._export(), page._new()))
        await until(lambda: app.screen is chat)
        await drawn(app)
        assert app.screen is chat and app.is_running
        await pilot.press("f1")
        await until(lambda: "arrows scroll" in screen_text(app))
        await pilot.press("escape")
        await until(lambda: app.screen is chat)


async def test_the_same_toast_is_shown_once(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        await pilot.press("f3", "f3", "f3")
        await shows(app, "90 columns")
        assert (await drawn(app)).count("90 columns") == 1


async def test_lists_keep_what_they_are_for_in_a_narrow_terminal(tmp_path):
    """At 40 columns a list shows titles, the build menu the verdict; at 80 the list names all its keys."""
    store, _ = stored("a title of some length", "answer")
    app = make_app(tmp_path, Script(), store=store)
    async with app.run_test(size=(40, 10)) as pilot:
        await until(lambda: not chat_of(app).starting)
        await pilot.press("ctrl+o")
        await until(lambda: "a title of some" in screen_text(app))
        await pilot.press("escape")
        await until(lambda: app.screen is chat_of(app))
        await pilot.resize_terminal(80, 24)
        await pilot.press("ctrl+o")
        await until(lambda: "tab preview" in screen_text(app) and "b build" in screen_text(app))


async def test_an_action_is_listed_once(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(80, 24)):
        listed = [(command.title, command.help.partition("  (")[0]) for command in app.get_system_commands(chat_of(app))]
        assert len(listed) == len(set(listed)) > 30


async def test_the_palette_works_over_a_page(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: not chat_of(app).starting)
        await pilot.press("f1")
        await until(lambda: "arrows scroll" in screen_text(app))
        await pilot.press("ctrl+p")
        await until(lambda: isinstance(app.screen, CommandPalette))
        await pilot.press(*"search everywhere")
        await until(lambda: "Searches the text" in screen_text(app))
        await until(lambda: app.screen.query_one(CommandList).highlighted == 0)
        await pilot.press("enter")
        await until(lambda: type(app.screen).__name__ == "SearchScreen")
        await pilot.press("escape")
        await until(lambda: app.screen is chat_of(app))


async def test_a_megabyte_is_pasted_sent_found_and_shown_safely(tmp_path):
    big = "\n".join(f"line {n} 漢字 😀 \x1b[31m words and more words to fill it up" for n in range(18_000))
    assert len(big.encode()) > 1 << 20
    app = make_app(tmp_path, Script(context_limit=10**8))
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        app.post_message(events.Paste(big))
        await until(lambda: chat.composer.text == "[paste 1: 18,000 lines]")
        await pilot.press("!", "enter")
        await until(lambda: chat._finish is not None and not chat.pump.running)
        stored_text = app.store.path_to(chat.leaf_id)[0].text
        assert stored_text == big.replace("\x1b", "") + "!", "a paste gives up its escape characters, and nothing else"
        await until(lambda: "line 17999" in screen_text(app))
        chat.transcript.highlight_query("line 9000 ")
        chat.transcript.show_line(chat.transcript.entries[-2], 0)
        await until(lambda: "line 9000 漢字" in screen_text(app))
        await pilot.press("ctrl+end")
        await until(lambda: "prefilled" in screen_text(app))


async def test_it_says_preparing_at_once_and_shows_a_sent_message_once(tmp_path):
    app = make_app(tmp_path, Script(answer="word " * 400, delay_s=0.01))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting and not chat.switching)
        await say_and_queue(pilot, chat)
        chat.stop_turn()
        await until(lambda: not chat.pump.running)
        chat.action_send_queued()
        # Before the first event of the turn, which only another thread can bring.
        assert chat.status.fields()[0][0] == "preparing" and chat.status.queued == 0
        await shows(app, "the queued one")
        assert (await drawn(app)).count("the queued one") == 1
        await until(lambda: not app.store.queued(chat.conversation.id))
        chat.stop_turn()
        await until(lambda: not chat.pump.running)


async def say_and_queue(pilot, chat) -> None:
    chat.composer.insert("the first one")
    await pilot.press("enter")
    await until(lambda: chat.conversation is not None and chat._answer is not None and chat._answer.text)
    chat.composer.insert("the queued one")
    await pilot.press("enter")
    await until(lambda: chat.status.queued == 1)


async def test_a_queued_message_that_cannot_be_stored_stays_queued(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        app.store.queue_push(chat.conversation.id, "wait")
        chat.reload_queue()
        add = app.store.add_message

        def refuse(*args, **kwargs):
            raise NotFound("no such place", "")

        app.store.add_message = refuse
        chat.action_send_queued()
        await until(lambda: not chat.pump.running)
        app.store.add_message = add
        assert [item.text for item in app.store.queued(chat.conversation.id)] == ["wait"] and chat.status.queued == 1
        assert chat.composer.text == "" and all(entry.text != "wait" for entry in chat.transcript.entries)


async def test_esc_leaves_the_transcript_before_it_cancels_a_load(tmp_path):
    script = Script(loading=threading.Event())
    app = make_app(tmp_path, script)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: chat.switching)
        chat.transcript.focus()
        await until(lambda: chat.focused is chat.transcript)
        await pilot.press("escape")
        await until(lambda: chat.focused is chat.composer)
        assert not chat._switch_cancel.is_set()
        await pilot.press("escape")
        await until(lambda: chat._switch_cancel.is_set())
        script.loading.set()


async def test_unfolding_is_no_new_text_and_notices_leave_a_page_free(tmp_path):
    app = make_app(tmp_path, Script(answer="line\n\n" * 60, thinking="thought\n" * 30))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        await pilot.press("pageup", "pageup", "ctrl+t")
        await until(lambda: not chat.transcript.follow and chat.transcript.entries[-1].thinking_view == "show")
        assert "new text below" not in await drawn(app)
        chat.add_notice("something happened")
        await until(lambda: "new text below" in screen_text(app))
        await until(lambda: any(toast.message == "something happened" for toast in app._notifications))
        chat.tell("a failure", "error")
        await pilot.press("f1")
        await until(lambda: [toast.message for toast in app._notifications] == ["a failure"])


async def test_the_build_of_an_opened_conversation_is_named_before_it_is_loaded(tmp_path):
    store = Store.memory(background=False)
    store.add_message(store.new_conversation("old").id, None, "user", "hello")
    script = Script(loading=threading.Event())
    app = make_app(tmp_path, script, store=store)
    app.begin = AppStart(view=app.controller.open("old"))
    async with app.run_test(size=(100, 30)):
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        await until(lambda: screen_text(app).splitlines()[0].rstrip().endswith("nano"))
        assert app.host.view is None
        chat.stop_loading()
        script.loading.set()


@pytest.mark.parametrize("size", [(40, 10), (100, 30)])
async def test_the_terminals_own_colours_show_frames_and_marks(tmp_path, size):
    app = make_app(tmp_path, Script(), config='[ui]\ntheme = "ansi"\n')
    async with app.run_test(size=size) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        style = lambda name: chat.transcript.get_component_rich_style(f"transcript--{name}")
        assert style("match").reverse and style("dim").dim
        chat.transcript.focus()
        await until(lambda: chat.focused is chat.transcript)
        kind, colour = chat.composer.styles.border_top
        # A frame in the colour of the text is seen wherever the text is; a low or narrow terminal has no room for one.
        assert (kind == "") if size[0] == 40 else colour.rich_color == style("text").color


async def test_an_answer_that_is_whole_is_over_for_its_reader(tmp_path, monkeypatch):
    """Its turn may still be busy with the state for the next one."""
    done, left = threading.Event(), []
    monkeypatch.setattr("dsv41chat.ui.turn._Turn.leave_state", lambda turn: done.wait(60))
    app = make_app(tmp_path, Script(answer="word " * 2000, delay_s=0.01))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting and not chat.switching)
        chat.composer.insert("hello")
        await pilot.press("enter")
        await until(lambda: chat._answer is not None and chat._answer.text)
        await pilot.press("escape")
        await until(lambda: chat._finish is not None)
        assert chat.pump.running
        monkeypatch.setattr(app, "leave", lambda code=0: left.append(code))
        await pilot.press("ctrl+q")
        await until(lambda: left == [0])
        assert app.screen is chat
        app.host.engine.script.answer = "short"
        chat.composer.insert("next")
        await pilot.press("enter")
        await until(lambda: chat.status.queued == 1)
        done.set()
        await until(lambda: "next" in [message.text for message in app.store.path_to(chat.leaf_id)] and not chat.pump.running)


async def test_work_that_is_cancelled_before_it_begins_is_dropped_quietly(tmp_path, recwarn):
    app, done = make_app(tmp_path, Script()), []

    async def work(number: int) -> None:
        done.append(number)

    async with app.run_test(size=(80, 24)):
        chat = chat_of(app)
        chat.spawn(work(1), "some")
        chat.spawn(work(2), "some")
        await until(lambda: done == [2])
    gc.collect()
    assert not [said for one in recwarn if "never awaited" in (said := str(one.message))]
