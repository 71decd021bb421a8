"""`dsv41chat eval`: what a build is worth, measured on this machine.

One module per arm in this package, named in ARMS in the order of `--help`. An arm has

    HELP, EXAMPLE                  one line each: what it measures; its words after "dsv41chat eval"
    add_options(parser)            its options; `--fresh` and `-o` come from `frame.add_options`
    run(context) -> int            measure, show, write receipts; the exit code
    markdown(receipt) -> str       its part of a build's page (`eval report`), from one receipt and nothing else (arms that measure)

and imports MLX and the engine inside functions only: `--help` and completion read the options without a back end.
`frame` holds what the arms share: builds, runs that go on after a kill, progress, receipts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

ARMS = ("ppl", "ladder", "needle", "selfcheck", "table", "report")


def arm(name: str) -> Any:
    """The module of an arm."""
    return import_module(f"{__name__}.{name}")
