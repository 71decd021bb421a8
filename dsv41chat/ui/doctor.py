"""`dsv41chat doctor`: this machine and this installation, line by line. Nothing is loaded, written or made; no part stops the others."""

from __future__ import annotations

import locale
import os
import platform
import shutil
import stat
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv41chat import __version__
from dsv41chat.engine.checks import Line
from dsv41chat.engine.errors import EngineError
from dsv41chat.settings import ConfigError, check_theme
from dsv41chat.store import DATABASE, Store, StoreError
from dsv41chat.store.errors import damaged
from dsv41chat.store.files import mounted_readonly
from dsv41chat.ui.clipboard import OSC_LIMIT, routes

if TYPE_CHECKING:
    from dsv41chat.settings import Settings
    from dsv41chat.ui.host import EngineHost

GB = 1e9
LOW_DISK_BYTES = 2 << 30
NO_DISK_BYTES = 1 << 20  # a message and the journal of its writing need some pages each
READ_ONLY_MOUNT = "its file system is mounted read-only"
REMOUNT = "mount it for writing, or --data-dir another; --readonly reads what is there"


def versions() -> Line:
    """The program and what it stands on."""
    parts = [f"dsv41chat {__version__}", f"Python {platform.python_version()}"]
    for name in ("mlx", "textual", "numpy"):
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"{name} not installed")
    return Line("ok", "versions", f"{', '.join(parts)}; {platform.platform()}")


def settings_line(settings: Settings) -> Line:
    path = settings.paths.config
    try:
        check_theme(settings)
    except ConfigError as error:
        return broken_settings(ConfigError(" ".join([str(error), *settings.warnings]), error.hint))
    if settings.warnings:
        return Line("warn", "settings", " ".join(settings.warnings), f"edit {path}, or: dsv41chat config show --origin")
    return Line("ok", "settings", f"{path}" + ("" if path.is_file() else " (not written yet, every value is a default)"))


def broken_settings(error: ConfigError) -> Line:
    return Line("fail", "settings", str(error), f"{error.hint or 'correct it'}, or start with --config another file")


def skipped() -> Line:
    """What is said instead of all parts that need the settings."""
    parts = "folders, database, device, builds, tables and terminal"
    return Line("warn", "the rest", f"{parts} were not looked at: they need the settings", "correct the settings, then: dsv41chat doctor")


def folders(settings: Settings) -> Iterator[Line]:
    """Each folder of the program: whether it may be written, whether others may read it, how much room its disk has."""
    p = settings.paths
    places = {"data": p.data, "states": p.states, "cache": p.cache, "state": p.state, "log": p.log, "config": p.config.parent}
    for name, folder in places.items():
        yield _folder(name, folder)
    room = _free(p.data)
    if room is not None:
        low = room < LOW_DISK_BYTES
        if room < NO_DISK_BYTES:
            yield Line("fail", "disk", f"{room / 1e6:,.1f} MB free for the conversations: nothing can be kept", "free some disk space")
            return
        yield Line("warn" if low else "ok", "disk", f"{room / GB:,.1f} GB free for the conversations", "free some disk space" if low else "")


def _folder(name: str, folder: Path) -> Line:
    if not folder.exists():
        parent = next(place for place in folder.absolute().parents if place.exists())
        if mounted_readonly(parent):
            return Line("fail", f"{name} folder", f"{folder} is not there, and {READ_ONLY_MOUNT}", REMOUNT)
        if os.access(parent, os.W_OK | os.X_OK):
            return Line("ok", f"{name} folder", f"{folder}: made when it is needed")
        return Line("fail", f"{name} folder", f"{folder} is not there and {parent} may not be written", "fix its rights, or --data-dir another")
    if not folder.is_dir():
        return Line("fail", f"{name} folder", f"{folder} is not a folder", "move it aside, or --data-dir another")
    if mounted_readonly(folder):
        return Line("fail", f"{name} folder", f"{folder} may not be written: {READ_ONLY_MOUNT}", REMOUNT)
    if not os.access(folder, os.W_OK | os.X_OK):
        return Line("fail", f"{name} folder", f"{folder} may not be written", f"chmod u+rwx {folder}, or --data-dir another")
    open_to = stat.S_IMODE(folder.stat().st_mode) & 0o077
    if open_to and name in ("data", "state", "states"):
        return Line("warn", f"{name} folder", f"{folder} can be read by others", f"chmod 700 {folder}")
    return Line("ok", f"{name} folder", f"{folder}")


def _free(folder: Path) -> int | None:
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def database(settings: Settings) -> Line:
    """The conversations: whether the file can be read and its pages agree."""
    path = settings.paths.data / DATABASE
    if not path.exists():
        return Line("ok", "database", f"{path}: made with the first conversation")
    try:
        with Store.open(settings.paths.data, readonly=True) as store:
            if (problem := store.integrity()) is not None:
                raise damaged(path, problem, untouched=True)
            count = len(store.list_conversations(limit=1_000_000))
    except StoreError as error:
        return Line("fail", "database", str(error), error.hint)
    if mounted_readonly(path):
        return Line("fail", "database", f"{path} may be read and not written: {READ_ONLY_MOUNT}", REMOUNT)
    if not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        return Line("fail", "database", f"{path} may be read and not written by you", f"chmod u+w '{path}'")
    return Line("ok", "database", f"{path}: {count:,} conversation{'' if count == 1 else 's'}, {path.stat().st_size / 1e6:,.1f} MB, intact")


