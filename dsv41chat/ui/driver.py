"""Input from the terminal: pastes arrive whole and literally, and a terminal that has gone away ends the program."""

from __future__ import annotations

import os
import select
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import IO, Any

from textual import events
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

from dsv41chat.ui.messages import TypedPaste

READ_BYTES = 64 * 1024
WAIT_S = 0.1
# A terminal gives 4 KB at a time. After a read that no hand can have typed, what follows within this time belongs to it.
MORE_S, MORE_BYTES, MOST_BYTES = 0.015, 256, 16 << 20
PASTE_KEYS = 64  # of one read; fewer are keys, which the composer knows by their times


ESC = "\x1b"
# What may follow in another read where a connection has torn a key's sequence apart: CSI, SS3.
TORN = ("[", "O", ESC)


class PasteParser(XTermParser):
    """Textual's parser, but what stands between the marks of a bracketed paste is never looked at as keys, and Esc stays a key.

    The parser of Textual reads escape sequences inside a paste too and hands unknown ones out as keys, before the paste. And it takes
    any key that follows Esc within a tenth of a second for one with alt held down: Esc would do nothing for whoever types on at once. A
    key with alt is written by a terminal in one piece, so that an Esc which came alone is one.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._inside = False
        self._parts: list[str] = []
        # The last characters seen, in case a mark began there.
        self._tail = ""
        self._alone = False

    def feed(self, data: str) -> Iterable[Message]:
        """Messages of the next piece of input; empty at its end. A mark may be cut anywhere between two pieces."""
        if not data:
            yield from super().feed(data)
            return
        if self._alone and data[0] not in TORN and self._timeout_time is not None:
            self._timeout_time = 0.0  # waited long enough
            yield from self.tick()
        self._alone = False
        while data:
            if not self._inside:
                self._alone = data.endswith(ESC)
                keys, data = self._before_paste(data)
                yield from super().feed(keys)
            else:
                data = self._inside_paste(data)
                if not self._inside:
                    # The base class saw the opening mark only; its own paste is empty.
                    yield from (message for message in super().feed(BRACKETED_PASTE_END) if not isinstance(message, events.Paste))
                    yield events.Paste("".join(self._parts).replace("\x00", ""))

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[events.Key]:
        """A digit with alt is that key; Textual has the character there that Option types on one keyboard."""
        if len(sequence) == 2 and sequence[0] == ESC and sequence[1] in "0123456789":
            return [events.Key(f"alt+{sequence[1]}", None)]
        return super()._sequence_to_key_events(sequence, alt)

    def _before_paste(self, data: str) -> tuple[str, str]:
        """(input up to and with the opening mark, the rest)."""
        seen = self._tail + data
        place = seen.find(BRACKETED_PASTE_START)
        if place < 0:
            self._tail = seen[-len(BRACKETED_PASTE_START) + 1 :]
            return data, ""
        end = place + len(BRACKETED_PASTE_START) - len(self._tail)
        self._tail, self._inside, self._parts = "", True, []
        self._alone = False
        return data[:end], data[end:]

    def _inside_paste(self, data: str) -> str:
        """Collects until the closing mark; returns what stands behind it."""
        # What was held back may be the beginning of a cut mark.
        seen = self._tail + data
        following = seen.find(BRACKETED_PASTE_START)
        # A second closing mark before the next opening one was pasted: what stands between them must not become keys.
        place = seen.rfind(BRACKETED_PASTE_END, 0, following if following >= 0 else len(seen))
        if place < 0:
            place = seen.find(BRACKETED_PASTE_END)
        if place < 0:
            keep = max(0, len(seen) - len(BRACKETED_PASTE_END) + 1)
            self._parts.append(seen[:keep])
            self._tail = seen[keep:]
            return ""
        self._parts.append(seen[:place])
        self._tail, self._inside = "", False
        return seen[place + len(BRACKETED_PASTE_END) :]


def gathered(messages: Iterable[Message]) -> Iterable[Message]:
    """The messages of one read, in their order; many keys in a row that are a text as one paste: one by one they would take minutes."""
    keys: list[events.Key] = []
    for message in messages:
        if _is_text(message):
            keys.append(message)
            continue
        yield from _one(keys)
        keys = []
        yield message
    yield from _one(keys)


def _is_text(message: Message) -> bool:
    if not isinstance(message, events.Key) or message.key.startswith(("alt+", "shift+", "super+")):
        return False
    return message.is_printable or message.character in ("\r", "\n", "\t")


def _one(keys: list[events.Key]) -> list[events.Key] | list[TypedPaste]:
    return keys if len(keys) < PASTE_KEYS else [TypedPaste("".join(key.character or "" for key in keys))]


class _Screen:
    """The terminal to write to. Once it has gone away everything is dropped: the writer thread must not end by an error.

    Without that thread its queue fills up and the next write would hold the event loop, signal handlers included, for good.
    """

    def __init__(self, file: IO[str]):
        self._file = file

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._file.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()


class TerminalDriver(LinuxDriver):
    """gone: called from the input thread when the terminal has gone away; None: nothing is done."""

    gone: Callable[[], None] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._file = _Screen(self._file)

    def _get_terminal_size(self) -> tuple[int, int]:
        """Columns and rows as the terminal has them now.

        The base class believes COLUMNS and LINES first: where a shell exports them the screen would never follow a resize.
        """
        try:
            return tuple(os.get_terminal_size(self.fileno))
        except OSError:
            return super()._get_terminal_size()

    def run_input_thread(self) -> None:
        """Reads keys until the screen stops."""
        parser = PasteParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        while not self.exit_event.is_set():
            if select.select([self.fileno], [], [], WAIT_S)[0]:
                try:
                    data = self._read()
                except OSError:
                    # Hung up.
                    data = b""
                if not data:
                    if self.gone is not None:
                        self.gone()
                    return
                # Nothing yet of a character that was cut; an empty text would mean the end.
                if text := decode(data):
                    messages = parser.feed(text)
                    self._pass_on(gathered(messages) if self._app.settings.ui.burst_paste else messages)
            self._pass_on(parser.tick())

    def _read(self) -> bytes:
        """What has come, of a paste all that follows at once; empty or OSError where the terminal has gone away."""
        more = os.read(self.fileno, READ_BYTES)
        parts = [more]
        while len(more) >= MORE_BYTES and sum(map(len, parts)) < MOST_BYTES and select.select([self.fileno], [], [], MORE_S)[0]:
            try:
                more = os.read(self.fileno, READ_BYTES)
            except OSError:
                # The next read says so again.
                break
            parts.append(more)
        return b"".join(parts)

    def _pass_on(self, messages: Iterable[Message]) -> None:
        """Hands on what one read brought. Its keys came together: a busy machine between two of them must not tear a paste apart."""
        came: float | None = None
        for message in messages:
            if isinstance(message, (events.Key, TypedPaste)):
                came = message.time if came is None else came
                message.time = came
            self.process_message(message)
