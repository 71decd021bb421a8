"""EngineHost: which build answers, the engine that is loaded, and one session per conversation.

Everything that touches MLX runs on the host's EngineThread. The engine package is imported when a build is first probed or
opened, so a program without a back end can still read, search and export.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv41chat.engine.errors import ContextFull, DoesNotFit, EngineError, PackIncomplete, PackMissing
from dsv41chat.store import EMBEDDED, StoreError, clean_name, free_name
from dsv41chat.ui.engine_thread import EngineThread, Stream
from dsv41chat.ui.states import States, StateTurn
from dsv41chat.ui.turn_events import BuildRef, BuildView, Piece, Resumed, merge_events

if TYPE_CHECKING:
    from dsv41chat.engine import Engine, SamplingParams, Session
    from dsv41chat.engine.chat.encode import EncodedPrompt, Message
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer
    from dsv41chat.engine.engram.table import EngramSettings
    from dsv41chat.settings import Settings
    from dsv41chat.store import Store
    from dsv41chat.ui.turn_events import TurnOptions

log = logging.getLogger(__name__)

_ANNOUNCED = "ui.embedded_announced"
DEFAULT_KEYS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "effort")
REST_S = 2.0
_LARGE_BYTES = 4 << 30
_SMALL_BYTES = 1 << 30  # below this many resident bytes several lanes can stay open side by side


class BuildAmbiguous(EngineError):
    """A prefix that several builds share. Exit 4, though the code is `ambiguous`."""

    code = "ambiguous"
    status = 4


class EngineHost:
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
        self._embedded = embedded or _embedded_pack
        self._backend = backend or _backend_info
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._info: tuple[str, str] | None = None
        self._claimed: Any = None
        self.allow_second = False
        self.force = False  # load a build although it does not fit
        self.fresh_sessions = False  # --no-cache: every turn starts from an empty lane
        self.states = states or (States.of(settings) if opener is None else States(None))
        self._rest: threading.Timer | None = None
        self._disturbed = threading.Event()

    # builds ------------------------------------------------------------------------------------------------------------

    def builds(self) -> list[BuildRef]:
        """Registered builds, the sub-folders of engine.model_dirs that hold a config.json, and the embedded pack (last)."""
        found: dict[str, BuildRef] = {}
        for row in self.store.builds.list() if self.store is not None else ():
            found[row.name] = BuildRef(row.name, Path(row.folder), registered=True)
        folders = {ref.folder.resolve() for ref in found.values()}
        for parent in self.settings.engine.model_dirs:
            for config in sorted(Path(parent).expanduser().glob("*/config.json")):
                if config.parent.resolve() not in folders:
                    name = free_name(clean_name(config.parent.name), {*found, EMBEDDED})
                    found[name] = BuildRef(name, config.parent)
                    folders.add(config.parent.resolve())
        listed = sorted(found.values(), key=lambda ref: ref.name.casefold())
        return [*listed, BuildRef(EMBEDDED, self._embedded(), embedded=True)]

    def find(self, argument: str) -> BuildRef:
        """A folder with a config.json, an exact name, or a unique prefix, in this order.

        Raises PackMissing (none) or BuildAmbiguous (several, with the candidates).
        """
        builds = self.builds()
        folder = Path(argument).expanduser()
        if (folder / "config.json").is_file():
            known = [ref for ref in builds if ref.folder.resolve() == folder.resolve()]
            return known[0] if known else BuildRef(clean_name(folder.resolve().name), folder)
        for ref in builds:
            if ref.name == argument:
                return ref
        matches = [ref for ref in builds if argument and ref.name.startswith(argument)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = ", ".join(ref.name for ref in matches)
            raise BuildAmbiguous(f"{argument!r} is the start of several builds: {names}.", hint=f"dsv41chat --model {matches[0].name}")
        what = "has no config.json" if folder.is_dir() else "is neither a folder nor the name of a build"
        raise PackMissing(f"{argument!r} {what}.", hint="dsv41chat models list")

    def resolve(self, argument: str | None = None, conversation: Any = None) -> BuildRef:
        """The build that answers: `argument`, else the conversation's, else engine.model, else the last used, else the embedded."""
        if argument:
            return self.find(argument)
        wanted = (conversation.settings or {}).get("build") if conversation is not None else None
        if wanted:
            try:
                return self.find(wanted)
            except EngineError as error:
                log.info("the conversation's build %s is not there any more: %s", wanted, error)
        if self.settings.engine.model:
            return self.find(self.settings.engine.model)
        for row in self.store.builds.last_used() if self.store is not None else ():
            if row.folder is None:
                break
            if (row.folder / "config.json").is_file():
                return BuildRef(row.name, row.folder, registered=True)
        return BuildRef(EMBEDDED, self._embedded(), embedded=True)

    def note_use(self, build: BuildView) -> None:
        """Remember that `build` answers: it is the default of later starts."""
        if self.store is None or self.store.readonly:
            return
        try:
            if build.embedded:
                self.store.builds.touch(EMBEDDED)
            else:
                self.store.builds.use(build.folder, family=build.family, fingerprint=build.fingerprint)
        except StoreError as error:
            log.warning("the use of %s could not be noted: %s", build.name, error)

    def first_start_notice(self, build: BuildView) -> str | None:
        """One line, once per data folder, that says which small model answers and how to add a real build."""
        if not build.embedded or (self.store is not None and _ANNOUNCED in self.store.facts):
            return None
        if self.store is not None and not self.store.readonly:
            self.store.facts[_ANNOUNCED] = build.fingerprint
        return f"{build.name} answers: {card_line(build.folder)} Add a real build: dsv41chat models add DIR"

    def probe(self, ref: BuildRef) -> BuildView:
        """Read the headers of a build, no weights. Waits for the engine thread, which lays the build out. Raises PackError."""
        if self.view is not None and self.view.folder == ref.folder:
            return self.view
        info = self.thread.call(self._prober, ref.folder)
        return BuildView(
            ref.name, ref.folder, info.family, info.fingerprint, ref.embedded, context=info.context, drafter=info.drafter,
            resident_bytes=info.resident_bytes, table_bytes=info.table_bytes, bytes=info.bytes, has_tokenizer=info.has_tokenizer,
            notes=tuple(info.notes), defaults=pack_defaults(ref.folder), formats=info.formats, admission=info.admission,
        )  # fmt: skip

    def _margin(self) -> int | None:
        margin = self.settings.engine.memory_margin
        return None if margin == "auto" else margin

    def _probe_pack(self, folder: Path) -> Any:
        from dsv41chat.engine.backend import require_backend

        require_backend()  # the modules that read headers are also those that make arrays of them
        from dsv41chat.engine import probe_pack

        context = self.settings.engine.context
        resident = table_settings(self.settings).mode == "resident"
        return probe_pack(folder, context=None if context == "auto" else context, tables_resident=resident, margin=self._margin())

    def load_tokenizer(self, ref: BuildRef) -> ChatTokenizer:
        """Read a build's tokenizer without its weights. Raises PackError."""
        from dsv41chat.engine.chat.tokenizer import ChatTokenizer

        return ChatTokenizer.from_file(ref.folder / "tokenizer.json")

    def routes(self) -> list[str]:
        """What would compute here, in words; each is checked when a build is opened. Raises RouteUnavailable."""
        return self.thread.call(_preview_routes, self.settings.engine.routes)

    def verify(self, ref: BuildRef, goldens: Path, **options: Any) -> Any:
        """`engine.verify_goldens` on the engine thread."""
        return self.thread.call(_verify_goldens, ref.folder, goldens, **options)

    def backend(self) -> tuple[str, str]:
        """(device, MLX version). Raises BackendMissing with the install command."""
        if self._info is None:
            self._info = self.thread.call(self._backend)
        return self._info

    # the loaded engine -------------------------------------------------------------------------------------------------

    def loaded(self, view: BuildView) -> bool:
        return self.engine is not None and self.view is not None and self.view.folder == view.folder

    def load(self, view: BuildView, cancel: Callable[[], bool] = lambda: False) -> Stream:
        """Open a probed build; iterate the stream for Loading events. On failure the build that was loaded before is opened again.

        A missing or incomplete pack is refused by `probe`, while the old build is still there. The iteration raises what
        open_engine raises: PackError, DoesNotFit, Cancelled, BackendMissing.
        """
        self._claim(view)

        def job(emit: Callable[[Any], None]) -> None:
            previous = self.view
            self._drop()
            try:
                self._open(view, emit, cancel)
            except BaseException:
                if previous is not None and previous.folder != view.folder:
                    log.info("loading %s failed, opening %s again", view.name, previous.name)
                    self._open(previous, lambda event: None, lambda: False)
                raise

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
        self.engine = self._opener(
            view.folder, cache_quant=e.cache_quant, linear_input_fp8=e.linear_input_fp8, qat_sim=e.qat_sim, exact=e.exact,
            routes=e.routes, context=None if e.context == "auto" else e.context,
            cache_dir=self.settings.paths.cache, facts=self.store.facts if self.store is not None else None,
            engram=table_settings(self.settings), force=self.force, margin=self._margin(), progress=emit, cancel=cancel,
        )  # fmt: skip
        self.view = view
        self.load_s = time.monotonic() - started
        self.states.bind(self.engine, view.name)

    def _drop(self) -> None:
        self.states.unbind()
        self._sessions.clear()
        if self.engine is not None:
            self.engine.close()
        self.engine = None
        self.view = None

    def unload(self) -> None:
        """Forget the engine and every session."""
        self.thread.call(self._drop)
        self._release()

    def session(self, key: str) -> Session:
        """The session of a conversation (of a batch: shared). Large builds keep one lane, small ones eight; the least recently used goes first."""
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

    def draft_limit(self, key: str) -> int:
        """The deepest draft that the loaded build can make; 0 without a drafter."""
        return self.session(key).drafter.block

    def cached(self, key: str, prompt: EncodedPrompt) -> int:
        """How many ids of `prompt` that session holds already (0 without one)."""
        session = self._sessions.get(key)
        return 0 if session is None else min(self.thread.call(session.held, prompt.ids), len(prompt.ids) - 1)

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
            resumed = self.states.resume(session, prompt.ids, turn, scratch=attempt > 0)
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
            session = self._session(key)
            held = session.held(prefix)
            return Resumed(held, len(prefix), 0.0, "memory") if held else self.states.resume(session, prefix, turn)

        return self.thread.call(job)

    # between turns -----------------------------------------------------------------------------------------------------

    def after_turn(self, key: str, turn: StateTurn, prefix: Sequence[int]) -> None:
        """An answer was stored. prefix: the ids with which the next prompt of its branch begins. Does not wait."""

        def job() -> None:
            session = self._sessions.get(key)
            if session is not None:
                try:
                    self.states.finish(session, turn, prefix)
                except Exception:  # noqa: BLE001 - the answer is stored; only its state is not
                    log.exception("the state after a turn is not kept")

        if self.states.ready:
            self.thread.submit(job)

    def rest(self, delay_s: float = REST_S) -> None:
        """Nothing runs: after a while do what waits for that (read a thinking answer again, measure). Ends when disturbed."""
        self.disturb()
        if self.states.on:
            self._disturbed = threading.Event()
            self._rest = threading.Timer(delay_s, self._rest_now, [self._disturbed])
            self._rest.daemon = True
            self._rest.start()

    def _rest_now(self, disturbed: threading.Event) -> None:
        try:
            self.thread.submit(self._idle_work, disturbed.is_set)
            self.thread.submit(self._time_drafting, disturbed.is_set)
        except RuntimeError:
            log.debug("the engine thread has ended")

    def _idle_work(self, stop: Callable[[], bool]) -> None:
        try:
            self.states.seal(stop)
            self.states.measure(stop)
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and the conversation is complete without it
            self.states.forget_seals()
            log.warning("idle work failed: %s", error, exc_info=not isinstance(error, EngineError))

    def _time_drafting(self, stop: Callable[[], bool]) -> None:
        """Once per build and machine: what rows and drafter cost, which the adaptive depth goes by."""
        drafting = getattr(self.engine, "drafting", None)
        try:
            if drafting is not None and drafting.wants_calibration and not stop():
                drafting.calibrate(stop)
        except EngineError as error:
            log.warning("drafting could not be timed: %s", error)

    def disturb(self) -> None:
        """Somebody wants the engine: what runs in idle time gives way at its next chunk."""
        self._disturbed.set()
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def settle(self, timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Finish what makes the next turn quick, and wait until it is on disk. False when time ran out or `stopped` said so."""
        self.disturb()
        if not self.states.ready:
            return True
        deadline = time.monotonic() + timeout_s
        over = lambda: stopped() or time.monotonic() >= deadline
        sealed = self.thread.submit(self._idle_work, over)
        while not over():
            try:
                sealed.result(timeout=0.05)
                break
            except TimeoutError:
                continue
        return self.states.settle(max(0.0, deadline - time.monotonic()), stopped)

    def close(self, timeout_s: float | None = 5.0) -> bool:
        """Unload and end the engine thread. False: a job still runs (the process may leave without it)."""
        self.disturb()
        self.thread.submit(self._drop)
        ended = self.thread.close(timeout_s)
        self.states.close(timeout_s if timeout_s is not None else 30.0)
        if ended:
            self._release()
        return ended


def card_line(folder: Path) -> str:
    """The first paragraph of a pack's MODEL_CARD.md below its heading, on one line; "" if there is none."""
    try:
        text = (Path(folder) / "MODEL_CARD.md").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return next((part for part in paragraphs if part and not part.startswith(("#", "---"))), "")


def pack_defaults(folder: Path) -> dict[str, Any]:
    """The sampling defaults of a pack's generation_config.json; keys that the application does not know are ignored."""
    try:
        data = json.loads((Path(folder) / "generation_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: data[key] for key in DEFAULT_KEYS if key in data} if isinstance(data, dict) else {}


def table_settings(settings: Settings) -> EngramSettings:
    """The `[engram]` section and engine.engram as the reader takes them."""
    from dsv41chat.engine.engram.table import EngramSettings

    t = settings.engram
    return EngramSettings(
        mode=settings.engine.engram, scales=t.scales, access=t.access, path=t.path, cache_budget=t.cache_budget, row_cache=t.row_cache
    )


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


def _preview_routes(wanted: str) -> list[str]:
    from dsv41chat.engine.kernels.routes import preview

    return preview(wanted)


def _verify_goldens(folder: Path, goldens: Path, **options: Any) -> Any:
    from dsv41chat.engine import verify_goldens

    return verify_goldens(folder, goldens, **options)


def _embedded_pack() -> Path:
    from dsv41chat.nano import embedded_pack

    return embedded_pack()


def _backend_info() -> tuple[str, str]:
    from dsv41chat.engine.backend import backend_info

    return backend_info()
