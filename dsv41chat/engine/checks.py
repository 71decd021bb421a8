"""One line of what `doctor` says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """verdict: ok, warn or fail; remedy: what to do, empty when there is nothing to do."""

    verdict: str
    name: str
    text: str
    remedy: str = ""
