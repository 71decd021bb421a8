"""The embedded model: its pack, the corpus builder, the trainer and the evaluation."""

from __future__ import annotations

from pathlib import Path


def embedded_pack() -> Path:
    """Folder of the pack that ships with the package (read-only, never written to)."""
    from importlib import resources

    return Path(str(resources.files(__name__) / "pack"))
