"""Numbers as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes in decimal units with three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return ""
