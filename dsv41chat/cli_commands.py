"""`dsv41chat COMMAND ...`: the options that all commands share, dispatch, errors and exit codes.

A command prints data to stdout (tables, or with --json one array or object) and everything else to stderr.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dsv41chat.cli_options import PLANNED, Parser, add_common, chat_parser, program
from dsv41chat.settings import ConfigError, Settings, load_settings
from dsv41chat.ui.output import SCHEMA, Out, OutputFailed, ReaderGone, Stderr, UsageError, require_stdout
from dsv41chat.ui.sanitize import json_text, visible, visible_line

log = logging.getLogger(__name__)


class Context:
    """What a command works with. Opened things are closed by `run_command`."""

    def __init__(self, args: argparse.Namespace, settings: Settings | None, stderr: Stderr, make_host: Callable[..., Any] | None):
        self.args = args
        self.settings = settings
        self.stderr = stderr
        self.out = Out()
        self._make_host = make_host
        self._store: Any = None
        self._host: Any = None

    def store(self, *, write: bool = False) -> Any:
        """The conversations. Without `write` the database is only read, so a read-only disk is no obstacle."""
        from dsv41chat.store import Store

        if self._store is None:
            self._store = Store.open(self.settings.paths.data, readonly=not write)
        return self._store

    def host(self, *, write: bool = False) -> Any:
        from dsv41chat.ui.host import EngineHost

        if self._host is None:
            self._host = (self._make_host or EngineHost)(self.settings, self.store(write=write))
        return self._host

    def bare_host(self) -> Any:
        """A host that works without a database where that cannot be read."""
        from dsv41chat.store import StoreError
        from dsv41chat.ui.host import EngineHost

        try:
            return self.host()
        except StoreError:
            self._host = (self._make_host or EngineHost)(self.settings, None)
            return self._host

    def print(self, text: str) -> None:
        self.write(text + "\n")

    def write(self, text: str) -> None:
        """To stdout; on a terminal nothing of the text acts."""
        self.out.write(visible(text) if self.out.terminal else text)

    def json(self, value: Any) -> None:
        self.out.write(json_text(value) + "\n")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Columns as wide as their widest cell, measured in cells of the terminal."""
        from dsv41chat.store.titles import cell_width

        cells = [[visible_line(str(cell)) for cell in row] for row in (head, *rows)]
        wide = lambda text: sum(map(cell_width, text))
        widths = [max(wide(row[i]) for row in cells) for i in range(len(head))]
        for row in cells:
            self.print("  ".join(cell + " " * (width - wide(cell)) for cell, width in zip(row, widths)).rstrip())

    def confirm(self, question: str) -> bool:
        """Ask on the terminal. Raises UsageError without one."""
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError("This asks first, and there is no terminal to ask on.", hint="--yes")
        self.stderr.line(f"{question} [y/N]")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        if self._store is not None:
            self._store.close()


def run_command(command: str, argv: Sequence[str], make_host: Callable[..., Any] | None = None, *, before: int = 0) -> int:
    """Run one command with its words, of which `before` stood before its name. Returns the exit code."""
    as_json = "--json" in argv
    stderr = Stderr(-1 if "-q" in argv or "--quiet" in argv else 0)
    context = None
    try:
        if command in PLANNED:
            raise UsageError(f"The command {command} is not available in this version.", hint=f'{program()} -p "{command}" sends it as a prompt')
        require_stdout()
        _refuse_chat_options(command, argv[:before])
        args = _parse(command, argv)
        settings = None
        if args.needs_settings:
            from dsv41chat.cli import start_up

            settings = load_settings(config=args.config, data_dir=args.data_dir)
            stderr = Stderr(-1 if args.quiet else args.verbose, color=not settings.environment.no_color)
            start_up(settings, stderr, log_file=args.log_file, debug=args.verbose >= 2)
        context = Context(args, settings, stderr, make_host)
        return args.run(context) or 0
    except ReaderGone:
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - one sentence for the user, the traceback in the log
        return _fail(error, as_json, stderr)
    finally:
        if context is not None:
            context.close()


