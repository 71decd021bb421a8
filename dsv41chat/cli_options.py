"""The command line as argparse parsers: the chat's options, the options that every command shares, and near matches.

Options may stand before or after the prompt, so the chat parser declares no positional: what is left over is the prompt.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from dsv41chat import __version__
from dsv41chat.settings import EFFORTS, KEYS, near, near_words
from dsv41chat.ui.output import Out, ReaderGone, UsageError

COMMANDS = ("conversations", "models", "cache", "config", "doctor", "bench", "eval", "completion")
PLANNED = ("serve",)  # a name kept free: a prompt of that name needs -p

_EPILOG = """\
examples:
  dsv41chat                                 full screen
  dsv41chat -c                              full screen, last conversation
  dsv41chat --headless "What is an n-gram?" one answer on stdout
  cat notes.txt | dsv41chat -p "Summarise"  piped input, then the prompt
  dsv41chat --stream-json "hi" | jq .type   one JSON object per event

a line of --batch: {"id": "a1", "prompt": "..."}; messages ([{"role", "content"}, ...]) instead of prompt; system, params (named as the
options: temperature, max_tokens, effort, seed, stop, ...) and conversation may be added. One result line comes out for each.

commands: conversations, models, cache, config, doctor, bench, eval, completion (each has -h). A prompt that reads like one: -p TEXT or -- TEXT.
"""


_MISTYPED = re.compile(r"argument (\S+): invalid \w+ value: (.*)$", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing what is wrong and leaving."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and message.startswith("argument") and "invalid choice" in message:
                word = message.split("'")[1] if "'" in message else ""
                message = f"unknown command {word!r}{near(word, action.choices)}"
            elif (match := _MISTYPED.match(message)) and "/".join(action.option_strings) == match[1]:
                # argparse names the function that reads the value.
                help_words = f" ({action.help % vars(action)})" if action.help else ""
                message = f"argument {match[1]}: {match[2]} cannot be read as {action.metavar or action.dest}{help_words}"
        raise UsageError(f"{message[:1].upper()}{message[1:]}.", hint=f"{self.prog} -h")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help and version on stdout. argparse drops what cannot be written without a word; here it raises OutputFailed."""
        if message:
            with suppress(ReaderGone):  # who asked has read enough
                Out().write(message)

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Raise UsageError if an unknown option is among `words`."""
        for word in words:
            if word.startswith("-") and word != "-":
                name = word.partition("=")[0]
                # Without the dashes: two options that share nothing but "--no" are not near.
                known = {option.lstrip("-"): option for option in self._option_string_actions if option.startswith("--")}
                matches = [known[match] for match in near_words(name.lstrip("-"), known)]
                guess = f" (did you mean {' or '.join(matches)}?)" if matches else ""
                raise UsageError(f"Unknown option {name}{guess}.", hint=f"{self.prog} -h")


def program() -> str:
    """The name under which the program was called."""
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else ""
    return "dsv41chat" if name in ("", "__main__.py", "-c", "-m") else name


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options of the chat and of every command."""
    group = parser.add_argument_group("files and messages")
    group.add_argument("--config", metavar="PATH", type=_text, help="config file")
    group.add_argument("--data-dir", metavar="PATH", type=_text, help="folder of the database; moves cache, state and logs into it too")
    group.add_argument("--log-file", metavar="PATH", type=_text, help="log file")
    group.add_argument("-q", "--quiet", action="store_true", help="stderr: errors only")
    group.add_argument("-v", "--verbose", action="count", default=0, help="stderr: timings; twice: the engine's log")
    group.add_argument("--version", action="version", version=f"dsv41chat {__version__}")


class _Prompt(argparse.Action):
    """Keeps -p and --prompt-file in the order in which they were given."""

    def __call__(self, parser, namespace, value, option=None):
        kind = "file" if option == "--prompt-file" else "text"
        namespace.prompts = [*(namespace.prompts or []), (kind, value)]


