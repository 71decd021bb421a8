"""The turn runner on the embedded pack with states on disk, as both front ends drive it; a new `Chat` stands for a new process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv41chat.nano import embedded_pack
from dsv41chat.settings import load_settings
from dsv41chat.store import Store
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.states import States
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import Failed, Finished, Noticed, Piece, Prefill, Resumed, TurnRequest, Warned

GREEDY = {"temperature": 0.0, "effort": "off", "max_tokens": 6, "draft": "off"}
THINKING = GREEDY | {"effort": "high"}
SEEDED = GREEDY | {"temperature": 0.8, "seed": 5}


@dataclass
class Said:
    """One turn: its end, and what was told on the way."""

    end: Finished | Failed
    resumed: Resumed | None = None
    told: list[str] = field(default_factory=list)
    rows: int = 0  # trunk rows that the session computed

    @property
    def cached(self) -> int:
        return self.end.usage["cached_tokens"]

    @property
    def prefilled(self) -> int:
        return self.end.usage["prefilled_tokens"]

    @property
    def hash(self) -> str:
        return self.end.ids_hash

    @property
    def message(self) -> Any:
        return self.end.message


class Chat:
    """data: where conversations and states lie. cache False: nothing is kept or found. pack: another build."""

    def __init__(self, data: Path, *, cache: bool = True, budget: int | None = None, pack: Path | None = None, flags: dict | None = None):
        self.settings = load_settings(data_dir=data, environ={}, flags={"engine.model": str(pack or embedded_pack()), **(flags or {})})
        self.store = Store.open(self.settings.paths.data, background=False)
        states = States(self.settings.paths.states if cache else None, budget, strict=self.settings.cache.strict, min_free_bytes=0)
        self.host = EngineHost(self.settings, self.store, states=states)
        self.host.fresh_sessions = not cache
        self.controller = TurnController(self.store, self.host, self.settings)
        self.id: str | None = None

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self.settings.paths.states

    def session(self) -> Any:
        return self.host._sessions[self.id]

    def say(self, text: str | None = None, options: dict | None = None, *, stop: Callable[[Any], bool] | None = None, **request: Any) -> Said:
        """One turn in this chat's conversation. stop: cancel once this says so of an event."""
        if self.id is None and "conversation_id" not in request:
            last = self.store.last_conversation()
            self.id = last.id if last is not None else None
        request = {"conversation_id": self.id, "text": text, **request}
        session = self.host._sessions.get(request["conversation_id"] or "")
        before = session.rows_run if session is not None else 0
        found = Said(None)
        for event in self.controller.run(TurnRequest(overrides=options or GREEDY, **request)):
            if stop is not None and stop(event):
                self.controller.cancel()
            if isinstance(event, Resumed):
                found.resumed = event
            elif isinstance(event, Warned | Noticed) and event.code != "embedded":
                found.told.append(event.message)
            elif isinstance(event, Finished | Failed):
                found.end = event
        self.id = self.controller.last_conversation_id
        found.rows = self.host._sessions[self.id].rows_run - before
        return found

    def new(self, text: str, options: dict | None = None, **request: Any) -> Said:
        """The first turn of a new conversation."""
        return self.say(text, options, conversation_id=None, **request)

    def close(self, settle: bool = True) -> None:
        if settle:
            assert self.host.settle(120)
        self.host.close(60)
        self.store.close()


def in_prefill(event: Any) -> bool:
    return isinstance(event, Resumed | Prefill)


def in_answer(count: int = 3) -> Callable[[Any], bool]:
    """True from the `count`-th id on."""
    seen = 0

    def stop(event: Any) -> bool:
        nonlocal seen
        seen += len(event.ids) if isinstance(event, Piece) else 0
        return seen >= count

    return stop
