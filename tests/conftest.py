"""Every test runs with folders of its own and without the user's DSV41CHAT_* variables."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory, monkeypatch):
    """User folders (config, data, cache, state, log) below a temporary home, on Linux and on macOS."""
    home = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        if name.startswith("DSV41CHAT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    for name in ("CONFIG", "DATA", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / name.lower()))
    for name in ("NO_COLOR", "PAGER", "TERM"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def program(tmp_path, monkeypatch):
    """`dsv41chat` in this process with a scripted engine; see tests/ui/program.py."""
    from tests.ui.program import Program

    return Program(tmp_path / "data", monkeypatch)
