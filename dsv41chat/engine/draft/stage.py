"""One draft stage: the halves of a window-only layer, wired by the drafter that owns it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.nn.attention import AttentionWeights
from dsv41chat.engine.nn.hyper_connection import HyperConnection
from dsv41chat.engine.nn.moe import MoE
from dsv41chat.engine.pack.source import WeightSource


@dataclass
class Stage:
    """cache_quant: the trunk's rounding of window rows, so that ring rows are made as the trunk makes its own."""

    attn_mix: HyperConnection
    ffn_mix: HyperConnection
    attn_norm: mx.array
    ffn_norm: mx.array
    attention: AttentionWeights
    moe: MoE
    cache_quant: bool
    dtype: mx.Dtype

    @classmethod
    def load(cls, c: V41Config, source: WeightSource, prefix: str, experts: int, picks: int, cache_quant: bool) -> Stage:
        """prefix: such as `mtp.0`. experts, picks: of this drafter, which may differ from the trunk's."""
        return cls(
            HyperConnection.load(c, source, f"{prefix}.hc_attn"),
            HyperConnection.load(c, source, f"{prefix}.hc_ffn"),
            source.float32(f"{prefix}.attn_norm.weight"),
            source.float32(f"{prefix}.ffn_norm.weight"),
            AttentionWeights.load(c, source, f"{prefix}.attn"),
            MoE.load(c, source, f"{prefix}.ffn", experts, picks, image_bias=False),
            cache_quant,
            source.dtype,
        )

    @property
    def width(self) -> int:
        return self.attention.head_dim

    def latent(self, x: mx.array, table) -> mx.array:
        """x [n, D] -> key-and-value rows [n, C]."""
        return self.attention.latent(x, table, self.cache_quant)

    def attend(self, x: mx.array, keys: mx.array, keep_mask: mx.array, table, core: Callable) -> mx.array:
        """x [n, D] against keys [1 or n, K, C] where keep_mask [1 or n, K] -> [n, D]."""
        w = self.attention
        _, q = w.query(x, table)
        return w.output(core(q, keys, keep_mask, w.sink, w.head_dim**-0.5), table, self.dtype)
