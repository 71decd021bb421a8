"""`dsv41chat bench draft`: acceptance, tokens per verify and speed of drafted decode against plain decode, on one build.

All arms of a prompt run in one process, round by round in turn: the arm that is behind goes next, so that they share the machine's
moods, and only ratios are quoted. Drafter, walk and policy are in the drafted arms' time; the plain arm does no drafter work. Every arm
must give the same ids. The second part is text where drafting does not pay: random prompts, sampled hot, end ids ignored.

With `--acceptance` the text decides nothing: `draft_scripted`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dsv41chat.bench.receipt import RECEIPTS, environment, write_receipt
from dsv41chat.engine.chat.encode import encode_prompt
from dsv41chat.engine.chat.messages import Message, RenderOptions
from dsv41chat.engine.chat.tokenizer import stop_ids
from dsv41chat.engine.draft.base import Drafter, PlainDrafter
from dsv41chat.engine.draft.verify import run_round
from dsv41chat.engine.engine import Engine, open_engine
from dsv41chat.engine.sampling import SamplingParams, choose
from dsv41chat.engine.target import Target
from dsv41chat.nano import embedded_pack

# (text, thinking): what the embedded model was made for.
PROMPTS: dict[str, list[tuple[str, bool]]] = {
    "definitions": [("What is a fox?", False), ("What does the word harbor mean?", False), ("What is a guitar?", False)],
    "facts": [("What does the command grep do?", False), ("What is the capital of Japan?", False)],
    "sums, thinking": [("What is 123 + 456?", True), ("What is 24 x 13?", True)],
    "small talk": [("Hello, how are you?", False), ("Who are you?", False)],
}
MODES: tuple[str | int, ...] = ("off", 1, 2, 3, 4, 5, "auto")
HOT = SamplingParams(temperature=1.5, seed=11)


@dataclass
class Arm:
    """One decode of one prompt. seconds, cpu_seconds (of the process): rounds only, the prompt's own rows are not in them."""

    engine: Engine
    mode: str | int
    prompt: Sequence[int]
    sampling: SamplingParams
    limit: int
    stops: frozenset[int] = frozenset()
    ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    rounds: int = 0
    by_depth: list[list[int]] = field(default_factory=list)
    ended: str | None = None

    def __post_init__(self):
        drafting = self.engine.drafting
        self.policy = drafting.new_policy()
        self.depth = drafting.depth(self.mode, self.policy)
        self.drafter = self.new_drafter() if self.mode != "off" else PlainDrafter()
        self.target, self.counts = Target(self.engine.trunk), Counter()
        end, chunk = len(self.prompt) - 1, self.engine.prefill_chunk
        for n in range(0, end, chunk):
            stop = min(end, n + chunk)
            taps = self.drafter.needs_taps and stop > end - self.drafter.window
            trial = self.target.rows(self.prompt[n:stop], logits_from=None, want_taps=taps)
            self.target.commit(trial, trial.count)
            if taps:
                self.drafter.ingest(trial.taps, n, self.prompt[n + 1 : stop + 1])

    def new_drafter(self) -> Drafter:
        return self.engine.drafting.new_drafter()

    def close(self) -> None:
        """Its lane and rings are others' from here on; what it did stays."""
        self.target = self.drafter = None

    def emit(self, token: int) -> str | None:
        self.ids.append(token)
        self.counts[token] += 1
        return "stop" if token in self.stops else "length" if len(self.ids) >= self.limit else None

    def step(self) -> None:
        began, cpu_began = time.perf_counter(), time.process_time()
        pending = self.ids[-1] if self.ids else self.prompt[-1]
        select = lambda row, position: choose(row, position, self.counts, self.sampling)
        limit = self.limit - len(self.ids) - 1
        result = run_round(self.target, self.drafter, self.depth, pending, limit, self.sampling, select, self.emit, lambda: False)
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.process_time() - cpu_began
        self.rounds, self.ended = self.rounds + 1, result.ended
        for j in range(min(result.proposed, result.accepted + 1)):
            if len(self.by_depth) <= j:
                self.by_depth.append([0, 0])
            self.by_depth[j][0] += 1
            self.by_depth[j][1] += j < result.accepted


def run_in_turn(arms: Sequence[Arm]) -> None:
    """All arms to their end; the one with the fewest tokens takes the next round."""
    while running := [arm for arm in arms if arm.ended is None]:
        min(running, key=lambda arm: len(arm.ids)).step()


