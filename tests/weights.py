"""The embedded model's files and weights, read and checked once for all tests of a process that only need them to be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsv41chat.engine import engine as opening
from dsv41chat.nano import embedded_pack

_KEPT: dict[tuple[str, ...], Any] = {}
# What the weights in memory depend on.
_TRUNK = ("dtype", "cache_quant", "linear_input_fp8", "qat_sim", "routes", "engram_settings")
_DRAFTER = ("rounded", "linear_input_fp8")


def share(monkeypatch) -> None:
    """Engines of the embedded pack get the same trunk and drafter; engine, sessions, policies and verdicts are still each one's own.

    A look at the pack gets what the first look found: every look hashes all of its bytes, and every opening takes two.
    """
    open_pack, build_trunk, build_drafter = opening.open_pack, opening.build_trunk, opening.build_drafter

    def pack_of(folder, **options):
        if options or Path(folder).resolve() != embedded_pack().resolve():
            return open_pack(folder, **options)
        key = ("pack", str(folder))
        if key not in _KEPT:
            _KEPT[key] = open_pack(folder)
        return _KEPT[key]

    def key_of(names: tuple[str, ...], options: dict[str, Any]) -> tuple[str, ...]:
        return tuple(repr(options.get(name)) for name in names)

    def trunk_of(pack, **options):
        if pack.folder.resolve() != embedded_pack().resolve() or options.get("recheck") or options.get("os_layer"):
            return build_trunk(pack, **options)
        key = key_of(_TRUNK, options)
        if key not in _KEPT:
            _KEPT[key] = build_trunk(pack, **options)
        return _KEPT[key]

    def drafter_of(pack, trunk, **options):
        found = next((key for key, kept in _KEPT.items() if kept is trunk), None)
        if found is None:
            return build_drafter(pack, trunk, **options)
        key = ("drafter", *found, *key_of(_DRAFTER, options))
        if key not in _KEPT:
            _KEPT[key] = build_drafter(pack, trunk, **options)
        return _KEPT[key]

    close = opening.Engine.close
    monkeypatch.setattr(opening, "open_pack", pack_of)
    monkeypatch.setattr(opening, "build_trunk", trunk_of)
    monkeypatch.setattr(opening, "build_drafter", drafter_of)
    # The tables of shared weights are read from until the process ends.
    monkeypatch.setattr(opening.Engine, "close", lambda self: None if any(self.trunk is kept for kept in _KEPT.values()) else close(self))
