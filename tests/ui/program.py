"""The program as a test runs it: in this process with scripted streams and a scripted engine, or as a child with pipes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv41chat import cli
from dsv41chat.ui.host import EngineHost
from tests.ui.fakes import Script, fake_host

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        (line,) = self.out.splitlines()
        return json.loads(line)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    def of(self, type: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == type]


class _Stream(io.TextIOWrapper):
    def __init__(self, data: bytes = b"", terminal: bool = False):
        self.data = io.BytesIO(data)
        super().__init__(self.data, encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Program:
    """Runs `dsv41chat` in this process. data: its data folder. script: what the engine says, unless a call brings its own."""

    def __init__(self, data: Path, monkeypatch, script: Script | None = None):
        self.data = data
        self.script = script or Script()
        self.hosts: list[EngineHost] = []
        self._monkeypatch = monkeypatch

    def at(self, data: Path) -> Program:
        """The same program with another data folder."""
        return Program(data, self._monkeypatch, self.script)

    def script_ids(self) -> tuple[int, ...]:
        """The newest prompt that any engine of this program was given."""
        return self.last.sessions[-1].calls[-1].prompt.ids

    def __call__(
        self, *argv: str, stdin: bytes | str | None = None, terminal: bool = False, script: Script | None = None, real: bool = False
    ) -> Result:
        """stdin None: a terminal; text or bytes: a pipe. terminal: stdout and stderr are one. real: the real engine."""
        data = stdin.encode() if isinstance(stdin, str) else stdin
        streams = {"stdin": _Stream(data or b"", terminal=stdin is None), "stdout": _Stream(terminal=terminal), "stderr": _Stream(terminal=terminal)}
        with self._monkeypatch.context() as patch:
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            chosen = self.last = script or self.script

            def make_host(settings, store):
                host = EngineHost(settings, store, **({} if real else fake_host(chosen, self.data / "fake-pack")))
                self.hosts.append(host)
                return host

            exit = cli.main(["--data-dir", str(self.data), *argv], make_host=make_host)
        for name in ("stdout", "stderr"):
            streams[name].flush()
        return Result(exit.code, streams["stdout"].data.getvalue().decode(), streams["stderr"].data.getvalue().decode())


def child(data: Path, argv: Sequence[str], script: dict[str, Any] | None = None, **popen: Any) -> subprocess.Popen:
    """The program as a process. script: keyword arguments of Script, None for the real engine."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **popen.pop("env", {})}
    words = ["dsv41chat"] if script is None else ["tests.ui.fake_headless", json.dumps(script)]
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen
    return subprocess.Popen([sys.executable, "-m", *words, "--data-dir", str(data), *argv], env=environ, cwd=ROOT, **options)
