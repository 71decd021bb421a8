"""`dsv41chat cache`: the computed states on disk. Conversations are never touched: without its states a text is only read again."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsv41chat.engine.errors import PackMissing
from dsv41chat.settings import parse_size
from dsv41chat.store.prompt_cache import PromptCache
from dsv41chat.store.prompt_cache_room import EVICT_TO, enforce, evict, listing, open_existing, stats, sweep, used_bytes
from dsv41chat.ui.output import UsageError
from dsv41chat.ui.units import size

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}


def add_commands(commands: Any) -> None:
    p = commands.add_parser("stats", help="how much there is, and why turns were read again", epilog="example: dsv41chat cache stats --json")
    p.set_defaults(run=_stats)
    p = commands.add_parser("list", help="what each conversation keeps", epilog="example: dsv41chat cache list")
    p.set_defaults(run=_list)
    p = commands.add_parser("prune", help="remove states; texts stay", epilog="example: dsv41chat cache prune --older-than 30d")
    p.add_argument("--older-than", metavar="D", type=_age, help="not used for this long: 12h, 30d, 4w")
    p.add_argument("--to", metavar="SIZE", type=parse_size, help="until the folder is at most this large")
    p.add_argument("--build", metavar="B", help="states of this build")
    p.add_argument("--all", action="store_true", help="every state, pinned ones too")
    p.add_argument("--dry-run", action="store_true", help="only say what would go")
    p.set_defaults(run=_prune)


def _age(text: str) -> float:
    """Seconds of "30d"; a bare number counts days."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip())
    if match is None:
        raise ValueError(text)
    return float(match[1]) * _UNITS[match[2] or "d"]


@contextmanager
def _opened(context: Any, *, readonly: bool) -> Iterator[PromptCache | None]:
    settings = context.settings
    cache = open_existing(settings.paths.states, None if settings.cache.budget in ("auto", 0) else settings.cache.budget, readonly=readonly)
    try:
        yield cache
    finally:
        if cache is not None:
            cache.close()


def _stats(context: Any) -> int:
    with _opened(context, readonly=True) as cache:
        nothing = {"folder": str(context.settings.paths.states), "entries": 0, "bytes": 0, "builds": [], "counters": {}}
        found = stats(cache) if cache is not None else nothing
    if context.args.json:
        context.json(found)
        return 0
    budget = f" of {size(found['budget'])}" if "budget" in found else ""
    states = f"{found['entries']:,} state{'s' if found['entries'] != 1 else ''}"
    # The index stays when the last state has gone.
    takes = size(found["bytes"]) + (" for the index," if not found["entries"] and found["bytes"] else "")
    context.print(f"{states}, {takes}{budget} in {found['folder']}")
    if found["builds"]:
        rows = [(_named(b["names"]), b["family"], b["entries"], size(b["bytes"])) for b in found["builds"]]
        context.table(("build", "family", "states", "size"), rows)
        _explain_shared(context, [b["names"] for b in found["builds"]])
    for name, count in found["counters"].items():
        context.print(f"{name}: {size(count) if name.startswith('bytes') else f'{count:,}'}")
    return 0


def _list(context: Any) -> int:
    with _opened(context, readonly=True) as cache:
        rows = listing(cache) if cache is not None else []
    if context.args.json:
        context.json(rows)
    elif rows:
        when = lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
        lines = []
        for r in rows:
            counts = (r["entries"], r["tokens"], size(r["bytes"]), when(r["last_used"]))
            lines.append((r["conversation"], _named(r["builds"]), *counts, "yes" if r["pinned"] else ""))
        context.table(("conversation", "build", "states", "tokens", "size", "used", "pinned"), lines)
        _explain_shared(context, [r["builds"] for r in rows])
    else:
        context.stderr.notice("no stored states")
    return 0


def _named(names: list[str]) -> str:
    return " = ".join(names)


def _explain_shared(context: Any, names: list[list[str]]) -> None:
    """What stands behind "A = B"."""
    if any(len(some) > 1 for some in names):
        context.stderr.notice("A = B: the same build under two names; either resumes from the states of both, and --build takes either")


def _prune(context: Any) -> int:
    args = context.args
    if args.all and (args.older_than is not None or args.to is not None or args.build is not None):
        raise UsageError("--all goes alone.")
    with _opened(context, readonly=args.dry_run) as cache:
        if cache is None:
            _require_build(context, [])
            return _pruned(context, 0, 0, 0)
        _require_build(context, stats(cache)["builds"])
        before, entries = used_bytes(cache), stats(cache)["entries"]
        if args.dry_run:
            return _pruned(context, *_would_go(cache, args), before)
        sweep(cache)
        older = None if args.older_than is None else cache.clock() - args.older_than
        if args.all or older is not None or args.build is not None or args.to is not None:
            evict(cache, args.to or 0, older_than=older, build=args.build, everything=args.all)
        else:
            enforce(cache)
        return _pruned(context, entries - stats(cache)["entries"], before - used_bytes(cache), used_bytes(cache))


def _require_build(context: Any, kept: list[dict[str, Any]]) -> None:
    """Raise PackMissing, with the builds of which states are kept, where --build names neither one of these nor a build."""
    wanted = context.args.build
    if wanted is None or any(wanted == build["fp"] or wanted in build["names"] for build in kept):
        return
    try:
        context.bare_host().find(wanted)
    except PackMissing:
        names = ", ".join(_named(build["names"]) for build in kept) or "none"
        raise PackMissing(f"There is no build {wanted!r}. States are kept of: {names}.", hint="dsv41chat cache stats") from None


def _would_go(cache: PromptCache, args: Any) -> tuple[int, int]:
    """(states, bytes) of a prune that is only asked about."""
    from dsv41chat.store.prompt_cache_room import would_evict

    asked = args.all or args.older_than is not None or args.build is not None or args.to is not None
    target = args.to or 0 if asked else cache.budget_bytes * EVICT_TO
    older = None if args.older_than is None else cache.clock() - args.older_than
    return would_evict(cache, int(target), older_than=older, build=args.build, everything=args.all)


def _pruned(context: Any, entries: int, freed: int, left: int) -> int:
    if context.args.json:
        context.json({"ok": True, "entries": entries, "freed": freed, "bytes": left, "dry_run": bool(context.args.dry_run)})
    elif context.args.dry_run:
        context.print(f"{entries:,} states would go, {size(freed)}; the folder holds {size(left)}")
    else:
        # The folder also gives up what crashes left behind and the log of the index: its bytes are not those of the states alone.
        context.print(f"{entries:,} states removed; the folder holds {size(left)}" + (f", {size(freed)} less than before" if freed > 0 else ""))
    return 0
