"""Rows in, pooled rows appended to the lane: the attention entries of a V4 layer, and the keys of its indexer."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.config_v4 import V4Config
from dsv41chat.engine.lane import Lane
from dsv41chat.engine.nn.linear import Linear
from dsv41chat.engine.ops import fakequant, norm, pool, rope
from dsv41chat.engine.ops.hadamard import hadamard_matrix
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import LayerPlan
from dsv41chat.engine.rows_v4 import GroupBlock, GroupRun, RowsV4


@dataclass
class CompressorV4:
    """raw, entries: names of its lane buffers. mix: the float32 Hadamard matrix of index keys, None for attention entries.

    Projections, position bias and pooling run in float32; an entry is rounded to the model dtype before its norm.
    """

    layer: LayerPlan
    raw: str
    entries: str
    wkv: Linear
    wgate: Linear
    ape: mx.array
    norm: mx.array
    mix: Linear | None
    eps: float
    qat_sim: bool
    dtype: mx.Dtype

    @classmethod
    def load(cls, c: V4Config, source: WeightSource, layer: LayerPlan, qat_sim: bool, *, index: bool) -> CompressorV4:
        """index: the indexer's own compressor instead of the layer's."""
        i = layer.index
        p = f"layers.{i}.attn.indexer.compressor" if index else f"layers.{i}.attn.compressor"
        names = (f"raw_keys.{i}", f"keys.{i}") if index else (f"raw.{i}", f"pool.{i}")
        linear = lambda n: source.linear(f"{p}.{n}.weight", rounds=False, dtype=mx.float32)
        mix = Linear(mx.array(hadamard_matrix(c.index_head_dim))) if index else None
        ape, weight = source.float32(f"{p}.ape"), source.float32(f"{p}.norm.weight")
        return cls(layer, *names, linear("wkv"), linear("wgate"), ape, weight, mix, c.rms_norm_eps, qat_sim, source.dtype)

    def __call__(self, lane: Lane, rows: RowsV4, x: mx.array) -> None:
        """x [n, D], the layer's normed input: append the entry of every group that these rows complete.

        A block of rows is written to the ring before its groups are read, each whole and in one expression, so a group has the
        same bits whichever calls brought its rows. On a device the groups of a long call are pooled from the rows themselves, all at once.
        """
        raw, capacity = self.raw_rows(x, rows.places(self.layer.ratio)), lane.specs[self.raw].rows
        if rows.fits or rows.host:
            for block in rows.group_blocks(self.layer, capacity):
                lane.write(self.raw, block.write, raw[block.part])
                if block.read is not None:
                    self._append(lane, rows, block, lane.buffers[self.raw][block.read])
            return
        run = rows.group_run(self.layer)
        group = mx.concatenate([*lane.before(self.raw, rows.start, run.before), raw]) if run.before else raw
        lane.keep(self.raw, rows.start, raw)
        if run.last > run.first:
            self._append(lane, rows, run, group[: run.pooled])

    def _append(self, lane: Lane, rows: RowsV4, groups: GroupBlock | GroupRun, group_rows: mx.array) -> None:
        """The entries of whole groups, from their raw rows."""
        lane.append(self.entries, groups.first, self.finish(self.pool(group_rows, groups.first == 0), rows, groups))

    def raw_rows(self, x: mx.array, places: mx.array) -> mx.array:
        """x [n, D], places int32 [n] of the rows in their groups -> value and gate rows float32 [n, 2, width]."""
        y = x.astype(mx.float32)
        return pool.raw_rows(self.wkv(y), self.wgate(y), self.ape, places)

    def pool(self, group_rows: mx.array, begins: bool) -> mx.array:
        """Raw rows of whole groups -> [groups, width] in the model dtype. begins: with group 0; else one that overlaps only lends its rows."""
        if self.layer.overlap:
            return pool.pool_overlapping(group_rows, self.layer.ratio, begins).astype(self.dtype)
        return pool.pool_groups(group_rows, self.layer.ratio).astype(self.dtype)

    def finish(self, pooled: mx.array, rows: RowsV4, block) -> mx.array:
        """Norm, then rotation at the group's first token, then the index mix and the release's rounding where that is simulated."""
        return self.entry_rows(pooled, rows.entry_table(self.layer, block.first, block.last))

    def entry_rows(self, pooled: mx.array, table) -> mx.array:
        """pooled [g, width] in the model dtype -> [g, width]."""
        entry = rope.rotate(norm.rms(pooled, self.norm, self.eps), table)
        if self.mix is not None:
            entry = self.mix(entry.astype(mx.float32)).astype(self.dtype)
            return fakequant.v4_fp4(entry) if self.qat_sim else entry
        return fakequant.v4_fp8(entry, self.layer.rope.dims) if self.qat_sim else entry
