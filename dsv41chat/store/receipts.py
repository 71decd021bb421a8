"""Receipts of evaluations: one JSON file per measurement, in a folder per pack fingerprint. What a build is worth is read from them.

    <state folder>/receipts/<fingerprint>/<arm>-<key>.json

A receipt is an object with at least `arm` (ppl, ladder, needle, selfcheck, ...), `summary` (one line for people), `short` (its first
words, for lists) and `time` (epoch seconds, UTC). The same measurement with the same parameters and versions replaces its own receipt;
others stay beside it.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from dsv41chat.store.files import private_folder, write_private

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._-]+")


class Receipts:
    """state: the user's state folder; the folder in it is made at the first `put`."""

    def __init__(self, state: Path):
        self.folder = Path(state) / "receipts"

    def put(self, fingerprint: str, arm: str, key: str, receipt: dict[str, Any]) -> Path:
        """Write a receipt whole or not at all. Raises StoreReadOnly, StoreFull or StoreError."""
        path = private_folder(self._of(fingerprint)) / f"{arm}-{key}.json"
        write_private(path, (json.dumps(receipt, indent=1) + "\n").encode())
        return path

    def all(self, fingerprint: str) -> list[dict[str, Any]]:
        """The receipts of a build, the newest first. A file that cannot be read as one is logged and left out."""
        found = []
        for path in self._of(fingerprint).glob("*.json"):
            try:
                receipt = json.loads(path.read_text(encoding="utf-8"))
                found.append((float(receipt["time"]), str(receipt["arm"]), f"{receipt['summary']}{receipt['short']}", receipt))
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.warning("%s is no receipt: %s", path, error)
        return [receipt for *_, receipt in sorted(found, key=lambda entry: entry[:3], reverse=True)]

    def last(self, fingerprint: str, arm: str) -> dict[str, Any] | None:
        """The newest receipt of an arm, or None."""
        return next((receipt for receipt in self.all(fingerprint) if receipt["arm"] == arm), None)

    def figures(self, fingerprint: str, arms: tuple[str, ...] = ("ppl", "selfcheck")) -> dict[str, dict[str, Any]]:
        """What lists of builds show: {arm: {summary, short, time}} of the newest receipts."""
        found: dict[str, dict[str, Any]] = {}
        for receipt in self.all(fingerprint):
            if receipt["arm"] in arms:
                found.setdefault(receipt["arm"], {name: receipt[name] for name in ("summary", "short", "time")})
        return {arm: found[arm] for arm in arms if arm in found}

    def _of(self, fingerprint: str) -> Path:
        if not _NAME.fullmatch(fingerprint):
            raise ValueError(f"{fingerprint!r} is no fingerprint")
        return self.folder / fingerprint
