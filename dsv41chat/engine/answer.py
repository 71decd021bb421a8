"""`Answer`: what has been emitted so far, as ids, as text per channel, and whether it must end here."""

from __future__ import annotations

from collections import Counter

import numpy as np

from dsv41chat.engine.chat.encode import EncodedPrompt
from dsv41chat.engine.chat.stream_parser import Delta, StreamParser
from dsv41chat.engine.chat.tokenizer import ChatTokenizer, stop_ids
from dsv41chat.engine.events import Piece

LOOP_WINDOW, LOOP_PERIODS = 256, 64


class LoopDetector:
    """True once the last LOOP_WINDOW ids repeat with one period of at most LOOP_PERIODS. A pure function of the ids fed."""

    def __init__(self):
        self._recent = np.full(LOOP_PERIODS, -1, np.int64)
        self._runs = np.zeros(LOOP_PERIODS, np.int64)
        self._needed = LOOP_WINDOW - np.arange(1, LOOP_PERIODS + 1)
        self._count = 0

    def feed(self, token: int) -> bool:
        self._runs = np.where(self._recent == token, self._runs + 1, 0)
        self._recent = np.concatenate([[token], self._recent[:-1]])
        self._count += 1
        return self._count >= LOOP_WINDOW and bool((self._runs >= self._needed).any())


class StopStrings:
    """Answer text up to the first stop string. Text that could still begin one is held back."""

    def __init__(self, stops: tuple[str, ...]):
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """The part of everything fed so far that may now be shown and has not been."""
        if self.hit or not self._stops:
            return "" if self.hit else text
        held = self._held + text
        found = [(at, -len(s)) for s in self._stops if (at := held.find(s)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return held[: min(found)[0]]
        keep = max((k for s in self._stops for k in range(min(len(s) - 1, len(held)), 0, -1) if held.endswith(s[:k])), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return "" if self.hit else held


class Answer:
    """Feed chosen ids one by one; each is final. `take` hands out the pieces since the last call.

    A stop id is emitted as the end: it counts, and is neither parsed nor shown. counts: of every emitted id, for the penalties.
    budget: ids in all; answer_budget: ids after the thinking part, None without such a limit.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        prompt: EncodedPrompt,
        stops: tuple[str, ...],
        budget: int,
        loop_stop: bool,
        answer_budget: int | None = None,
    ):
        self._parser = StreamParser(tokenizer, prompt.family, prompt.start, prompt.tools, prompt.opened)
        eos, defensive = stop_ids(tokenizer, prompt.family)
        self._stop_ids = defensive | {eos}
        self._strings = StopStrings(stops)
        self._loop = LoopDetector() if loop_stop else None
        self._budget, self._answer_budget = budget, answer_budget
        self._pieces: list[Piece] = []
        self.ids: list[int] = []
        self.counts: Counter[int] = Counter()
        self.texts = {"thinking": "", "answer": ""}
        self.thinking_tokens = 0

    @property
    def remaining(self) -> int:
        left = self._budget - len(self.ids)
        if self._answer_budget is None or self._parser.channel == "thinking":
            return left
        return min(left, self._answer_budget - (len(self.ids) - self.thinking_tokens))

    @property
    def reasoning_ids(self) -> tuple[int, ...]:
        return self._parser.reasoning_ids

    @property
    def body_ids(self) -> tuple[int, ...]:
        return self._parser.body_ids

    def emit(self, token: int) -> str | None:
        """Take one token; answers stop, stop_string, loop or length when emission ends with it, else None."""
        channel = self._parser.channel
        self.ids.append(token)
        self.counts[token] += 1
        self.thinking_tokens += channel == "thinking"
        if token in self._stop_ids:
            self._add(channel, "", (token,))
            return "stop"
        shown = False
        for event in self._parser.feed(token):
            if isinstance(event, Delta):
                self._add(event.channel, self._visible(event), () if shown else (token,))
                shown = True
        if not shown:
            self._add(channel, "", (token,))
        if self._strings.hit:
            return "stop_string"
        if self._parser.finished:
            return "stop"
        if self._loop is not None and self._loop.feed(token):
            return "loop"
        return "length" if self.remaining <= 0 else None

    def finish(self, reason: str) -> None:
        """No more tokens: release what was held back."""
        for event in self._parser.finish(reason):
            if isinstance(event, Delta):
                self._add(event.channel, self._visible(event), ())
        self._add("answer", self._strings.finish(), ())

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _visible(self, event: Delta) -> str:
        return self._strings.feed(event.text) if event.channel == "answer" else event.text

    def _add(self, channel: str, text: str, ids: tuple[int, ...]) -> None:
        self.texts[channel] += text
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.channel == channel:
            self._pieces[-1] = Piece(channel, last.text + text, last.ids + ids)
        elif text or ids:
            self._pieces.append(Piece(channel, text, ids))
