"""Scripted mode: prompts in, one answer each out, an exit code that says how it went (spec: app, section 8).

stdout holds data only. Whatever ends the run - a signal, the time limit, a reader that went away, an error - the text so far is
in the store and the last event is written, as far as somebody is left to read it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsv41chat.engine.errors import EngineError
from dsv41chat.store import StoreError
from dsv41chat.ui.engine_thread import Abandoned
from dsv41chat.ui.interrupts import Interrupts
from dsv41chat.ui.output import (
    READER_GONE,
    JsonSink,
    Out,
    OutputFailed,
    ReaderGone,
    Sink,
    Stderr,
    StreamSink,
    TextSink,
    UsageError,
    receipt,
    show_progress,
)
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import (
    LEAF,
    Failed,
    Finished,
    Loading,
    Piece,
    Prefill,
    Resuming,
    Saved,
    Started,
    StatusAsked,
    TurnRequest,
    Warned,
    cut_words,
    exit_code,
)

if TYPE_CHECKING:
    from dsv41chat.ui.host import EngineHost
    from dsv41chat.ui.turn_events import BuildRef

log = logging.getLogger(__name__)

STRICT_CODES = {"length": 10, "loop": 11}
STRICT_NO_BLOCK = 12  # --extract found none; a cut answer or a loop, which may be why, goes before it


@dataclass(frozen=True)
class Job:
    """What a scripted run is to do. conversation_id None: a new one (system, title). action: answer, load or dry-run."""

    prompts: tuple[str, ...]
    conversation_id: str | None = None
    parent_id: str | None = LEAF
    system: str | None = None
    title: str | None = None
    build: str | None = None
    action: str = "answer"
    strict: bool = False
    warnings: tuple[Warned, ...] = ()
    program: str = "dsv41chat"


def make_sink(
    mode: str, out: Out, stderr: Stderr, clock: Callable[[], float], *, stream: bool, show_thinking: bool, extract: str | None, strict: bool = False
) -> Sink:
    """mode: text, json or stream-json."""
    if mode == "json":
        return JsonSink(out, stderr, clock)
    if mode == "stream-json":
        return StreamSink(out, stderr, clock, drafts=stderr.level >= 1)
    return TextSink(out, stderr, clock, stream=stream, show_thinking=show_thinking, extract=extract, strict=strict)


def run(job: Job, controller: TurnController, sink: Sink, stderr: Stderr, interrupts: Interrupts) -> int:
    """Run the turns of `job` and write what they say. Returns the exit code."""
    interrupts.on_stop = controller.cancel
    interrupts.on_abort = controller.abort
    interrupts.on_status = controller.ask_status
    runner = _Runner(job, controller, sink, stderr, interrupts)
    try:
        return runner.run()
    except ReaderGone:
        return interrupts.code or READER_GONE
    except OutputFailed as error:
        return runner.unwritten(error)
    except (EngineError, StoreError, UsageError, Abandoned) as error:
        return runner.fail(failure(error))


class _Runner:
    def __init__(self, job: Job, controller: TurnController, sink: Sink, stderr: Stderr, interrupts: Interrupts):
        self.job = job
        self.controller = controller
        self.sink = sink
        self.stderr = stderr
        self.interrupts = interrupts
        self.warned = False
        self.conversation_id = job.conversation_id
        self.phase, self.tokens = "starting", 0
        self.answered = 0
        self.kept = False  # whether anything of this run is in the database

    def run(self) -> int:
        if self.job.action == "dry-run":
            return self._dry_run()
        if self.job.action == "load":
            return self._load_only()
        finished: list[Finished] = []
        default = self._default()
        for index, prompt in enumerate(self.job.prompts):
            self.sink.turn = index
            first = index == 0
            request = TurnRequest(
                self.conversation_id, text=prompt, parent_id=self.job.parent_id if first else LEAF,
                system=self.job.system if first else None, title=self.job.title, build=self.job.build, build_first=True,
            )  # fmt: skip
            last = self._turn(request)
            if isinstance(last, Failed):
                return self.fail(last)
            if last.finish == "cancelled" or self.interrupts.code is not None:
                return self.fail(self._cancelled(last))
            finished.append(last)
            self.answered += 1
            self.sink.turn_done()
            self._say_cut(last)
            self.stderr.timing(receipt(last))
        self._say_default(default)
        code = STRICT_CODES.get(finished[-1].finish, STRICT_NO_BLOCK if self.sink.lacking else 0) if self.job.strict else 0
        self.sink.done(finished, code, {})
        return code

    def _turn(self, request: TurnRequest) -> Finished | Failed:
        """Run one turn, hand its events on, return the last one. A reader that went away stops the turn; its text is kept."""
        events = self.controller.run(request, lambda: self.interrupts.code is not None)
        try:
            for event in events:
                if isinstance(event, Finished | Failed):
                    return event
                if isinstance(event, Started):
                    self._started(event)
                    continue
                self.kept |= isinstance(event, Saved) and self.controller.saving
                self._show(event)
                self.sink.event(event)
        finally:
            events.close()
        raise RuntimeError("the turn ended without saying how")

    def _say_cut(self, last: Finished) -> None:
        """Text alone does not show that an answer is not whole."""
        usage = last.usage
        if not self.sink.text or last.finish not in STRICT_CODES:
            return
        count = usage.get("completion_tokens", len(last.ids))
        tokens = f"{count:,} token{'s' if count != 1 else ''}"
        if last.finish == "loop":
            text = f"the answer was ended after {tokens}: it repeats itself."
        elif cut_words(last.finish, usage) == "context full":
            text = f"the answer was cut after {tokens}: the context of {usage['context_limit']:,} tokens is full (--context)."
        else:
            limit = self.controller.settings.turn.get("max_answer_tokens")
            option = "--max-answer-tokens" if limit is not None and usage.get("answer_tokens", 0) >= limit else "--max-tokens"
            text = f"the answer was cut after {tokens}: the length limit ({option})."
        self.stderr.notice(f"warning: {text}")

    def _default(self) -> BuildRef | None:
        """The build that answers new conversations when nobody names one; None where nobody but the user can change that."""
        host = self.controller.host
        return None if self.job.build is None or host.settings.engine.model else host.resolve()

    def _say_default(self, before: BuildRef | None) -> None:
        """The build that answered last is the default: say so when an answer changed it."""
        now = self._default() if before is not None else None
        if now is not None and now.folder != before.folder:
            fix = f"{self.job.program} config set engine.model {before.name}"
            self.stderr.notice(f"{now.name} now answers new conversations by default, not {before.name}; to fix one: {fix}")

    def _started(self, event: Started) -> None:
        if self.conversation_id is None and self.controller.saving and self.sink.text:
            self.stderr.notice(f"conversation {event.conversation_id}")
        self.conversation_id = event.conversation_id
        self.sink.event(event)
        if not self.warned:
            self.warned = True
            for warning in self.job.warnings:
                self.sink.event(warning)

    def _show(self, event: Any) -> None:
        if isinstance(event, StatusAsked):
            self.stderr.line(f"status: {self.phase}, {self.tokens:,} tokens, {self.sink.clock():.1f} s")
            return
        if isinstance(event, Piece):
            self.phase, self.tokens = event.channel, self.tokens + len(event.ids)
        elif isinstance(event, Loading | Prefill):
            self.phase = f"{'loading' if isinstance(event, Loading) else 'prefill'} {event.done:,}/{event.total:,}"
        elif isinstance(event, Resuming):
            self.phase = f"resuming {event.tokens:,}"
        show_progress(self.stderr, event)

    def _cancelled(self, last: Finished) -> Failed:
        code, message = self.interrupts.error
        partial = {"text": last.text, "thinking": last.thinking} if last.ids else None
        hint = f"{self.job.program} --resume {last.conversation_id}" if self.kept and not self.sink.text else ""
        return Failed(code, message, hint, last.conversation_id, partial)

    def fail(self, failed: Failed) -> int:
        code = failed.exit_code
        if self.interrupts.code is not None and failed.code in ("interrupted", "timeout"):
            # Only what a signal or the time limit ended has their exit code: another failure was there before they were seen.
            code = self.interrupts.code
            name, message = self.interrupts.error
            failed = Failed(name, message, failed.hint, failed.conversation_id, failed.partial)
        if failed.conversation_id is not None and self.kept:
            if self.job.conversation_id is None and self.answered == 0 and failed.partial is None:
                kept = f"your message is kept unanswered in the new conversation {failed.conversation_id}; "
                undo = f", or drop it: {self.job.program} conversations delete {failed.conversation_id}"
            else:
                kept = undo = ""
            if self.sink.text or kept:
                self.stderr.notice(f"{kept}resume with: {self.job.program} --resume {failed.conversation_id}{undo}")
        try:
            self.sink.failed(failed, code)
        except ReaderGone:
            log.info("nobody reads the error that ended the run")
        return code

    def unwritten(self, error: OutputFailed) -> int:
        """Nothing more can be written: that is said on stderr, and where the answer is."""
        hint = f"  Try: {self.job.program} conversations show {self.conversation_id}" if self.kept else ""
        self.stderr.line(f"dsv41chat: {error}{hint}")
        return exit_code(error.code)

    def _dry_run(self) -> int:
        request = TurnRequest(
            self.job.conversation_id, text=self.job.prompts[0], parent_id=self.job.parent_id, system=self.job.system, build=self.job.build
        )
        estimate = self.controller.estimate(request, lambda: self.interrupts.code is not None)
        code = 0
        if estimate["prompt_tokens"] >= estimate["context_limit"]:
            # What the real run would end with.
            code = exit_code("context_full")
            sizes = f"{estimate['prompt_tokens']:,} tokens, the context holds {estimate['context_limit']:,}"
            self.stderr.notice(f"warning: the prompt does not fit: it has {sizes}, and the answer needs room too.")
        self.sink.done([], code, {"finish": "dry_run", "conversation": self.job.conversation_id, **estimate})
        return code

    def _load_only(self) -> int:
        conversation = self.controller.store.conversation(self.job.conversation_id) if self.job.conversation_id else None
        host = self.controller.host
        for event in self._loading(host, host.resolve(self.job.build, conversation)):
            show_progress(self.stderr, event)
            self.sink.event(event)
        device, mlx = host.backend()
        fields = {
            "finish": "load_only", "build": host.view.as_dict(), "engine": {"device": device, "mlx": mlx}, "load_s": round(host.load_s, 3),
            "context_limit": host.engine.context_limit,
        }  # fmt: skip
        if self.sink.text:
            fields = {"loaded": host.view.name, "context": host.engine.context_limit, "device": device, "seconds": fields["load_s"]}
        self.sink.done([], 0, fields)
        return 0

    def _loading(self, host: EngineHost, ref: Any) -> Iterator[Any]:
        host.backend()
        yield from self.controller.load(ref)


def failure(error: Exception, conversation_id: str | None = None) -> Failed:
    """An exception that a user can cause, as the last event of a run."""
    if isinstance(error, Abandoned):
        return Failed("interrupted", "The run was stopped before the engine answered.", "", conversation_id)
    return Failed(getattr(error, "code", "internal"), str(error), getattr(error, "hint", ""), conversation_id, status=getattr(error, "status", None))
