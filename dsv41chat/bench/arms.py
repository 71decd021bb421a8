"""What the speed arms share: the build they measure, sessions stepped one token at a time, and the frame of a receipt.

A build is a folder, the embedded model, or random weights of a release's shape (`bench.shapes`). Our side is the product's own: an
engine opened as the program opens it, a `Session`, its prefill and its decode rounds, each fed the id that was chosen before.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.bench import shapes
from dsv41chat.bench.receipt import OUTPUT_HELP, environment
from dsv41chat.engine.device import device_kind
from dsv41chat.engine.draft.base import PlainDrafter
from dsv41chat.engine.draft.depth import FixedDepth
from dsv41chat.engine.draft.verify import run_round
from dsv41chat.engine.engine import Engine, open_engine
from dsv41chat.engine.errors import EngineError
from dsv41chat.engine.kernels.joined import parted
from dsv41chat.engine.kernels.sites import bare
from dsv41chat.engine.sampling import SamplingParams, choose
from dsv41chat.nano import embedded_pack
from dsv41chat.store import EMBEDDED

WARM_UP = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of every speed arm."""
    parser.add_argument("--build", type=Path, help="folder of a build, instead of random weights; `nano`: the embedded model")
    parser.add_argument("--shape", choices=shapes.SHAPES, default="nano", help="whose shapes random weights have")
    parser.add_argument("--layers", type=int, help="the first layers of that plan; default: all")
    parser.add_argument("--experts", type=int, help="routed experts per layer; default: all")
    parser.add_argument("--bits", type=int, choices=(4, 8, 32), default=32, help="of random matrices; 32: float32")
    parser.add_argument("--drafter", nargs="?", const="own", choices=shapes.DRAFTERS, help="random weights with their drafter too")
    parser.add_argument("--routes", nargs="+", default=["auto"], help="arms of this program: auto, stock or names of routes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the model; default: the device's")
    parser.add_argument("--folder", type=Path, help="where random builds are written (default: the temporary folder); deleted afterwards")
    parser.add_argument("-o", "--output", type=Path, help=OUTPUT_HELP)


@contextmanager
def build_folder(options: argparse.Namespace) -> Iterator[Path]:
    if options.build is not None:
        yield embedded_pack() if str(options.build) == "nano" else options.build
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-build-") as folder:
        o = options
        yield shapes.write_pack(Path(folder) / o.shape, o.shape, o.layers, o.experts, o.bits, drafter=o.drafter)


def build_name(folder: Path) -> str:
    """What a build is called: the folder's name, and not that of the embedded model's."""
    return EMBEDDED if folder == embedded_pack() else folder.resolve().name


def build_word(given: Path) -> str:
    """What was given as --build, without the places of this machine."""
    return given.name or given.resolve().name


def open_arms(folder: Path, options: argparse.Namespace) -> dict[str, Engine]:
    """An engine per entry of --routes. Raises EngineError."""
    return {name: open_engine(folder, routes=name, dtype=options.dtype, force=True) for name in options.routes}


def run_arm(options: argparse.Namespace, what: str, measure: Callable[[Path, argparse.Namespace], dict]) -> int:
    """Measure, print the bars, write the receipt. Returns the exit code."""
    import json

    from dsv41chat.bench.receipt import write_receipt

    try:
        with build_folder(options) as folder:
            payload = measure(folder, options)
    except (EngineError, ImportError) as error:
        print(f"bench {what}: {error}", file=sys.stderr)
        return 2
    payload["command"] = command_line(what, options)
    print(json.dumps(payload["bars"], indent=1))
    kind = device_kind()
    print(write_receipt(options.output, what, payload, "cpu" if kind == "cpu" else kind))
    return 0


def command_line(what: str, options: argparse.Namespace) -> str:
    """The command without places of this machine."""
    words = []
    for name, value in vars(options).items():
        if name in ("output", "folder", "build", "against", "run", "needs_settings", "command", "arm") or value is None or callable(value):
            continue
        if value == [] or (options.build is not None and name in _OF_RANDOM_BUILDS):
            continue
        if isinstance(value, (str, int, float, list)) and value is not False and name.replace("_", "-") in _NAMES:
            words.append(f"--{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, list) else value}")
    build = "" if options.build is None else f" --build {build_word(options.build)}"
    if getattr(options, "against", None) is not None:
        build += f" --against {build_word(options.against)}"
    return f"dsv41chat bench {what}{build} {' '.join(words)}".strip()


_OF_RANDOM_BUILDS = {"shape", "layers", "experts", "bits", "drafter"}
_NAMES = _OF_RANDOM_BUILDS | {"routes", "dtype", "peer", "context", "steps", "tokens", "chunks", "repeats", "draft", "cached"}


