"""`dsv41chat bench ARM`: each arm measures, prints a table and writes a receipt. The arms live in the bench package."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

# arm -> (module, what it measures, options of the example)
_ARMS = {
    "decode": ("decode", "plain decode per token and layer, beside a peer", "--peer mlx-lm"),
    "prefill": ("prefill", "prompts of several lengths, beside a peer", "--tokens 512 2048"),
    "verify-cost": ("verify_cost", "windows of several rows against one row", "--build nano"),
    "ops": ("ops", "MLX primitives per layer in the graph of a step", "--routes stock --json"),
    "cpu": ("cpu", "the embedded model's shape against mlx-lm, and itself", "--peer mlx-lm"),
    "kernels": ("kernels", "operations of a route against the stock ones", "--rows 1 4"),
    "start-up": ("start_up", "fresh processes, to the version, the screen, the first token", "--repeats 3"),
    "weights": ("weights", "random weights of a release's shape, for other arms", "/tmp/v41 --layers 10 --experts 64"),
    "engram": ("engram", "rows of the tables from disk, per path, against the drive", ""),
    "draft": ("draft", "drafted decode against plain decode", "--repeats 1 --long 0"),
    "ui": ("ui", "the full screen under load: keys, drawing, search", "--seconds 5"),
    "resume": ("resume", "first token, resumed against read again; bytes on disk", ""),
}


def add_commands(commands: Any) -> Callable[[Any], int]:
    """Add the arms. Returns what runs without one: decode with its defaults."""
    for name, (module, words, example) in _ARMS.items():
        arm = import_module(f"dsv41chat.bench.{module}")
        p = commands.add_parser(name, help=words, epilog=f"example: dsv41chat bench {name} {example}".strip())
        arm.add_options(p)
        p.set_defaults(run=lambda context, arm=arm: _run(arm, context.args), needs_settings=False)
    return _decode


def _run(arm: Any, args: argparse.Namespace) -> int:
    from dsv41chat.bench.receipt import receipts_folder

    if getattr(args, "output", "") is None:
        args.output = receipts_folder(args.data_dir)
    return arm.run_options(args)


def _decode(context: Any) -> int:
    from dsv41chat.bench import decode

    parser = argparse.ArgumentParser("dsv41chat bench")
    decode.add_options(parser)
    return decode.run_options(parser.parse_args([]))
