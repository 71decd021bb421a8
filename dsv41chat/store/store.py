"""The Store: everything that outlives a run, behind one object."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv41chat.store.answers import Answers, AnswerWriter
from dsv41chat.store.builds import Builds
from dsv41chat.store.db import BUSY_S, Connections, problem
from dsv41chat.store.errors import StoreError
from dsv41chat.store.facts import Facts
from dsv41chat.store.keeper import Keeper
from dsv41chat.store.locks import Holder, Locks
from dsv41chat.store.part import lock_name
from dsv41chat.store.returning import Returning
from dsv41chat.store.search import Search

DATABASE = "chat.db"


class Store(Returning, Answers, Search):
    """Conversations, builds, locks and facts in one SQLite file.

    Threads: every method may be called from any thread. Each thread works on a connection of its own; what one has committed the others
    see. An AnswerWriter belongs to one thread at a time. A Store must not be carried into a forked process.
    Every method that reads or writes may raise StoreError.
    """

    path: Path | None
    readonly: bool
    builds: Builds
    facts: Facts
    on_deleted: Callable[..., None] | None  # called with the ids of conversations that lost messages or were deleted
    recovered: tuple[str, ...]  # messages whose process had died, found running at the opening

    def __init__(
        self,
        db: Connections,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        background: bool = True,
    ):
        """Use `Store.open` or `Store.memory`."""
        self.db = db
        self.path = db.path
        self.readonly = db.readonly
        self.clock = clock
        self._monotonic = monotonic
        self.locks = Locks(db, clock, self._first_use)
        self.builds = Builds(db, clock)
        self.facts = Facts(db, clock)
        self._keeper = Keeper(self.locks, monotonic, background)
        self.on_deleted = None
        self.closed = False
        self.opened = clock()
        self.recovered = () if db.readonly else self.locks.bury()

    @classmethod
    def open(
        cls,
        data_dir: Path,
        *,
        readonly: bool = False,
        busy_s: float = BUSY_S,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        background: bool = True,
    ) -> Store:
        """Open `chat.db` in `data_dir`; made, with the folder, if it is not there.

        readonly: nothing is written or created, also where that is impossible. Answers left running by a dead process become
        interrupted; `recovered` has their ids. busy_s: seconds to wait for another process that writes.
        Raises StoreReadOnly, StoreBusy, StoreFull, StoreDamaged, StoreNewer.
        """
        db = Connections(Path(data_dir) / DATABASE, readonly=readonly, busy_s=busy_s)
        try:
            return cls(db, clock, monotonic, background)
        except BaseException:
            db.close()
            raise

    @classmethod
    def memory(
        cls,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        background: bool = True,
        copy_of: Path | None = None,
    ) -> Store:
        """A store that leaves nothing behind: for --no-save, and to go on when the disk refuses.

        copy_of: a data folder whose conversations it holds at first. Raises StoreError when they cannot be read.
        """
        db = Connections(None)
        if copy_of is not None:
            try:
                disk = Connections(Path(copy_of) / DATABASE, readonly=True)
                try:
                    with disk.read() as source, db.read() as target:
                        source.conn.backup(target.conn)
                finally:
                    disk.close()
            except BaseException:
                db.close()
                raise
        return cls(db, clock, monotonic, background)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is unwritten, as interrupted; give up the locks; close. Never raises for a disk that refuses."""
        if self.closed:
            return
        self.closed = True
        self._keeper.stop()
        for writer in self._keeper.writers:
            try:
                writer.__exit__(None)
            except (StoreError, TypeError, ValueError):
                # The last checkpoint stands; the next start finds it running and owned by nobody.
                continue
        try:
            self.locks.leave()
        except StoreError:
            pass
        self.db.close()

    def succeed(self, earlier: Store) -> None:
        """Close an earlier store of this process on the same file, and free what that held.

        Raises StoreError where this one cannot write, and leaves the other open then.
        """
        with self.db.write():
            pass
        earlier.close()
        # A disk that refuses it for good does not let it go either.
        self.locks.free(earlier.locks.token)

    def integrity(self) -> str | None:
        """What SQLite finds wrong with the pages and indexes of the file; None if nothing. Reads all of it."""
        with self.db.read() as db:
            return problem(db.conn)

    def lock(self, conversation_id: str) -> Holder:
        """Keep other processes from writing to a conversation. Taking it again is harmless; a dead process's lock is taken over.

        Raises NotFound, Locked (by a living process; `pid` and `host` say which), StoreReadOnly.
        """
        self._require_conversation(conversation_id)
        return self.locks.acquire(lock_name(conversation_id))

    def unlock(self, conversation_id: str) -> None:
        """Let other processes write to the conversation again."""
        self.locks.release(lock_name(conversation_id))

    def lock_holder(self, conversation_id: str) -> Holder | None:
        """Who has the conversation open for writing, if anyone."""
        return self.locks.holder(lock_name(conversation_id))

    # -- parts

    def _first_use(self) -> None:
        self._keeper.start()

    def _watch(self, row: dict[str, Any]) -> AnswerWriter:
        writer = AnswerWriter(self, row, self._monotonic, self._keeper.wake)
        self._keeper.watch(writer)
        return writer

    def _forget(self, writer: AnswerWriter) -> None:
        self._keeper.forget(writer)
