"""`States`: which computed states a turn resumes from and which it leaves behind. The join of engine snapshots and the prompt cache.

Methods that take a session run on the engine thread. They copy bytes and ask the index; files are written by the cache's own
thread. Nothing here changes an answer: without a state a turn reads its prompt from the first token.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dsv41chat.engine.errors import EngineError
from dsv41chat.store.errors import StoreError
from dsv41chat.ui.turn_events import Resumed

if TYPE_CHECKING:
    # Imported where they are used: the first frame does not wait for them.
    from dsv41chat.engine import Engine, Session
    from dsv41chat.engine.chat.encode import EncodedPrompt
    from dsv41chat.engine.invariance import RowsTest
    from dsv41chat.settings import Settings
    from dsv41chat.store.prompt_cache import PromptCache
    from dsv41chat.store.prompt_cache_index import Found
    from dsv41chat.store.prompt_cache_put import Ticket
    from dsv41chat.store.prompt_cache_read import State
    from dsv41chat.store.prompt_cache_writer import PromptCacheWriter

log = logging.getLogger(__name__)

GRID = 128
SUFFIX_ROWS = 9  # left to run after a mark on the grid, so that they do not take the narrow kernels of decode
LONG_GRID, LONG_GAP = 4096, 2048
NO_STATE = "no stored state"
MIN_TOKENS, SMALL_TAIL_BYTES, MIN_SAVED_S = 32, 2**20, 0.25
EXTRA_TAIL_BYTES = 2**20
DEFAULT_RATE = 1000.0  # tokens/s, before any prefill was measured


@dataclass(frozen=True)
class StateTurn:
    """What the cache must know about a turn. number: the user's messages up to it. history: an answer stands before it.

    head: what the beginning of the prompt was made from, for the reason of a miss; values are hashed where they are text.
    """

    conversation: str
    number: int = 1
    history: bool = False
    head: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Seal:
    """An answer to be read again as later prompts have it: `ids` are all they begin with."""

    turn: StateTurn
    ids: tuple[int, ...]


class States:
    """folder None: off, nothing is read, written or created. budget_bytes None: chosen at the first use."""

    def __init__(self, folder: Path | None, budget_bytes: int | None = None, *, strict: bool = False, min_tokens: int | None = None, **options: Any):
        self._folder, self._budget = folder, budget_bytes
        self._strict, self._min_tokens = strict, min_tokens
        self._options = options
        self.cache: PromptCache | None = None
        self.writer: PromptCacheWriter | None = None
        self.off_reason: str | None = None if folder is not None else "switched off"
        self._engine: Engine | None = None
        self._build: Any = None
        self._rows_test: RowsTest | None = None
        self._chains: WeakKeyDictionary[Any, list[Ticket]] = WeakKeyDictionary()
        self._seals: WeakKeyDictionary[Any, _Seal] = WeakKeyDictionary()
        self._rate: float | None = None
        self._notices: list[str] = []
        self._forgotten: set[str] = set()  # deleted conversations: what still comes for them is not kept

    @classmethod
    def of(cls, settings: Settings, saving: bool = True) -> States:
        """As the settings say. saving False (--no-save): off."""
        c = settings.cache
        off = not c.enabled or c.budget == 0 or not saving
        budget = None if c.budget == "auto" else c.budget
        return cls(None if off else settings.paths.states, budget, strict=c.strict, min_tokens=None if c.min_tokens == "auto" else c.min_tokens)

    # life --------------------------------------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        return self.off_reason is None

    @property
    def ready(self) -> bool:
        """Whether the loaded build's states are kept and found."""
        return self._build is not None

    def switch_off(self) -> None:
        """For a program that must neither read nor write states."""
        self.close(0.0)
        self._folder, self.off_reason = None, "switched off"

    def bind(self, engine: Engine, name: str) -> None:
        """A build was loaded, as `name`: its states are the ones that count now. A cache that cannot be used is off, with the reason."""
        self.unbind()
        if not self.on:
            return
        from dsv41chat.engine.snapshot import state_facts

        try:
            self._open()
            self._build = self.cache.build(state_facts(engine), engine.family, {"name": name, "fingerprint": engine.fingerprint})
            self._engine = engine
        except StoreError as error:
            self._fail(error)

    def unbind(self) -> None:
        self._engine = self._build = self._rows_test = None
        self._seals.clear()
        self._chains.clear()

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish writing, close the index."""
        self.unbind()
        if self.writer is not None:
            self.writer.close(timeout_s)
        if self.cache is not None:
            self.cache.close()
        self.writer = self.cache = None

    def _open(self) -> None:
        if self.cache is None:
            from dsv41chat.store.prompt_cache import PromptCache
            from dsv41chat.store.prompt_cache_writer import PromptCacheWriter

            self.cache = PromptCache.open(self._folder, self._budget, **self._options)
            self.writer = PromptCacheWriter(self.cache)

    def _fail(self, error: Exception) -> None:
        log.warning("computed states are not kept: %s", error)
        self.off_reason = f"Computed states are not kept: {error}"
        self._notices.append(self.off_reason)
        self._build = self._engine = None

    def take_notices(self) -> list[str]:
        """Sentences for the user since the last call."""
        taken, self._notices = self._notices, []
        if self.cache is not None:
            taken += self.cache.take_notices()
        return taken

    # resuming ----------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A turn runs: writing steps back."""
        if self.writer is not None:
            self.writer.busy.set()

    def end(self) -> None:
        if self.writer is not None:
            self.writer.busy.clear()

    def peek(self, ids: Sequence[int]) -> int:
        """How many of `ids` a stored state covers."""
        if self._build is None:
            return 0
        try:
            found = self.cache.find(self._build, _packed(ids), hold=False, **self._limits())
        except StoreError:
            return 0
        return found.pos if found is not None else 0

    def resume(
        self,
        session: Session,
        ids: Sequence[int],
        turn: StateTurn | None = None,
        *,
        scratch: bool = False,
        tell: Callable[[int], None] = lambda tokens: None,
    ) -> Resumed:
        """Bring the session as far along `ids` as memory or disk can. Never raises for a state that cannot be used.

        scratch: read everything again, whatever there is. tell(tokens): a state is about to be read from the disk.
        """
        began = time.perf_counter()
        if self._build is None:
            tokens = session.reuse(ids)
            return Resumed(tokens, len(ids), time.perf_counter() - began, "memory" if tokens else "none")
        if turn is not None:
            self._forgotten.discard(turn.conversation)
        if self._only_grid or scratch:
            # Rows that decode has made are not the ones that a fresh reading of the prompt would make.
            session.clear()
        damaged = None
        live = session.reach(ids)
        source = "memory" if live else "none"
        found, tried = None if scratch else self._find(ids, live), set()
        while found is not None:
            tell(found.pos)
            reason = self._restore(session, found, ids)
            if reason is None:
                source = "disk"
                break
            damaged = damaged or reason
            tried.add(found.mark_id)
            found = self._find(ids, live)
            if found is not None and found.mark_id in tried:
                # It could not even be removed: a folder that cannot be written now.
                found = None
        tokens = session.reuse(ids)
        self._cut_chain(session, tokens)
        if found is not None:
            from dsv41chat.store.prompt_cache_put import Ticket

            self._chains[session] = [Ticket(s.hi, s.id, True) for s in found.segments]
            conversation = turn.conversation if turn is not None else None
            self.writer.touch(found, conversation, turn.number if turn is not None else 0)
        self.cache.count(f"resumed from {source}" if tokens else "read from the start")
        cold = None
        if turn is not None and turn.history and damaged is None and not scratch and (tokens == 0 or (found is not None and found.kind == "S")):
            cold = self._why_cold(turn)
            self.cache.count(f"miss: {cold}")
            if cold == NO_STATE and len(ids) < 2 * MIN_TOKENS and self._min_tokens is None:
                cold = f"{NO_STATE} (of so few tokens none is kept)"
        return Resumed(tokens, len(ids), time.perf_counter() - began, source, cold, damaged)

    def drop(self, session: Session, ids: Sequence[int]) -> bool:
        """The prompt failed right after a restore: the state it stood on goes. False if there was none."""
        if self._build is None or not self._chains.get(session):
            return False
        found = self._find(ids, 0)
        session.clear()
        self._chains.pop(session, None)
        if found is not None:
            self._remove(found, "prefill failed")
        return found is not None

    def _remove(self, found: Found, reason: str) -> None:
        try:
            self.cache.remove(found, reason)
        except StoreError as error:
            log.warning("a stored state could not be removed: %s", error)

    @property
    def _only_grid(self) -> bool:
        return self._strict and not self._engine.row_invariant

    def _limits(self) -> dict[str, Any]:
        return {"kinds": "SPG", "grid": self._engine.prefill_chunk} if self._only_grid else {}

    def _find(self, ids: Sequence[int], above: int) -> Found | None:
        try:
            return self.cache.find(self._build, _packed(ids), above, **self._limits())
        except StoreError as error:
            self.cache.count(f"index failed: {type(error).__name__}")
            log.warning("the prompt cache could not be asked: %s", error)
            return None

    def _restore(self, session: Session, found: Found, ids: Sequence[int]) -> str | None:
        """Read a state into the session. Returns why it could not be used."""
        from dsv41chat.engine.snapshot import restore
        from dsv41chat.store.prompt_cache_files import CacheCorrupt

        try:
            state: State = self.cache.read(self._build, found, _packed(ids))
            restore(session, ids[: state.pos], {**state.growing, **state.fixed}, state.meta)
            return None
        except CacheCorrupt as error:
            reason = str(error)
        except EngineError as error:
            log.warning("a stored state does not fit this build: %s", error)
            reason = "different model build"
            self._remove(found, reason)
        except StoreError as error:
            reason = "unreadable"
            log.warning("the prompt cache could not be read: %s", error)
        session.clear()
        log.warning("a stored state of %d tokens was not used: %s", found.pos, reason)
        return reason

    def _why_cold(self, turn: StateTurn) -> str:
        try:
            return self.cache.why_cold(self._build, turn.conversation, turn.head)
        except StoreError:
            return NO_STATE

    # keeping -----------------------------------------------------------------------------------------------------------

    def plan(self, session: Session, prompt: EncodedPrompt, cached: int) -> dict[int, str]:
        """position -> kind of the marks that the prompt's prefill leaves. cached: where it begins."""
        if self._build is None:
            return {}
        from dsv41chat.engine.snapshot import tail_bytes

        n, grid = len(prompt.ids), self._engine.prefill_chunk if self._only_grid else GRID
        on_grid = (n - SUFFIX_ROWS) // grid * grid
        last = on_grid
        if self._engine.row_invariant:
            lane = session.target.lane
            # Open groups can make a mark off the grid several times as large.
            large = on_grid > cached and tail_bytes(lane, n - 1) - tail_bytes(lane, on_grid) > EXTRA_TAIL_BYTES
            last = on_grid if large else n - 1
        marks = {last: "P"}
        system = prompt.system_end // grid * grid
        if 0 < system < last:
            marks[system] = "S"
        for at in range(LONG_GRID, n - 1, LONG_GRID):
            if all(abs(at - other) >= LONG_GAP for other in marks):
                marks[at] = "G"
        return {at: kind for at, kind in marks.items() if at > cached and self._worth(session, at)}

    def keep(self, session: Session, kind: str, turn: StateTurn) -> None:
        """Copy the state at the session's position and hand it to the writer. Never raises: a state that is not kept costs time only."""
        if self._build is None or turn.conversation in self._forgotten:
            return
        try:
            self._keep(session, kind, turn)
        except Exception as error:  # noqa: BLE001 - the answer is worth more than its state
            self.cache.count(f"not kept: {type(error).__name__}")
            log.exception("a state was not kept")

    def _keep(self, session: Session, kind: str, turn: StateTurn) -> None:
        from dsv41chat.engine.snapshot import fixed, growing
        from dsv41chat.store.prompt_cache_put import Entry

        lane = session.target.lane
        self._cut_chain(session, lane.n)
        chain = self._chains.setdefault(session, [])
        while chain and not self._usable(chain[-1]):
            chain.pop()
        parent = chain[-1] if chain else None
        lo = parent.hi if parent is not None else 0
        tail, meta = fixed(session)
        ids = _packed(lane.ids[: lane.n])
        entry = Entry(
            self._build, parent, lo, lane.n, ids, growing(lane, lo, lane.n), tail, kind, turn.conversation, turn.number,
            self._engine.row_invariant, meta, dict(turn.head),
        )  # fmt: skip
        ticket = self.writer.put(entry)
        if lane.n > lo:
            chain.append(ticket)

    def finish(self, session: Session, turn: StateTurn, prefix: Sequence[int]) -> None:
        """The answer is over. prefix: the ids with which every next prompt of this branch begins.

        The state as it is becomes mark E if such a prompt continues it; otherwise the answer has to be read again without its
        thinking part, which waits until `seal`.
        """
        if session.prefill_rate is not None:
            self._rate = session.prefill_rate
        if self._build is None or self._only_grid:
            return
        lane = session.target.lane
        if lane.n < len(prefix) and lane.common_prefix(prefix) == lane.n:
            if self._worth(session, lane.n):
                self.keep(session, "E", turn)
                self._tidy(session, turn)
        else:
            self._seals[session] = _Seal(turn, tuple(prefix))

    @property
    def sealing_due(self) -> bool:
        return bool(self._seals)

    def seal(self, cancel: Callable[[], bool]) -> bool:
        """Read the last answers as the next prompts will have them, and keep those states. False when cancelled; the rest stays due."""
        for session, due in list(self._seals.items()):
            if self._build is None:
                return True
            self.resume(session, due.ids)
            if not session.prefill(due.ids, cancel=cancel):
                return False
            self._seals.pop(session, None)
            if self._worth(session, session.target.n):
                self.keep(session, "E", due.turn)
                self._tidy(session, due.turn)
            self.cache.count("sealed")
        return True

    def measure(self, stop: Callable[[], bool]) -> None:
        """Find out, once per build and device, whether rows are independent of each other. Stopped, the next call goes on from there."""
        from dsv41chat.engine.invariance import RowsTest, measure_rows, rows_known

        if self._engine is not None and not stop() and not rows_known(self._engine):
            self._rows_test = self._rows_test or RowsTest(self._engine.trunk, self._engine.prefill_chunk)
            measure_rows(self._engine, stop, self._rows_test)

    def forget_seal(self, session: Session) -> None:
        """The next prompt is here: what it needs of the last answer is part of its own prefill."""
        self._seals.pop(session, None)

    def forget_seals(self) -> None:
        self._seals.clear()

    def _tidy(self, session: Session, turn: StateTurn) -> None:
        self.writer.tidy(turn.conversation, self._chains.get(session, [None])[-1])

    def _worth(self, session: Session, pos: int) -> bool:
        from dsv41chat.engine.snapshot import tail_bytes

        if self._min_tokens is not None:
            return pos >= self._min_tokens
        if pos < MIN_TOKENS:
            return False
        rate = session.prefill_rate or self._rate or DEFAULT_RATE
        return tail_bytes(session.target.lane, pos) <= SMALL_TAIL_BYTES or pos / rate >= MIN_SAVED_S

    def _cut_chain(self, session: Session, n: int) -> None:
        """The session stands at n: segments that end later are another continuation's."""
        chain = self._chains.get(session)
        while chain and chain[-1].hi > n:
            chain.pop()

    def _usable(self, ticket: Ticket) -> bool:
        if not ticket.settled:
            return True
        try:
            return ticket.seg_id is not None and self.cache.holds(ticket.seg_id)
        except StoreError:
            return False

    # the user's hand ---------------------------------------------------------------------------------------------------

    def settle(self, timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Wait until everything is on disk. Not on the engine thread."""
        return self.writer is None or self.writer.drain(timeout_s, stopped)

    def forget(self, *conversations: str) -> None:
        """Delete the states of conversations for good; at once, or behind what is being written. Never raises."""
        if self._folder is None:
            return
        self._forgotten.update(conversations)
        if self.writer is not None:
            self.writer.run("deleting states", lambda: self.cache.forget(*conversations))
            return
        from dsv41chat.store.prompt_cache_room import open_existing

        try:
            cache = open_existing(self._folder, self._budget)
            if cache is not None:
                cache.forget(*conversations)
                cache.close()
        except StoreError as error:
            log.warning("states of a deleted conversation are left: %s", error)

    def pin(self, conversation: str, on: bool = True) -> str:
        """Pin or unpin a conversation's newest states; the sentence that says what happened, "" where none are kept."""
        if self.cache is None:
            return ""
        from dsv41chat.store.prompt_cache_files import NoRoom

        try:
            count = self.cache.pin(conversation, on)
        except (NoRoom, StoreError) as error:
            return f"States are not pinned: {error}."
        return f"{count} states are pinned." if on else "The states are no longer pinned."

    def stats(self) -> dict[str, Any]:
        """Numbers for `/stats`; {"off": reason} where nothing is kept."""
        if self.cache is None:
            return {"off": self.off_reason or "not used yet"}
        from dsv41chat.store.prompt_cache_room import stats

        return stats(self.cache)

    def text_key(self, text: str) -> str:
        """A keyed hash of a text, to notice that it changed without keeping it."""
        if self.cache is None:
            return ""
        return hashlib.blake2b(text.encode("utf-8", "replace"), key=bytes.fromhex(self.cache.store_key), digest_size=8).hexdigest()


def listing(settings: Settings) -> list[dict[str, Any]]:
    """The states of every conversation (`prompt_cache_room.listing`) without a loaded build; [] where there are none or they cannot be read."""
    from dsv41chat.store.prompt_cache_room import listing as rows_of
    from dsv41chat.store.prompt_cache_room import open_existing

    try:
        cache = open_existing(settings.paths.states, None, readonly=True)
    except StoreError as error:
        log.info("the prompt cache could not be listed: %s", error)
        return []
    if cache is None:
        return []
    try:
        return rows_of(cache)
    finally:
        cache.close()


def _packed(ids: Sequence[int]) -> bytes:
    """Little-endian uint32."""
    import sys

    out = array("I", ids)
    if sys.byteorder == "big":
        out.byteswap()
    return out.tobytes()
