"""`dsv41chat eval table [PACK]`: what conversion and pruning cost a build, all of it by one command.

Every variant is written beside the others (and gone on with after a kill), all are measured over the same windows of each corpus, and the
order in which they are expected to come out is judged by the intervals of the paired ratios. Source: spec, checkpoints, sections 6 and 7.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv41chat.bench.eval import frame, ppl
from dsv41chat.bench.eval.bootstrap import Estimate, ratio
from dsv41chat.bench.eval.frame import Build, Run, builds, markdown_table, numeric_options, show
from dsv41chat.nano import CORPORA
from dsv41chat.ui.output import UsageError

HELP = "perplexity of a build and of what conversion and pruning make of it"
EXAMPLE = "table nano -o receipts"
PROSE_WINDOW = 64  # so that the short text that ships gives enough windows for an interval
CALIBRATION_TOKENS = 8192


@dataclass(frozen=True)
class Variant:
    """recipe: of `models convert`; share: of the experts that `models prune` keeps. of: the variant it is made from, "" for the build itself.

    after: the variant that is expected to be at least as good.
    """

    name: str
    of: str = ""
    recipe: str = ""
    share: float = 1.0
    after: str = ""


VARIANTS = (
    Variant("affine-8", recipe="affine-8"),
    Variant("mixed-4_8", recipe="mixed-4_8", after="affine-8"),
    Variant("mixed-4_8-engram6", recipe="mixed-4_8-engram6", after="mixed-4_8"),
    Variant("mixed-4_8-engram4", recipe="mixed-4_8-engram4", after="mixed-4_8-engram6"),
    Variant("affine-4", recipe="affine-4", after="mixed-4_8"),
    Variant("pruned-25", of="mixed-4_8-engram4", share=0.75, after="mixed-4_8-engram4"),
    Variant("pruned-50", of="mixed-4_8-engram4", share=0.5, after="pruned-25"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pack", metavar="PACK", nargs="?", default="nano", help="a name or a folder (default: the embedded model)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the variants are written and stay (default: the cache folder, for the run)")
    parser.add_argument("--corpus", metavar="FILE", action="append", help="as for eval ppl; repeatable (default: all that ship)")
    parser.add_argument("--tokens", type=ppl.count, metavar="N", help="of each corpus at most so many scored tokens")
    frame.add_options(parser)


def run(context: Any) -> int:
    args = context.args
    (build,) = builds(context, [args.pack])
    corpora = [_corpus(name, build, args.tokens) for name in args.corpus or CORPORA]
    folder = (args.folder or context.settings.paths.cache / "eval" / build.fingerprint[:16]).expanduser()
    made = [build]
    for variant in VARIANTS:
        make(context, build, variant, folder)
        made += builds(context, [str(folder / variant.name)])
    receipt = measure(context, made, corpora, args.fresh)
    if args.folder is None:
        shutil.rmtree(folder)
    show(context, receipt, markdown(receipt))
    return 0


def _corpus(name: str, build: Build, tokens: int | None) -> ppl.Options:
    path = ppl.corpus_path(name, [build])
    return ppl.Options(path, window=PROSE_WINDOW if path == CORPORA["prose"] else None, tokens=tokens)


def make(context: Any, build: Build, variant: Variant, folder: Path) -> None:
    """Write one variant, or go on with it. What lies there finished is taken if it was made of this very build. Raises UsageError."""
    target, source = folder / variant.name, folder / variant.of if variant.of else build.folder
    if (target / "config.json").is_file() and not _unfinished(target):
        origin = json.loads((target / "config.json").read_text(encoding="utf-8"))["reap" if variant.of else "conversion"]
        expected = builds(context, [str(source)])[0].fingerprint
        if origin["source_fingerprint"] != expected:
            raise UsageError(f"{target} was made of another build.", hint="--folder of its own for each build")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    context.stderr.notice(f"eval table: writing {variant.name}")
    _write(context, variant, source, target, resume=target.exists())


def _unfinished(target: Path) -> bool:
    from dsv41chat.engine.pack.index import UNFINISHED_NAME

    return (target / UNFINISHED_NAME).is_file()


def _write(context: Any, variant: Variant, source: Path, target: Path, resume: bool) -> None:
    from dsv41chat.engine import DEFAULT_TEXT, CalibrationText, convert_pack, plan_conversion, plan_prune, prune_pack
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer

    def report(part: str, done: int, total: int) -> None:
        context.stderr.status(f"eval table: {variant.name}, {part} {100 * done / max(1, total):.0f} %")

    def text(pack: Any) -> CalibrationText:
        tokenizer = ChatTokenizer.from_file(pack.folder / "tokenizer.json")
        return CalibrationText.read(DEFAULT_TEXT, tokenizer, pack.config.family, CALIBRATION_TOKENS)

    if variant.recipe:
        convert_pack(plan_conversion(source, target, variant.recipe), resume=resume, progress=report)
    else:
        numeric = {name: value for name, value in numeric_options(context).items() if name in ("cache_quant", "linear_input_fp8", "qat_sim")}
        prune_pack(plan_prune(source, target, variant.share, text, **numeric), resume=resume, progress=report)


def measure(context: Any, made: Sequence[Build], corpora: Sequence[ppl.Options], fresh: bool) -> dict[str, Any]:
    """Perplexities of every build over every corpus, each kept as its own receipts too. made: the build, then VARIANTS. Returns the receipt."""
    names = [ppl.corpus_name(options.corpus) for options in corpora]
    parameters = {"corpora": names, "tokens": corpora[0].tokens, "variants": [variant.name for variant in VARIANTS]}
    with Run(context, "table", made, parameters | numeric_options(context), fresh=fresh) as run:
        finished = run.state.setdefault("receipts", {})
        # The first corpus comes last: its perplexity is the one that lists of builds then show.
        for name, options in reversed(list(zip(names, corpora))):
            if name not in finished:
                receipt = ppl.measure(context, made, options, fresh=fresh)
                finished[name] = {"parameters": receipt["parameters"], "result": receipt["result"], "seconds": receipt["seconds"]}
                run.save()
        found = {name: finished[name] for name in names}
        result = {"corpora": {name: found[name]["result"]["corpus"] for name in names}, "rows": _rows(made, found), "order": order(found)}
        summary = f"{len(made)} builds on {', '.join(names)}"
        more = [word for name in names for word in ("--corpus", name)] if list(names) != list(CORPORA) else []
        more += ["--tokens", corpora[0].tokens] if corpora[0].tokens else []
        return run.finish(result, summary=summary, command=frame.command("table", made[0].name, *more))


def _rows(made: Sequence[Build], found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for index, build in enumerate(made):
        row = build.described() | {"bits_per_weight": _bits(build), "corpora": {}}
        for name, receipt in found.items():
            own = receipt["result"]["builds"][index]
            pair = next((p for p in receipt["result"]["pairs"] if p["fingerprint"] == build.fingerprint), None)
            shown = pair and {key: pair[key] for key in ("ratio", "low", "high")}
            row["corpora"][name] = {key: own[key] for key in ("ppl", "low", "high")} | {"ratio": shown}
        rows.append(row)
    return rows


def _bits(build: Build) -> float | None:
    """As the conversion counted them; None for a build that was not converted, or was pruned."""
    config = json.loads((build.folder / "config.json").read_text(encoding="utf-8"))
    return config["conversion"]["bits_per_weight"] if "conversion" in config and "reap" not in config else None


def order(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Per corpus and expected pair: perplexity of the later by that of the earlier, and whether the interval says so."""
    names = ["", *(variant.name for variant in VARIANTS)]
    out = []
    for corpus, receipt in found.items():
        sums = dict(zip(names, (row["sums"] for row in receipt["result"]["builds"])))
        for variant in VARIANTS:
            pair = ratio(sums[variant.name], sums[variant.after], receipt["result"]["corpus"]["counts"])
            out.append({"corpus": corpus, "build": variant.name, "after": variant.after, **ppl.plain(pair), "verdict": verdict(pair)})
    return out


