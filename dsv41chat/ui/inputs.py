"""What the user's message is made of: attached files, piped input, prompt texts."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from dsv41chat.engine.errors import ContextFull
from dsv41chat.ui.output import UsageError

# Bytes of one prompt text. A context of a million tokens would need 64 bytes per token to hold more; real text has about four.
MAX_TEXT_BYTES = 64 << 20
_READ_BYTES = 1 << 20
# What no encoding of text has in it: control bytes other than the white space, backspace and escape that programs write.
_CONTROLS = re.compile(rb"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]")


def fenced(name: str, text: str) -> str:
    """An attached file: its name, then its text in a fence longer than any run of backticks in it."""
    # The search through a large text holds all other threads up.
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0) if "`" in text else 0
    fence = "`" * max(3, longest + 1)
    return f"File: {name}\n{fence}\n{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{fence}"


def line_count(text: str) -> int:
    """Lines of a text. The newline that ends the last one begins no other."""
    return text.count("\n") + (not text.endswith("\n") and text != "")


def decode(data: bytes, what: str, remedy: str = "choose a text file") -> str:
    """UTF-8 text, without the byte order mark that some programs begin it with. remedy: of what is not text.

    Raises UsageError for what is not text at all, and with the place of the first byte that is no UTF-8.
    """
    if b"\0" in data:
        raise UsageError(f"{what} is not text (it holds NUL bytes).", hint=remedy)
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        where = f"byte {error.start}: 0x{data[error.start]:02x}"
    if _CONTROLS.search(data):
        raise UsageError(f"{what} is not text ({where}).", hint=remedy)
    raise UsageError(f"{what} is not valid UTF-8 ({where}).", hint="convert it with iconv -t UTF-8")


def read_bytes(file: BinaryIO, limit: int | None, note: Callable[[int], None] = lambda done: None) -> bytes | None:
    """What is left of a file, or None when that is more than `limit` bytes; of a file without an end too, no more than that is read.

    Read in pieces, so that a signal is heard between them. limit None: everything. note(bytes read): after each piece.
    """
    pieces, left, done = [], limit, 0
    while piece := file.read(_READ_BYTES if left is None else min(_READ_BYTES, left + 1)):
        pieces.append(piece)
        done += len(piece)
        note(done)
        if left is not None:
            left -= len(piece)
            if left < 0:
                return None
    return b"".join(pieces)


def _too_large(what: str, limit: int) -> ContextFull:
    return ContextFull(f"{what} does not fit into a context: it has more than {limit:,} bytes, and no more are read.", hint="a shorter text")


def read_text(path: str, what: str, *, limit: int | None = MAX_TEXT_BYTES) -> str:
    """The text of a file. limit: bytes, None for any size. Raises UsageError, and ContextFull for more than `limit`."""
    try:
        with open(Path(path).expanduser(), "rb") as file:
            data = read_bytes(file, limit)
        if data is None:
            raise _too_large(what, limit)
        return decode(data, what)
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror}.") from error


def read_stdin(*, limit: int | None = MAX_TEXT_BYTES) -> str | None:
    """Everything piped in, decoded, without its final newline; None if standard input is closed or a terminal.

    limit: bytes, None for any size. Raises UsageError, and ContextFull for more than `limit`.
    """
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return None
    try:
        data = read_bytes(sys.stdin.buffer, limit)
    except OSError as error:
        raise UsageError(f"Standard input cannot be read: {error.strerror}.") from error
    if data is None:
        raise _too_large("Standard input", limit)
    text = decode(data, "Standard input", "pipe text")
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def user_messages(prompts: Sequence[str], files: Sequence[str], stdin: str | None) -> list[str]:
    """The messages of the turns to run, in order. Files and piped input belong to the first.

    files: paths, "-" is the piped input. Raises UsageError for text that is not Unicode and for an empty message, ContextFull for a
    file that no context holds.
    """
    parts = []
    for path in files:
        if path == "-":
            if stdin is None:
                raise UsageError("-f - needs piped input.")
            parts.append(fenced("stdin", stdin))
        else:
            parts.append(fenced(Path(path).name, read_text(path, path)))
    if stdin and "-" not in files:
        parts.append(stdin)
    prompts = list(prompts)
    first = [*parts, *prompts[:1]]
    messages = ["\n\n".join(part for part in first if part), *prompts[1:]]
    for message in messages:
        if not message.strip():
            raise UsageError("The message is empty.", hint='dsv41chat --headless "your question"')
        try:
            message.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError("The prompt is not valid UTF-8.") from None
    return messages
