"""The engine's door. Nothing below this package is imported from outside it, except errors, events, backend and the chat text layer.

Names are resolved on first use, so that the errors and the text layer can be imported where no MLX back end is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv41chat.engine.engine import Engine, PackInfo, open_engine, probe_pack
    from dsv41chat.engine.goldens import Check, Report, verify_goldens
    from dsv41chat.engine.sampling import SamplingParams
    from dsv41chat.engine.session import Session

_HOMES = {
    "Engine": "engine",
    "PackInfo": "engine",
    "open_engine": "engine",
    "probe_pack": "engine",
    "Check": "goldens",
    "Report": "goldens",
    "verify_goldens": "goldens",
    "SamplingParams": "sampling",
    "Session": "session",
}
__all__ = ["Check", "Engine", "PackInfo", "Report", "SamplingParams", "Session", "open_engine", "probe_pack", "verify_goldens"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
