"""The Engram gate: table rows of the last n-grams are projected and added to the streams."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.nn.linear import Linear, QuantizedLinear
from dsv41chat.engine.pack.source import WeightSource


@dataclass
class Engram:
    wkv: Linear | QuantizedLinear
    qk: mx.array
    eps: float

    @classmethod
    def load(cls, c: V41Config, source: WeightSource, index: int) -> Engram:
        p = f"layers.{index}.engram"
        qk = source.float32(f"{p}.q_weight") * source.float32(f"{p}.k_weight")
        return cls(source.linear(f"{p}.wkv.weight"), qk, c.rms_norm_eps)

    def gate(self, h: mx.array, key: mx.array, dead: mx.array) -> mx.array:
        """h, key float32 [n, S, D], dead [n] -> [n, S]; each stream is normalised on its own; dead rows get 0."""
        inverse = lambda v: mx.rsqrt(mx.mean(v * v, axis=-1) + self.eps)
        dot = mx.sum(h * self.qk * key, axis=-1) * inverse(h) * inverse(key) * h.shape[-1] ** -0.5
        root = mx.sqrt(mx.maximum(mx.abs(dot), 1e-6))
        return mx.where(dead[:, None], 0, mx.sigmoid(mx.where(dot >= 0, root, -root)))

    def __call__(self, h: mx.array, table_rows: mx.array, dead: mx.array) -> mx.array:
        """h [n, S, D], table_rows [n, columns * width] in the model dtype -> h + gate * value, cast back."""
        n, s, d = h.shape
        kv = self.wkv(table_rows)
        key, value = kv[:, : s * d].reshape(n, s, d).astype(mx.float32), kv[:, s * d :].astype(mx.float32)
        x = h.astype(mx.float32)
        return (x + self.gate(x, key, dead)[..., None] * value[:, None, :]).astype(h.dtype)
