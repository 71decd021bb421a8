"""Names held by processes, and which processes are still alive.

A process that holds something has a row with its pid, its machine, its birth and a heartbeat. It counts as dead when its pid is
gone, or belongs to a process of another birth; where that cannot be asked (another machine, a container, no process table) when
its heartbeat is older than STALE_S. A suspended process is alive.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from dsv41chat.store.db import Connections
from dsv41chat.store.errors import Locked

BEAT_S = 10.0
STALE_S = 60.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a name. here: it is this store. alive: see the module."""

    name: str
    pid: int
    host: str
    acquired: float
    heartbeat: float
    here: bool
    alive: bool


@cache
def this_host() -> str:
    """Machine and, on Linux, the table of pids this process lives in: a pid says nothing about another table."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def process_birth(pid: int) -> str | None:
    """A text that no other process with this pid shares; '' if the system does not tell; None if there is no such process.

    A process that has ended and waits to be collected by its parent counts as gone.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (PermissionError, OverflowError):
        # It belongs to someone else; it exists.
        pass
    if sys.platform.startswith("linux"):
        return _birth_from_proc(pid)
    return _birth_from_ps(pid)


def _birth_from_proc(pid: int) -> str | None:
    try:
        # The name in parentheses may contain anything; the fields begin after its last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return None
    except OSError:
        return ""
    state, start_ticks = fields[0], fields[19]
    return None if state in "ZX" else f"{boot} {start_ticks}"


def _birth_from_ps(pid: int) -> str | None:
    try:
        result = subprocess.run(
            ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, env={"PATH": os.defpath, "LC_ALL": "C"}, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    state, _, start = result.stdout.strip().partition(" ")
    if not state:
        return None
    return None if state.startswith("Z") else start.strip()


def is_alive(row: Mapping[str, Any], now: float) -> bool:
    """row: of the table `processes`. now: epoch seconds."""
    if row["host"] == this_host():
        birth = process_birth(row["pid"])
        if birth is None:
            return False
        if birth and row["birth"]:
            return birth == row["birth"]
    return now - row["heartbeat"] < STALE_S


class Locks:
    """The names that this store holds. Every call is safe from any thread."""

    def __init__(self, db: Connections, clock: Callable[[], float], on_first_use: Callable[[], None] = lambda: None):
        """on_first_use: called before this process registers itself, that is before it needs a heartbeat."""
        self._db = db
        self._clock = clock
        self._on_first_use = on_first_use
        self._lock = threading.Lock()
        self._registered = False
        self.token = secrets.token_hex(8)

    def register(self) -> None:
        """Make this process known, so that its running answers and locks are taken for those of a living process."""
        if self._registered:
            return
        birth = process_birth(os.getpid()) or ""
        with self._lock:
            if not self._registered:
                with self._db.write() as db:
                    self._insert(db, birth)
                self._registered = True
                self._on_first_use()

    def beat(self) -> None:
        """Renew the heartbeat. A row that another process removed in error comes back."""
        if not self._registered:
            return
        with self._db.write() as db:
            cursor = db.execute("UPDATE processes SET heartbeat = ? WHERE token = ?", [self._clock(), self.token])
            if cursor.rowcount == 0:
                self._insert(db, process_birth(os.getpid()) or "")

    def acquire(self, name: str) -> Holder:
        """Hold `name`; holding it already is harmless, a dead process's name is taken over.

        Raises Locked if a living process, or another store of this one, holds it.
        """
        self.register()
        if (holder := self.holder(name)) is not None and not holder.alive:
            self.bury()
        with self._db.write() as db:
            self.require_free(name)
            db.execute("INSERT OR IGNORE INTO locks(name, token, acquired) VALUES (?, ?, ?)", [name, self.token, self._clock()])
            holder = self.holder(name)
        if holder is None or not holder.here:
            raise Locked(f"{name} was taken by another process in this moment", "try again")
        return holder

    def release(self, name: str) -> None:
        """Give `name` up; nothing happens if this store does not hold it."""
        with self._db.write() as db:
            db.execute("DELETE FROM locks WHERE name = ? AND token = ?", [name, self.token])

    def holder(self, name: str) -> Holder | None:
        """Who holds `name`, if anyone."""
        with self._db.read() as db:
            rows = list(db.query("SELECT * FROM locks JOIN processes USING (token) WHERE name = ?", [name]))
        if not rows:
            return None
        row = rows[0]
        here = row["token"] == self.token
        return Holder(
            name=name,
            pid=row["pid"],
            host=row["host"].split(" ")[0],
            acquired=row["acquired"],
            heartbeat=row["heartbeat"],
            here=here,
            alive=here or is_alive(row, self._clock()),
        )

    def require_free(self, name: str) -> None:
        """Raise Locked if a living process other than this store holds `name`."""
        holder = self.holder(name)
        if holder is not None and not holder.here and holder.alive:
            what, _, which = name.partition(":")
            raise Locked(
                f"{what} {which} is open in another process (pid {holder.pid} on {holder.host})",
                "close it there, or open it here with --readonly",
                holder.pid,
                holder.host,
            )

    def bury(self) -> tuple[str, ...]:
        """Turn the running answers of dead processes into interrupted ones and free their names. Returns the messages' ids."""
        with self._db.read() as db:
            # Owners first: whoever begins an answer between the two statements has registered before.
            owners = {row["owner"] for row in db.query("SELECT DISTINCT owner FROM messages WHERE state = 'running'")}
            others = list(db.query("SELECT * FROM processes WHERE token <> ?", [self.token]))
        now = self._clock()
        dead = {row["token"] for row in others if not is_alive(row, now)}
        # A process that left without a row (its store was closed, or the row was removed) writes no more either.
        dead |= owners - {row["token"] for row in others} - {self.token}
        if not dead:
            return ()
        tokens = sorted(token for token in dead if token is not None)
        places = ",".join("?" * len(tokens))
        with self._db.write() as db:
            lost = f"state = 'running' AND (owner IS NULL OR owner IN ({places}))"
            ids = tuple(row["id"] for row in db.query(f"SELECT id FROM messages WHERE {lost} ORDER BY seq", tokens))
            db.execute(f"UPDATE messages SET state = 'interrupted' WHERE {lost}", tokens)
            db.execute(f"DELETE FROM processes WHERE token IN ({places})", tokens)
        return ids

    def free(self, token: str) -> None:
        """Free every name of a closed store of this process, which counts as alive as long as this does."""
        with self._db.write() as db:
            db.execute("DELETE FROM processes WHERE token = ?", [token])

    def leave(self) -> None:
        """Give up every name and the row of this process."""
        if self._registered:
            self._registered = False
            with self._db.write() as db:
                db.execute("DELETE FROM processes WHERE token = ?", [self.token])

    def _insert(self, db: Database, birth: str) -> None:
        db.execute(
            "INSERT OR IGNORE INTO processes(token, pid, host, birth, heartbeat) VALUES (?, ?, ?, ?, ?)",
            [self.token, os.getpid(), this_host(), birth, self._clock()],
        )
