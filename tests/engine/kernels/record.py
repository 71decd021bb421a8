"""What the CPU shim computes for every case, as a file that a device can be compared with where no compiler is.

`python -m tests.engine.kernels.record` writes it again after a change of texts or cases.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.engine.kernels.cases import Case, cases
from tests.engine.kernels.shim import Shim

FILE = Path(__file__).parents[2] / "data" / "kernels" / "shim.safetensors"


def raw(a: mx.array) -> np.ndarray:
    """The bytes of an array."""
    return np.array(mx.contiguous(a).view(mx.uint8)).reshape(-1)


def digest(case: Case) -> np.ndarray:
    """uint8 [16] over the inputs: numpy does not promise the same random numbers for ever."""
    h = hashlib.sha256()
    flat = [a for item in case.inputs for a in (item if isinstance(item, tuple) else (item,)) if a is not None]
    for a in flat:
        h.update(raw(a).tobytes())
    return np.frombuffer(h.digest()[:16], np.uint8)


@cache
def recorded() -> dict[str, np.ndarray]:
    return load_file(FILE)


def record_of(case: Case) -> list[np.ndarray] | None:
    """The recorded bytes of its results; None when this machine draws other inputs than those that were recorded."""
    found = recorded()
    if not np.array_equal(found[f"{case.name}|inputs"], digest(case)):
        return None
    return [found[f"{case.name}|{i}"] for i in range(len(case.limits))]


def main() -> None:
    out = {}
    for case in cases():
        out[f"{case.name}|inputs"] = digest(case)
        out |= {f"{case.name}|{i}": raw(a) for i, a in enumerate(case.run(Shim(case.only or "metal")))}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    save_file(out, FILE)
    print(f"{len(cases())} cases, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    main()