def race(arms: list[Arm]) -> None:
    """All arms to their end. Raises RuntimeError unless all say the same."""
    run_in_turn(arms)
    if len({tuple(arm.ids) for arm in arms}) != 1:
        raise RuntimeError("the arms do not give the same ids: " + ", ".join(f"{arm.mode} {ids_hash(arm.ids)[:8]}" for arm in arms))
    for arm in arms:
        arm.close()
        if arm.mode == "auto":
            arm.engine.drafting.keep_learned(arm.policy)


def ids_hash(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, "<u4").tobytes()).hexdigest()


def summary(arms: list[Arm], plain: list[Arm]) -> dict:
    """Figures of one mode over several prompts. speed: plain decode's seconds over its own, of all together and per prompt;
    cpu_speed: the same of the process's CPU time, which other programs on the machine touch less."""
    depths = max((len(a.by_depth) for a in arms), default=0)
    at = lambda a, j: a.by_depth[j] if j < len(a.by_depth) else [0, 0]
    by_depth = [[sum(at(a, j)[0] for a in arms), sum(at(a, j)[1] for a in arms)] for j in range(depths)]
    tokens, rounds = sum(len(a.ids) for a in arms), sum(a.rounds for a in arms)
    return {
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_verify": round(tokens / rounds, 3),
        "by_depth": by_depth,
        "acceptance_by_depth": [round(accepted / judged, 3) if judged else None for judged, accepted in by_depth],
        "tok_s": round(tokens / sum(a.seconds for a in arms), 2),
        "speed": round(sum(a.seconds for a in plain) / sum(a.seconds for a in arms), 3),
        "cpu_speed": round(sum(a.cpu_seconds for a in plain) / sum(a.cpu_seconds for a in arms), 3),
        "speed_median_of_prompts": round(statistics.median(p.seconds / a.seconds for a, p in zip(arms, plain)), 3),
    }


def own_text(engine: Engine, modes: Sequence[str | int], repeats: int, sampling: SamplingParams, limit: int, log) -> dict:
    """Answers of the kinds that the build was made for, in each of `modes`."""
    eos, others = stop_ids(engine.tokenizer, engine.family)
    out, everything = {}, {mode: [] for mode in modes}
    for kind, prompts in PROMPTS.items():
        found: dict[str | int, list[Arm]] = {mode: [] for mode in modes}
        for _ in range(repeats):
            for text, thinking in prompts:
                ids = encode_prompt(engine.tokenizer, engine.family, [Message("user", text)], RenderOptions(thinking=thinking)).ids
                arms = [Arm(engine, mode, ids, sampling, limit, others | {eos}) for mode in modes]
                race(arms)
                for arm in arms:
                    found[arm.mode].append(arm)
                    everything[arm.mode].append(arm)
        out[kind] = {str(mode): summary(found[mode], found["off"]) for mode in modes}
        log(f"{kind}: " + ", ".join(f"{mode} {v['speed']:.2f}x" for mode, v in out[kind].items()))
    out["all"] = {str(mode): summary(everything[mode], everything["off"]) for mode in modes}
    out["ids_hash"] = ids_hash([i for arm in everything["off"] for i in arm.ids])
    return out


def unprofitable_text(engine: Engine, tokens: int, seeds: Sequence[int], log) -> dict:
    """Random prompts, sampled hot, end ids ignored: the adaptive policy against plain decode, and depth 5 for comparison."""
    vocab, speeds, cpu, modes, hashes, fixed = engine.pack.config.vocab_size, [], [], [], [], []
    for seed in seeds:
        prompt = np.random.default_rng(seed).integers(3, vocab - 20, 32).tolist()
        arms = [Arm(engine, mode, prompt, SamplingParams(temperature=HOT.temperature, seed=seed), tokens) for mode in ("off", "auto")]
        race(arms)
        speeds.append(round(arms[0].seconds / arms[1].seconds, 4))
        cpu.append(round(arms[0].cpu_seconds / arms[1].cpu_seconds, 4))
        modes.append(summary(arms[1:], arms[:1]))
        hashes.append(ids_hash(arms[0].ids))
        short = [Arm(engine, mode, prompt, SamplingParams(temperature=HOT.temperature, seed=seed), min(tokens, 100)) for mode in ("off", 5)]
        race(short)
        fixed.append(round(short[0].seconds / short[1].seconds, 3))
        log(f"{tokens} tokens, seed {seed}: auto {speeds[-1]:.3f}x (CPU time {cpu[-1]:.3f}x), depth 5 {fixed[-1]:.2f}x")
    return {
        "tokens": tokens,
        "temperature": HOT.temperature,
        "auto_speed": speeds,
        "auto_speed_median": round(statistics.median(speeds), 4),
        "auto_cpu_speed": cpu,
        "auto_cpu_speed_median": round(statistics.median(cpu), 4),
        "auto": modes,
        "depth_5_speed": fixed,
        "ids_hash": hashes,
    }


