"""Keys that come before the screen does."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time

import pytest

from dsv41chat.ui.background import unheard_keys


def test_early_keys_are_not_echoed_and_can_be_read_at_once(monkeypatch):
    master, slave = os.openpty()
    with open(slave, "rb", buffering=0) as keys:
        monkeypatch.setattr(sys, "stdin", keys)
        before = termios.tcgetattr(slave)
        with unheard_keys():
            flags = termios.tcgetattr(slave)[3]
            assert not flags & (termios.ECHO | termios.ICANON) and flags & termios.ISIG, "ctrl+C still ends the program"
            os.write(master, b"early words")
            assert select.select([slave], [], [], 10)[0] and os.read(slave, 100) == b"early words", "without Enter"
            assert not select.select([master], [], [], 0)[0], "nothing was echoed"
        assert termios.tcgetattr(slave) == before
    os.close(master)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_that_time_gives_the_terminal_back(monkeypatch, number):
    master, slave = os.openpty()
    with open(slave, "rb", buffering=0) as keys:
        monkeypatch.setattr(sys, "stdin", keys)
        before = termios.tcgetattr(slave)
        with pytest.raises(SystemExit) as ended, unheard_keys():
            os.kill(os.getpid(), number)
            time.sleep(10)
        assert ended.value.code == 128 + number and termios.tcgetattr(slave) == before and signal.getsignal(number) is signal.SIG_DFL
    os.close(master)


def test_without_a_terminal_nothing_happens(monkeypatch, tmp_path):
    for stdin in (None, (tmp_path / "empty").open("w+")):
        monkeypatch.setattr(sys, "stdin", stdin)
        with unheard_keys():
            pass
