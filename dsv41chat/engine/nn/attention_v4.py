"""The attention half of a V4 layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from dsv41chat.engine.config_v4 import V4Config
from dsv41chat.engine.lane import Lane
from dsv41chat.engine.nn.attention import AttentionWeights, windows
from dsv41chat.engine.nn.compressor_v4 import CompressorV4
from dsv41chat.engine.nn.indexer_v4 import IndexerV4
from dsv41chat.engine.ops import attend, fakequant, select
from dsv41chat.engine.ops.blocks import after, row_blocks
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import LayerPlan
from dsv41chat.engine.rows_v4 import RowsV4

# Bytes per entry of a row's list: index and presence, and what they are made from.
_LIST_BYTES = 16


@dataclass
class AttentionV4:
    """Window rows and the layer's own pooled entries in one softmax: all visible ones, or those its indexer picks.

    core: the attention core, `ops.attend.attend_rows` or what a route puts in its place.
    """

    layer: LayerPlan
    weights: AttentionWeights
    compressor: CompressorV4 | None
    indexer: IndexerV4 | None
    dtype: mx.Dtype
    core: Callable = attend.attend_rows

    @classmethod
    def load(cls, c: V4Config, source: WeightSource, layer: LayerPlan, qat_sim: bool) -> AttentionV4:
        compressor = CompressorV4.load(c, source, layer, qat_sim, index=False) if layer.owns_pool else None
        indexer = IndexerV4.load(c, source, layer, qat_sim) if layer.scores else None
        rounding = partial(fakequant.v4_fp8, rope_dims=layer.rope.dims) if qat_sim else None
        weights = AttentionWeights.load(c, source, f"layers.{layer.index}.attn", rounding)
        return cls(layer, weights, compressor, indexer, source.dtype)

    def __call__(self, lane: Lane, rows: RowsV4, x: mx.array, qr: mx.array, q: mx.array, kv: mx.array) -> mx.array:
        """x [n, D] and its `project` -> o [n, H, C], before the output projection. Entries are appended before they are attended to: the
        row that closes a group sees it."""
        if self.compressor is not None:
            self.compressor(lane, rows, x)
        picked = None if self.indexer is None else self.indexer(lane, rows, x, qr)
        return self._attend(lane, rows, q, kv, picked)

    def visible(self, length: mx.array, width: int) -> tuple[mx.array, mx.array]:
        """(index, present), each [n, width], of all entries that the rows see."""
        return select.first_visible(length, width)

    def _attend(self, lane: Lane, rows: RowsV4, q: mx.array, kv: mx.array, picked) -> mx.array:
        name, out = f"window.{self.layer.index}", []
        cos, sin = rows.tables[self.layer.rope]
        for part, latents, slots, present in windows(lane, rows, name, kv):
            for cut, width in self._cuts(rows, part, picked is None):
                last, local = out[-1:], slice(cut.start - part.start, cut.stop - part.start)
                chosen = (None, None, None)
                if width and picked is None:
                    chosen = lane.buffers[f"pool.{self.layer.index}"], *self._all(rows, cut, width, last)
                elif width:
                    chosen = lane.buffers[f"pool.{self.layer.index}"], picked[0][cut, :width], picked[1][cut, :width]
                window = latents, after(slots[local], *last), present[local]
                out.append(self.gathered(after(q[cut], *last), (cos[cut], sin[cut]), *window, *chosen))
        return rows.concatenate(out)

    def _all(self, rows: RowsV4, cut: slice, width: int, last: list[mx.array]) -> tuple[mx.array, mx.array]:
        """`visible` of rows `cut`. Where one list serves the whole call, it serves all layers of its kind."""
        ratio = self.layer.ratio
        if cut.stop - cut.start < rows.n:
            return self.visible(after(rows.length(ratio)[cut], *last), width)
        return rows.once(("visible", ratio, width), lambda: self.visible(rows.length(ratio), width))

    def _cuts(self, rows: RowsV4, part: slice, everything: bool) -> Iterator[tuple[slice, int]]:
        """(rows, entry slots) of calls of the core. everything: lists hold all that a row sees; they grow with the context, so they are made
        for few rows at a time."""
        most = self.indexer.topk if self.indexer is not None else None
        # What a route puts in place may take lists with absent slots at their end and give the same bits: then one width does for all rows.
        one = getattr(self.gathered, "pads", False)
        tiles = [(part, rows.widest(part, self.layer.ratio, most))] if one else rows.tiles(part, self.layer.ratio, most)
        for tile, width in tiles:
            for cut in row_blocks(tile.stop - tile.start, _LIST_BYTES * width if everything else 0, rows.host):
                yield slice(tile.start + cut.start, tile.start + cut.stop), width

    def gathered(
        self, q: mx.array, table: tuple[mx.array, mx.array], window: mx.array, slots: mx.array, present: mx.array, pool: mx.array | None,
        index: mx.array | None, picked: mx.array | None,
    ) -> mx.array:  # fmt: skip
        """As `Attention.gathered`."""
        return attend.gather_and_attend(self.core, self.weights, q, table, window, slots, present, pool, index, picked)
