"""`dsv41chat bench ops`: MLX primitives of one decode step, counted in the graph that is built, before it is evaluated.

Every node of the graph that hangs on what a step evaluates (logits, streams and the lane's buffers) is counted once, by kind. Layers
are told apart by building the same step without its last layers. A compiled block counts as the primitives that it consists of.
The modules of a release's configuration are laid out without values and nothing is evaluated, so the counts need neither weights nor an
accelerator; `compiled` stands for the stock operations as compiled graphs, which `auto` takes on accelerators. An installed build is
counted with the routes that are installed for it; where steps are recorded, their launches are counted instead.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx

from dsv41chat.bench import arms, shapes
from dsv41chat.bench.receipt import RECEIPTS, environment, write_receipt
from dsv41chat.engine.errors import EngineError
from dsv41chat.engine.kernels.compiled import as_graphs
from dsv41chat.engine.pack.build import arrays_of, outline_trunk

_NODE = re.compile(r'\{ (\d+) \[label ="([^"]+)", shape=rectangle\]')
LIMIT_COMPILED, LIMIT_KERNELS = 350, 25
_FIRST_LAYERS = 9


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", type=Path, help="folder of a build to load, instead of a release's configuration; `nano`: the embedded model")
    parser.add_argument("--shape", choices=shapes.SHAPES, nargs="+", default=["v41", "v4"], help="configurations")
    parser.add_argument("--bits", type=int, choices=(4, 8, 32), default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--routes", nargs="+", help="default: stock and compiled; with --build: auto")
    parser.add_argument("--context", type=int, default=512)
    # Without a default of its own: `--json` is an option of every command and may have been read already.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print everything as JSON and write no receipt")
    parser.add_argument("-o", "--output", type=Path, default=RECEIPTS, help="receipt file or folder")


def primitives(outputs: list[mx.array]) -> Counter[str]:
    """Kinds of the primitives in the graph of unevaluated arrays."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    return Counter(dict(_NODE.findall(text.getvalue())).values())


def step_graph(trunk: Any, context: int, layers: int) -> Counter[str]:
    """Of one row after `context` tokens, in a trunk of its first `layers` layers. What the lane holds does not change the graph."""
    trunk = copy.copy(trunk)
    trunk.layers, trunk.hasher = trunk.layers[:layers], None
    lane = trunk.new_lane()
    lane.ids, lane.n = [100] * (context + 1), context
    for name, spec in lane.specs.items():
        if hasattr(spec, "ratio"):
            rows = -(-(context // spec.ratio + 1) // spec.block) * spec.block
            lane.buffers[name] = mx.zeros((rows, *spec.tail), dtype=spec.dtype)
    mx.eval(lane.arrays())
    if (replay := trunk.routes.replay) is not None:
        return Counter(launch.kernel.base for launch in replay.record(lane, context, 1, True, False, layers)[0].launches)
    trial = trunk.forward(lane, [100], context)
    return primitives(trial.arrays() + lane.arrays())


def count(trunk: Any, context: int, limit: int) -> dict[str, Any]:
    """The whole step, and of its first layers one by one."""
    layers = len(trunk.layers)
    graphs = {n: step_graph(trunk, context, n) for n in sorted({*range(min(layers, _FIRST_LAYERS) + 1), layers})}
    totals = {n: sum(g.values()) for n, g in graphs.items()}
    return {
        "whole_step": totals[layers], "without_layers": totals[0], "mean_per_layer": round((totals[layers] - totals[0]) / layers, 1),
        "first_layers": [totals[n + 1] - totals[n] for n in range(min(layers, _FIRST_LAYERS))], "limit": limit,
        "by_kind": dict(graphs[layers].most_common()),
    }  # fmt: skip


def measure(o: argparse.Namespace) -> dict[str, Any]:
    payload: dict[str, Any] = {"what": "primitives in the graph of a decode step", **environment(), "context": o.context, "counts": {}}
    if o.build is not None:
        with arms.build_folder(o) as folder:
            o.routes, o.dtype = o.routes or ["auto"], None
            for name, engine in arms.open_arms(folder, o).items():
                if engine.trunk.routes.host:
                    words = f"{engine.name} is computed by numpy here ({', '.join(engine.trunk.routes.names)}): there is no graph to count in"
                    raise EngineError(words, "--routes stock")
                limit = LIMIT_KERNELS if engine.trunk.routes.names else LIMIT_COMPILED
                payload["counts"][f"{engine.name}, {name}"] = count(engine.trunk, o.context, limit) | {"routes": engine.trunk.routes.by_op()}
    else:
        for shape in o.shape:
            pack = shapes.outline_pack(shape, bits=o.bits)
            for route in o.routes or ["stock", "compiled"]:
                trunk = outline_trunk(pack, dtype=getattr(mx, o.dtype), packed=True)
                mx.eval(arrays_of(trunk))
                if route == "compiled":
                    as_graphs(trunk)
                payload["counts"][f"{shape}, {route}"] = count(trunk, o.context, LIMIT_COMPILED) | {"bits": o.bits, "dtype": o.dtype}
    payload["bars"] = {f"{name}: mean per layer, at most {v['limit']}": v["mean_per_layer"] for name, v in payload["counts"].items()}
    return payload


def run_options(o: argparse.Namespace) -> int:
    try:
        payload = measure(o)
    except EngineError as error:
        print(f"bench ops: {error}{f'; try {error.hint}' if error.hint else ''}", file=sys.stderr)
        return 2
    words = {k: getattr(o, k) for k in (("routes", "context") if o.build else ("shape", "bits", "dtype", "routes", "context"))}
    shown = " ".join(f"--{k} {' '.join(map(str, v)) if isinstance(v, list) else v}" for k, v in words.items() if v)
    payload["command"] = f"dsv41chat bench ops {f'--build {o.build.name} ' if o.build else ''}{shown}"
    if getattr(o, "json", False):
        print(json.dumps(payload, indent=1))
        return 0
    print(json.dumps(payload["bars"], indent=1))
    print(write_receipt(o.output, "ops", payload).name)
    return 0
