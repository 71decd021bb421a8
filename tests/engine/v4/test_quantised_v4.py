"""The golden trunk in MLX's quantised layouts against its dequantised twin, and row-exact on packed words as well."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import rowcheck
from dsv41chat.engine.nn.linear import QuantizedExpertLinear, QuantizedGroupedLinear, QuantizedLinear
from dsv41chat.engine.pack.build import build_trunk, open_pack
from tests.engine.v4 import golden as g

ROWS = 150
PLAIN = ("norm.weight", "ffn.gate.weight")
MODES = {f"affine-{bits}": (bits, "affine") for bits in (2, 4, 6, 8)} | {"mxfp4": (4, "mxfp4"), "mxfp8": (8, "mxfp8")}


def write_both(folder, bits: int, mode: str) -> int:
    """The golden pack with every matrix of at least 32 inputs quantised, and the pack of the values that those words mean."""
    packed, values, count = {}, {}, 0
    for name, value in mx.load(str(g.FOLDER / "model.safetensors")).items():
        if value.ndim < 2 or not name.endswith(".weight") or name.endswith(PLAIN) or value.shape[-1] % 32:
            packed[name] = values[name] = value
            continue
        parts = mx.quantize(value, group_size=32, bits=bits, mode=mode)
        stem = name.removesuffix(".weight")
        packed |= {f"{stem}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts)}
        values[name] = mx.dequantize(*parts, group_size=32, bits=bits, mode=mode, dtype=mx.float32)
        count += 1
    config = json.loads((g.FOLDER / "config.json").read_text())
    for side, tensors, extra in (("packed", packed, {"quantization": {"group_size": 32, "bits": bits, "mode": mode}}), ("values", values, {})):
        (folder / side).mkdir()
        mx.save_safetensors(str(folder / side / "model.safetensors"), tensors)
        (folder / side / "config.json").write_text(json.dumps(config | extra))
    return count


@pytest.mark.parametrize("kind", MODES)
def test_packed_words_against_their_values(tmp_path, ids, kind):
    bits, mode = MODES[kind]
    assert write_both(tmp_path, bits, mode) == 72
    trunk = build_trunk(open_pack(tmp_path / "packed"), dtype=mx.float32, packed=True)
    layer = trunk.layers[1]
    assert isinstance(layer.attention.weights.wq_b, QuantizedLinear) and isinstance(layer.attention.weights.wo_a, QuantizedGroupedLinear)
    assert isinstance(layer.moe.w1, QuantizedExpertLinear) and layer.moe.w1.packed.bits == bits
    verdicts = rowcheck.probe(trunk, 4)
    assert sum(mode in v.op and "bits" in v.op for v in verdicts) >= 8 and not any(v.tokenwise for v in verdicts), "the row check knows packed words"
    words, whole = g.feed(trunk, ids[:ROWS], [ROWS])
    twin, _ = g.feed(build_trunk(open_pack(tmp_path / "values"), dtype=mx.float32), ids[:ROWS], [ROWS])
    off = np.abs(words - twin).max(-1)
    # Sums run in another order; where that turns a choice, one row differs and those after it that see its group.
    assert np.median(off) <= 1e-4 and (off <= 1e-3).mean() >= 0.9
    if kind in ("affine-4", "mxfp8"):
        for cuts in (g.even(ROWS, 41), [120, *g.even(ROWS - 120, 1)]):
            out, target = g.feed(trunk, ids[:ROWS], cuts)
            assert g.same_bits(out, words) and not g.differing(g.state_of(target.lane), g.state_of(whole.lane))
    shutil.rmtree(tmp_path / "packed")
