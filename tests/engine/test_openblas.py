"""OpenBLAS's kernels are chosen so that a row has the same bits in every company."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from dsv41chat.engine import openblas

ROWS = """
import dsv41chat.engine, numpy as np
rng = np.random.default_rng(0)
x, weight = rng.standard_normal((64, 96), np.float32), rng.standard_normal((96, 160), np.float32)
whole = x @ weight
print([m for m in range(2, 64) if (x[:m] @ weight).tobytes() != whole[:m].tobytes()])
"""
CORE = "import os, dsv41chat.engine, numpy; from dsv41chat.engine import openblas; print(os.environ.get(openblas.VARIABLE), openblas.core())"
linux_x86 = pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="the choice is for x86 processors under Linux")


def run(code: str, **environ: str) -> str:
    """What a new process prints that names no kernels of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != openblas.VARIABLE}
    result = subprocess.run([sys.executable, "-c", code], env=inherited | environ, capture_output=True, text=True, timeout=100)
    assert not result.returncode, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("flags", "machine", "name"),
    [("avx avx2 fma", "x86_64", "Sandybridge"), ("avx avx2 fma avx512f", "x86_64", None), ("sse4_2", "x86_64", None), ("avx", "aarch64", None)],
)
def test_processors_without_avx512_get_the_kernels_of_avx(tmp_path, monkeypatch, flags, machine, name):
    monkeypatch.setattr(sys, "platform", "linux")
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nmodel name\t: one\nflags\t\t: fpu {flags} lm\n\nprocessor\t: 1\nflags\t\t: none\n")
    assert openblas.better(file, machine) == name
    assert openblas.better(tmp_path / "nothing", machine) is None


@linux_x86
@pytest.mark.parametrize("threads", ["1", "2"])
def test_rows_do_not_depend_on_their_company(threads):
    assert run(ROWS, OPENBLAS_NUM_THREADS=threads) == "[]"


@linux_x86
def test_what_the_user_names_is_taken_and_told(tmp_path):
    assert run(CORE, OPENBLAS_CORETYPE="Nehalem") == "Nehalem Nehalem"
    name, core = run(CORE).split()
    assert core and name in (core, "None")
    assert openblas.core(tmp_path / "nothing") == ""
