"""The program in a real terminal (tmux): start, type, stream, signals. Skipped where tmux is missing."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

from dsv41chat.store import Store
from tests.ui.terminal import Terminal

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
CLEAN = "0 0 1"


def start(terminal: Terminal, folder, answer: str, delay_s: float = 0.0, *more: str) -> None:
    (folder / "answer.md").write_text(answer, "utf-8")
    terminal.run("-m", "tests.ui.fake_program", str(folder / "data"), str(folder / "answer.md"), str(delay_s), *more)


def test_a_chat_in_a_terminal(tmp_path):
    with Terminal(tmp_path) as terminal:
        start(terminal, tmp_path, "Hello 世界 😀\n\n```python\nprint(1)\n```\n")
        terminal.wait("embedded model")
        terminal.type("hi all")
        terminal.keys("C-j")
        terminal.type("there")
        terminal.keys("Enter")
        shown = terminal.wait("prefilled")
        assert "Hello 世界 😀" in shown and "┌─ python" in shown
        terminal.paste("p1\np2\np3\n", bracketed=True)
        assert "p3" in terminal.wait("p3")
        terminal.keys("C-u", "C-c")
        terminal.paste("q1 long enough\nq2 long enough\nq3", bracketed=False)
        terminal.wait("q3")
        terminal.keys("C-c")
        # A large one as well: key by key it would hold the screen for a minute.
        terminal.paste("some words in a line\n" * 5000, bracketed=False)
        terminal.wait("[paste 1: ")
        terminal.keys("C-c")
        terminal.keys("C-q")
        terminal.wait("exit=0")
        assert terminal.modes == CLEAN and "resume with: dsv41chat --resume" in terminal.screen
    with Store.open(tmp_path / "data", readonly=True) as store:
        path = store.path_to(store.last_conversation().leaf_id)
        assert [message.text for message in path if message.role == "user"] == ["hi all\nthere"]


def test_a_paste_with_control_characters_is_text_and_presses_no_key(tmp_path):
    with Terminal(tmp_path) as terminal:
        start(terminal, tmp_path, "answer")
        terminal.wait("embedded model")
        terminal.paste("A\x1b[31mRED\x1b[0m B\n")
        assert "A[31mRED[0m B" in terminal.wait("RED")
        terminal.paste("C\x1b]0;pwn\x07 X\x11\x03")
        terminal.type("Z")
        terminal.wait("C]0;pwn\u2407 X\u2411\u2403Z")
        terminal.keys("Enter")
        terminal.wait("prefilled")
        terminal.keys("C-q")
        terminal.wait("exit=0")
    with Store.open(tmp_path / "data", readonly=True) as store:
        first = store.path_to(store.last_conversation().leaf_id)[0]
        assert first.text == "A[31mRED[0m B\nC]0;pwn\x07 X\x11\x03Z"


def test_sigusr1_says_where_it_stands_and_ends_nothing(tmp_path):
    with Terminal(tmp_path) as terminal:
        start(terminal, tmp_path, "word " * 4000, 0.01)
        terminal.wait("embedded model")
        terminal.type("hello")
        terminal.keys("Enter")
        terminal.wait("word word")
        os.kill(terminal.pid, signal.SIGUSR1)
        terminal.wait("Status")
        terminal.keys("Escape")
        terminal.wait("stopped by you")
        terminal.keys("C-q")
        terminal.wait("exit=0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal_and_keeps_the_text(tmp_path, number):
    with Terminal(tmp_path) as terminal:
        start(terminal, tmp_path, "word " * 5000, 0.01)
        terminal.wait("embedded model")
        terminal.type("go")
        terminal.keys("Enter")
        terminal.wait("word word")
        os.kill(terminal.pid, number)
        terminal.wait(f"exit={128 + number}")
        assert terminal.modes == CLEAN
    with Store.open(tmp_path / "data", readonly=True) as store:
        message = store.message(store.last_conversation().leaf_id)
        assert message.state == "stopped" and message.text.startswith("word word")


@pytest.fixture
def stubborn_editor(tmp_path, monkeypatch):
    """An editor that ignores every polite request to end."""
    script = tmp_path / "editor.sh"
    script.write_text("trap '' HUP TERM\necho editing\nwhile :; do sleep 0.2; done\n")
    monkeypatch.setenv("VISUAL", f"sh {script}")


def test_a_signal_ends_the_program_while_an_editor_runs(tmp_path, stubborn_editor):
    with Terminal(tmp_path) as terminal:
        start(terminal, tmp_path, "answer")
        terminal.wait("embedded model")
        terminal.type("draft")
        terminal.keys("C-g")
        terminal.wait("editing")
        os.kill(terminal.pid, signal.SIGTERM)
        terminal.wait("exit=143")
        assert terminal.modes == CLEAN
    with Store.open(tmp_path / "data", readonly=True) as store:
        assert store.draft(None).text == "draft"


@pytest.mark.parametrize("editor", [False, True])
def test_the_program_does_not_outlive_its_terminal(tmp_path, stubborn_editor, editor):
    with Terminal(tmp_path) as terminal:
        start(terminal, tmp_path, "answer")
        terminal.wait("embedded model")
        if editor:
            terminal.keys("C-g")
            terminal.wait("editing")
        pid = terminal.pid
    Terminal.outlived(pid)


def test_resizing_while_streaming(tmp_path):
    with Terminal(tmp_path, 100, 30) as terminal:
        start(terminal, tmp_path, "word " * 5000, 0.005)
        terminal.wait("embedded model")
        terminal.type("go")
        terminal.keys("Enter")
        terminal.wait("word word")
        terminal.resize(39, 9)
        assert "Generation continues" in terminal.wait("Terminal too small: 39x9")
        terminal.resize(100, 30)
        terminal.wait("gen ")
        terminal.keys("Escape")
        terminal.wait("stopped by you")
        terminal.resize(60, 5)
        assert "ctrl+Q quits" in terminal.wait("Terminal too small: 60x5")
        terminal.keys("C-q")
        terminal.resize(100, 30)
        terminal.wait("exit=0")


def test_a_kill_loses_no_shown_text_of_a_second_ago(tmp_path):
    with Terminal(tmp_path, 100, 30) as terminal:
        start(terminal, tmp_path, "".join(f"w{n} " for n in range(5000)), 0.004)
        terminal.wait("embedded model")
        terminal.type("go")
        terminal.keys("Enter")
        terminal.wait("w40 ")
        shown = terminal.wait("w40 ")
        # The promise is one second; a loaded test machine gets another for its own delays.
        time.sleep(2.0)
        terminal.kill()
        terminal.reset()
        with Store.open(tmp_path / "data") as store:
            message = store.message(store.last_conversation().leaf_id)
            assert message.state == "interrupted" and store.recovered == (message.id,)
            last = max(int(word[1:]) for word in shown.split() if word[0] == "w" and word[1:].isdigit())
            assert f"w{last - 1} " in message.text
            title = store.last_conversation().id
        start(terminal, tmp_path, "again", 0.0, title)
        assert "interrupted" in terminal.wait("ctrl+R answers") and "w3 " in terminal.screen
        # While the build loads the key is answered by a hint only.
        terminal.wait("idle")
        terminal.until_after("C-r", "2/2")
        terminal.keys("C-q")
        terminal.wait("exit=0")


def test_a_second_process_reads_only(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with Terminal(one) as first, Terminal(two) as second:
        start(first, one, "answer")
        first.wait("embedded model")
        first.type("go")
        first.keys("Enter")
        first.wait("prefilled")
        with Store.open(one / "data", readonly=True) as store:
            key = store.last_conversation().id
        (two / "answer.md").write_text("x")
        second.run("-m", "tests.ui.fake_program", str(one / "data"), str(two / "answer.md"), "0", key)
        second.wait("read-only")
        second.wait("answer")
        second.type("more")
        second.keys("Enter")
        second.wait("read-only here")
        first.keys("C-q")
        first.wait("exit=0")
        second.keys("C-p")
        second.wait("Search for commands")
        second.type("take over")
        second.wait("Take over")
        second.keys("Enter")
        second.wait("read-only", gone=True)
        second.keys("Enter")
        second.wait("prefilled 1")
        second.keys("C-q")
        second.wait("exit=0")


def test_a_fault_ends_in_one_paragraph_and_a_clean_terminal(tmp_path):
    with Terminal(tmp_path) as terminal:
        start(terminal, tmp_path, "crash")
        terminal.wait("embedded model")
        terminal.type("go")
        terminal.keys("Enter")
        terminal.wait("prefilled")
        terminal.keys("F12")
        shown = terminal.wait("exit=1").replace("\n", "")
        assert terminal.modes == CLEAN and "has failed: RuntimeError" in shown and "dsv41chat.log" in shown and "resume with" in shown
        assert "Traceback" not in shown


def test_no_control_byte_of_any_text_reaches_the_terminal(tmp_path):
    nasty = "x\x1b]0;TITLE\x07 y\x9b31m z\x1b[2J \x1bPq\x1b\\\n```\n\x1b[5mblink\n```\n"
    with Terminal(tmp_path) as terminal:
        terminal._tmux("pipe-pane", "-t", "t", f"cat > '{tmp_path}/bytes'")
        start(terminal, tmp_path, nasty)
        terminal.wait("embedded model")
        terminal.type("go")
        terminal.keys("Enter")
        terminal.wait("prefilled")
        terminal.keys("C-q")
        terminal.wait("exit=0")
        data = (tmp_path / "bytes").read_bytes()
        assert b"TITLE" in data and b"\x1b]0;TITLE" not in data and b"\x1bPq" not in data and b"\xc2\x9b" not in data
        assert "TITLE" not in terminal._tmux("display-message", "-p", "-t", "t", "#{pane_title}")
