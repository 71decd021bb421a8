"""The state behind the status line: engine events in, short fields out. No widgets, no clocks of its own."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from dsv41chat.ui.turn_events import DraftRound, Failed, Finished, Loading, Piece, Prefill, Ready, Residency, Resuming, Saved, Started
from dsv41chat.ui.units import size

RATE_S = 2.0
DRAFT_WINDOW = 128
WARN_SHARE, FULL_SHARE = 0.80, 0.95
# Reading fewer says little about the rate: most of their time is the same for any number.
RATED_TOKENS = 64


@dataclass
class Rate:
    """Tokens per second as an exponential mean over about RATE_S."""

    value: float = 0.0
    _last: float | None = None
    _tokens: int = 0

    def add(self, tokens: int, now: float) -> None:
        if self._last is None:
            # The first piece only starts the clock: its tokens were made before it.
            self._last = now
            return
        self._tokens += tokens
        passed = now - self._last
        if passed < 0.1:
            return
        current = self._tokens / passed
        share = 1 - math.exp(-passed / RATE_S)
        self.value = current if not self.value else self.value + share * (current - self.value)
        self._last, self._tokens = now, 0


@dataclass
class Status:
    """All figures are the engine's own. apply() takes one event; fields() gives (text, style) from most to least important."""

    phase: str = "idle"
    running: bool = False
    context_used: int = 0
    context_limit: int = 0
    forecast: int = 0
    cached: int | None = None
    prefilled: int = 0
    thinking: int = 0
    answer: int = 0
    residency: str = ""
    queued: int = 0
    memory: tuple[int, int] | None = None
    drafting: bool | None = None
    depth: int = 0
    stopping: bool = False
    rate: Rate = field(default_factory=Rate)
    started: float = 0.0
    prefill_rate: float = 0.0
    thinking_s: float | None = None
    _thinking_from: float | None = None
    _rounds: deque = field(default_factory=deque)

    def begin(self, now: float) -> None:
        """A turn was asked for: from now on the screen says so, whatever comes before the turn's first event."""
        self.running, self.stopping, self.phase, self.started = True, False, "preparing", now
        self.cached, self.prefilled, self.thinking, self.answer = None, 0, 0, 0
        self.rate, self.drafting, self.thinking_s, self._thinking_from = Rate(), None, None, None
        self._rounds.clear()

    def apply(self, event: Any, now: float) -> None:
        if isinstance(event, Started):
            # Esc may have come between the start and its first event.
            stopping = self.running and self.stopping
            self.begin(now)
            self.stopping = stopping
        elif isinstance(event, Loading):
            self.phase = loading_text(event)
        elif isinstance(event, Ready):
            self.context_limit, self.context_used = event.context_limit, event.prompt_tokens
            self.phase = "preparing"
        elif isinstance(event, Resuming):
            self.phase = f"resuming {event.tokens:,}"
        elif isinstance(event, Residency):
            self.residency = residency_text(event)
        elif isinstance(event, Prefill):
            self._prefill(event)
        elif isinstance(event, Piece):
            self._piece(event, now)
        elif isinstance(event, DraftRound):
            self._round(event)
        elif isinstance(event, Saved):
            if self.answer or self.thinking:
                self.phase = "saving"
        elif isinstance(event, Finished):
            self.context_used = event.usage.get("context_used", self.context_used)
            self.cached = event.usage.get("cached_tokens", self.cached)
            self.prefilled = event.usage.get("prefilled_tokens", self.prefilled)
            self._end("idle")
        elif isinstance(event, Failed):
            self.context_used = event.prompt_tokens or self.context_used
            self._end("error")

    def _end(self, phase: str) -> None:
        self.phase, self.running, self.stopping = phase, False, False

    def _prefill(self, event: Prefill) -> None:
        self.cached, self.prefilled = event.cached, event.done
        if event.tok_s and event.done >= RATED_TOKENS:
            self.prefill_rate = event.tok_s
        if event.total and event.done < event.total:
            rate = f" {event.tok_s:,.0f} tok/s eta {max(1, math.ceil((event.total - event.done) / event.tok_s))} s" if event.tok_s else ""
            self.phase = f"prefill {event.done:,}/{event.total:,} {100 * event.done // event.total}%{rate}"
        else:
            self.phase = f"prefill {event.done:,}/{event.total:,}"

    def _piece(self, event: Piece, now: float) -> None:
        count = len(event.ids)
        self.context_used += count
        self.rate.add(count, now)
        if event.channel == "thinking":
            if self._thinking_from is None:
                self._thinking_from = now
            self.thinking += count
            self.thinking_s = now - self._thinking_from
            self.phase = f"thinking {self.thinking:,}"
        else:
            self.answer += count
            rate = f"{self.rate.value:.1f} tok/s " if self.rate.value else ""
            self.phase = f"gen {rate}{self.answer:,}"

    def _round(self, event: DraftRound) -> None:
        self.depth = event.depth
        self.drafting = bool(event.depth or event.proposed or self._rounds)
        if event.proposed:
            self._rounds.append((event.proposed, event.accepted))
            while sum(proposed for proposed, _ in self._rounds) - self._rounds[0][0] >= DRAFT_WINDOW:
                self._rounds.popleft()

    def line(self) -> str:
        """All fields as one line of text."""
        return " | ".join(text for text, _ in self.fields())

    def fields(self) -> list[tuple[str, str]]:
        """style: "", "warning" or "error" (words say the same)."""
        found = [("stopping" if self.stopping and self.running else self.phase, "error" if self.phase == "error" else "")]
        if self.context_limit:
            used = self.context_used + self.forecast
            share = used / self.context_limit
            text = f"ctx {used:,}/{self.context_limit:,} {100 * share:.0f}%"
            style = ""
            if share >= FULL_SHARE:
                text, style = text + " full", "error"
            elif share >= WARN_SHARE:
                text, style = text + " near limit", "warning"
            found.append((text, style))
        if self.cached is not None:
            found.append((f"cached {self.cached:,} +{self.prefilled:,}", ""))
        if self.running and self.drafting is not None:
            proposed = sum(count for count, _ in self._rounds)
            accepted = sum(count for _, count in self._rounds)
            share = f" · {100 * accepted / proposed:.0f}%" if proposed else ""
            found.append((f"draft {self.depth}{share}" if self.drafting else "draft off", ""))
        if self.residency:
            found.append((self.residency, ""))
        if self.memory:
            found.append((f"{self.memory[0] / 1e9:.1f}/{self.memory[1] / 1e9:.0f} GB", ""))
        if self.queued:
            # Waiting text must not be the first thing that a narrow line drops.
            found.insert(1, (f"queued {self.queued}", "warning"))
        return found


def loading_text(event: Loading) -> str:
    if event.stage == "ready":
        return "loaded"
    if event.unit == "bytes" and event.total:
        return f"loading {100 * event.done // event.total}% {size(event.done)}/{size(event.total)}"
    share = f" {event.done:,}/{event.total:,}" if event.total else ""
    return f"loading {event.stage}{share}"


def residency_text(event: Residency) -> str:
    """The tables in one word; the coldest counts."""
    states = [table.state for table in event.tables]
    if not states:
        return "engram n/a"
    for state in ("probing", "cold", "warm", "resident"):
        if state in states:
            if state == "cold":
                sampled = sum(table.sampled for table in event.tables)
                resident = sum(table.resident for table in event.tables)
                if sampled and resident:
                    return f"engram cold→warm {100 * resident // sampled}%"
            return f"engram {state}"
    return f"engram {states[0]}"
