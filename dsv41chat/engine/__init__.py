"""The engine's door. Nothing below this package is imported from outside it, except errors, events, backend and the chat text layer.

Names are resolved on first use, so that the errors and the text layer can be imported where no MLX back end is installed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dsv41chat.engine import openblas

# MLX reads this once, at its first product: by default it rounds float32 inputs to 10 bits on tensor cores, which moves the logits of
# a float32 model by more than 1. The router, the mixes, the index scores and the head are float32 because the release computes them so.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
if name := openblas.better():
    os.environ.setdefault(openblas.VARIABLE, name)

if TYPE_CHECKING:
    from dsv41chat.engine.convert.bank import plan_bank, write_bank
    from dsv41chat.engine.convert.calibrate import DEFAULT_TEXT, CalibrationText
    from dsv41chat.engine.convert.convert import Conversion, convert_pack, plan_conversion
    from dsv41chat.engine.convert.prune import Pruned, Pruning, plan_prune, prune_pack
    from dsv41chat.engine.device import Machine, read_machine
    from dsv41chat.engine.engine import Engine, PackInfo, open_engine, probe_pack
    from dsv41chat.engine.goldens import Check, Report, verify_goldens
    from dsv41chat.engine.paper import PaperBuild, paper_builds
    from dsv41chat.engine.sampling import SamplingParams
    from dsv41chat.engine.session import Session
    from dsv41chat.engine.verify import Found, verify_full, verify_plain

_HOMES = {
    "CalibrationText": "convert.calibrate",
    "DEFAULT_TEXT": "convert.calibrate",
    "Conversion": "convert.convert",
    "convert_pack": "convert.convert",
    "plan_conversion": "convert.convert",
    "Pruned": "convert.prune",
    "Pruning": "convert.prune",
    "plan_prune": "convert.prune",
    "prune_pack": "convert.prune",
    "plan_bank": "convert.bank",
    "write_bank": "convert.bank",
    "Engine": "engine",
    "PackInfo": "engine",
    "open_engine": "engine",
    "probe_pack": "engine",
    "Machine": "device",
    "read_machine": "device",
    "PaperBuild": "paper",
    "paper_builds": "paper",
    "Check": "goldens",
    "Report": "goldens",
    "verify_goldens": "goldens",
    "SamplingParams": "sampling",
    "Session": "session",
    "Found": "verify",
    "verify_full": "verify",
    "verify_plain": "verify",
}
__all__ = [
    "CalibrationText", "Check", "Conversion", "DEFAULT_TEXT", "Engine", "Found", "Machine", "PackInfo", "PaperBuild", "Pruned", "Pruning",
    "Report", "SamplingParams", "Session", "convert_pack", "open_engine", "paper_builds", "plan_bank", "plan_conversion", "plan_prune",
    "probe_pack", "prune_pack", "read_machine", "verify_full", "verify_goldens", "verify_plain", "write_bank",
]  # fmt: skip


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
