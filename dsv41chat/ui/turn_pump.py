"""Carries the events of a running turn from its thread to the event loop, never faster than the screen can draw them."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable

from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import Failed, TurnEvent, TurnRequest

log = logging.getLogger(__name__)

FLUSH_S = 0.050
REST_FACTOR = 4


class TurnPump:
    """One turn at a time; `running` until its last batch is shown. deliver: called on the event loop with every batch; ended: after the last batch.

    A batch is delivered at most every 50 ms and not before four times the duration of the last delivery has passed, so that
    drawing takes at most about a fifth of a core whatever the content.
    """

    def __init__(self, controller: TurnController, deliver: Callable[[list[TurnEvent]], None], ended: Callable[[], None]):
        self._controller = controller
        self._deliver, self._ended = deliver, ended
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task | None = None
        self._idle = threading.Event()
        self.longest_s = 0.0
        self.running = False

    def start(self, request: TurnRequest) -> None:
        """Must be called on the event loop, with no turn running."""
        if self.running:
            raise RuntimeError("a turn is running")
        self.running = True
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(request, loop, wake), name="turn", daemon=True)
        self._task = loop.create_task(self._pump(wake))
        self._thread.start()

    def cancel(self) -> None:
        self._controller.cancel()

    def join(self, timeout_s: float) -> bool:
        """Waits for the turn's thread (not on the event loop while it draws). True when it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, request: TurnRequest, loop: asyncio.AbstractEventLoop, wake: asyncio.Event) -> None:
        try:
            for event in self._controller.run(request):
                self._put(event, loop, wake)
        except Exception as error:  # noqa: BLE001 - a bug in the runner must end the turn, not the program
            self._put(Failed("internal", f"{type(error).__name__}: {error}"), loop, wake)
            raise
        finally:
            self._put(None, loop, wake)

    def _put(self, event: TurnEvent | None, loop: asyncio.AbstractEventLoop, wake: asyncio.Event) -> None:
        self._queue.put(event)
        if self._idle.is_set():
            self._idle.clear()
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:
                # The loop has closed: the program is leaving and the turn only has to store its end.
                pass

    async def _pump(self, wake: asyncio.Event) -> None:
        over = False
        while not over:
            batch: list[TurnEvent] = []
            while True:
                try:
                    event = self._queue.get_nowait()
                except queue.Empty:
                    break
                if event is None:
                    over = True
                    break
                batch.append(event)
            began = time.monotonic()
            if batch:
                self._show(self._deliver, batch)
            spent = time.monotonic() - began
            self.longest_s = max(self.longest_s, spent)
            if over:
                break
            if not batch:
                wake.clear()
                self._idle.set()
                # An event may have come between the last look and the flag.
                if self._queue.empty():
                    await wake.wait()
                self._idle.clear()
            else:
                await asyncio.sleep(max(FLUSH_S, REST_FACTOR * spent))
        self.running = False
        self._show(self._ended)

    @staticmethod
    def _show(function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
        except Exception:  # noqa: BLE001 - a fault in drawing must not keep the turn from being carried to its end
            log.exception("showing a turn failed")
