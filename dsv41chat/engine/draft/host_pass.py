"""A DSpark pass where the trunk's operations are calls of a CPU library: between them there are numpy arrays and no MLX graph.

The formulas are those of `DSparkModel`. On few rows every MLX primitive costs more than the numpy call in its place, and each library
call in the middle of a graph would cut it; a pass that cost as much as a plain step costs half of one like this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.draft.base import check_spread, host_choice
from dsv41chat.engine.draft.rings import DraftRings
from dsv41chat.engine.draft.stage import Stage
from dsv41chat.engine.kernels.blas.attention import rotate, rotation
from dsv41chat.engine.kernels.blas.streams import collapse, norm, spread
from dsv41chat.engine.kernels.routes import to_host, to_mlx
from dsv41chat.engine.ops.rope import host_table
from dsv41chat.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from dsv41chat.engine.draft.dspark import DSparkModel


def call(operation: Callable, *args: Any) -> Any:
    """An operation of a drafter with numpy arrays in and out, whatever computes it."""
    direct = getattr(operation, "direct", None)
    return direct(*args) if direct is not None else to_host(operation(*map(to_mlx, args)))


class HostPass:
    """`context` and `propose` of a model, in numpy, all float32."""

    def __init__(self, model: DSparkModel):
        m = self.model = model
        self.main_norm, self.norm, self.confidence = np.asarray(m.main_norm), np.asarray(m.norm), np.asarray(m.confidence)
        self.stage_norms = [(np.asarray(s.attn_norm), np.asarray(s.ffn_norm), np.asarray(s.attention.sink)) for s in m.stages]
        self.markov = np.asarray(m.markov_embed.astype(mx.float32))
        self.embed = np.asarray(m.embed) if isinstance(m.embed, mx.array) else None

    def context(self, taps: mx.array, first: int) -> list[np.ndarray]:
        """taps [r, layers * D] of rows at first .. -> per stage the ring rows [r, C]."""
        m = self.model
        x = norm(call(m.main_proj, np.asarray(taps)), self.main_norm, m.eps)
        table = host_table(m.frequencies, first + np.arange(len(x)))
        return [call(stage.attention.latent, x, table) for stage in m.stages]

    def extend(self, taps: mx.array, first: int, rings: DraftRings) -> None:
        """As `DSparkModel.extend`."""
        rings.write(first, self.context(taps, first))

    def forward(self, pending: int, n: int, rings: DraftRings) -> np.ndarray:
        """z [block, D], as `DSparkModel.forward`."""
        m = self.model
        ids = np.array([pending] + [m.noise] * (m.block - 1))
        table = host_table(m.frequencies, n + np.arange(m.block))
        slots, keep = rings.slots(np.arange(n - m.window, n), n if rings.end == n else 0, m.block)
        keep = keep[None]
        rows = self.embed[ids] if self.embed is not None else to_host(m.embed[mx.array(ids)])
        h = np.repeat(rows[:, None], m.streams, axis=1)
        carry = np.zeros(h.shape[:2], np.float32)
        carry[:, 0] = 1
        for stage, ring, (attn_norm, ffn_norm, sink) in zip(m.stages, rings.buffers.values(), self.stage_norms):
            pre, post, comb = call(stage.attn_mix, h)
            x = norm(collapse(h, carry if m.lagged else pre), attn_norm, m.eps)
            keys = np.concatenate([ring[slots], call(stage.attention.latent, x, table)])[None]
            h, carry = spread(attend(stage, x, keys, keep, sink, table), h, post, comb), pre
            pre, post, comb = call(stage.ffn_mix, h)
            x = norm(collapse(h, carry if m.lagged else pre), ffn_norm, m.eps)
            h, carry = spread(call(stage.moe.experts, x, *call(stage.moe.choose, x, None)), h, post, comb), pre
        return collapse(h, carry) if m.lagged else call(m.collapse_head, h)

    def propose(self, pending: int, n: int, want: int, rings: DraftRings, sampling: SamplingParams) -> tuple[list[int], np.ndarray, np.ndarray]:
        """(ids of `want` guesses, logits float32 [want, vocab], confidence logits float32 [want])."""
        m = self.model
        z = self.forward(pending, n, rings)[:want]
        logits = np.array(call(m.head, norm(z, self.norm, m.eps)))
        ids, memory, prev = [], [], pending
        for j in range(want):
            memory.append(self.markov[prev])
            logits[j] += call(m.markov_head, memory[-1][None])[0]
            prev = host_choice(logits[j], n + 1 + j, sampling)
            ids.append(prev)
        check_spread(np.ptp(logits, axis=-1), n)
        return ids, logits, np.concatenate([z, np.stack(memory)], axis=-1) @ self.confidence


def attend(stage: Stage, x: np.ndarray, keys: np.ndarray, keep: np.ndarray, sink: np.ndarray, table) -> np.ndarray:
    """`Stage.attend`."""
    w, turn = stage.attention, rotation(table)
    q = call(w.query, x)[1]
    q = rotate(norm(q, None, w.eps) if w.head_norm else np.array(q), turn)
    o = call(stage.core, q, keys, keep, sink, w.head_dim**-0.5)
    return call(w.output, rotate(np.array(o, np.float32), np.conj(turn)))
