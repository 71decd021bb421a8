"""From the command line to a front end or a command: parse, merge the settings, open the store, run, close, exit code.

Each step imports what it needs: a machine without an MLX back end can list, search, export and configure.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv41chat.cli_options import (
    BATCH_REFUSES,
    COMMANDS,
    HEADLESS_ONLY,
    PLANNED,
    SCREEN_ONLY,
    chat_parser,
    first_word,
    flag_settings,
    parse_chat,
    program,
    turn_settings,
)
from dsv41chat.settings import Settings, check_theme, load_settings, near
from dsv41chat.ui.output import READER_GONE, Out, OutputFailed, ReaderGone, Stderr, UsageError, require_stdout

if TYPE_CHECKING:
    from dsv41chat.store import Conversation, Store
    from dsv41chat.ui.host import EngineHost
    from dsv41chat.ui.interrupts import Interrupts
    from dsv41chat.ui.output import Sink
    from dsv41chat.ui.turn import TurnController
    from dsv41chat.ui.turn_events import Failed, Warned

log = logging.getLogger(__name__)

SETTLE_S = 30.0
QUIT_SETTLE_S = 2.0  # the screen is gone already; what is not ready by then is read again next time
MakeHost = Callable[..., "EngineHost"]


@dataclass(frozen=True)
class Exit:
    """code: of the process. now: leave without waiting for the engine thread, which is still inside a kernel."""

    code: int
    now: bool = False


def main(argv: Sequence[str] | None = None, *, make_host: MakeHost | None = None) -> Exit:
    """Run the program. make_host(settings, store) stands in for EngineHost in tests.

    Raises SystemExit only for -h and --version.
    """
    started = time.monotonic()
    argv = list(sys.argv[1:] if argv is None else argv)
    command = _command(argv)
    try:
        if command is not None:
            from dsv41chat.cli_commands import run_command

            name, before = command
            return Exit(run_command(name, argv, make_host, before=before))
        return _Chat(argv, lambda: time.monotonic() - started, make_host).run()
    finally:
        from dsv41chat.logs import stop_logging

        stop_logging()


def _command(argv: list[str]) -> tuple[str, int] | None:
    """The command that the first word names, taken out of `argv`, and how many words stood before it."""
    index = first_word(argv, chat_parser())
    if index is None or argv[index] not in COMMANDS + PLANNED:
        return None
    return argv.pop(index), index


@dataclass
class _Place:
    """Where the turns of this run go: an existing conversation, or a new one with this title and system prompt."""

    conversation: Conversation | None = None
    parent_id: str | None = "leaf"
    title: str | None = None
    system: str | None = None


class _Chat:
    """One run of the full screen or of scripted mode. What it opens it closes, however the run ends."""

    def __init__(self, argv: list[str], clock: Callable[[], float], make_host: MakeHost | None):
        self.argv = argv
        self.clock = clock
        self.make_host = make_host
        self.stderr = Stderr(-1 if "-q" in argv or "--quiet" in argv else 0)
        self.sink: Sink | None = None
        self.out: Out | None = None
        self.store: Store | None = None
        self.disk: Store | None = None  # under --no-save: the database, to read from
        self.host: EngineHost | None = None
        self.interrupts: Interrupts | None = None
        self.warnings: list[Warned] = []

    def run(self) -> Exit:
        from dsv41chat.ui.turn_events import Failed

        try:
            code = self._run()
        except ReaderGone:
            code = READER_GONE
        except KeyboardInterrupt:  # before the handlers were there
            code = self._report(Failed("interrupted", "Interrupted by SIGINT."), 130)
        except Exception as error:  # noqa: BLE001 - one sentence for the user, the traceback in the log
            code = self._fail(error)
        left = self._close()
        try:
            if self.out is not None:
                self.out.close(keep=code in (0, 10, 11) or (self.sink is not None and not self.sink.text))
        except OutputFailed as error:
            self.stderr.line(f"dsv41chat: {error}")
            code = 1
        return Exit(code, left)

    def _run(self) -> int:
        args = parse_chat(self.argv)
        settings = self._settings(args)
        scripted = args.headless or self._scripted(args, settings)
        self._check_theme(args, settings, scripted)
        # On the full screen a log line would land in the middle of it: there -v only makes the file say more.
        level = "debug" if args.verbose and not scripted else settings.log.level
        self.warnings = start_up(settings, self.stderr, level=level, log_file=args.log_file, debug=scripted and args.verbose >= 2)
        if scripted:
            for name, option in SCREEN_ONLY:
                if getattr(args, name):
                    raise UsageError(f"{option} belongs to the full screen.")
            args.headless = True
            return self._headless(args, settings)
        return self._screen(args, settings)

    def _check_theme(self, args: Namespace, settings: Settings, scripted: bool) -> None:
        """Raises UsageError for a --theme that is none, whatever this run is, and ConfigError for one of the settings that would be drawn."""
        if args.theme is not None:
            from dsv41chat.ui.themes import names

            if args.theme not in (themes := names()):
                raise UsageError(f"There is no theme {args.theme!r}{near(args.theme, themes)}.", hint=f"--theme {', '.join(themes[:5])}")
        elif not scripted and not args.plain:
            check_theme(settings)

    def _settings(self, args: Namespace) -> Settings:
        settings = load_settings(config=args.config, data_dir=args.data_dir, flags=flag_settings(args), turn=turn_settings(args))
        self.stderr = Stderr(
            -1 if args.quiet else args.verbose,
            args.progress or "auto",
            color=not settings.environment.no_color and settings.environment.term != "dumb",
        )
        return settings

    def _scripted(self, args: Namespace, settings: Settings) -> bool:
        """Whether options, or the lack of a terminal, make this a scripted run. Raises UsageError where nothing was asked."""
        if any(getattr(args, name) not in (None, False) for name, _ in HEADLESS_ONLY):
            return True
        if args.plain:
            return False
        if settings.environment.term != "dumb" and sys.stdout is not None and sys.stdout.isatty():
            return False
        piped = sys.stdin is not None and not sys.stdin.isatty() and not args.no_stdin
        if not (args.prompts or args.file or piped):
            raise UsageError("There is no terminal to draw on and no prompt.", hint=f'{program()} --headless "your question"')
        self.stderr.notice("No terminal to draw on: answering as with --headless.")
        return True

    # scripted mode -----------------------------------------------------------------------------------------------------

    def _headless(self, args: Namespace, settings: Settings) -> int:
        from dsv41chat.ui import headless
        from dsv41chat.ui.interrupts import Interrupts

        if args.path is None and args.batch_output is None:
            require_stdout()
        with Interrupts(args.timeout) as self.interrupts:
            self.out = Out(Path(args.path).expanduser() if args.path else None, force=args.force, interrupts=self.interrupts)
            self.sink = headless.make_sink(
                args.output or "text", self.out, self.stderr, self.clock,
                stream=not args.no_stream, show_thinking=args.show_thinking, extract=args.extract, strict=args.strict,
            )  # fmt: skip
            if args.batch is not None:
                return self._batch(args, settings)
            messages = () if args.load_only else self._messages(args)
            controller = self._open(args, settings)
            place = self._place(args)
            job = headless.Job(
                tuple(messages), place.conversation.id if place.conversation else None, place.parent_id, place.system, place.title, args.model,
                action="load" if args.load_only else "dry-run" if args.dry_run else "answer", strict=args.strict, warnings=tuple(self.warnings),
                program=program(),
            )  # fmt: skip
            code = headless.run(job, controller, self.sink, self.stderr, self.interrupts)
            self._settle()
            return code

    def _settle(self) -> None:
        """The output is complete: leave the conversation ready for its next turn, unless a signal says to go."""
        if self.interrupts.code is None:
            self.host.settle(SETTLE_S, lambda: self.interrupts.code is not None)
            for text in self.host.states.take_notices():
                self.stderr.notice(f"warning: {text}")

    def _messages(self, args: Namespace) -> list[str]:
        from dsv41chat.ui.inputs import read_stdin, read_text, user_messages
        from dsv41chat.ui.interrupts import Interrupted

        self.interrupts.reading = True
        try:
            if self.interrupts.code is not None:
                raise Interrupted
            stdin = None if args.no_stdin else read_stdin()
            prompts = [read_text(value, value) if kind == "file" else value for kind, value in args.prompts]
            return user_messages(prompts, args.file, stdin)
        finally:
            self.interrupts.reading = False

    def _batch(self, args: Namespace, settings: Settings) -> int:
        from dsv41chat.ui import batch

        for name, option in BATCH_REFUSES:
            if getattr(args, name) not in (None, False, []):
                raise UsageError(f"--batch does not go with {option}.", hint="--batch-output PATH" if name == "path" else "")
        self.interrupts.reading = True
        items = batch.read_items(args.batch, use_stdin=not args.no_stdin)
        self.interrupts.reading = False
        if not args.save:
            args.no_save = True
        controller = self._open(args, settings)
        system = self._system(args)
        plan = batch.Plan(
            args.model, system, args.seed, args.batch_output, args.resume_batch, args.fail_fast, args.save, self.disk, args.force
        )  # fmt: skip
        return batch.run(items, controller, plan, self.out, self.stderr, self.interrupts)

    # the full screen ---------------------------------------------------------------------------------------------------

    def _screen(self, args: Namespace, settings: Settings) -> int:
        from dsv41chat.ui.background import unheard_keys

        if args.plain:
            return self._run_screen(args, settings)
        with unheard_keys():
            return self._run_screen(args, settings)

    def _run_screen(self, args: Namespace, settings: Settings) -> int:
        from dsv41chat.engine.backend import backend_problem
        from dsv41chat.store import NotFound, Store, StoreError
        from dsv41chat.ui.app import run_app
        from dsv41chat.ui.inputs import read_stdin, read_text
        from dsv41chat.ui.turn_events import AppStart

        if len(args.prompts) > 1:
            raise UsageError("The full screen takes one prompt.", hint="--headless runs several turns")
        prompt = "".join(read_text(value, value) if kind == "file" else value for kind, value in args.prompts)
        attachments = [(Path(path).name, read_text(path, path)) for path in args.file if path != "-"]
        # The line mode reads its lines from there.
        if not args.no_stdin and not args.plain and (piped := read_stdin()):
            attachments.append(("stdin", piped))
            _reopen_keys()
        notices, unsaved = [warning.message for warning in self.warnings], ""
        unread = None  # why nobody knows which conversations there are
        try:
            controller = self._open(args, settings)
        except StoreError as error:
            # The screen opens all the same; the user decides whether to go on without saving.
            unsaved = str(error)
            notices.append(f"not saved: {error}" + (f" Remedy: {error.hint}" if error.hint else ""))
            try:
                self.store = Store.memory(copy_of=settings.paths.data)
            except StoreError:
                self.store, unread = Store.memory(), error
            controller = self._controller(settings)
        try:
            place = self._place(args)
        except NotFound as error:
            if not args.last:
                raise unread or error from None
            place = _Place(system=self._system(args))
            if unread is None:
                notices.append("There is no conversation to continue yet.")
        view = None
        if place.conversation is not None:
            view = controller.open(place.conversation.id, leaf=None if place.parent_id == "leaf" else place.parent_id)
        if args.readonly and view is not None:
            view = replace(view, readonly=True)
        notices = list(dict.fromkeys([*notices, *(warning.message for warning in self.warnings)]))
        start = AppStart(
            view, prompt, tuple(attachments), build=args.model, system=place.system, title=place.title, notices=tuple(notices),
            backend_missing=backend_problem(), pick=args.pick, send=args.send, readonly=args.readonly, theme=args.theme,
            mouse=False if args.no_mouse else None, save=not args.no_save, program=program(), unsaved=unsaved,
        )  # fmt: skip
        if args.plain:
            from dsv41chat.ui.plain import run_plain

            code = run_plain(controller, start)
        else:
            code = run_app(controller, start)
        if controller.last_conversation_id is not None and controller.saving:
            self.stderr.notice(f"resume with: {program()} --resume {controller.last_conversation_id}")
        self.host.settle(QUIT_SETTLE_S)
        return code

    # shared ------------------------------------------------------------------------------------------------------------

    def _open(self, args: Namespace, settings: Settings) -> TurnController:
        """Open the store and make the host and the controller. Announces answers that a dead process left behind."""
        from dsv41chat.store import Store

        if args.no_save:
            self.disk = Store.open(settings.paths.data, readonly=True)
            self.store = Store.memory()
        else:
            self.store = Store.open(settings.paths.data, readonly=args.readonly)
            if not args.readonly:
                self.store.purge_deleted(settings.chat.keep_deleted_days)
            self.warnings += announce_interrupted(self.store, self.stderr)
        controller = self._controller(settings)
        self.host.allow_second = args.allow_second
        self.host.force = args.force
        self.host.fresh_sessions = args.no_cache
        if args.no_cache:
            self.host.states.switch_off()
        return controller

    def _controller(self, settings: Settings) -> TurnController:
        from dsv41chat.ui.host import EngineHost
        from dsv41chat.ui.turn import TurnController

        self.host = (self.make_host or EngineHost)(settings, self.disk or self.store)
        return TurnController(self.store, self.host, settings)

    def _place(self, args: Namespace) -> _Place:
        """The conversation that the options name. Raises StoreError (not found, ambiguous) and UsageError."""
        from dsv41chat.store import NotFound

        source = self.disk or self.store
        place = _Place(system=self._system(args))
        if args.last:
            place.conversation = source.last_conversation()
            if place.conversation is None:
                raise NotFound("There is no conversation to continue yet.", f'{program()} --headless "your question"')
        elif args.resume is not None:
            place.conversation = source.conversation(args.resume)
        elif args.conversation is not None:
            try:
                place.conversation = source.conversation(args.conversation)
            except NotFound:
                place.title = args.conversation
        if args.branch is not None:
            message = source.message(args.branch, place.conversation.id if place.conversation else None)
            place.conversation = place.conversation or source.conversation(message.conversation_id)
            place.parent_id = message.id
        if place.conversation is None:
            if args.fork:
                raise UsageError("--fork needs a conversation.", hint="-c, --resume ID, --conversation ID or --branch MSG")
            return place
        if place.system is not None and not args.fork:
            raise UsageError("--system belongs to a new conversation.", hint="--fork copies this one first")
        if args.fork or self.disk is not None:
            if args.headless:
                # A script that names its build wrongly leaves no copy behind.
                self.host.resolve(args.model, place.conversation)
            leaf = place.conversation.leaf_id if place.parent_id == "leaf" else place.parent_id
            settings = dict(place.conversation.settings)
            if place.system is not None:
                settings["system"] = place.system
            copy = self.store.add_tree(source.path_to(leaf), title=place.conversation.title, settings=settings, keep_ids=self.disk is not None)
            place = _Place(copy)
        return place

    def _system(self, args: Namespace) -> str | None:
        from dsv41chat.ui.inputs import read_text

        text = args.system if args.system_file is None else read_text(args.system_file, args.system_file)
        try:
            (text or "").encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError("The system prompt is not valid UTF-8.") from None
        return text

    def _fail(self, error: Exception) -> int:
        """Write the one error of this run; the exit code that belongs to it."""
        from dsv41chat.ui import headless
        from dsv41chat.ui.interrupts import Interrupted
        from dsv41chat.ui.turn_events import Failed

        if isinstance(error, Interrupted) and self.interrupts is not None:
            name, message = self.interrupts.error
            failed, code = Failed(name, message), self.interrupts.code
        else:
            failed = headless.failure(error)
            if not hasattr(error, "code"):
                log.error("unexpected failure", exc_info=error)
                failed = Failed("internal", f"{type(error).__name__}: {error}", "dsv41chat -vv shows the log")
            code = failed.exit_code
        return self._report(failed, code)

    def _report(self, failed: Failed, code: int) -> int:
        from dsv41chat.ui import headless

        if self.sink is None:
            mode = next((mode for mode in ("json", "stream-json") if f"--{mode}" in self.argv), "text")
            self.out = self.out or Out()
            self.sink = headless.make_sink(mode, self.out, self.stderr, self.clock, stream=True, show_thinking=False, extract=None)
        try:
            self.sink.failed(failed, code)
        except ReaderGone:
            log.info("nobody reads the error that ended the run")
        except OutputFailed as error:
            self.stderr.line(f"dsv41chat: {error}")
        return code

    def _close(self) -> bool:
        """Close everything; True if the engine thread has to be left behind."""
        aborted = self.interrupts is not None and self.interrupts.aborted
        # The store goes first: after a second ctrl+C the text must be safe before anything else is waited for.
        for store in (self.store, self.disk):
            if store is not None:
                store.close()
        left = self.host is not None and not self.host.close(0.0 if aborted else 5.0)
        self.stderr.clear()
        return left


def start_up(settings: Settings, stderr: Stderr, *, level: str | None = None, log_file: str | None = None, debug: bool = False) -> list[Warned]:
    """Start the log; say what is odd about the settings. Returns it as warnings for scripts. debug: the log on stderr too."""
    from dsv41chat.logs import start_logging
    from dsv41chat.ui.turn_events import Warned

    problem = start_logging(settings.paths.log, level or settings.log.level, Path(log_file).expanduser() if log_file else None, stderr=debug)
    if problem and log_file is None and settings.paths.log.is_relative_to(settings.paths.data) and _misplaced(settings.paths.data):
        problem = None  # what needs the folder says so, once and with the way out
    warnings = [Warned("config", text) for text in settings.warnings] + ([Warned("log", problem)] if problem else [])
    for warning in warnings:
        stderr.notice(f"warning: {warning.message}")
    return warnings


def _misplaced(folder: Path) -> bool:
    """Whether a file stands in the place of `folder`."""
    from dsv41chat.store import StoreError
    from dsv41chat.store.files import refuse_file

    try:
        refuse_file(folder)
    except (StoreError, OSError) as error:
        return isinstance(error, StoreError)
    return False


def announce_interrupted(store: Store, stderr: Stderr) -> list[Warned]:
    """Say which answers were cut when their process died. Returns it as warnings for scripts."""
    from dsv41chat.ui.turn_events import Warned

    warnings = []
    for id in store.recovered:
        message = store.message(id)
        kept = len(message.text) + len(message.thinking or "")
        text = f"interrupted: an answer in conversation {message.conversation_id} was cut when its process ended; {kept:,} characters are kept."
        warnings.append(Warned("interrupted", text))
        stderr.notice(text)
    return warnings


def _reopen_keys() -> None:
    """Standard input was a pipe and has been read: take keys from the terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError as error:
        raise UsageError("There is no terminal to read keys from.", hint="--headless") from error
    os.dup2(terminal, 0)
    os.close(terminal)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process


def leave(exit: Exit) -> Any:
    """End the process with `exit`: quietly where nobody reads stdout any more, at once where a kernel still runs."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (BrokenPipeError, ConnectionResetError):
        # The interpreter would flush again on its way out and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if exit.now:
        os._exit(exit.code)
    sys.exit(exit.code)
