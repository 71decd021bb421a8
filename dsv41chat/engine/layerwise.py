"""A text through a build of which never more than one layer is in memory.

All rows of a text pass one layer before the next layer is read, so a build of any size can be looked at: what a layer hands on to the
layers after it is a `Stream`, which can be kept on disk between two layers. The arithmetic is the trunk's own; only the order differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.device import device_kind
from dsv41chat.engine.engram.hashing import NgramHasher
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.table import EngramSettings
from dsv41chat.engine.engram.token_map import load_token_map
from dsv41chat.engine.engram.values import take_values
from dsv41chat.engine.lane import Lane, PoolSpec, RingSpec
from dsv41chat.engine.nn.hyper_connection import HyperHead, settle
from dsv41chat.engine.pack.build import Pack, arrays_of, weight_source
from dsv41chat.engine.rows import Rows
from dsv41chat.engine.rows_v4 import RowsV4
from dsv41chat.engine.trunk_v4 import LayerV4, TrunkV4
from dsv41chat.engine.trunk_v41 import Layer, TrunkV41

# Tables are read row by row here, once; nothing of them is worth keeping in memory.
_TABLES = EngramSettings(mode="stream", scales="mapped", overlap=False)
_CHUNK = {"cpu": 128, "metal": 512, "cuda": 1024}


@dataclass
class Stream:
    """What one text of n tokens carries from layer to layer.

    h [n, S, D] in the model dtype; pre float32 [n, S] (V4.1), None where each half has its own (V4). pools: entries and index keys that
    later layers read, by lane buffer name, [rows, C]. picked: per chunk (index int32, present bool) [chunk, k] of the newest index
    source, None before one; candidates: per chunk the best blocks of the candidate source, likewise.
    """

    h: mx.array
    pre: mx.array | None
    pools: dict[str, mx.array] = field(default_factory=dict)
    picked: list[tuple[mx.array, mx.array] | None] = field(default_factory=list)
    candidates: list[tuple[mx.array, mx.array] | None] = field(default_factory=list)

    def arrays(self) -> dict[str, mx.array]:
        """Everything by name, as `load` takes it."""
        out = {"h": self.h} | ({} if self.pre is None else {"pre": self.pre}) | {f"pools/{name}": a for name, a in self.pools.items()}
        for kind, lists in (("picked", self.picked), ("candidates", self.candidates)):
            for c, found in enumerate(lists):
                out |= {} if found is None else {f"{kind}.index/{c}": found[0], f"{kind}.present/{c}": found[1]}
        return out

    def save(self, path: Path) -> None:
        """Write it as one safetensors file."""
        with open(path, "wb") as file:
            mx.save_safetensors(file, self.arrays(), {"chunks": str(len(self.picked))})

    @classmethod
    def load(cls, path: Path) -> Stream:
        """Inverse of `save`; nothing of the file is mapped afterwards."""
        arrays, meta = mx.load(str(path), format="safetensors", return_metadata=True)
        mx.eval(list(arrays.values()))
        chunks = range(int(meta["chunks"]))
        pools = {name.removeprefix("pools/"): a for name, a in arrays.items() if name.startswith("pools/")}
        lists = lambda kind: [
            (arrays[f"{kind}.index/{c}"], arrays[f"{kind}.present/{c}"]) if f"{kind}.index/{c}" in arrays else None for c in chunks
        ]
        return cls(arrays["h"], arrays.get("pre"), pools, lists("picked"), lists("candidates"))


@dataclass
class Passed:
    """stream: after the layer. made: the entries and keys that this layer appended, by lane buffer name."""

    stream: Stream
    made: dict[str, mx.array]


class LayerWalk:
    """A checked pack, read layer by layer. dtype, cache_quant, linear_input_fp8, qat_sim: as `build_trunk` takes them.

    chunk: rows of one call, by default the device's. engram False leaves the tables out, as for `build_trunk`.
    """

    def __init__(
        self, pack: Pack, *, dtype: mx.Dtype | None = None, cache_quant: bool = True, linear_input_fp8: bool = False, qat_sim: bool = False,
        chunk: int | None = None, engram: bool = True, cache_dir: Path | None = None,
    ):  # fmt: skip
        self.pack, self.chunk = pack, chunk or _CHUNK[device_kind()]
        self.cache_quant, self.qat_sim = cache_quant, qat_sim
        self.source = weight_source(pack, pack.expected, dtype=dtype, round_inputs=linear_input_fp8)
        c, self.hasher = pack.config, None
        if c.engram and engram:
            self.hasher = NgramHasher(c.engram, load_token_map(pack.folder, c.vocab_size, cache_dir), c.image_token_id)
        # Wiring without weights: its layers come and go.
        norm = self.source.float32("norm.weight")
        if c.family == "v4":
            self._trunk = TrunkV4(c, pack.plan, None, None, norm, None, [], self.source.dtype)
        else:
            self._trunk = TrunkV41(c, pack.plan, None, None, norm, [], None, None, self.source.dtype)

    @property
    def layers(self) -> int:
        return len(self.pack.plan)

    def begin(self, ids: Sequence[int]) -> Stream:
        """The embedded text, before the first layer."""
        c, table = self.pack.config, self.source.lookup("embed.weight")
        h = mx.repeat(table[mx.array(np.asarray(ids, np.int32))][:, None], c.hc_mult, axis=1)
        pre = None if c.family == "v4" else mx.broadcast_to(mx.array([1.0] + [0.0] * (c.hc_mult - 1)), h.shape[:2])
        chunks = -(-len(ids) // self.chunk)
        mx.eval([h] if pre is None else [h, pre])
        return Stream(h, pre, {}, [None] * chunks, [None] * chunks)

    def layer(self, index: int) -> Layer | LayerV4:
        """The weights of one layer, in memory; drop them before the next one is asked for."""
        c, plan = self.pack.config, self.pack.plan[index]
        found = LayerV4.load(c, self.source, plan, self.qat_sim) if c.family == "v4" else Layer.load(c, self.source, plan, self.cache_quant)
        mx.eval(arrays_of(found))
        return found

    def run(self, layer: Layer | LayerV4, ids: Sequence[int], stream: Stream) -> Passed:
        """All rows of a text through a layer. `stream` stays as it is. Raises EngramReadError."""
        plan, ids, n = layer.plan, np.asarray(ids, np.int64), len(ids)
        lane, reader = self._lane(plan.index, n, stream), self._reader(layer)
        h, pre, picked, candidates = [], [], [], []
        try:
            for number, a in enumerate(range(0, n, self.chunk)):
                part = slice(a, min(n, a + self.chunk))
                rows = self._rows(ids[part], a)
                rows.picked, rows.candidates = stream.picked[number], stream.candidates[number]
                x = stream.h[part]
                if reader is not None:
                    x = self._add_table(reader, layer, rows, ids, part, x)
                streams = self._trunk._layer(layer, lane, rows, (x, None if stream.pre is None else stream.pre[part], None, None, None))
                done = [a for a in (settle(streams), streams[1]) if a is not None]
                mx.eval(done, lane.arrays(), *(rows.picked or ()), *(rows.candidates or ()))
                h.append(done[0])
                pre += done[1:]
                picked.append(rows.picked)
                candidates.append(rows.candidates)
        finally:
            if reader is not None:
                reader.close()
        made = {s.name: lane.buffers[s.name][: n // s.ratio] for s in self._own(plan.index) if isinstance(s, PoolSpec)}
        later = {f"{kind}.{p.kv_source}" for p in self.pack.plan[plan.index + 1 :] if p.kv_source <= plan.index for kind in ("pool", "keys")}
        pools = {name: a for name, a in (stream.pools | {name: lane.buffers[name] for name in made}).items() if name in later}
        passed = Passed(Stream(mx.concatenate(h), mx.concatenate(pre) if pre else None, pools, picked, candidates), made)
        mx.eval(list(passed.stream.arrays().values()), list(made.values()))
        return passed

    def head(self) -> Callable[[Stream, slice], mx.array]:
        """What gives float32 logits [rows, vocab] of some rows of a stream after the last layer; it holds the head's weights."""
        c = self.pack.config
        trunk = replace(self._trunk, head=self.source.linear("head.weight", rounds=False, dtype=mx.float32 if c.family == "v41" else None))
        if c.family == "v4":
            trunk = replace(trunk, head_mix=HyperHead.load(c, self.source, "hc_head"))
            return lambda stream, rows: trunk.logits(stream.h[rows])
        return lambda stream, rows: trunk.logits(stream.h[rows], stream.pre[rows])

    def _own(self, index: int) -> list[RingSpec | PoolSpec]:
        return [s for s in self._trunk.lane_specs() if s.name.rsplit(".", 1)[1] == str(index)]

    def _lane(self, index: int, n: int, stream: Stream) -> Lane:
        """The buffers that one layer needs. Pools have their final length from the start, so that every chunk sees the same width."""
        read = {f"{kind}.{self.pack.plan[index].kv_source}" for kind in ("pool", "keys")}
        specs = [s for s in self._trunk.lane_specs() if s.name in read or s.name.rsplit(".", 1)[1] == str(index)]
        lane = Lane(tuple(specs), self.pack.config.roll_rows)
        for s in specs:
            if s.name in stream.pools:
                lane.buffers[s.name] = stream.pools[s.name]
            elif isinstance(s, PoolSpec):
                rows = max(1, -(-(n // s.ratio) // s.block)) * s.block
                lane.buffers[s.name] = mx.zeros((rows, *s.tail), dtype=s.dtype)
        return lane

    def _rows(self, ids: np.ndarray, start: int) -> Rows | RowsV4:
        c = self.pack.config
        if c.family == "v4":
            return RowsV4(ids, start, c.sliding_window, c.ring_rows, self._trunk.frequencies)
        return Rows(ids, start, c.sliding_window, c.ring_rows, self._trunk.frequencies, c.image_token_id)

    def _reader(self, layer: Any) -> EngramReader | None:
        """Of this layer's table alone."""
        if self.hasher is None or layer.plan.engram_slot < 0:
            return None
        return EngramReader.open([self.pack.table_specs[layer.plan.engram_slot]], _TABLES)

    def _add_table(self, reader: EngramReader, layer: Layer, rows: Rows, ids: np.ndarray, part: slice, x: mx.array) -> mx.array:
        slot = layer.plan.engram_slot
        before = ids[max(0, part.start - self.hasher.lookback) : part.start]
        ticket = reader.stage(self.hasher.rows(before, ids[part])[slot : slot + 1])
        try:
            return layer.engram(x, take_values(ticket, 0).astype(self.source.dtype), rows.image)
        finally:
            ticket.cancel()
