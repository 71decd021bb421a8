"""`dsv41chat completion SHELL`: what a shell needs to complete our command line. The words come from the parsers, so none is forgotten."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from dsv41chat.cli_options import COMMANDS, chat_parser, first_word, program
from dsv41chat.settings import KEYS

# Each asks the program for the words that fit; where there are none the shell completes file names.
_SCRIPTS = {
    "bash": """\
_{function}() {{
    local IFS=$'\\n'
    COMPREPLY=($({program} completion words -- "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -F _{function} {program}
""",
    "zsh": """\
#compdef {program}
_{function}() {{
    local -a found
    found=("${{(@f)$({program} completion words -- "${{(@)words[2,CURRENT]}}" 2>/dev/null)}}")
    if [[ -n "$found[1]" ]]; then compadd -a found; else _files; fi
}}
compdef _{function} {program}
""",
    "fish": """\
function __{function}_words
    set -l words (commandline -opc) (commandline -ct)
    {program} completion words -- $words[2..-1] 2>/dev/null
end
complete -c {program} -a '(__{function}_words)'
""",
}
_WHERE = {
    "bash": "dsv41chat completion bash > ~/.local/share/bash-completion/completions/dsv41chat",
    "zsh": "dsv41chat completion zsh > ~/.zfunc/_dsv41chat",
    "fish": "dsv41chat completion fish > ~/.config/fish/completions/dsv41chat.fish",
}


def add_commands(commands: Any) -> None:
    for shell, where in _WHERE.items():
        p = commands.add_parser(shell, help=f"a script for {shell}", epilog=f"example: {where}")
        p.set_defaults(run=lambda context, shell=shell: _script(context, shell), needs_settings=False)
    p = commands.add_parser("words", help="what the last word may become (the scripts ask)", epilog="example: dsv41chat completion words -- mod")
    p.add_argument("words", metavar="WORD", nargs="*")
    p.set_defaults(run=_words)


def _script(context: Any, shell: str) -> int:
    name = program()
    function = "".join(c if c.isalnum() else "_" for c in name)
    text = _SCRIPTS[shell].format(program=name, function=function)
    context.json({"shell": shell, "script": text}) if context.args.json else context.out.write(text)
    return 0


def _words(context: Any) -> int:
    found = candidates(context.args.words, context)
    context.json(found) if context.args.json else context.out.write("".join(f"{word}\n" for word in found))
    return 0


def candidates(words: Sequence[str], context: Any) -> list[str]:
    """What the last of `words` (the line without the program's name) may become; [] for a file name or a free text."""
    from dsv41chat.cli_commands import command_parser, common_parser

    *before, current = words or [""]
    parser: argparse.ArgumentParser = chat_parser()
    index = first_word(before, parser)
    command = before[index] if index is not None and before[index] in COMMANDS else None
    options = dict(parser._option_string_actions)
    chosen, known = None, list(COMMANDS) if index is None else []
    if command is not None:
        parser, subcommands = command_parser(command)
        chosen = next((word for word in before[index + 1 :] if word in subcommands.choices), None)
        known = [] if chosen is not None else list(subcommands.choices)
        parser = subcommands.choices.get(chosen, parser)
        options = common_parser()._option_string_actions | parser._option_string_actions
    action = options.get(before[-1]) if before else None
    if action is not None and action.nargs is None:
        known = _values(action, context)
    elif current.startswith("-"):
        known = [option for option in options if option.startswith("--") or current == "-"]
    elif chosen is not None:
        known = [value for positional in parser._get_positional_actions() for value in _positional(command, chosen, positional, context)]
    return sorted(word for word in set(known) if word.startswith(current))


def _values(action: argparse.Action, context: Any) -> list[str]:
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.dest in ("model", "against"):
        return _builds(context)
    if action.dest in ("resume", "conversation"):
        return _conversations(context)
    if action.dest == "theme":
        from dsv41chat.ui.themes import names

        return list(names())
    return []


def _positional(command: str, subcommand: str, action: argparse.Action, context: Any) -> list[str]:
    if (command == "models" and action.dest in ("name", "source")) or (command == "eval" and action.dest in ("pack", "packs")):
        return _builds(context)
    if command == "conversations" and action.dest in ("id", "ids"):
        return _conversations(context, deleted=subcommand == "undelete")
    return list(KEYS) if command == "config" and action.dest == "key" else []


def _builds(context: Any) -> list[str]:
    return [ref.name for ref in context.host().builds()]


def _conversations(context: Any, deleted: bool = False) -> list[str]:
    return [row.id for row in context.store().list_conversations(deleted=deleted)]
