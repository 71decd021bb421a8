"""Another program of the user's (editor, pager) in the foreground, which does not outlive a signal that ends this one."""

from __future__ import annotations

import select
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import FrameType

PATIENCE_S = 2.0
LOOK_S = 0.5


def run_outside(words: Sequence[str], keys: int | None = None) -> int:
    """Runs a program until it ends and returns its exit code. Blocks the caller, which must be the main thread.

    SIGTERM, SIGHUP and a hang-up of the terminal `keys` (a file descriptor) go on to the program, which is killed if it stays;
    the event loop sees them when this returns. Raises OSError when the program cannot be started.
    """
    child = subprocess.Popen(words)
    ended = threading.Event()

    def pass_on(number: int, _: FrameType | None = None) -> None:
        child.send_signal(number)
        last = threading.Timer(PATIENCE_S, child.kill)
        last.daemon = True
        last.start()

    def watch() -> None:
        poll = select.poll()
        # No event is asked for: a hang-up is always reported, and the keys are the program's.
        poll.register(keys, 0)
        while not ended.wait(LOOK_S):
            if any(event & select.POLLHUP for _, event in poll.poll(0)):
                pass_on(signal.SIGHUP)
                return

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {getattr(signal, name): signal.signal(getattr(signal, name), pass_on) for name in names}
    if keys is not None and hasattr(select, "poll"):
        threading.Thread(target=watch, name="hang-up", daemon=True).start()
    try:
        return child.wait()
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)
