"""`dsv41chat bench ops`: MLX primitives of one decode step, counted in the graph that is built, before it is evaluated.

Every node of the graph that hangs on what a step evaluates (logits, streams and the lane's buffers) is counted once, by kind. Layers
are told apart by building the same step without its last layers. A compiled block counts as the primitives that it consists of.
The head and the rows of Engram tables are not part of a layer. The modules of a release's configuration are laid out without values
and nothing is evaluated, so the counts need neither weights nor an accelerator; `compiled` stands for the stock operations as compiled
graphs, which `auto` takes on accelerators. A build is counted with the routes that are installed for it; where steps are recorded, their
launches are counted instead. What numpy computes builds no graph: there stock and compiled are counted.

The bars (spec: performance, P4) are those of compiled graphs and of kernels; the stock operations one by one have none.
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
from dsv41chat.bench.receipt import OUTPUT_HELP, environment, write_receipt
from dsv41chat.engine.engine import open_engine
from dsv41chat.engine.errors import EngineError
from dsv41chat.engine.kernels.compiled import ROUTE, as_graphs
from dsv41chat.engine.pack.build import arrays_of, outline_trunk

_NODE = re.compile(r'\{ (\d+) \[label ="([^"]+)", shape=rectangle\]')
LIMIT_COMPILED, LIMIT_KERNELS = 350, 25
_FIRST_LAYERS = 9


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", type=Path, help="folder of a build to load, instead of a release's configuration; `nano`: the embedded model")
    parser.add_argument("--shape", choices=shapes.SHAPES, nargs="+", default=["v41", "v4"], help="configurations")
    parser.add_argument("--bits", type=int, choices=(4, 8, 32), default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--routes", nargs="+", help="default: stock and compiled; with --build: auto, where that builds a graph")
    parser.add_argument("--context", type=int, default=512)
    # Without a default of its own: `--json` is an option of every command and may have been read already.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print everything as JSON and write no receipt")
    parser.add_argument("-o", "--output", type=Path, help=OUTPUT_HELP)


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


def count(trunk: Any, context: int, limit: int | None) -> dict[str, Any]:
    """The whole step, and of its first layers one by one. limit: the bar of the mean per layer, None where there is none."""
    layers = len(trunk.layers)
    graphs = {n: step_graph(trunk, context, n) for n in sorted({*range(min(layers, _FIRST_LAYERS) + 1), layers})}
    totals = {n: sum(g.values()) for n, g in graphs.items()}
    return {
        "whole_step": totals[layers], "without_layers": totals[0], "mean_per_layer": round((totals[layers] - totals[0]) / layers, 1),
        "first_layers": [totals[n + 1] - totals[n] for n in range(min(layers, _FIRST_LAYERS))], "limit": limit,
        "by_kind": dict(graphs[layers].most_common()),
    }  # fmt: skip


def limit_of(routes: tuple[str, ...]) -> int | None:
    """The bar of a trunk with these routes installed."""
    if not routes:
        return None
    return LIMIT_COMPILED if set(routes) == {ROUTE.name} else LIMIT_KERNELS


def of_build(o: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Counts of a build by route. Without --routes: of auto, or of what has a graph where auto has none. Raises EngineError."""
    name, counts, routes = arms.build_name(folder), {}, list(o.routes or ["auto"])
    for route in routes:
        engine = open_engine(folder, routes="stock" if route == ROUTE.name else route, force=True)
        try:
            if engine.trunk.routes.host:
                words = f"{name} is computed by numpy here ({', '.join(engine.trunk.routes.names)}), which builds no graph"
                if o.routes:
                    raise EngineError(f"{words} to count in", f"dsv41chat bench ops --build {o.build} --routes stock {ROUTE.name}")
                print(f"bench ops: {words}: stock and {ROUTE.name} are counted", file=sys.stderr)
                o.routes = ["stock", ROUTE.name]
                routes += o.routes
            elif route == ROUTE.name:
                as_graphs(engine.trunk)
                counts[f"{name}, {route}"] = count(engine.trunk, o.context, LIMIT_COMPILED)
            else:
                found = engine.trunk.routes
                counts[f"{name}, {route}"] = count(engine.trunk, o.context, limit_of(found.names)) | {"routes": found.by_op()}
        finally:
            engine.close()
    return counts


def measure(o: argparse.Namespace) -> dict[str, Any]:
    payload: dict[str, Any] = {"what": "primitives in the graph of a decode step", **environment(), "context": o.context, "counts": {}}
    if o.build is not None:
        with arms.build_folder(o) as folder:
            payload["counts"] = of_build(o, folder)
    else:
        routes = o.routes or ["stock", ROUTE.name]
        if other := sorted({*routes} - {"stock", ROUTE.name}):
            raise EngineError(f"without weights only stock and {ROUTE.name} can be counted, not {', '.join(other)}", "--build, for what is installed")
        for shape in o.shape:
            pack = shapes.outline_pack(shape, bits=o.bits)
            for route in routes:
                trunk = outline_trunk(pack, dtype=getattr(mx, o.dtype), packed=True)
                mx.eval(arrays_of(trunk))
                limit = None
                if route == ROUTE.name:
                    limit = LIMIT_COMPILED
                    as_graphs(trunk)
                payload["counts"][f"{shape}, {route}"] = count(trunk, o.context, limit) | {"bits": o.bits, "dtype": o.dtype}
    bar = lambda limit: "" if limit is None else f", at most {limit}"
    payload["bars"] = {f"{name}: mean per layer{bar(v['limit'])}": v["mean_per_layer"] for name, v in payload["counts"].items()}
    return payload


def run_options(o: argparse.Namespace) -> int:
    try:
        payload = measure(o)
    except EngineError as error:
        print(f"bench ops: {error}{f'; try {error.hint}' if error.hint else ''}", file=sys.stderr)
        return 2
    words = {k: getattr(o, k) for k in (("routes", "context") if o.build else ("shape", "bits", "dtype", "routes", "context"))}
    shown = " ".join(f"--{k} {' '.join(map(str, v)) if isinstance(v, list) else v}" for k, v in words.items() if v)
    payload["command"] = f"dsv41chat bench ops {f'--build {arms.build_word(o.build)} ' if o.build else ''}{shown}"
    if getattr(o, "json", False):
        print(json.dumps(payload, indent=1))
        return 0
    print(json.dumps(payload["bars"], indent=1))
    print(write_receipt(o.output, "ops", payload))
    return 0
