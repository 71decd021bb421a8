"""The V4.1 trunk, from ids to logits, spelled out top to bottom.

Row-exact by layout: every row has its own fixed-width key list in chronological then ascending order, choices are sets with a tie
rule, groups are pooled and experts summed in one fixed order. So a row's bits do not depend on which rows share its call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import mlx.core as mx
import numpy as np

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.engram.fetch import Ticket
from dsv41chat.engine.engram.hashing import NgramHasher
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.kernels.routes import KernelRoutes
from dsv41chat.engine.lane import Lane, PoolSpec, RingSpec
from dsv41chat.engine.nn.attention import Attention
from dsv41chat.engine.nn.engram import Engram
from dsv41chat.engine.nn.halves import Halves
from dsv41chat.engine.nn.hyper_connection import HyperConnection, Streams, mean_of_streams, settle
from dsv41chat.engine.nn.linear import Linear, QuantizedLinear, QuantizedLookup
from dsv41chat.engine.nn.moe import MoE
from dsv41chat.engine.ops.hyper import collapse
from dsv41chat.engine.ops.norm import rms
from dsv41chat.engine.ops.rope import Frequencies, inverse_frequencies
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import LayerPlan
from dsv41chat.engine.rows import Rows
from dsv41chat.engine.trial import Trial

_POOL_BLOCK = 256


@dataclass
class Layer(Halves):
    plan: LayerPlan
    engram: Engram | None
    attn_mix: HyperConnection
    ffn_mix: HyperConnection
    attn_norm: mx.array
    ffn_norm: mx.array
    attention: Attention
    moe: MoE
    eps: float
    lagged: ClassVar[bool] = True

    @classmethod
    def load(cls, c: V41Config, source: WeightSource, plan: LayerPlan, cache_quant: bool) -> Layer:
        p = f"layers.{plan.index}"
        return cls(
            plan,
            Engram.load(c, source, plan.index) if plan.engram_slot >= 0 else None,
            HyperConnection.load(c, source, f"{p}.hc_attn"),
            HyperConnection.load(c, source, f"{p}.hc_ffn"),
            source.float32(f"{p}.attn_norm.weight"),
            source.float32(f"{p}.ffn_norm.weight"),
            Attention.load(c, source, plan, cache_quant),
            MoE.load(c, source, f"{p}.ffn", c.n_routed_experts, c.num_experts_per_tok),
            c.rms_norm_eps,
        )


@dataclass
class TrunkV41:
    """Weights and wiring; no state. Any number of lanes run on one trunk. tap_layers: layers whose entering streams drafters need.

    routes: what computes its hot operations.
    """

    config: V41Config
    plan: tuple[LayerPlan, ...]
    embed: mx.array | QuantizedLookup
    head: Linear | QuantizedLinear
    norm: mx.array
    layers: list[Layer]
    hasher: NgramHasher | None
    tables: EngramReader | None
    dtype: mx.Dtype
    tap_layers: tuple[int, ...] = ()
    frequencies: Frequencies = field(init=False)
    routes: KernelRoutes = field(default_factory=KernelRoutes)

    def __post_init__(self):
        self.frequencies = Frequencies({p.rope: inverse_frequencies(p.rope) for p in self.plan})

    def lane_specs(self) -> tuple[RingSpec | PoolSpec, ...]:
        """Windows for every layer; pools, index keys and open-group rows for the owners."""
        c, specs = self.config, []
        block = math.lcm(_POOL_BLOCK, c.candidate_block_size)
        for p in self.plan:
            specs.append(RingSpec(f"window.{p.index}", c.ring_rows, (c.head_dim,), self.dtype, window=c.sliding_window))
            if p.owns_pool:
                specs.append(PoolSpec(f"pool.{p.index}", p.ratio, (c.head_dim,), self.dtype, block))
                specs.append(PoolSpec(f"keys.{p.index}", p.ratio, (c.index_head_dim,), self.dtype, block))
                if p.ratio > 1:
                    rows = 1 << (p.ratio + c.roll_rows - 1).bit_length()
                    specs.append(RingSpec(f"raw.{p.index}", rows, (2, c.head_dim), mx.float32, group=p.ratio))
        return tuple(specs)

    def new_lane(self) -> Lane:
        return Lane(self.lane_specs(), self.config.roll_rows, self.routes.host, self.routes.replay is not None)

    def prefetch(self, known: list[int], position: int, ids: Sequence[int]) -> None:
        """Start bringing in the table rows of `ids`, which a later forward will have at `position`, after known[:position]."""
        if self.hasher is not None and len(ids) and self.tables.reads_ahead():
            self.tables.prefetch(self._addresses(known, position, np.asarray(ids, np.int64)))

    def _addresses(self, known: list[int], position: int, ids: np.ndarray) -> np.ndarray:
        return self.hasher.rows(known[max(0, position - self.hasher.lookback) : position], ids)

    def forward(
        self, lane: Lane, ids: list[int], start: int, logits_from: int | None = 0, want_taps: bool = False, ahead: Sequence[int] = ()
    ) -> Trial:
        """Rows of `ids` at positions start.. of `lane`, whose ids before `start` are the history.

        logits_from: first row whose logits are wanted, None for none. ahead: ids that will follow, for read-ahead only.
        Builds the graph; `Target.rows` evaluates it. Only where table rows are not there yet, the layers built so far are set
        running while the drive works. Raises EngramReadError.
        """
        c, ids = self.config, np.asarray(ids, np.int64)
        ticket = None
        if self.hasher is not None:
            ticket = self.tables.stage(self._addresses(lane.ids, start, ids))
            self.prefetch(lane.ids, start + len(ids), ahead)
        try:
            if self.routes.replay is not None and self.routes.replay.takes(len(ids), logits_from):
                return self.routes.replay.forward(lane, ids, start, ticket, logits_from, want_taps)
            rows = Rows(ids, start, c.sliding_window, c.ring_rows, self.frequencies, c.image_token_id, self.routes.host)
            return self.run(lane, rows, ticket, logits_from, want_taps)
        finally:
            if ticket is not None:
                ticket.cancel()

    def run(self, lane: Lane, rows: Rows, ticket: Ticket | None, logits_from: int | None, want_taps: bool) -> Trial:
        """The layers one after the other. ticket: of the rows' n-grams. Where neither logits nor taps are wanted nobody needs what the last layer
        gives; nothing but its rows in the lane is computed then."""
        (h, pre), needed = self.begin(rows.tokens), logits_from is not None or want_taps
        taps, streams = [], (h, pre, None, None, None)
        for layer in self.layers:
            tapped = want_taps and layer.plan.index in self.tap_layers
            added = layer.engram is not None and ticket is not None
            if tapped or added:
                h, pre = self.settle(*streams), streams[1]
                if added:
                    slot = layer.plan.engram_slot
                    if not rows.host and not ticket.ready(slot):
                        mx.async_eval(h, pre)
                    h = layer.engram(h, rows.table_rows(ticket, slot, self.dtype), rows.image)
                if tapped:
                    taps.append(self.tap(h))
                streams = h, pre, None, None, None
            streams = self._layer(layer, lane, rows, streams)
            if needed or layer is not self.layers[-1]:
                self.routes.set_running(layer.plan.index, streams)
        if not needed:
            return Trial.of(rows.start, rows.n, None, None, None, None)
        h, pre = self.settle(*streams), streams[1]
        logits = self.logits(h[logits_from:], pre[logits_from:]) if logits_from is not None else None
        return Trial.of(rows.start, rows.n, logits, rows.concatenate(taps, -1) if taps else None, h, pre)

    def begin(self, ids: mx.array) -> tuple[mx.array, mx.array]:
        """ids [n] -> the streams [n, S, D] that enter the first layer, all alike, and the coefficients that take the first of them."""
        streams = self.config.hc_mult
        h = mx.repeat(self.embed[ids][:, None], streams, axis=1)
        return h, mx.broadcast_to(mx.array([1.0] + [0.0] * (streams - 1)), h.shape[:2])

    def settle(self, *streams: mx.array | None) -> mx.array:
        """`Streams` with nothing pending: h."""
        return settle(streams)

    def tap(self, h: mx.array) -> mx.array:
        """The mean over the streams, [n, D]."""
        return mean_of_streams(h)

    def _layer(self, layer: Layer, lane: Lane, rows: Rows, streams: Streams) -> Streams:
        """Staggered: each half collapses with the `pre` of the half before it, and spreads with its own `post` and `comb`."""
        h, x, pre, post, comb, qr, q, kv = found = layer.before(*streams, *rows.tables[layer.plan.rope])
        self.routes.begin_running(layer.plan.index, found)
        return layer.after(h, pre, layer.attention(lane, rows, x, qr, q, kv), post, comb, rows.image)

    def logits(self, h: mx.array, pre: mx.array) -> mx.array:
        """float32 [n, vocab] from the streams after the last layer and the last `pre`."""
        x = rms(collapse(h, pre), self.norm, self.config.rms_norm_eps)
        return self.head(x.astype(mx.float32))
