"""The embedded model: its pack, the corpus builder, the trainer and the evaluation."""

from __future__ import annotations

from pathlib import Path


def embedded_pack() -> Path:
    """Folder of the pack that ships with the package (read-only, never written to)."""
    from importlib import resources

    return Path(str(resources.files(__name__) / "pack"))


# Text to judge builds by (eval/README.md): conversations in the embedded model's own domain, and prose that it never learned.
CORPORA = {name: Path(__file__).parent / "eval" / file for name, file in (("chat", "chat.jsonl"), ("facts", "facts.jsonl"), ("prose", "prose.txt"))}
