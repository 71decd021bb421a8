"""Owners of compressed entries: rows in, entries and index keys appended to the lane."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.lane import Lane
from dsv41chat.engine.nn.linear import Linear
from dsv41chat.engine.ops.fakequant import fp4_e4m3, fp4_ue8m0
from dsv41chat.engine.ops.norm import rms
from dsv41chat.engine.ops.pool import pool_groups
from dsv41chat.engine.ops.rope import rotate
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import LayerPlan
from dsv41chat.engine.rows import Rows


@dataclass
class Compressor:
    """ratio 1: a plain projection in the model dtype. ratio > 1: value and gate rows in float32, pooled per group."""

    layer: LayerPlan
    wkv: Linear
    wgate: Linear | None
    norm: mx.array
    index_key: Linear
    index_norm: mx.array
    eps: float
    cache_quant: bool
    dtype: mx.Dtype

    @classmethod
    def load(cls, c: V41Config, source: WeightSource, layer: LayerPlan, cache_quant: bool) -> Compressor:
        p = f"layers.{layer.index}.attn"
        dtype = source.dtype if layer.ratio == 1 else mx.float32
        wkv = source.linear(f"{p}.compressor.wkv.weight", rounds=False, dtype=dtype)
        wgate = source.linear(f"{p}.compressor.wgate.weight", rounds=False, dtype=dtype) if layer.ratio > 1 else None
        key = source.linear(f"{p}.indexer.wk.weight", rounds=False)
        norms = source.float32(f"{p}.compressor.norm.weight"), source.float32(f"{p}.indexer.k_norm.weight")
        return cls(layer, wkv, wgate, norms[0], key, norms[1], c.rms_norm_eps, cache_quant, source.dtype)

    def __call__(self, lane: Lane, rows: Rows, x: mx.array) -> None:
        """x [n, D]: append the entry and the index key of every group that these rows complete."""
        pooled = self._pool(lane, rows, x)
        if pooled is None:
            return
        first = rows.start // self.layer.ratio
        entry, key = self.entries(pooled, rows.entry_table(self.layer, first, first + pooled.shape[0]))
        lane.append(f"pool.{self.layer.index}", first, entry)
        lane.append(f"keys.{self.layer.index}", first, key)

    def entries(self, pooled: mx.array, table) -> tuple[mx.array, mx.array]:
        """pooled [g, head_dim] in the model dtype -> entries [g, head_dim] and index keys [g, index_head_dim]."""
        latent = rms(pooled, self.norm, self.eps)
        entry = rotate(latent, table)
        key = rotate(rms(self.index_key(self.key_input(latent, entry)), self.index_norm, self.eps), table)
        return (fp4_e4m3(entry), fp4_ue8m0(key)) if self.cache_quant else (entry, key)

    @staticmethod
    def key_input(latent: mx.array, entry: mx.array) -> mx.array:
        """The index key is made from the latent before rotation and rounding."""
        return latent

    def _pool(self, lane: Lane, rows: Rows, x: mx.array) -> mx.array | None:
        """Latents [groups, head_dim] of the groups that close here, in the model dtype; None when no group closes."""
        raw = self.raw_rows(x)
        if self.wgate is None:
            return raw
        name, r = f"raw.{self.layer.index}", self.layer.ratio
        capacity, count = lane.specs[name].rows, rows.last_length(r) - rows.start // r
        if rows.n <= lane.roll:
            # The ring holds the open group and all of these rows.
            lane.write(name, rows.ring_slots(rows.positions, capacity), raw)
            return self.pool_rows(lane.buffers[name][rows.group_slots(r, capacity)]) if count else None
        group = rows.concatenate([*lane.before(name, rows.start, rows.start % r), raw])
        lane.keep(name, rows.start, raw)
        return self.pool_rows(group[: count * r]) if count else None

    def raw_rows(self, x: mx.array) -> mx.array:
        """x [n, D] -> value and gate rows float32 [n, 2, head_dim]; with ratio 1 latents [n, head_dim] in the model dtype."""
        if self.wgate is None:
            return self.wkv(x)
        y = x.astype(mx.float32)
        return mx.stack([self.wkv(y), self.wgate(y)], axis=1)

    def pool_rows(self, group: mx.array) -> mx.array:
        """group float32 [g * ratio, 2, head_dim] -> [g, head_dim] in the model dtype."""
        return pool_groups(group, self.layer.ratio).astype(self.dtype)
