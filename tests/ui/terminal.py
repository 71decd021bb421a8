"""A program in a real terminal: a private tmux server of fixed size."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TYPED_S = 30.0  # text that is not shown where it is typed (a page without a field) does not hold a test longer


class Terminal:
    """One tmux session running one command in a shell. Use as a context manager; the private server ends with it."""

    def __init__(self, folder: Path, width: int = 100, height: int = 30, environ: dict[str, str] | None = None):
        # A place of its own: the path of a socket must be short, and the server before may still be leaving.
        self._place = tempfile.TemporaryDirectory(prefix="tmux-")
        self.socket = Path(self._place.name) / "s"
        self.folder = folder
        environ = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", **(environ or {})}
        # COLUMNS and LINES are wrong on purpose: some shells export them, and the screen must not believe them.
        environ |= {"COLUMNS": "80", "LINES": "24"}
        self._environ = environ
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), "-s", "t", "env", "PS1=$ ", "sh")

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-u", "-S", str(self.socket), *words], capture_output=True, text=True, env=self._environ, timeout=120)
        return done.stdout

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")
        self._place.cleanup()

    def run(self, *arguments: str) -> None:
        """Starts `python ARGUMENTS` in the shell, in the test's own folder; its pid goes to a file, its exit code to the screen."""
        words = " ".join(f"'{word}'" for word in (sys.executable, *arguments))
        script = self.folder / "run.sh"
        # Without job control the program would not own the terminal: exec in a subshell keeps its pid known.
        script.write_text(f"cd '{self.folder}'\n(sh -c 'echo $PPID' > '{self.folder}/pid'; exec {words})\necho exit=$?\n")
        self.type(f". '{script}'")
        self.keys("Enter")

    @property
    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    def kill(self) -> None:
        """Kills the program and waits until the shell has collected it."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        self.outlived(pid)

    @staticmethod
    def outlived(pid: int) -> None:
        """Waits until there is no process of this number any more."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
        raise AssertionError(f"process {pid} is still there")

    def type(self, text: str) -> None:
        """Types `text` and waits until it is there: the composer takes a fast burst that ends in Enter for a paste."""
        end = text.strip()[-4:]
        # Once more than before: "draft off" in the status line is not the end of "/effort off".
        before = self.screen.count(end)
        self._tmux("send-keys", "-t", "t", "-l", text)
        deadline = time.monotonic() + TYPED_S
        while self.screen.count(end) <= before and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)

    def reset(self) -> None:
        """What one types, unseen, when a program died and left the terminal as it was: `reset`."""
        self._tmux("send-keys", "-t", "t", "-l", "reset")
        self.keys("C-j")
        deadline = time.monotonic() + 120
        while "is-42" not in self.screen:
            # What arrives while `reset` still waits for the terminal is lost.
            assert time.monotonic() < deadline, self.screen
            self._tmux("send-keys", "-t", "t", "-l", "echo is-$((6*7))")
            self.keys("Enter")
            time.sleep(0.5)

    def keys(self, *names: str) -> None:
        for name in names:
            self._tmux("send-keys", "-t", "t", name)
            # What follows an Escape within a tenth of a second would be read as alt and that key.
            time.sleep(0.3 if name == "Escape" else 0.05)

    def paste(self, text: str, bracketed: bool = True) -> None:
        file = self.folder / "paste.txt"
        file.write_text(text, "utf-8")
        self._tmux("load-buffer", str(file))
        self._tmux("paste-buffer", "-t", "t", *(["-p"] if bracketed else []))
        time.sleep(0.2)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-t", "t", "-x", str(width), "-y", str(height))

    @property
    def screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-t", "t")

    @property
    def coloured(self) -> str:
        """The screen with its colour sequences."""
        return self._tmux("capture-pane", "-p", "-e", "-t", "t")

    @property
    def modes(self) -> str:
        """alternate screen, any mouse mode, cursor shown."""
        return self._tmux("display-message", "-p", "-t", "t", "#{alternate_on} #{mouse_any_flag} #{cursor_flag}").strip()

    def wait(self, text: str, timeout_s: float = 120.0, gone: bool = False) -> str:
        """Waits until `text` is (or is no longer) on the screen; returns the screen."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            screen = self.screen
            if (text in screen) != gone:
                return screen
            time.sleep(0.1)
        raise AssertionError(f"{text!r} did not {'leave' if gone else 'appear on'} the screen:\n{self.screen}")

    def until_after(self, key: str, text: str, when: str = "", timeout_s: float = 120.0) -> str:
        """Presses `key` (each time `when` is on the screen) every two seconds until `text` is there; returns the screen."""
        deadline = time.monotonic() + timeout_s
        pressed = 0.0
        while time.monotonic() < deadline:
            screen = self.screen
            if text in screen:
                return screen
            if when in screen and time.monotonic() - pressed > 2.0:
                self.keys(key)
                pressed = time.monotonic()
            time.sleep(0.1)
        raise AssertionError(f"{text!r} did not appear on the screen:\n{self.screen}")
