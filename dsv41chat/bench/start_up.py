"""`dsv41chat bench start-up`: fresh processes, from the command to the version, to the screen's modules, to a loaded engine, to a token."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from dsv41chat.bench.receipt import OUTPUT_HELP, environment, write_receipt

_LOAD = """
import json, sys, time
began = time.perf_counter()
from dsv41chat.engine.engine import open_engine
from dsv41chat.nano import embedded_pack
imported = time.perf_counter()
engine = open_engine(sys.argv[2] if len(sys.argv) > 2 else embedded_pack(), routes=sys.argv[1])
opened = time.perf_counter()
session = engine.new_session()
session.prefill(list(range(40, 80)))
session.target.rows([50])
first = time.perf_counter()
print(json.dumps({"import_s": imported - began, "open_s": opened - imported, "first_token_s": first - opened, "routes": engine.trunk.routes.by_op()}))
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", type=Path, help="folder of a build (default: the embedded model)")
    parser.add_argument("--routes", nargs="+", default=["auto", "stock"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, help=OUTPUT_HELP)


def _process(*words: str) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    return time.perf_counter() - began, done.stdout


def run_options(o: argparse.Namespace) -> int:
    """Measure, print the bars, write the receipt. Returns the exit code."""
    version = [_process("-m", "dsv41chat", "--version")[0] for _ in range(o.repeats)]
    screen = [_process("-c", "import dsv41chat.ui.app")[0] for _ in range(o.repeats)]
    loads = {}
    for name in o.routes:
        found = []
        for _ in range(o.repeats):
            wall, out = _process("-c", _LOAD, name, *([str(o.build)] if o.build else []))
            found.append(json.loads(out) | {"process_s": wall})
        middle = {k: round(statistics.median(f[k] for f in found), 3) for k in ("import_s", "open_s", "first_token_s", "process_s")}
        loads[name] = middle | {"routes": found[0]["routes"]}
    payload = {
        "what": "start-up in fresh processes, medians", **environment(), "repeats": o.repeats, "load_average": round(os.getloadavg()[0], 1),
        "version_s": round(statistics.median(version), 3), "screen_modules_s": round(statistics.median(screen), 3), "loads": loads,
        "command": f"dsv41chat bench start-up --routes {' '.join(o.routes)} --repeats {o.repeats}",
    }  # fmt: skip
    payload["bars"] = {f"{name}: process to first token, s": v["process_s"] for name, v in loads.items()}
    payload["bars"]["screen modules, s (first paint < 1)"] = payload["screen_modules_s"]
    print(json.dumps(payload["bars"], indent=1))
    print(write_receipt(o.output, "start-up", payload))
    return 0
