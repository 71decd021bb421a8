"""What the engine does while nobody waits for it: keeping the state after a turn, sealing a thinking answer, measuring."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dsv41chat.engine.errors import EngineError
from dsv41chat.ui.engine_thread import EngineThread
from dsv41chat.ui.states import States, StateTurn

if TYPE_CHECKING:
    from dsv41chat.engine import Engine, Session

log = logging.getLogger(__name__)

REST_S = 2.0


class IdleWork:
    """The part of EngineHost between turns."""

    engine: Engine | None
    thread: EngineThread
    states: States
    _sessions: OrderedDict[str, Session]
    _rest: threading.Timer | None
    _disturbed: threading.Event

    def after_turn(self, key: str, turn: StateTurn, prefix: Sequence[int]) -> None:
        """An answer was stored. prefix: the ids with which the next prompt of its branch begins. Does not wait."""

        def job() -> None:
            session = self._sessions.get(key)
            if session is not None:
                try:
                    self.states.finish(session, turn, prefix)
                except Exception:  # noqa: BLE001 - the answer is stored; only its state is not
                    log.exception("the state after a turn is not kept")

        if self.states.ready:
            self.thread.submit(job)

    def rest(self, delay_s: float = REST_S) -> None:
        """Nothing runs: after a while do what waits for that (read a thinking answer again, measure). Ends when disturbed."""
        self.disturb()
        if self.states.on:
            self._disturbed = threading.Event()
            self._rest = threading.Timer(delay_s, self._rest_now, [self._disturbed])
            self._rest.daemon = True
            self._rest.start()

    def _rest_now(self, disturbed: threading.Event) -> None:
        try:
            self.thread.submit(self._idle_work, disturbed.is_set)
            self.thread.submit(self._time_drafting, disturbed.is_set)
        except RuntimeError:
            log.debug("the engine thread has ended")

    def _idle_work(self, stop: Callable[[], bool]) -> None:
        try:
            self.states.seal(stop)
            self.states.measure(stop)
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and the conversation is complete without it
            self.states.forget_seals()
            log.warning("idle work failed: %s", error, exc_info=not isinstance(error, EngineError))

    def _time_drafting(self, stop: Callable[[], bool]) -> None:
        """Once per build and machine: what rows and drafter cost, which the adaptive depth goes by."""
        drafting = getattr(self.engine, "drafting", None)
        try:
            if drafting is not None and drafting.wants_calibration and not stop():
                drafting.calibrate(stop)
        except EngineError as error:
            log.warning("drafting could not be timed: %s", error)

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Somebody waits for the engine for a moment: idle work gives way, and what was left of it is due again after that."""
        due = self._rest is not None
        self.disturb()
        try:
            yield
        finally:
            if due:
                self.rest()

    def disturb(self) -> None:
        """Somebody wants the engine: what runs in idle time gives way before its next forward."""
        self._disturbed.set()
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def settle(self, timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Finish what makes the next turn quick, and wait until it is on disk. False when time ran out or `stopped` said so."""
        self.disturb()
        if not self.states.ready:
            return True
        deadline = time.monotonic() + timeout_s
        over = lambda: stopped() or time.monotonic() >= deadline
        sealed = self.thread.submit(self._idle_work, over)
        while not over():
            try:
                sealed.result(timeout=0.05)
                break
            except TimeoutError:
                continue
        return self.states.settle(max(0.0, deadline - time.monotonic()), stopped)
