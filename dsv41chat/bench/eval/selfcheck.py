"""`dsv41chat eval selfcheck PACK`: does this very build on this very device keep the engine's promises?"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from dsv41chat.bench.eval import frame
from dsv41chat.bench.eval.frame import Run, builds, command, markdown_table, numeric_options, opened, show
from dsv41chat.engine.errors import PackIncomplete
from dsv41chat.ui.output import UsageError

HELP = "decode == prefill, drafted == plain, resumed == uninterrupted, on this device"
EXAMPLE = "selfcheck nano"
DEFAULT_TOKENS, LEAST_TOKENS = 640, 64


def _tokens(text: str) -> int:
    count = int(text)
    if count < LEAST_TOKENS:
        raise ValueError(text)
    return count


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pack", metavar="PACK", help="a name or a folder")
    words = f"length of the text before the answers (default {DEFAULT_TOKENS}; past a build's selection it tests more)"
    parser.add_argument("--tokens", type=_tokens, default=DEFAULT_TOKENS, metavar="N", help=words)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as the chat opens the build")
    frame.add_options(parser)


def run(context: Any) -> int:
    args = context.args
    (build,) = builds(context, [args.pack])
    parameters = {"tokens": args.tokens, "dtype": args.dtype} | numeric_options(context)
    with Run(context, "selfcheck", [build], parameters, fresh=args.fresh) as run:
        with opened(context, build, args.dtype) as engine:
            measure(run, engine, args.tokens)
        result = evaluate(run.state["checks"]) | run.state["about"]
        words = [*(["--dtype", args.dtype] if args.dtype else [])]
        words = command("selfcheck", args.pack, "--tokens", args.tokens, *words)
        receipt = run.finish(result, summary=summary(result), short=f"selfcheck {'ok' if result['ok'] else 'BROKEN'}", command=words)
    show(context, receipt, table(receipt))
    for check in (check for check in result["checks"] if not check["ok"]):
        context.stderr.notice(f"{build.name} breaks {check['contract']}: {check['what']}{_first(check)}")
    return 0 if result["ok"] else 4


def measure(run: Run, engine: Any, tokens: int) -> None:
    """Every check that no earlier process has finished; run.state["checks"] in order."""
    from dsv41chat.bench.eval.contracts import CONTRACTS, plan

    if engine.tokenizer is None:
        raise PackIncomplete(f"{engine.name} has no tokenizer.json: nothing can be asked of it", "models verify --goldens compares its logits")
    if tokens + 64 > engine.context_limit:
        raise UsageError(f"{engine.name} holds {engine.context_limit:,} tokens here.", hint=f"--tokens {engine.context_limit - 64}")
    checks = run.state.setdefault("checks", [])
    run.state["about"] = {"dtype": str(engine.trunk.dtype).rsplit(".", 1)[-1], "row_invariant": engine.row_invariant, "drafter": engine.drafting.kind}
    jobs = list(plan(engine, tokens))
    for number, (contract, what, check) in enumerate(jobs):
        if number < len(checks):
            continue
        run.progress("checks", number, len(jobs), f"{CONTRACTS[contract]}, {what}")
        with tempfile.TemporaryDirectory(prefix="selfcheck-") as folder:
            checks.append({"name": contract, "contract": CONTRACTS[contract], "what": what} | check(Path(folder)))
        run.save()
    run.progress("checks", len(jobs), len(jobs))


def evaluate(checks: list[dict[str, Any]]) -> dict[str, Any]:
    broken = list(dict.fromkeys(check["contract"] for check in checks if not check["ok"]))
    ties = sum(check["near_ties"] for check in checks)
    return {"ok": not broken, "broken": broken, "near_ties": ties, "flipped": sum(check["flipped"] for check in checks), "checks": checks}


def summary(result: dict[str, Any]) -> str:
    if not result["ok"]:
        return f"selfcheck BROKEN: {', '.join(result['broken'])}"
    return f"selfcheck: {len(result['checks'])} checks hold, {result['near_ties']} near-ties, {result['flipped']} flipped"


def _first(check: dict[str, Any]) -> str:
    """Where two paths part, with both logits."""
    words = f"; {check['note']}" if check.get("note") else ""
    if check["flips"]:
        f = check["flips"][0]
        words += f"; at position {f['position']} token {f['ids'][0]} or {f['ids'][1]}, logits {f['first']} and {f['second']}"
    return words


def _seen(check: dict[str, Any]) -> str:
    rows = f"{check['rows']} rows" if "rows" in check else f"{check['tokens']} tokens"
    words = [rows, *([f"max |difference| {check['max_abs']:.2g}"] if "max_abs" in check else []), f"{check['near_ties']} near-ties"]
    words += [f"relative L2 {check['relative_l2']:.2g}"] if "relative_l2" in check else []
    words += [f"{check['flipped']} flipped"] if check["flipped"] else []
    words += ["state differs"] if check.get("state_equal") is False else []
    return ", ".join(words)


def _rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(check["contract"], check["what"], "ok" if check["ok"] else "BROKEN", _seen(check)) for check in result["checks"]]


def table(receipt: dict[str, Any]) -> str:
    rows = _rows(receipt["result"])
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) + f"  {row[3]}" for row in rows]
    return "\n".join([*lines, _about(receipt["result"])])


def _about(result: dict[str, Any]) -> str:
    exact = "every contract bit for bit" if result["row_invariant"] else "decode == prefill within a tolerance, the rest bit for bit"
    return f"{result['dtype']}, drafter {result['drafter']}; asked for here: {exact}."


def markdown(receipt: dict[str, Any]) -> str:
    result = receipt["result"]
    lines = markdown_table(("contract", "what", "verdict", "seen"), _rows(result))
    flips = [f"* {check['contract']}, {check['what']}{_first(check)}" for check in result["checks"] if check["flips"]]
    return "\n".join([*lines, "", _about(result), *flips])
