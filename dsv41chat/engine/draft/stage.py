"""One draft stage: a window-only, score-routed layer of either family, wired by the drafter that owns it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.config_v4 import V4Config
from dsv41chat.engine.nn.attention import AttentionWeights
from dsv41chat.engine.nn.hyper_connection import HyperConnection
from dsv41chat.engine.nn.moe import MoE
from dsv41chat.engine.nn.moe_v4 import MoEV4
from dsv41chat.engine.ops import attend, fakequant
from dsv41chat.engine.pack.source import WeightSource


@dataclass
class Stage:
    """core: the attention core, `ops.attend.attend_rows` or what a route puts in its place."""

    attn_mix: HyperConnection
    ffn_mix: HyperConnection
    attn_norm: mx.array
    ffn_norm: mx.array
    attention: AttentionWeights
    moe: MoE | MoEV4
    dtype: mx.Dtype
    core: Callable = attend.attend_rows

    @classmethod
    def load(cls, c: V41Config | V4Config, source: WeightSource, prefix: str, experts: int, picks: int, rounded: bool) -> Stage:
        """prefix: such as `mtp.0`. experts, picks: of this drafter, which differ from the trunk's in V4.1."""
        if c.family == "v4":
            moe = MoEV4.load(c, source, f"{prefix}.ffn", experts)
            rounding = partial(fakequant.v4_fp8, rope_dims=c.qk_rope_head_dim) if rounded else None
        else:
            moe = MoE.load(c, source, f"{prefix}.ffn", experts, picks, image_bias=False)
            rounding = fakequant.fp8_ue8m0 if rounded else None
        return cls(
            HyperConnection.load(c, source, f"{prefix}.hc_attn"),
            HyperConnection.load(c, source, f"{prefix}.hc_ffn"),
            source.float32(f"{prefix}.attn_norm.weight"),
            source.float32(f"{prefix}.ffn_norm.weight"),
            AttentionWeights.load(c, source, f"{prefix}.attn", rounding),
            moe,
            source.dtype,
        )

    @property
    def width(self) -> int:
        return self.attention.head_dim

    def latent(self, x: mx.array, table) -> mx.array:
        """x [n, D] -> key-and-value rows [n, C], as the trunk makes its window rows."""
        return self.attention.latent(x, table)

    def attend(self, x: mx.array, keys: mx.array, keep_mask: mx.array, table) -> mx.array:
        """x [n, D] against keys [1 or n, K, C] where keep_mask [1 or n, K] -> [n, D]."""
        w = self.attention
        _, q = w.query(x)
        o = self.core(w.turned(q, table), keys, keep_mask, w.sink, w.head_dim**-0.5)
        return w.output(w.turned_back(o, table, self.dtype))
