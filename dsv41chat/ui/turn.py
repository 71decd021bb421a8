"""TurnController: one turn, from the user's text to the stored answer. Both front ends drive it; it knows no widgets.

    save the user's message -> find the build -> load it if needed -> encode the path to ids -> stream -> checkpoint -> save

The user's message is committed before any engine work. A piece of the answer is given to the store before it is shown; the
store writes at the first token and then so often that a kill -9 loses less than a second of what was shown. Verbatim ids of
earlier answers go back into the prompt, so the conversation's session finds them in its lane and prefills only what is new.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsv41chat.engine.errors import Cancelled, ContextFull, ContextOutOfRange, EngineError
from dsv41chat.engine.events import Done
from dsv41chat.store import Locked, NotFound, StoreError
from dsv41chat.ui.answer_row import AnswerRow
from dsv41chat.ui.engine_thread import Abandoned, Stream
from dsv41chat.ui.prompting import chat_messages, ids_hash
from dsv41chat.ui.states import NO_STATE, StateTurn
from dsv41chat.ui.turn_events import (
    LEAF,
    BuildRef,
    BuildView,
    ConversationView,
    Failed,
    Finished,
    Noticed,
    Piece,
    Ready,
    Resumed,
    Saved,
    Started,
    StatusAsked,
    TurnEvent,
    TurnOptions,
    TurnRequest,
    Warned,
)

if TYPE_CHECKING:
    from dsv41chat.engine.chat.encode import EncodedPrompt, Message
    from dsv41chat.settings import Settings
    from dsv41chat.store import Store
    from dsv41chat.ui.host import EngineHost

log = logging.getLogger(__name__)

END_THINK = "</think>"
LONG_TEXT = 1 << 18  # characters that are encoded in a fraction of a second; a longer text is first counted in pieces


class Unusable(EngineError):
    """An option that the chosen build cannot do."""

    code = "usage"


class TextTooLong(ContextFull):
    """A text that is refused before it is encoded whole. tokens: what it has at least."""

    def __init__(self, message: str, hint: str, tokens: int):
        super().__init__(message, hint=hint)
        self.tokens = tokens


class TurnBusy(RuntimeError):
    """A second turn was started while one runs. The front end queues instead."""


class TurnController:
    """store: where conversations live (an in-memory one under --no-save). One turn runs at a time; `run` may be iterated on any
    thread, `cancel` and `abort` may be called from any thread or signal handler."""

    def __init__(self, store: Store, host: EngineHost, settings: Settings):
        self.store = store
        self.host = host
        self.settings = settings
        if store.path is None:
            host.states.switch_off()
        store.on_deleted = host.states.forget
        self.last_conversation_id: str | None = None  # of the newest turn, once its message is kept, or opening
        self._busy = threading.Lock()
        self._cancelled = False  # plain attributes: a signal handler may not take a lock
        self._aborted = False
        self._stream: Stream | None = None

    # conversations -----------------------------------------------------------------------------------------------------

    def open(self, ref: str | None = None, *, leaf: str | None = None) -> ConversationView:
        """A stored conversation (id prefix or exact title; None: the last used one) along the branch that ends in `leaf`.

        Takes the conversation's lock; when another live process holds it the view is read-only. Raises StoreError (not found,
        ambiguous).
        """
        conversation = self.store.conversation(ref) if ref is not None else self.store.last_conversation()
        if conversation is None:
            raise NotFound("There is no conversation yet.", 'dsv41chat --headless "your question"')
        self.last_conversation_id = conversation.id
        holder = None if self.store.readonly else self._lock(conversation.id)
        # Read behind the lock: taking that of a dead process ends its answer, as interrupted.
        conversation = self.store.conversation(conversation.id)
        leaf = leaf or conversation.leaf_id
        messages = tuple(self.store.path_to(leaf)) if leaf else ()
        interrupted = bool(messages) and messages[-1].state == "interrupted"
        return ConversationView(conversation, messages, holder is not None or self.store.readonly, holder, interrupted)

    def options(self, conversation: Any = None, build: BuildView | None = None) -> TurnOptions:
        """What a turn in this conversation would use now (spec: app, section 10, order of precedence)."""
        return self.settings.turn_options(conversation, build)

    def edit_request(self, message_id: str, text: str) -> TurnRequest:
        """Edit of a user message: a sibling with the new text; unchanged text is one more answer to the old one."""
        message = self.store.message(message_id)
        if message.text == text:
            return TurnRequest(message.conversation_id, regenerate=message_id)
        return TurnRequest(message.conversation_id, text=text, parent_id=message.parent_id)

    # running -----------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._busy.locked()

    def cancel(self) -> None:
        """End the running turn at the next prefill chunk or round; what was produced is kept."""
        self._cancelled = True

    def abort(self) -> None:
        """End the running turn without waiting for the engine; what was produced is kept as interrupted."""
        self._cancelled = self._aborted = True
        stream = self._stream
        if stream is not None:
            stream.abandon()

    def ask_status(self) -> None:
        """Have the running turn yield StatusAsked. Safe in a signal handler."""
        stream = self._stream
        if stream is not None:
            stream.emit(StatusAsked())

    @property
    def saving(self) -> bool:
        """Whether conversations outlive this process."""
        return self.store.path is not None

    def load(self, ref: BuildRef) -> Iterator[TurnEvent]:
        """Load a build without a turn; yields Loading. Raises what probe and load of EngineHost raise, Abandoned after `abort`."""
        view = self.host.probe(ref)
        if not self.host.loaded(view):
            self._stream = self.host.load(view, lambda: self._cancelled)
            yield from self._stream

    def estimate(self, request: TurnRequest, stopped: Callable[[], bool] = lambda: False) -> dict[str, int]:
        """prompt_tokens, cached_tokens, prefill_tokens and context_limit of a turn, without running or storing anything.

        The build is loaded if it is not. Raises EngineError (ContextFull for a text far beyond the context, which is not read to its end;
        Cancelled when `stopped` says so before it is) and StoreError.
        """
        conversation = self.store.conversation(request.conversation_id) if request.conversation_id else None
        ref = self.host.resolve(request.build, conversation)
        for _ in self.load(ref):
            pass
        settings = (conversation.settings or {}) if conversation is not None else {}
        system = settings.get("system") if conversation is not None else request.system or self.settings.chat.system
        parent_id = (conversation.leaf_id if conversation is not None else None) if request.parent_id == LEAF else request.parent_id
        path = self.store.path_to(parent_id) if parent_id else []
        options = replace(self.options(conversation, self.host.view), **request.overrides)
        prompt = self.encode(chat_messages(system, path, self.host.tokenizer(), last=request.text), options, stopped)
        cached = max(self.host.cached(conversation.id, prompt) if conversation is not None else 0, self.host.states.peek(prompt.ids))
        return {
            "prompt_tokens": len(prompt.ids), "cached_tokens": cached, "prefill_tokens": len(prompt.ids) - cached,
            "context_limit": self.host.engine.context_limit,
        }  # fmt: skip

    def encode(self, messages: Sequence[Message], options: TurnOptions, stopped: Callable[[], bool]) -> EncodedPrompt:
        """The ids of a prompt. A text that is certainly too long for the context is refused after as much of it as the context holds.

        Raises TextTooLong, and Cancelled when `stopped` says so before a long text is counted.
        """
        from dsv41chat.engine.chat.tokenizer import count_text

        limit, build = self.host.engine.context_limit, self.host.view
        for message in messages:
            if len(message.content) <= LONG_TEXT or message.content_ids is not None:
                continue
            tokens = count_text(self.host.tokenizer(), message.content, limit, stopped)
            if tokens > limit:
                size = f"{len(message.content.encode('utf-8', 'replace')):,} bytes"
                larger = "--context with a larger number, " if limit < (build.context or 0) else ""
                raise TextTooLong(
                    f"A text of {size} does not fit: it has more than {limit:,} tokens, and the context of {build.name} holds {limit:,}.",
                    f"{larger}a shorter text", tokens,
                )  # fmt: skip
        return self.host.encode(messages, options)

    def run(self, request: TurnRequest, stopped: Callable[[], bool] = lambda: False) -> Iterator[TurnEvent]:
        """Run one turn; see turn_events for the order of events. Never raises for what a user can cause: it yields Failed.

        Closing the iterator early cancels the turn, waits for the engine to stop and keeps what was produced.
        stopped: polled like the cancel flag, for a caller that was asked to stop before the turn began.
        """
        if not self._busy.acquire(blocking=False):
            raise TurnBusy("a turn is running")
        self._cancelled = self._aborted = False
        self.host.disturb()
        turn = _Turn(self, request, stopped)
        try:
            yield from turn.events()
        finally:
            self._stream = None
            turn.leave_state()
            # Before the next turn may begin: that one ends the rest.
            self.host.rest()
            self._busy.release()

    # computed states ---------------------------------------------------------------------------------------------------

    def prepare(self, conversation_id: str) -> Resumed | None:
        """Bring the state of an opened conversation back, so that its next turn reads only the new message.

        None where there is nothing to bring back: no build is loaded, a turn runs, no answer yet. Raises EngineError, StoreError.
        """
        if self.running or self.host.engine is None or not self.host.states.ready:
            return None
        conversation = self.store.conversation(conversation_id)
        path = self.store.path_to(conversation.leaf_id) if conversation.leaf_id else []
        if not path or path[-1].role != "assistant":
            return None
        options = self.options(conversation, self.host.view)
        turn = self.state_turn(conversation, path, options)
        return self.host.prepare(conversation.id, turn, self.next_prefix(conversation, path, options))

    def state_turn(self, conversation: Any, path: Sequence[Any], options: TurnOptions) -> StateTurn:
        """What the store of states must know about a turn at the end of `path`."""
        system = (conversation.settings or {}).get("system")
        head = {"effort": str(options.effort), "system text": self.host.states.text_key(system or "")}
        users = sum(m.role == "user" for m in path)
        return StateTurn(conversation.id, users, any(m.role == "assistant" for m in path), head)

    def next_prefix(self, conversation: Any, path: Sequence[Any], options: TurnOptions) -> tuple[int, ...]:
        """The ids with which the prompt of every next message after `path` begins."""
        system = (conversation.settings or {}).get("system")
        tokenizer = self.host.tokenizer()
        one, other = (chat_messages(system, path, tokenizer, last=text) for text in "ab")
        return self.host.shared_beginning(one, other, options)

    def _lock(self, conversation_id: str) -> int | None:
        """Take the conversation's lock; the pid of the process that holds it, or None if it is ours."""
        try:
            self.store.lock(conversation_id)
        except Locked as error:
            return getattr(error, "pid", None) or 0
        return None


