"""`dsv41chat models prune`: a build with fewer routed experts per layer, in a folder of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from dsv41chat.ui.output import UsageError

DEFAULT_TOKENS = 8192
_LINE_S = 2.0


def _experts(text: str) -> int | float:
    """`192`: so many per layer; `75%`: that share of them."""
    if text.endswith("%"):
        share = float(text[:-1]) / 100
        if not 0 < share <= 1:
            raise ValueError(text)
        return share
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


def _tokens(text: str) -> int:
    count = int(text)
    if count < 64:
        raise ValueError(text)
    return count


def add_command(commands: Any) -> None:
    epilog = "example: dsv41chat models prune ~/models/V4.1-Flash-4_8 ~/models/V4.1-Flash-4_8-75 --experts 75% --text my-texts.txt"
    p = commands.add_parser("prune", help="write a build with fewer experts, the least used of a text left out", epilog=epilog)
    p.add_argument("source", metavar="SRC", help="a name or a folder, in any format")
    p.add_argument("target", metavar="DST", help="a new or empty folder")
    p.add_argument("--experts", required=True, type=_experts, metavar="N", help="routed experts to keep per layer: a number, or a share such as 75%%")
    p.add_argument("--text", metavar="FILE", help="what to judge experts by: text, or JSON lines with messages (default: short chats)")
    p.add_argument("--tokens", type=_tokens, default=DEFAULT_TOKENS, metavar="N", help=f"at most so much of the text (default {DEFAULT_TOKENS:,})")
    p.add_argument("--resume", action="store_true", help="go on with one that was stopped")
    p.add_argument("--yes", action="store_true", help="do not ask")
    p.set_defaults(run=_prune)


def _prune(context: Any) -> int:
    args = context.args
    text = None if args.text is None else Path(args.text).expanduser()
    if text is not None and not text.is_file():
        raise UsageError(f"{args.text}: there is no such text.")
    host = context.host()
    source, target = host.find(args.source).folder, Path(args.target).expanduser()
    host.backend()
    from dsv41chat.engine import prune_pack

    plan = _plan(context, source, target, text)
    name, of = plan.pack.folder.resolve().name, plan.pack.config.n_routed_experts
    context.stderr.notice(f"{name} -> {target}: {plan.keep} of {of} experts in {len(plan.layers)} of {len(plan.pack.plan)} layers")
    context.stderr.notice(f"judged by {plan.text.tokens:,} tokens of {plan.text.name}, one layer in memory at a time")
    if not args.yes and not context.confirm("Prune?"):
        return 1
    done = prune_pack(plan, resume=args.resume, progress=_progress(context))
    shown = {"experts": plan.keep, "of": of, "split_half_agreement": round(done.agreement, 4), "never_used": len(done.unused)}
    if args.json:
        context.json({"ok": True, "folder": str(target), **shown, "kept": done.kept, "linked": done.linked, "written": done.written})
        return 0
    context.stderr.notice(f"halves of the text agree on {100 * done.agreement:.0f} % of the experts; {len(done.unused)} were never used by it")
    context.stderr.notice(f"{target}: {len(done.written)} shards written, {len(done.linked)} linked. dsv41chat eval ppl {source} {target}")
    return 0


def _plan(context: Any, source: Path, target: Path, text: Path | None) -> Any:
    from dsv41chat.engine import DEFAULT_TEXT, CalibrationText, plan_prune
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer

    def read(pack: Any) -> Any:
        tokenizer = ChatTokenizer.from_file(pack.folder / "tokenizer.json")
        return CalibrationText.read(text or DEFAULT_TEXT, tokenizer, pack.config.family, context.args.tokens)

    engine = context.settings.engine
    numeric = {"cache_quant": engine.cache_quant, "linear_input_fp8": engine.linear_input_fp8, "qat_sim": engine.qat_sim}
    return plan_prune(source, target, context.args.experts, read, **numeric)


def _progress(context: Any) -> Any:
    """A callback (part, done, total) that reports to stderr every two seconds."""
    last = [time.monotonic()]

    def report(part: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] >= _LINE_S and sys.stderr is not None:
            last[0] = now
            words = f"layer {done} of {total}" if part == "calibrating" else f"{done / 1e9:,.1f} of {total / 1e9:,.1f} GB"
            context.stderr.notice(f"pruning, {part}: {words}")

    return report
