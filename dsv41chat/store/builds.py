"""The registry of builds: names for folders. Files of a build are never touched."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from dsv41chat.store.db import Connections
from dsv41chat.store.errors import BadName, NotFound
from dsv41chat.store.records import Build

EMBEDDED = "nano"  # always there, in no folder of the user's
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def clean_name(text: str) -> str:
    """`text` with every run of characters that a build name may not have as one dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or "build"


def free_name(wanted: str, taken: Container[str]) -> str:
    """`wanted`, or the first of wanted-2, wanted-3 ... that is not taken."""
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name


class Builds:
    """Registered builds. The embedded one is not among them, but its last use is known."""

    def __init__(self, db: Connections, clock: Callable[[], float]):
        self._db = db
        self._clock = clock

    def list(self) -> list[Build]:
        """Registered builds by name, the embedded one left out."""
        return [build for build in self._select("folder IS NOT NULL ORDER BY name COLLATE NOCASE") if build.name != EMBEDDED]

    def get(self, name: str) -> Build | None:
        """The build of exactly this name."""
        found = self._select("name = ?", name)
        return found[0] if found else None

    def at(self, folder: Path) -> Build | None:
        """The build registered for `folder`."""
        found = self._select("folder = ?", _place(folder))
        return found[0] if found else None

    def last_used(self) -> list[Build]:
        """Builds that answered once, the last one first, the embedded one (folder None) among them. A folder may be gone."""
        return self._select("last_used IS NOT NULL ORDER BY last_used DESC, rowid DESC")

    def add(self, folder: Path, name: str | None = None, *, family: str | None = None, fingerprint: str | None = None) -> Build:
        """Register `folder`, by default under its own name, with -2 and so on if that is taken. Registering again updates the row.

        name: must be free. Raises BadName (malformed, taken or reserved) and StoreError.
        """
        place = _place(folder)
        with self._db.write() as db:
            known = self.at(folder)
            others = {build.name for build in self._select("folder IS NOT ?", place)} | {EMBEDDED}
            if name is None:
                name = known.name if known else free_name(clean_name(Path(place).name), others)
            elif not _NAME.fullmatch(name):
                raise BadName(f"{name!r} is no name for a build.", "use letters, digits, dot, dash and underscore")
            elif name in others:
                raise BadName(f"The name {name!r} is taken.", f"--name {free_name(name, others)}")
            if known:
                db.execute(
                    "UPDATE builds SET name = ?, family = coalesce(?, family), fingerprint = coalesce(?, fingerprint) WHERE folder = ?",
                    [name, family, fingerprint, place],
                )
            else:
                db.execute(
                    "INSERT INTO builds(name, folder, family, fingerprint, added) VALUES (?, ?, ?, ?, ?)",
                    [name, place, family, fingerprint, self._clock()],
                )
            return self._select("name = ?", name)[0]

    def use(self, folder: Path, *, family: str | None = None, fingerprint: str | None = None) -> Build:
        """Note that the build in `folder` answers now; registers it if need be."""
        with self._db.write():
            build = self.add(folder, family=family, fingerprint=fingerprint)
            return self.touch(build.name)

    def touch(self, name: str) -> Build:
        """Note that the build answers now. Raises NotFound, but never for the embedded build."""
        with self._db.write() as db:
            if name == EMBEDDED:
                db.execute("INSERT OR IGNORE INTO builds(name, added) VALUES (?, ?)", [name, self._clock()])
            if db.execute("UPDATE builds SET last_used = ? WHERE name = ?", [self._clock(), name]).rowcount == 0:
                raise _missing(name)
            return self._select("name = ?", name)[0]

    def remove(self, name: str) -> None:
        """Forget a build; its files stay. Raises NotFound, and BadName for the embedded build."""
        if name == EMBEDDED:
            raise BadName(f"{EMBEDDED!r} is part of the program and cannot be removed")
        with self._db.write() as db:
            if db.execute("DELETE FROM builds WHERE name = ?", [name]).rowcount == 0:
                raise _missing(name)

    def _select(self, where: str, *params: Any) -> list[Build]:
        with self._db.read() as db:
            return [_build(row) for row in db.query(f"SELECT * FROM builds WHERE {where}", params)]


def _place(folder: Path) -> str:
    # Two spellings of one folder are one build.
    return os.path.realpath(os.path.expanduser(folder))


def _missing(name: str) -> NotFound:
    error = NotFound(f"No build is registered as {name!r}.", "dsv41chat models list")
    error.code = "build_missing"
    return error


def _build(row: Mapping[str, Any]) -> Build:
    folder = None if row["folder"] is None else Path(row["folder"])
    return Build(row["name"], folder, row["family"], row["fingerprint"], row["added"], row["last_used"])
