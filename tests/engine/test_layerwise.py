"""A text taken layer by layer against the trunk."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.layerwise import LayerWalk, Stream
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.nano import embedded_pack
from tests import v41
from tests.engine.v4 import tiny


def walked(walk, ids, folder=None):
    """Logits; with a folder every border goes through a file."""
    stream = walk.begin(ids)
    for index in range(walk.layers):
        stream = walk.run(walk.layer(index), ids, stream).stream
        if folder is not None:
            stream.save(folder / "stream.safetensors")
            stream = Stream.load(folder / "stream.safetensors")
    return np.array(walk.head()(stream, slice(None)))


@pytest.mark.parametrize(
    "family, dtype", [("v41", mx.float32), ("v4", mx.float32), ("v41", mx.bfloat16), ("v4", mx.bfloat16), ("nano", mx.float32)]
)
def test_it_is_the_trunk(family, dtype, tmp_path):
    """Bit for bit, across windows, groups, index sources and candidates, with streams kept on disk between layers."""
    if family == "v4":
        tiny.write_pack(tmp_path / "pack")
    pack = open_pack({"v41": v41.PACK, "v4": tmp_path / "pack", "nano": embedded_pack()}[family])
    count = 160 if family == "nano" else 220
    ids = np.random.default_rng(1).integers(3, pack.config.vocab_size - 1, count).tolist()
    got = walked(LayerWalk(pack, dtype=dtype, chunk=50), ids, tmp_path)
    assert np.array_equal(got, v41.run(build_trunk(pack, dtype=dtype), ids, v41.pieces(count, 50)))


def test_a_layer_leaves_the_stream_that_it_reads_alone():
    walk, ids = LayerWalk(open_pack(v41.PACK), chunk=32), list(range(3, 100))
    stream = walk.begin(ids)
    for index in range(walk.layers):
        before = {name: np.array(a.astype(mx.float32)) for name, a in stream.arrays().items()}
        first, second = (walk.run(walk.layer(index), ids, stream) for _ in range(2))
        assert all(np.array_equal(np.array(a.astype(mx.float32)), before[name]) for name, a in stream.arrays().items())
        for a, b in ((first.stream.arrays(), second.stream.arrays()), (first.made, second.made)):
            assert a.keys() == b.keys() and all(np.array_equal(np.array(a[n].astype(mx.float32)), np.array(b[n].astype(mx.float32))) for n in a)
        stream = first.stream
