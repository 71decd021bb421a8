"""EngineHost: which build answers, the engine that is loaded, and one session per conversation.

Everything that touches MLX runs on the host's EngineThread. The engine package is imported when a build is first probed or
opened, so a program without a back end can still read, search and export.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv41chat.engine.errors import ContextFull, DeviceLost, DoesNotFit, EngineError, PackIncomplete, RouteUnavailable, device_failure
from dsv41chat.ui.builds import Builds, backend_of, embedded_folder, table_settings
from dsv41chat.ui.engine_thread import EngineThread, Stream
from dsv41chat.ui.idle import IdleWork
from dsv41chat.ui.states import States, StateTurn
from dsv41chat.ui.turn_events import BuildView, Piece, Resumed, Resuming, merge_events

if TYPE_CHECKING:
    from dsv41chat.engine import Engine, SamplingParams, Session
    from dsv41chat.engine.chat.encode import EncodedPrompt, Message
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer
    from dsv41chat.settings import Settings
    from dsv41chat.store import Store
    from dsv41chat.ui.turn_events import TurnOptions

log = logging.getLogger(__name__)

_LARGE_BYTES = 4 << 30
_SMALL_BYTES = 1 << 30  # below this many resident bytes several lanes can stay open side by side


class EngineHost(Builds, IdleWork):
    """settings: engine.* is read. store: the build registry and the measured verdicts; None keeps neither.

    opener, prober, embedded: stand-ins for `engine.open_engine`, `engine.probe_pack` and `nano.embedded_pack` (tests).
    states: computed states of conversations; by default as the settings say, with a stand-in for the engine off.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store | None = None,
        *,
        opener: Callable[..., Engine] | None = None,
        prober: Callable[[Path], Any] | None = None,
        embedded: Callable[[], Path] | None = None,
        backend: Callable[[], tuple[str, str]] | None = None,
        states: States | None = None,
    ):
        self.settings = settings
        self.store = store
        self.thread = EngineThread()
        self.engine: Engine | None = None
        self.view: BuildView | None = None
        self.load_s = 0.0
        self._opener = opener or _open_engine
        self._prober = prober or self._probe_pack
        self._embedded = embedded or embedded_folder
        self._backend = backend or backend_of
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._info: tuple[str, str] | None = None
        self._told_absent: set[str] = set()
        self._claimed: Any = None
        self.allow_second = False
        self.force = False  # load a build although it does not fit
        self.lost: DeviceLost | None = None  # the device stopped answering: nothing runs any more
        self.fresh_sessions = False  # --no-cache: every turn starts from an empty lane
        self.states = states or (States.of(settings) if opener is None else States(None))
        self._rest: threading.Timer | None = None
        self._disturbed = threading.Event()

    # the loaded engine -------------------------------------------------------------------------------------------------

    def loaded(self, view: BuildView) -> bool:
        return self.engine is not None and self.view is not None and self.view.folder == view.folder

    def load(self, view: BuildView, cancel: Callable[[], bool] = lambda: False) -> Stream:
        """Open a probed build; iterate the stream for Loading events. On failure the build that was loaded before is opened again.

        A missing or incomplete pack is refused by `probe`, while the old build is still there. The iteration raises what
        open_engine raises: PackError, DoesNotFit, Cancelled, BackendMissing.
        """
        self._claim(view)
        self._require_device()

        def job(emit: Callable[[Any], None]) -> None:
            previous = self.view
            self._drop()
            try:
                with self._device_watch():
                    self._open(view, emit, cancel)
            except DeviceLost:
                raise
            except BaseException:
                if previous is not None and previous.folder != view.folder:
                    log.info("loading %s failed, opening %s again", view.name, previous.name)
                    self._open(previous, lambda event: None, lambda: False)
                raise

        self.disturb()
        return self.thread.stream(job)

    def _claim(self, view: BuildView) -> None:
        """Only one process of this user may hold a large build, unless --allow-second was given. Raises DoesNotFit."""
        if view.resident_bytes < _LARGE_BYTES or self.allow_second or self._claimed is not None:
            return
        import fcntl

        folder = self.settings.paths.state
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(folder / "engine.lock", "a+")  # noqa: SIM115 - held until the process ends, which releases it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise DoesNotFit(
                f"Another dsv41chat process has a large build loaded; {view.name} needs {view.resident_bytes / 1e9:.1f} GB more.",
                hint="end the other process, or --allow-second",
            ) from None
        self._claimed = file

    def _release(self) -> None:
        if self._claimed is not None:
            self._claimed.close()
            self._claimed = None

    def _open(self, view: BuildView, emit: Callable[[Any], None], cancel: Callable[[], bool]) -> None:
        started = time.monotonic()
        e = self.settings.engine
        self._info = self._info or self._backend()
        try:
            self.engine = self._opener(
                view.folder, cache_quant=e.cache_quant, linear_input_fp8=e.linear_input_fp8, qat_sim=e.qat_sim, exact=e.exact,
                routes=e.routes, context=None if e.context == "auto" else e.context,
                cache_dir=self.settings.paths.cache, facts=self.store.facts if self.store is not None else None,
                engram=table_settings(self.settings), force=self.force, margin=self._margin(), progress=emit, cancel=cancel,
            )  # fmt: skip
        except RouteUnavailable as error:
            raise self.as_set(error) from error
        self.view = view
        self.load_s = time.monotonic() - started
        self.states.bind(self.engine, view.name)

    def _drop(self) -> None:
        self.states.unbind()
        self._sessions.clear()
        if self.engine is not None:
            self.engine.close()
            self.engine = None
            # Its operations and what computes them refer to each other, and the next build needs their memory now.
            gc.collect()
        self.view = None

    @contextmanager
    def _device_watch(self, key: str | None = None) -> Iterator[None]:
        """Turns what MLX raises into OutOfMemory (session `key` begins anew then) or DeviceLost (nothing runs any more)."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            failure = device_failure(error)
            if failure is None:
                raise
            log.error("the device failed", exc_info=error)
            if isinstance(failure, DeviceLost):
                self.lost = failure
            if key is not None:
                # Nobody knows how far its lane came.
                self._sessions.pop(key, None)
            raise failure from error

    def _require_device(self) -> None:
        if self.lost is not None:
            raise DeviceLost(str(self.lost), self.lost.hint)

    def unload(self) -> None:
        """Forget the engine and every session."""
        self.disturb()
        self.thread.call(self._drop)
        self._release()

    def session(self, key: str) -> Session:
        """The session of a conversation (of a batch: shared). Large builds keep one lane, small ones eight; the least recently used goes first."""
        self._require_device()
        with self.wanted():
            return self.thread.call(self._session, key)

    def _session(self, key: str) -> Session:
        if key in self._sessions:
            self._sessions.move_to_end(key)
            return self._sessions[key]
        keep = 8 if self.view is not None and self.view.resident_bytes < _SMALL_BYTES else 1
        while len(self._sessions) >= keep:
            self._sessions.popitem(last=False)
        session = self._sessions[key] = self.engine.new_session()
        return session

    def tokenizer(self) -> ChatTokenizer:
        """Of the loaded engine. Raises PackIncomplete if the pack has none."""
        if self.engine.tokenizer is None:
            name = self.view.name
            raise PackIncomplete(f"{name} has no tokenizer.json, so it cannot chat.", hint=f"dsv41chat models verify {name}")
        return self.engine.tokenizer

    def table_stats(self) -> dict[str, dict]:
        """The loaded engine's engram counters by table (engine/engram/counters.py); {} without tables. Any thread may ask."""
        engine = self.engine
        return engine.table_stats() if engine is not None else {}

    def device_memory(self) -> tuple[int, int] | None:
        """(bytes the loaded engine's arrays take now, their peak); None without an engine. Any thread may ask."""
        engine = self.engine
        return engine.memory() if engine is not None else None

    def draft_limit(self, key: str) -> int:
        """The deepest draft that the loaded build can make; 0 without a drafter."""
        return self.session(key).drafter.block

    def cached(self, key: str, prompt: EncodedPrompt) -> int:
        """How many ids of `prompt` that session holds already (0 without one)."""
        session = self._sessions.get(key)
        if session is None:
            return 0
        with self.wanted():
            return min(self.thread.call(session.held, prompt.ids), len(prompt.ids) - 1)

    def encode(self, messages: Sequence[Message], options: TurnOptions) -> EncodedPrompt:
        """The ids of a conversation for the loaded build. Runs on the caller's thread (no MLX)."""
        return self._encode(messages, options)

    def shared_beginning(self, one: Sequence[Message], other: Sequence[Message], options: TurnOptions) -> tuple[int, ...]:
        """The ids that the prompts of two conversations begin with."""
        a, b = self._encode(one, options).ids, self._encode(other, options).ids
        return a[: next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))]

    def _encode(self, messages: Sequence[Message], options: TurnOptions) -> EncodedPrompt:
        from dsv41chat.engine.chat.encode import RenderOptions, encode_prompt

        render = RenderOptions(
            thinking=options.thinking, effort=options.effort if options.thinking else "high",
            keep_reasoning=options.keep_reasoning, v4_effort=self._v4_effort(options.v4_effort),
        )  # fmt: skip
        return encode_prompt(self.engine.tokenizer, self.engine.family, messages, render)

    def _v4_effort(self, setting: str) -> str:
        from dsv41chat.engine.chat.effort import detect_v4_profile

        return detect_v4_profile(self.view.folder, self.view.name) if setting == "auto" else setting

    def generate(
        self, key: str, prompt: EncodedPrompt, options: TurnOptions, seed: int, cancel: Callable[[], bool], turn: StateTurn | None = None
    ) -> Stream:
        """Start an answer; iterate the stream for the engine's events, merged to at most 60 per second. Ends with Done.

        turn: what the store of states must know; with it the stream begins with Resumed.
        """
        self._require_device()
        max_tokens = max(1, min(options.token_limit(), self.engine.context_limit - len(prompt.ids)))

        def job(emit: Callable[[Any], None]) -> None:
            if self.fresh_sessions:
                self._sessions.pop(key, None)
            session = self._session(key)

            def run(**marks: Any) -> Iterator[Any]:
                return session.generate(
                    prompt, _sampling(options, seed), max_tokens=max_tokens, max_answer_tokens=options.max_answer_tokens, stop=options.stop,
                    draft=options.draft, loop_stop=options.loop_stop, cancel=cancel, **marks,
                )  # fmt: skip

            self.states.forget_seal(session)
            with self._device_watch(key):
                if turn is None or not self.states.ready:
                    for event in run():
                        emit(event)
                    return
                self.states.begin()
                try:
                    self._generate(session, prompt, turn, run, emit)
                finally:
                    self.states.end()

        self.disturb()
        return self.thread.stream(job, merge=merge_events)

    def _generate(
        self, session: Session, prompt: EncodedPrompt, turn: StateTurn, run: Callable[..., Iterator[Any]], emit: Callable[[Any], None]
    ) -> None:
        """Resume, answer, and leave marks on the way. A state that makes the prompt fail goes, and the prompt is read again, once."""
        for attempt in (0, 1):
            resumed = self.states.resume(session, prompt.ids, turn, scratch=attempt > 0, tell=lambda tokens: emit(Resuming(tokens)))
            emit(resumed)
            plan = self.states.plan(session, prompt, resumed.tokens)
            answered = False
            try:
                for event in run(marks=tuple(plan), on_mark=lambda n, plan=plan: self.states.keep(session, plan[n], turn)):
                    answered = answered or isinstance(event, Piece)
                    emit(event)
                return
            except EngineError as error:
                final = answered or attempt == 1 or resumed.source != "disk" or isinstance(error, ContextFull)
                if final or not self.states.drop(session, prompt.ids):
                    raise
                log.warning("the prompt failed right after a stored state, reading it from the start: %s", error)

    def prepare(self, key: str, turn: StateTurn, prefix: Sequence[int]) -> Resumed:
        """Bring a conversation's state back before its next prompt is there; a lane in use is left alone. Waits for the engine thread."""

        def job() -> Resumed:
            with self._device_watch(key):
                session = self._session(key)
                held = session.held(prefix)
                return Resumed(held, len(prefix), 0.0, "memory") if held else self.states.resume(session, prefix, turn)

        with self.wanted():
            return self.thread.call(job)

    def close(self, timeout_s: float | None = 5.0) -> bool:
        """Unload and end the engine thread. False: a job still runs (the process may leave without it)."""
        self.disturb()
        self.thread.submit(self._drop)
        ended = self.thread.close(timeout_s)
        self.states.close(timeout_s if timeout_s is not None else 30.0)
        if ended:
            self._release()
        return ended


def _sampling(options: TurnOptions, seed: int) -> SamplingParams:
    from dsv41chat.engine import SamplingParams

    return SamplingParams(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p,
        presence_penalty=options.presence_penalty, frequency_penalty=options.frequency_penalty, seed=seed,
    )  # fmt: skip


def _open_engine(folder: Path, **options: Any) -> Engine:
    from dsv41chat.engine.backend import require_backend

    require_backend()
    from dsv41chat.engine import open_engine

    return open_engine(folder, **options)
