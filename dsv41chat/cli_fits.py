"""`dsv41chat models fits`: what each published build and each of its conversions needs, and what of it fits, before any download."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dsv41chat.ui.output import UsageError
from dsv41chat.ui.units import size

RECIPES = ("native", "affine-8", "mixed-4_8", "affine-4", "mixed-2.4", "2bit-dq")
MACS = (96, 128, 192, 256, 512)  # GiB, as they are sold
_SAY_S = 2.0
OTHERS_BYTES = 6 * 10**9  # what the system and other programs are taken to use on a machine that is only described
# Rows of the README: V4-Pro in the two ends only, and affine-4, which is as large as the lossless form, not at all.
README_ROWS = {
    "V4-Flash": ("native", "affine-8", "mixed-4_8", "2bit-dq", "mixed-2.4"),
    "V4.1-Flash": ("native", "affine-8", "mixed-4_8", "2bit-dq", "mixed-2.4"),
    "V4-Pro": ("native", "mixed-2.4"),
}  # fmt: skip
BEGIN, END = "<!-- dsv41chat models fits --markdown -->", "<!-- end -->"


def add_command(commands: Any) -> None:
    p = commands.add_parser("fits", help="which published builds and conversions fit", epilog="example: dsv41chat models fits --mac 192")
    p.add_argument("--mac", metavar="GB", type=_gigabytes, help="a Mac with so much memory instead of this machine")
    p.add_argument("--markdown", action="store_true", help="the table of the README")
    p.set_defaults(run=_fits)


def _gigabytes(text: str) -> int:
    count = int(text)
    if not 8 <= count <= 4096:
        raise ValueError(text)
    return count


def _fits(context: Any) -> int:
    from dsv41chat.engine.backend import require_backend

    require_backend()
    from dsv41chat.engine import paper_builds, read_machine

    args = context.args
    if args.markdown and (args.mac or args.json):
        raise UsageError("--markdown goes alone.")
    if args.markdown:
        context.out.write(markdown())
        return 0
    machines = mac(args.mac) if args.mac else (read_machine(),)
    rows = []
    for build in paper_builds(recipes=RECIPES, progress=_progress(context)):
        found, raised = best(build, machines)
        plan = build.plan
        rows.append(
            {
                "release": build.name, "recipe": build.recipe, "disk": build.disk, "memory": plan.resident, "state_per_token": plan.per_token,
                "fits": found.verdict, "context": found.context, "wired_limit": raised, "words": found.words,
            }
        )  # fmt: skip
    if args.json:
        context.json(rows)
        return 0
    head = ("release", "recipe", "disk", "memory", "fits", "context")
    verdict = lambda row: {"no": "does not fit"}.get(row["fits"], row["fits"]) + (" with a raised wired limit" if row["wired_limit"] else "")
    lines = [(row["release"], row["recipe"], size(row["disk"]), size(row["memory"]), verdict(row), f"{row['context']:,}") for row in rows]
    context.table(head, lines)
    return 0


def _progress(context: Any) -> Callable[[int, int], None]:
    """Says every two seconds how far it is: all layers of every build are laid out, which takes seconds on a slow machine."""
    last = [time.monotonic()]

    def report(done: int, total: int) -> None:
        if time.monotonic() - last[0] >= _SAY_S:
            last[0] = time.monotonic()
            context.stderr.notice(f"laid out {done} of {total} builds")

    return report


def mac(gigabytes: int) -> tuple[Any, Any]:
    """A Mac as it comes, where the GPU may hold three quarters of its memory, and with that limit raised to all but 8 GiB."""
    from dsv41chat.engine import Machine

    total = gigabytes << 30
    limits = (total * 3 // 4, total - (8 << 30))
    return tuple(Machine("metal", total, total - OTHERS_BYTES, limit, "Metal's working set") for limit in limits)


def spark() -> tuple[Any]:
    """128 GB that CPU and GPU share."""
    from dsv41chat.engine import Machine

    total = 128 * 10**9
    return (Machine("cuda", total, total - OTHERS_BYTES, total - OTHERS_BYTES, "free GPU memory"),)


def best(build: Any, machines: Sequence[Any]) -> tuple[Any, bool]:
    """(admission, whether it needs the second machine): what fits before what is tight, and as it comes before a raised limit."""
    found = [(build.on(machine), number > 0) for number, machine in enumerate(machines)]
    return min(found, key=lambda one: ("fits", "tight", "no").index(one[0].verdict))


def markdown() -> str:
    """The table of the README."""
    from dsv41chat.engine import paper_builds

    machines = [mac(count) for count in MACS] + [spark()]
    lines = [
        "| build | disk | memory | " + " | ".join([f"Mac {count} GB" for count in MACS] + ["DGX Spark"]) + " |",
        "|---|--:|--:|" + "--:|" * len(machines),
    ]
    for name, recipes in README_ROWS.items():
        for build in paper_builds([name], recipes):
            cells = [_cell(*best(build, group)) for group in machines]
            lines.append(f"| {name} {build.recipe} | {build.disk / 1e9:,.0f} GB | {build.plan.resident / 1e9:,.0f} GB | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(admission: Any, raised: bool) -> str:
    if admission.verdict == "no":
        return "–"
    tokens = "1M" if admission.context >= 1 << 20 else f"{admission.context >> 10}k"
    return f"{'tight ' if admission.verdict == 'tight' else ''}{tokens}{' ↑' if raised else ''}"
