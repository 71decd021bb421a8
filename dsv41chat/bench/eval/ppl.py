"""`dsv41chat eval ppl PACK... --corpus FILE`: perplexity of builds over the same windows, each with an interval, and their paired ratios.

Every window starts from an empty lane and goes through the ordinary prefill; the negative log likelihoods are added in float64 from the
float32 logits. Several builds of one tokenizer are compared over the same resamples: the interval of a ratio is much narrower than those
of the two perplexities, which share the corpus. Source: spec, checkpoints, section 7.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv41chat.bench.eval import frame
from dsv41chat.bench.eval.bootstrap import Estimate, perplexity, ratio
from dsv41chat.bench.eval.corpus import Corpus, Cutting, Window, read_corpus
from dsv41chat.bench.eval.frame import Build, Run, builds, markdown_table, numeric_options, opened, show
from dsv41chat.engine.errors import ContextFull, EngineError
from dsv41chat.nano import CORPORA, embedded_pack
from dsv41chat.ui.output import UsageError

if TYPE_CHECKING:
    from dsv41chat.engine import Engine
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer

HELP = "perplexity with its interval, and paired ratios of several builds"
EXAMPLE = "ppl nano ~/models/nano-4bit --corpus chat"
WINDOW = 2048
_FEW = 20
_CHUNK = 512  # rows of logits at a time: 512 of a 129,280-id vocabulary are 265 MB
_ROWS = 64


class NotANumber(EngineError):
    """A build's logits are no numbers. Exit 4."""

    code = "build_damaged"


@dataclass(frozen=True)
class Options:
    """window, stride: ids; None: as many as fit, and the window. tokens: cap on scored ids. chunk: rows of a prefill call, None: the device's."""

    corpus: Path
    window: int | None = None
    stride: int | None = None
    tokens: int | None = None
    bos: bool = True
    dtype: str | None = None
    chunk: int | None = None

    def words(self) -> list[object]:
        """As on the command line."""
        words: list[object] = ["--corpus", corpus_name(self.corpus)]
        for option in ("window", "stride", "tokens", "dtype", "chunk"):
            if getattr(self, option) is not None:
                words += [f"--{option}", getattr(self, option)]
        return words if self.bos else [*words, "--no-bos"]


def corpus_name(path: Path) -> str:
    """As on the command line: the name of a corpus that ships, else the file's."""
    return next((name for name, known in CORPORA.items() if path == known), path.name)


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("packs", metavar="PACK", nargs="+", help="names or folders; the others are compared with the first")
    words = "UTF-8 text, .jsonl of texts or conversations, or .npy of ids; chat and prose ship (default for the embedded model: chat)"
    parser.add_argument("--corpus", metavar="FILE", help=words)
    parser.add_argument("--window", type=count, metavar="N", help=f"ids of a window (default {WINDOW:,}, less where a build holds less)")
    parser.add_argument("--stride", type=count, metavar="N", help="ids from one window to the next; less than the window: more context, more time")
    parser.add_argument("--tokens", type=count, metavar="N", help="stop after so many scored tokens")
    parser.add_argument("--no-bos", action="store_true", help="texts' windows begin without the begin-of-text token")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as the chat opens the build")
    parser.add_argument("--chunk", type=count, metavar="N", help="rows of a prefill call; changes the time, and near-ties on some devices")
    frame.add_options(parser)


def run(context: Any) -> int:
    args = context.args
    found = builds(context, args.packs)
    options = Options(corpus_path(args.corpus, found), args.window, args.stride, args.tokens, not args.no_bos, args.dtype, args.chunk)
    receipt = measure(context, found, options, fresh=args.fresh)
    show(context, receipt, table(receipt))
    return 0


def corpus_path(name: str | None, found: Sequence[Build]) -> Path:
    """The file that --corpus names; without it the one that ships, for builds with the embedded model's tokenizer. Raises UsageError."""
    if name in CORPORA and not Path(name).exists():
        return CORPORA[name]
    if name is not None:
        return Path(name).expanduser()
    own = (embedded_pack() / "tokenizer.json").read_bytes()
    for build in found:
        path = build.folder / "tokenizer.json"
        if not path.is_file() or path.read_bytes() != own:
            raise UsageError(f"Which text is {build.name} to be judged by?", hint="--corpus FILE")
    return CORPORA["chat"]


