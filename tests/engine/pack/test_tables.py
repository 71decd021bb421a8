"""Engram tables in every layout of a pack: the rows that the reader gives are the rows that were written."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import probe_pack, verify_full, verify_plain
from dsv41chat.engine.convert.convert import convert_pack, plan_conversion
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.values import take_values
from dsv41chat.engine.errors import PackDamaged, PackError, PackIncomplete
from dsv41chat.engine.pack.build import open_pack
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import BF16, CASES, logits, release, wo_a_slices

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


@pytest.fixture
def split(tmp_path):
    """(a full EXL3 build without its tables, the release's table shard, the same build in one piece)."""
    found = p.flat(wo_a_slices(p.encode(p.tensors("v41"), CASES["exl3-full"]["v41"])[0]))
    table = {name: tensor for name, tensor in found.items() if "engram.embed" in name}
    bare = p.write(tmp_path / "bare", p.V41, {name: tensor for name, tensor in found.items() if name not in table}, family="v41")
    (tmp_path / "release").mkdir()
    p.write_safetensors(tmp_path / "release/model-00047-of-00048.safetensors", table)
    p.write_safetensors(tmp_path / "release/model-00001-of-00001.safetensors", {"layers.0.attn_norm.weight": ("F32", np.ones(128, np.float32))})
    return bare, tmp_path / "release", p.write(tmp_path / "whole", p.V41, found, family="v41")


def test_tables_that_a_build_leaves_to_the_release(split, tmp_path):
    """Without them it is refused with what to do; linked into the folder they are read there, and nothing else of that folder is."""
    bare, shards, whole = split
    with pytest.raises(PackIncomplete, match=r"missing: layers\.1\.engram\.embed\.weight: this build leaves its Engram tables") as refused:
        probe_pack(bare)
    assert "as 'engram'" in refused.value.hint
    (bare / "engram").symlink_to(shards)
    pack = open_pack(bare)
    assert pack.notes == ("the Engram tables come from engram/model-00047-of-00048.safetensors",)
    np.testing.assert_array_equal(logits(bare), logits(whole))
    assert pack.table_bytes == open_pack(whole).table_bytes > 0
    with pytest.raises(PackIncomplete, match="no tokenizer"):
        list(verify_plain(bare))
    said = digests_of(bare, shards, right=True)
    assert said[0] == "1 files have the published sha256" and said[1].startswith("not compared: of 1 of 2 files")
    with pytest.raises(PackDamaged, match="model-00047-of-00048.safetensors has the sha256"):
        digests_of(bare, shards, right=False)
    convert_pack(plan_conversion(bare, tmp_path / "out", "native"))
    np.testing.assert_allclose(logits(tmp_path / "out"), logits(whole), atol=5e-4)


def digests_of(folder, shards, right: bool) -> list[str]:
    """What the full check says of checksums when the release's folder lists its table shard."""
    import hashlib

    shard = shards / "model-00047-of-00048.safetensors"
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    # The other name is also that of the build's own shard, about which this list says nothing.
    lines = [f"{digest if right else digest[::-1]}  {shard.name}", f"{'0' * 64}  model-00001-of-00001.safetensors"]
    (shards / "SHA256SUMS").write_text("\n".join(lines))
    return [found.what for found in verify_full(folder, done={}) if found.name == "checksums"]


def test_other_tables_are_another_build(split):
    bare, shards, _ = split
    (bare / "engram").symlink_to(shards)
    before = probe_pack(bare).fingerprint
    shard = shards / "model-00047-of-00048.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert probe_pack(bare).fingerprint != before
    (shards / "copy.safetensors").write_bytes(data)
    with pytest.raises(PackDamaged, match=r"is in copy\.safetensors and in model-00047-of-00048\.safetensors"):
        probe_pack(bare)