def run(engine: Engine, repeats: int, limit: int, long_tokens: int, short_tokens: int, seeds: int, log) -> dict:
    """seeds: short unprofitable answers; a third as many long ones."""
    drafting = engine.drafting
    log("; ".join(drafting.summary()))
    greedy = own_text(engine, MODES, repeats, SamplingParams(), limit, log)
    sampled = own_text(engine, ("off", 5, "auto"), repeats, SamplingParams(temperature=0.8, seed=7), limit, log)
    short = unprofitable_text(engine, short_tokens, range(1, seeds + 1), log) if short_tokens else None
    long = unprofitable_text(engine, long_tokens, range(1, max(2, seeds // 3 + 1)), log) if long_tokens else None
    costs = drafting.costs
    against_best = lambda found: round(found["auto"]["speed"] / max(v["speed"] for k, v in found.items() if k not in ("off", "auto")), 3)
    return {
        "what": "drafted decode against plain decode",
        **environment(),
        "build": {"name": engine.name, "fingerprint": engine.fingerprint, "family": engine.family},
        "device": engine.device,
        "dtype": str(engine.trunk.dtype),
        "drafter": drafting.summary(),
        "costs_ms": {"rows": [round(1000 * c, 2) for c in costs.rows], "draft": round(1000 * costs.draft, 2)},
        "repeats": repeats,
        "load_average": round(os.getloadavg()[0], 1),
        "bars": {
            "greedy, own answers, best of fixed and auto >= 1.5": max(v["speed"] for v in greedy["all"].values()),
            "greedy, own answers, auto": greedy["all"]["auto"]["speed"],
            "sampled, own answers, auto": sampled["all"]["auto"]["speed"],
            "greedy, own answers, auto over the best fixed depth >= 0.95": against_best(greedy["all"]),
            "sampled, own answers, auto over depth 5 >= 0.95": against_best(sampled["all"]),
            f"unprofitable, {short_tokens} tokens, auto >= 0.97": short and [short["auto_speed_median"], short["auto_cpu_speed_median"]],
            f"unprofitable, {long_tokens} tokens, auto >= 0.98": long and [long["auto_speed_median"], long["auto_cpu_speed_median"]],
        },
        "own_greedy": greedy,
        "own_sampled": sampled,
        "unprofitable_short": short,
        "unprofitable_long": long,
        "note": "all arms of a prompt in turn, round by round, in one process; compare arms within this run only. Bars with two "
        "figures: wall time, then the process's CPU time, which a busy machine disturbs less",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", type=Path, help="folder of the build; `nano`, the default: the embedded model")
    parser.add_argument("--repeats", type=int, default=3, help="of the first part; with --acceptance: random prompts")
    scripted = parser.add_argument_group("a scripted acceptance, for builds of random weights (bench weights --drafter) and any other")
    scripted.add_argument("--acceptance", type=float, nargs="+", help="chances that a guess is right; the drafter runs and only its ids are replaced")
    scripted.add_argument("--context", type=int, default=512, help="tokens of a random prompt")
    scripted.add_argument("--steps", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer of the first part")
    parser.add_argument("--long", type=int, default=1500, help="tokens of the long unprofitable answers; 0: none")
    parser.add_argument("--short", type=int, default=256, help="tokens of the short unprofitable answers; 0: none")
    parser.add_argument("--seeds", type=int, default=3, help="short unprofitable answers; a third as many long ones")
    parser.add_argument("-o", "--output", type=Path, default=RECEIPTS, help="receipt file or folder")


def run_options(options: argparse.Namespace) -> int:
    """Measure, print the bars, write the receipt. Returns the exit code."""
    if options.acceptance:
        from dsv41chat.bench import draft_scripted

        return draft_scripted.run_options(options)
    engine = open_engine(embedded_pack() if options.build is None or str(options.build) == "nano" else options.build)
    if not engine.drafting.block or engine.tokenizer is None:
        print(f"bench draft: {engine.drafting.fault or 'this build has no drafter or no tokenizer'}", file=sys.stderr)
        return 2
    o = options
    payload = run(engine, o.repeats, o.tokens, o.long, o.short, o.seeds, lambda line: print(line, flush=True))
    payload["command"] = f"dsv41chat bench draft --repeats {o.repeats} --tokens {o.tokens} --long {o.long} --short {o.short} --seeds {o.seeds}"
    path = write_receipt(options.output, "draft", payload)
    print(json.dumps(payload["bars"], indent=1))
    print(path.name)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("dsv41chat bench draft", description=__doc__)
    add_options(parser)
    return run_options(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
