"""Line mode: the same chat as lines of text, for screen readers and for terminals without cursor control.

Messages are printed as text, answers as they come; a line is read after `> `. A line of three quotes begins a text of several
lines, another one ends it; so does a paste, which never sends itself. The commands are those of the composer. Nothing is ever drawn over.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from dsv41chat.engine.errors import EngineError
from dsv41chat.settings import EFFORTS
from dsv41chat.store import StoreError
from dsv41chat.ui.builds import card_line
from dsv41chat.ui.commands import COMMANDS, CommandError, parse, parse_option, read_attachment, usage
from dsv41chat.ui.details import details_text
from dsv41chat.ui.export import FORMATS
from dsv41chat.ui.inputs import fenced
from dsv41chat.ui.present import age, clock, readonly_reason, receipt
from dsv41chat.ui.sanitize import not_unicode, sendable, visible, visible_line
from dsv41chat.ui.status import Status
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import AppStart, Failed, Finished, Noticed, Piece, Saved, TurnRequest, Warned

BLOCK = '"""'
PROGRESS_S = 2.0
SHOWN_MESSAGES = 10
LISTED = 20
CLOSED = "The end of the input closes the text; it is sent."
UNANSWERED = "The last message is not answered: /retry answers it."
SECOND_S = 2.0
BURST_GAP_S = 0.015  # lines that follow one another within this time were pasted
PASTED_S = 0.2  # a line that was read within this time was waiting: nobody had time to press Enter for it


class _Leave(Exception):
    """A signal ends the program while a line is read."""


