"""The one thread that touches MLX: jobs go in, events come out.

A job is a plain function. `submit` returns a Future; `stream` returns an iterable of what the job emits. Cancelling is the
job's own business: it is handed a callable by its caller and polls it. Nothing here knows what an event means.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

_EVENT, _END, _ERROR, _ABANDON = range(4)


class Abandoned(Exception):
    """The reader gave a stream up while its job was still running."""


class Stream:
    """What one running job emits, in order. Iterate it once, from one thread.

    merge(a, b): one event that says the same as a then b, or None if they cannot be joined. Joinable events that come less
    than `interval_s` after the last one handed out are held back and joined, so a fast job never floods a slow reader.
    `result` is the job's return value once the iteration has ended. An exception of the job is raised by the iteration.
    """

    def __init__(self, merge: Callable[[Any, Any], Any] | None = None, interval_s: float = 1 / 60):
        self.result: Any = None
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._merge = merge
        self._interval_s = interval_s
        self.ended = threading.Event()  # set by the engine thread after the job's last statement

    def emit(self, event: Any) -> None:
        """Called by the job."""
        self._queue.put((_EVENT, event))

    def abandon(self) -> None:
        """Make the iteration raise Abandoned without waiting for the job. Safe in a signal handler (SimpleQueue.put is re-entrant)."""
        self._queue.put((_ABANDON, None))

    def finish(self, result: Any) -> None:
        self._queue.put((_END, result))

    def fail(self, error: BaseException) -> None:
        self._queue.put((_ERROR, error))

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        last = float("-inf")
        while True:
            try:
                wait_s = max(0.0, last + self._interval_s - time.monotonic()) if held else None
                kind, value = self._queue.get(timeout=wait_s)
            except queue.Empty:
                kind, value = None, None
            if kind is _EVENT and self._merge is not None and self._merge(value, value) is not None:
                _join(held, value, self._merge)
                if time.monotonic() - last < self._interval_s:
                    continue
                kind = None
            yield from held
            if held:
                last = time.monotonic()
            held = []
            if kind is _EVENT:
                yield value
            elif kind is _END:
                self.result = value
                return
            elif kind is _ERROR:
                raise value
            elif kind is _ABANDON:
                raise Abandoned


def _join(held: list[Any], event: Any, merge: Callable[[Any, Any], Any]) -> None:
    """Join `event` to the newest held event of its class, else append it."""
    for i in range(len(held) - 1, -1, -1):
        if type(held[i]) is type(event):
            joined = merge(held[i], event)
            if joined is None:
                break
            held[i] = joined
            return
    held.append(event)


class EngineThread:
    """A single worker thread, started with the first job. Jobs run one after the other in the order they were given."""

    def __init__(self, name: str = "engine"):
        self._name = name
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        """Run `function` on the engine thread; the Future holds its result or its exception."""
        future: Future = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - handed to the caller, who asked for the result
                future.set_exception(error)

        self._put(job)
        return future

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`submit` and wait. Called on the engine thread itself it runs at once."""
        if threading.current_thread() is self._thread:
            return function(*args, **kwargs)
        return self.submit(function, *args, **kwargs).result()

    def stream(self, function: Callable[[Callable[[Any], None]], Any], *, merge: Callable[[Any, Any], Any] | None = None) -> Stream:
        """Run `function(emit)` on the engine thread and return the stream of what it emits."""
        stream = Stream(merge)

        def job() -> None:
            try:
                stream.finish(function(stream.emit))
            except BaseException as error:  # noqa: BLE001 - raised again by the reader of the stream
                stream.fail(error)
            finally:
                stream.ended.set()

        self._put(job)
        return stream

    def waiting(self) -> bool:
        """Are there jobs behind the running one? What a job of low importance asks to make room."""
        return not self._jobs.empty()

    def close(self, timeout_s: float | None = None) -> bool:
        """Let the jobs already given finish, then end the thread. False if it was still busy after `timeout_s`."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._jobs.put(None)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _put(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine thread is closed")
            if self._thread is None:
                # A daemon: a second ctrl+C must be able to leave while a kernel is still running.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # keeps no reference to what the job closed over (lanes, engines)