def measure(context: Any, found: Sequence[Build], options: Options, *, fresh: bool = False, command: str | None = None) -> dict[str, Any]:
    """Run every window of the corpus through every build, going on where an earlier run was stopped. Returns the receipt, kept for each build."""
    corpora = _corpora(found, options)
    first = corpora[found[0].fingerprint]
    cut = {"window": options.window, "stride": options.stride, "tokens": options.tokens, "bos": options.bos}
    parameters = {"corpus": first.name, "corpus_sha256": first.sha256, **cut, "dtype": options.dtype, "chunk": options.chunk}
    with Run(context, "ppl", found, parameters | numeric_options(context), fresh=fresh) as run:
        for build in {build.fingerprint: build for build in found}.values():
            done = run.state.setdefault(build.fingerprint, {"sums": [], "dtype": None, "routes": None})
            windows = corpora[build.fingerprint].windows
            if len(done["sums"]) == len(windows):
                continue
            with opened(context, build, options.dtype) as engine:
                done["dtype"], done["routes"] = str(engine.trunk.dtype).removeprefix("mlx.core."), engine.trunk.routes.identity
                for window in windows[len(done["sums"]) :]:
                    done["sums"].append(window_nll(engine, window, options.chunk))
                    run.save()
                    run.progress(f"{build.name}, windows", len(done["sums"]), len(windows))
        result = _result(found, corpora, run.state)
        lines = {row["fingerprint"]: _summary(row, corpora[row["fingerprint"]]) for row in result["builds"]}
        few = {row["fingerprint"]: f"ppl {row['ppl']:.4f} {options.corpus.stem[:12]}" for row in result["builds"]}
        words = command or frame.command("ppl", *(build.name for build in found), *options.words())
        return run.finish(result, summary=lines, short=few, command=words, builds=found)


def _corpora(found: Sequence[Build], options: Options) -> dict[str, Corpus]:
    """The corpus as each build reads it, by fingerprint; read once per tokenizer."""
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer
    from dsv41chat.engine.pack.build import open_pack

    configs = {build.fingerprint: open_pack(build.folder).config for build in found}
    longest = min(config.max_position_embeddings for config in configs.values())
    head = 1 if options.bos else 0
    window = options.window or min(WINDOW, longest - head)
    stride = options.stride or window
    if window + head > longest or window < 2:
        raise UsageError(f"A window of {window:,} ids does not fit a build that holds {longest:,}.", hint=f"--window {longest - head}")
    if stride > window:
        raise UsageError(f"A stride of {stride:,} leaves ids out between windows of {window:,}.", hint=f"--stride {window}")
    cutting, made, out = Cutting(window, stride, options.tokens, options.bos, longest), {}, {}
    for build in found:
        path = build.folder / "tokenizer.json"
        tokenizer: ChatTokenizer | None = ChatTokenizer.from_file(path) if path.is_file() else None
        vocab = configs[build.fingerprint].vocab_size
        key = (tokenizer.sha256 if tokenizer else None, build.family, vocab)
        if key not in made:
            made[key] = read_corpus(options.corpus, tokenizer, build.family, vocab, cutting)
        out[build.fingerprint] = made[key]
    return out


def window_nll(engine: Engine, window: Window, chunk: int | None = None) -> float:
    """Sum of the negative log likelihoods (nats) of a window's scored ids, from an empty lane. chunk: rows of a call, None: the device's.

    Raises NotANumber and ContextFull.
    """
    from dsv41chat.engine.target import Target

    target, ids, parts = Target(engine.trunk), window.ids, []
    if len(ids) > engine.context_limit:
        raise ContextFull(f"A window has {len(ids):,} ids, this build's context holds {engine.context_limit:,} here.", "--window")
    if engine.tables is not None:
        engine.tables.begin_request()
    size = chunk or min(engine.prefill_chunk, _CHUNK)
    for a in range(0, len(ids) - 1, size):
        b = min(len(ids) - 1, a + size)
        start = max(a, window.first - 1)  # the row before a scored id predicts it
        trial = target.rows(ids[a:b], logits_from=start - a if start < b else None, ahead=ids[b : b + size])
        for i in range(start, b, _ROWS):
            rows = np.array(trial.logits[i - start : min(b, i + _ROWS) - start]).astype(np.float64)
            parts += _nll(rows, ids[i + 1 : i + 1 + len(rows)])
        target.commit(trial, b - a)
    # Exactly rounded, so that the sum does not depend on where the chunks end.
    total = math.fsum(parts)
    if not math.isfinite(total):
        raise NotANumber(f"{engine.name} gives logits that are no numbers.", "dsv41chat models verify PACK --full")
    return total