def number(key: str, *, auto: bool | None = None) -> Any:
    """An argparse type that holds a value to the bounds of a settings key. auto False: "auto" is no value here."""
    from dsv41chat.settings import parse_text

    rules = KEYS[key] if auto is None else replace(KEYS[key], auto=auto)

    def parse(text: str) -> Any:
        try:
            return parse_text(rules, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be {error}, not {text!r}") from None

    return parse


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^63 - 1, not {text!r}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return value


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def chat_parser() -> Parser:
    """Options of the full screen and of scripted mode. What it leaves over is the prompt."""
    p = Parser(prog=program(), usage="%(prog)s [options] [PROMPT]\n       %(prog)s COMMAND ...", epilog=_EPILOG, add_help=True)
    p.set_defaults(prompts=None)
    g = p.add_argument_group("what to say")
    g.add_argument("-p", "--prompt", action=_Prompt, metavar="TEXT", help="prompt; in scripted mode repeatable, one turn each")
    g.add_argument("--prompt-file", action=_Prompt, metavar="PATH", help="prompt from a file, verbatim")
    g.add_argument("-f", "--file", action="append", default=[], metavar="PATH", help="attach a text file; repeatable; - is standard input")
    g.add_argument("--no-stdin", action="store_true", help="do not read standard input")
    g = p.add_argument_group("conversation")
    which = g.add_mutually_exclusive_group()
    which.add_argument("-c", "--continue", dest="last", action="store_true", help="the last used conversation")
    which.add_argument("--resume", metavar="ID", help="this conversation: beginning of its id (4 characters) or its title")
    which.add_argument("--conversation", metavar="ID", help="the same, made under that title if there is none")
    g.add_argument("--branch", metavar="MSG", help="attach to this message instead of the newest")
    g.add_argument("--fork", action="store_true", help="copy into a new conversation first")
    system = g.add_mutually_exclusive_group()
    system.add_argument("-s", "--system", metavar="TEXT", help="system prompt of a new conversation; empty: none")
    system.add_argument("--system-file", metavar="PATH", help="system prompt from a file")
    g.add_argument("--no-save", action="store_true", help="store nothing")
    g.add_argument("--no-cache", action="store_true", help="compute every prompt from its first token")
    g = p.add_argument_group("answer")
    g.add_argument("-m", "--model", metavar="NAME", type=_text, help="build: folder, name, or unique beginning of a name")
    g.add_argument("--effort", choices=EFFORTS, help="thinking effort")
    g.add_argument("--temperature", type=number("chat.temperature"), metavar="F", help="0 = greedy")
    g.add_argument("--top-p", type=number("chat.top_p"), metavar="F", help="sample from the likeliest tokens that hold this probability")
    g.add_argument("--min-p", type=number("chat.min_p"), metavar="F", help="drop tokens below this share of the likeliest")
    g.add_argument("--top-k", type=number("chat.top_k"), metavar="N", help="sample from the k likeliest tokens; 0 = all")
    g.add_argument("--presence-penalty", type=number("chat.presence_penalty"), metavar="F", help="against tokens that came already")
    g.add_argument("--frequency-penalty", type=number("chat.frequency_penalty"), metavar="F", help="the same, times how often")
    g.add_argument("--seed", type=_seed, metavar="N", help="default: random, reported")
    g.add_argument("--max-tokens", type=number("chat.max_tokens"), metavar="N", help="limit of thinking and answer")
    g.add_argument("--max-answer-tokens", type=number("chat.max_tokens", auto=False), metavar="N", help="limit of the answer without its thinking")
    g.add_argument("--stop", action="append", default=[], type=_text, metavar="TEXT", help="end the answer at this text; repeatable")
    g.add_argument("--draft", type=number("engine.draft"), metavar="auto|off|N", help="drafting")
    g.add_argument("--context", type=number("engine.context"), metavar="N", help="tokens of context")
    g.add_argument("--engram", choices=("auto", "resident", "stream"), help="where the tables live")
    g.add_argument("--allow-second", action="store_true", help="load a large build though another process holds one")
    g = p.add_argument_group("scripted mode (each implies --headless)")
    g.add_argument("--headless", action="store_true", help="answer and exit")
    mode = g.add_mutually_exclusive_group()
    mode.add_argument("--text", dest="output", action="store_const", const="text", help="the answer as text (default)")
    mode.add_argument("--json", dest="output", action="store_const", const="json", help="one JSON object")
    mode.add_argument("--stream-json", dest="output", action="store_const", const="stream-json", help="one JSON object per event")
    g.add_argument("--no-stream", action="store_true", help="text: one write at the end")
    g.add_argument("--show-thinking", action="store_true", help="text: thinking to stderr")
    g.add_argument("--extract", nargs="?", const="", metavar="LANG", help="text: only the first fenced block (of that language)")
    g.add_argument("-o", "--output", dest="path", metavar="PATH", help="write to a file instead of stdout")
    g.add_argument("--force", action="store_true", help="load a build that does not fit; overwrite the file of -o or --batch-output")
    g.add_argument("--strict", action="store_true", help="exit 10 for a cut answer, 11 for one that repeats itself, 12 without a block to extract")
    g.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="limit of the whole run; exit 124")
    g.add_argument("--progress", choices=("auto", "always", "never"), help="progress on stderr")
    action = g.add_mutually_exclusive_group()
    action.add_argument("--load-only", action="store_true", help="load the build, report, exit")
    action.add_argument("--dry-run", action="store_true", help="count the prompt's tokens, exit")
    action.add_argument("--batch", metavar="PATH", help="answer a JSON-lines file of prompts (fields: see below); - is standard input")
    g.add_argument("--batch-output", metavar="PATH", help="where --batch writes (default: stdout)")
    g.add_argument("--resume-batch", action="store_true", help="skip what is done in --batch-output, append the rest")
    g.add_argument("--fail-fast", action="store_true", help="end the batch at the first failure")
    g.add_argument("--save", action="store_true", help="keep the batch's items as conversations")
    g = p.add_argument_group("full screen")
    g.add_argument("--send", action="store_true", help="send the prompt at once")
    g.add_argument("--pick", action="store_true", help="begin with the list of conversations")
    g.add_argument("--theme", metavar="NAME", help="colours")
    g.add_argument("--no-mouse", action="store_true", help="leave the mouse to the terminal")
    g.add_argument("--readonly", action="store_true", help="read only")
    g.add_argument("--plain", action="store_true", help="lines of text instead of a screen, for screen readers")
    add_common(p)
    return p


