"""Background work of a screen or widget whose failure is told and logged instead of ending the program."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

from textual.worker import Worker, WorkerState

from dsv41chat.ui.sanitize import visible_line

log = logging.getLogger(__name__)


class Spawning:
    """Mixed into screens and widgets. Its handlers go by their names: Textual collects `@on` only from its own classes."""

    def spawn(self, work: Coroutine[Any, Any, Any], group: str, exclusive: bool = True) -> None:
        """Runs a coroutine on the event loop. exclusive: an earlier one of the same group is cancelled."""
        worker = self.run_worker(work, group=group, exclusive=exclusive, exit_on_error=False)
        # A worker cancelled before its first step never awaits its work, and the interpreter would say so in the middle of whatever runs then.
        worker._task.add_done_callback(lambda _: work.close())

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if event.state is WorkerState.ERROR:
            error = event.worker.error
            log.error("background work %s failed", event.worker.group, exc_info=error)
            self.notify(visible_line(f"This did not work: {type(error).__name__}: {error}"), severity="error", markup=False)
