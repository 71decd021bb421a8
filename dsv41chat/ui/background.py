"""The terminal before the screen starts: keys that come too early, and whether its background is light."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

WAIT_S = 0.1
_ANSWER = re.compile(rb"\x1b\]11;rgb:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)(?:\x07|\x1b\\)")


def is_light(red: float, green: float, blue: float) -> bool:
    """Channels from 0 to 1; by relative luminance."""
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5


def parse_answer(data: bytes) -> tuple[bool | None, bytes]:
    """(light or not, None without an answer; the bytes around the answer: keys that were typed meanwhile)."""
    match = _ANSWER.search(data)
    if match is None:
        return None, data
    channels = [int(part, 16) / (16 ** len(part) - 1) for part in match.groups()]
    return is_light(*channels), data[: match.start()] + data[match.end() :]


@contextmanager
def unheard_keys() -> Iterator[None]:
    """Keys typed while the screen is still being made are neither echoed nor lost: it reads them when it is there."""
    try:
        import termios
    except ImportError:
        yield
        return
    try:
        keys = sys.stdin.fileno()
        before = termios.tcgetattr(keys)
    except (AttributeError, OSError, ValueError, termios.error):
        # No terminal: nothing is typed there.
        yield
        return
    quiet = [*before]
    # Without line editing, so that what was typed can be read at once; the signals of ctrl+C and ctrl+Z stay.
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    # Until the screen has handlers of its own, these would end the process with the terminal left mute.
    ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ends:
        signal.signal(number, _end)
    termios.tcsetattr(keys, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        try:
            termios.tcsetattr(keys, termios.TCSANOW, before)
        except termios.error:
            # The terminal is gone.
            pass
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def ask_terminal(wait_s: float = WAIT_S) -> tuple[bool | None, str]:
    """Asks with OSC 11. Returns (light, text typed while waiting); light is None when no answer came in time.

    Nothing is asked without a terminal on both sides. An answer that comes later would look like typed keys, so this is not
    for slow lines: the caller leaves it out in SSH sessions.
    """
    try:
        import termios
        import tty
    except ImportError:
        return None, ""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr and sys.stderr.isatty()):
        return None, ""
    keys = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(keys)
    except termios.error:
        return None, ""
    data = b""
    try:
        tty.setcbreak(keys, termios.TCSANOW)
        os.write(sys.stderr.fileno(), b"\x1b]11;?\x1b\\")
        deadline = time.monotonic() + wait_s
        while parse_answer(data)[0] is None and (left := deadline - time.monotonic()) > 0:
            if select.select([keys], [], [], left)[0]:
                data += os.read(keys, 1024)
    except OSError:
        # The terminal went away; the start that follows will say so.
        return None, ""
    finally:
        termios.tcsetattr(keys, termios.TCSANOW, before)
    light, rest = parse_answer(data)
    typed = rest.decode("utf-8", "ignore")
    return light, "".join(character for character in typed if character.isprintable())
