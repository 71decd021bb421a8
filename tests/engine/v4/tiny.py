"""A V4 pack of random weights with small windows and groups, so that few rows cross every border."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24, "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_lora_rank": 8,
    "o_groups": 2, "moe_intermediate_size": 16, "n_routed_experts": 5, "n_shared_experts": 1, "num_experts_per_tok": 3,
    "norm_topk_prob": True, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "routed_scaling_factor": 1.5, "swiglu_limit": 1.5,
    "hidden_act": "silu", "num_hash_layers": 1, "sliding_window": 16, "compress_ratios": [0, 4, 12, 4, 0],
    "compress_rope_theta": 160000.0, "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
    "max_position_embeddings": 4096, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 6, "hc_mult": 4, "hc_sinkhorn_iters": 1,
    "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip


def weights(config: dict[str, Any], seed: int = 3) -> dict[str, np.ndarray]:
    """float32 tensors by release name, experts one by one; every name is spelled out here."""
    rng, c = np.random.default_rng(seed), config
    d, hd, s, e = c["hidden_size"], c["head_dim"], c["hc_mult"], c["n_routed_experts"]
    wide, width = c["num_attention_heads"] * hd, c["moe_intermediate_size"]
    normal = lambda *shape, size=1.0: (rng.standard_normal(shape) * size).astype(np.float32)
    matrix = lambda out, into, size=1.0: normal(out, into, size=size * into**-0.5)
    ones = lambda n, size=1.0: (size * (1 + 0.2 * rng.standard_normal(n))).astype(np.float32)
    w = {"embed.weight": normal(c["vocab_size"], d, size=0.7), "head.weight": matrix(c["vocab_size"], d, 2.0), "norm.weight": ones(d)}
    w |= {"hc_head_fn": matrix(s, s * d), "hc_head_base": normal(s, size=0.5), "hc_head_scale": np.array([0.8], np.float32)}
    for i in range(c["num_hidden_layers"]):
        p, ratio = f"layers.{i}.", c["compress_ratios"][i]
        for half in ("attn", "ffn"):
            w[f"{p}hc_{half}_fn"], w[f"{p}hc_{half}_base"] = matrix((2 + s) * s, s * d), normal((2 + s) * s, size=0.5)
            w[f"{p}hc_{half}_scale"], w[f"{p}{half}_norm.weight"] = np.array([0.7, 0.9, 1.3], np.float32), ones(d)
        w[f"{p}attn.wq_a.weight"], w[f"{p}attn.q_norm.weight"] = matrix(c["q_lora_rank"], d), ones(c["q_lora_rank"])
        w[f"{p}attn.wq_b.weight"] = matrix(wide, c["q_lora_rank"])
        w[f"{p}attn.wkv.weight"], w[f"{p}attn.kv_norm.weight"] = matrix(hd, d), ones(hd, 1.5)
        w[f"{p}attn.wo_a.weight"] = matrix(c["o_groups"] * c["o_lora_rank"], wide // c["o_groups"])
        w[f"{p}attn.wo_b.weight"] = matrix(d, c["o_groups"] * c["o_lora_rank"])
        w[f"{p}attn.attn_sink"] = normal(c["num_attention_heads"])
        halves, dims = (2 if ratio == 4 else 1), {"attn.compressor": hd} if ratio else {}
        if ratio == 4:
            dims["attn.indexer.compressor"] = c["index_head_dim"]
            w[f"{p}attn.indexer.wq_b.weight"] = matrix(c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
            w[f"{p}attn.indexer.weights_proj.weight"] = matrix(c["index_n_heads"], d)
        for name, dim in dims.items():
            w[f"{p}{name}.wkv.weight"], w[f"{p}{name}.wgate.weight"] = matrix(halves * dim, d), matrix(halves * dim, d, 2.0)
            w[f"{p}{name}.ape"], w[f"{p}{name}.norm.weight"] = normal(ratio, halves * dim), ones(dim, 1.5)
        w[f"{p}ffn.gate.weight"] = matrix(e, d, 2.0)
        if i < c["num_hash_layers"]:
            picks = [rng.permutation(e)[: c["num_experts_per_tok"]] for _ in range(c["vocab_size"])]
            w[f"{p}ffn.gate.tid2eid"] = np.stack(picks).astype(np.int64)
        else:
            w[f"{p}ffn.gate.bias"] = normal(e, size=0.3)
        for owner in ("shared_experts", *(f"experts.{k}" for k in range(e))):
            for m, out, into in (("w1", width, d), ("w3", width, d), ("w2", d, width)):
                w[f"{p}ffn.{owner}.{m}.weight"] = matrix(out, into, 1.5)
    return w


def write_pack(folder: Path, changes: dict[str, Any] | None = None, seed: int = 3, rename=lambda w: w) -> dict[str, np.ndarray]:
    """Write config.json and model.safetensors; rename: dict -> dict, before writing. Returns the tensors by release name."""
    config = CONFIG | (changes or {})
    w = weights(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({k: np.ascontiguousarray(v) for k, v in rename(w).items()}, folder / "model.safetensors")
    return w
