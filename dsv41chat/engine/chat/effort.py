"""Reasoning effort: a line or a paragraph of prompt text at the very front, in thinking mode only.

The paragraphs are protocol strings of the released models, byte for byte. Source: spec chat_encoding, section 3.3.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import EngineError
from .markers import check_family

V41_LEVELS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
_V41_LINE = "Reasoning Effort: {n} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously "
    "stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and "
    "rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into "
    "its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface "
    "symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption "
    "remains unchecked and no error remains undiscovered.\n\n"
)
# Two generations of V4 releases were trained with different texts for the same level names.
V4_PROFILES = {
    "official": {"low": "", "high": _ABSOLUTE, "xhigh": _ABSOLUTE, "max": _BEYOND},
    "preview": {"low": "", "high": "", "xhigh": "", "max": _ABSOLUTE},
}
_ALIASES = {"minimal": "low", "medium": "high"}


class BadEffort(EngineError):
    """An effort that the model's family does not know."""

    code = "usage"


def parse_effort(value: str | int | None, family: str) -> tuple[bool, str | int]:
    """(thinking, effort) of what a user or a pack wrote.

    `off` and `none` mean chat mode; None is the default level, high; `minimal` and `medium` are read as low and high.
    v41 also takes a number from 1 to 100 (as int or text). Raises BadEffort.
    """
    check_family(family)
    if isinstance(value, str):
        value = value.strip().lower()
        if value in ("off", "none"):
            return False, "high"
        value = int(value) if value.isascii() and value.isdigit() else _ALIASES.get(value, value)
    if value is None:
        value = "high"
    effort_text(family, value)
    return True, value


def effort_text(family: str, effort: str | int, v4_profile: str = "official") -> str:
    """The prompt text of one effort. Raises BadEffort for a level that the family does not have."""
    if v4_profile not in V4_PROFILES:
        raise BadEffort(f"unknown V4 effort profile {v4_profile!r}", f"use {' or '.join(V4_PROFILES)}")
    if isinstance(effort, str):
        effort = _ALIASES.get(effort, effort)
        if effort not in V41_LEVELS:  # both families have the same names
            raise BadEffort(f"unknown effort {effort!r}", f"use off, {', '.join(V41_LEVELS)}")
        return _V41_LINE.format(n=V41_LEVELS[effort]) if check_family(family) == "v41" else V4_PROFILES[v4_profile][effort]
    if check_family(family) == "v4":
        raise BadEffort(f"V4 has no numeric effort (got {effort})", "use off, low, high or max")
    if isinstance(effort, bool) or not 1 <= effort <= 100:
        raise BadEffort(f"effort {effort} is outside 1..100", f"use off, {', '.join(V41_LEVELS)} or a number from 1 to 100")
    return _V41_LINE.format(n=effort)


def detect_v4_profile(folder: str | Path, name: str | None = None) -> str:
    """Which texts a V4 pack was trained with: `official` or `preview`.

    The encoder source that a pack may carry decides (it is parsed, never run): a table with the keys low, high and max
    means official, a constant REASONING_EFFORT_MAX preview. Otherwise the name does: V4-Pro and uploads named 0731 are
    official. name: what the pack is called, by default its folder.
    """
    folder = Path(folder)
    constant = False
    for source in _encoder_sources(folder):
        try:
            tree = ast.parse(source.read_text(encoding="utf-8", errors="replace"))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
                if {"low", "high", "max"} <= keys:
                    return "official"
            constant = constant or isinstance(node, ast.Name) and node.id == "REASONING_EFFORT_MAX" and isinstance(node.ctx, ast.Store)
    if constant:
        return "preview"
    name = (name or folder.resolve().name).lower()
    return "official" if re.search(r"v4[-_. ]?pro", name) or "0731" in name else "preview"


def _encoder_sources(folder: Path) -> Iterator[Path]:
    """Python files that may hold the encoder: in the pack itself and in its `encoding` folder, small ones only."""
    for place in (folder, folder / "encoding"):
        if place.is_dir():
            for path in sorted(place.glob("*.py")):
                if path.is_file() and path.stat().st_size < 1 << 20:
                    yield path
