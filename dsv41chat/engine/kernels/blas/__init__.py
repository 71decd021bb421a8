"""The CPU route where MLX links the reference BLAS: hot operations in numpy, whose products go through an optimised BLAS.

Whole operations are taken over, and numpy arrays pass between them: evaluating one MLX primitive costs more than a numpy call on few
rows, and every product in the middle of a graph would cut it. Everything is computed in float32. A row's bits do
not depend on its call where the library computes the rows of a product alike for any number of them from two on, which the install check
looks at; a single row is therefore multiplied as two. `engine.openblas` has OpenBLAS take such kernels.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine import openblas
from dsv41chat.engine.kernels.blas import attention, dense, experts, streams
from dsv41chat.engine.kernels.routes import Route

_OPTIMISED = ("openblas", "accelerate", "mkl", "blis", "flexiblas")


def _missing() -> str | None:
    """MLX itself uses Accelerate on macOS."""
    if sys.platform == "darwin":
        return "MLX links Accelerate here, its own operations stay"
    library = _library()
    if not any(name in library.lower() for name in _OPTIMISED):
        return f"numpy links {library or 'no known BLAS'}"
    return None


def _library() -> str:
    try:
        found = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"{found.get('name', '')} {found.get('version', '')}"
    except (KeyError, TypeError):
        return ""


def _identity() -> str:
    """Kernels are chosen by processor or by name, so its instruction sets and their name belong to what a result depends on."""
    features = getattr(np._core._multiarray_umath, "__cpu_features__", {})
    names = sorted(name for name, there in features.items() if there)
    return f"numpy {np.__version__} {_library()} {openblas.core()} {' '.join(names)}"


def _suits(trunk: Any) -> str | None:
    return None if trunk.dtype == mx.float32 else "the model runs in another dtype than float32"


_BUILDERS = {
    **{name: getattr(streams, name) for name in ("mix", "enter", "head_mix", "settle", "begin", "tap", "logits", "engram")},
    **{name: getattr(attention, name) for name in ("project", "query", "latent", "output", "gathered", "core", "scores", "select")},
    **{name: getattr(attention, name) for name in ("queries", "visible", "candidates", "among", "raw_rows", "pool", "entries")},
    **{"matrix": dense.matrix, "router": experts.router, "experts": experts.experts},
}
ROUTE = Route(
    "blas",
    frozenset({"cpu"}),
    _BUILDERS,
    dict.fromkeys(_BUILDERS, 2e-5),
    rows_alike=True,
    missing=_missing,
    identity=_identity,
    suits=_suits,
    host=True,
    copies=dense.copies,
)
