"""Every test runs with folders of its own, without the user's DSV41CHAT_* variables, and without a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dsv41chat.engine  # noqa: F401 - before numpy, whose library reads then what to compute with
import tests.offline.sitecustomize  # noqa: F401 - from here on this process has no network

# As many workers as processors share these: threads of a BLAS that spin while they wait would take them from one another.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# Where a shell asks for no bytecode, every program that a test starts would compile all of this package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).resolve().parents[1]
# Where programs that tests start find this package, and the refusal of the network before it.
PYTHONPATH = os.pathsep.join([str(ROOT / "tests" / "offline"), str(ROOT)])
# What a user's shell may say about the terminal or the language; a test that wants one of them sets it itself.
SHELL = ("NO_COLOR", "PAGER", "TERM", "COLORTERM", "COLUMNS", "LINES", "LANG", "LC_ALL", "LANGUAGE", "VISUAL", "EDITOR", "TMUX", "SSH_CONNECTION")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One more than there are processors: many tests wait for a screen, a process or a drive."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config):
    """Files in their own order. pytest-xdist would give out those with most tests first and end with the few tests that take longest."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Files of screens, terminals and processes, which mostly wait, go evenly between those that compute: neither kind has the machine alone."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waits = [path for path in files if "ui" in path.parts]
    computes = [path for path in files if "ui" not in path.parts]
    # Each at its share of its own kind; equal shares in the order of the names.
    places = {path: (number + 0.5) / len(kind) for kind in (waits, computes) for number, path in enumerate(kind)}
    items[:] = [item for path in sorted(files, key=lambda path: (places[path], str(path))) for item in files[path]]


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory, monkeypatch):
    """User folders (config, data, cache, state, log) below a temporary home, on Linux and on macOS."""
    home = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        if name.startswith(("DSV41CHAT_", "TEXTUAL")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    for name in ("CONFIG", "DATA", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / name.lower()))
    for name in SHELL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    return home


@pytest.fixture
def shared_weights(monkeypatch):
    """The embedded model's weights are read once for all tests that ask for this; see tests/weights.py."""
    from tests import weights

    weights.share(monkeypatch)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """`dsv41chat` in this process with a scripted engine; see tests/ui/program.py."""
    from tests.ui.program import Program

    return Program(tmp_path / "data", monkeypatch)
