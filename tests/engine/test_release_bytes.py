"""Numbers out of bytes: value tables, fp8 and fp4 blocks, table rows, and which shard owns a tensor."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.errors import PackDamaged
from dsv41chat.engine.pack.index import TensorRef, open_index, read_header
from dsv41chat.engine.pack.matrix import floats
from dsv41chat.engine.pack.release import E2M1, E4M3, Blocks, recognise, scale_block, ue8m0
from tests.v41 import DATA, golden

CHECKPOINTS = DATA / "checkpoints"


def test_value_tables():
    g = golden("checkpoints/byte_tables.safetensors")
    np.testing.assert_array_equal(E4M3, g["e4m3.expected"])
    np.testing.assert_array_equal(ue8m0(np.arange(255, dtype=np.uint8)), g["e8m0.expected"])
    np.testing.assert_array_equal(E2M1, g["e2m1.expected"])


def matrix(weight: TensorRef, scale: TensorRef) -> Blocks:
    width = weight.shape[1] * (2 if weight.dtype == "I8" else 1)
    return recognise({"weight": weight, "scale": scale}, weight.name, (weight.shape[0], width), None)


def by_mlx(found: Blocks) -> np.ndarray:
    """The values that MLX reads out of the repacked words."""
    layout, words = found.layout, {k: mx.array(v) for k, v in found.words().items()}
    return np.array(mx.dequantize(words["weight"], words["scales"], group_size=32, bits=layout.bits, mode=layout.mode, dtype=mx.float32))


@pytest.mark.parametrize("block", [32, 128])
def test_fp8_blocks(block):
    path = CHECKPOINTS / f"fp8_block{block}.safetensors"
    refs, want = read_header(path), golden(f"checkpoints/fp8_block{block}.safetensors")["expected"]
    weight, scale = refs["layers.0.attn.wq_a.weight"], refs["layers.0.attn.wq_a.scale"]
    assert scale_block(weight, scale) == (block, block)
    found = matrix(weight, scale)
    np.testing.assert_array_equal(found.values(), want)
    np.testing.assert_array_equal(found.values(33, 67), want[33:67])
    np.testing.assert_array_equal(by_mlx(found), want)


def test_fp4_experts():
    refs, want = read_header(CHECKPOINTS / "fp4_experts.safetensors"), golden("checkpoints/fp4_experts.safetensors")
    for e in range(3):
        weight, scale = (refs[f"layers.0.ffn.experts.{e}.w1.{part}"] for part in ("weight", "scale"))
        found = matrix(weight, scale)
        np.testing.assert_array_equal(found.values(), want[f"expected.{e}"])
        np.testing.assert_array_equal(by_mlx(found), want[f"expected.{e}"])


def test_native_packing():
    refs, want = read_header(DATA / "v41/native_packing.safetensors"), golden("v41/native_packing.safetensors")
    for kind in ("fp8", "fp4"):
        np.testing.assert_array_equal(matrix(refs[f"{kind}.weight"], refs[f"{kind}.scale"]).values(), want[f"{kind}.expected"])


def test_a_nan_scale_is_refused(tmp_path):
    refs = read_header(DATA / "v41/native_packing.safetensors")
    raw = bytearray((DATA / "v41/native_packing.safetensors").read_bytes())
    scale = refs["fp8.scale"]
    raw[scale.offset] = 255
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    refs = read_header(path)
    with pytest.raises(PackDamaged, match="fp8.scale holds the byte 255"):
        matrix(refs["fp8.weight"], refs["fp8.scale"]).values()


def test_the_index_owns_duplicates():
    index = open_index(CHECKPOINTS / "dup_index")
    a = floats(index.tensors["a"])
    np.testing.assert_array_equal(a, np.zeros_like(a))
    assert index.notes


def test_scales_must_fit_their_weight():
    weight = TensorRef("w.weight", DATA, "F8_E4M3", (70, 96), 0, 70 * 96)
    with pytest.raises(PackDamaged, match="does not fit"):
        scale_block(weight, TensorRef("w.scale", DATA, "F8_E8M0", (5, 3), 0, 15))