# Options that only scripted mode has, and those that only the full screen has: (destination, option).
HEADLESS_ONLY = (
    ("output", "--text, --json or --stream-json"), ("no_stream", "--no-stream"), ("show_thinking", "--show-thinking"), ("extract", "--extract"),
    ("path", "-o"), ("strict", "--strict"), ("timeout", "--timeout"), ("progress", "--progress"), ("load_only", "--load-only"),
    ("dry_run", "--dry-run"), ("batch", "--batch"),
)  # fmt: skip
BATCH_REFUSES = (
    ("prompts", "a prompt"), ("file", "-f"), ("last", "-c"), ("resume", "--resume"), ("conversation", "--conversation"), ("branch", "--branch"),
    ("fork", "--fork"), ("output", "another output"), ("extract", "--extract"), ("show_thinking", "--show-thinking"), ("path", "-o"),
    ("strict", "--strict"), ("no_stream", "--no-stream"),
)  # fmt: skip
SCREEN_ONLY = (
    ("send", "--send"), ("pick", "--pick"), ("theme", "--theme"), ("no_mouse", "--no-mouse"), ("readonly", "--readonly"), ("plain", "--plain"),
)  # fmt: skip


def first_word(argv: Sequence[str], parser: argparse.ArgumentParser) -> int | None:
    """Index of the first word that is neither an option nor an option's value; None after `--` or without one."""
    i = 0
    while i < len(argv):
        word = argv[i]
        if word == "--":
            return None
        if not word.startswith("-") or word == "-":
            return i
        i += 1 + _takes_next(word, parser, argv[i + 1 :])
    return None


