"""`dsv41chat eval ARM`: what a build is worth. The arms live in the bench package, which says what one looks like."""

from __future__ import annotations

from typing import Any


def add_commands(commands: Any) -> None:
    from dsv41chat.bench.eval import ARMS, arm

    for name in ARMS:
        module = arm(name)
        p = commands.add_parser(name, help=module.HELP, epilog=f"example: dsv41chat eval {module.EXAMPLE}")
        module.add_options(p)
        p.set_defaults(run=module.run, needs_settings=True)
