"""Where scripted mode writes: stdout carries data only, stderr everything else.

One sink per output mode turns the events of ui/turn_events.py into what scripts read (spec: app, section 8.2): `TextSink`,
`JsonSink`, `StreamSink`. `Stderr` shows notices, progress and timings to people.
"""

from __future__ import annotations

import os
import re
import select
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from dsv41chat import __version__
from dsv41chat.ui import turn_events as ev
from dsv41chat.ui.interrupts import Interrupted
from dsv41chat.ui.sanitize import json_text, visible, visible_line

if TYPE_CHECKING:
    from dsv41chat.ui.interrupts import Interrupts

SCHEMA = 1
_SLOW_S = 0.25  # load and prefill events are written at most this often


READER_GONE = 141  # what shells show for a program that SIGPIPE ended: who asks with pipefail must not read "answered"


class ReaderGone(Exception):
    """Whoever read our stdout has closed it. A run whose answer was not written whole ends with READER_GONE, quietly."""


class UsageError(Exception):
    """Options or input that cannot be used. Exit code 2."""

    code = "usage"

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint


class OutputFailed(Exception):
    """The output cannot be written: a full disk, a broken device."""

    code = "internal"

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint


def require_stdout() -> None:
    """Raise UsageError when standard output is closed (`>&-`): whoever asked could never be answered."""
    if sys.stdout is None:
        raise UsageError("Standard output is closed, so there is nowhere to write to.", hint="-o PATH")