class PlainChat:
    """One session of the line mode. read: gives the next line (of a bracketed paste: the lines) without its end, raises EOFError at the
    end of the input. waits: whether more input is there, or comes within so many seconds."""

    def __init__(
        self, controller: TurnController, start: AppStart, read: Callable[[str], str], out: TextIO, waits: Callable[[float], bool] = lambda _: False
    ):
        self.controller, self.begin, self.read, self.out, self.waits = controller, start, read, out, waits
        self.store, self.host = controller.store, controller.host
        self.conversation: Any = None
        self.leaf_id: str | None = None
        self.unanswered = False  # whether that is the user's
        self.readonly = start.readonly or self.store.readonly
        self.build = start.build
        self.new_settings: dict[str, Any] = {}
        self.attached: list[str] = [fenced(name, text) for name, text in start.attachments]
        self.code = 0
        self.running = False
        self.status = Status()
        self._stopped = 0.0
        self._held = ""
        self._over = False

    # Output -------------------------------------------------------------------------------------------------------------

    def say(self, text: str = "") -> None:
        """One line of the program's own, or several."""
        self.out.write(visible(text) + "\n")
        self.out.flush()

    def _stream(self, text: str) -> None:
        """A piece of an answer; a carriage return at its end waits for what follows."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        self.out.write(visible(text.removesuffix("\r") if self._held else text))
        self.out.flush()

    # The loop -----------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Reads and answers until /quit, the end of the input or a signal. Returns the exit code."""
        for text in [*self.begin.notices, *([self.begin.backend_missing] if self.begin.backend_missing else [])]:
            self.say(text)
        if self.begin.view is not None:
            self._show(self.begin.view)
        else:
            self._welcome()
        offered = "" if self.begin.send else self.begin.prompt
        if offered:
            self.say(f"Type Enter to send: {offered}")
        elif self.begin.prompt:
            self._line(self.begin.prompt)
        while not self._over:
            try:
                text = self._ask()
            except EOFError:
                break
            except KeyboardInterrupt:
                offered = ""
                self.say("\n/quit or ctrl+D leaves.")
                continue
            except _Leave:
                break
            text, offered = text if text.strip() else offered, ""
            if text.strip():
                self._line(text)
        return self.code

    def _ask(self) -> str:
        # Lines that were typed while an answer ran are messages: how fast they came is no longer known.
        ahead = self.waits(0.0)
        line = self.read("> ")
        if line.strip() == BLOCK:
            text = self._block()
        else:
            text = line if ahead else self._with_pasted(line)
        if not_unicode(text):
            self.say("warning: what was read is not valid UTF-8; it is sent with \ufffd in place of those bytes.")
        return sendable(text)

    def _block(self) -> str:
        """The lines until one of three quotes. The end of the input is one too: what was written must not be lost."""
        lines: list[str] = []
        try:
            while (line := self.read("")).strip() != BLOCK:
                lines.append(line)
        except EOFError:
            if "".join(lines).strip():
                self.say(CLOSED)
        return "\n".join(lines)

    def _with_pasted(self, line: str) -> str:
        """The line with those that came in one burst with it; the Enter of a paste does not send them."""
        lines = [line]
        try:
            while self.waits(BURST_GAP_S):
                began = time.monotonic()
                lines.append(self.read(""))
                if time.monotonic() - began < PASTED_S and not self.waits(BURST_GAP_S):
                    self.say(f"({len(lines)} lines pasted; Enter sends them, ctrl+C drops them)")
                    if rest := self.read(""):
                        lines.append(rest)
        except EOFError:
            self.say(CLOSED)
        return "\n".join(lines)

    def _line(self, text: str) -> None:
        if text.startswith("/") and not text.startswith("//"):
            try:
                command, rest = parse(text)
                getattr(self, f"_command_{command.name}")(rest)
            except (CommandError, StoreError, EngineError) as error:
                self.say(f"error: {error}")
            return
        if self.readonly:
            self.say("error: this conversation is read-only here; /new starts another one.")
            return
        text = text[1:] if text.startswith("//") else text
        text = "\n\n".join([*self.attached, text])
        self.attached = []
        self._turn(self._request(text))

    def _request(self, text: str) -> TurnRequest:
        if self.conversation is not None:
            return TurnRequest(self.conversation.id, text=text, parent_id=self.leaf_id, build=self.build)
        settings = {key: value for key, value in self.new_settings.items() if key != "system"}
        system = self.new_settings.get("system", self.begin.system)
        return TurnRequest(text=text, system=system, title=self.begin.title, build=self.build, settings=settings)

    # A turn -------------------------------------------------------------------------------------------------------------

    def _turn(self, request: TurnRequest) -> None:
        self.status, channel, told = Status(), "", time.monotonic()
        self.running = True
        try:
            for event in self.controller.run(request):
                now = time.monotonic()
                self.status.apply(event, now)
                if isinstance(event, Piece) and event.text:
                    if event.channel != channel:
                        self._heading(event.channel, channel)
                        channel = event.channel
                    self._stream(event.text)
                elif not channel and now - told > PROGRESS_S:
                    told = now
                    self.say(f"({self.status.fields()[0][0]})")
                self._event(event, bool(channel))
        finally:
            self.running = False
            self._held = ""
        if self.code:
            self._over = True
        else:
            self._say_where(request, event)

    def _go_to(self, message: Any) -> None:
        """What is sent next goes on from this message; None: from nothing."""
        self.leaf_id, self.unanswered = (message.id, message.role == "user") if message is not None else (None, False)

    def _say_where(self, request: TurnRequest, end: Any) -> None:
        """After a turn that has stored no answer: what the next message goes on from."""
        if self.leaf_id is None or (end.message if isinstance(end, Finished) else end.answer or end.code == "context_full"):
            return
        if self.unanswered:
            self.say(UNANSWERED)
        elif request.text is None:
            self.say("The earlier answer stays.")

    def _heading(self, channel: str, before: str) -> None:
        if before:
            self.say()
        if channel == "thinking":
            self.say("(thinking)")
        else:
            self.say(f"{self._build_name()}:")

    def _event(self, event: Any, printed: bool) -> None:
        if isinstance(event, Saved):
            self._go_to(event.message)
            if self.conversation is None or self.conversation.id != event.message.conversation_id:
                self.conversation = self.store.conversation(event.message.conversation_id)
                self.new_settings = {}
        elif isinstance(event, Warned | Noticed):
            self.say(event.message)
        elif isinstance(event, Finished):
            if printed:
                self.say()
            if event.message is not None:
                self.say(f"({receipt(event.message)})")
            else:
                self.say("(stopped before the first token)")
        elif isinstance(event, Failed):
            if event.answer is not None:
                self._go_to(event.answer)
            if printed:
                self.say()
            self.say(f"error: {event.message}" + (f"\nhint: {event.hint}" if event.hint else ""))

    def _build_name(self) -> str:
        return self.host.view.name if self.host.view is not None else "answer"

    def interrupt(self, number: int, _frame: Any = None) -> None:
        """The signal handler: stops a turn, else ends the reading of a line."""
        now = time.monotonic()
        if number != signal.SIGINT:
            self.code = 128 + number
        if self.running:
            if now - self._stopped < SECOND_S:
                self.controller.abort()
            self._stopped = now
            self.controller.cancel()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise _Leave

    def say_status(self, _number: int, _frame: Any = None) -> None:
        """SIGUSR1: where it stands, to stderr. Past the stream's own buffer, which the handler may have interrupted."""
        os.write(2, f"status: {self.status.line()}\n".encode())

    # Showing ------------------------------------------------------------------------------------------------------------

    def _welcome(self) -> None:
        ref = self.host.resolve(self.build)
        about = card_line(ref.folder) or ("The small embedded model." if ref.embedded else "")
        self.say(f"New conversation. {ref.name} answers. {about} /help lists the commands.")

    def _show(self, view: Any) -> None:
        self.conversation = view.conversation
        self._go_to(view.messages[-1] if view.messages else None)
        self.readonly = view.readonly or self.begin.readonly or self.store.readonly
        self.say(f"Conversation: {view.conversation.title or '(no title)'}  [{view.conversation.id}]")
        if len(view.messages) > SHOWN_MESSAGES:
            self.say(f"({len(view.messages) - SHOWN_MESSAGES} earlier messages; /export text shows all)")
        for message in view.messages[-SHOWN_MESSAGES:]:
            name = "you" if message.role == "user" else message.build_name or message.role
            self.say(f"\n{visible_line(name)}, {clock(message.created)}:\n{message.text}")
            if message.role == "assistant" and (line := receipt(message)):
                self.say(f"({line})")
        if view.interrupted:
            self.say("The last answer was interrupted" + ("." if self.readonly else "; /retry answers again."))
        elif self.unanswered and not self.readonly:
            self.say(UNANSWERED)
        if self.readonly:
            self.say(readonly_reason(view.holder, self.store))

    # Commands -----------------------------------------------------------------------------------------------------------

    def _command_new(self, rest: str) -> None:
        self.conversation, self.attached = None, []
        self._go_to(None)
        self.readonly = self.begin.readonly or self.store.readonly
        self._welcome()

    def _command_open(self, rest: str) -> None:
        if not rest:
            for row in self.store.list_conversations(None, LISTED):
                self.say(f"{row.id}  {age(row.updated):>10}  {row.messages:>4} messages  {visible_line(row.title)}")
            self.say("/open ID opens one.")
            return
        self._show(self.controller.open(rest))

    def _command_build(self, rest: str) -> None:
        if not rest:
            for ref in self.host.builds():
                self.say(f"{ref.name}{'  loaded' if self.host.loaded(ref) else ''}  {ref.folder}")
            return
        ref = self.host.find(rest)
        self.say(f"Loading {ref.name}.")
        for _ in self.controller.load(ref):
            pass
        self.build = ref.name
        self.say(f"{ref.name} answers from now on.")

    def _command_system(self, rest: str) -> None:
        self._set("system", rest)

    def _command_effort(self, rest: str) -> None:
        if rest not in EFFORTS:
            raise CommandError(f"/effort needs one of {', '.join(EFFORTS)}.")
        self._set("effort", rest)

    def _command_set(self, rest: str) -> None:
        self._set(*parse_option(rest))

    def _set(self, name: str, value: Any) -> None:
        self.controller.settings = self.host.settings = self.controller.settings.released(name)
        if self.conversation is None:
            self.new_settings[name] = value
        else:
            self.store.set_settings(self.conversation.id, {**self.conversation.settings, name: value})
            self.conversation = self.store.conversation(self.conversation.id)
        self.say(f"{name}: {value}")

    def _last_answer(self) -> Any:
        path = self.store.path_to(self.leaf_id) if self.leaf_id else []
        answer = next((message for message in reversed(path) if message.role == "assistant"), None)
        if answer is None:
            raise CommandError("There is no answer yet.")
        return answer

    def _command_copy(self, rest: str) -> None:
        self.say(self._last_answer().text)

    def _command_export(self, rest: str) -> None:
        from pathlib import Path

        from dsv41chat.store.files import write_private
        from dsv41chat.ui.export import export

        if self.conversation is None:
            raise CommandError("There is nothing to export yet.")
        first, _, name = rest.partition(" ")
        if first not in FORMATS:
            first, name = "text", rest
        text = export([self.store.conversation(self.conversation.id)], self.store, first, leaf=self.leaf_id)
        if not name.strip():
            self.say(text)
            return
        path = Path(name.strip()).expanduser()
        if path.exists():
            raise CommandError(f"{path} exists already.")
        write_private(path, text.encode("utf-8", "replace"))
        self.say(f"Written to {path}")

    def _command_retry(self, rest: str) -> None:
        if self.leaf_id is None or self.readonly:
            raise CommandError("There is nothing to answer again here.")
        self._turn(TurnRequest(self.conversation.id, regenerate=self.leaf_id, build=self.build))

    def _command_continue(self, rest: str) -> None:
        answer = self._last_answer()
        if self.readonly or answer.id != self.leaf_id or answer.state == "complete" and answer.finish == "stop":
            raise CommandError("The last answer is complete; there is nothing to continue.")
        self._turn(TurnRequest(self.conversation.id, continue_from=answer.id, build=self.build))

    def _command_branch(self, rest: str) -> None:
        siblings = self.store.siblings(self._last_answer().id)
        if not rest.isdigit() or not 1 <= int(rest) <= len(siblings):
            for number, message in enumerate(siblings, 1):
                self.say(f"{number}  {visible_line(message.text[:70])}")
            return
        leaf = self.store.leaf_below(siblings[int(rest) - 1].id)
        self.store.set_leaf(self.conversation.id, leaf.id)
        self._show(self.controller.open(self.conversation.id))

    def _command_read(self, rest: str) -> None:
        name, text = read_attachment(rest)
        self.attached.append(fenced(name, text))
        self.say(f"{name} goes with the next message.")

    def _command_pin(self, rest: str) -> None:
        if self.conversation is None:
            raise CommandError("There is nothing to pin yet.")
        self.store.pin(self.conversation.id, not self.conversation.pinned)
        self.conversation = self.store.conversation(self.conversation.id)
        pinned = self.conversation.pinned
        self.say(f"{'Pinned.' if pinned else 'No longer pinned.'} {self.host.states.pin(self.conversation.id, pinned)}".strip())

    def _command_stats(self, rest: str) -> None:
        host = self.controller.host
        self.say(details_text(self._last_answer(), states=host.states.stats(), memory=host.device_memory()))

    def _command_help(self, rest: str) -> None:
        for command in COMMANDS:
            self.say(usage(command).ljust(40) + command.help)
        self.say(f"{BLOCK} begins and ends a text of several lines; a paste is one message. ctrl+C stops an answer, ctrl+D leaves.")

    def _command_quit(self, rest: str) -> None:
        self._over = True


def run_plain(controller: TurnController, start: AppStart | None = None) -> int:
    """Runs the line mode on the terminal (or on pipes) until the user leaves. Returns the exit code."""
    waits = _waits if sys.stdin.isatty() and controller.settings.ui.burst_paste else lambda _: False
    chat = PlainChat(controller, start or AppStart(), _reader(), sys.stdout, waits)
    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        number = getattr(signal, name, None)
        if number is not None:
            before[number] = signal.signal(number, chat.say_status if name == "SIGUSR1" else chat.interrupt)
    try:
        return chat.run()
    except _Leave:
        return chat.code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reader() -> Callable[[str], str]:
    """input(), with line editing where the terminal has it; there a bracketed paste is one text, whatever lines it has.

    Bytes that are not UTF-8 are half surrogates in what it gives: one of them is no reason to end the program.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if sys.stdin.isatty():
        try:
            import readline
        except ImportError:
            pass
        else:
            # The interpreter switches it off; libedit does not have it.
            if "libedit" not in (readline.__doc__ or ""):
                readline.parse_and_bind("set enable-bracketed-paste on")
        return input

    def read(prompt: str) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    return read


def _waits(seconds: float) -> bool:
    """Whether the terminal has more input, or gets some within this time."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])
