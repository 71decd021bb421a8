"""Surroundings that more than one test of the front ends needs."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_back_end(tmp_path) -> dict[str, str]:
    """Variables with which a program cannot import mlx.core: a package `mlx` with nothing in it comes first."""
    (tmp_path / "none" / "mlx").mkdir(parents=True)
    (tmp_path / "none" / "mlx" / "__init__.py").write_text("")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "none"), os.environ["PYTHONPATH"]])}
