"""What a layer of either family computes before and after its attention core: no state, so each half can be one compiled graph."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx

from dsv41chat.engine.nn.hyper_connection import enter


class Halves:
    """The fields `attn_mix`, `ffn_mix`, `attn_norm`, `ffn_norm`, `attention`, `moe`, `eps` are the layer's.

    lagged: streams collapse with the `pre` of the sublayer before (V4.1) instead of their own (V4).
    """

    lagged: ClassVar[bool]

    def into_attention(self, *streams: mx.array | None) -> tuple[mx.array, ...]:
        """`Streams` -> (h, x, pre, post, comb)."""
        return enter(self.attn_mix, self.attn_norm, self.eps, self.lagged, streams)

    def into_experts(self, *streams: mx.array | None) -> tuple[mx.array, ...]:
        return enter(self.ffn_mix, self.ffn_norm, self.eps, self.lagged, streams)

    def before(self, h: mx.array, pre: Any, y: Any, post: Any, comb: Any, cos: mx.array, sin: mx.array) -> tuple[mx.array, ...]:
        """`Streams` and the rope table of the rows -> (h, x, pre, post, comb, qr, q, kv)."""
        entered = self.into_attention(h, pre, y, post, comb)
        return *entered, *self.attention.weights.project(entered[1], (cos, sin))

    def after(self, h: mx.array, pre: mx.array, o: mx.array, post: mx.array, comb: mx.array, mark: Any) -> tuple[Any, ...]:
        """What `before` gave, o [n, H, C] of the attention, and image rows or token ids (`mark`) -> `Streams`."""
        h, x, pre, post, comb = self.into_experts(h, pre if self.lagged else None, self.attention.weights.output(o), post, comb)
        return h, pre if self.lagged else None, self.moe(x, mark), post, comb
