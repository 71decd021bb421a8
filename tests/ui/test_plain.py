"""The line mode: lines in, text out, the same turns and commands, nothing but text on the terminal."""

from __future__ import annotations

import io
import signal

from dsv41chat.settings import load_settings
from dsv41chat.store import Store
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.plain import PlainChat
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script, fake_host


def chat(tmp_path, lines, script=None, start=None, store=None):
    settings = load_settings(data_dir=tmp_path / "data", environ={})
    store = store or Store.memory(background=False)
    host = EngineHost(settings, store, **fake_host(script or Script(), tmp_path / "fake-pack"))
    given = iter(lines)

    def read(prompt):
        line = next(given, None)
        if line is None:
            raise EOFError
        return line() if callable(line) else line

    plain = PlainChat(TurnController(store, host, settings), start or AppStart(), read, io.StringIO())
    return plain


def test_a_conversation_in_lines(tmp_path):
    plain = chat(tmp_path, ["hello", '"""', "two", "lines", '"""', "/retry", "/stats", "/quit", "never"], Script(answer="answer\x1b[2J"))
    assert plain.run() == 0
    shown = plain.out.getvalue()
    assert "answer␛[2J" in shown and "\x1b" not in shown and "\r" not in shown and "decode rate" in shown
    assert [m.text for m in plain.store.tree(plain.conversation.id) if m.role == "user"] == ["hello", "two\nlines"]
    assert len(plain.store.children(plain.store.tree(plain.conversation.id)[2].id)) == 2


def test_commands_and_errors(tmp_path):
    first = ["/efort off", "/effort off", "/set temperature 0", "//slash", "/open", "/branch", "/pin", "/build", "/help"]
    plain = chat(tmp_path, [*first, "/export md", "/new"])
    plain.run()
    shown = plain.out.getvalue()
    assert "Did you mean /effort?" in shown and "Pinned." in shown and "# /slash" in shown and "New conversation" in shown
    message = plain.store.message(plain.store.last_conversation().leaf_id)
    assert message.params["effort"] == "off" and message.params["temperature"] == 0


def test_a_file_goes_with_the_next_message(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("inside\n")
    plain = chat(tmp_path, [f"/read {file}", "what is it?"])
    plain.run()
    assert plain.store.tree(plain.conversation.id)[0].text == "File: a.txt\n```\ninside\n```\n\nwhat is it?"


def test_interrupts(tmp_path):
    plain = chat(tmp_path, [])

    def stop_at_prompt():
        raise KeyboardInterrupt

    def end():
        plain.interrupt(signal.SIGTERM)

    lines = iter([stop_at_prompt, "go", end])
    plain.read = lambda prompt: line() if callable(line := next(lines)) else line
    assert plain.run() == 143
    assert "ctrl+D leaves" in plain.out.getvalue()


def test_sigusr1_says_where_it_stands(tmp_path, capfd):
    plain = chat(tmp_path, [])
    said = []

    def ask():
        plain.say_status(signal.SIGUSR1)
        said.append(capfd.readouterr())
        raise EOFError

    lines = iter(["go", ask])
    plain.read = lambda prompt: line() if callable(line := next(lines)) else line
    assert plain.run() == 0
    assert said[0].err.startswith("status: idle | ctx ") and "status" not in plain.out.getvalue()


def test_resume_shows_the_last_messages(tmp_path):
    store = Store.memory(background=False)
    first = chat(tmp_path, ["hello"], store=store)
    first.run()
    again = chat(tmp_path, ["more"], store=store)
    again.begin = AppStart(view=again.controller.open(None))
    again.run()
    assert "hello" in again.out.getvalue() and len(store.path_to(store.last_conversation().leaf_id)) == 4
