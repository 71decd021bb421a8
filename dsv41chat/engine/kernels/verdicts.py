"""What install checks found, kept from one opening to the next: a check costs more than the route it looks at.

A verdict counts only where everything that it was found on is the same: the build, the device, MLX and numpy, the options of the loading,
the sources of the engine, and the route's own identity. Only routes that passed are kept, so one that failed is looked at every time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.device import device_kind

_SOURCES = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Passed:
    """error: the worst relative distance to stock. alike: whether rows had the same bits in calls of several widths. checked: a date."""

    error: float
    alike: bool
    checked: str


class Verdicts:
    """Of one build. facts: where they are kept. part: trunk or drafter. basis: whatever else a verdict depends on; a change drops all."""

    def __init__(self, facts: MutableMapping[str, str], build: str, part: str, options: dict[str, Any]):
        self._facts, self._name = facts, f"routes.{build[:16]}.{part}"
        self._basis = basis(build, options)
        self._found: dict[str, dict[str, Any]] = self._read()
        self._changed = False

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            kept = json.loads(self._facts.get(self._name, "{}"))
            found = kept["passed"] if kept.get("basis") == self._basis and self._basis else {}
            return {key: found[key] for key in found if isinstance(Passed(**found[key]).error, float)}
        except (ValueError, TypeError, KeyError, AttributeError):
            return {}

    def get(self, route: str, identity: str, op: str, key: str) -> Passed | None:
        found = self._found.get(_key(route, identity, op, key))
        return None if found is None else Passed(**found)

    def put(self, route: str, identity: str, op: str, key: str, error: float, alike: bool) -> None:
        self._found[_key(route, identity, op, key)] = vars(Passed(float(error), alike, date.today().isoformat()))
        self._changed = True

    def save(self) -> None:
        """Nothing is kept where the sources cannot be read: then a change of them would not be seen."""
        if self._changed and self._basis:
            self._facts[self._name] = json.dumps({"basis": self._basis, "passed": self._found}, sort_keys=True)
            self._changed = False


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def basis(build: str, options: dict[str, Any]) -> str:
    """Digest of everything that all verdicts of a build depend on; empty where the sources cannot be read."""
    if not sources():
        return ""
    device = str(mx.device_info().get("device_name", "gpu")) if device_kind() != "cpu" else "cpu"
    # Libraries cut products by the number of threads that they find.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    what = [build, device, mx.__version__, np.__version__, cores, sources(), sorted((k, str(v)) for k, v in options.items())]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


@lru_cache(maxsize=1)
def sources() -> str:
    """Digest of the engine's source files, empty if there are none: a changed kernel, or stock operation, is checked again."""
    digest, paths = hashlib.sha256(), sorted(_SOURCES.rglob("*.py"))
    for path in paths:
        digest.update(path.relative_to(_SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest() if paths else ""
