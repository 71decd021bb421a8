"""MTP: the next-token block of the first V4 release, chained up to `block` guesses.

The entry of position p joins the trunk's streams h_p with the token that follows, and its logits predict the token after that.
Committed entries are made from the trunk's own streams. Beyond the first guess, the block's own output stands for the streams that
the trunk has not made yet; such entries are written past the committed ones and never seen again. Source: spec drafting, section 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dsv41chat.engine.draft.base import Proposal, RowQueue, Taps, check_spread, draft_choice, logit_spread, numbers
from dsv41chat.engine.draft.rings import DraftRings
from dsv41chat.engine.draft.stage import Stage
from dsv41chat.engine.nn.hyper_connection import HyperHead
from dsv41chat.engine.nn.linear import Linear, QuantizedLinear
from dsv41chat.engine.ops.hyper import collapse, expand
from dsv41chat.engine.ops.norm import rms
from dsv41chat.engine.ops.rope import rope_table
from dsv41chat.engine.sampling import SamplingParams


@dataclass
class MTPModel:
    """embed and head are the trunk's; collapse_head and norm are the block's own. block: most guesses of a chain."""

    stage: Stage
    enorm: mx.array
    hnorm: mx.array
    e_proj: Linear | QuantizedLinear
    h_proj: Linear | QuantizedLinear
    collapse_head: HyperHead
    norm: mx.array
    embed: mx.array
    head: Linear | QuantizedLinear
    frequencies: np.ndarray
    block: int
    window: int
    streams: int
    eps: float
    dtype: mx.Dtype

    def entries(self, h: mx.array, tokens: mx.array, first: int, rings: DraftRings) -> mx.array:
        """Entries of positions first ..: h [r, S, D] streams, tokens int32 [r] that follow them -> streams after the block [r, S, D].

        Each row sees the window that ends at its own position; its row is written to the ring before it is read.
        """
        r = h.shape[0]
        e = self.e_proj(rms(self.embed[tokens], self.enorm, self.eps))
        x = e[:, None] + self.h_proj(rms(h, self.hnorm, self.eps).reshape(r * self.streams, -1)).reshape(h.shape)
        stage, at = self.stage, first + np.arange(r)
        table = rope_table(self.frequencies, at)
        pre, post, comb = stage.attn_mix(x)
        y = rms(collapse(x, pre), stage.attn_norm, self.eps)
        rings.write(first, [stage.latent(y, table)])
        slots, present = rings.slots(at[:, None] + np.arange(1 - self.window, 1), first + r)
        x = expand(stage.attend(y, rings.buffers["ring.0"][slots], present, table), x, post, comb)
        pre, post, comb = stage.ffn_mix(x)
        return expand(stage.moe(rms(collapse(x, pre), stage.ffn_norm, self.eps), None), x, post, comb)

    def logits(self, h: mx.array) -> mx.array:
        """float32 [r, vocab] from streams after the block [r, S, D]."""
        return self.head(rms(self.collapse_head(h), self.norm, self.eps)).astype(mx.float32)


class MTPDrafter:
    """One conversation's ring on an MTPModel.

    last: (streams [1, S, D], token) of the newest committed entry, where the chain begins; the token is the pending one that the
    entry was made for. An entry whose following token changes in a rollback stays as context: it is one row of a window.
    """

    kind = "mtp"
    needs_taps = True

    def __init__(self, model: MTPModel):
        self.model, self.block, self.window = model, model.block, model.window
        self.rings = DraftRings(1, model.window, model.stage.width, model.dtype)
        self.queue = RowQueue(model.window)
        self.last: tuple[mx.array, int] | None = None

    def reset(self) -> None:
        self.queue.clear()
        self.rings.reset()
        self.last = None

    def ingest(self, taps: Taps | None, first_pos: int, next_tokens: Sequence[int]) -> None:
        """taps [r, S * D]: the streams after the trunk's last layer."""
        self.queue.add(taps, first_pos, next_tokens)

    def propose(self, pending: int, n: int, want: int, sampling: SamplingParams) -> Proposal:
        """Nothing where the entry before position n is not known: after a reset, or after a stored state without it."""
        want = min(want, self.block)
        if want < 1 or n == 0:
            return Proposal(())
        self.flush()
        if self.last is None or self.rings.end != n or self.last[1] != pending:
            return Proposal(())
        stream, ids, spreads = self.last[0], [], []
        for j in range(want):
            logits = self.model.logits(stream)
            ids.append(draft_choice(logits, n + 1 + j, sampling))
            spreads.append(logit_spread(logits))
            if j + 1 < want:
                stream = self.model.entries(stream, ids[-1], n + j, self.rings)
        chosen, spread = mx.concatenate(ids), mx.concatenate(spreads)
        mx.eval(chosen, spread, list(self.rings.buffers.values()))
        check_spread(spread, n)
        return Proposal(tuple(np.array(chosen).tolist()))

    def flush(self) -> None:
        """Make the entries of all committed rows that wait: they are on their way, and the device works while a chain is built."""
        waiting = self.queue.take()
        if waiting is None:
            return
        rows, first, tokens = waiting
        self.rings.begin(first)
        h = numbers(rows).reshape(len(tokens), self.model.streams, -1).astype(self.model.dtype)
        stream = self.model.entries(h, mx.array(np.array(tokens, np.int32)), first, self.rings)[-1:]
        self.rings.advance(first + len(tokens))
        mx.async_eval(stream, list(self.rings.buffers.values()))
        self.last = stream, tokens[-1]

    def truncate(self, n: int) -> None:
        if n < self.rings.end:
            self.last = None
        self.queue.truncate(n)
        self.rings.truncate(n)

    def state(self) -> dict[str, mx.array]:
        self.flush()
        out = self.rings.state()
        if self.last is not None:
            mx.eval(self.last[0])
            out |= {"draft.last": self.last[0], "draft.token": mx.array([self.last[1]])}
        return out

    def load(self, state: dict[str, mx.array], n: int) -> None:
        self.queue.clear()
        self.last = None
        self.rings.load(state, n)
        if self.rings.valid_from < self.rings.end and "draft.last" in state:
            self.last = state["draft.last"], int(state["draft.token"].item())