class Out:
    """Bytes to stdout, or to a file that appears under its name only when `close(True)` is called.

    interrupts: told while a write may wait for its reader. Raises ReaderGone when the reader closed the pipe or was given up,
    UsageError when the file may not be written, OutputFailed when writing fails later.
    """

    def __init__(self, path: Path | None = None, *, force: bool = False, interrupts: Interrupts | None = None):
        self.path = path
        self.interrupts = interrupts
        self._given_up = False
        self._temporary: str | None = None
        self._failure = "Standard output is closed."  # why there is no file to write to
        self._file: BinaryIO | None = None
        if path is None:
            # A closed descriptor 1 gives None. Before anything is computed `require_stdout` refuses it.
            self._file = getattr(sys.stdout, "buffer", None)
            return
        if path.exists() and not path.is_file() and not path.is_dir():
            # A device or a pipe holds nothing that could be lost, and cannot be replaced.
            try:
                self._file = path.open("wb", buffering=0)
            except OSError as error:
                raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
            return
        if path.exists() and not force:
            raise UsageError(f"{path} exists already.", hint="--force overwrites it")
        try:
            handle, self._temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            self._file = os.fdopen(handle, "wb")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error

    @property
    def terminal(self) -> bool:
        return self.path is None and self._file is not None and sys.stdout.isatty()

    def same_as(self, stream: TextIO | None) -> bool:
        """Whether `stream` is the same file, pipe or terminal as this: `>log 2>&1`."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.fstat(stream.fileno()))
        except (OSError, ValueError, AttributeError):
            return False  # closed, or none of the system's

    def write(self, text: str) -> None:
        """Write and flush."""
        if self._file is None:
            raise OutputFailed(self._failure)
        if self._given_up:
            raise ReaderGone
        try:
            if self.interrupts is not None:
                self.interrupts.writing = True
            self._write_all(text.encode("utf-8", "replace"))
        except Interrupted:
            self._given_up = True
            raise
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ReaderGone from error
        except OSError as error:
            self._discard()
            failure = f"{self.path or 'Standard output'} cannot be written: {error.strerror}."
            if self._file is None:
                self._failure = failure  # whoever goes on writing is told the same
            raise OutputFailed(failure) from error
        finally:
            if self.interrupts is not None:
                self.interrupts.writing = False

    def _write_all(self, data: bytes) -> None:
        """Also to a pipe that its other end has made non-blocking."""
        while True:
            try:
                if data:
                    data = data[self._file.write(data) or 0 :]
                else:
                    self._file.flush()
                    return
            except BlockingIOError as error:
                data = data[error.characters_written :]
                select.select([], [self._file], [])

    def close(self, keep: bool) -> None:
        """Finish: a file gets its name, or vanishes unless `keep`. After a failed write there is nothing left to do, and nothing to say."""
        if self._temporary is None or self._file is None:
            return
        if not keep:
            self._discard()
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            # mkstemp made it private; an ordinary new file follows the user's mask.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(self._temporary, 0o666 & ~mask)
            os.replace(self._temporary, self.path)
            self._temporary = None
        except OSError as error:
            self._discard()
            raise OutputFailed(f"{self.path} cannot be written: {error.strerror}.") from error

    def _discard(self) -> None:
        """Leave nothing of a file that is not to get its name."""
        if self._temporary is None:
            return
        temporary, self._temporary = self._temporary, None
        file, self._file = self._file, None
        with suppress(OSError):
            file.close()  # it writes what it still holds, for which a full disk has no room
        with suppress(OSError):
            os.unlink(temporary)


class Stderr:
    """Lines for people. level: -1 quiet (errors only), 0, 1 timings, 2 debug. progress: auto, always or never."""

    def __init__(self, level: int = 0, progress: str = "auto", *, color: bool = True, stream: TextIO | None = None):
        self.stream = sys.stderr if stream is None else stream
        self.level = level
        self.terminal = self.stream is not None and self.stream.isatty()
        self.color = color and self.terminal
        self.progress = progress == "always" or (progress == "auto" and self.terminal and level >= 0)
        self._line = ""
        self._last = 0.0
        self._open_line = False  # streamed thinking without its newline
        self.answer_open = False  # the answer's last line has no newline yet and stands where people read it
        self.shared = False  # whether the answer goes into the same file or pipe

    def notice(self, text: str) -> None:
        """A line that --quiet hides."""
        if self.level >= 0:
            self.line(text)

    def timing(self, text: str) -> None:
        """A line of --verbose."""
        if self.level >= 1:
            self.line(text)

    def line(self, text: str) -> None:
        self.clear()
        self.end_line()
        self._write((visible_line(text) if self.terminal else text) + "\n")

    def end_line(self) -> None:
        """Begin a new line where thinking, or an answer on the same terminal or in the same file, stands without its newline."""
        answer = self.answer_open and (self.terminal or self.shared)  # in a file of their own these lines do not meet the answer
        if self._open_line or answer:
            self._write("\n")
        self._open_line = False
        if answer:
            self.answer_open = False

    def thinking(self, text: str) -> None:
        """Streamed thinking, dim on a terminal."""
        if not text:
            return
        self.clear()
        if self.answer_open:
            self.end_line()
        shown = visible(text) if self.terminal else text
        self._write(f"\x1b[2m{shown}\x1b[0m" if self.color else shown)
        self._open_line = not text.endswith("\n")

    def status(self, text: str, final: bool = False) -> None:
        """A progress line: drawn over itself on a terminal, else one line at most four times a second."""
        now = time.monotonic()
        if not self.progress or (not final and now - self._last < _SLOW_S):
            return
        self._last = now
        if self.terminal:
            self._write("\r" + text + " " * max(0, len(self._line) - len(text)))
            self._line = text
        else:
            self._write(text + "\n")

    def clear(self) -> None:
        """Take the progress line away."""
        if self._line:
            self._write("\r" + " " * len(self._line) + "\r")
            self._line = ""

    def _write(self, text: str) -> None:
        if self.stream is None:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):
            self.stream = None  # nobody reads it any more; the answer matters more


def event_fields(event: Any) -> dict[str, Any] | None:
    """The fields of one event line (without v, t and turn), None for an event that scripts do not see."""
    match event:
        case ev.Started():
            return {
                "type": "start", "version": __version__, "pid": os.getpid(), "conversation": event.conversation_id, "parent": event.parent_id,
                "build": event.build.as_dict() if event.build else None, "params": event.params,
                "engine": {"device": event.device, "mlx": event.mlx},
            }  # fmt: skip
        case ev.Loading():
            return {"type": "load", "stage": event.stage, "done": event.done, "total": event.total, "unit": event.unit}
        case ev.Residency():
            tables = [{"name": t.name, "state": t.state, "sampled": t.sampled, "resident": t.resident} for t in event.tables]
            return {"type": "residency", "tables": tables}
        case ev.Prefill():
            return {"type": "prefill", "cached": event.cached, "done": event.done, "total": event.total, "tok_s": event.tok_s}
        case ev.Piece():
            return {"type": "delta", "channel": event.channel, "text": event.text, "tokens": len(event.ids)}
        case ev.DraftRound():
            return {"type": "draft", "depth": event.depth, "proposed": event.proposed, "accepted": event.accepted}
        case ev.Warned():
            return {"type": "warning", "code": event.code, "message": event.message}
        case ev.Saved():
            m = event.message
            return {"type": "message", "id": m.id, "role": m.role, "text": m.text, "thinking": m.thinking or "", "finish": m.finish}
    return None


def done_fields(finished: ev.Finished, exit_code: int) -> dict[str, Any]:
    return {
        "type": "done", "finish": finished.finish, "conversation": finished.conversation_id,
        "message_id": finished.message.id if finished.message is not None else None, "ids_hash": finished.ids_hash,
        "usage": finished.usage, "timing": finished.timing, "draft": finished.draft, "residency": finished.residency, "exit_code": exit_code,
    }  # fmt: skip


def error_fields(failed: ev.Failed, exit_code: int) -> dict[str, Any]:
    return {
        "type": "error", "code": failed.code, "message": failed.message, "hint": failed.hint, "exit_code": exit_code,
        "partial": failed.partial, "conversation": failed.conversation_id,
    }  # fmt: skip


class Sink(ABC):
    """Takes the events of every turn in order, then exactly one of `done` and `failed`."""

    def __init__(self, out: Out, stderr: Stderr, clock: Callable[[], float]):
        self.out = out
        self.stderr = stderr
        self.clock = clock  # seconds since the program started
        self.turn = 0

    text = False  # whether people read it
    lacking = False  # whether an answer had no block that --extract could write

    @abstractmethod
    def event(self, event: Any) -> None: ...

    def turn_done(self) -> None:  # noqa: B027 - most sinks have nothing to do there
        """The end of one answer, when all went well."""

    @abstractmethod
    def done(self, turns: list[ev.Finished], exit_code: int, extra: dict[str, Any]) -> None:
        """turns: one per prompt; extra: fields of --dry-run and --load-only."""

    @abstractmethod
    def failed(self, failed: ev.Failed, exit_code: int) -> None: ...

    def _line(self, fields: dict[str, Any]) -> str:
        head = {"v": SCHEMA, "type": fields["type"], "t": round(self.clock(), 4), "turn": self.turn}
        return json_text(head | fields) + "\n"


class TextSink(Sink):
    """The answers, each ended by a newline. stream: as they are produced; extract: None or the language ("" any) of a block.

    strict: an answer without such a block is not written; otherwise it is written whole, with a warning.
    """

    text = True

    def __init__(
        self, out: Out, stderr: Stderr, clock: Callable[[], float], *, stream: bool, show_thinking: bool, extract: str | None, strict: bool = False
    ):
        super().__init__(out, stderr, clock)
        self.strict = strict
        self.stream = stream and extract is None  # a block is known when the answer is complete
        self.show_thinking = show_thinking
        self.extract = extract
        stderr.shared = out.same_as(stderr.stream)
        self._met = out.terminal or stderr.shared  # whether lines for people may stand between its pieces
        self._answer = ""
        self._ends_line = True

    def event(self, event: Any) -> None:
        if not isinstance(event, ev.Piece):
            return
        if event.channel == "thinking":
            if self.show_thinking:
                self.stderr.thinking(event.text)
            return
        self._answer += event.text
        if self.stream:
            self._put(event.text)

    def turn_done(self) -> None:
        text, self._answer = self._answer, ""
        if self.extract is not None:
            block = first_block(text, self.extract)
            if block is None:
                wanted = f"{self.extract} block" if self.extract else "fenced block"
                self.lacking = True
                written = "nothing was written (--strict)" if self.strict else "the whole answer was written"
                self.stderr.notice(f"warning: the answer has no {wanted}; {written}.")
                if self.strict:
                    return
            text = text if block is None else block
        if not self.stream:
            self._put(text)
        if not self._ends_line and (self.stderr.answer_open or not self._met):
            self._put("\n")

    def done(self, turns: list[ev.Finished], exit_code: int, extra: dict[str, Any]) -> None:
        for name, value in extra.items():
            if value == "dry_run" or (name == "conversation" and value is None):
                continue  # for programs; people asked for it
            self._put(f"{name} {value if value is not None else '-'}\n")

    def failed(self, failed: ev.Failed, exit_code: int) -> None:
        if self._answer and self.extract is None:
            self.turn_done()
        self.stderr.line(f"dsv41chat: {failed.message}" + (f"  Try: {failed.hint}" if failed.hint else ""))

    def _put(self, text: str) -> None:
        if text:
            self.stderr.clear()
            if self._met and not self.stderr.answer_open:
                self.stderr.end_line()
            self._ends_line = text.endswith("\n")
            self.stderr.answer_open = self._met and not self._ends_line
            self.out.write(visible(text) if self.out.terminal else text)


class JsonSink(Sink):
    """One object, at the end."""

    def __init__(self, out: Out, stderr: Stderr, clock: Callable[[], float]):
        super().__init__(out, stderr, clock)
        self._start: dict[str, Any] = {"version": __version__, "conversation": None, "build": None, "params": None}

    def event(self, event: Any) -> None:
        if isinstance(event, ev.Started):
            fields = event_fields(event) or {}
            self._start = {name: fields[name] for name in ("version", "conversation", "build", "params", "engine")}
        elif isinstance(event, ev.Ready):
            self._start |= {"params": event.params, "build": event.build.as_dict()}

    def done(self, turns: list[ev.Finished], exit_code: int, extra: dict[str, Any]) -> None:
        fields: dict[str, Any] = {"type": "done"}
        if turns:
            fields = done_fields(turns[-1], exit_code) | {"text": turns[-1].text, "thinking": turns[-1].thinking}
        if len(turns) > 1:
            fields["turns"] = [done_fields(turn, 0) | {"text": turn.text, "thinking": turn.thinking} for turn in turns]
        self.out.write(self._line(self._start | fields | extra | {"exit_code": exit_code}))

    def failed(self, failed: ev.Failed, exit_code: int) -> None:
        fields = error_fields(failed, exit_code)
        if fields["conversation"] is None:
            del fields["conversation"]
        self.out.write(self._line(self._start | fields))


class StreamSink(Sink):
    """One object per line: `start` first, `done` or `error` last."""

    def __init__(self, out: Out, stderr: Stderr, clock: Callable[[], float], *, drafts: bool):
        super().__init__(out, stderr, clock)
        self.drafts = drafts
        self._started = False
        self._slow: dict[str, float] = {}

    def event(self, event: Any) -> None:
        if isinstance(event, ev.DraftRound) and not self.drafts:
            return
        fields = event_fields(event)
        if fields is None or (fields["type"] == "start" and self._started):
            return
        if fields["type"] in ("load", "prefill") and fields["done"] < fields["total"]:
            now = self.clock()
            if now - self._slow.get(fields["type"], -1.0) < _SLOW_S:
                return
            self._slow[fields["type"]] = now
        self._begin(fields)
        self.out.write(self._line(fields))

    def done(self, turns: list[ev.Finished], exit_code: int, extra: dict[str, Any]) -> None:
        fields = done_fields(turns[-1], exit_code) if turns else {"type": "done", "exit_code": exit_code}
        if len(turns) > 1:
            fields["turns"] = [done_fields(turn, 0) for turn in turns]
        self._begin(fields)
        self.out.write(self._line(fields | extra))

    def failed(self, failed: ev.Failed, exit_code: int) -> None:
        fields = error_fields(failed, exit_code)
        self._begin(fields)
        self.out.write(self._line(fields))

    def _begin(self, fields: dict[str, Any]) -> None:
        """A run that failed before its first turn still begins with a start line."""
        if not self._started and fields["type"] != "start":
            self.out.write(self._line(event_fields(ev.Started(fields.get("conversation"), None, None, {}, None, None)) or {}))
        self._started = True


def first_block(text: str, language: str = "") -> str | None:
    """The inside of the first fenced block (of `language`, if given), with its last newline; None if there is none."""
    for match in re.finditer(r"^ {0,3}(`{3,}|~{3,})[ \t]*([^\n`]*)\n(.*?)^ {0,3}\1[`~]*[ \t]*$", text, re.MULTILINE | re.DOTALL):
        info = match[2].split()
        if not language or (info and info[0].lower() == language.lower()):
            return match[3]
    return None


def show_progress(stderr: Stderr, event: Any) -> None:
    """Loading and prefill as a progress line; notices and warnings as lines."""
    match event:
        case ev.Loading():
            percent = 100 * event.done // max(event.total, 1)
            stderr.status(f"loading {event.stage} {percent}%  {event.done:,}/{event.total:,} {event.unit}", event.done >= event.total)
        case ev.Prefill():
            stderr.status(f"prefill {event.done:,}/{event.total:,}  {event.tok_s:,.0f} tok/s", event.done >= event.total)
        case ev.Resuming():
            stderr.status(f"resuming {event.tokens:,} tokens", True)
        case ev.Piece():
            stderr.clear()
        case ev.Warned():
            stderr.notice(f"warning: {event.message}")
        case ev.Noticed():
            stderr.notice(event.message)


def receipt(finished: ev.Finished) -> str:
    """The numbers of one answer in a line."""
    usage, timing = finished.usage, finished.timing
    parts = (
        f"{usage.get('completion_tokens', 0):,} tokens ({usage.get('thinking_tokens', 0):,} thinking)",
        f"{timing.get('decode_tok_s', 0.0):.1f} tok/s",
        f"first token {timing.get('first_token_s', 0.0):.2f} s",
        f"cached {usage.get('cached_tokens', 0):,}, prefilled {usage.get('prefilled_tokens', 0):,}",
        f"load {timing.get('load_s', 0.0):.2f} s, total {timing.get('total_s', 0.0):.2f} s",
        f"seed {finished.seed}, finish {finished.finish}",
    )
    return ", ".join(parts)
