"""The store's own thread: heartbeats while something is held, checkpoints of answers while they are generated."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dsv41chat.store.answers import AnswerWriter
from dsv41chat.store.errors import StoreError
from dsv41chat.store.locks import BEAT_S, Locks


class Keeper:
    """Started at the first use. It sleeps until something is due: there is no polling."""

    def __init__(self, locks: Locks, monotonic: Callable[[], float], background: bool):
        """monotonic: seconds. background: False leaves it to the caller to `tick` (tests with a clock of their own)."""
        self._locks = locks
        self._monotonic = monotonic
        self._background = background
        self._wake = threading.Event()
        self._stop = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._writers: list[AnswerWriter] = []
        self._last_beat = monotonic()

    def start(self) -> None:
        with self._lock:
            if self._background and self._thread is None and not self._stop:
                self._thread = threading.Thread(target=self._run, name="dsv41chat-store", daemon=True)
                self._thread.start()

    def watch(self, writer: AnswerWriter) -> None:
        with self._lock:
            self._writers.append(writer)
        self.wake()

    def forget(self, writer: AnswerWriter) -> None:
        with self._lock:
            if writer in self._writers:
                self._writers.remove(writer)

    @property
    def writers(self) -> tuple[AnswerWriter, ...]:
        with self._lock:
            return tuple(self._writers)

    def wake(self) -> None:
        self._wake.set()

    def tick(self) -> float:
        """Do what is due. Returns the seconds until something is due again."""
        now = self._monotonic()
        if now - self._last_beat >= BEAT_S:
            self._last_beat = now
            try:
                self._locks.beat()
            except StoreError:
                # The next beat comes long before this process counts as dead.
                pass
        wait = self._last_beat + BEAT_S - now
        for writer in self.writers:
            writer.checkpoint_if_due()
            if writer.waiting:
                wait = min(wait, max(0.0, writer.due_in()))
        return wait

    def stop(self) -> None:
        """End the thread, after a write it may be in the middle of."""
        with self._lock:
            self._stop = True
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._stop:
            wait = self.tick()
            self._wake.wait(wait)
            self._wake.clear()
