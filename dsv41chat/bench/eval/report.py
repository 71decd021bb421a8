"""`dsv41chat eval report PACK`: one Markdown page of a build, from the receipts of its fingerprint and from nothing else."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dsv41chat.bench.eval.frame import Build, builds
from dsv41chat.engine.errors import EngineError
from dsv41chat.store.receipts import Receipts

HELP = "one page of a build from its receipts"
EXAMPLE = "report nano -o nano.md"


class NothingMeasured(EngineError):
    """There is no receipt of this build, so nothing to make a page of. Exit 2, as for an empty input."""

    code = "usage"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pack", metavar="PACK", help="a name or a folder")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the page there instead of to stdout")


def run(context: Any) -> int:
    from dsv41chat.bench.eval import ARMS

    args = context.args
    (build,) = builds(context, [args.pack])
    receipts = newest(Receipts(context.settings.paths.state).all(build.fingerprint))
    receipts = [receipt for receipt in receipts if receipt["arm"] in ARMS]
    if not receipts:
        raise NothingMeasured(
            f"Nothing has been measured of {build.name} ({build.fingerprint[:12]}) here, and a report holds measured figures only.",
            f"dsv41chat eval selfcheck {args.pack}, then the report again",
        )
    if args.output is not None:
        args.output.expanduser().write_text(page(build, receipts), encoding="utf-8")
    if args.json:
        context.json({"build": build.described(), "receipts": receipts})
    elif args.output is None:
        context.out.write(page(build, receipts))
    else:
        context.stderr.notice(f"{args.output}: {len(receipts)} measurements")
    return 0


def newest(receipts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of measurements with the same arm, builds and parameters only the newest one; `receipts` come newest first."""
    seen, kept = set(), []
    for receipt in receipts:
        others = [build["fingerprint"] for build in receipt["builds"]]
        key = json.dumps([receipt["arm"], others, receipt["parameters"]], sort_keys=True)
        if key not in seen:
            seen.add(key)
            kept.append(receipt)
    return kept


def page(build: Build, receipts: list[dict[str, Any]]) -> str:
    """Markdown: a head, then one section per measurement in the order of the arms."""
    from dsv41chat.bench.eval import ARMS, arm

    head = f"Fingerprint `{build.fingerprint}`, {build.family}, {build.bytes:,} bytes. Every figure was measured on this fingerprint;"
    lines = [f"# {build.name}", "", f"{head} the last line of a section says when and with what."]
    for name in ARMS:
        for receipt in (r for r in receipts if r["arm"] == name):
            lines += ["", f"## {receipt['summary']}", "", arm(name).markdown(receipt).strip(), "", origin(receipt)]
    return "\n".join(lines) + "\n"


def origin(receipt: dict[str, Any]) -> str:
    """When and with what a receipt was made, as a line of Markdown."""
    when = datetime.fromtimestamp(receipt["time"], UTC).date().isoformat()
    commit = f"commit {receipt['commit'][:9]}{' with changes' if receipt['dirty'] else ''}" if receipt.get("commit") else "no checkout"
    versions = ", ".join(f"{name} {version}" for name, version in receipt["versions"].items() if version)
    where = f"{receipt['system']} {receipt['machine']}, {receipt['device']}"
    return f"{when}, {commit}, {versions}, {where}, {receipt['seconds']:,.0f} s: `{receipt['command']}`"
