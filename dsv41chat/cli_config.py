"""`dsv41chat config`: what is set, where it comes from, and setting it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsv41chat.config_file import init_config, problems, set_config, split_name, toml, unset_config
from dsv41chat.settings import KEYS, ConfigError, check_theme, config_path


def add_commands(commands: Any) -> None:
    show = commands.add_parser("show", help="every value", epilog="example: dsv41chat config show --origin")
    show.add_argument("--origin", action="store_true", help="where each value comes from: default, file or env")
    show.set_defaults(run=_show)
    # These two must work while the file cannot be read: they are how it is found and begun.
    path = commands.add_parser("path", help="where the file is", epilog="example: $EDITOR $(dsv41chat config path)")
    path.set_defaults(run=_path, needs_settings=False)
    init = commands.add_parser("init", help="write a first file, every line commented out", epilog="example: dsv41chat config init")
    init.set_defaults(run=_init, needs_settings=False)
    change = commands.add_parser("set", help="set one key", epilog="example: dsv41chat config set chat.effort low")
    change.add_argument("key", metavar="KEY")
    change.add_argument("value", metavar="VALUE")
    change.set_defaults(run=_set, needs_settings=False)
    get = commands.add_parser("get", help="one value", epilog="example: dsv41chat config get chat.effort")
    get.add_argument("key", metavar="KEY")
    get.set_defaults(run=_get)
    unset = commands.add_parser("unset", help="take one key out of the file", epilog="example: dsv41chat config unset chat.effort")
    unset.add_argument("key", metavar="KEY")
    unset.set_defaults(run=_unset, needs_settings=False)


def _show(context: Any) -> int:
    settings = context.settings
    values = [(name, settings.get(name), settings.origin(name)) for name in KEYS]
    values += [(f"keys.{name}", value, "file") for name, value in settings.keys.items()]
    if context.args.json:
        context.json({name: {"value": value, "origin": origin} if context.args.origin else value for name, value, origin in values})
    elif context.args.origin:
        context.table(("origin", "key"), [(origin, f"{name} = {toml(value)}") for name, value, origin in values])
        words = "a build's own defaults (models info NAME) stand before what is listed as default and after a file, env or flag"
        context.stderr.notice(f"note: {words}; F8 shows what counts in a conversation.")
    else:
        for name, value, _ in values:
            context.print(f"{name} = {toml(value)}")
    try:
        check_theme(settings)
    except ConfigError as error:
        context.stderr.notice(f"warning: {error}  Try: {error.hint}")
    return 0


def _path(context: Any) -> int:
    path = config_path(context.args.config)
    context.json({"path": str(path), "exists": path.is_file()}) if context.args.json else context.print(str(path))
    return 0


def _init(context: Any) -> int:
    path = config_path(context.args.config)
    init_config(path)
    context.json({"path": str(path)}) if context.args.json else context.print(str(path))
    return 0


def _set(context: Any) -> int:
    path = config_path(context.args.config)
    value = set_config(path, context.args.key, context.args.value)
    if context.args.json:
        context.json({"path": str(path), "key": context.args.key, "value": value})
        return 0
    context.stderr.notice(f"{context.args.key} = {toml(value)} in {path}")
    _say_left(context, path)
    if KEYS.get(context.args.key) is not None and KEYS[context.args.key].inert:
        context.stderr.notice(f"{context.args.key} has no effect in this version.")
    if context.args.key == "engine.routes" and value not in ("auto", "stock"):
        from dsv41chat.ui.builds import route_problem

        if (problem := route_problem(value)) is not None:
            context.stderr.notice(f"warning: no build can be loaded with it on this machine: {problem}  Try: {problem.hint}")
    return 0


def _get(context: Any) -> int:
    name, settings = context.args.key, context.settings
    section, field = split_name(name)
    value = settings.keys.get(field, "") if section == "keys" else settings.get(name)
    origin = ("file" if field in settings.keys else "default") if section == "keys" else settings.origin(name)
    context.json({"key": name, "value": value, "origin": origin}) if context.args.json else context.print(toml(value))
    return 0


def _unset(context: Any) -> int:
    path = config_path(context.args.config)
    name = context.args.key
    was_there = unset_config(path, name)
    if context.args.json:
        context.json({"path": str(path), "key": name, "removed": was_there})
    else:
        now = f": {toml(KEYS[name].default)} counts again" if name in KEYS else ""
        context.stderr.notice(f"{name} {'is gone from' if was_there else 'was not in'} {path}{now if was_there else ''}")
        _say_left(context, path)
    return 0


def _say_left(context: Any, path: Path) -> None:
    """What is still wrong in the file after a change."""
    for text in problems(path):
        context.stderr.notice(f"still wrong in it: {text}")
