"""The acceptance checks of the application that have no better place (spec: app, section 12); the table in test_promises.py has them all.

Here the engine is scripted. test_acceptance_embedded.py runs every one of them with the embedded model.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv41chat.store import Store
from dsv41chat.ui.render.entry import ANSWER, Entry, Renderer
from dsv41chat.ui.render.wrap import copy_lines
from dsv41chat.ui.turn_events import AppStart, Piece
from tests.ui.contents import CONTENTS
from tests.ui.fakes import Script
from tests.ui.program import ROOT
from tests.ui.terminal import Terminal
from tests.ui.tui import chat_of, drawn, make_app, say, screen_text, shows, until

in_terminal = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


def play(terminal: Terminal, folder: Path, **script) -> None:
    """Starts the screen with a scripted engine; its data is in folder/data."""
    (folder / "script.json").write_text(json.dumps(script))
    terminal.run("-m", "tests.ui.fake_program", str(folder / "data"), str(folder / "script.json"), "0")
    terminal.wait("embedded model")


def path_of(folder: Path) -> list:
    """The messages of the newest conversation, down to its leaf."""
    with Store.open(folder, readonly=True) as store:
        conversation = store.last_conversation()
        return store.path_to(conversation.leaf_id) if conversation is not None and conversation.leaf_id else []


@in_terminal
@pytest.mark.parametrize("bracketed", [True, False])
def test_1_typed_and_pasted_text_is_one_message(tmp_path, bracketed):
    with Terminal(tmp_path) as terminal:
        play(terminal, tmp_path, answer="answer")
        terminal.type("typed: ")
        terminal.paste("first line\nsecond line\nthird line", bracketed)
        terminal.wait("third line")
        terminal.keys("Enter")
        terminal.wait("prefilled")
        terminal.keys("C-q")
        terminal.wait("exit=0")
    with Store.open(tmp_path / "data", readonly=True) as store:
        (conversation,) = store.list_conversations()
        assert [message.text for message in store.tree(conversation.id)] == ["typed: first line\nsecond line\nthird line", "answer"]


def drawing(chat, entry: Entry) -> list[str]:
    """Every line of the body of an entry as the transcript would draw it, styles included."""
    renderer = Renderer(chat.transcript._get_renderer().options)
    return [repr(list(line.strip)) for part in entry.parts(True) if part.kind == "body" for line in renderer.lines(part)]


def turn_on(app) -> str:
    """The lines of the transcript from the question on, without the scrollbar."""
    lines = [line[:98].rstrip() for line in screen_text(app).splitlines()[1:-5]]
    first = next((number for number, line in enumerate(lines) if line.startswith("  you ")), 0)
    return "\n".join(lines[first:]).rstrip()


@pytest.mark.parametrize("name", CONTENTS)
async def test_2_streamed_text_is_complete_and_drawn_as_the_whole(tmp_path, name):
    text = CONTENTS[name]
    store = Store.memory(background=False)
    script = Script(answer=text)
    app = make_app(tmp_path, script, store=store)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        flushes, deliver = [], chat.pump._deliver
        chat.pump._deliver = lambda batch: (flushes.append(any(isinstance(event, Piece) for event in batch)), deliver(batch))
        length = len(text.encode())

        def each(number: int) -> None:
            """Waits, at four places of the answer, until what came before is on the screen."""
            if number and number % (length // 5) == 0:
                shown, deadline = sum(flushes), time.monotonic() + 60
                while sum(flushes) == shown and time.monotonic() < deadline:
                    time.sleep(0.005)

        script.each = each
        await say(pilot, app, "go")
        entry = chat.transcript.entries[-1]
        assert sum(flushes) > 2, "it came in pieces"
        assert entry.text == text == store.message(chat.leaf_id).text
        whole = Entry("whole", ANSWER, text=text)
        assert drawing(chat, entry) == drawing(chat, whole)
        lines = [line for part in whole.parts(True) if part.kind == "body" for line in chat.transcript._renderer.lines(part)]
        shown = copy_lines((line.joint, line.text) for line in lines)
        for word in {"prose": ["quoted"], "code": ["number 39", "that"], "list": ["item 1", "item 300"], "table": ["39601"], "cjk": ["🎉"]}[name]:
            assert word in shown
        await shows(app, "prefilled")
        await drawn(app)
        streamed = turn_on(app)
        view = app.controller.open(chat.conversation.id)
    again = make_app(tmp_path, Script(), AppStart(view=view), store=store)
    async with again.run_test(size=(100, 30)) as pilot:
        await shows(again, "prefilled")
        # What was streamed looks like what is opened.
        await until(lambda: turn_on(again) == streamed)


@in_terminal
def test_4_esc_in_prefill_in_thinking_and_in_the_answer(tmp_path):
    with Terminal(tmp_path) as terminal:
        play(terminal, tmp_path, answer="word " * 2000, thinking="hm " * 120, prefill_s=0.15, delay_s=0.005)
        terminal.paste("x" * 1900)
        terminal.wait("xxx")
        terminal.keys("Enter")
        terminal.wait("prefill ")
        terminal.keys("Escape")
        terminal.wait("editing message 1")
        # Within a second of a stop another Esc does nothing: people press it twice.
        time.sleep(1.1)
        terminal.keys("Escape")
        terminal.wait("editing message 1", gone=True)
        terminal.type("now think")
        terminal.keys("Enter")
        terminal.wait("thinking  ")
        terminal.keys("Escape")
        terminal.wait("stopped by you")
        terminal.type("now answer")
        terminal.keys("Enter")
        terminal.wait("word word")
        terminal.keys("Escape")
        terminal.wait("word word")
        terminal.wait("stopped by you")
        terminal.keys("C-q")
        terminal.wait("exit=0")
    path = path_of(tmp_path / "data")
    assert [(m.role, m.state) for m in path[1:]] == [("user", "complete"), ("assistant", "stopped"), ("user", "complete"), ("assistant", "stopped")]
    assert path[0].text == "x" * 1900 and path[2].thinking.startswith("hm hm") and not path[2].text
    assert path[4].thinking == "hm " * 120 and path[4].text.startswith("word word")


def test_9_head_of_a_pipe_is_quiet(tmp_path):
    script = shlex.quote(json.dumps({"answer": "word " * 400, "delay_s": 0.002}))
    words = f"{shlex.quote(sys.executable)} -m tests.ui.fake_headless {script} --data-dir {shlex.quote(str(tmp_path))} --stream-json -q hi"
    shell = f"{{ {words}; echo $? > {shlex.quote(str(tmp_path / 'code'))}; }} | head -1"
    done = subprocess.run(["sh", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["type"] == "start"
    assert (tmp_path / "code").read_text().strip() == "141"


@in_terminal
def test_13_without_a_back_end_it_starts_searches_and_exports(tmp_path, no_back_end):
    with Store.open(tmp_path / "data") as store:
        key = store.new_conversation("Nuts").id
        store.add_message(key, store.add_message(key, None, "user", "walnut or hazel?").id, "assistant", "Hazel, on balance.")
    with Terminal(tmp_path, environ=no_back_end) as terminal:
        terminal.run("-m", "dsv41chat", "--data-dir", str(tmp_path / "data"))
        assert "dsv41chat[cpu]" in terminal.wait("No MLX back end")
        # Over the page of first steps, which closes.
        terminal.keys("C-p")
        terminal.wait("Search for commands")
        terminal.type("search everywhere")
        terminal.wait("Searches the text")
        terminal.keys("Enter")
        terminal.wait("words of any message")
        terminal.type("hazel")
        terminal.wait("Nuts")
        terminal.keys("Enter")
        terminal.wait("on balance")
        terminal.keys("Escape")
        terminal.wait("Enter send")
        terminal.type("/export json")
        terminal.keys("Enter")
        terminal.wait("nuts-")
        terminal.type("hello")
        terminal.keys("Enter")
        terminal.wait("ctrl+R tries again")
        terminal.keys("C-q")
        terminal.wait("exit=0")
    (file,) = tmp_path.glob("nuts-*.json")
    assert "Hazel, on balance." in file.read_text("utf-8")
    assert [message.text for message in path_of(tmp_path / "data")][-1] == "hello", "what was typed is kept"