def _takes_next(word: str, parser: argparse.ArgumentParser, rest: Sequence[str]) -> int:
    options = parser._option_string_actions
    if word.startswith("--"):
        action = options.get(word)
    else:
        # A cluster such as -qvp: the first option that takes a value takes what follows it.
        action = None
        for position, letter in enumerate(word[1:], 1):
            action = options.get("-" + letter)
            if action is None or (action.nargs != 0 and position < len(word) - 1):
                return 0
    if action is None or action.nargs in (0, "?"):
        return 0
    return 1 if rest else 0


def _refuse_near_command(argv: Sequence[str], index: int | None) -> None:
    """Raise UsageError where the first word is nearly a command and the next one is a verb of it. Alone it is a prompt."""
    if index is None or index + 1 >= len(argv):
        return
    from dsv41chat.cli_commands import command_parser

    word, verb = argv[index : index + 2]
    for command in near_words(word, COMMANDS):
        if verb in command_parser(command)[1].choices:
            raise UsageError(f"There is no command {word!r} (did you mean {command}?).", hint=f"{program()} {command} {verb}")


def parse_chat(argv: Sequence[str]) -> argparse.Namespace:
    """Options and, as `prompts`, the prompt texts in order. Raises UsageError."""
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = chat_parser()
    _refuse_near_command(argv, first_word(argv, parser))
    args, words = parser.parse_known_args(argv[:cut])
    parser.refuse_unknown(words)
    words += argv[cut + 1 :]
    if args.extract and not words and not args.prompts and not args.file and f"--extract={args.extract}" not in argv and " " in args.extract:
        # `--extract "a prompt"`: a language is one word, so this is the prompt.
        words, args.extract = [args.extract], ""
    if len(words) > 1:
        raise UsageError(f"Unexpected argument {words[1]!r}.", hint="put the prompt in quotes")
    prompts = [("text", word) for word in words] + (args.prompts or [])
    args.prompts = prompts
    for name, option in (("batch_output", "--batch-output"), ("resume_batch", "--resume-batch"), ("fail_fast", "--fail-fast"), ("save", "--save")):
        if getattr(args, name) and not args.batch:
            raise UsageError(f"{option} needs --batch.")
    if args.resume_batch and not args.batch_output:
        raise UsageError("--resume-batch needs --batch-output.")
    if args.output in ("json", "stream-json"):
        for name, option in (("no_stream", "--no-stream"), ("show_thinking", "--show-thinking"), ("extract", "--extract")):
            if getattr(args, name) not in (None, False):
                raise UsageError(f"{option} belongs to text output, not to --{args.output}.")
    if args.quiet and args.verbose:
        raise UsageError("--quiet and --verbose exclude each other.")
    return args


def flag_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the chat options fix among the settings, by key."""
    flags = {
        "chat.effort": args.effort, "chat.temperature": args.temperature, "chat.top_p": args.top_p, "chat.min_p": args.min_p,
        "chat.top_k": args.top_k, "chat.presence_penalty": args.presence_penalty, "chat.frequency_penalty": args.frequency_penalty,
        "chat.max_tokens": args.max_tokens, "engine.draft": args.draft, "engine.context": args.context,
        "engine.engram": args.engram,
    }  # fmt: skip
    return {name: value for name, value in flags.items() if value is not None}


def turn_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the chat options fix for every turn and no setting has."""
    turn = {"stop": tuple(args.stop) or None, "seed": args.seed, "max_answer_tokens": args.max_answer_tokens}
    return {name: value for name, value in turn.items() if value is not None}
