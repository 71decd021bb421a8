"""The thread that writes states. It never touches MLX and never makes a turn wait: what it cannot do in time it drops and counts."""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable

from dsv41chat.store.errors import StoreError, StoreFull
from dsv41chat.store.prompt_cache import PromptCache
from dsv41chat.store.prompt_cache_files import NoRoom
from dsv41chat.store.prompt_cache_index import Found
from dsv41chat.store.prompt_cache_put import Entry, Ticket, put
from dsv41chat.store.prompt_cache_room import enforce, evict, merge, sweep, thin, used_bytes

log = logging.getLogger(__name__)

BACKLOG_BYTES = 512 * 2**20
HOUR_BYTES = 32 * 2**30
# While a turn runs: five times what a prompt of 1,000 tok/s makes. At 32 MB/s the p99 of a decode step on two cores rose by a fifth.
RATE_BYTES_S = 16e6
PAUSE_S = 600.0  # after a disk that stays full
SWEEP_S = 86_400.0


class PromptCacheWriter:
    """busy: set it while a turn runs, clear it at its end; then writing is throttled. Errors become counters and notices."""

    def __init__(
        self,
        cache: PromptCache,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        backlog_bytes: int = BACKLOG_BYTES,
        hour_bytes: int = HOUR_BYTES,
    ):
        self.cache = cache
        self.busy = threading.Event()
        self._monotonic, self._sleep = monotonic, sleep
        self._backlog_limit, self._hour_limit = backlog_bytes, hour_bytes
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._pending = 0
        self._backlog = 0
        self._hour_began, self._hour = monotonic(), 0
        self._paused_until = float("-inf")
        self._thread: threading.Thread | None = None
        self._closed = False
        self._submit(self._start)

    def put(self, entry: Entry) -> Ticket:
        """Queue an entry. Returns its ticket, already settled without a segment when the entry was dropped."""
        ticket, size = Ticket(entry.pos), entry.nbytes()
        why = self._refuse(size)
        if why is not None:
            self.cache.count(f"skipped: {why}")
            ticket.settled = True
            return ticket
        with self._lock:
            self._backlog += size
        self._submit(lambda: self._write(entry, ticket, size))
        return ticket

    def run(self, what: str, job: Callable[[], object]) -> None:
        """Do `job` behind what is queued; a failure is counted as "`what` failed"."""
        self._submit(lambda: self._guarded(what, job))

    def touch(self, found: Found, conversation: str | None, turn: int) -> None:
        """Note that a mark was used, behind what is queued."""
        self.run("noting a use", lambda: self.cache.touch(found, conversation, turn))

    def tidy(self, conversation: str, ticket: Ticket | None) -> None:
        """Thin a conversation's marks and merge its chain, behind what is queued."""

        def job() -> None:
            thin(self.cache, conversation)
            self.cache.pin_again(conversation)
            if ticket is not None and ticket.seg_id is not None and not self.busy.is_set():
                merge(self.cache, ticket.seg_id)

        self.run("tidying", job)

    def drain(self, timeout_s: float | None = None, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Wait until everything queued is done. False if time ran out or `stopped` said so."""
        deadline = None if timeout_s is None else self._monotonic() + timeout_s
        with self._idle:
            while self._pending:
                if stopped() or (deadline is not None and self._monotonic() >= deadline):
                    return False
                self._idle.wait(0.05)
        return True

    def close(self, timeout_s: float | None = 5.0) -> bool:
        """Finish what is queued and end the thread. False if it was still at work after `timeout_s`."""
        self._closed = True
        self._jobs.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _refuse(self, size: int) -> str | None:
        now = self._monotonic()
        if self._closed:
            return "the cache is closed"
        if now < self._paused_until:
            return "the disk was full"
        if now - self._hour_began >= 3600:
            self._hour_began, self._hour = now, 0
        if self._hour + size > self._hour_limit:
            return "hourly limit of writing"
        with self._lock:
            if self._backlog + size > self._backlog_limit:
                return "writing is behind"
        self._hour += size
        return None

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prompt-cache", daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                del job  # holds an entry's bytes
                with self._idle:
                    self._pending -= 1
                    self._idle.notify_all()

    def _start(self) -> None:
        def job() -> None:
            sweep(self.cache)
            enforce(self.cache)

        self._guarded("sweeping", job)

    def _write(self, entry: Entry, ticket: Ticket, size: int) -> None:
        began, written = self._monotonic(), 0

        def pace(count: int) -> None:
            nonlocal written
            written += count
            if self.busy.is_set():
                ahead = written / RATE_BYTES_S - (self._monotonic() - began)
                if ahead > 0:
                    self._sleep(ahead)

        try:
            self._attempt(entry, ticket, pace)
        except NoRoom as error:
            self.cache.count(f"skipped: {_kind(str(error))}")
            log.info("a state was not kept: %s", error)
            if "larger than" in str(error):
                self.cache.notice(f"Not kept: {error}.")
        except Exception as error:  # noqa: BLE001 - whatever it is, the turn goes on and the cache says it lost an entry
            self.cache.count(f"write failed: {type(error).__name__}")
            log.warning("a state could not be written: %s", error)
        finally:
            ticket.settled = True
            with self._lock:
                self._backlog -= size

    def _attempt(self, entry: Entry, ticket: Ticket, pace: Callable[[int], None]) -> None:
        try:
            put(self.cache, entry, ticket, pace)
            return
        except (OSError, StoreFull) as error:
            if not _full(error):
                raise
        # Once more after making room; then leave the disk alone for a while.
        evict(self.cache, used_bytes(self.cache) - 2 * entry.nbytes())
        try:
            put(self.cache, entry, ticket, pace)
        except (OSError, StoreFull) as error:
            if not _full(error):
                raise
            self._paused_until = self._monotonic() + PAUSE_S
            self.cache.notice("The disk is full: computed states are not kept for 10 minutes.")
            raise

    def _guarded(self, what: str, job: Callable[[], object]) -> None:
        try:
            job()
        except (StoreError, OSError) as error:
            self.cache.count(f"{what} failed")
            log.warning("%s the prompt cache failed: %s", what, error)


def _full(error: BaseException) -> bool:
    return isinstance(error, StoreFull) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def _kind(text: str) -> str:
    return "larger than the budget" if "larger than" in text else text
