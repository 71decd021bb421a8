"""`dsv41chat doctor`: what this machine does with a build, line by line, with a remedy where one is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from dsv41chat.engine.checks import Line


def add_commands(commands: Any) -> Callable[[Any], int]:
    """Add the parts. Returns what runs without one: all of the machine."""
    p = commands.add_parser("engram", help="how the tables of a build are read here", epilog="example: dsv41chat doctor engram --model nano")
    p.add_argument("--model", metavar="NAME", help="a name or a folder; default: the build that would answer")
    p.add_argument("--no-measure", action="store_true", help="do not time the read paths (some seconds, and their winners are stored)")
    p.set_defaults(run=_engram, needs_settings=True)
    p = commands.add_parser("drafting", help="what drafts, which operations run row by row", epilog="example: dsv41chat doctor drafting --model nano")
    p.add_argument("--model", metavar="NAME", help="a name or a folder; default: the build that would answer")
    p.add_argument("--no-measure", action="store_true", help="do not time windows and drafter (a second or two, and the costs are stored)")
    p.set_defaults(run=_drafting, needs_settings=True)
    p = commands.add_parser("states", help="how exactly a resumed chat goes on here", epilog="example: dsv41chat doctor states --model nano")
    p.add_argument("--model", metavar="NAME", help="a name or a folder; default: the build that would answer")
    p.set_defaults(run=_states, needs_settings=True)
    p = commands.add_parser("routes", help="what computes the hot operations here", epilog="example: dsv41chat doctor routes --model nano")
    p.add_argument("--model", metavar="NAME", help="a name or a folder; default: the build that would answer")
    p.set_defaults(run=_routes, needs_settings=True)
    return _general


def _general(context: Any) -> int:
    """It runs although the settings cannot be read: then that is what it says."""
    from dsv41chat.settings import ConfigError, load_settings
    from dsv41chat.ui import doctor

    lines = [doctor.versions()]
    try:
        context.settings = load_settings(config=context.args.config, data_dir=context.args.data_dir)
    except ConfigError as error:
        lines += [doctor.broken_settings(error), doctor.skipped()]
    else:
        lines += doctor.examine(context.settings, context.bare_host())
    if context.args.json:
        context.json([asdict(line) for line in lines])
    else:
        width = max(len(line.name) for line in lines)
        for line in lines:
            context.print(f"{line.verdict:5} {line.name:{width}} {line.text}" + (f"  Remedy: {line.remedy}" if line.remedy else ""))
        worst = [sum(line.verdict == verdict for line in lines) for verdict in ("fail", "warn")]
        context.stderr.notice(f"{len(lines)} checks, {worst[0]} failed, {worst[1]} with a warning")
    return 1 if any(line.verdict == "fail" for line in lines) else 0


def _drafting(context: Any) -> int:
    from dsv41chat.engine.draft.doctor import examine

    measure = not context.args.no_measure
    with _opened(context, measure) as (name, engine):
        lines = examine(engine.drafting, measure)
    return _show(context, name, lines)


def _routes(context: Any) -> int:
    """What is installed when the build is opened, each compared with the stock operation now, whatever is known."""
    with _opened(context, False, recheck=True) as (name, engine):
        routes = engine.trunk.routes
        head, *rest = routes.summary()
        lines = [Line("ok", "routes", head)]
        refused = {c.op for c in routes.choices if c.reason and "stock" in c.route}
        for text in rest:
            op, _, words = text.partition(": ")
            lines.append(Line("warn" if op in refused and "it fails" in words else "ok", op, words))
    return _show(context, name, lines)


def _states(context: Any) -> int:
    """The self-test of the rows, whose verdict is stored, and what is kept."""
    from dsv41chat.ui.states import listing

    with _opened(context, True) as (name, engine):
        from dsv41chat.engine.invariance import WIDTHS, measure_rows

        widths = f"{len(WIDTHS)} widths from {WIDTHS[0]} to {WIDTHS[-1]} against one call"
        if measure_rows(engine):
            lines = [Line("ok", "rows", f"do not depend on the rows beside them ({widths}): a resumed chat equals a fresh one bit for bit")]
        else:
            text = f"depend on the rows beside them ({widths}): a resumed chat goes on as if it had not stopped, a fresh one may differ at near-ties"
            lines = [Line("warn", "rows", text, "cache.strict = true resumes only where both are equal, and reads more again")]
    c = context.settings.cache
    if not c.enabled or c.budget == 0:
        lines.append(Line("ok", "states", "are not kept (cache.enabled or cache.budget)"))
    else:
        lines.append(Line("ok", "states", f"of {len(listing(context.settings)):,} conversations are kept in {context.settings.paths.states}"))
    return _show(context, name, lines)


@contextmanager
def _opened(context: Any, write: bool, recheck: bool = False) -> Iterator[tuple[str, Any]]:
    """(name, engine) of the build that the options name. write: verdicts are stored. recheck: those about routes are not trusted."""
    from dsv41chat.engine.backend import require_backend
    from dsv41chat.ui.builds import table_settings

    require_backend()
    from dsv41chat.engine.engine import open_engine

    e = context.settings.engine
    host = context.host(write=write)
    build = host.resolve(context.args.model)
    engine = open_engine(
        build.folder, cache_quant=e.cache_quant, linear_input_fp8=e.linear_input_fp8, qat_sim=e.qat_sim, exact=e.exact,
        routes=e.routes, facts=context.store().facts, recheck=recheck, engram=table_settings(context.settings),
    )  # fmt: skip
    try:
        yield build.name, engine
    finally:
        engine.close()


def _show(context: Any, name: str, lines: list) -> int:
    if context.args.json:
        context.json([{"build": name, **asdict(line)} for line in lines])
    else:
        context.table(("", name, ""), [(line.verdict, line.name, line.text + (f"  {line.remedy}" if line.remedy else "")) for line in lines])
    return 1 if any(line.verdict == "fail" for line in lines) else 0


def _engram(context: Any) -> int:
    from dsv41chat.engine.backend import require_backend
    from dsv41chat.ui.builds import table_settings

    require_backend()
    from dsv41chat.engine.engram.doctor import examine
    from dsv41chat.engine.engram.reader import EngramReader
    from dsv41chat.engine.pack.build import open_pack

    measure = not context.args.no_measure
    host = context.host(write=measure)
    build = host.resolve(context.args.model)
    specs = open_pack(build.folder).table_specs
    if specs:
        reader = EngramReader.open(specs, table_settings(context.settings), context.store().facts)
        try:
            lines = examine(reader, measure)
        finally:
            reader.close()
    else:
        lines = [Line("ok", "tables", "this build has no engram tables")]
    return _show(context, build.name, lines)
