"""`dsv41chat eval needle PACK`: does a build find in a long text what it is asked for, the way the chat runs it?

Every item goes through a `Session`: prefill in chunks, compressed entries, top-k selection, plain greedy decoding. The answer is then read
back in one call from where the prompt ended: each of its tokens must again be the best one, which asks the path of many rows for what
the path of one row has found. Last, another session starts from the state that the prompt left in a prompt cache on disk and answers again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv41chat.bench.eval import frame
from dsv41chat.bench.eval.frame import Run, builds, command, markdown_table, numeric_options, opened, show
from dsv41chat.bench.eval.needles import HAYSTACK, NONE, Item, make, sentences
from dsv41chat.engine.errors import PackIncomplete
from dsv41chat.ui.output import UsageError

if TYPE_CHECKING:
    from dsv41chat.engine import Engine, Session
    from dsv41chat.ui.states import States

HELP = "a code hidden in a text: found or not, by length and depth, also after a resume"
EXAMPLE = "needle nano --tokens 500,2000 --count 4"
TOKENS, DEPTHS, COUNT, BAR = (500, 1000, 2000, 4000), (0.1, 0.5, 0.9), 2, 0.5
ANSWER_TOKENS = 48
# How far below the best logit a token may lie when it is read back: calls of one row and of many differ in rounding on some devices.
NEAR = {"float32": 0.05}
NEAR_NARROW = 0.5


def _lengths(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if not found or min(found) < 40:
        raise ValueError(text)
    return found


def _depths(text: str) -> tuple[float, ...]:
    found = tuple(float(part) for part in text.split(","))
    if not found or not all(0 <= depth <= 1 for depth in found):
        raise ValueError(text)
    return found


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(text)
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    words = ",".join(map(str, TOKENS))
    parser.add_argument("pack", metavar="PACK", help="a name or a folder")
    parser.add_argument("--tokens", type=_lengths, metavar="N,N", help=f"lengths of the whole prompt (default {words}, as far as the context goes)")
    parser.add_argument("--depths", type=_depths, default=DEPTHS, metavar="F,F", help="places in the text, 0 to 1 (default 0.1,0.5,0.9)")
    parser.add_argument("--count", type=_count, default=COUNT, metavar="N", help="texts per length and depth, and as many without an answer")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another seed hides other things in other texts")
    parser.add_argument("--haystack", metavar="FILE", help="sentences to hide among (default: 1,500 short ones)")
    parser.add_argument("--bar", type=_share, default=BAR, metavar="F", help=f"a length is red below this rate (default {BAR})")
    frame.add_options(parser)


def run(context: Any) -> int:
    args = context.args
    (build,) = builds(context, [args.pack])
    path = HAYSTACK if args.haystack is None else Path(args.haystack).expanduser()
    if not path.is_file():
        raise UsageError(f"{args.haystack}: there is no such text.")
    pieces = sentences(path)
    if len(pieces) < 20:
        raise UsageError(f"{path.name} has {len(pieces)} sentences, too few to hide anything among.")
    asked = list(args.tokens or TOKENS)
    parameters = {"tokens": asked, "depths": list(args.depths), "count": args.count, "seed": args.seed, "haystack": _digest(path), "bar": args.bar}
    with Run(context, "needle", [build], parameters | numeric_options(context), fresh=args.fresh) as run:
        with opened(context, build) as engine:
            if engine.tokenizer is None:
                raise PackIncomplete(f"{engine.name} has no tokenizer.json: nothing can be asked of it", "copy tokenizer.json into its folder")
            lengths = [n for n in asked if n + ANSWER_TOKENS <= engine.context_limit]
            if not lengths or (args.tokens is not None and lengths != asked):
                limit = engine.context_limit - ANSWER_TOKENS
                raise UsageError(f"{build.name} holds {engine.context_limit:,} tokens here: prompts of up to {limit:,}.")
            measure(run, engine, pieces, lengths)
        result = evaluate(run.state["items"], lengths, args.depths, args.bar)
        words = [args.pack, "--tokens", ",".join(map(str, lengths)), "--count", args.count, "--seed", args.seed]
        words += ["--depths", ",".join(map(str, args.depths))] + (["--haystack", args.haystack] if args.haystack else [])
        short = "needles ok" if result["green"] else f"needles red from {result['red_from']:,}"
        receipt = run.finish(result, summary=summary(result), short=short, command=command("needle", *words))
    show(context, receipt, table(receipt))
    return 0 if result["green"] else 4


def measure(run: Run, engine: Engine, pieces: list[str], lengths: list[int]) -> None:
    """Every item that no earlier process has done; run.state["items"] by key."""
    from dsv41chat.ui.states import States

    items, parameters = run.state.setdefault("items", {}), run.parameters
    plan = list(keys(lengths, parameters["depths"], parameters["count"]))
    with tempfile.TemporaryDirectory(prefix="needle-") as folder:
        states = States(Path(folder), 1 << 34, min_free_bytes=0)
        states.bind(engine, "needle")
        try:
            for done, (tokens, depth, number) in enumerate(plan):
                key = f"{tokens}/{depth}/{number}"
                if key not in items:
                    item = make(pieces, lambda text: len(engine.tokenizer.encode_text(text)), tokens - 8, parameters["seed"], tokens, depth, number)
                    items[key] = try_item(engine, states, item, key)
                    run.save()
                run.progress("texts", done + 1, len(plan), f"{tokens:,} tokens")
        finally:
            states.close()


def keys(lengths: list[int], depths: list[float], count: int) -> Iterator[tuple[int, float | str, int]]:
    """(tokens, depth or none, number) of every item."""
    for tokens in lengths:
        for depth in (*depths, NONE):
            yield from ((tokens, depth, number) for number in range(count))


def try_item(engine: Engine, states: States, item: Item, conversation: str) -> dict[str, Any]:
    """Ask, read back, and ask again from the stored state. JSON values."""
    from dsv41chat.engine.chat.encode import Message, RenderOptions, encode_prompt
    from dsv41chat.ui.states import StateTurn

    prompt = encode_prompt(engine.tokenizer, engine.family, [Message("user", item.text)], RenderOptions(thinking=False))
    turn, session, last = StateTurn(conversation), engine.new_session(), len(prompt.ids) - 1
    at = last if engine.row_invariant else last // engine.prefill_chunk * engine.prefill_chunk
    done = _answer(session, prompt, marks=(at,), on_mark=lambda n: states.keep(session, "P", turn))
    found = {"prompt": len(prompt.ids), "text": done.text, "right": item.right(done.text), "again": read_back(session, prompt.ids, done.ids)}
    states.settle(120)
    other = engine.new_session()
    resumed = states.resume(other, prompt.ids, turn)
    found["resumed"] = None if resumed.source != "disk" else _same(engine, item, done, _answer(other, prompt))
    states.forget(conversation)
    return found


def _same(engine: Engine, item: Item, first: Any, second: Any) -> bool:
    """The same ids; where rows depend on each other, and the resumed prompt was cut elsewhere, as right as before."""
    return first.ids == second.ids or (not engine.row_invariant and item.right(first.text) == item.right(second.text))


def _answer(session: Session, prompt: Any, **marks: Any) -> Any:
    from dsv41chat.engine import SamplingParams

    return [*session.generate(prompt, SamplingParams(), max_tokens=ANSWER_TOKENS, draft="off", **marks)][-1]


def read_back(session: Session, ids: tuple[int, ...], answer: tuple[int, ...]) -> bool:
    """Whether every token of the answer is the best one again, in one call of all its rows from where the prompt ended."""
    import numpy as np

    session.reuse(ids)
    session.prefill(ids)
    target = session.target
    rows = [ids[-1], *answer[:-1]][: target.lane.roll]
    logits = np.array(target.rows(rows).logits)
    target.drop()
    chosen = logits[np.arange(len(rows)), list(answer[: len(rows)])]
    near = NEAR.get(str(target.trunk.dtype).rsplit(".", 1)[-1], NEAR_NARROW)
    return bool((logits.max(1) - chosen <= near).all())


def evaluate(items: dict[str, dict[str, Any]], lengths: list[int], depths: Any, bar: float) -> dict[str, Any]:
    """Rates per length and depth. A length is green when needles and absent ones reach the bar and no answer changed on another path."""
    rows = []
    for tokens in lengths:
        of = lambda depth, tokens=tokens: [found for key, found in items.items() if key.startswith(f"{tokens}/{depth}/")]
        right = lambda group: [sum(found["right"] for found in group), len(group)]
        by_depth = {str(depth): right(of(depth)) for depth in depths}
        needles = [found for depth in depths for found in of(depth)]
        every = needles + of(NONE)
        row = {"tokens": tokens, "prompt": round(sum(found["prompt"] for found in every) / len(every)), "by_depth": by_depth}
        row |= {"found": right(needles), "none": right(of(NONE))}
        row["again"] = [sum(found["again"] for found in every), len(every)]
        resumed = [found["resumed"] for found in every if found["resumed"] is not None]
        row["resumed"] = [sum(resumed), len(resumed)]
        faults = [name for name in ("found", "none") if row[name][0] < bar * row[name][1]]
        faults += [name for name in ("again", "resumed") if row[name][0] < row[name][1]]
        rows.append(row | {"green": not faults, "faults": faults})
    red = [row["tokens"] for row in rows if not row["green"]]
    return {"rows": rows, "green": not red, "red_from": min(red) if red else None}


def _digest(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def summary(result: dict[str, Any]) -> str:
    rates = ", ".join(f"{_rate(row['found'])} at {row['tokens']:,}" for row in result["rows"])
    return f"needles {rates} tokens" + ("" if result["green"] else f"; red from {result['red_from']:,}")


def _rate(pair: list[int]) -> str:
    return f"{100 * pair[0] / pair[1]:.0f} %" if pair[1] else "-"


_WORDS = {"found": "too few found", "none": "answers where there is none", "again": "another answer in one call", "resumed": "another answer resumed"}


def _cells(result: dict[str, Any]) -> list[tuple[str, ...]]:
    depths = list(result["rows"][0]["by_depth"])
    out = [("tokens", *(f"at {depth}" for depth in depths), "found", "none", "read back", "resumed", "")]
    of = lambda pair: f"{pair[0]}/{pair[1]}"
    for row in result["rows"]:
        verdict = "ok" if row["green"] else "RED: " + ", ".join(_WORDS[name] for name in row["faults"])
        places = (of(row["by_depth"][depth]) for depth in depths)
        out.append((f"{row['tokens']:,}", *places, _rate(row["found"]), of(row["none"]), of(row["again"]), of(row["resumed"]), verdict))
    return out


_NOTE = (
    "found: the hidden code and no other was answered; none: it said so where nothing was hidden; read back: the answer is the best one in one call "
    "too; resumed: the same answer from the state on disk."
)


def table(receipt: dict[str, Any]) -> str:
    rows = _cells(receipt["result"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths)) + f"  {row[-1]}" for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), _NOTE])


def markdown(receipt: dict[str, Any]) -> str:
    rows = _cells(receipt["result"])
    return "\n".join([*markdown_table(rows[0], rows[1:]), "", f"Seed {receipt['parameters']['seed']}; {_NOTE}"])
