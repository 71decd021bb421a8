"""The V4 trunk, from ids to logits, spelled out top to bottom.

Row-exact by layout: every row has its own key list, window rows chronological, then entries ascending, of a width that follows from
the row's position; choices are sets with a tie rule, groups are pooled whole and experts summed in one fixed order. So a row's bits do
not depend on which rows share its call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import mlx.core as mx
import numpy as np

from dsv41chat.engine.config_v4 import V4Config
from dsv41chat.engine.kernels.routes import KernelRoutes
from dsv41chat.engine.lane import Lane, PoolSpec, RingSpec
from dsv41chat.engine.nn.attention_v4 import AttentionV4
from dsv41chat.engine.nn.halves import Halves
from dsv41chat.engine.nn.hyper_connection import HyperConnection, HyperHead, Streams, mean_of_streams, settle
from dsv41chat.engine.nn.linear import Linear, QuantizedLinear, QuantizedLookup
from dsv41chat.engine.nn.moe_v4 import MoEV4
from dsv41chat.engine.ops import norm, rope
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import LayerPlan
from dsv41chat.engine.rows_v4 import RowsV4
from dsv41chat.engine.trial import Trial

_POOL_BLOCK = 256


@dataclass
class LayerV4(Halves):
    plan: LayerPlan
    attn_mix: HyperConnection
    ffn_mix: HyperConnection
    attn_norm: mx.array
    ffn_norm: mx.array
    attention: AttentionV4
    moe: MoEV4
    eps: float
    lagged: ClassVar[bool] = False

    @classmethod
    def load(cls, c: V4Config, source: WeightSource, plan: LayerPlan, qat_sim: bool) -> LayerV4:
        p = f"layers.{plan.index}"
        return cls(
            plan,
            HyperConnection.load(c, source, f"{p}.hc_attn"),
            HyperConnection.load(c, source, f"{p}.hc_ffn"),
            source.float32(f"{p}.attn_norm.weight"),
            source.float32(f"{p}.ffn_norm.weight"),
            AttentionV4.load(c, source, plan, qat_sim),
            MoEV4.load(c, source, f"{p}.ffn", c.experts_of(plan.hashed), plan.hashed),
            c.rms_norm_eps,
        )


@dataclass
class TrunkV4:
    """Weights and wiring; no state. Any number of lanes run on one trunk.

    tap_layers: layers whose output drafters need (DSpark); without any, taps are the streams after the last layer (MTP).
    routes: what computes its hot operations.
    """

    config: V4Config
    plan: tuple[LayerPlan, ...]
    embed: mx.array | QuantizedLookup
    head_mix: HyperHead
    norm: mx.array
    head: Linear | QuantizedLinear
    layers: list[LayerV4]
    dtype: mx.Dtype
    tap_layers: tuple[int, ...] = ()
    frequencies: rope.Frequencies = field(init=False)
    routes: KernelRoutes = field(default_factory=KernelRoutes)
    tables = None

    def __post_init__(self):
        self.frequencies = rope.Frequencies({p.rope: rope.inverse_frequencies(p.rope) for p in self.plan})

    def lane_specs(self) -> tuple[RingSpec | PoolSpec, ...]:
        """Windows for every layer; entries and raw rows for compressed ones; keys and their raw rows where there is an indexer."""
        c, specs = self.config, []
        for p in self.plan:
            specs.append(RingSpec(f"window.{p.index}", c.ring_rows, (c.head_dim,), self.dtype, window=c.sliding_window))
            widths = {"pool": ("raw", c.head_dim)} if p.owns_pool else {}
            widths |= {"keys": ("raw_keys", c.index_head_dim)} if p.scores else {}
            for entries, (raw, width) in widths.items():
                halves = 2 if p.overlap else 1
                rows = 1 << (halves * p.ratio + c.roll_rows - 1).bit_length()
                specs.append(PoolSpec(f"{entries}.{p.index}", p.ratio, (width,), self.dtype, _POOL_BLOCK))
                lead = p.ratio if p.overlap else 0
                specs.append(RingSpec(f"{raw}.{p.index}", rows, (2, halves * width), mx.float32, group=p.ratio, overlap=lead))
        return tuple(specs)

    def new_lane(self) -> Lane:
        return Lane(self.lane_specs(), self.config.roll_rows, self.routes.host, self.routes.replay is not None)

    def prefetch(self, known: list[int], position: int, ids: Sequence[int]) -> None:
        """Nothing: this family reads no tables."""

    def forward(
        self, lane: Lane, ids: list[int], start: int, logits_from: int | None = 0, want_taps: bool = False, ahead: Sequence[int] = ()
    ) -> Trial:
        """Rows of `ids` at positions start.. of `lane`, whose ids before `start` are the history.

        logits_from: first row whose logits are wanted, None for none. ahead: not used by this family.
        Builds the graph; `Target.rows` evaluates it.
        """
        c, ids = self.config, np.asarray(ids, np.int64)
        if self.routes.replay is not None and self.routes.replay.takes(len(ids), logits_from):
            return self.routes.replay.forward(lane, ids, start, None, logits_from, want_taps)
        rows = RowsV4(ids, start, c.sliding_window, c.ring_rows, self.frequencies, self.routes.host)
        return self.run(lane, rows, None, logits_from, want_taps)

    def run(self, lane: Lane, rows: RowsV4, ticket: None, logits_from: int | None, want_taps: bool) -> Trial:
        """The layers one after the other. ticket: of no use here. Where neither logits nor taps are wanted nobody needs what the last layer gives;
        nothing but its rows in the lane is computed then."""
        h, needed = self.begin(rows.tokens), logits_from is not None or want_taps
        taps, streams = [], (h, None, None, None, None)
        for layer in self.layers:
            streams = self._layer(layer, lane, rows, streams)
            if needed or layer is not self.layers[-1]:
                self.routes.set_running(layer.plan.index, streams)
            if want_taps and layer.plan.index in self.tap_layers:
                h = self.settle(*streams)
                taps.append(self.tap(h))
                streams = h, None, None, None, None
        if not needed:
            return Trial.of(rows.start, rows.n, None, None, None, None)
        h = self.settle(*streams)
        if want_taps and not self.tap_layers:
            taps.append(h.reshape(rows.n, -1))
        logits = self.logits(h[logits_from:]) if logits_from is not None else None
        return Trial.of(rows.start, rows.n, logits, rows.concatenate(taps, -1) if taps else None, h, None)

    def begin(self, ids: mx.array) -> mx.array:
        """ids [n] -> the streams [n, S, D] that enter the first layer, all alike."""
        return mx.repeat(self.embed[ids][:, None], self.config.hc_mult, axis=1)

    def settle(self, *streams: mx.array | None) -> mx.array:
        """`Streams` with nothing pending: h."""
        return settle(streams)

    def tap(self, h: mx.array) -> mx.array:
        """The mean over the streams, [n, D]."""
        return mean_of_streams(h)

    def _layer(self, layer: LayerV4, lane: Lane, rows: RowsV4, streams: Streams) -> Streams:
        """Each half collapses the streams that enter it with its own `pre`, and spreads its output over the same streams."""
        h, x, pre, post, comb, qr, q, kv = found = layer.before(*streams, *rows.tables[layer.plan.rope])
        self.routes.begin_running(layer.plan.index, found)
        return layer.after(h, pre, layer.attention(lane, rows, x, qr, q, kv), post, comb, rows.tokens)

    def logits(self, h: mx.array) -> mx.array:
        """float32 [n, vocab] from the streams after the last layer."""
        return self.head(norm.rms(self.head_mix(h), self.norm, self.config.rms_norm_eps)).astype(mx.float32)
