"""The coefficients of one sublayer, the way into it, and the last collapse of the V4 family."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.config_v4 import V4Config
from dsv41chat.engine.nn.linear import columns
from dsv41chat.engine.ops import hyper, norm
from dsv41chat.engine.pack.source import WeightSource


@dataclass
class HyperConnection:
    """columns: the scale of every column of the mix, made once."""

    fn: mx.array
    base: mx.array
    scale: mx.array
    iterations: int
    eps: float
    norm_eps: float
    columns: mx.array = field(init=False)

    def __post_init__(self):
        self.columns = hyper.by_column(self.scale, round((1 + self.fn.shape[0]) ** 0.5) - 1)

    @classmethod
    def load(cls, c: V41Config | V4Config, source: WeightSource, prefix: str) -> HyperConnection:
        """prefix: such as `layers.0.hc_attn`."""
        fn, base, scale = (source.float32(f"{prefix}_{part}") for part in ("fn", "base", "scale"))
        return cls(fn, base, scale, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)

    def __call__(self, h: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """h [n, S, D] -> pre [n, S], post [n, S], comb [n, S, S], float32."""
        return hyper.mixes(h, columns(self, "fn"), self.base, self.columns, iterations=self.iterations, eps=self.eps, norm_eps=self.norm_eps)


# The streams between two sublayers: h [n, S, D], pre [n, S] of the sublayer before, and what has yet to be spread over h, its output
# y [n, D] with post [n, S] and comb [n, S, S], or three times None. Spreading waits for the next sublayer, so that one kernel can do both.
Streams = tuple[mx.array, mx.array | None, mx.array | None, mx.array | None, mx.array | None]


def enter(mix: HyperConnection, weight: mx.array, eps: float, lagged: bool, streams: Streams) -> tuple[mx.array, ...]:
    """Spread what is pending, find this sublayer's coefficients, collapse and norm: -> (h, x [n, D], pre, post, comb).

    lagged: the collapse takes the `pre` of the sublayer before (V4.1) instead of its own (V4). weight: of the norm.
    """
    h, before = settle(streams), streams[1]
    pre, post, comb = mix(h)
    return h, norm.rms(hyper.collapse(h, before if lagged else pre), weight, eps), pre, post, comb


def settle(streams: Streams) -> mx.array:
    """h with nothing pending."""
    h, _, y, post, comb = streams
    return h if y is None else hyper.expand(y, h, post, comb)


def mean_of_streams(h: mx.array) -> mx.array:
    """h [n, S, D] -> [n, D] in h's dtype, what drafters read of a layer."""
    return mx.mean(h.astype(mx.float32), axis=1).astype(h.dtype)


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
        weights = hyper.head_weights(h, columns(self, "fn"), self.base, self.scale, eps=self.eps, norm_eps=self.norm_eps)
        return hyper.collapse(h, weights)
