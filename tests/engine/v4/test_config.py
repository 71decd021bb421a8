"""config.json of the V4 family: what is read, what is refused, and what follows from it before any tensor is seen."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.config import family_of
from dsv41chat.engine.config_v4 import parse_v4
from dsv41chat.engine.errors import PackDamaged, PackUnsupported
from dsv41chat.engine.lane import PoolSpec, RingSpec
from dsv41chat.engine.ops import rope
from dsv41chat.engine.pack.names_v4 import expected_block, expected_v4
from dsv41chat.engine.plan import build_plan
from dsv41chat.engine.published import V4_FLASH as FLASH
from dsv41chat.engine.published import V4_FLASH_0731 as FLASH_0731
from dsv41chat.engine.published import V4_PRO as PRO
from dsv41chat.engine.trunk_v4 import TrunkV4
from tests.engine.v4 import tiny

SEMANTIC = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank o_groups "
    "sliding_window rms_norm_eps swiglu_limit moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok "
    "num_hash_layers scoring_func routed_scaling_factor compress_ratios index_n_heads index_head_dim index_topk rope_theta "
    "compress_rope_theta rope_scaling max_position_embeddings hc_mult hc_sinkhorn_iters hc_eps"
).split()


def specs_of(config: dict, dtype=mx.bfloat16):
    c = parse_v4(config)
    return c, TrunkV4(c, build_plan(c), None, None, None, None, [], dtype).lane_specs()


def inventory(config: dict, stacked: bool):
    c = parse_v4(config)
    return expected_v4(c, build_plan(c), stacked)


def kinds(expected) -> Counter:
    return Counter("linear" if e.kind in ("linear", "lookup") else "plain" for e in expected.values())


def test_family():
    assert family_of(FLASH) == "v4" and parse_v4(FLASH).family == "v4"


@pytest.mark.parametrize("name", SEMANTIC)
def test_no_field_has_a_default(name):
    with pytest.raises(PackUnsupported) as error:
        parse_v4({k: v for k, v in FLASH.items() if k != name})
    assert name in str(error.value) or name == "rope_scaling"


@pytest.mark.parametrize(
    "change, word",
    [
        ({"compress_ratios": [0] * 42}, "at least 43"),
        ({"compress_ratios": [0, 0] + [3] * 41}, "0, 4 or more"),
        ({"vision_n_layers": 24}, "vision"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({"o_groups": 7}, "o_groups"),
        ({"index_head_dim": 96}, "power of two"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"num_hash_layers": 44}, "num_hash_layers"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "yarn"),
        ({"sliding_window": "wide"}, "sliding_window"),
    ],
)
def test_what_is_refused(change, word):
    with pytest.raises((PackUnsupported, PackDamaged), match=word):
        parse_v4(FLASH | change)


def test_spelling_of_transformers():
    """layer_types, mlp_layer_types, partial_rotary_factor and nested rope_parameters give the same config."""
    kind = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    dropped = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "rope_theta", "compress_rope_theta")
    spelled = {k: v for k, v in FLASH.items() if k not in dropped} | {
        "layer_types": [kind[r] for r in FLASH["compress_ratios"][:43]],
        "compress_rates": {kind[4]: 4, kind[128]: 128},
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "partial_rotary_factor": 0.125,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
            "compress": FLASH["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0},
        },
    }
    assert parse_v4(spelled) == replace(parse_v4(FLASH), draft_ratios=())
    assert parse_v4(spelled | {"compress_rates": {kind[4]: 4, kind[128]: 64}}).compress_ratios.count(64) == 20
    for change in ({"compress_rates": None}, {"layer_types": ["full_attention"] * 43}, {"mlp_layer_types": ["moe", "hash_moe"] + ["moe"] * 41}):
        with pytest.raises(PackUnsupported):
            parse_v4(spelled | change)


def test_ratio_lists():
    flash, pro = (build_plan(parse_v4(c)) for c in (FLASH, PRO))
    assert Counter(p.ratio for p in flash) == {4: 21, 128: 20, 0: 2} and Counter(p.ratio for p in pro) == {4: 30, 128: 31}
    assert [p.index for p in flash if p.ratio == 4] == list(range(2, 43, 2)) and [p.index for p in pro if p.ratio == 4] == list(range(2, 61, 2))
    for plan in (flash, pro):
        assert [p.index for p in plan if p.hashed] == [0, 1, 2]
        assert all(p.scores == p.overlap == (p.ratio == 4) and p.owns_pool == (p.ratio > 0) for p in plan)
        assert all((p.rope.base, p.rope.yarn is None) == ((10000, True) if p.ratio == 0 else (160000, False)) for p in plan)


def test_draft_entries_and_other_ratios():
    assert parse_v4(FLASH).draft_ratios == (0,) and parse_v4(FLASH_0731).draft_ratios == (0, 0, 0)
    assert parse_v4(FLASH).dspark == {} and parse_v4(FLASH_0731).dspark["dspark_target_layer_ids"] == [40, 41, 42]
    other = parse_v4(tiny.CONFIG | {"compress_ratios": [1, 4, 5, 1000]})
    assert other.compress_ratios == (0, 4, 5, 1000), "1 is window only; any ratio above 4 is a plain group"
    assert [p.overlap for p in build_plan(other)] == [False, True, False, False]


def test_rope_frequencies_of_the_release():
    plain, compressed = (rope.inverse_frequencies(build_plan(parse_v4(FLASH))[i].rope) for i in (0, 2))
    assert np.allclose(plain, 10000.0 ** (-np.arange(32) / 32), rtol=1e-6)
    want = {0: 1, 1: 0.687656, 15: 0.00363554, 16: 0.00226563, 17: 0.00139680, 20: 2.96978e-4, 24: 1.95313e-5, 25: 5.37231e-6, 31: 5.68053e-7}
    for m, value in want.items():
        assert compressed[m] == pytest.approx(value, rel=2e-5), m
    cos, sin = rope.rope_table(compressed, np.array([0, 5, 1000, 10**6 - 1]))
    assert np.allclose(np.array(cos) ** 2 + np.array(sin) ** 2, 1, atol=1e-6), "no magnitude factor"


def test_flash_tensor_counts():
    """2,610 tensors where every matrix is an affine triple, 2,481 where the routed experts are mxfp4 and have no biases."""
    counts = kinds(inventory(FLASH, stacked=True))
    assert counts == {"plain": 687, "linear": 641} and counts.total() == 1328
    assert counts["plain"] + 3 * counts["linear"] == 43 * 46 + 41 * 8 + 21 * 14 + 10 == 2610
    assert counts["plain"] + 3 * counts["linear"] - 3 * 43 == 2481


def test_flash_tensor_counts_follow_layers_and_experts():
    whole = inventory(FLASH, stacked=True)
    # The last layer has ratio 4: 46 tensors as any layer, 8 for its compressor, 14 for its indexer.
    less = kinds(inventory(FLASH | {"num_hidden_layers": 42}, stacked=True))
    assert less["plain"] + 3 * less["linear"] == 2610 - 46 - 8 - 14
    # Without the two heavy layers at the end of a list of 42, only 46 + 8 go.
    less = kinds(inventory(FLASH | {"num_hidden_layers": 41}, stacked=True))
    assert less["plain"] + 3 * less["linear"] == 2610 - 2 * 46 - 2 * 8 - 14
    release, fewer = inventory(FLASH, stacked=False), inventory(FLASH | {"n_routed_experts": 255}, stacked=False)
    assert len(release) == len(whole) + 43 * 3 * 255 and len(release) - len(fewer) == 43 * 3
    assert kinds(inventory(FLASH | {"n_routed_experts": 255}, stacked=True)) == kinds(whole)


def values(expected, part: str = "") -> int:
    return sum(math.prod(e.shape) for name, e in expected.items() if part in name and e.kind != "ids")


def test_parameters_of_the_releases():
    flash, pro = (inventory(c, stacked=True) for c in (FLASH, PRO))
    assert values(flash, ".experts.") == 43 * 256 * 3 * 4096 * 2048 and round(values(flash, ".experts.") / 1e9, 1) == 277.0
    assert round(values(flash) / 1e9, 1) == 284.3
    assert values(pro, ".experts.") == 61 * 384 * 3 * 7168 * 3072 and round(values(pro) / 1e12, 1) == 1.6
    active = lambda c, all_, k, e: values(all_) - values(all_, ".experts.") * (e - k) // e - values(all_, "embed.")
    assert round(active(FLASH, flash, 6, 256) / 1e9) == 13 and round(active(PRO, pro, 6, 384) / 1e9) == 49
    one = values(inventory(FLASH | {"n_routed_experts": 255}, stacked=True))
    assert values(flash) - one == 43 * (3 * 4096 * 2048) + 43 * 4096 + 40, "an expert: its matrices, its router row, its bias in scored layers"


def test_shapes_of_the_release():
    flash = inventory(FLASH, stacked=False)
    want = {
        "layers.2.attn.compressor.ape": (4, 1024), "layers.2.attn.compressor.wkv.weight": (1024, 4096), "layers.3.attn.compressor.ape": (128, 512),
        "layers.3.attn.compressor.wgate.weight": (512, 4096), "layers.0.attn.wo_a.weight": (8192, 4096), "layers.7.hc_attn_fn": (24, 16384),
        "layers.2.attn.indexer.compressor.wkv.weight": (256, 4096), "layers.2.attn.indexer.compressor.ape": (4, 256),
        "layers.2.attn.indexer.wq_b.weight": (8192, 1024), "layers.2.attn.indexer.weights_proj.weight": (64, 4096),
        "layers.2.ffn.gate.tid2eid": (129280, 6), "layers.3.ffn.gate.bias": (256,), "hc_head_fn": (4, 16384), "hc_head_scale": (1,),
        "layers.0.ffn.experts.255.w2.weight": (4096, 2048), "layers.0.attn.attn_sink": (64,),
    }  # fmt: skip
    assert {name: flash[name].shape for name in want} == want
    for absent in ("layers.1.attn.compressor.ape", "layers.3.attn.indexer.wq_b.weight", "layers.2.ffn.gate.bias", "layers.3.ffn.gate.tid2eid"):
        assert absent not in flash
    block = expected_block(parse_v4(FLASH), "mtp.0")
    assert "mtp.0.ffn.gate.bias" in block and not any("compressor" in name or "tid2eid" in name for name in block)


@pytest.mark.parametrize("config, per_token", [(FLASH, 21 * 256 + 20 * 8 + 21 * 64), (PRO, 30 * 256 + 31 * 8 + 30 * 64)])
def test_state_per_token(config, per_token):
    """bf16 rows that stay: 6.9 kB a token for Flash, 9.8 kB for Pro."""
    _, specs = specs_of(config)
    pools = [s for s in specs if isinstance(s, PoolSpec)]
    assert sum(math.prod(s.tail) * 2 / s.ratio for s in pools) == per_token
    assert round(per_token / 1000, 1) == (6.9 if config is FLASH else 9.8)


def test_ring_sizes():
    """Window ring: a power of two >= max(2W, W + 8); raw rings hold an open group, the group before it where groups overlap, and ROLL."""
    c, specs = specs_of(FLASH)
    assert (c.ring_rows, c.roll_rows) == (256, 128)
    rings = {s.name: s for s in specs if isinstance(s, RingSpec)}
    assert rings["window.0"].rows == 256 and rings["raw.2"].rows == 256 and rings["raw.3"].rows == 256
    assert (rings["raw.2"].tail, rings["raw_keys.2"].tail, rings["raw.3"].tail) == ((2, 1024), (2, 256), (2, 512))
    assert (rings["raw.2"].visible(131), rings["raw.3"].visible(131)) == (range(124, 131), range(128, 131))
    assert rings["raw.2"].visible(3) == range(0, 3)
    c, specs = specs_of(tiny.CONFIG | {"sliding_window": 3, "compress_ratios": [0, 4, 200, 9]})
    rings = {s.name: s.rows for s in specs if isinstance(s, RingSpec)}
    assert (c.ring_rows, c.roll_rows) == (16, 13)
    assert rings == {"window.0": 16, "window.1": 16, "raw.1": 32, "raw_keys.1": 32, "window.2": 16, "raw.2": 256, "window.3": 16, "raw.3": 32}
