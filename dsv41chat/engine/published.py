"""The published configurations, written out field by field, and which tensor the releases store how.

Nothing is loaded from them: `paper.py` lays out what a release and its conversions take on disk and in memory, and the tests hold the
loader to the published counts and bytes.
"""

from __future__ import annotations

from typing import Any

_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 129280, "num_key_value_heads": 1, "head_dim": 512,
    "qk_rope_head_dim": 64, "o_lora_rank": 1024, "sliding_window": 128, "compress_rope_theta": 160000, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 1048576, "index_n_heads": 64, "index_head_dim": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "num_hash_layers": 3, "swiglu_limit": 10.0,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
}  # fmt: skip

V4_FLASH: dict[str, Any] = _V4 | {
    "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "q_lora_rank": 1024, "o_groups": 8, "index_topk": 512,
    "n_routed_experts": 256, "moe_intermediate_size": 2048, "routed_scaling_factor": 1.5, "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
}  # fmt: skip
V4_FLASH_0731: dict[str, Any] = V4_FLASH | {
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0, 0, 0], "dspark_block_size": 5, "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42], "dspark_markov_rank": 256,
}  # fmt: skip
V4_PRO: dict[str, Any] = _V4 | {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16, "index_topk": 1024,
    "n_routed_experts": 384, "moe_intermediate_size": 3072, "routed_scaling_factor": 2.5, "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
}  # fmt: skip
_V41_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8,
    "sliding_window": 128, "rms_norm_eps": 1e-20, "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "swiglu_limit": 10.0,
    "moe_intermediate_size": 2304, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32, "index_head_dim": 128,
    "index_topk": 512, "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8, "rope_theta": 10000,
    "compress_rope_theta": 160000, "max_position_embeddings": 1048576, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
    "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4, "engram_n_heads": 8,
    "engram_head_dim": 256, "engram_vocab_size": 16000000, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
}  # fmt: skip
V41_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2, "image_token_id": 129264, "text_config": _V41_TEXT,
    "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    },
}  # fmt: skip

RELEASES: dict[str, dict[str, Any]] = {"V4-Flash": V4_FLASH, "V4-Pro": V4_PRO, "V4.1-Flash": V41_FLASH}

_BF16 = ("embed", "head", "norm", "compressor", "weights_proj", "indexer.wk", "q_weight", "k_weight", "gate.weight")


def stored(name: str, shape: tuple[int, ...], block: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of a release for one tensor of the architecture: name -> (safetensors tag, shape). block: edge of its fp8 blocks."""
    scale = name.removesuffix("weight") + "scale"
    if name.endswith("tid2eid"):
        return {name: ("I64", shape)}
    if name.endswith("engram.embed.weight"):
        return {name: ("F8_E4M3", shape), scale: ("F8_E8M0", (shape[0], shape[1] // 32))}
    if ".experts." in name:
        return {name: ("I8", (shape[0], shape[1] // 2)), scale: ("F8_E8M0", (shape[0], shape[1] // 32))}
    if any(part in name for part in _BF16) and ".hc_" not in f".{name}" and not name.endswith((".bias", "bias_vl", ".ape")):
        return {name: ("BF16", shape)}
    if not name.endswith("weight"):
        return {name: ("F32", shape)}
    return {name: ("F8_E4M3", shape), scale: ("F8_E8M0", tuple(-(-n // block) for n in shape))}
