"""Writing the config file: a first one with every key commented out, and single keys set without losing comments."""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from dsv41chat.settings import KEYS, SECTIONS, ConfigError, near, parse_text, read_config


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
    """Set one key in the file, from plain text; every other line stays. Returns the typed value. Raises ConfigError."""
    section, _, field = name.partition(".")
    if section == "keys" and field:
        value: Any = text
    elif name in KEYS:
        try:
            value = parse_text(KEYS[name], text)
        except ValueError as error:
            raise ConfigError(f"{name} must be {error}, not {text!r}.", hint="dsv41chat config show") from None
    else:
        raise ConfigError(f"Unknown key {name}{near(name, KEYS)}.", hint="dsv41chat config show")
    try:
        old = path.read_text("utf-8")
    except FileNotFoundError:
        old = ""
    before, keymap, _ = read_config(old, path)
    new = _replace(old, section, field, toml(value))
    try:
        after, new_keymap, _ = read_config(new, path)
    except ConfigError as error:
        raise ConfigError(f"{path} is written in a form that cannot be edited by line; set {name} by hand.") from error
    if section == "keys":
        kept = after == before and new_keymap == keymap | {field: value}
    else:
        kept = after == before | {name: after.get(name)} and name in after and new_keymap == keymap
    if not kept or tomllib.loads(new).keys() < tomllib.loads(old).keys():
        raise ConfigError(f"{path} is written in a form that cannot be edited by line; set {name} by hand.")
    write_private(path, new)
    return value


def _replace(text: str, section: str, field: str, source: str) -> str:
    lines = text.splitlines()
    shown = field if re.fullmatch(r"[A-Za-z0-9_-]+", field) else json.dumps(field)
    current, end, comment = "", None, None
    for i, line in enumerate(lines):
        header = re.match(r"\s*\[\s*([A-Za-z0-9_-]+)\s*\]", line)
        if header:
            current = header[1]
        elif current == section or (not current and re.match(rf"\s*{section}\s*\.", line)):
            name = re.escape(field) if current == section else rf"{section}\s*\.\s*{re.escape(field)}"
            if re.match(rf"""\s*["']?{name}["']?\s*=""", line):
                last = i
                while not _complete("\n".join(lines[i : last + 1])) and last + 1 < len(lines):
                    last += 1
                tail = re.search(r"\s+#[^\"']*$", lines[last])
                lines[i : last + 1] = [line[: line.index("=")].rstrip() + f" = {source}" + (tail[0] if tail else "")]
                return "\n".join(lines) + "\n"
            if current == section and re.match(rf"""\s*#\s*["']?{re.escape(field)}["']?\s*=""", line):
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


def _complete(source: str) -> bool:
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