def machine(host: EngineHost) -> Iterator[Line]:
    """Device and memory. Fails where no back end can be used."""
    try:
        device, mlx = host.backend()
    except EngineError as error:
        yield Line("fail", "device", str(error), error.hint)
        return
    yield Line("ok", "device", f"{device}, MLX {mlx}")
    from dsv41chat.engine.device import read_machine

    m = host.thread.call(read_machine)
    text = f"{m.total / GB:,.1f} GB, of which {m.available / GB:,.1f} GB are not in use; {m.device / GB:,.1f} GB of {m.limit}"
    yield Line("ok", "memory", text)
    try:
        yield Line("ok", "routes", host.thread.call(_routes, host.settings.engine.routes))
    except EngineError as error:
        yield Line("fail", "routes", str(error), error.hint)


def _routes(wanted: str) -> str:
    from dsv41chat.engine.kernels.routes import preview

    return "; ".join(preview(wanted))


def builds(host: EngineHost) -> Iterator[Line]:
    """Every build that is listed, and the one that answers when nobody names one."""
    for ref in host.builds():
        try:
            view = host.probe(ref)
        except EngineError as error:
            yield Line("warn", f"build {ref.name}", str(error), error.hint or f"dsv41chat models verify {ref.name}")
            continue
        admission = view.admission
        fits = f", {'fits' if admission.verdict == 'fits' else admission.verdict}, context {admission.context:,}" if admission is not None else ""
        text = f"{view.family}, {view.bytes / GB:,.2f} GB{fits}"
        if not view.has_tokenizer:
            yield Line("warn", f"build {ref.name}", f"{text}; no tokenizer.json, so it cannot chat", "copy tokenizer.json into its folder")
        elif admission is not None and admission.verdict == "no":
            yield Line("warn", f"build {ref.name}", f"{view.family}: does not fit: {admission.words}", "; ".join(admission.remedies))
        else:
            yield Line("ok", f"build {ref.name}", text)
    try:
        yield Line("ok", "default build", host.resolve().name)
    except EngineError as error:
        yield Line("fail", "default build", str(error), "dsv41chat config set engine.model NAME")


def tables(host: EngineHost) -> Iterator[Line]:
    """The engram tables of the default build: format, access, and whether their pages are in memory."""
    from dsv41chat.ui.builds import table_settings

    try:
        ref = host.resolve()
        host.backend()
        from dsv41chat.engine.engram.doctor import sample_residency, table_line
        from dsv41chat.engine.engram.reader import EngramReader
        from dsv41chat.engine.pack.build import open_pack

        specs = open_pack(ref.folder).table_specs
        if not specs:
            yield Line("ok", "tables", f"{ref.name} has none")
            return
        reader = EngramReader.open(specs, table_settings(host.settings), dict(host.store.facts) if host.store is not None else {})
    except EngineError as error:
        yield Line("warn", "tables", f"not looked at: {error}", error.hint)
        return
    try:
        sample_residency(reader)
        for index in range(len(reader.tables)):
            yield table_line(reader, index)
    finally:
        reader.close()


def terminal(settings: Settings) -> Iterator[Line]:
    """What the full screen will find: size, colours, keys, characters, and where copied text goes."""
    e = settings.environment
    if sys.stdout is None or not sys.stdout.isatty():
        yield Line("ok", "terminal", "stdout is not one here: prompts are answered as with --headless")
    elif e.term in ("", "dumb"):
        yield Line("warn", "terminal", f"TERM={e.term or 'unset'}: no full screen here", "set TERM, for example xterm-256color; or --plain")
    else:
        columns, rows = shutil.get_terminal_size()
        small = columns < 40 or rows < 10
        where = "".join(f", {word}" for word, on in (("in tmux", e.tmux), ("over SSH", e.ssh)) if on)
        text = f"{e.term}, {columns}x{rows}{where}"
        yield Line("warn" if small else "ok", "terminal", text, "the full screen needs 40x10" if small else "")
    yield Line("ok", "colours", "none (NO_COLOR)" if e.no_color else e.colors)
    yield Line("ok", "keys", "ctrl+J is a new line everywhere; shift+Enter is one where the terminal reports it apart from Enter")
    encoding = (getattr(sys.stdout, "encoding", None) or locale.getpreferredencoding(False)).lower()
    if encoding.replace("-", "") == "utf8":
        yield Line("ok", "characters", "UTF-8")
    else:
        yield Line("warn", "characters", f"{encoding}: letters outside it are lost", "set LANG to a UTF-8 locale, or PYTHONUTF8=1")
    found = [name for name, _ in routes(e)]
    asked = f"the terminal is asked (OSC 52, up to {OSC_LIMIT // 1000} kB), longer text goes to a file"
    if found:
        yield Line("ok", "clipboard", f"{found[0]}" + (f", else {', '.join(found[1:])}" if found[1:] else "") + ", else OSC 52")
    else:
        yield Line("warn", "clipboard", f"no clipboard program: {asked}", "install wl-copy, xclip or xsel, or allow OSC 52 in the terminal")


def examine(settings: Settings, host: EngineHost) -> Iterator[Line]:
    """All lines but `versions`, in order."""
    parts: list[tuple[str, Any]] = [
        ("settings", lambda: [settings_line(settings)]), ("folders", lambda: folders(settings)), ("database", lambda: [database(settings)]),
        ("device", lambda: machine(host)), ("builds", lambda: builds(host)), ("tables", lambda: tables(host)),
        ("terminal", lambda: terminal(settings)),
    ]  # fmt: skip
    for name, part in parts:
        try:
            yield from part()
        except (OSError, StoreError, EngineError) as error:
            yield Line("fail", name, f"cannot be looked at: {error}", getattr(error, "hint", ""))