class _Turn:
    """The state of one run."""

    def __init__(self, controller: TurnController, request: TurnRequest, stopped: Callable[[], bool]):
        self.stopped = stopped
        self.c = controller
        self.store = controller.store
        self.host = controller.host
        self.request = request
        self.started = time.monotonic()
        self.conversation: Any = None
        self.parent: Any = None  # the user's message that is answered
        self.kept: Any = None  # the answer that is continued
        self.answer: AnswerRow | None = None
        self.prompt_tokens = 0
        self.load_s = self.resume_s = 0.0
        self.state: StateTurn | None = None
        self.over = False  # the engine said how the answer ended
        self.message: Any = None  # the stored answer
        self.ref: BuildRef | None = None

    def events(self) -> Iterator[TurnEvent]:
        try:
            if self.request.build_first and self.request.conversation_id is None:
                self._refuse_options(self.host.resolve(self.request.build))
            new = self._place()
            try:
                ref = self.ref = self.host.resolve(self.request.build, self.conversation)
                build = self.host.probe(ref)
                device, mlx = self.host.backend()
            except (EngineError, StoreError):
                yield self._begin(None, {}, None, None)
                yield from new
                raise
            options = self._options(build)
            seed = self._seed(options)
            yield self._begin(build, self._params(options, seed, build), device, mlx)
            yield from new
            for kind, notice in (("build", self.host.absent_notice(ref)), ("embedded", self.host.first_start_notice(build))):
                if notice is not None:
                    yield Noticed(kind, notice)
            yield from self._load(build)
            yield from self._answer(options, seed, device, mlx)
        except Abandoned:
            yield self._failed("interrupted", "The turn was stopped before the engine answered.", "", state="interrupted")
        except Cancelled:
            yield self._finished_without_engine()
        except TextTooLong as error:
            self.prompt_tokens = error.tokens
            yield self._failed(error.code, str(error), error.hint)
        except EngineError as error:
            yield replace(self._failed(error.code, str(error), error.hint), status=getattr(error, "status", None))
        except StoreError as error:
            yield self._failed(getattr(error, "code", "store"), str(error), getattr(error, "hint", ""))
        except MemoryError as error:
            yield self._failed("out_of_memory", f"Out of memory while answering ({error}).", "--context with a smaller number")
        except Exception as error:  # noqa: BLE001 - the last resort: one sentence for the user, the traceback in the log
            log.exception("the turn failed")
            yield self._failed("internal", f"{type(error).__name__}: {error}", "")

    # before the engine -------------------------------------------------------------------------------------------------

    def _refuse_options(self, ref: BuildRef) -> None:
        """Raise ContextOutOfRange or RouteUnavailable for what this build or this machine cannot have, before anything is stored."""
        self.host.refuse_routes()
        wanted = self.c.settings.engine.context
        if wanted == "auto":
            return
        try:
            build = self.host.probe(ref)
        except EngineError:
            return  # said where the build is loaded
        if build.context is not None and wanted > build.context:
            raise ContextOutOfRange(
                f"A context of {wanted:,} tokens was asked for; {build.name} holds 1 to {build.context:,}.", hint=f"--context {build.context}"
            )

    def _place(self) -> list[Saved]:
        """Find or make the conversation, commit the user's message. Returns the Saved events of what was written."""
        r = self.request
        if r.conversation_id is None:
            system = self.c.settings.chat.system if r.system is None else r.system
            own = {"system": system} if system else {}
            self.conversation = self.store.new_conversation(r.title, {**r.settings, **own})
        else:
            self.conversation = self.store.conversation(r.conversation_id)
        self.store.lock(self.conversation.id)
        if r.text is not None:
            parent_id = self.conversation.leaf_id if r.parent_id == LEAF else r.parent_id
            self.parent = self.store.add_message(self.conversation.id, parent_id, "user", r.text, queue_id=r.queue_id, clear_draft=r.clear_draft)
            self.c.last_conversation_id = self.conversation.id
            self._log_text(self.parent)
            return [Saved(self.parent)]
        self.c.last_conversation_id = self.conversation.id
        message = self.store.message(r.regenerate or r.continue_from)
        if r.continue_from is not None:
            self.kept = message
        self.parent = self.store.message(message.parent_id) if message.role == "assistant" else message
        return []

    def _begin(self, build: BuildView | None, params: dict, device: str | None, mlx: str | None) -> Started:
        return Started(self.conversation.id, self.parent.parent_id if self.request.text is not None else self.parent.id, build, params, device, mlx)

    def _options(self, build: BuildView) -> TurnOptions:
        """Options of this turn; what a new conversation starts with is stored with it."""
        options = replace(self.c.settings.turn_options(self.conversation, build), **self.request.overrides)
        settings = dict(self.conversation.settings or {})
        if "origin" not in settings:
            settings["origin"] = {"name": build.name, "defaults": dict(build.defaults)}
            # The effort of a conversation does not change with the settings; one that nobody chose keeps where it came from.
            effort, source = self.c.settings.turn_values(self.conversation, build)["effort"]
            if options.effort != effort or source in ("flag", "conversation"):
                settings["effort"] = options.effort
            else:
                settings["origin"] |= {"effort": effort, "effort_from": source}
        settings["build"] = build.name if build.embedded or self._registered(build) else str(build.folder)
        if settings != self.conversation.settings:
            self.store.set_settings(self.conversation.id, settings)
            self.conversation = self.store.conversation(self.conversation.id)
        return options

    def _registered(self, build: BuildView) -> bool:
        return any(ref.name == build.name and ref.folder == build.folder for ref in self.host.builds())

    def _seed(self, options: TurnOptions) -> int:
        """A fixed seed is moved by the answer's index among its siblings, so that a retry differs and can be repeated."""
        if options.seed is None:
            return secrets.randbelow(1 << 31)
        siblings = [m for m in self.store.children(self.parent.id) if m.role == "assistant"]
        return options.seed + len(siblings)

    def _params(self, options: TurnOptions, seed: int, build: BuildView) -> dict:
        o = options
        engine, wanted = self.host.engine, self.c.settings.engine.context
        limit = {} if o.max_answer_tokens is None else {"max_answer_tokens": o.max_answer_tokens}
        return limit | {
            "temperature": o.temperature, "top_k": o.top_k, "top_p": o.top_p, "min_p": o.min_p,
            "presence_penalty": o.presence_penalty, "frequency_penalty": o.frequency_penalty, "seed": seed,
            "max_tokens": o.token_limit(), "effort": o.effort, "draft": o.draft,
            "context": engine.context_limit if engine is not None else build.context if wanted == "auto" else wanted,
        }  # fmt: skip

    def _load(self, build: BuildView) -> Iterator[TurnEvent]:
        if self.host.loaded(build):
            return
        self.c._stream = self.host.load(build, self._cancel)
        yield from self.c._stream
        self.load_s = self.host.load_s
        admission = getattr(self.host.engine, "admission", None)
        if admission is not None and admission.verdict == "tight":
            yield Warned("tight", f"{build.name} fits tightly: {admission.words}")

    def _cancel(self) -> bool:
        return self.c._cancelled or self.stopped()

    # the engine --------------------------------------------------------------------------------------------------------

    def _answer(self, options: TurnOptions, seed: int, device: str, mlx: str) -> Iterator[TurnEvent]:
        engine, build = self.host.engine, self.host.view
        tokenizer = self.host.tokenizer()
        key = self.request.session or self.conversation.id
        limit = self.host.draft_limit(key)
        if isinstance(options.draft, int) and options.draft > limit:
            raise Unusable(f"{build.name} can draft at most {limit} tokens here, not {options.draft}.", hint="--draft auto or --draft off")
        path = list(self.store.path_to((self.kept or self.parent).id))
        system = (self.conversation.settings or {}).get("system")
        messages = chat_messages(system, path, tokenizer, continued=self.kept is not None)
        prompt = self.c.encode(messages, options, self._cancel)
        self.state = self.c.state_turn(self.conversation, path, options)
        self.state_key, self.options, self.prompt_ids = key, options, prompt.ids
        if len(prompt.ids) >= engine.context_limit:
            larger = "--context with a larger number, " if engine.context_limit < (build.context or 0) else ""
            self.prompt_tokens = len(prompt.ids)
            less = "a new conversation, or --branch an earlier message" if len(path) > 1 else "a shorter text"
            raise ContextFull(
                f"The prompt has {len(prompt.ids):,} tokens, the context of {build.name} holds {engine.context_limit:,}.",
                hint=f"{larger}{less}",
            )
        params = self._params(options, seed, build)
        if not self.ref.absent:
            # A build that stands in for one that is not there does not become the default.
            self.host.note_use(build)
        yield Ready(build, params, device, mlx, self.load_s, len(prompt.ids), engine.context_limit)
        stored = params | {"tokenizer": tokenizer.sha256}
        self.answer = AnswerRow(self.store, build, self.parent, self.kept, stored, tokenizer.find_marker(END_THINK), prompt.start)
        self.c._stream = self.host.generate(key, prompt, options, seed, self._cancel, self.state)
        stream, done, told = iter(self.c._stream), None, False
        try:
            for event in stream:
                if isinstance(event, Done):
                    done = event
                    continue
                if isinstance(event, Piece):
                    self.answer.add(event)
                if isinstance(event, Resumed):
                    self.resume_s += event.seconds
                yield event
                if isinstance(event, Resumed):
                    yield from self._told(event)
                if self.answer.failure is not None and not told:
                    told = True
                    yield Warned("not_saved", f"The answer could not be stored yet: {self.answer.failure}")
        except GeneratorExit:
            self._end_unseen(stream)
            raise
        for notice in self.host.states.take_notices():
            yield Warned("cache", notice)
        if done is None:
            raise RuntimeError("the engine ended without saying why")
        yield from self._finish(done, seed)

    def _told(self, event: Resumed) -> Iterator[TurnEvent]:
        """What the user is told about a state that was not found or could not be used."""
        left = event.prompt_tokens - event.tokens
        notices = self.host.states.take_notices()
        for notice in notices:
            yield Warned("cache", notice)
        if event.trouble is not None:
            yield Warned("state_damaged", event.trouble)
        # A notice has said why there is nothing.
        if event.cold is not None and not (notices and event.cold.startswith(NO_STATE)):
            yield Noticed("cold", f"cold: {event.cold}; reading {left:,} of {event.prompt_tokens:,} tokens")

    def leave_state(self) -> None:
        """Tell the host with which ids the next prompt of this branch begins, so that its state can be kept. Never raises."""
        if not self.over or self.state is None or not self.host.states.ready:
            return
        try:
            self.host.after_turn(self.state_key, self.state, self._next_prefix())
        except (EngineError, StoreError) as error:
            log.info("the state after this turn is not kept: %s", error)

    def _next_prefix(self) -> tuple[int, ...]:
        """What the prompts of all possible next messages share; without an answer, the prompt itself."""
        if self.message is None:
            return (*self.prompt_ids, -1)
        return self.c.next_prefix(self.conversation, self.store.path_to(self.message.id), self.options)

    def _end_unseen(self, stream: Iterator[Any]) -> None:
        """Nobody reads the events any more: stop the engine, store what it produced."""
        self.c.cancel()
        try:
            for event in stream:
                if isinstance(event, Piece):
                    self.answer.add(event)
                elif isinstance(event, Done):
                    self.message = self.answer.complete(event, self._timing(event))
                    self.over = True
        except (EngineError, Abandoned) as error:
            log.info("the turn that nobody reads ended with %r", error)
            self.answer.keep("error" if isinstance(error, EngineError) else "interrupted")

    def _timing(self, done: Done) -> dict:
        return {"load_s": self.load_s, "resume_s": self.resume_s, **done.timing, "total_s": time.monotonic() - self.started}

    def _finish(self, done: Done, seed: int) -> Iterator[TurnEvent]:
        timing = self._timing(done)
        message = self.message = self.answer.complete(done, timing)
        self._keep_text_ids()
        self.over = True
        if message is not None:
            self._log_text(message)
            yield Saved(message)
        yield Finished(
            self.conversation.id, done.finish, message, done.text, done.thinking, done.ids, ids_hash(done.ids), seed,
            done.usage, timing, done.draft, done.residency,
        )  # fmt: skip

    def _log_text(self, message: Any) -> None:
        """Message text goes to the log only where the user wants both: level debug and log.content."""
        if self.c.settings.log.content:
            log.debug("%s message %s: %r", message.role, message.id, message.text)

    def _keep_text_ids(self) -> None:
        """Store the ids of the user's text: later prompts repeat them. Written after the answer, where nobody waits for it."""
        tokenizer = self.host.tokenizer()
        if self.parent.ids is not None or self.parent.role != "user":
            return
        try:
            self.store.set_ids(self.parent.id, tokenizer.encode_text(self.parent.text), {"tokenizer": tokenizer.sha256})
        except StoreError as error:
            log.warning("the ids of message %s could not be kept: %s", self.parent.id, error)

    # ends that are not Done --------------------------------------------------------------------------------------------

    def _failed(self, code: str, message: str, hint: str, state: str = "error") -> Failed:
        partial = stored = unstored = None
        if self.answer is not None:
            partial, stored, unstored = self.answer.keep(state), self.answer.stored, self.answer.unstored
        conversation_id = self.conversation.id if self.conversation is not None else None
        return Failed(code, message, hint, conversation_id, partial, prompt_tokens=self.prompt_tokens, answer=stored, unstored=unstored)

    def _finished_without_engine(self) -> Finished:
        """Cancelled while loading."""
        timing = {"load_s": time.monotonic() - self.started, "total_s": time.monotonic() - self.started}
        return Finished(self.conversation.id, "cancelled", None, "", "", (), ids_hash(()), 0, {}, timing, {}, {})
