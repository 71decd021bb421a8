"""`dsv41chat bench ARM`: each arm measures, prints a table and writes a receipt. The arms live in the bench package."""

from __future__ import annotations

from typing import Any


def add_commands(commands: Any) -> None:
    from dsv41chat.bench import draft, engram, kernels, resume, ui

    p = commands.add_parser("engram", help="rows of the tables from disk, per path, against the drive", epilog="example: dsv41chat bench engram")
    engram.add_options(p)
    p.set_defaults(run=lambda context: engram.run_options(context.args), needs_settings=False)
    p = commands.add_parser("draft", help="drafted decode against plain decode", epilog="example: dsv41chat bench draft --repeats 1 --long 0")
    draft.add_options(p)
    p.set_defaults(run=lambda context: draft.run_options(context.args), needs_settings=False)
    p = commands.add_parser("ui", help="the full screen under load: keys, drawing, search", epilog="example: dsv41chat bench ui --seconds 5")
    ui.add_options(p)
    p.set_defaults(run=lambda context: ui.run_options(context.args), needs_settings=False)
    p = commands.add_parser("resume", help="first token, resumed against read again; bytes on disk", epilog="example: dsv41chat bench resume")
    resume.add_options(p)
    p.set_defaults(run=lambda context: resume.run_options(context.args), needs_settings=False)
    p = commands.add_parser("kernels", help="operations of a route against the stock ones", epilog="example: dsv41chat bench kernels --rows 1 4")
    kernels.add_options(p)
    p.set_defaults(run=lambda context: kernels.run_options(context.args), needs_settings=False)
