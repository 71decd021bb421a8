"""`dsv41chat models convert`: another format of a build, in a folder of its own."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv41chat.ui.output import UsageError

RECIPES = (
    "native", "affine-8", "affine-6", "affine-4", "mixed-4_8", "mixed-4_8-engram6", "mixed-4_8-engram4", "mixed-2.4", "2bit-dq",
    "drafter-bank",
)  # fmt: skip
_LINE_S = 2.0


def add_command(commands: Any) -> None:
    epilog = "example: dsv41chat models convert ~/models/V4.1-Flash ~/models/V4.1-Flash-4_8 --recipe mixed-4_8"
    p = commands.add_parser("convert", help="write a build in another format, layer by layer", epilog=epilog)
    p.add_argument("source", metavar="SRC", help="a name or a folder")
    p.add_argument("target", metavar="DST", help="a new or empty folder")
    p.add_argument("--recipe", required=True, choices=RECIPES, metavar="R", help=", ".join(RECIPES))
    p.add_argument("--engram", choices=("native", "8", "6", "4"), help="table rows: as they are, or affine with so many bits")
    p.add_argument("--drafter", choices=("keep", "exact", "q8", "drop"), default="keep", help="as the recipe says, lossless, affine 8, or none")
    p.add_argument("--from", dest="release", metavar="DIR", help="with --recipe drafter-bank: the release whose drafter SRC gets")
    p.add_argument("--resume", action="store_true", help="go on with a conversion that was stopped")
    p.add_argument("--yes", action="store_true", help="do not ask")
    p.set_defaults(run=_convert)


def _convert(context: Any) -> int:
    from dsv41chat.engine import convert_pack, plan_conversion
    from dsv41chat.engine.convert.convert import MEMORY_BYTES

    args = context.args
    target = Path(args.target).expanduser()
    if (args.recipe == "drafter-bank") != (args.release is not None):
        raise UsageError("--recipe drafter-bank and --from belong together.", hint="--recipe drafter-bank --from RELEASE")
    if args.release is not None:
        return _bank(context, target)
    source = context.host().find(args.source)
    plan = plan_conversion(source.folder, target, args.recipe, table=args.engram, drafter=args.drafter)
    parent = next(p for p in (target, *target.resolve().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    lines = (
        f"{source.name} -> {target}: {args.recipe}, {len(plan.groups)} shards",
        f"disk: {plan.bytes_out / 1e9:,.2f} GB of {free / 1e9:,.1f} GB free; memory: up to {MEMORY_BYTES / 1e9:.1f} GB",
        f"{plan.bits_per_weight:.2f} bits per weight; tensors in: {sum(ref.nbytes for ref in plan.pack.index.tensors.values()) / 1e9:,.2f} GB",
    )
    for line in lines:
        context.stderr.notice(line)
    if not args.yes and not context.confirm("Convert?"):
        return 1
    convert_pack(plan, resume=args.resume, progress=progress_line(context, "converting"))
    if args.json:
        context.json({"ok": True, "folder": str(target), "bytes": plan.bytes_out, "bits_per_weight": round(plan.bits_per_weight, 4)} | plan.mark)
    else:
        context.stderr.notice(f"{target}: written and checked. dsv41chat models verify {target}")
    return 0


def _bank(context: Any, target: Path) -> int:
    from dsv41chat.engine import plan_bank, write_bank

    args, host = context.args, context.host()
    drafter = "exact" if args.drafter == "keep" else args.drafter
    if drafter == "drop" or args.engram:
        raise UsageError("A drafter bank is exact or q8 and has no tables.", hint="--drafter exact or --drafter q8")
    bank = plan_bank(host.find(args.source).folder, host.find(args.release).folder, target, drafter=drafter)
    context.stderr.notice(f"{args.source} with the drafter of {args.release} ({drafter}): {bank.bytes_out / 1e9:,.2f} GB beside hard links")
    if not args.yes and not context.confirm("Write it?"):
        return 1
    write_bank(bank, progress=progress_line(context, "writing"))
    if args.json:
        context.json({"ok": True, "folder": str(target), "bytes": bank.bytes_out, "drafter": drafter})
    else:
        context.stderr.notice(f"{target}: written and checked. dsv41chat models verify {target}")
    return 0


def progress_line(context: Any, what: str) -> Callable[[str, int, int], None]:
    """A callback (part, done, total) that reports to stderr every two seconds."""
    last = [time.monotonic()]

    def report(part: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] >= _LINE_S and sys.stderr is not None:
            last[0] = now
            context.stderr.notice(f"{what} {part}: {done / 1e9:,.1f} of {total / 1e9:,.1f} GB, {100 * done / max(1, total):.0f} %")

    return report
