"""What a drafter is. Drafting changes how many rows a round verifies, never which token comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from dsv41chat.engine.sampling import SamplingParams


@dataclass(frozen=True)
class Proposal:
    """ids: guesses for the positions after the pending token, at most as many as were wanted. confidence: logits, or None."""

    ids: tuple[int, ...]
    confidence: tuple[float, ...] | None = None


class Drafter(Protocol):
    """block: most proposals of one pass. needs_taps: whether verify rows must carry taps."""

    block: int
    needs_taps: bool

    def reset(self) -> None:
        """Forget everything: the lane starts again."""

    def ingest(self, taps: mx.array | None, first_pos: int, next_tokens: Sequence[int]) -> None:
        """Committed rows at first_pos..: their taps and the token that follows each row."""

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

    block = 0
    needs_taps = False

    def reset(self) -> None:
        return

    def ingest(self, taps: mx.array | None, first_pos: int, next_tokens: Sequence[int]) -> None:
        return

    def propose(self, pending: int, n: int, want: int, sampling: SamplingParams) -> Proposal:
        return Proposal(())

    def truncate(self, n: int) -> None:
        return

    def state(self) -> dict[str, mx.array]:
        return {}

    def load(self, state: dict[str, mx.array], n: int) -> None:
        return
