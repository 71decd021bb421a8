"""Index sources: score the owner's keys and choose the entries that this layer and the reuse layers after it attend to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.lane import Lane
from dsv41chat.engine.nn.linear import Linear, QuantizedLinear
from dsv41chat.engine.ops.attend import index_scores
from dsv41chat.engine.ops.blocks import after
from dsv41chat.engine.ops.fakequant import fp4_ue8m0
from dsv41chat.engine.ops.rope import rotate
from dsv41chat.engine.ops.select import CHOICE_BYTES, ascending, best_blocks, best_mask, first_visible, inside_blocks
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import LayerPlan
from dsv41chat.engine.rows import Rows


@dataclass
class Indexer:
    """score: `ops.attend.index_scores` or what a route puts in its place."""

    layer: LayerPlan
    wq_b: Linear | QuantizedLinear
    weights_proj: Linear
    heads: int
    head_dim: int
    topk: int
    block: int
    blocks: int
    cache_quant: bool
    score: Callable = index_scores

    @classmethod
    def load(cls, c: V41Config, source: WeightSource, layer: LayerPlan, cache_quant: bool) -> Indexer:
        p = f"layers.{layer.index}.attn.indexer"
        wq_b, proj = source.linear(f"{p}.wq_b.weight"), source.linear(f"{p}.weights_proj.weight", rounds=False)
        sizes = c.index_n_heads, c.index_head_dim, c.index_topk, c.candidate_block_size, c.candidate_topk_blocks
        return cls(layer, wq_b, proj, *sizes, cache_quant)

    def __call__(self, lane: Lane, rows: Rows, x: mx.array, qr: mx.array) -> None:
        """x [n, D] the layer's normed input, qr [n, q_rank] its low-rank query: sets rows.picked, and rows.candidates if it makes them.

        While every row sees at most topk entries all of them are taken and nothing is scored; the set is the same.
        """
        length = rows.length(self.layer.ratio)
        if rows.last_length(self.layer.ratio) <= self.topk:
            rows.picked, rows.candidates = self.visible(length), None
            return
        q, weight = self.queries(x, qr, rows.tables[self.layer.rope])
        keys = self.keys(lane)
        # While all entries lie in as many blocks as are kept, every entry is a candidate.
        makes = self.layer.makes_candidates and rows.last_length(self.layer.ratio) > self.block * self.blocks
        rows.candidates = None if self.layer.makes_candidates else rows.candidates
        picked, blocks = [], []
        for part in rows.row_blocks(CHOICE_BYTES * keys.shape[0]):
            done = [a for found in (*picked[-1:], *blocks[-1:]) for a in found]
            score = self.score(after(q[part], *done), weight[part], keys, length[part])
            if makes:
                blocks.append(self.candidates(score, length[part]))
            elif self.layer.uses_candidates and rows.candidates is not None:
                score = self.among(score, tuple(a[part] for a in rows.candidates))
            picked.append(self.select(score))
        rows.picked = tuple(rows.concatenate(parts) for parts in zip(*picked))
        if blocks:
            rows.candidates = tuple(rows.concatenate(parts) for parts in zip(*blocks))

    def queries(self, x: mx.array, qr: mx.array, table) -> tuple[mx.array, mx.array]:
        """x [n, D], qr [n, q_rank] -> index queries [n, heads, head_dim] and the signed weights of their heads, float32 [n, heads]."""
        q = rotate(self.wq_b(qr).reshape(x.shape[0], self.heads, self.head_dim), table)
        weight = self.weights_proj(x).astype(mx.float32) * (self.head_dim**-0.5 * self.heads**-0.5)
        return (fp4_ue8m0(q) if self.cache_quant else q), weight

    def visible(self, length: mx.array) -> tuple[mx.array, mx.array]:
        """(index, present), each [n, topk], of rows that see at most topk entries: all of them."""
        return first_visible(length, self.topk)

    def candidates(self, score: mx.array, length: mx.array) -> tuple[mx.array, mx.array]:
        """score [n, T], length [n, 1] -> the best blocks, (index int32 [n, slots], present [n, slots])."""
        return best_blocks(score, length, self.block, self.blocks)

    def among(self, score: mx.array, chosen: tuple[mx.array, mx.array]) -> mx.array:
        """Scores outside the chosen blocks become -inf."""
        return inside_blocks(score, chosen, self.block)

    def select(self, score: mx.array) -> tuple[mx.array, mx.array]:
        """score float32 [n, T] -> (index int32 [n, topk] ascending, present [n, topk]) of the best entries."""
        return ascending(best_mask(score, self.topk), self.topk)

    def keys(self, lane: Lane) -> mx.array:
        """The owner's own keys, whatever was published last; the whole buffer, whose tail the lengths mask."""
        return lane.buffers[f"keys.{self.layer.kv_source}"]