def frame(what: str, engines: dict[str, Engine]) -> dict[str, Any]:
    """The head of a receipt."""
    first = next(iter(engines.values()))
    return {
        "what": what,
        **environment(("numpy", "mlx", "mlx-lm", "mlx-vlm")),
        "device": first.device,
        "build": build_facts(first),
        "dtype": str(first.trunk.dtype),
        "routes": {name: engine.trunk.routes.facts() for name, engine in engines.items()},
        "threads": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")},
        "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def build_facts(engine: Engine) -> dict[str, Any]:
    """What a receipt says of a build."""
    c = engine.pack.config
    return {
        "name": build_name(engine.pack.folder) if engine.pack.folder == embedded_pack() else "random weights", "fingerprint": engine.fingerprint,
        "family": engine.family, "layers": c.num_hidden_layers, "hidden": c.hidden_size, "experts": c.n_routed_experts,
        "random": shapes.made_as(engine.pack.folder),
        "picks": c.num_experts_per_tok, "formats": dict(engine.pack.formats), "engram": bool(getattr(c, "engram", None)),
    }  # fmt: skip


def prompt(engine: Engine, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(40, engine.pack.config.vocab_size - 40, count).tolist()


@dataclass
class Stepper:
    """One session that decodes plainly. rounds, cpu, sampled: seconds of each step, the process's CPU seconds, and those of its sampling."""

    engine: Engine
    sampling: SamplingParams = field(default_factory=SamplingParams)
    ids: list[int] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.session = self.engine.new_session()
        self.counts: Counter[int] = Counter()

    def prefill(self, ids: Sequence[int]) -> float:
        """Seconds for all but the last id; the lane starts from nothing."""
        self.session.clear()
        self.ids, began = [int(ids[-1])], time.perf_counter()
        self.session.prefill(list(ids))
        return time.perf_counter() - began

    def step(self) -> float:
        """One token: forward, head, sampling, commit."""
        began, cpu_began, spent = time.perf_counter(), time.process_time(), 0.0

        def select(row: np.ndarray, position: int) -> int:
            nonlocal spent
            start = time.perf_counter()
            token = choose(row, position, self.counts, self.sampling)
            spent = time.perf_counter() - start
            return token

        run_round(self.session.target, PlainDrafter(), FixedDepth(0), self.ids[-1], 0, self.sampling, select, self._emit, lambda: False)
        seconds = time.perf_counter() - began
        self.rounds.append(seconds)
        self.cpu.append(time.process_time() - cpu_began)
        self.sampled.append(spent)
        return seconds

    def _emit(self, token: int) -> None:
        self.ids.append(token)
        self.counts[token] += 1

    def head_seconds(self, repeats: int = 50) -> float:
        """The median of the last collapse, norm and head alone, on the streams of a forward; of recorded steps what they add to a step."""
        trunk, target = self.engine.trunk, self.session.target
        if trunk.routes.replay is not None:
            found = [[timed(lambda k=k: target.rows([self.ids[-1]], logits_from=k)) for k in (0, None)] for _ in range(repeats)]
            target.drop()
            return statistics.median(a - b for a, b in found[3:])
        trial = target.rows([self.ids[-1]])
        args = (trial.streams,) if trial.pre is None else (trial.streams, trial.pre)
        mx.eval(args)
        found = [timed(lambda: np.array(trunk.logits(*args))) for _ in range(repeats)]
        target.drop()
        return statistics.median(found)


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def ids_hash(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, "<u4").tobytes()).hexdigest()[:16]


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    a = 1000 * np.array(values)
    return {"median": round(float(np.median(a)), 4), "min": round(float(a.min()), 4), "p90": round(float(np.percentile(a, 90)), 4), "count": len(a)}


@contextmanager
def recorded_choices(engine: Engine) -> Iterator[list[list[np.ndarray]]]:
    """Inside: per layer, the expert ids [n, picks] of every call of its router."""
    seen, held = [], []
    for layer in engine.trunk.layers:
        moe, mine = layer.moe, []
        held.append((moe, moe.__dict__.get("choose")))
        seen.append(mine)

        def choose_and_record(x, kind, inner=moe.choose, mine=mine):
            found = inner(x, kind)
            mine.append(np.array(found[0]))
            return found

        moe.choose = choose_and_record
    try:
        with parted(engine.trunk):
            yield seen
    finally:
        for moe, previous in held:
            if previous is None:
                del moe.choose
            else:
                moe.choose = previous


def distinct_experts(engine: Engine, ids: Sequence[int], rows: int = 4) -> dict[str, float]:
    """How many experts a layer's rows pick: one row, `rows` neighbouring rows, all of `ids`; means over the layers."""
    with recorded_choices(engine) as seen:
        Stepper(engine).prefill(list(ids))
    picks = [np.concatenate(mine) for mine in seen]
    group = lambda p: np.mean([len(np.unique(p[a : a + rows])) for a in range(0, len(p) - rows + 1, rows)])
    return {
        "one_row": round(float(np.mean([p.shape[1] for p in picks])), 2),
        f"{rows}_rows": round(float(np.mean([group(p) for p in picks])), 2),
        f"{len(ids) - 1}_rows": round(float(np.mean([len(np.unique(p)) for p in picks])), 2),
    }


def weight_bytes(engine: Engine) -> int:
    """Bytes of all weights in memory; they should be more than the caches hold."""
    from dsv41chat.engine.pack.build import arrays_of

    return sum(a.nbytes for a in {id(a): a for a in arrays_of([bare(engine.trunk.head), engine.trunk.embed, engine.trunk.layers])}.values())