def common_parser() -> Parser:
    """Options of every command."""
    common = Parser(prog=program(), add_help=False)
    add_common(common)
    common.add_argument("--json", action="store_true")
    return common


def _refuse_chat_options(command: str, words: Sequence[str]) -> None:
    """Raise UsageError for an option before the command's name that only the chat has; its value would be read as a subcommand."""
    _, rest = common_parser().parse_known_args(list(words))
    option = next((word.partition("=")[0] for word in rest if word.startswith("-") and word not in ("-h", "--help")), None)
    if option is None:
        return
    parser = chat_parser()
    parser.refuse_unknown([] if option in parser._option_string_actions or not option.startswith("--") else [option])
    raise UsageError(f"{option} belongs to the chat, not to the command {command}.", hint=f"{program()} {command} -h")


def _parse(command: str, argv: Sequence[str]) -> argparse.Namespace:
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    args, rest = common_parser().parse_known_args(argv[:cut])
    parser, subcommands = command_parser(command)
    parsed, unknown = parser.parse_known_args(rest + argv[cut:], namespace=args)
    chosen = subcommands.choices.get(parsed.subcommand, parser)
    chosen.refuse_unknown(unknown)
    if unknown:
        raise UsageError(f"Unexpected argument {unknown[0]!r}.", hint=f"{chosen.prog} -h")
    return parsed


def command_parser(command: str) -> tuple[Parser, Any]:
    """(parser, its subcommands) of a command, without the options of every command. `subcommands.choices` has a parser by name."""
    parser = Parser(prog=f"{program()} {command}", epilog=EPILOG)
    parser.set_defaults(needs_settings=True)
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser, dest="subcommand")
    alone = _builder(command)(subcommands)  # what the command does without a subcommand, where it does anything
    if alone is not None:
        subcommands.required = False
        parser.set_defaults(run=alone, needs_settings=False)
    return parser, subcommands


EPILOG = """\
everywhere: --json (one object or array on stdout), --config PATH, --data-dir PATH, --log-file PATH, -q, -v
"""


def _builder(command: str) -> Callable[[Any], Callable[[Context], int] | None]:
    if command == "conversations":
        from dsv41chat.cli_conversations import add_commands
    elif command == "models":
        from dsv41chat.cli_models import add_commands
    elif command == "cache":
        from dsv41chat.cli_cache import add_commands
    elif command == "doctor":
        from dsv41chat.cli_doctor import add_commands
    elif command == "bench":
        from dsv41chat.cli_bench import add_commands
    elif command == "eval":
        from dsv41chat.cli_eval import add_commands
    elif command == "completion":
        from dsv41chat.cli_completion import add_commands
    else:
        from dsv41chat.cli_config import add_commands
    return add_commands


def _fail(error: Exception, as_json: bool, stderr: Stderr) -> int:
    from dsv41chat.engine.errors import EngineError
    from dsv41chat.store import StoreError
    from dsv41chat.ui.turn_events import exit_code

    if isinstance(error, UsageError | ConfigError | EngineError | StoreError):
        code, message, hint = error.code, str(error), error.hint
    elif isinstance(error, OutputFailed):
        code, message, hint = error.code, str(error), ""
    else:
        log.error("unexpected failure", exc_info=error)
        code, message, hint = "internal", f"{type(error).__name__}: {error}", f"{program()} -vv shows the log"
    number = getattr(error, "status", None) or exit_code(code)
    if as_json:
        fields = {"v": SCHEMA, "type": "error", "code": code, "message": message, "hint": hint, "exit_code": number}
        try:
            Out().write(json_text(fields) + "\n")
        except ReaderGone:
            log.info("nobody reads the error")
        except OutputFailed:
            stderr.line(f"dsv41chat: {message}")
    else:
        stderr.line(f"dsv41chat: {message}" + (f"  Try: {hint}" if hint else ""))
    return number
