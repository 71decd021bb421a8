"""Runs of the program in processes of their own, with a data folder that a test gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Ran:
    """What a run left: exit code, the object on stdout (None without one), stderr."""

    code: int
    json: dict[str, Any] | None
    stderr: str

    @property
    def usage(self) -> dict[str, int]:
        return self.json["usage"]


def environment() -> dict[str, str]:
    """The environment of a run: nothing of the user's, one thread, so that runs side by side do not fight."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("DSV41CHAT_")}
    return keep | {"OMP_NUM_THREADS": "1"}


def run(data: Path, *words: str, timeout_s: float = 300.0) -> Ran:
    """`dsv41chat WORDS... --json --data-dir DATA`."""
    command = [sys.executable, "-m", "dsv41chat", *words, "--json", "--data-dir", str(data)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=data.parent, env=environment(), stdin=subprocess.DEVNULL, timeout=timeout_s, check=False
    )
    lines = done.stdout.strip().splitlines()
    return Ran(done.returncode, json.loads(lines[-1]) if lines else None, done.stderr)


def turn(data: Path, text: str, *words: str, tokens: int = 12, more: bool = True) -> Ran:
    """One scripted turn; more: in the last conversation."""
    found = run(data, "--headless", *(["-c"] if more else []), "-p", text, "--max-tokens", str(tokens), *words)
    assert found.code == 0, (found.json, found.stderr)
    return found
