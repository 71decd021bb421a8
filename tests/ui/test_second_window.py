"""A conversation that another process writes in: what it adds is shown here as well, and nothing of its draft and queue is touched."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsv41chat.store import Store
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script
from tests.ui.tui import chat_of, drawn, make_app, say, screen_text, shows, until


async def test_a_second_window_shows_what_the_first_adds(tmp_path):
    with Store.open(tmp_path / "data", background=False) as first, Store.open(tmp_path / "data", background=False) as second:
        conversation = first.new_conversation("shared")
        question = first.add_message(conversation.id, None, "user", "an early question")
        first.lock(conversation.id)
        first.save_draft(conversation.id, "a draft of the first window")
        first.queue_push(conversation.id, "queued in the first window")
        app = make_app(tmp_path, Script(), store=second)
        app.begin = AppStart(view=app.controller.open(conversation.id))
        async with app.run_test(size=(100, 30), notifications=True) as pilot:
            chat = chat_of(app)
            await until(lambda: "read-only" in screen_text(app) and not chat.starting)
            assert "queued in the first" not in await drawn(app) and chat.composer.text == ""
            await pilot.press("up", "delete")
            await drawn(app)
            assert [item.text for item in first.queued(conversation.id)] == ["queued in the first window"]
            chat.composer.reset()

            writer = first.begin_answer(conversation.id, question.id, "nano", "f", {})
            writer.update("The answer begins")
            writer.checkpoint()
            await until(lambda: "The answer begins" in screen_text(app) and "being written" in screen_text(app))
            writer.update("The answer begins and goes on")
            writer.checkpoint()
            await until(lambda: "begins and goes on" in screen_text(app))
            answer = writer.finish("complete", finish="stop", text="The answer begins and goes on to its end.", usage={"answer_tokens": 9})
            await until(lambda: "to its end" in screen_text(app) and "being written" not in screen_text(app))
            await shows(app, "9 tok")
            await until(lambda: chat.leaf_id == answer.id)
            first.add_message(conversation.id, answer.id, "user", "a later question")
            await until(lambda: "a later question" in screen_text(app))
            assert [entry.text for entry in chat.transcript.entries if entry.message is not None].count("an early question") == 1

            # Another branch there is another branch here.
            first.add_message(conversation.id, None, "user", "an edited question")
            await until(lambda: "an edited question" in screen_text(app) and "a later question" not in screen_text(app))

            first.save_draft(conversation.id, "a draft of the first window")
            first.unlock(conversation.id)
            await until(lambda: "No other process writes here" in screen_text(app))
            chat.action_take_over()
            await until(lambda: not chat.readonly and chat.composer.text == "a draft of the first window")
            chat.composer.reset()
            await say(pilot, app, "written here")
            assert "written here" in [message.text for message in second.path_to(chat.leaf_id)]


@pytest.mark.parametrize("draft", ["/send", ""])
async def test_what_was_typed_in_both_windows_stays_apart(tmp_path, draft):
    """The draft of the one that is gone, a blank line, and what was typed here, with the text behind its chips."""
    with Store.open(tmp_path / "data", background=False) as first, Store.open(tmp_path / "data", background=False) as second:
        conversation = first.new_conversation("shared")
        first.add_message(conversation.id, None, "user", "an early question")
        first.lock(conversation.id)
        first.save_draft(conversation.id, draft)
        app = make_app(tmp_path, Script(), store=second)
        app.begin = AppStart(view=app.controller.open(conversation.id))
        async with app.run_test(size=(100, 30)):
            chat = chat_of(app)
            await until(lambda: "read-only" in screen_text(app) and not chat.starting)
            mark = chat.composer.add_chip("file", "inside", "a.txt")
            chat.composer.insert(f"from b {mark}")
            first.unlock(conversation.id)
            await until(lambda: "No other process writes here" in screen_text(app))
            chat.action_take_over()
            await until(lambda: not chat.readonly)
            await drawn(app)
            assert chat.composer.text == (f"{draft}\n\n" if draft else "") + f"from b {mark}"
            assert "inside" in chat.composer.chips[mark]


async def test_a_reader_on_another_branch_is_left_there(tmp_path):
    with Store.open(tmp_path / "data", background=False) as first, Store.open(tmp_path / "data", background=False) as second:
        conversation = first.new_conversation("shared")
        one = first.add_message(conversation.id, None, "user", "branch one")
        first.add_message(conversation.id, None, "user", "branch two")
        first.lock(conversation.id)
        app = make_app(tmp_path, Script(), store=second)
        app.begin = AppStart(view=app.controller.open(conversation.id))
        async with app.run_test(size=(100, 30)) as pilot:
            chat = chat_of(app)
            await until(lambda: "branch two" in screen_text(app) and chat._stamp)
            await pilot.press("tab", "left_square_bracket")
            await until(lambda: chat.leaf_id == one.id and chat._stamp)
            stamp = chat._stamp
            first.add_message(conversation.id, chat._stamp[0], "user", "under branch two")
            await until(lambda: chat._stamp != stamp)
            assert "under branch two" not in await drawn(app) and chat.leaf_id == one.id


WRITER = """
import sys
from dsv41chat.store import Store
store = Store.open(sys.argv[1], background=False)
conversation = store.new_conversation("shared")
store.lock(conversation.id)
question = store.add_message(conversation.id, None, "user", "a question")
writer = store.begin_answer(conversation.id, question.id, "nano", "f", {"seed": 7, "temperature": 1.0})
writer.update("Half of an answer")
writer.checkpoint()
print(conversation.id, flush=True)
sys.stdin.read()
"""


async def test_what_a_killed_window_left_is_interrupted_once_it_is_taken_over(tmp_path):
    first = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "data")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with first, Store.open(tmp_path / "data", background=False) as second:
        key = first.stdout.readline().strip()
        app = make_app(tmp_path, Script(), store=second)
        app.begin = AppStart(view=app.controller.open(key))
        async with app.run_test(size=(100, 30)):
            chat = chat_of(app)
            await shows(app, "Half of an answer", "read-only")
            first.kill()
            await shows(app, "No other process writes here")
            chat.action_take_over()
            await until(lambda: not chat.readonly)
            await shows(app, "interrupted · seed 7", "The last answer was interrupted", "ctrl+R answers again")
