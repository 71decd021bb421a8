"""Slash commands of the composer and of the line mode: names, arguments, completion. What they do is the screen's."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from dsv41chat.settings import CONVERSATION_KEYS, EFFORTS, KEYS, TURN_KEYS, parse_text


@dataclass(frozen=True)
class Command:
    """arguments: how they are written in the help. choices: fixed completions of the first argument."""

    name: str
    arguments: str
    help: str
    choices: tuple[str, ...] = ()


COMMANDS = (
    Command("new", "", "starts an empty conversation"),
    Command("open", "[ID or TITLE]", "opens a conversation; without a name the list"),
    Command("build", "[NAME]", "switches the build; without a name the menu"),
    Command("system", "TEXT", "sets the system prompt of this conversation"),
    Command("effort", "off|low|high|max", "sets the thinking effort of this conversation", EFFORTS),
    Command("set", "NAME VALUE", "sets a sampling option of this conversation", CONVERSATION_KEYS),
    Command("copy", "[N]", "copies the last answer, or its code block N"),
    Command("export", "[md|json|jsonl|text] [FILE]", "writes this conversation to a file", ("md", "json", "jsonl", "text")),
    Command("retry", "", "answers the last question again"),
    Command("continue", "", "goes on from the kept text of an answer that was stopped"),
    Command("branch", "[N]", "lists or shows the branches at the last answer"),
    Command("read", "FILE", "attaches a text file"),
    Command("pin", "", "pins this conversation, or no longer"),
    Command("stats", "", "shows the numbers of the last answer"),
    Command("help", "", "shows keys and commands"),
    Command("quit", "", "leaves the program"),
)
# What people type for these, from other programs.
OTHER_WORDS = {
    "exit": "quit", "q": "quit", "bye": "quit", "regenerate": "retry", "again": "retry", "redo": "retry", "model": "build", "models": "build",
    "clear": "new", "reset": "new", "list": "open", "conversations": "open", "history": "open", "resume": "open", "file": "read", "attach": "read",
    "save": "export", "commands": "help", "keys": "help", "think": "effort", "thinking": "effort", "temperature": "set", "prompt": "system",
    "usage": "stats", "fork": "branch", "branches": "branch", "go": "continue", "more": "continue",
}  # fmt: skip
NAMES = {command.name: command for command in COMMANDS}
MAX_FILE_BYTES = 16 << 20


class CommandError(Exception):
    """A command that cannot be carried out; the text stays in the composer."""


def parse(text: str) -> tuple[Command, str]:
    """(command, rest of the line) of a text that begins with one slash. Raises CommandError."""
    name, _, rest = text[1:].strip().partition(" ")
    command = NAMES.get(name)
    if command is None:
        near = nearest(name)
        hint = f" Did you mean /{near}?" if near else " /help lists all."
        raise CommandError(f"There is no command /{name}.{hint} (Write // to send a text that begins with a slash.)")
    return command, rest.strip()


def nearest(name: str) -> str | None:
    """The command that was meant by a name that is none; None when nothing is near."""
    name = name.lower()
    if name in NAMES:
        return name
    begun = [known for known in NAMES if name and known.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    near = get_close_matches(name, [*NAMES, *OTHER_WORDS], n=1)
    return OTHER_WORDS.get(near[0], near[0]) if near else None


def usage(command: Command) -> str:
    """"/export [FORMAT] [FILE]": how a command is written."""
    return f"/{command.name} {command.arguments}".rstrip()


def hint(text: str) -> str:
    """What a line that begins with one slash may become: the commands that fit, or the only one with its sentence. Empty for none."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return ""
    name, space, _ = text[1:].partition(" ")
    found = [command for command in COMMANDS if (command.name == name if space else command.name.startswith(name))]
    if len(found) == 1:
        return f"{usage(found[0])}: {found[0].help}"
    return "  ".join(f"/{command.name}" for command in found)


def parse_option(rest: str) -> tuple[str, object]:
    """("temperature", 0.7) of "temperature 0.7", checked like a setting. Raises CommandError."""
    name, _, text = rest.partition(" ")
    if name not in CONVERSATION_KEYS:
        raise CommandError(f"/set knows {', '.join(CONVERSATION_KEYS)}.")
    text = text.strip()
    try:
        if name == "seed":
            return name, None if text == "random" else int(text)
        return name, parse_text(KEYS[TURN_KEYS[name]], text)
    except ValueError as error:
        expected = "a whole number, or random" if name == "seed" else str(error)
        raise CommandError(f"{name} must be {expected}, not {text!r}.") from None


def complete(text: str, builds: Callable[[], Iterable[str]] = tuple) -> list[str]:
    """Full lines that `text` (a line that begins with a slash) can become."""
    name, space, rest = text[1:].partition(" ")
    if not space:
        return [f"/{command.name}{' ' if command.arguments else ''}" for command in COMMANDS if command.name.startswith(name)]
    if name == "build":
        return [f"/build {build}" for build in builds() if build.startswith(rest)]
    if name == "read":
        return [f"/read {path}" for path in complete_path(rest)]
    choices = NAMES[name].choices if name in NAMES else ()
    return [f"/{name} {choice}" for choice in choices if choice.startswith(rest)]


def complete_path(text: str) -> list[str]:
    """Paths that begin with `text`, folders with a slash at the end. Hidden names only when asked for."""
    folder, start = os.path.split(text)
    try:
        names = sorted(os.listdir(Path(folder or ".").expanduser()))
    except OSError:
        return []
    found = []
    for name in names:
        if name.startswith(start) and (start.startswith(".") or not name.startswith(".")):
            path = os.path.join(folder, name)
            found.append(path + "/" if Path(path).expanduser().is_dir() else path)
    return found


def common(lines: list[str]) -> str:
    """The longest beginning that all lines share."""
    return os.path.commonprefix(lines)


def attachment_path(argument: str) -> Path:
    """The file that `/read` names: one quoted or escaped word, else all of it."""
    try:
        words = shlex.split(argument)
    except ValueError:
        words = [argument]
    return Path(words[0] if len(words) == 1 else argument).expanduser()


def read_attachment(argument: str, note: Callable[[int, int], None] = lambda done, total: None) -> tuple[str, str]:
    """(name, text) of a file for the message. note(bytes read, bytes in all): called between the pieces; what it raises ends the reading.

    Raises CommandError with the reason.
    """
    from dsv41chat.ui.inputs import decode, read_bytes
    from dsv41chat.ui.output import UsageError

    path = attachment_path(argument)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # Opening a pipe may wait for ever, and a device may have no end.
            raise CommandError(f"{path} is not a file.")
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            data = read_bytes(file, MAX_FILE_BYTES, lambda done: note(done, total))
        if data is None:
            raise CommandError(f"{path} is larger than 16 MiB ({MAX_FILE_BYTES:,} bytes).")
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        return path.name, decode(data, str(path))
    except UsageError as error:
        raise CommandError(str(error)) from None

