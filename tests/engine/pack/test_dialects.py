"""Names as converters write them, spelled out here, lead to the same tensors as release names: byte for byte, experts one by one."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.nn import linear as nn
from dsv41chat.engine.pack.build import build_trunk, open_pack
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import AFFINE, MXFP4, MXFP8, logits, release, release_v4, table_or

# Release name -> the dialect's, by whole path components after `layers.N.`; {e} stands for an expert's number.
MLX_LM_V41 = {
    "embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight", "norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "hc_attn_fn": "attn_hc.fn", "hc_attn_base": "attn_hc.base", "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn", "hc_ffn_base": "ffn_hc.base", "hc_ffn_scale": "ffn_hc.scale",
    "attn.attn_sink": "self_attn.sinks", "attn.wq_a": "self_attn.q_a_proj", "attn.wq_b": "self_attn.q_b_proj", "attn.wkv": "self_attn.kv_proj",
    "attn.wo_a": "self_attn.o_a_proj", "attn.wo_b": "self_attn.o_b_proj", "attn.q_norm": "self_attn.q_a_norm", "attn.kv_norm": "self_attn.kv_norm",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj", "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.norm": "self_attn.compressor.kv_norm", "attn.indexer.wq_b": "self_attn.indexer.q_b_proj",
    "attn.indexer.wk": "self_attn.indexer.k_proj", "attn.indexer.k_norm": "self_attn.indexer.k_norm",
    "attn.indexer.weights_proj": "self_attn.indexer.weights_proj", "ffn.gate.bias": "mlp.gate.e_score_correction_bias", "ffn.gate": "mlp.gate",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj", "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj", "ffn.experts.w1": "mlp.experts.switch_mlp.gate_proj",
    "ffn.experts.w2": "mlp.experts.switch_mlp.down_proj", "ffn.experts.w3": "mlp.experts.switch_mlp.up_proj",
}  # fmt: skip
PIPENETWORK_V41 = {
    "ffn.experts.w1": "ffn.experts.gate_proj", "ffn.experts.w2": "ffn.experts.down_proj", "ffn.experts.w3": "ffn.experts.up_proj",
}  # fmt: skip
MLX_VLM = {
    "ffn.experts.w1": "ffn.switch_mlp.gate_proj", "ffn.experts.w2": "ffn.switch_mlp.down_proj", "ffn.experts.w3": "ffn.switch_mlp.up_proj",
    "ffn.shared_experts.w1": "ffn.shared_experts.gate_proj", "ffn.shared_experts.w2": "ffn.shared_experts.down_proj",
    "ffn.shared_experts.w3": "ffn.shared_experts.up_proj", "hc_attn_fn": "attn_hc.fn", "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale", "hc_ffn_fn": "ffn_hc.fn", "hc_ffn_base": "ffn_hc.base", "hc_ffn_scale": "ffn_hc.scale",
    "hc_head_fn": "hc_head.fn", "hc_head_base": "hc_head.base", "hc_head_scale": "hc_head.scale",
    "ffn.gate.bias": "ffn.gate.e_score_correction_bias",
}  # fmt: skip
MLX_VLM_V41 = {k: v for k, v in MLX_VLM.items() if not k.startswith(("hc_", "ffn.gate"))}
TRANSFORMERS_V4 = {
    "scale": "weight_scale_inv", "attn.compressor": "self_attn.compressor", "attn.indexer": "self_attn.indexer", "attn": "self_attn",
    "ffn.experts.{e}.w1": "mlp.experts.{e}.gate_proj", "ffn.experts.{e}.w2": "mlp.experts.{e}.down_proj",
    "ffn.experts.{e}.w3": "mlp.experts.{e}.up_proj", "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj", "ffn.shared_experts.w3": "mlp.shared_experts.up_proj", "ffn.gate": "mlp.gate",
}  # fmt: skip


def rename(tensors, table, *, layer_prefix="", top=None):
    """layer_prefix: before `layers.`; top: names of embed, head and norm where the table does not have them."""
    out = {}
    for name, tensor in tensors.items():
        pieces = name.split(".")
        if pieces[0] != "layers":
            key = (top or {}).get(pieces[0])
            new = ".".join([key, *pieces[1:]]) if key else table.get(name, name)
            out[new] = tensor
            continue
        rest = ".".join(pieces[2:])
        leaf = rest.rsplit(".", 1)[-1] if rest.endswith((".weight", ".scale", ".scales", ".biases")) else ""
        stem = rest.removesuffix(f".{leaf}") if leaf else rest
        expert = next((piece for piece in pieces if piece.isdigit() and piece is not pieces[1]), "")
        open_stem = stem.replace(f"experts.{expert}.", "experts.{e}.") if expert else stem
        best = max((k for k in table if open_stem == k or open_stem.startswith(k + ".")), key=len, default=None)
        new = (table[best] + open_stem[len(best) :]).replace("{e}", expert) if best else stem
        new = ".".join(part for part in (new, table.get(leaf, leaf)) if part)
        out[f"{layer_prefix}layers.{pieces[1]}.{new}"] = tensor
    return out


def mixed_affine(name: str):
    return p.plain("BF16") if any(part in name for part in ("compressor", "weights_proj")) else AFFINE[4] if ".ffn.experts." in name else AFFINE[8]


def native_tags(name: str):
    """Engram rows as an MLX writer saves them: release bytes under the tag U8."""
    return p.fp8_rows("U8", "U8") if "engram.embed" in name else mixed_affine(name)


def without_engram(family_tensors):
    return {name: w for name, w in family_tensors.items() if ".engram." not in name and not name.endswith("bias_vl")}


TEXT_ONLY = p.V41 | {"text_config": {**p.V41["text_config"], "engram_layer_ids": [], "engram_num_embeddings": []}}
T_TOP = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
V_TOP = {"embed": "language_model.embed_tokens", "head": "language_model.head", "norm": "language_model.norm"}
V4_HC = {"hc_head_fn": "model.hc_head.fn", "hc_head_base": "model.hc_head.base", "hc_head_scale": "model.hc_head.scale"}
V_HC = {name: f"language_model.{new.removeprefix('model.')}" for name, new in V4_HC.items()}

# dialect, family -> (stores, layout, renaming, a name that must occur)
DIALECTS = {
    ("P", "v41"): (native_tags, dict(stacked=True), lambda t: rename(t, PIPENETWORK_V41), "layers.0.ffn.experts.gate_proj.scales"),
    ("L", "v41"): (
        mixed_affine, dict(stacked=True, wo_a_groups=2), lambda t: rename(t, MLX_LM_V41, layer_prefix="model."),
        "model.layers.1.mlp.experts.switch_mlp.down_proj.biases",
    ),
    ("V", "v41"): (
        table_or(mixed_affine), dict(stacked=True, wo_a_groups=2), lambda t: rename(t, MLX_VLM_V41, layer_prefix="language_model.", top=V_TOP),
        "language_model.layers.1.attn.wo_a.scales",
    ),
    ("V", "v4"): (
        mixed_affine, dict(stacked=True, wo_a_groups=2), lambda t: rename(t, MLX_VLM | V_HC, layer_prefix="language_model.model.", top=V_TOP),
        "language_model.model.layers.1.ffn.gate.e_score_correction_bias",
    ),
    ("M", "v4"): (
        lambda name: AFFINE[2] if ".ffn.experts." in name else AFFINE[4], dict(stacked=True),
        lambda t: rename(t, MLX_VLM | V4_HC, layer_prefix="model.", top=T_TOP), "model.layers.1.ffn.switch_mlp.up_proj.weight",
    ),
    ("S", "v4"): (lambda name: MXFP4 if ".ffn.experts." in name else MXFP8, dict(stacked=True), lambda t: t, "layers.1.ffn.experts.w1.scales"),
    ("T", "v4"): (
        release_v4, {}, lambda t: rename(t, TRANSFORMERS_V4 | V4_HC, layer_prefix="model.", top=T_TOP),
        "model.layers.1.mlp.experts.2.gate_proj.weight_scale_inv",
    ),
}  # fmt: skip


def make(folder, dialect, family):
    choose, layout, renaming, sample = DIALECTS[dialect, family]
    values, config = p.tensors(family), p.CONFIGS[family]
    if dialect == "L":
        values, config = without_engram(values), TEXT_ONLY
    parts, meant = p.encode(values, choose)
    plain_names = p.flat(parts)
    found = renaming(p.flat(parts, **layout))
    assert sample in found
    table = {k: v for k, v in plain_names.items() if "engram.embed" in k}
    return p.write(folder / "pack", config, found, family=family), plain_names, p.write_twin(folder / "twin", family, meant, table, config)


@pytest.mark.parametrize("dialect, family", DIALECTS)
def test_a_dialect_leads_to_the_release_tensors(dialect, family, tmp_path):
    folder, want, twin = make(tmp_path, dialect, family)
    pack = open_pack(folder)
    assert set(pack.index.tensors) == set(want)
    for name, (tag, array) in want.items():
        ref = pack.index.tensors[name]
        assert (ref.dtype, ref.shape, ref.bytes().tobytes()) == (tag, array.shape, array.tobytes()), name
    np.testing.assert_allclose(logits(folder), logits(twin), atol=5e-4)


def test_quantised_matrices_stay_quantised(tmp_path):
    folder, _, _ = make(tmp_path, "P", "v41")
    trunk = build_trunk(open_pack(folder), dtype=mx.float32)
    layer = trunk.layers[1]
    held = [trunk.head, layer.attention.weights.wq_a, layer.attention.weights.wo_a, layer.moe.w1, layer.moe.shared1, trunk.embed]
    kinds = [nn.QuantizedLinear, nn.QuantizedLinear, nn.QuantizedGroupedLinear, nn.QuantizedExpertLinear, nn.QuantizedLinear, nn.QuantizedLookup]
    assert [type(module) for module in held] == kinds
    assert layer.moe.w1.packed.weight.shape == (3, 128, 128 * 4 // 32) and layer.moe.w1.packed.bits == 4


def test_two_dialects_in_one_pack_are_refused(tmp_path):
    from dsv41chat.engine.errors import PackDamaged

    parts, _ = p.encode(p.tensors("v4"), lambda name: AFFINE[4])
    found = p.flat(parts)
    folder = p.write(tmp_path, p.V4, found | {"model.layers.1.self_attn.q_a_proj.scales": found["layers.1.attn.wq_a.scales"]}, family="v4")
    with pytest.raises(PackDamaged, match=r"two names for layers\.1\.attn\.wq_a\.scales"):
        open_pack(folder)


def test_fp8_head_under_its_own_scale_name(tmp_path):
    """One EXL3 revision stores the head as MXFP8: lm_head.weight and lm_head.weight_scale."""
    parts, meant = p.encode(p.tensors("v41"), release)
    parts["head.weight"], meant["head.weight"] = p.fp8_rows()(p.tensors("v41")["head.weight"])
    found = p.flat(parts)
    table = {k: v for k, v in found.items() if "engram.embed" in k}
    renamed = {{"head.weight": "lm_head.weight", "head.scale": "lm_head.weight_scale"}.get(k, k): v for k, v in found.items()}
    pack = p.write(tmp_path / "pack", p.V41, renamed, family="v41")
    np.testing.assert_allclose(logits(pack), logits(p.write_twin(tmp_path / "twin", "v41", meant, table)), atol=5e-4)


def test_padded_head_counts_are_replaced(tmp_path):
    parts, _ = p.encode(p.tensors("v41"), release)
    folder = p.write(tmp_path, p.V41, p.flat(parts), family="v41")
    want = open_pack(folder).config
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_attention_heads": 3, "o_groups": 3, "virtual_heads_from": {"num_attention_heads": 2, "o_groups": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_pack(folder).config == want
