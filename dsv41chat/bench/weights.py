"""`dsv41chat bench weights FOLDER`: random weights of a release's shape as a build that several runs of other arms can share (`--build`)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import mlx.core as mx

from dsv41chat.bench import shapes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="is made; must not exist")
    parser.add_argument("--shape", choices=shapes.SHAPES, default="v41", help="whose shapes the weights have")
    parser.add_argument("--layers", type=int, help="the first layers of that plan; default: all")
    parser.add_argument("--experts", type=int, help="routed experts per layer; default: all")
    parser.add_argument("--form", choices=shapes.FORMS, default="affine", help="of matrices: MLX's affine words, or EXL3 trellises")
    parser.add_argument("--bits", type=int, help="of matrices: affine 4, 8 or 32 (float32; default 4), exl3 1 to 8 (default 3)")
    parser.add_argument("--drafter", nargs="?", const="own", choices=shapes.DRAFTERS, help="with the shape's drafter; dspark: V4-Flash-0731's on v4")
    parser.add_argument("--seed", type=int, default=0)


def run_options(o: argparse.Namespace) -> int:
    if o.folder.exists():
        print(f"bench weights: {o.folder} exists; name a folder that does not", file=sys.stderr)
        return 2
    try:
        with mx.stream(mx.cpu):
            shapes.write_pack(o.folder, o.shape, o.layers, o.experts, o.bits or (3 if o.form == "exl3" else 4), o.seed, o.form, o.drafter)
    except ValueError as error:
        print(f"bench weights: {error}", file=sys.stderr)
        return 2
    size = sum(f.stat().st_size for f in o.folder.iterdir())
    print(f"{o.folder}: {size / 1e9:.2f} GB")
    return 0
