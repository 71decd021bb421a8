"""The exceptions of the store. Each message says what happened, why and what to do.

    StoreError              anything that keeps text from being read or written
      StoreBusy             another process holds the database longer than the busy timeout
      StoreFull             no room left on the disk
      StoreReadOnly         the folder or the file may not be written
      StoreUnreadable       one of them may not, or cannot, be read
      StoreDamaged          the file is not a database, or its pages contradict each other
      StoreNewer            a newer program has changed the tables
      StoreClosed           used after close()
      NotFound              no such conversation, message, build or queued text
      Ambiguous             a reference that fits several; `candidates` lists them
      Locked                a living process holds the name; `pid` says which
      BadName               a build name that is malformed, taken or reserved
      QueueFull             five messages wait already
"""

from __future__ import annotations

import errno
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StoreError(Exception):
    """code: the machine-readable name that scripts see; hint: the next command or option to try."""

    code = "store"

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint


class StoreBusy(StoreError):
    pass


class StoreFull(StoreError):
    pass


class StoreReadOnly(StoreError):
    pass


class StoreUnreadable(StoreError):
    pass


class StoreDamaged(StoreError):
    pass


class StoreNewer(StoreError):
    pass


class StoreClosed(StoreError):
    pass


class NotFound(StoreError):
    code = "not_found"


class Ambiguous(StoreError):
    """candidates: (id, title) of everything that the reference fits."""

    code = "ambiguous"

    def __init__(self, message: str, hint: str = "", candidates: tuple[tuple[str, str], ...] = ()):
        super().__init__(message, hint)
        self.candidates = candidates


class Locked(StoreError):
    """pid: the process that holds the name; host: its machine."""

    code = "locked"

    def __init__(self, message: str, hint: str = "", pid: int = 0, host: str = ""):
        super().__init__(message, hint)
        self.pid = pid
        self.host = host


class BadName(StoreError):
    code = "usage"


class QueueFull(StoreError):
    code = "usage"


DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 for errors of Python's own module."""
    # An extended code keeps the primary one in its low byte.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def damaged(where: Path | str, why: str, *, untouched: bool, database: bool = True) -> StoreDamaged:
    """One sentence for every damage, wherever it is met.

    why: what SQLite finds, of which the last line names the place. untouched: nothing was written to the file since it was opened.
    database: False for a file that is none, of which nothing can be read.
    """
    why = why.strip().splitlines()[-1] if why.strip() else "its pages contradict each other"
    data, name = Path(where).parent, shlex.quote(str(where))
    folder, saved = (shlex.quote(str(data / part)) for part in ("damaged", "saved.json"))
    ours = f"dsv41chat --data-dir {shlex.quote(str(data))} conversations"
    # With the log beside it, which must not meet another file of that name.
    aside = f"`mkdir {folder} && mv {name}* {folder}/`"
    save, back = f"`{ours} export --all --format json -o {saved}`", f"`{ours} import {saved}`"
    return StoreDamaged(
        f"{where} is damaged: {why}." + (" Nothing is written to it, and it stays as it is." if untouched else ""),
        f"save what is intact: {save}; move the file aside: {aside}; bring back what was saved: {back}"
        if database
        else f"move it aside, {aside}, and start again, or choose another folder with --data-dir",
    )


_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def from_os(error: OSError, path: Path, *, reading: bool = False) -> StoreError:
    """The store's name for an operating system error at `path`. reading: nothing was to be written."""
    reason = error.strerror or str(error)
    if reading and error.errno in _READ_ONLY:
        return StoreUnreadable(f"{path} cannot be read: {reason}", "fix its rights, or choose another folder with --data-dir")
    if error.errno == errno.EROFS:
        return StoreReadOnly(f"{path} cannot be written: {reason}", "choose another folder with --data-dir, or mount its file system for writing")
    if error.errno in _READ_ONLY:
        return StoreReadOnly(f"{path} cannot be written: {reason}", "choose another folder with --data-dir, or fix its rights")
    if error.errno in _FULL:
        return StoreFull(f"{path} cannot grow: {reason}", "free some disk space, or choose another folder with --data-dir")
    return StoreError(f"{path}: {reason}", "choose another folder with --data-dir")


def from_sqlite(error: sqlite3.Error, path: Path | None, *, reading: bool = False, untouched: bool = False) -> StoreError:
    """The store's name for a SQLite error in the database at `path` (None: in memory).

    reading: nothing was to be written. untouched: nor was anything before, since the file was opened.
    """
    where = path if path is not None else "the database in memory"
    primary = primary_code(error)
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreBusy(f"{where} is locked by another process", "close the other program, then try again")
    if primary == sqlite3.SQLITE_FULL:
        return StoreFull(f"{where} cannot grow: the disk is full", "free some disk space, or choose another folder with --data-dir")
    if reading and primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return StoreUnreadable(f"{where} cannot be read: {error}", "check the rights of the file and of its folder, or use --data-dir")
    if primary == sqlite3.SQLITE_IOERR:
        made, tried = (StoreUnreadable, "read") if reading else (StoreError, "written")
        return made(f"{where} cannot be {tried}: {error}", "run `dsv41chat doctor`")
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return StoreReadOnly(f"{where} cannot be written: read-only", "choose another folder with --data-dir, or fix its rights")
    if primary == sqlite3.SQLITE_CANTOPEN:
        return StoreReadOnly(f"{where} cannot be opened", "check that the folder exists and may be written, or use --data-dir")
    if primary in DAMAGE:
        database = primary != sqlite3.SQLITE_NOTADB
        return damaged(where, str(error), untouched=untouched or not database, database=database)
    return StoreError(f"{where}: {error}", "run `dsv41chat doctor`")


@contextmanager
def translated(path: Path | None, *, reading: bool = False, untouched: bool = False) -> Iterator[None]:
    """Turn SQLite's and the operating system's errors inside the block into StoreErrors, the original kept as the cause.

    reading: the block writes nothing; the words say so. untouched: nor did anything before it, since the file was opened.
    """
    try:
        yield
    except sqlite3.ProgrammingError as error:
        if "closed database" in str(error):
            raise StoreClosed("the store is closed") from error
        raise
    except sqlite3.Error as error:
        raise from_sqlite(error, path, reading=reading, untouched=untouched) from error
    except OSError as error:
        raise from_os(error, path or Path("memory"), reading=reading) from error
