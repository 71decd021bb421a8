"""V4 packs on disk: names of every layout, the release's bytes, and what is refused by name before weights are read."""

from __future__ import annotations

import json
import re
import struct

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import open_engine, probe_pack
from dsv41chat.engine.errors import Cancelled, PackDamaged, PackIncomplete, PackUnsupported
from dsv41chat.engine.nn.linear import ExpertLinear, GroupedLinear, QuantizedExpertLinear, QuantizedGroupedLinear, QuantizedLinear
from dsv41chat.engine.pack.build import build_trunk, open_pack
from tests.engine.v4 import golden as g
from tests.engine.v4 import tiny

# Conversion names, written out: (release pattern, name there).
CONVERSION = (
    (r"^embed\.", "model.embed_tokens."), (r"^head\.", "lm_head."), (r"^norm\.", "model.norm."), (r"^hc_head_(\w+)$", r"model.hc_head.\1"),
    (r"^layers\.", "model.layers."), (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"), (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."), (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
)  # fmt: skip
TRANSFORMERS = (
    (r"^head\.", "lm_head."), (r"^embed\.", "model.embed_tokens."), (r"^norm\.", "model.norm."), (r"^hc_head_(\w+)$", r"model.hc_head.hc_\1"),
    (r"^layers\.", "model.layers."), (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"), (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.attn\.indexer\.compressor\.wkv\.", ".self_attn.compressor.indexer.kv_proj."),
    (r"\.attn\.indexer\.compressor\.wgate\.", ".self_attn.compressor.indexer.gate_proj."),
    (r"\.attn\.indexer\.compressor\.ape$", ".self_attn.compressor.indexer.position_bias"),
    (r"\.attn\.indexer\.compressor\.norm\.", ".self_attn.compressor.indexer.kv_norm."),
    (r"\.attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"\.attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.compressor\.wkv\.", ".self_attn.compressor.kv_proj."), (r"\.attn\.compressor\.wgate\.", ".self_attn.compressor.gate_proj."),
    (r"\.attn\.compressor\.ape$", ".self_attn.compressor.position_bias"), (r"\.attn\.compressor\.norm\.", ".self_attn.compressor.kv_norm."),
    (r"\.attn\.wq_a\.", ".self_attn.q_a_proj."), (r"\.attn\.q_norm\.", ".self_attn.q_a_norm."), (r"\.attn\.wq_b\.", ".self_attn.q_b_proj."),
    (r"\.attn\.wkv\.", ".self_attn.kv_proj."), (r"\.attn\.kv_norm\.", ".self_attn.kv_norm."), (r"\.attn\.wo_a\.", ".self_attn.o_a_proj."),
    (r"\.attn\.wo_b\.", ".self_attn.o_b_proj."), (r"\.attn\.attn_sink$", ".self_attn.sinks"), (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."), (r"\.ffn\.shared_experts\.w1\.", ".mlp.shared_experts.gate_proj."),
    (r"\.ffn\.shared_experts\.w3\.", ".mlp.shared_experts.up_proj."), (r"\.ffn\.shared_experts\.w2\.", ".mlp.shared_experts.down_proj."),
    (r"\.ffn\.", ".mlp."),
)  # fmt: skip


def renamed(name: str, table) -> str:
    for pattern, to in table:
        name = re.sub(pattern, to, name)
    return name


def stack(w: dict, layer: str, m: str) -> np.ndarray:
    return np.stack([w[f"{layer}.ffn.experts.{e}.{m}.weight"] for e in range(tiny.CONFIG["n_routed_experts"])])


def conversion(w: dict, prefix: str = "", grouped: bool = False) -> dict:
    out = {}
    for name, value in w.items():
        if ".experts." in name:
            layer, m = name.split(".ffn.")[0], name.split(".")[-2]
            spelled = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[m]
            out[f"{prefix}model.{layer}.ffn.switch_mlp.{spelled}.weight"] = stack(w, layer, m)
        else:
            value = value.reshape(tiny.CONFIG["o_groups"], -1, value.shape[-1]) if grouped and name.endswith("wo_a.weight") else value
            out[prefix + renamed(name, CONVERSION)] = value
    return out


def transformers(w: dict) -> dict:
    out = {}
    for name, value in w.items():
        layer = name.split(".ffn.")[0]
        if ".experts." in name:
            spelled = f"model.{layer}.mlp.experts"
            out[f"{spelled}.gate_up_proj"] = np.concatenate([stack(w, layer, "w1"), stack(w, layer, "w3")], axis=1)
            out[f"{spelled}.down_proj"] = stack(w, layer, "w2")
        else:
            out[renamed(name, TRANSFORMERS)] = value
    return out


LAYOUTS = {
    "release": lambda w: w,
    "conversion": conversion,
    "conversion under language_model": lambda w: conversion(w, "language_model."),
    "conversion with a grouped wo_a": lambda w: conversion(w, grouped=True),
    "transformers": transformers,
    "release under model": lambda w: {f"model.{k}": v for k, v in w.items()},
}


def tree(module) -> dict[str, np.ndarray]:
    """Every array below a trunk, by path."""
    if isinstance(module, mx.array):
        return {"": np.array(module)}
    items = enumerate(module) if isinstance(module, list) else getattr(module, "__dict__", {}).items()
    return {f"{key}.{path}": value for key, child in items for path, value in tree(child).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_trunk(tmp_path, tiny_pack, layout):
    tiny.write_pack(tmp_path, rename=LAYOUTS[layout])
    pack = open_pack(tmp_path)
    assert pack.notes == () and pack.drafter is None
    want, got = tree(build_trunk(tiny_pack)), tree(build_trunk(pack))
    assert got.keys() == want.keys() and all(np.array_equal(got[k], want[k]) for k in want)
    assert sum(v.size for v in want.values()) > 50_000


def test_probe(tmp_path):
    tiny.write_pack(tmp_path)
    info = probe_pack(tmp_path, routes="stock")
    assert (info.family, info.context, info.drafter, info.table_bytes, info.has_tokenizer) == ("v4", 4096, None, 0, False)
    stored = sum(v.nbytes for v in tiny.weights(tiny.CONFIG).values())
    # Token tables are held as int32, and each indexer has its mixing matrix.
    assert abs(info.resident_bytes - stored) < 0.02 * stored


def test_an_engine_without_tables(tmp_path):
    tiny.write_pack(tmp_path)
    engine = open_engine(tmp_path, qat_sim=True)
    assert engine.family == "v4" and engine.residency().tables == () and engine.table_counters()["cold_rows"] == 0
    assert all(layer.attention.weights.rounding for layer in engine.trunk.layers)
    assert not any(layer.attention.weights.rounding for layer in open_engine(tmp_path, cache_quant=True, linear_input_fp8=True).trunk.layers)
    engine.close()


# -- what is refused or left out


def changed(tmp_path, change):
    tiny.write_pack(tmp_path, rename=change)
    return lambda: open_pack(tmp_path)


def test_a_missing_an_extra_and_a_misshaped_tensor(tmp_path):
    with pytest.raises(PackIncomplete, match=r"1 tensors missing: layers\.1\.attn\.indexer\.compressor\.ape"):
        changed(tmp_path / "a", lambda w: {k: v for k, v in w.items() if k != "layers.1.attn.indexer.compressor.ape"})()
    with pytest.raises(PackIncomplete, match=r"1 tensors unexpected: layers\.0\.attn\.compressor\.ape"):
        changed(tmp_path / "b", lambda w: w | {"layers.0.attn.compressor.ape": w["layers.1.attn.compressor.ape"]})()
    with pytest.raises(PackDamaged, match=r"layers\.2\.attn\.compressor\.ape is \[11, 24\], the config expects \[12, 24\]"):
        changed(tmp_path / "c", lambda w: w | {"layers.2.attn.compressor.ape": w["layers.2.attn.compressor.ape"][:11]})()
    with pytest.raises(PackIncomplete, match=r"experts\.4\.w2"):
        changed(tmp_path / "d", lambda w: {k: v for k, v in w.items() if k != "layers.3.ffn.experts.4.w2.weight"})()
    with pytest.raises(PackUnsupported, match=r"tid2eid has dtype F32"):
        changed(tmp_path / "e", lambda w: w | {"layers.0.ffn.gate.tid2eid": w["layers.0.ffn.gate.tid2eid"].astype(np.float32)})()
    with pytest.raises(PackDamaged, match="two names for embed.weight"):
        changed(tmp_path / "f", lambda w: w | {"model.embed_tokens.weight": w["embed.weight"]})()


def test_a_truncated_shard(tmp_path):
    tiny.write_pack(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PackDamaged, match="model.safetensors is truncated"):
        open_pack(tmp_path)


def test_tensors_that_the_text_trunk_does_not_use(tmp_path):
    """Later layers, draft blocks of any name, vision, image biases, the bias of a hashed layer: left out, and counted in the notes."""
    extra = {
        "layers.4.attn.wq_a.weight": np.zeros((16, 32), np.float32), "mtp.0.enorm.weight": np.zeros(32, np.float32),
        "layers.0.ffn.gate.bias": np.zeros(5, np.float32), "layers.2.ffn.gate.bias_vl": np.zeros(5, np.float32),
        "vision.patch.weight": np.zeros(3, np.float32),
    }  # fmt: skip
    pack = changed(tmp_path, lambda w: w | extra)()
    notes = " ".join(pack.notes)
    assert "3 tensors of layers are not used" in notes and "1 tensors of vision are not used" in notes
    assert pack.drafter is None, "one stray tensor is not a draft block"
    assert build_trunk(pack).layers[0].moe.bias is None


def test_a_config_that_promises_a_draft_block_without_tensors(tiny_pack):
    assert json.loads((tiny_pack.folder / "config.json").read_text())["num_nextn_predict_layers"] == 1 and tiny_pack.drafter is None


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_token_tables_of_both_widths(tmp_path, dtype):
    pack = changed(tmp_path, lambda w: w | {"layers.0.ffn.gate.tid2eid": w["layers.0.ffn.gate.tid2eid"].astype(dtype)})()
    table = build_trunk(pack).layers[0].moe.table
    assert table.dtype == mx.int32 and table.shape == (96, 3)


def test_layers_are_read_one_by_one(tiny_pack):
    seen = []
    build_trunk(tiny_pack, progress=lambda e: seen.append((e.stage, e.done, e.total)))
    assert [s for s in seen if s[0] == "weights"] == [("weights", i, 4) for i in range(4)]
    with pytest.raises(Cancelled):
        build_trunk(tiny_pack, cancel=lambda: len(seen) > 0)


# -- the release's bytes

RELEASE = {"hidden_size": 160, "q_lora_rank": 64, "o_lora_rank": 32, "moe_intermediate_size": 32, "head_dim": 32, "num_attention_heads": 4}
FP8 = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "attn.indexer.wq_b", "shared_experts")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -value if byte >> 7 else value


def fp4_values(packed, scale) -> np.ndarray:
    nibble = lambda o, i: E2M1[packed[o, i // 2] >> 4 * (i % 2) & 15] * 2.0 ** (int(scale[o, i // 32]) - 127)
    return np.array([[nibble(o, i) for i in range(2 * packed.shape[1])] for o in range(packed.shape[0])])


def fp8_values(codes, scale) -> np.ndarray:
    value = lambda o, i: e4m3(int(codes[o, i])) * 2.0 ** (int(scale[o // 128, i // 128]) - 127)
    return np.array([[value(o, i) for i in range(codes.shape[1])] for o in range(codes.shape[0])])


def write_release(folder) -> dict[str, np.ndarray]:
    """A pack in the release's formats, bytes made first and values from them, element by element. Returns the values."""
    rng = np.random.default_rng(2)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny.CONFIG | RELEASE | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, want = {}, {}
    for name, value in tiny.weights(config).items():
        if ".experts." in name:
            out, into = value.shape
            packed, scale = rng.integers(0, 256, (out, into // 2), np.uint8), rng.integers(121, 125, (out, into // 32), np.uint8)
            want[name] = fp4_values(packed, scale)
            tensors[name], tensors[name.removesuffix("weight") + "scale"] = ("I8", packed), ("F8_E8M0", scale)
        elif any(part in name for part in FP8):
            out, into = value.shape
            codes = rng.integers(0, 0x50, (out, into), np.uint8) | rng.integers(0, 2, (out, into), np.uint8) << 7
            scale = rng.integers(118, 121, (-(-out // 128), -(-into // 128)), np.uint8)
            want[name] = fp8_values(codes, scale)
            tensors[name], tensors[name.removesuffix("weight") + "scale"] = ("F8_E4M3", codes), ("F8_E8M0", scale)
        else:
            tensors[name] = ("I64" if value.dtype == np.int64 else "F32", value)
            want[name] = value
    header, blobs, at = {}, [], 0
    for name, (dtype, value) in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [at, at + len(raw)]}
        blobs.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return want


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v4_release")
    return folder, write_release(folder)


def dense(module) -> np.ndarray:
    """The values of a matrix module, packed or not."""
    if isinstance(module, (QuantizedLinear, QuantizedExpertLinear, QuantizedGroupedLinear)):
        words, scales, mode = module.packed.weight, module.packed.scales, module.packed.mode
        weight = np.array(mx.dequantize(words, scales, group_size=32, bits=4 if mode == "mxfp4" else 8, mode=mode, dtype=mx.float32))
    else:
        weight = np.array(module.weight)
    return weight.reshape(-1, weight.shape[-1]) if isinstance(module, (GroupedLinear, QuantizedGroupedLinear)) else weight


@pytest.mark.parametrize("packed", [False, True])
def test_release_bytes_are_read_exactly(release, packed):
    folder, want = release
    trunk = build_trunk(open_pack(folder), packed=packed)
    for layer in trunk.layers:
        p, a, m = f"layers.{layer.plan.index}", layer.attention, layer.moe
        for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
            assert np.array_equal(dense(getattr(a.weights, part)), want[f"{p}.attn.{part}.weight"]), part
        for part in ("w1", "w2", "w3"):
            experts = np.stack([want[f"{p}.ffn.experts.{e}.{part}.weight"] for e in range(5)])
            assert np.array_equal(dense(getattr(m, part)), experts), part
            assert np.array_equal(dense(getattr(m, "shared" + part[1])), want[f"{p}.ffn.shared_experts.{part}.weight"])
        assert isinstance(m.w1, QuantizedExpertLinear if packed else ExpertLinear)
        assert np.array_equal(np.array(layer.attn_mix.scale), np.array([0.7, 0.9, 1.3], np.float32)), "hc scales are parameters"


def test_packed_and_decoded_matrices_give_the_same_rows(release):
    """A trunk that computes on fp8 and fp4 words, against its twin on the decoded values; row-exact as well."""
    pack = open_pack(release[0])
    ids = np.random.default_rng(8).integers(0, 96, 60).tolist()
    plain, _ = g.feed(build_trunk(pack, packed=False), ids, [60])
    trunk = build_trunk(pack, packed=True)
    words, _ = g.feed(trunk, ids, [60])
    assert np.abs(words - plain).max() <= 1e-3 and (words.argmax(-1) == plain.argmax(-1)).mean() >= 0.98
    for cuts in (g.even(60, 7), g.even(60, 1)):
        assert g.same_bits(g.feed(trunk, ids, cuts)[0], words)
