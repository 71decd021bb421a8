"""`dsv41chat bench cpu`: the embedded model's shape against mlx-lm (engram off), and the embedded model itself (engram on).

The first part runs the decode and prefill arms on random weights, in turn with the peer, under the thread limits of the environment.
The second part answers questions with the embedded model: plain and drafted decode in turn, and the first token of a short prompt.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from dsv41chat.bench import arms, decode, draft, prefill
from dsv41chat.bench.peer import PEERS
from dsv41chat.engine.chat.encode import encode_prompt
from dsv41chat.engine.chat.messages import Message, RenderOptions
from dsv41chat.engine.chat.tokenizer import stop_ids
from dsv41chat.engine.engine import Engine, open_engine
from dsv41chat.engine.sampling import SamplingParams
from dsv41chat.nano import embedded_pack

_FACTS = ["What is the capital of Japan?", "What does the command grep do?", "What is a fox?", "What is a guitar?", "What does len do in Python?"]
_SHORT = "What is the capital of Japan, and what does the word harbor mean to somebody who lives at the sea? "
_SHORT_TOKENS = 40


def add_options(parser: argparse.ArgumentParser) -> None:
    arms.add_options(parser)
    parser.add_argument("--peer", choices=PEERS, default="none")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=3)


def measure(folder: Path, o: argparse.Namespace) -> dict:
    o.chunks = []
    steps, prompts = decode.measure(folder, o), prefill.measure(folder, o)
    engines = {name: open_engine(embedded_pack(), routes=name) for name in o.routes}
    first = next(iter(engines.values()))
    payload = arms.frame("the embedded model's shape on a CPU, and the embedded model", engines)
    payload["random_weights"] = {"decode": steps, "prefill": prompts}
    payload["embedded"] = {name: embedded(engine, o.repeats) for name, engine in engines.items()}
    bars: dict[str, Any] = {}
    for name, found in payload["embedded"].items():
        bars[f"embedded, {name}: plain tok/s >= 60"] = found["plain_tok_s"]
        bars[f"embedded, {name}: drafted tok/s on facts >= 96"] = found["drafted_tok_s"]
        bars[f"embedded, {name}: drafted over plain >= 1.6"] = found["drafted_over_plain"]
        bars[f"embedded, {name}: first token of {_SHORT_TOKENS} tokens, s <= 0.5"] = found["first_token_s"]
    payload["bars"] = {f"random, decode: {k}": v for k, v in steps["bars"].items()}
    payload["bars"] |= {f"random, prefill: {k}": v for k, v in prompts["bars"].items()}
    payload["bars"] |= bars
    payload["context_limit"] = first.context_limit
    return payload


def embedded(engine: Engine, repeats: int) -> dict[str, Any]:
    """Plain and drafted decode of facts, round by round in turn, and the first token of a short prompt on a fresh lane."""
    eos, others = stop_ids(engine.tokenizer, engine.family)
    plain, drafted = [], []
    for _ in range(repeats):
        for text in _FACTS:
            ids = encode_prompt(engine.tokenizer, engine.family, [Message("user", text)], RenderOptions(thinking=False)).ids
            pair = [draft.Arm(engine, mode, ids, SamplingParams(), 96, others | {eos}) for mode in ("off", "auto")]
            draft.race(pair)
            plain.append(pair[0])
            drafted.append(pair[1])
    speed = lambda found: sum(len(a.ids) for a in found) / sum(a.seconds for a in found)
    ids = engine.tokenizer.encode_text(_SHORT * 4)[:_SHORT_TOKENS]
    stepper = arms.Stepper(engine)
    first = [stepper.prefill(ids) + stepper.step() for _ in range(2 + 5 * repeats)][2:]
    return {
        "plain_tok_s": round(speed(plain), 1), "drafted_tok_s": round(speed(drafted), 1),
        "drafted_over_plain": round(speed(drafted) / speed(plain), 3),
        "tokens": sum(len(a.ids) for a in plain), "tokens_per_verify": round(sum(len(a.ids) for a in drafted) / sum(a.rounds for a in drafted), 2),
        "cpu_drafted_over_plain": round(sum(a.cpu_seconds for a in plain) / sum(a.cpu_seconds for a in drafted), 3),
        "first_token_s": round(statistics.median(first), 4), "ids_hash": arms.ids_hash([i for a in plain for i in a.ids]),
    }  # fmt: skip


def run_options(options: argparse.Namespace) -> int:
    return arms.run_arm(options, "cpu", measure)
