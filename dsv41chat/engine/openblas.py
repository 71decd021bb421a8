"""Which kernels OpenBLAS computes with. It reads their name from the environment, once, when numpy is loaded.

On x86 processors without AVX-512 it would take kernels that sum a row's products in one order among twelve rows and in another among
two, and even otherwise at the fifth place than at the first. A decoded row would then differ from the same row of a prompt. Its AVX kernels sum
every row alike, at the same speed for few rows and four fifths of it for many.
"""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from pathlib import Path

VARIABLE = "OPENBLAS_CORETYPE"
# With and without the prefix and the suffix that numpy's own build gives all names.
_NAMES = [f"{prefix}openblas_get_corename{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "")]


def better(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str | None = None) -> str | None:
    """The kernels to name on this processor; None where OpenBLAS's own choice is right, or nothing is known."""
    if sys.platform != "linux" or (machine or platform.machine()) != "x86_64":
        return None
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split()
    except OSError:
        return None
    return "Sandybridge" if "avx" in flags and "avx512f" not in flags else None


def core(maps: Path = Path("/proc/self/maps")) -> str:
    """The kernels that the OpenBLAS of this process computes with, in its own words; empty without one."""
    try:
        paths = re.findall(r"/\S*openblas\S*\.so\S*", maps.read_text())
    except OSError:
        return ""
    for library in map(ctypes.CDLL, dict.fromkeys(paths)):
        for name in _NAMES:
            if (function := getattr(library, name, None)) is not None:
                function.restype = ctypes.c_char_p
                return function().decode()
    return ""
