"""Writing the config file: a first one with every key commented out, and single keys set without losing comments."""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv41chat.settings import KEYS, SECTIONS, ConfigError, did_you_mean, near_keys, parse_text, scan_config


def template() -> str:
    """The text of a new config file. Every line is a comment, so it masks no default of a pack."""
    lines = [
        "# dsv41chat: remove the # before a line to set a value.",
        "# Order, later wins: default, pack, this file, environment, conversation, command line.",
        "",
    ]
    for section in SECTIONS:
        lines.append(f"[{section}]")
        lines += [f"# {key.field} = {toml(key.default)}".ljust(38) + f"# {key.doc}" for key in KEYS.values() if key.section == section]
        if section == "keys":
            lines.append('# "chat.regenerate" = "ctrl+r"')
        lines.append("")
    return "\n".join(lines)


def toml(value: Any) -> str:
    """`value` as TOML source, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A JSON string is a valid basic TOML string, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return str(value)


def init_config(path: Path) -> None:
    """Write the template. Raises ConfigError if the file exists."""
    if path.exists():
        raise ConfigError(f"{path} exists already; it is not overwritten.", hint="dsv41chat config set KEY VALUE")
    write_private(path, template())


def set_config(path: Path, name: str, text: str) -> Any:
    """Set one key in the file, from plain text; every other line stays, wrong ones too. Returns the typed value. Raises ConfigError."""
    section, field = split_name(name)
    value: Any = text
    if section != "keys":
        try:
            value = parse_text(KEYS[name], text)
        except ValueError as error:
            raise ConfigError(f"{name} must be {error}, not {text!r}.", hint="dsv41chat config show") from None
    if name == "ui.theme":
        # Which themes there are depends on Textual, so no table of settings can list them.
        from dsv41chat.ui.themes import check

        check(text)
    old = _read(path)
    rest = _without(old, section, field)
    new = _replace(old, section, field, toml(value))
    after = _reread(new, old, path, name)
    own = after.keymap.get(field) if section == "keys" else after.values.get(name)
    if own is None or after.less(name) != _scan(old if _parses(old) or not _parses(rest) else rest, path).less(name):
        raise _by_hand(path, name)
    write_private(path, new)
    return value


def unset_config(path: Path, name: str) -> bool:
    """Take one key out of the file, so that its default counts again; every other line stays. Returns whether it was there.

    The header of its section goes with the last line below it.
    A name that is no setting may go too, where the file has it. Raises ConfigError.
    """
    old = _read(path)
    section, _, field = name.partition(".")
    new = _without(old, section, field) if field else old
    if new == old:
        split_name(name)
        if _scan(old, path).has(name):
            raise _by_hand(path, name)
        return False
    after = _reread(new, old, path, name)
    # A line that is no TOML hides all others: then nothing can be compared, and taking it out is what makes the file one again.
    if after.has(name) or (_parses(old) and after != _scan(old, path).less(name)):
        raise _by_hand(path, name)
    tidy = _without_header(new, section)
    # What looks like a header may stand inside a text.
    write_private(path, tidy if _parses(tidy) and _scan(tidy, path) == after else new)
    return True


def problems(path: Path) -> list[str]:
    """What is wrong in the file, in clauses that begin with the line; nothing where it cannot be read."""
    try:
        return [problem.text for problem in scan_config(_read(path), path)[2]]
    except ConfigError:
        return []


def split_name(name: str) -> tuple[str, str]:
    """(section, key) of a name that is a setting, or a user key `keys.ACTION`. Raises ConfigError."""
    section, _, field = name.partition(".")
    if name not in KEYS and not (section == "keys" and field):
        raise ConfigError(f"Unknown key {name}{did_you_mean(near_keys(name))}.", hint="dsv41chat config show")
    return section, field


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


@dataclass(frozen=True)
class _Scan:
    """What a text sets: values by key, user keys, and the names of what is wrong."""

    values: dict[str, Any]
    keymap: dict[str, str]
    wrong: frozenset[str]

    def has(self, name: str) -> bool:
        section, _, field = name.partition(".")
        return name in self.values or name in self.wrong or (section == "keys" and field in self.keymap)

    def less(self, name: str) -> _Scan:
        """The same without `name`."""
        keymap = {key: value for key, value in self.keymap.items() if f"keys.{key}" != name}
        return _Scan({key: value for key, value in self.values.items() if key != name}, keymap, self.wrong - {name})


def _scan(text: str, path: Path) -> _Scan:
    values, keymap, wrong = scan_config(text, path)
    return _Scan(values, keymap, frozenset(problem.name for problem in wrong))


def _reread(text: str, before: str, path: Path, name: str) -> _Scan:
    """What a changed text sets. Raises ConfigError, with the place in the file as it is where that was no TOML before."""
    try:
        return _scan(text, path)
    except ConfigError as error:
        _scan(before, path)
        raise _by_hand(path, name) from error


def _without(text: str, section: str, field: str) -> str:
    """The text without the lines that set one key; the text itself where it is not found."""
    lines = text.splitlines()
    if (place := _assignment(lines, section, field)) is None:
        return text
    del lines[place[0] : place[1] + 1]
    return "".join(f"{line}\n" for line in lines)


def _without_header(text: str, section: str) -> str:
    """The text without the header of a section that holds nothing, not even a comment."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if re.fullmatch(rf"\s*\[\s*{re.escape(section)}\s*\]\s*", line):
            end = next((n for n in range(i + 1, len(lines)) if lines[n].strip()), None)
            if end is None:
                return "".join(f"{line}\n" for line in lines[:i]).rstrip("\n") + ("\n" if any(line.strip() for line in lines[:i]) else "")
            if lines[end].lstrip().startswith("["):
                return "".join(f"{line}\n" for line in lines[:i] + lines[end:])
    return text


