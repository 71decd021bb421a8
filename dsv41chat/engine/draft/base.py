"""What a drafter is. Drafting changes how many rows a round verifies, never which token comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import EngineError
from dsv41chat.engine.sampling import SamplingParams, choose

# Of a `Trial`: MLX's, or the bits of bfloat16 numbers in numpy.
Taps = mx.array | np.ndarray
# A sampled guess is drawn among this many best candidates; it only has to agree with the target often.
_DRAFT_CANDIDATES = 64


@dataclass(frozen=True)
class Proposal:
    """ids: guesses for the positions after the pending token, at most as many as were wanted. confidence: logits, or None."""

    ids: tuple[int, ...]
    confidence: tuple[float, ...] | None = None


class Drafter(Protocol):
    """kind: mtp, dspark or none. block: most proposals of one pass. window: how many rows before a position matter to it.
    needs_taps: whether verify rows must carry taps."""

    kind: str
    block: int
    window: int
    needs_taps: bool

    def reset(self) -> None:
        """Forget everything: the lane starts again."""

    def ingest(self, taps: Taps | None, first_pos: int, next_tokens: Sequence[int]) -> None:
        """Committed rows at first_pos..: their taps and the token that follows each row. Cheap: the work waits for `propose`."""

    def propose(self, pending: int, n: int, want: int, sampling: SamplingParams) -> Proposal:
        """Guesses for positions n + 1.. after `pending`, the token chosen for position n."""

    def truncate(self, n: int) -> None:
        """Only rows below n remain."""

    def state(self) -> dict[str, mx.array]:
        """Arrays that `load` needs to go on at the same position."""

    def load(self, state: dict[str, mx.array], n: int) -> None:
        """Inverse of `state` at position n."""


class PlainDrafter:
    """Proposes nothing: plain decode is the drafted round of depth 0."""

    kind = "none"
    block = 0
    window = 0
    needs_taps = False

    def reset(self) -> None:
        return

    def ingest(self, taps: Taps | None, first_pos: int, next_tokens: Sequence[int]) -> None:
        return

    def propose(self, pending: int, n: int, want: int, sampling: SamplingParams) -> Proposal:
        return Proposal(())

    def truncate(self, n: int) -> None:
        return

    def state(self) -> dict[str, mx.array]:
        return {}

    def load(self, state: dict[str, mx.array], n: int) -> None:
        return


def draft_choice(row: mx.array, position: int, sampling: SamplingParams) -> mx.array:
    """The guess for `position` from a drafter's logits row [1, vocab]: int [1], on the device where the turn is greedy.

    Sampled turns share the target's noise of that position, so that drafter and target agree more often than by chance.
    """
    return mx.argmax(row, axis=-1) if sampling.temperature == 0 else mx.array([host_choice(np.array(row)[0], position, sampling)])


def host_choice(row: np.ndarray, position: int, sampling: SamplingParams) -> int:
    """`draft_choice` of a row [vocab] on the host."""
    return int(np.argmax(row)) if sampling.temperature == 0 else choose(row, position, {}, sampling, _DRAFT_CANDIDATES)


def logit_spread(logits: mx.array) -> mx.array:
    """float32 [n]: largest minus smallest logit of each row, for `check_spread`."""
    return mx.max(logits, axis=-1) - mx.min(logits, axis=-1)


def check_spread(spread: mx.array | np.ndarray, n: int) -> None:
    """Raise EngineError when a row of a drafter's logits was all equal or not finite: buffers of a failed device read like that."""
    found = np.array(spread)
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise EngineError(
            f"the drafter's logits at position {n} are all equal or not finite; the device has failed or its weights are damaged",
            "restart the program; --draft off answers without the drafter",
        )


class RowQueue:
    """Committed rows that a drafter has not worked on yet. Only the newest `window` can matter, so no more are kept."""

    def __init__(self, window: int):
        self.window = window
        self.clear()

    def clear(self) -> None:
        self.parts: list[Taps] = []
        self.tokens: list[int] = []
        self.first = 0

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)

    def add(self, rows: Taps, first: int, tokens: Sequence[int]) -> None:
        """rows [r, ...] at positions first ..; rows that do not follow the ones held replace them."""
        if not len(tokens):
            return
        if not self.tokens or first != self.end:
            self.clear()
            self.first = first
        self.parts.append(rows)
        self.tokens += [int(t) for t in tokens]
        excess = len(self.tokens) - self.window
        while excess > 0 and self.parts[0].shape[0] <= excess:
            dropped = self.parts.pop(0).shape[0]
            self.first, excess = self.first + dropped, excess - dropped
            del self.tokens[:dropped]
        if excess > 0:
            self.parts[0] = self.parts[0][excess:]
            self.first += excess
            del self.tokens[:excess]

    def truncate(self, n: int) -> None:
        keep = max(0, n - self.first)
        if keep >= len(self.tokens):
            return
        del self.tokens[keep:]
        parts, left = [], keep
        for part in self.parts:
            if left > 0:
                parts.append(part[:left])
                left -= part.shape[0]
        self.parts = parts

    def take(self) -> tuple[Taps, int, list[int]] | None:
        """(rows, first position, tokens) of everything held, which is then gone; None when there is nothing. The rows are bits in numpy where
        all of them came so."""
        if not self.tokens:
            return None
        if all(isinstance(part, np.ndarray) for part in self.parts):
            rows = np.concatenate(self.parts)
        else:
            parts = list(map(numbers, self.parts))
            rows = mx.concatenate(parts) if len(parts) > 1 else parts[0]
        out = rows, self.first, self.tokens
        self.clear()
        return out


def numbers(taps: Taps) -> mx.array:
    """Taps as an MLX array of numbers."""
    return mx.array(taps).view(mx.bfloat16) if isinstance(taps, np.ndarray) else taps
