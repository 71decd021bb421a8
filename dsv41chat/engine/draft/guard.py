"""A drafter that fails must not take the answer with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import mlx.core as mx

from dsv41chat.engine.draft.base import Drafter, PlainDrafter, Proposal, Taps
from dsv41chat.engine.sampling import SamplingParams

_log = logging.getLogger(__name__)


class GuardedDrafter:
    """Any exception of the drafter turns it off for this conversation, with one line in the log; decode goes on plain.

    fault: that line, or None. Drafting never decides a token, so nothing that was answered is in doubt.
    """

    def __init__(self, inner: Drafter):
        self._inner: Drafter = inner
        self.fault: str | None = None

    kind = property(lambda self: self._inner.kind)
    block = property(lambda self: self._inner.block)
    window = property(lambda self: self._inner.window)
    needs_taps = property(lambda self: self._inner.needs_taps)

    def _try(self, call: Callable[[], object], otherwise: object) -> object:
        try:
            return call()
        except Exception as error:
            self.fault = f"drafting is off for this conversation: {type(error).__name__}: {error}"
            _log.warning("%s", self.fault)
            self._inner = PlainDrafter()
            return otherwise

    def reset(self) -> None:
        self._try(lambda: self._inner.reset(), None)

    def ingest(self, taps: Taps | None, first_pos: int, next_tokens: Sequence[int]) -> None:
        self._try(lambda: self._inner.ingest(taps, first_pos, next_tokens), None)

    def propose(self, pending: int, n: int, want: int, sampling: SamplingParams) -> Proposal:
        return self._try(lambda: self._inner.propose(pending, n, want, sampling), Proposal(()))

    def truncate(self, n: int) -> None:
        self._try(lambda: self._inner.truncate(n), None)

    def state(self) -> dict[str, mx.array]:
        return self._try(lambda: self._inner.state(), {})

    def load(self, state: dict[str, mx.array], n: int) -> None:
        self._try(lambda: self._inner.load(state, n), None)
