"""A scripted engine with the interface of dsv41chat.engine, for tests of the turn runner and of both front ends.

Its tokenizer has the 256 bytes as ids 0..255 and the markers after them, so every text has ids and every answer is text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsv41chat.bench.scripted import MARKERS, ScriptedEngine, ScriptedTokenizer
from dsv41chat.engine.events import Done, DraftRound, Loading, Piece, Prefill, Residency, TableState

HELLO = "Hello from the fake engine."


class FakeTokenizer(ScriptedTokenizer):
    sha256 = "fa" * 32


@dataclass
class Script:
    """What the fake says. answer: a text, or a function of (prompt ids, seed, temperature); thinking: shown first when the
    prompt opens a thought; delay_s: pause per token; prefill_s: pause per prefill chunk; error: raised after `error_at` tokens;
    finish: overrides the end; load_error: raised while loading; load_s: how long loading takes; loading: it goes on until this is set;
    each: called in the engine's thread before each token, with the number of those before; ignore_cancel: never looks.
    Filled by the fake: opened, the options of every open_engine; sessions, every session made."""

    answer: str | Callable[[tuple[int, ...], int, float], str] = HELLO
    thinking: str = ""
    delay_s: float = 0.0
    prefill_s: float = 0.0
    error: Exception | None = None
    error_at: int = 0
    finish: str | None = None
    load_error: Exception | None = None
    load_s: float = 0.0
    loading: threading.Event | None = None
    each: Callable[[int], Any] = lambda number: None
    ignore_cancel: bool = False
    context_limit: int = 8192
    resident_bytes: int = 1000
    opened: list = field(default_factory=list)
    sessions: list = field(default_factory=list)
    tokenizer: Any = field(default_factory=FakeTokenizer)

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The ids of every prompt that was to be answered."""
        return [call.prompt.ids for session in self.sessions for call in session.calls]


class FakeEngine(ScriptedEngine):
    """Sessions of its own, each with a lane; the rest of the interface is that of the engine of `bench ui`."""

    fingerprint, device = "f" * 64, "cpu"
    generation_defaults: dict = {}

    def __init__(self, script: Script, name: str = "fake", context: int | None = None):
        self.script = script
        self.name = name
        self.tokenizer = script.tokenizer
        self.context_limit = min(context, script.context_limit) if context else script.context_limit

    def memory(self) -> tuple[int, int]:
        return 2_000_000, 3_000_000

    def close(self) -> None:
        self.closed = True

    def residency(self) -> Residency:
        return Residency((TableState("layers.1.engram", "warm", 4, 4),))

    def new_session(self) -> FakeSession:
        session = FakeSession(self)
        self.script.sessions.append(session)
        return session