def _by_hand(path: Path, name: str) -> ConfigError:
    return ConfigError(f"{path} is written in a form that cannot be edited by line; change {name} by hand.")


def _assignment(lines: list[str], section: str, field: str) -> tuple[int, int] | None:
    """The first and the last line of `field = ...` in its section, None where it is not set."""
    current = ""
    for i, line in enumerate(lines):
        header = re.match(r"\s*\[\s*([A-Za-z0-9_-]+)\s*\]", line)
        if header:
            current = header[1]
        elif current == section or (not current and re.match(rf"\s*{re.escape(section)}\s*\.", line)):
            name = re.escape(field) if current == section else rf"{re.escape(section)}\s*\.\s*{re.escape(field)}"
            if re.match(rf"""\s*["']?{name}["']?\s*=""", line):
                # A value that never ends is wrong on its own line.
                return i, next((last for last in range(i, len(lines)) if _parses("\n".join(lines[i : last + 1]))), i)
    return None


def _replace(text: str, section: str, field: str, source: str) -> str:
    lines = text.splitlines()
    if (place := _assignment(lines, section, field)) is not None:
        first, last = place
        tail = re.search(r"\s+#[^\"']*$", lines[last])
        lines[first : last + 1] = [lines[first][: lines[first].index("=")].rstrip() + f" = {source}" + (tail[0] if tail else "")]
        return "\n".join(lines) + "\n"
    shown = field if re.fullmatch(r"[A-Za-z0-9_-]+", field) else json.dumps(field)
    current, end, comment = "", None, None
    for i, line in enumerate(lines):
        header = re.match(r"\s*\[\s*([A-Za-z0-9_-]+)\s*\]", line)
        if header:
            current = header[1]
        elif current == section and re.match(rf"""\s*#\s*["']?{re.escape(field)}["']?\s*=""", line):
            comment = i
        if current == section and (line.strip() or end is None):
            end = i
    new = f"{shown} = {source}"
    if comment is not None:
        lines.insert(comment + 1, new)
    elif end is not None:
        lines.insert(end + 1, new)
    else:
        lines += ([""] if lines and lines[-1].strip() else []) + [f"[{section}]", new]
    return "\n".join(lines) + "\n"


def _parses(source: str) -> bool:
    try:
        tomllib.loads(source)
    except tomllib.TOMLDecodeError:
        return False
    return True


def write_private(path: Path, text: str) -> None:
    """Write a text file through a temporary name, readable by its owner only. Raises ConfigError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.") from error
