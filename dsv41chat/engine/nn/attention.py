"""The attention half of a V4.1 layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.config_v4 import V4Config
from dsv41chat.engine.lane import Lane
from dsv41chat.engine.nn.compressor import Compressor
from dsv41chat.engine.nn.indexer import Indexer
from dsv41chat.engine.nn.linear import GroupedLinear, Linear, QuantizedLinear
from dsv41chat.engine.ops import attend, norm, rope
from dsv41chat.engine.ops.fakequant import fp8_ue8m0
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import LayerPlan
from dsv41chat.engine.rows import Rows


@dataclass
class AttentionWeights:
    """The projections that trunk layers and draft stages of both families share.

    head_norm: V4 norms every query head without a weight. rounding: of the rows' own latents, None where that is off.
    """

    wq_a: Linear | QuantizedLinear
    q_norm: mx.array
    wq_b: Linear | QuantizedLinear
    wkv: Linear | QuantizedLinear
    kv_norm: mx.array
    wo_a: GroupedLinear
    wo_b: Linear | QuantizedLinear
    sink: mx.array
    heads: int
    head_dim: int
    eps: float
    head_norm: bool
    rounding: Callable[[mx.array], mx.array] | None

    @classmethod
    def load(
        cls, c: V41Config | V4Config, source: WeightSource, prefix: str, rounding: Callable[[mx.array], mx.array] | None
    ) -> AttentionWeights:
        linear, f32 = (lambda n: source.linear(f"{prefix}.{n}.weight")), (lambda n: source.float32(f"{prefix}.{n}"))
        return cls(
            linear("wq_a"),
            f32("q_norm.weight"),
            linear("wq_b"),
            linear("wkv"),
            f32("kv_norm.weight"),
            source.grouped(f"{prefix}.wo_a.weight", c.o_groups),
            linear("wo_b"),
            f32("attn_sink"),
            c.num_attention_heads,
            c.head_dim,
            c.rms_norm_eps,
            c.family == "v4",
            rounding,
        )

    def project(self, x: mx.array, table) -> tuple[mx.array, mx.array, mx.array]:
        """x [n, D] -> `query` and `latent` of the same rows: (qr [n, q_rank], q [n, H, C], kv [n, C])."""
        return *self.query(x), self.latent(x, table)

    def query(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [n, D] -> (low-rank query [n, q_rank], heads [n, H, C] as projected; `turned` makes them ready)."""
        qr = norm.rms(self.wq_a(x), self.q_norm, self.eps)
        return qr, self.wq_b(qr).reshape(x.shape[0], self.heads, self.head_dim)

    def turned(self, q: mx.array, table) -> mx.array:
        """q [n, H, C] -> normed per head where the family does that, and rotated."""
        return rope.rotate(norm.rms(q, None, self.eps) if self.head_norm else q, table)

    def turned_back(self, o: mx.array, table, dtype: mx.Dtype) -> mx.array:
        """o float32 [n, H, C] -> rotated back at the query's position, in the model dtype."""
        return rope.rotate(o, table, inverse=True).astype(dtype)

    def latent(self, x: mx.array, table) -> mx.array:
        """x [n, D] -> the rows' own key-and-value vectors [n, C], rotated, rounded."""
        kv = rope.rotate(norm.rms(self.wkv(x), self.kv_norm, self.eps), table)
        return kv if self.rounding is None else self.rounding(kv)

    def output(self, o: mx.array) -> mx.array:
        """o [n, H, C] -> [n, D]: the grouped output projection."""
        return self.wo_b(self.wo_a(o.reshape(o.shape[0], -1)))


def windows(lane: Lane, rows: Rows, name: str, kv: mx.array) -> Iterator[tuple[slice, mx.array, mx.array, mx.array]]:
    """Put the rows' latents kv [n, C] into ring `name`, and give blocks of rows: (rows, latents [R, C], slots int32 [b, W] of their windows
    among these, present [b, W]).

    On a device the rows of a long call are one block, which looks into the latents themselves, behind those of the window before it.
    The host, where a call costs little, goes through the ring block by block and copies nothing.
    """
    if rows.fits or rows.host:
        for part, write, slots, present in rows.blocks:
            lane.write(name, write, kv[part])
            yield part, lane.buffers[name], slots, present
        return
    before, slots, present = rows.run
    latents = mx.concatenate([*lane.before(name, rows.start, before), kv]) if before else kv
    lane.keep(name, rows.start, kv)
    yield slice(0, rows.n), latents, slots, present


@dataclass
class Attention:
    """Window rows of this layer and, with a compress ratio, the picked entries of the owner layer. Duplicates are allowed.

    core: the attention core, `ops.attend.attend_rows` or what a route puts in its place.
    """

    layer: LayerPlan
    weights: AttentionWeights
    compressor: Compressor | None
    indexer: Indexer | None
    dtype: mx.Dtype
    core: Callable = attend.attend_rows

    @classmethod
    def load(cls, c: V41Config, source: WeightSource, layer: LayerPlan, cache_quant: bool) -> Attention:
        compressor = Compressor.load(c, source, layer, cache_quant) if layer.owns_pool else None
        indexer = Indexer.load(c, source, layer, cache_quant) if layer.scores else None
        weights = AttentionWeights.load(c, source, f"layers.{layer.index}.attn", fp8_ue8m0 if cache_quant else None)
        return cls(layer, weights, compressor, indexer, source.dtype)

    def __call__(self, lane: Lane, rows: Rows, x: mx.array, qr: mx.array, q: mx.array, kv: mx.array) -> mx.array:
        """x [n, D] and its `project` -> o [n, H, C], before the output projection. An owner appends before it scores and attends, so a row
        that closes a group sees that group."""
        if self.compressor is not None:
            self.compressor(lane, rows, x)
        if self.indexer is not None:
            self.indexer(lane, rows, x, qr)
        return self._attend(lane, rows, q, kv)

    def _attend(self, lane: Lane, rows: Rows, q: mx.array, kv: mx.array) -> mx.array:
        name, out, pool, index, picked = f"window.{self.layer.index}", [], None, None, None
        cos, sin = rows.tables[self.layer.rope]
        if self.layer.ratio:
            index, picked = rows.picked
            pool = lane.buffers[f"pool.{self.layer.kv_source}"]
        for part, *window in windows(lane, rows, name, kv):
            chosen = (None, None) if pool is None else (index[part], picked[part])
            out.append(self.gathered(q[part], (cos[part], sin[part]), *window, pool, *chosen))
        return rows.concatenate(out)

    def gathered(
        self, q: mx.array, table: tuple[mx.array, mx.array], window: mx.array, slots: mx.array, present: mx.array, pool: mx.array | None,
        index: mx.array | None, picked: mx.array | None,
    ) -> mx.array:  # fmt: skip
        """The core over rows of the two buffers: q [n, H, C] as projected, table its (cos, sin); window [R, C] at slots [n, W] where
        present; pool [P, C] at index [n, K] where picked, None without entries -> [n, H, C], rotated back."""
        return attend.gather_and_attend(self.core, self.weights, q, table, window, slots, present, pool, index, picked)
