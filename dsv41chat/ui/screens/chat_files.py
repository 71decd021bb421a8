"""The part of the chat screen that reads a file for the message: off the event loop, with a mark in the composer that stands for it.

What is typed meanwhile stands behind the mark, and Enter waits, so that keys act in the order in which they came.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from dsv41chat.ui.commands import CommandError, attachment_path, read_attachment
from dsv41chat.ui.inputs import fenced, line_count

READING_S = 0.2  # between two looks at how far it is
AFTER = "\n\n"


@dataclass
class Reading:
    """A file that is being read. mark: what stands for it; original: what stands there again if it is not read.

    done and total: bytes, total 0 where it is not known; written by the thread that reads. stopped: nobody wants it any more.
    """

    mark: str
    original: str
    name: str
    done: int = 0
    total: int = 0
    stopped: bool = False

    def shown(self) -> str:
        return f"reading {self.name}" + (f" {100 * self.done // self.total}%" if self.total else "")


class _Stopped(Exception):
    pass


class FileActions:
    """Mixed into ChatScreen."""

    def init_files(self) -> None:
        self._readings: list[Reading] = []
        self._send_when_read = False
        self._reading_timer: Any = None

    @property
    def reading(self) -> list[Reading]:
        """The files that are being read and whose marks stand in the composer."""
        return [one for one in self._readings if not one.stopped and one.mark in self.composer.text]

    def reading_label(self) -> list[str]:
        """For the line above the composer."""
        return [one.shown() for one in self.reading] + (["Esc cancels"] if self.reading and not self.pump.running else [])

    def attach(self, path: str, original: str = "") -> None:
        """A file as a chip at the cursor. original: what the composer had in its place, and has again if it cannot be read."""
        name = attachment_path(path).name
        reading = Reading(self.composer.begin_chip(name), original, name)
        self._readings.append(reading)
        # A blank line, as between parts of a message elsewhere: what is typed on the line of a closing fence would be inside it.
        self.composer.insert(reading.mark + AFTER)
        if self._reading_timer is None:
            self._reading_timer = self.set_interval(READING_S, self.show_label)
        self.spawn(self._read_file(reading, path), "read", exclusive=False)

    async def _read_file(self, reading: Reading, path: str) -> None:
        def note(done: int, total: int) -> None:
            reading.done, reading.total = done, total
            if reading.stopped or self.app.leaving:
                raise _Stopped

        def work() -> tuple[int, str]:
            name, text = read_attachment(path, note)
            return line_count(text), fenced(name, text)

        try:
            lines, text = await asyncio.to_thread(work)
            if reading.stopped:
                raise _Stopped
        except _Stopped:
            return
        except CommandError as error:
            self._not_read(reading)
            self.tell(str(error), "error")
            return
        finally:
            self._readings.remove(reading)
            self._readings_changed()
        self.composer.finish_chip(reading.mark, reading.name, lines, text)
        self._readings_changed()
        if self._send_when_read and not self.reading:
            self._send_when_read = False
            self.composer.submit()

    def _readings_changed(self) -> None:
        if not self._readings and self._reading_timer is not None:
            self._reading_timer.stop()
            self._reading_timer = None
        if self.is_mounted and not self.app.leaving:
            self.show_label()

    def _not_read(self, reading: Reading) -> None:
        """Its mark goes. What it stood for comes back, a command only where it would stand alone as it did: it must not become text."""
        self._send_when_read = False
        alone = self.composer.text.strip() == reading.mark
        original = reading.original if alone or not reading.original.startswith("/") else ""
        self.composer.drop_chip(reading.mark, AFTER, original)

    def cancel_reading(self) -> bool:
        """Whether there was something to cancel."""
        found = self.reading
        for one in found:
            one.stopped = True
            self._not_read(one)
        if found:
            self.show_label()
            self.tell(f"Not read: {', '.join(one.name for one in found)}.")
        return bool(found)

    def send_when_read(self) -> bool:
        """Enter while a file is being read: the message waits for it. Whether there is one."""
        found = self.reading
        if found:
            self._send_when_read = True
            self.tell(f"Sent when {', '.join(one.name for one in found)} is read; esc cancels.")
        return bool(found)

    def unread(self, text: str) -> str:
        """A text of the composer as it is stored: nothing comes behind the marks of files that are not read yet."""
        for one in self._readings:
            text = text.replace(one.mark + AFTER, one.original).replace(one.mark, one.original)
        return text
