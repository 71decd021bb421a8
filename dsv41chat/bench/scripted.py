"""An engine that plays a text at a fixed rate, so that a front end can be measured alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsv41chat.engine.events import Done, DraftRound, Loading, Piece, Prefill, Residency

MARKERS = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
    "｜DSML｜", "<｜latest_reminder｜>", "<｜deepseek_image｜>",
)  # fmt: skip
CONTEXT = 10_000_000


class ScriptedTokenizer:
    """Bytes as ids, markers behind them."""

    sha256 = "5c" * 32
    vocab_size = 256 + len(MARKERS)

    def marker(self, spelling: str) -> int:
        return 256 + MARKERS.index(spelling)

    def find_marker(self, spelling: str) -> int | None:
        return self.marker(spelling) if spelling in MARKERS else None

    def is_added(self, id: int) -> bool:
        return 256 <= id < self.vocab_size

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else MARKERS[id - 256].encode() if self.is_added(id) else b""


class ScriptedEngine:
    """Plays `text` in pieces of `piece_chars` characters, `rate` of them a second."""

    family, fingerprint, device, mlx_version = "v41", "5c" * 32, "none", "0"

    def __init__(self, text: str, rate: float, piece_chars: int = 4):
        self.text, self.rate, self.piece_chars = text, rate, piece_chars
        self.tokenizer = ScriptedTokenizer()
        self.context_limit = CONTEXT
        self.drafter = SimpleNamespace(block=0)

    def table_stats(self) -> dict:
        return {}

    def memory(self) -> tuple[int, int]:
        return 0, 0

    def calibrate_tables(self, cancel: Any) -> bool:
        return False

    def held(self, ids: Any) -> int:
        return 0

    def residency(self) -> Residency:
        return Residency(())

    def new_session(self) -> ScriptedEngine:
        return self

    def close(self) -> None:
        """Nothing is held."""

    def generate(self, prompt: Any, sampling: Any, *, cancel=lambda: False, **_: Any) -> Iterator[Any]:
        yield self.residency()
        yield Prefill(0, len(prompt.ids), len(prompt.ids), 1000.0)
        began = time.monotonic()
        ids: list[int] = []
        finish = "stop"
        for number, at in enumerate(range(0, len(self.text), self.piece_chars)):
            pause = began + number / self.rate - time.monotonic()
            if pause > 0:
                time.sleep(pause)
            if cancel():
                finish = "cancelled"
                break
            ids.append(number % 256)
            yield Piece("answer", self.text[at : at + self.piece_chars], (ids[-1],))
            yield DraftRound(0, 0, 0)
        shown = self.text[: len(ids) * self.piece_chars]
        usage = {
            "prompt_tokens": len(prompt.ids), "cached_tokens": 0, "prefilled_tokens": len(prompt.ids), "thinking_tokens": 0,
            "answer_tokens": len(ids), "completion_tokens": len(ids), "context_used": len(prompt.ids) + len(ids), "context_limit": CONTEXT,
        }  # fmt: skip
        seconds = time.monotonic() - began
        yield Done(finish, tuple(ids), (), tuple(ids), "", shown, usage, {"decode_s": seconds, "decode_tok_s": len(ids) / max(seconds, 1e-9)}, {}, {})


def scripted_host(text: str, rate: float) -> dict[str, Any]:
    """Keyword arguments for EngineHost: an embedded pack that plays `text`."""

    def opener(folder: Path, *, progress=None, **_: Any) -> ScriptedEngine:
        if progress is not None:
            progress(Loading("ready", 1, 1, "layers"))
        return ScriptedEngine(text, rate)

    def prober(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(
            name="scripted", family="v41", fingerprint="5c" * 32, bytes=0, resident_bytes=0, table_bytes=0, context=CONTEXT, drafter=None,
            has_tokenizer=True, settings={}, notes=(), formats={}, admission=None,
        )  # fmt: skip

    return {"opener": opener, "prober": prober, "embedded": lambda: Path("scripted"), "backend": lambda: ("none", "0")}
