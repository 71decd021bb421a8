"""Connections to a database file of the store.

Threads: every thread gets a connection of its own, so a long search in one thread never keeps a checkpoint in another waiting.
A database in memory has one connection, which the threads take in turns. Both are hidden behind `read()` and `write()`.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from os import W_OK, access
from pathlib import Path

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from dsv41chat.store import files
from dsv41chat.store.errors import StoreClosed, StoreReadOnly, damaged, from_sqlite, primary_code, translated
from dsv41chat.store.migrations import CHAT, check_known

BUSY_S = 5.0  # how long a statement waits for another process before StoreBusy
# Of a file up to this size every page is looked at before it may be written (0.1 s); of a larger one the statement that meets the damage
# says it, and doctor. To read, it is opened as it is: what is intact is given.
CHECKED_BYTES = 32 * 2**20
# A committed message survives a power cut; costs about 10 ms per commit.
DURABLE = {"synchronous": "FULL"}


def _text(data: bytes) -> str:
    """The text of a cell. A damaged byte becomes U+FFFD, so that it hides neither its row nor the others."""
    return data.decode("utf-8", "replace")


def problem(conn: sqlite3.Connection) -> str | None:
    """What SQLite finds wrong with the pages and indexes of a file; None if nothing. Reads all of it."""
    found = conn.execute("PRAGMA quick_check(1)").fetchone()
    return None if found is None or found[0] == "ok" else str(found[0])


class _Link:
    """One connection and the lock that keeps close() away from a running statement."""

    def __init__(self, db: Database):
        self.db = db
        self.lock = threading.RLock()

    def close(self) -> None:
        with self.lock:
            self.db.conn.close()

    def __del__(self):
        # The thread that owned it has ended.
        self.db.conn.close()


class Connections:
    """path: the database file, or None for one in memory. migrations: the steps that make its tables.

    readonly: never writes, never creates a file. busy_s: seconds to wait for another process. pragmas: of every connection.
    Raises StoreReadOnly, StoreUnreadable, StoreBusy, StoreDamaged, StoreNewer, StoreFull, and StoreError where a file stands in the folder's place.
    """

    def __init__(
        self,
        path: Path | None,
        migrations: Migrations = CHAT,
        *,
        readonly: bool = False,
        busy_s: float = BUSY_S,
        pragmas: Mapping[str, str] = DURABLE,
    ):
        self.path = path
        self._migrations = migrations
        self.readonly = readonly
        self._busy_s = busy_s
        self._pragmas = pragmas
        self._uri: str | None = None  # set when the file is opened in another way than by its path
        self._copy: tempfile.TemporaryDirectory | None = None
        self._shared: _Link | None = None
        self._local = threading.local()
        self._links: weakref.WeakSet[_Link] = weakref.WeakSet()
        self._links_lock = threading.Lock()
        self._closed = False
        try:
            with translated(path, reading=readonly, untouched=readonly):
                if path is None:
                    self._open_memory()
                elif readonly:
                    self._open_readonly(path)
                else:
                    self._open_file(path)
        except BaseException:
            self.close()
            raise

    # -- use

    @contextmanager
    def read(self) -> Iterator[Database]:
        """A connection for statements that only read. Rows must be fetched inside the block."""
        link = self._link()
        with link.lock, translated(self.path, reading=True, untouched=self.readonly):
            yield link.db

    @contextmanager
    def write(self) -> Iterator[Database]:
        """A transaction that has the write lock from its start; committed at the end, rolled back by any exception.

        Inside another write() of the same thread it joins the outer transaction.
        """
        if self.readonly:
            raise StoreReadOnly("The conversations were opened for reading only.", "start without --readonly to change them")
        link = self._link()
        with link.lock, translated(self.path):
            conn = link.db.conn
            if conn.in_transaction:
                yield link.db
                return
            # A plain BEGIN would take the write lock only at the first change, and then fail at once, without the
            # busy timeout, if another process wrote in between.
            conn.execute("BEGIN IMMEDIATE")
            try:
                yield link.db
                conn.execute("COMMIT")
            except BaseException:
                # A full disk may have ended the transaction already.
                if conn.in_transaction:
                    conn.execute("ROLLBACK")
                raise

    def wait(self, busy_s: float) -> None:
        """From now on every statement waits so many seconds for another process."""
        self._busy_s = busy_s
        with self._links_lock:
            links = list(self._links)
        for link in links:
            with link.lock:
                link.db.conn.execute(f"PRAGMA busy_timeout={round(busy_s * 1000)}")

    def close(self) -> None:
        """Close every thread's connection, each after its running statement. Later use raises StoreClosed."""
        self._closed = True
        with self._links_lock:
            links = list(self._links)
        for link in links:
            link.close()
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None

    # -- open

    def _open_memory(self) -> None:
        self._shared = self._connect(":memory:")
        self._migrations.apply(self._shared.db)

    def _open_file(self, path: Path) -> None:
        files.private_folder(path.parent)
        files.private_file(path)
        # SQLite would open a write-protected file silently for reading and fail at the first message.
        for place in (path.parent, path):
            if not access(place, W_OK):
                raise StoreReadOnly(f"{place} cannot be written", "choose another folder with --data-dir, or open with --readonly")
        self._check(path)
        db = self._link().db
        self._enable_wal(db)
        check_known(db, self._migrations)
        if self._migrations.pending(db):
            with self.write():
                # Another process may have been faster: look again under the write lock.
                check_known(db, self._migrations)
                self._migrations.apply(db)

    def _open_readonly(self, path: Path) -> None:
        if not path.exists():
            files.refuse_file(path.parent)
            # Nothing was said yet, and nothing may be created: an empty database in memory stands in.
            self._open_memory()
            return
        db = self._readable(path)
        check_known(db, self._migrations)
        if self._migrations.pending(db):
            # An older file in a folder that cannot be written: bring a copy in memory up to date.
            self._shared = self._connect(":memory:")
            db.conn.backup(self._shared.db.conn)
            self._migrations.apply(self._shared.db)

    def _check(self, path: Path) -> None:
        """Raises StoreDamaged for pages that contradict each other, before anything is written to or beside them."""
        if self._migrations is not CHAT or path.stat().st_size > CHECKED_BYTES:
            return
        try:
            # Closing a connection that may write would empty a log that a killed process left into the file. And one that may not asks
            # for whole pages only, not for values (CHECK): these do not stop the rest, and doctor asks in the same way.
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=self._busy_s)) as conn:
                found = problem(conn)
        except sqlite3.DatabaseError as error:
            if primary_code(error) == sqlite3.SQLITE_READONLY:
                return  # a rollback journal must be played back first; later statements say what they meet
            raise from_sqlite(error, path, untouched=True) from error
        if found is not None:
            raise damaged(path, found, untouched=True)

    def _readable(self, path: Path) -> Database:
        """A read-only connection, whatever the rights of the folder are."""
        wal = path.with_name(path.name + "-wal")
        # A database in WAL mode wants to make its shared-memory file even for reading. Where that is impossible it can
        # still be read as a file that does not change, or, if a log with unmerged pages lies beside it, from a copy.
        self._uri = f"{path.absolute().as_uri()}?mode=ro"
        try:
            return self._probe()
        except sqlite3.OperationalError as error:
            if primary_code(error) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
        if not wal.exists() or wal.stat().st_size == 0:
            self._uri += "&immutable=1"
            return self._probe()
        self._copy = tempfile.TemporaryDirectory(prefix="dsv41chat-")
        copy = Path(self._copy.name) / path.name
        shutil.copyfile(path, copy)
        shutil.copyfile(wal, copy.with_name(wal.name))
        self._uri = copy.as_uri()
        return self._probe()

    def _probe(self) -> Database:
        link = self._link()
        try:
            link.db.conn.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except BaseException:
            del self._local.link
            link.close()
            raise
        return link.db

    def _enable_wal(self, db: Database) -> None:
        # The switch needs the file alone for a moment and does not wait for its turn by itself. Some network file systems
        # cannot do WAL at all; the database then keeps its rollback journal and works, with less room for two at once.
        deadline = time.monotonic() + self._busy_s
        while True:
            try:
                db.conn.execute("PRAGMA journal_mode=WAL").fetchone()
                return
            except sqlite3.OperationalError as error:
                if primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _connect(self, target: str) -> _Link:
        # isolation_level None: a transaction begins where this module says so and nowhere else.
        conn = sqlite3.connect(target, timeout=self._busy_s, isolation_level=None, check_same_thread=False, uri=target.startswith("file:"))
        conn.text_factory = _text
        link = _Link(Database(conn, recursive_triggers=False, execute_plugins=False))
        conn.execute("PRAGMA foreign_keys=ON")
        for name, value in self._pragmas.items():
            conn.execute(f"PRAGMA {name}={value}")
        conn.execute("PRAGMA secure_delete=ON")
        with self._links_lock:
            self._links.add(link)
        return link

    def _link(self) -> _Link:
        if self._closed:
            raise StoreClosed("the store is closed")
        if self._shared is not None:
            return self._shared
        link = getattr(self._local, "link", None)
        if link is None:
            link = self._local.link = self._connect(self._uri or str(self.path))
        return link
