"""DSpark: a few stages that read the trunk's taps and propose a whole block of tokens in one pass.

Weights belong to the engine (`DSparkModel`), rings to a conversation (`DSparkDrafter`). The releases differ in two places, which
the model holds as data: whether a sublayer collapses the streams with its own `pre` or with the one of the sublayer before it
(`lagged`, V4.1), and whether the last collapse is learned (V4). Source: spec drafting, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from dsv41chat.engine.draft.base import Proposal, RowQueue, Taps, check_spread, draft_choice, logit_spread, numbers
from dsv41chat.engine.draft.host_pass import HostPass
from dsv41chat.engine.draft.rings import DraftRings
from dsv41chat.engine.draft.stage import Stage
from dsv41chat.engine.nn.hyper_connection import HyperHead
from dsv41chat.engine.nn.linear import Linear, QuantizedLinear
from dsv41chat.engine.ops.hyper import collapse, expand
from dsv41chat.engine.ops.norm import rms
from dsv41chat.engine.ops.rope import rope_table
from dsv41chat.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from dsv41chat.engine.kernels.replay_draft import DraftReplay


@dataclass
class DSparkModel:
    """block: rows of one pass. noise: the token id of the rows after the pending one. frequencies: of the stages' rope.

    embed and head are the trunk's, and so is head_dtype, the precision of the head's input. collapse_head: the learned last
    collapse, None where `lagged`. host: the trunk's operations pass numpy arrays, so a pass does too (`host_pass`).
    replay: plays recorded passes, None where each is built anew.
    """

    stages: list[Stage]
    main_proj: Linear | QuantizedLinear
    main_norm: mx.array
    norm: mx.array
    markov_embed: mx.array
    markov_head: Linear
    confidence: mx.array
    embed: mx.array
    head: Linear
    frequencies: np.ndarray
    block: int
    noise: int
    window: int
    streams: int
    eps: float
    lagged: bool
    collapse_head: HyperHead | None
    head_dtype: mx.Dtype
    dtype: mx.Dtype
    host: bool = False
    replay: DraftReplay | None = None

    def context(self, taps: mx.array, first: int) -> list[mx.array]:
        """taps [r, layers * D] of rows at first .. -> per stage the ring rows [r, C]."""
        x = rms(self.main_proj(taps.astype(self.dtype)), self.main_norm, self.eps)
        table = rope_table(self.frequencies, first + np.arange(taps.shape[0]))
        return [stage.latent(x, table) for stage in self.stages]

    def extend(self, taps: Taps, first: int, rings: DraftRings) -> None:
        """Put the `context` of committed rows into their rings."""
        rings.write(first, self.context(numbers(taps), first))

    def base(self, z: mx.array) -> mx.array:
        """z [n, D] -> the head's logits float32 [n, vocab], before the Markov chain."""
        return self.head(rms(z, self.norm, self.eps).astype(self.head_dtype)).astype(mx.float32)

    def forward(self, pending: int, n: int, rings: DraftRings) -> mx.array:
        """One pass over [pending, noise, ...] at positions n ..: the collapsed streams z [block, D], before the last norm.

        Every block row sees the ring rows of n - window .. n - 1 and all block rows: within a block nothing is causal.
        """
        ids = mx.array([pending] + [self.noise] * (self.block - 1))
        at = n + np.arange(self.block)
        table = rope_table(self.frequencies, at)
        slots, keep = rings.slots(np.arange(n - self.window, n), n if rings.end == n else 0, self.block)
        keep = keep[None]
        h = mx.repeat(self.embed[ids][:, None], self.streams, axis=1)
        carry = mx.broadcast_to(mx.array([1.0] + [0.0] * (self.streams - 1)), h.shape[:2]) if self.lagged else None
        for stage, ring in zip(self.stages, rings.buffers.values()):
            pre, post, comb = stage.attn_mix(h)
            x = rms(collapse(h, carry if self.lagged else pre), stage.attn_norm, self.eps)
            keys = mx.concatenate([ring[slots], stage.latent(x, table)])[None]
            h = expand(stage.attend(x, keys, keep, table), h, post, comb)
            carry = pre
            pre, post, comb = stage.ffn_mix(h)
            y = stage.moe(rms(collapse(h, carry if self.lagged else pre), stage.ffn_norm, self.eps), None)
            h, carry = expand(y, h, post, comb), pre
        return collapse(h, carry) if self.lagged else self.collapse_head(h)

    def propose(self, pending: int, n: int, want: int, rings: DraftRings, sampling: SamplingParams) -> tuple[list[int], mx.array, mx.array]:
        """(ids of `want` guesses, logits float32 [want, vocab], confidence logits float32 [want])."""
        z = self.forward(pending, n, rings)[:want]
        base = self.base(z)
        prev, ids, rows, memory = mx.array([pending]), [], [], []
        for j in range(want):
            m = self.markov_embed[prev].astype(mx.float32)
            # A slice: an index would copy the row.
            row = base[j : j + 1] + self.markov_head(m)
            prev = draft_choice(row, n + 1 + j, sampling)
            ids.append(prev)
            rows.append(row)
            memory.append(m)
        logits = mx.concatenate(rows)
        confidence = mx.concatenate([z.astype(mx.float32), mx.concatenate(memory)], axis=-1) @ self.confidence
        chosen, spread = mx.concatenate(ids), logit_spread(logits)
        mx.eval(chosen, confidence, spread)
        check_spread(spread, n)
        return np.array(chosen).tolist(), logits, confidence


class DSparkDrafter:
    """One conversation's rings on a DSparkModel. Committed rows wait in a queue until a pass needs them."""

    kind = "dspark"
    needs_taps = True

    def __init__(self, model: DSparkModel):
        self.model, self.block, self.window = model, model.block, model.window
        put = None if model.replay is None else model.replay.put
        self.rings = DraftRings(len(model.stages), model.window, model.stages[0].width, model.dtype, model.host, put)
        self.compute: DSparkModel | HostPass | DraftReplay = model.replay or (HostPass(model) if model.host else model)
        self.queue = RowQueue(model.window)

    def reset(self) -> None:
        self.queue.clear()
        self.rings.reset()

    def ingest(self, taps: Taps | None, first_pos: int, next_tokens: Sequence[int]) -> None:
        self.queue.add(taps, first_pos, next_tokens)

    def propose(self, pending: int, n: int, want: int, sampling: SamplingParams) -> Proposal:
        """Nothing at n = 0 (no committed row) or after a token that the Markov table does not know."""
        want = min(want, self.block)
        if want < 1 or n == 0 or pending >= self.model.markov_embed.shape[0]:
            return Proposal(())
        self.flush()
        ids, _, confidence = self.compute.propose(pending, n, want, self.rings, sampling)
        return Proposal(tuple(ids), tuple(np.array(confidence).tolist()))

    def flush(self) -> None:
        """Bring the rings up to the last committed row."""
        waiting = self.queue.take()
        if waiting is None:
            return
        taps, first, tokens = waiting
        self.rings.begin(first)
        self.compute.extend(taps, first, self.rings)
        self.rings.advance(first + len(tokens))

    def truncate(self, n: int) -> None:
        self.queue.truncate(n)
        self.rings.truncate(n)

    def state(self) -> dict[str, mx.array]:
        self.flush()
        return self.rings.state()

    def load(self, state: dict[str, mx.array], n: int) -> None:
        self.queue.clear()
        self.rings.load(state, n)
