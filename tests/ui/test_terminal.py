"""The program in a real terminal (tmux): start, type, stream, signals. Skipped where tmux is missing."""

from __future__ import annotations

import os
import shutil
import signal

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
        terminal.type("hi")
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
        terminal.keys("C-q")
        terminal.wait("exit=0")
        assert terminal.modes == CLEAN and "resume with: dsv41chat --resume" in terminal.screen
    with Store.open(tmp_path / "data", readonly=True) as store:
        path = store.path_to(store.last_conversation().leaf_id)
        assert [message.text for message in path if message.role == "user"] == ["hi\nthere"]


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
