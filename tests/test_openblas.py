"""OpenBLAS's kernels are chosen so that a row has the same bits in every company."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy
import pytest

from dsv41chat import openblas

ROWS = """
import dsv41chat, numpy as np
rng = np.random.default_rng(0)
x, weight = rng.standard_normal((64, 96), np.float32), rng.standard_normal((96, 160), np.float32)
whole = x @ weight
print([m for m in range(2, 64) if (x[:m] @ weight).tobytes() != whole[:m].tobytes()])
"""


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """chosen(features, ...): the environment after the choice on a processor with these features, before numpy is loaded."""

    def choose(features: str, machine: str = "x86_64", loaded: bool = False, **environ: str) -> dict[str, str]:
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor\t: 0\nmodel name\t: one\nflags\t\t: fpu {features} lm\n\nprocessor\t: 1\nflags\t\t: none\n")
        monkeypatch.setattr(sys, "platform", "linux")
        with monkeypatch.context() as modules:
            modules.setitem(sys.modules, "numpy", numpy) if loaded else modules.delitem(sys.modules, "numpy")
            openblas.choose(environ, file, machine)
        return environ

    return choose


def test_processors_without_avx512_get_the_kernels_of_avx(chosen):
    assert chosen("avx avx2 fma") == {openblas.CORE: "Sandybridge"}
    assert chosen("avx avx2 fma avx512f avx512dq") == {} == chosen("sse4_2") == chosen("avx", machine="aarch64")


def test_what_the_user_chose_and_a_loaded_numpy_stay(chosen):
    assert chosen("avx", **{openblas.CORE: "Zen"}) == {openblas.CORE: "Zen"}
    assert chosen("avx", loaded=True) == {}


def test_a_machine_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    environ: dict[str, str] = {}
    openblas.choose(environ, tmp_path / "nothing", "x86_64")
    assert environ == {}


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="the choice is for x86 processors under Linux")
@pytest.mark.parametrize("threads", ["1", "2"])
def test_rows_do_not_depend_on_their_company(threads):
    environ = {name: value for name, value in os.environ.items() if name != openblas.CORE} | {"OPENBLAS_NUM_THREADS": threads}
    result = subprocess.run([sys.executable, "-c", ROWS], env=environ, capture_output=True, text=True, timeout=100)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