def verdict(pair: Estimate) -> str:
    """pair: perplexity of the build that should be no better, by that of the other one."""
    if pair.low is None or pair.low <= 1.0 <= pair.high:
        return "not told apart"
    return "as expected" if pair.low > 1.0 else "reversed"


def markdown(receipt: dict[str, Any]) -> str:
    """The table, and the expected order with what became of it."""
    result = receipt["result"]
    names = list(result["corpora"])
    heads = [part for name in names for part in (f"{name}: perplexity [95 %]", "above the first [95 %]")]
    rows = []
    for row in result["rows"]:
        cells = [row["name"], f"{row['bytes'] / 1e6:.1f}"]
        for name in names:
            own = row["corpora"][name]
            pair = own["ratio"]
            cells += [_perplexity(own), "-" if pair is None or pair["ratio"] is None else _ratio(pair)]
        rows.append(cells)
    lines = [*markdown_table(("build", "MB", *heads), rows), ""]
    rows = []
    for variant in VARIANTS:
        pairs = [next(p for p in result["order"] if p["corpus"] == name and p["build"] == variant.name) for name in names]
        rows.append([variant.name, variant.after or result["rows"][0]["name"], *(f"{p['verdict']}, {_ratio(p)}" for p in pairs)])
    lines += markdown_table(("expected to be no better", "than", *names), rows)
    counts = "; ".join(f"{name}: {c['tokens']:,} tokens in {c['windows']:,} windows" for name, c in result["corpora"].items())
    return "\n".join([*lines, "", f"{counts}."]) + "\n"


def _perplexity(found: dict[str, Any]) -> str:
    return Estimate(found["ppl"], found["low"], found["high"]).text(4 if found["ppl"] < 100 else 1)


def _ratio(found: dict[str, Any]) -> str:
    return Estimate(found["ratio"], found["low"], found["high"]).percent()