class FakeSession:
    def __init__(self, engine: FakeEngine):
        self.engine = engine
        self.drafter = SimpleNamespace(block=0)
        self.lane: tuple[int, ...] = ()
        self.calls: list[SimpleNamespace] = []  # one per generate: prompt, sampling, max_tokens, stop, draft, loop_stop

    def held(self, ids) -> int:
        return _common(self.lane, tuple(ids))

    def generate(
        self, prompt, sampling, *, max_tokens, max_answer_tokens=None, stop=(), draft="auto", loop_stop=True, cancel=lambda: False
    ) -> Iterator[Residency | Prefill | Piece | DraftRound | Done]:
        script, tokenizer = self.engine.script, self.engine.tokenizer
        self.calls.append(
            SimpleNamespace(
                prompt=prompt, sampling=sampling, max_tokens=max_tokens, max_answer_tokens=max_answer_tokens, stop=stop, draft=draft,
                loop_stop=loop_stop,
            )
        )  # fmt: skip
        if script.ignore_cancel:
            cancel = lambda: False
        yield self.engine.residency()
        cached = _common(self.lane, prompt.ids[:-1])
        total = len(prompt.ids) - cached
        finish, read = None, 0
        for done in range(min(64, total), total + 64, 64):
            if cancel():
                finish = "cancelled"
                break
            time.sleep(script.prefill_s)
            read = min(done, total)
            yield Prefill(cached, min(done, total), total, 1000.0)
        began = time.monotonic()
        answer = script.answer if isinstance(script.answer, str) else script.answer(prompt.ids, sampling.seed, sampling.temperature)
        reasoning = prompt.start.startswith("reasoning")
        eos, end_think = tokenizer.marker(MARKERS[1]), tokenizer.marker("</think>")
        script_ids = ([*script.thinking.encode(), end_think] if reasoning else []) + [*answer.encode(), eos]
        ids: list[int] = []
        raw = {"thinking": b"", "answer": b""}
        shown = {"thinking": "", "answer": ""}
        channel = "thinking" if reasoning else "answer"
        said = 0
        for id in script_ids:
            if finish is None and cancel():
                finish = "cancelled"
            if finish is None and script.error is not None and len(ids) >= script.error_at:
                raise script.error
            if finish is None and (len(ids) >= max_tokens or said == max_answer_tokens):
                finish = "length"
            if finish is not None:
                break
            time.sleep(script.delay_s)
            script.each(len(ids))
            ids.append(id)
            said += channel == "answer"
            if id == eos:
                finish = script.finish or "stop"
                yield Piece(channel, "", (id,))
                break
            if id == end_think:
                channel = "answer"
                yield Piece(channel, "", (id,))
                continue
            raw[channel] += bytes([id])
            full = raw[channel].decode("utf-8", "ignore")
            text, shown[channel] = full[len(shown[channel]) :], full
            if channel == "answer" and (hit := next((s for s in stop if s in full), None)):
                shown[channel] = full[: full.index(hit)]
                finish = "stop_string"
                yield Piece(channel, "", (id,))
                break
            yield Piece(channel, text, (id,))
            yield DraftRound(0, 0, 0)
        self.lane = tuple(prompt.ids) + tuple(ids[:-1])
        n_thinking = ids.index(end_think) + 1 if reasoning and end_think in ids else len(ids) if reasoning else 0
        body = [i for i in ids[n_thinking:] if i != eos]
        seconds = max(time.monotonic() - began, 1e-9)
        yield Done(
            finish or "stop", tuple(ids), tuple(i for i in ids[:n_thinking] if i != end_think), tuple(body), shown["thinking"], shown["answer"],
            usage={
                "prompt_tokens": len(prompt.ids), "cached_tokens": cached, "prefilled_tokens": read, "thinking_tokens": n_thinking,
                "answer_tokens": len(ids) - n_thinking, "completion_tokens": len(ids), "context_used": len(prompt.ids) + len(ids),
                "context_limit": self.engine.context_limit,
            },
            timing={"prefill_s": 0.0, "first_token_s": 0.0, "decode_s": seconds, "prefill_tok_s": 0.0, "decode_tok_s": len(ids) / seconds},
            draft={"mode": str(draft), "rounds": len(ids), "proposed": 0, "accepted": 0, "by_depth": []},
            residency={"cold_rows": 0, "warm_rows": 0, "bytes_read": 0},
        )  # fmt: skip


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def fake_host(script: Script | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Keyword arguments for EngineHost: a fake pack at `folder` (need not exist) that plays `script`."""
    script = script or Script()
    folder = folder or Path("fake-pack")

    def opener(path, *, context=None, progress=None, cancel=None, **options):
        script.opened.append({"context": context, **options})
        for done in (1, 2):
            if progress:
                progress(Loading("weights", done, 2, "bytes"))
            time.sleep(script.load_s / 2)
            if script.loading is not None:
                script.loading.wait(120)
        if script.load_error is not None:
            raise script.load_error
        return FakeEngine(script, Path(path).name, context)

    def prober(path):
        return SimpleNamespace(
            name=Path(path).name, family="v41", fingerprint="f" * 64, bytes=1000, resident_bytes=script.resident_bytes, table_bytes=0,
            context=script.context_limit, drafter=None, has_tokenizer=True, notes=(), formats={}, admission=None,
        )  # fmt: skip

    return {"opener": opener, "prober": prober, "embedded": lambda: folder, "backend": lambda: ("cpu", "0")}
