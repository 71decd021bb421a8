"""Which entries a row of an overlapping V4 layer attends to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.config_v4 import V4Config
from dsv41chat.engine.lane import Lane
from dsv41chat.engine.nn.compressor_v4 import CompressorV4
from dsv41chat.engine.nn.linear import Linear, QuantizedLinear
from dsv41chat.engine.ops import attend, fakequant, rope, select
from dsv41chat.engine.ops.blocks import after
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import LayerPlan
from dsv41chat.engine.rows_v4 import RowsV4, slots_for


@dataclass
class IndexerV4:
    """score: `ops.attend.index_scores` or what a route puts in its place."""

    layer: LayerPlan
    compressor: CompressorV4
    wq_b: Linear | QuantizedLinear
    weights_proj: Linear
    mix: Linear
    heads: int
    head_dim: int
    topk: int
    qat_sim: bool
    score: Callable = attend.index_scores

    @classmethod
    def load(cls, c: V4Config, source: WeightSource, layer: LayerPlan, qat_sim: bool) -> IndexerV4:
        p = f"layers.{layer.index}.attn.indexer"
        compressor = CompressorV4.load(c, source, layer, qat_sim, index=True)
        wq_b, proj = source.linear(f"{p}.wq_b.weight"), source.linear(f"{p}.weights_proj.weight", rounds=False, dtype=mx.float32)
        return cls(layer, compressor, wq_b, proj, compressor.mix, c.index_n_heads, c.index_head_dim, c.index_topk, qat_sim)

    def __call__(self, lane: Lane, rows: RowsV4, x: mx.array, qr: mx.array) -> tuple[mx.array, mx.array] | None:
        """x [n, D] the layer's normed input, qr [n, q_rank] its low-rank query -> (index, present), each [n, slots], of the best entries.

        Keys are appended in every call. While every row sees at most topk entries nothing is scored, and None says that all are taken;
        the set is the same.
        """
        self.compressor(lane, rows, x)
        if rows.last_length(self.layer.ratio) <= self.topk:
            return None
        length = rows.length(self.layer.ratio)
        q, weight = self.queries(x, qr, rows.tables[self.layer.rope])
        keys = lane.buffers[self.compressor.entries]
        picked = []
        for part in rows.row_blocks(select.CHOICE_BYTES * keys.shape[0]):
            done = picked[-1] if picked else ()
            picked.append(self.select(self.score(after(q[part], *done), weight[part], keys, length[part])))
        return tuple(rows.concatenate(parts) for parts in zip(*picked))

    def queries(self, x: mx.array, qr: mx.array, table) -> tuple[mx.array, mx.array]:
        """x [n, D], qr [n, q_rank] -> index queries [n, heads, head_dim] and the signed weights of their heads, float32 [n, heads]."""
        q = rope.rotate(self.wq_b(qr).reshape(x.shape[0], self.heads, self.head_dim), table)
        q = self.mix(q.astype(mx.float32)).astype(q.dtype)
        weight = self.weights_proj(x.astype(mx.float32)) * (self.head_dim**-0.5 * self.heads**-0.5)
        return (fakequant.v4_fp4(q) if self.qat_sim else q), weight

    def select(self, score: mx.array) -> tuple[mx.array, mx.array]:
        """score float32 [n, T] -> (index int32 [n, slots] ascending, present [n, slots]) of the best entries."""
        return select.ascending(select.best_mask(score, self.topk), slots_for(self.topk))
