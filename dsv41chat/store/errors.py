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


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 for errors of Python's own module."""
    # An extended code keeps the primary one in its low byte.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def damaged(where: Path | str, why: str) -> StoreDamaged:
    """One sentence for every damage, wherever it is met. why: what SQLite finds, of which the last line names the place."""
    why = why.strip().splitlines()[-1] if why.strip() else "its pages contradict each other"
    folder = Path(where).with_name("damaged")
    return StoreDamaged(
        f"{where} is damaged: {why}. Nothing is written to it, and it stays as it is.",
        # With the log beside it, which must not meet another file of that name.
        f"`conversations list` and `export` read what is intact; move it aside (mkdir {folder} && mv {where}* {folder}/) and start again; "
        "what can be saved comes back with a current sqlite3: "
        f"sqlite3 {folder}/{Path(where).name} .recover | sqlite3 {where}",
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


def from_sqlite(error: sqlite3.Error, path: Path | None, *, reading: bool = False) -> StoreError:
    """The store's name for a SQLite error in the database at `path` (None: in memory). reading: nothing was to be written."""
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
    # Text that is none comes as an error of Python's own module, without a code.
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "Could not decode to UTF-8" in str(error):
        return damaged(where, str(error))
    return StoreError(f"{where}: {error}", "run `dsv41chat doctor`")


@contextmanager
def translated(path: Path | None, *, reading: bool = False) -> Iterator[None]:
    """Turn SQLite's and the operating system's errors inside the block into StoreErrors, the original kept as the cause.

    reading: the block writes nothing; the words say so.
    """
    try:
        yield
    except sqlite3.ProgrammingError as error:
        if "closed database" in str(error):
            raise StoreClosed("the store is closed") from error
        raise
    except sqlite3.Error as error:
        raise from_sqlite(error, path, reading=reading) from error
    except OSError as error:
        raise from_os(error, path or Path("memory"), reading=reading) from error