def _nll(rows: np.ndarray, ids: Sequence[int]) -> list[float]:
    """rows: float64 [n, vocab]. -log softmax(row)[id] of each."""
    top = rows.max(axis=-1)
    return (np.log(np.exp(rows - top[:, None]).sum(axis=-1)) + top - rows[np.arange(len(ids)), list(ids)]).tolist()


def _result(found: Sequence[Build], corpora: dict[str, Corpus], state: dict[str, Any]) -> dict[str, Any]:
    rows, pairs = [], []
    base = found[0].fingerprint
    for build in found:
        corpus, own = corpora[build.fingerprint], state[build.fingerprint]
        sums = own["sums"]
        counts = [window.scored for window in corpus.windows]
        estimate = perplexity(sums, counts)
        rows.append(
            {
                "name": build.name, "fingerprint": build.fingerprint, "bytes": build.bytes, "dtype": own["dtype"], "routes": own["routes"],
                "ppl": estimate.value, "low": estimate.low, "high": estimate.high, "sums": sums, "ids_sha256": corpus.ids_sha256,
            }  # fmt: skip
        )
        if build.fingerprint != base:
            same = corpus.ids_sha256 == corpora[base].ids_sha256
            pair = ratio(sums, state[base]["sums"], counts) if same else None
            pairs.append({"name": build.name, "fingerprint": build.fingerprint, "against": found[0].name, "against_fingerprint": base} | plain(pair))
    corpus = corpora[base]
    notes = [f"{len(corpus.windows)} windows are few for an interval"] if len(corpus.windows) < _FEW else []
    if any(pair["ratio"] is None for pair in pairs):
        notes.append("builds that read the corpus as other ids have no ratio")
    counts = [window.scored for window in corpus.windows]
    return {"corpus": corpus.described() | {"counts": counts}, "builds": rows, "pairs": pairs, "notes": notes}


def plain(pair: Estimate | None) -> dict[str, float | None]:
    return {"ratio": pair and pair.value, "low": pair and pair.low, "high": pair and pair.high}


def _summary(row: dict[str, Any], corpus: Corpus) -> str:
    return f"ppl {Estimate(row['ppl'], row['low'], row['high']).text()} on {corpus.name}, {corpus.scored:,} tokens"


def _cells(receipt: dict[str, Any]) -> list[tuple[str, ...]]:
    """(build, perplexity, ratio to the first) as texts."""
    pairs = {pair["fingerprint"]: pair for pair in receipt["result"]["pairs"]}
    out = []
    for row in receipt["result"]["builds"]:
        pair = pairs.get(row["fingerprint"])
        shown = "-" if pair is None or pair["ratio"] is None else Estimate(pair["ratio"], pair["low"], pair["high"]).text(5)
        out.append((row["name"], Estimate(row["ppl"], row["low"], row["high"]).text(), shown))
    return out


def _about(receipt: dict[str, Any]) -> str:
    corpus, notes = receipt["result"]["corpus"], receipt["result"]["notes"]
    left = [f"{corpus[key]:,} {what}" for key, what in (("skipped", "lines skipped"), ("too_long", "conversations too long")) if corpus[key]]
    return "; ".join([f"{corpus['name']}: {corpus['tokens']:,} tokens scored in {corpus['windows']:,} windows", *left, *notes])


def table(receipt: dict[str, Any]) -> str:
    """The result as lines of text."""
    head = ("build", "perplexity [95 %]", f"by {receipt['result']['builds'][0]['name']}")
    rows = [head, *_cells(receipt)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, _about(receipt)]) + "\n"


def markdown(receipt: dict[str, Any]) -> str:
    """Its part of a build's page."""
    first = receipt["result"]["builds"][0]["name"]
    lines = markdown_table(("build", "perplexity [95 %]", f"by {first} [95 %]"), _cells(receipt))
    return "\n".join([*lines, "", f"{_about(receipt)}."])
