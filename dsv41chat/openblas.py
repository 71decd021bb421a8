"""Which kernels OpenBLAS computes with: named in its environment variable, which it reads once, when numpy is loaded.

On x86 processors without AVX-512 it would take kernels that sum a row's products in one order among twelve rows and in another among
two, and even otherwise at the fifth place than at the first. A decoded row would then differ from the same row of a prompt. Its AVX kernels sum
every row alike, at the same speed for few rows and four fifths of it for many.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import MutableMapping
from pathlib import Path

CORE = "OPENBLAS_CORETYPE"


def choose(environ: MutableMapping[str, str] = os.environ, cpuinfo: Path = Path("/proc/cpuinfo"), machine: str | None = None) -> None:
    """Set the variable where it matters; what the user has set stays. To be called before numpy is loaded: later it would only be believed."""
    if sys.platform != "linux" or (machine or platform.machine()) != "x86_64" or CORE in environ or "numpy" in sys.modules:
        return
    features = _features(cpuinfo)
    if "avx" in features and "avx512f" not in features:
        environ[CORE] = "Sandybridge"


def _features(cpuinfo: Path) -> set[str]:
    """Of the first processor; none where that cannot be read."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            found = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return set()
    return set(found.partition(":")[2].split())
