"""`dsv41chat eval ladder PACK --against REFERENCE`: where, layer by layer, a build differs from the one it was made from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dsv41chat.bench.eval.frame import Build, Run, builds, command, markdown_table, numeric_options, show
from dsv41chat.bench.eval.frame import add_options as add_common

HELP = "per-layer divergence from another format of the same model"
EXAMPLE = "ladder V4.1-Flash-4_8 --against V4.1-Flash --tokens 2048"
DEFAULT_TOKENS = 512


def _tokens(text: str) -> int:
    count = int(text)
    if count < 2:
        raise ValueError(text)
    return count


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pack", metavar="PACK", help="a name or a folder")
    parser.add_argument("--against", required=True, metavar="REFERENCE", help="the build that PACK was made from")
    parser.add_argument("--text", metavar="FILE", help="text, or JSON lines with messages (default: short chats; random ids without a tokenizer)")
    parser.add_argument("--tokens", type=_tokens, default=DEFAULT_TOKENS, metavar="N", help=f"so much of the text (default {DEFAULT_TOKENS})")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of both builds (default: the device's)")
    add_common(parser)


def run(context: Any) -> int:
    args = context.args
    pair = builds(context, [args.pack, args.against])
    context.host().backend()
    ids, about = _text(context, pair)
    numeric = {name: value for name, value in numeric_options(context).items() if name in ("cache_quant", "linear_input_fp8", "qat_sim")}
    with Run(context, "ladder", pair, {"text": about, "dtype": args.dtype} | numeric, fresh=args.fresh) as run:
        result = measure(context, run, pair, ids, numeric)
        result = {"against": pair[1].described(), "text": about} | result
        words = ["--against", args.against, "--tokens", args.tokens, *(["--text", args.text] if args.text else [])]
        receipt = run.finish(result, summary=summary(pair, result), command=command("ladder", args.pack, *words))
    show(context, receipt, "\n".join(lines(receipt)))
    return 0


def measure(context: Any, run: Run, pair: list[Build], ids: list[int], numeric: dict[str, Any]) -> dict[str, Any]:
    """All steps that are left. -> the rows, the layer that adds most, and what the free run ends with."""
    import mlx.core as mx

    from dsv41chat.bench.eval.divergence import Ladder
    from dsv41chat.engine.layerwise import LayerWalk
    from dsv41chat.engine.pack.build import open_pack

    dtype = getattr(mx, run.parameters["dtype"]) if run.parameters["dtype"] else None
    options = numeric | {"dtype": dtype, "cache_dir": context.settings.paths.cache}
    variant, reference = (LayerWalk(open_pack(build.folder), **options) for build in pair)
    ladder = Ladder(reference, variant, [ids], run.folder, run.write)
    rows = run.state.setdefault("rows", [])
    for number in range(len(rows), ladder.steps):
        rows.append(ladder.step(number))
        run.save()
        ladder.clear(number)
        run.progress("steps", number + 1, ladder.steps, rows[-1]["part"])
    return {"rows": rows, **findings(rows)}


def findings(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """first: the first part in which anything differs when forced, None for equal builds; worst: where a forced layer is furthest off."""
    from dsv41chat.bench.eval.divergence import differs

    parts = [row for row in rows if row["part"] != "head"]
    changed = [row["part"] for row in parts if differs(row["forced"])] + (["head"] if rows[-1]["forced"]["rel"] else [])
    worst = max(parts, key=lambda row: row["forced"]["rel"])
    return {"equal": not changed, "first": changed[0] if changed else None, "changed": len(changed), "worst": worst["part"] if changed else None}


def _text(context: Any, pair: list[Build]) -> tuple[list[int], dict[str, Any]]:
    """(ids of one text, its description). Raises PackError, UsageError."""
    import numpy as np

    from dsv41chat.engine.chat.markers import BOS
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer
    from dsv41chat.engine.convert.calibrate import DEFAULT_TEXT, text_ids
    from dsv41chat.engine.errors import PackIncomplete, PackUnsupported
    from dsv41chat.engine.pack.build import open_pack
    from dsv41chat.ui.output import UsageError

    args = context.args
    path = DEFAULT_TEXT if args.text is None else Path(args.text).expanduser()
    if not path.is_file():
        raise UsageError(f"{args.text}: there is no such text.")
    found = [ChatTokenizer.from_file(file) for build in pair if (file := build.folder / "tokenizer.json").is_file()]
    if len({tokenizer.sha256 for tokenizer in found}) > 1:
        raise PackUnsupported(f"{pair[0].name} and {pair[1].name} have different tokenizers", "give --against the build that this one was made from")
    if not found and args.text is not None:
        raise PackIncomplete(f"neither {pair[0].name} nor {pair[1].name} has a tokenizer.json", "leave out --text for random ids")
    if not found:
        vocab = open_pack(pair[1].folder).config.vocab_size
        return np.random.default_rng(0).integers(0, vocab, args.tokens).tolist(), {"name": "random ids", "sha256": None, "tokens": args.tokens}
    ids, digest = text_ids(path, found[0], pair[1].family)
    ids = [found[0].marker(BOS), *ids][: args.tokens]
    return ids, {"name": path.name, "sha256": digest, "tokens": len(ids)}


def summary(pair: list[Build], result: dict[str, Any]) -> str:
    if result["equal"]:
        return f"no difference from {pair[1].name} in any layer"
    head, last = result["rows"][-1]["free"], result["rows"][-2]["free"]
    return f"{last['rel']:.4f} from {pair[1].name} after the last layer, KL {head['kl']:.4f}, same best token {100 * head['top1']:.1f} %"


_HEAD = ("part", "forced rel", "forced cos", "mix", "made", "free rel", "free cos", "picked")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    number = lambda value, form=".2e": "-" if value is None else "0" if value == 0 else format(value, form)
    forced, free = row["forced"], row["free"]
    picked = free.get("picked")
    return (
        row["part"], number(forced["rel"]), f"{forced['cos']:.6f}", number(forced.get("mix")), number(forced.get("made")), number(free["rel"]),
        f"{free['cos']:.6f}", "-" if picked is None else f"{100 * picked:.1f} %",
    )  # fmt: skip


def _words(result: dict[str, Any]) -> str:
    head = result["rows"][-1]
    if result["equal"]:
        return "The builds are equal in every layer, to the last bit."
    where = f"First difference in {result['first']}, the largest in {result['worst']} ({result['changed']} parts differ)."
    kl, top = head["free"]["kl"], 100 * head["free"]["top1"]
    return f"{where} At the end: KL {kl:.2e} nats per token, the same best token in {top:.1f} % of the rows."


def lines(receipt: dict[str, Any]) -> list[str]:
    result = receipt["result"]
    rows = [_HEAD, *(_cells(row) for row in result["rows"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    text = result["text"]
    return [f"{receipt['build']['name']} against {result['against']['name']}, {text['tokens']:,} tokens of {text['name']}", *shown, _words(result)]


def markdown(receipt: dict[str, Any]) -> str:
    result = receipt["result"]
    against, text = result["against"], result["text"]
    head = f"Against {against['name']} (`{against['fingerprint'][:12]}`), {text['tokens']:,} tokens of {text['name']}."
    table = markdown_table(_HEAD, map(_cells, result["rows"]))
    note = "Forced: each layer gets the reference's streams. Free: the build carries its own. Relative L2 distance and cosine, means over tokens."
    return "\n".join([head, _words(result), "", *table, "", note])
