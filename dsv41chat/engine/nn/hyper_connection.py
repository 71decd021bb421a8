"""The coefficients of one sublayer, and of the last collapse of the V4 family."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.config_v4 import V4Config
from dsv41chat.engine.ops import hyper
from dsv41chat.engine.pack.source import WeightSource


@dataclass
class HyperConnection:
    fn: mx.array
    base: mx.array
    scale: mx.array
    iterations: int
    eps: float
    norm_eps: float

    @classmethod
    def load(cls, c: V41Config | V4Config, source: WeightSource, prefix: str) -> HyperConnection:
        """prefix: such as `layers.0.hc_attn`."""
        fn, base, scale = (source.float32(f"{prefix}_{part}") for part in ("fn", "base", "scale"))
        return cls(fn, base, scale, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)

    def __call__(self, h: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """h [n, S, D] -> pre [n, S], post [n, S], comb [n, S, S], float32."""
        return hyper.mixes(h, self.fn, self.base, self.scale, iterations=self.iterations, eps=self.eps, norm_eps=self.norm_eps)


@dataclass
class HyperHead:
    """Collapses the streams before the final norm; no Sinkhorn, one scale."""

    fn: mx.array
    base: mx.array
    scale: mx.array
    eps: float
    norm_eps: float

    @classmethod
    def load(cls, c: V4Config, source: WeightSource, prefix: str) -> HyperHead:
        """prefix: `hc_head`, or `mtp.0.hc_head` of a draft block."""
        return cls(*(source.float32(f"{prefix}_{part}") for part in ("fn", "base", "scale")), c.hc_eps, c.rms_norm_eps)

    def __call__(self, h: mx.array) -> mx.array:
        """h [n, S, D] -> [n, D] in h's dtype."""
        weights = hyper.head_weights(h, self.fn, self.base, self.scale, eps=self.eps, norm_eps=self.norm_eps)
        return hyper.collapse(h, weights)
