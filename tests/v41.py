"""The tiny golden V4.1 pack: loading it in every variant, and running sequences through it piece by piece."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from dsv41chat.engine.goldens import _read
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.engine.target import Target

DATA = Path(__file__).parent / "data"
PACK = DATA / "v41"


@lru_cache
def golden(name: str = "v41/goldens.safetensors") -> dict[str, np.ndarray]:
    return _read(DATA / name)


def trunk(dtype: mx.Dtype = mx.float32, cache_quant: bool = False, folder: Path = PACK, **options):
    return build_trunk(open_pack(folder), dtype=dtype, cache_quant=cache_quant, **options)


def run(trunk, ids, cuts=None, target: Target | None = None) -> np.ndarray:
    """float32 [n, vocab] logits of one sequence fed in pieces between absolute cuts (default: one shot)."""
    target = target or Target(trunk)
    cuts, out = cuts or [0, len(ids)], []
    for a, b in zip(cuts, cuts[1:]):
        trial = target.rows(ids[a:b])
        out.append(np.array(trial.logits))
        target.commit(trial, b - a)
    return np.concatenate(out)


def pieces(n: int, size: int) -> list[int]:
    return [*range(0, n, size), n]


def random_cuts(n: int, seed: int, longest: int = 40) -> list[int]:
    rng, cuts = random.Random(seed), [0]
    while cuts[-1] < n:
        cuts.append(min(n, cuts[-1] + rng.randint(1, longest)))
    return cuts


def lane_bits(target: Target) -> dict[str, bytes]:
    """What later rows can see, as bytes: equal states compare equal."""
    return {k: np.array(v if isinstance(v, np.ndarray) else v.view(mx.uint8)).tobytes() for k, v in target.lane.state().items()}
