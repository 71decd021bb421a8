"""Engram tables in every layout of a pack: the rows that the reader gives are the rows that were written."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.values import take_values
from dsv41chat.engine.errors import PackError
from dsv41chat.engine.pack.build import open_pack
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import BF16, release

NAME = f"layers.{p.ENGRAM_LAYER}.engram.embed.weight"
STORES = {
    "release": p.fp8_rows(),
    "release tags of an MLX writer": p.fp8_rows("U8", "U8"),
    **{f"affine {bits}": p.mlx("affine", bits, 64) for bits in (4, 6, 8)},
    "affine 4 g32": p.mlx("affine", 4, 32),
}


def pack_with(folder, store):
    parts, meant = p.encode(p.tensors("v41"), lambda name: store if name == NAME else BF16 if release(name) is BF16 else release(name))
    return p.write(folder, p.V41, p.flat(parts), family="v41"), meant[NAME]


@pytest.mark.parametrize("layout", STORES)
def test_rows(layout, tmp_path):
    folder, want = pack_with(tmp_path, STORES[layout])
    pack = open_pack(folder)
    addresses = np.random.default_rng(1).integers(0, p.ENGRAM_ROWS, (1, 7, 4))
    reader = EngramReader.open(pack.table_specs, None, None)
    ticket = reader.stage(addresses)
    got = np.array(take_values(ticket, 0).astype(mx.float32))
    reader.close()
    stored, _ = STORES[layout](p.tensors("v41")[NAME])
    if "release" not in layout:
        # The goldens of affine rows are what MLX makes in the scales' own dtype.
        words, scales, biases = (mx.array(stored[leaf][1]) for leaf in ("weight", "scales", "biases"))
        group = 64 // scales.shape[1]
        parts = (words, scales.view(mx.bfloat16), biases.view(mx.bfloat16))
        want = np.array(mx.dequantize(*parts, group_size=group, bits=words.shape[1] * 32 // 64).astype(mx.float32))
    np.testing.assert_array_equal(got, want[addresses[0]].reshape(7, -1))
    assert pack.table_bytes == sum(array.nbytes for _, array in stored.values())


@pytest.mark.parametrize("leaf", ["scales", "biases", "weight"])
def test_an_incomplete_table_is_named(leaf, tmp_path):
    parts, _ = p.encode(p.tensors("v41"), lambda name: STORES["affine 4"] if name == NAME else release(name))
    del parts[NAME][leaf]
    folder = p.write(tmp_path, p.V41, p.flat(parts), family="v41")
    with pytest.raises(PackError, match=r"layers\.1\.engram\.embed"):
        open_pack(folder)
