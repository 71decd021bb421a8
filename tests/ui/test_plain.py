"""The line mode: lines in, text out, the same turns and commands, nothing but text on the terminal."""

from __future__ import annotations

import io
import shutil
import signal
import subprocess
import sys
import time

import pytest

from dsv41chat.settings import load_settings
from dsv41chat.store import Store
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.plain import PlainChat
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import AppStart
from tests.programs import environment
from tests.ui.fakes import Script, fake_host
from tests.ui.terminal import Terminal


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


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_interrupted_answer_is_said_where_it_is_the_last(tmp_path, goes_on):
    store = Store.memory(background=False)
    key = store.new_conversation().id
    writer = store.begin_answer(key, store.add_message(key, None, "user", "tell kill").id, "nano", "f", {})
    writer.update("half of it")
    cut = writer.finish("interrupted")
    if goes_on:
        store.add_message(key, store.add_message(key, cut.id, "user", "define cow").id, "assistant", "an animal")
    plain = chat(tmp_path, [f"/open {key}", "/quit"], store=store)
    assert plain.run() == 0
    assert ("The last answer was interrupted; /retry answers again." in plain.out.getvalue()) is not goes_on


def test_the_end_of_the_input_closes_a_text_and_sends_it(tmp_path):
    plain = chat(tmp_path, ['"""', "my precious", "text"])
    assert plain.run() == 0
    assert asked(plain) == ["my precious\ntext"]
    assert plain.out.getvalue().count("The end of the input closes the text; it is sent.") == 1


def test_ctrl_d_closes_a_text_or_a_paste_and_the_next_line_is_asked_for(tmp_path):
    """What a terminal does: ctrl+D ends one reading, not the input."""

    def end():
        raise EOFError

    plain = chat(tmp_path, ['"""', "kept", end, "next", '"""', end, "one", "two", end, end])
    last, read = [""], plain.read

    def remembered(prompt):
        last[0] = read(prompt)
        return last[0]

    plain.read = remembered
    plain.waits = lambda seconds: seconds > 0 and last[0] == "one"
    assert plain.run() == 0
    assert asked(plain) == ["kept", "next", "one\ntwo"]
    assert plain.out.getvalue().count("closes the text") == 2, "nothing was written in the second of three"


def test_ctrl_d_instead_of_enter_leaves_the_prompt_unsent(tmp_path):
    plain = chat(tmp_path, [], start=AppStart(prompt="a prompt"))
    assert plain.run() == 0 and plain.conversation is None


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])
@pytest.mark.parametrize("lines", [b"caf\xe9\n", b'"""\nfine\ncaf\xe9\n"""\n'])
def test_bytes_that_are_not_utf8_are_said(tmp_path, lines, encoding):
    done = subprocess.run(
        [sys.executable, "-m", "tests.ui.fake_headless", '{"answer": "answer"}', "--plain", "--data-dir", str(tmp_path / "data")],
        input=lines, capture_output=True, env=environment() | {"PYTHONIOENCODING": encoding}, check=False,
    )  # fmt: skip
    shown = done.stdout.decode()
    assert done.returncode == 0 and shown.count("warning: what was read is not valid UTF-8; it is sent with \ufffd in place of those bytes.") == 1
    with Store.open(tmp_path / "data", readonly=True) as store:
        assert [m.text.splitlines()[-1] for m in store.path_to(store.last_conversation().leaf_id)][0] == "caf\ufffd"


def test_commands_and_errors(tmp_path):
    first = ["/efort off", "/effort off", "/set temperature 0", "//slash", "/open", "/branch", "/pin", "/build", "/help"]
    plain = chat(tmp_path, [*first, "/export md", "/new"])
    plain.run()
    shown = plain.out.getvalue()
    assert "Did you mean /effort?" in shown and "Pinned." in shown and "# /slash" in shown and "New conversation" in shown
    message = plain.store.message(plain.store.last_conversation().leaf_id)
    assert message.params["effort"] == "off" and message.params["temperature"] == 0


def asked(plain) -> list[str]:
    return [m.text for m in plain.store.tree(plain.conversation.id) if m.role == "user"]


@pytest.mark.parametrize("ahead", [False, True])
def test_lines_that_come_together_are_one_message_and_those_typed_ahead_are_not(tmp_path, ahead):
    """The terminal has more input behind each line but the last; ahead: it had so before the first was asked for."""
    given = ["one", "two", "three"]
    plain = chat(tmp_path, [])
    plain.waits = lambda seconds: bool(given) and (seconds > 0 or ahead)

    def read(prompt):
        if not given:
            plain.read = lambda prompt: plain._command_quit("") or ""
            return ""
        return given.pop(0)

    plain.read = read
    plain.run()
    assert asked(plain) == (["one", "two", "three"] if ahead else ["one\ntwo\nthree"])
    assert ("3 lines pasted; Enter sends them" in plain.out.getvalue()) is not ahead


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_paste_into_the_terminal_is_one_message(tmp_path):
    """With and without the marks of a paste, with and without a newline at its end, which sends nothing."""
    with Terminal(tmp_path) as terminal:
        terminal.run("-m", "tests.ui.fake_headless", '{"answer": "answer"}', "--plain", "--data-dir", str(tmp_path / "data"))
        terminal.wait("/help lists")
        for bracketed, text in ((True, "a one\na two"), (False, "b one\nb two"), (False, "c one\nc two\n")):
            before = terminal.screen.count("answer\n")
            terminal.paste(text, bracketed)
            terminal.wait("Enter sends them" if text.endswith("\n") else text[-5:])
            assert terminal.screen.count("answer\n") == before
            terminal.keys("Enter")
            until_answers(terminal, before + 1)
        terminal.keys("C-d")
        terminal.wait("exit=0")
    with Store.open(tmp_path / "data", readonly=True) as store:
        path = store.path_to(store.last_conversation().leaf_id)
    assert [m.text for m in path if m.role == "user"] == ["a one\na two", "b one\nb two", "c one\nc two"]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_ctrl_d_in_a_text_on_the_terminal_sends_it(tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.run("-m", "tests.ui.fake_headless", '{"answer": "answer"}', "--plain", "--data-dir", str(tmp_path / "data"))
        terminal.wait("/help lists")
        for line in ('"""', "my precious", "text"):
            terminal.keys(line, "Enter")
        terminal.keys("C-d")
        until_answers(terminal, 1)
        terminal.keys("C-d")
        terminal.wait("exit=0")
    with Store.open(tmp_path / "data", readonly=True) as store:
        assert store.path_to(store.last_conversation().leaf_id)[0].text == "my precious\ntext"


def until_answers(terminal, count: int) -> None:
    """Waits until so many answers are complete and the next line is asked for."""
    for _ in range(600):
        if terminal.screen.count("answer\n") == count and terminal.screen.rstrip().endswith("\n>"):
            return
        time.sleep(0.1)
    raise AssertionError(terminal.screen)


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
