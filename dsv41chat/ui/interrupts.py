"""Signals and the time limit of scripted mode.

Handlers only set flags. Where the main thread waits for somebody else, in a read or in a write, a flag would not be seen:
there the handler ends the waiting by raising.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_SECOND_S = 2.0  # a second signal within this time leaves at once
_GRACE_S = 5.0  # how long an answer may take to stop after the time limit
TIMED_OUT = 124


class Interrupted(Exception):
    """A signal or the time limit came while the program waited for its input or for its reader."""


class Interrupts:
    """Use as a context manager on the main thread; elsewhere it does nothing.

    code: the exit code that the first signal asks for, None while there was none. on_stop: end the work soon; on_abort: now;
    on_status: SIGUSR1. All three are called inside a signal handler, so they may only set flags.
    """

    def __init__(self, timeout_s: float | None = None):
        self.code: int | None = None
        self.aborted = False
        self.on_stop: Callable[[], None] = lambda: None
        self.on_abort: Callable[[], None] = lambda: None
        self.on_status: Callable[[], None] = lambda: None
        self.reading = False  # input is being read: a signal ends it
        self.writing = False  # a write may wait for a reader: a second signal ends it
        self._timeout_s = timeout_s
        self._first = 0.0
        self._old: dict[int, Any] = {}

    @property
    def error(self) -> tuple[str, str]:
        """(code, message) of the error that the first signal became."""
        if self.code == TIMED_OUT:
            return "timeout", f"The time limit of {self._timeout_s:g} s was reached."
        name = signal.Signals(self.code - 128).name if self.code else "a signal"
        return "interrupted", f"Interrupted by {name}."

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGALRM"):
            number = getattr(signal, name, None)
            if number is not None:
                handler = self._on_usr1 if name == "SIGUSR1" else self._on_alarm if name == "SIGALRM" else self._on_signal
                self._old[number] = signal.signal(number, handler)
        if self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, max(self._timeout_s, 1e-3))
        return self

    def __exit__(self, *_: object) -> None:
        if self._old and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop(128 + number)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self.code is None:
            signal.setitimer(signal.ITIMER_REAL, _GRACE_S)
            self._stop(TIMED_OUT)
        else:
            self._abort()

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        self.on_status()

    def _stop(self, code: int) -> None:
        now = time.monotonic()
        if self.code is None:
            self.code, self._first = code, now
            self.on_stop()
            if self.reading:
                raise Interrupted
        elif now - self._first <= _SECOND_S:
            self._abort()
        else:
            self._first = now
            self.on_stop()

    def _abort(self) -> None:
        self.aborted = True
        self.on_abort()
        if self.writing:
            raise Interrupted
