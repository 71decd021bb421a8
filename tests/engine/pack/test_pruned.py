"""V4 builds with pruned experts: hashed layers keep all of theirs, because their token tables name experts by number."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.admission import plan_memory
from dsv41chat.engine.convert.convert import convert_pack, plan_conversion
from dsv41chat.engine.errors import PackDamaged, PackIncomplete
from dsv41chat.engine.pack.build import arrays_of, build_trunk, open_pack
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import AFFINE, logits

KEPT = (0, 2)  # of three experts, in the layers that are pruned
CONFIG = p.V4 | {"n_routed_experts": len(KEPT)}


def pruned(values: dict[str, np.ndarray], layers) -> dict[str, np.ndarray]:
    """The tensors without expert 1 of these layers, the others renumbered."""
    out = {}
    for name, value in values.items():
        parts = name.split(".")
        if parts[0] == "layers" and int(parts[1]) in layers:
            if ".ffn.experts." in name:
                if int(parts[4]) not in KEPT:
                    continue
                parts[4] = str(KEPT.index(int(parts[4])))
            elif name.endswith(("ffn.gate.weight", "ffn.gate.bias")):
                value = value[list(KEPT)]
        out[".".join(parts)] = value
    return out


def pack_of(folder, values, config=CONFIG, stacked=True):
    return p.write(folder, config, p.flat(p.encode(values, lambda name: AFFINE[8])[0], stacked=stacked), family="v4")


@pytest.mark.parametrize("stacked", [True, False])
def test_a_hashed_layer_keeps_more_experts_than_the_others(stacked, tmp_path):
    """It computes what the whole build computes when the router of the other layers never takes the expert that is gone."""
    values = p.tensors("v4")
    pack = open_pack(pack_of(tmp_path / "pruned", pruned(values, (1, 2)), stacked=stacked))
    assert [pack.config.experts_of(layer.hashed) for layer in pack.plan] == [3, 2, 2] and pack.notes == ()
    trunk = build_trunk(pack)
    assert plan_memory(pack).weights == sum(a.nbytes for a in {id(a): a for a in arrays_of(trunk)}.values())
    never = {name: value - np.float32([0, 1e9, 0]) if name.endswith("ffn.gate.bias") else value for name, value in values.items()}
    np.testing.assert_allclose(logits(pack.folder), logits(pack_of(tmp_path / "whole", never, p.V4)), atol=1e-5)


def test_it_is_converted_with_all_of_them(tmp_path):
    pack_of(tmp_path / "pruned", pruned(p.tensors("v4"), (1, 2)))
    convert_pack(plan_conversion(tmp_path / "pruned", tmp_path / "out", "native"))
    assert open_pack(tmp_path / "out").config.whole_experts == 3
    np.testing.assert_array_equal(logits(tmp_path / "out"), logits(tmp_path / "pruned"))


def test_what_is_refused(tmp_path):
    """A hashed layer without an expert that its router counts, a scored one with more than the config says, a table that names none."""
    values = p.tensors("v4")
    short = {name: value for name, value in pruned(values, (1, 2)).items() if not name.startswith("layers.0.ffn.experts.1.")}
    with pytest.raises(PackIncomplete, match=r"missing: layers\.0\.ffn\.experts\.1\.w1\.weight"):
        open_pack(pack_of(tmp_path / "short", short, stacked=False))
    with pytest.raises(PackIncomplete, match=r"unexpected: layers\.2\.ffn\.experts\.2\.w1"):
        open_pack(pack_of(tmp_path / "more", pruned(values, (1,)), stacked=False))
    with pytest.raises(PackDamaged, match=r"tid2eid holds numbers from 0 to 2, there are 2 to name"):
        build_trunk(open_pack(pack_of(tmp_path / "all", pruned(values, (0, 1, 2)))), dtype=mx.float32)
    assert json.loads((tmp_path / "all/config.json").read_text())["n_routed_experts"] == 2
