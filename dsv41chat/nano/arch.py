"""The embedded model's architecture: one table of numbers, from which config, parameter shapes and initial values follow.

Numpy only: the trainer (PyTorch), the exporter and the random pack all start here, so none of them can disagree about a shape.
Parameters carry the trainer's names; `export.py` knows their release names.
"""

from __future__ import annotations

import math

import numpy as np

SEED = 41

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT, THINK, END_THINK = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
IMAGE = "<｜deepseek_image｜>"
MARKERS = (
    SYSTEM,
    USER,
    ASSISTANT,
    THINK,
    END_THINK,
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    IMAGE,
)

VOCAB, HIDDEN, LAYERS = 4096, 256, 8
HEADS, HEAD_DIM, ROPE_DIM = 8, 64, 32
Q_RANK, O_RANK, O_GROUPS = 128, 64, 4
EXPERTS, PICKED, EXPERT_DIM = 8, 2, 192
INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 4, 32, 128
WINDOW = 64
RATIOS = (0, 0, 2, 2, 1, 1, 1, 1)
KV_SOURCES, INDEX_SOURCES, CANDIDATE_SOURCE = (2, 4), (2, 4, 6), 4
CANDIDATE_BLOCKS, CANDIDATE_SIZE = 32, 8
STREAMS, SINKHORN = 4, 6
ENGRAM_LAYERS, NGRAM, ENGRAM_HEADS, ENGRAM_DIM, ENGRAM_BASE = (1, 4), 4, 2, 32, 26000
STAGES, BLOCK, MARKOV, TAPS = 2, 5, 64, (5, 6, 7)
COLUMNS = (NGRAM - 1) * ENGRAM_HEADS


def primes() -> list[list[int]]:
    """Bucket counts of the hash columns: one list of COLUMNS primes per engram layer, ascending from ENGRAM_BASE."""
    found, value = [], ENGRAM_BASE
    while len(found) < COLUMNS * len(ENGRAM_LAYERS):
        if all(value % d for d in range(2, math.isqrt(value) + 1)):
            found.append(value)
        value += 1
    return [found[i * COLUMNS : (i + 1) * COLUMNS] for i in range(len(ENGRAM_LAYERS))]


def multipliers(compressed: int) -> list[list[int]]:
    """Odd int64 hash multipliers, NGRAM per engram layer, for a token map with `compressed` distinct keys."""
    bound = max(1, ((2**63 - 1) // compressed) // 2)
    return [[int(v) for v in 2 * np.random.default_rng(10007 * layer).integers(0, bound, size=NGRAM, dtype=np.int64) + 1] for layer in ENGRAM_LAYERS]


def config(compressed: int, ids: dict[str, int]) -> dict:
    """`config.json` in the nested release layout. `ids`: marker spelling -> id of this tokenizer."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "q_lora_rank": Q_RANK,
        "o_lora_rank": O_RANK,
        "o_groups": O_GROUPS,
        "sliding_window": WINDOW,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "moe_intermediate_size": EXPERT_DIM,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": PICKED,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "compress_ratios": [*RATIOS, *[0] * STAGES],
        "kv_source_layer_ids": list(KV_SOURCES),
        "index_source_layer_ids": list(INDEX_SOURCES),
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": INDEX_TOPK,
        "candidate_source_layer_id": CANDIDATE_SOURCE,
        "candidate_topk_blocks": CANDIDATE_BLOCKS,
        "candidate_block_size": CANDIDATE_SIZE,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
        "max_position_embeddings": 8192,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": SINKHORN,
        "hc_eps": 1e-6,
        "engram_layer_ids": list(ENGRAM_LAYERS),
        "engram_num_embeddings": [sum(p) for p in primes()],
        "engram_max_ngram_size": NGRAM,
        "engram_n_heads": ENGRAM_HEADS,
        "engram_head_dim": ENGRAM_DIM,
        "engram_vocab_size": ENGRAM_BASE,
        "engram_pad_token_id": ids[PAD],
        "engram_compressed_vocab_size": compressed,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": STAGES,
        "dspark_block_size": BLOCK,
        "dspark_noise_token_id": ids[SYSTEM],
        "dspark_target_layer_ids": list(TAPS),
        "dspark_markov_rank": MARKOV,
        "dspark_n_routed_experts": EXPERTS,
        "dspark_num_experts_per_tok": PICKED,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
        "image_token_id": ids[IMAGE],
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }


def _half(out: dict, prefix: str) -> None:
    base = np.zeros(24, np.float32)
    base[:4] = -1.1
    base[8:] = (np.eye(4) * 4 - 2).ravel()
    out[prefix + "fn"], out[prefix + "base"] = ((24, STREAMS * HIDDEN), 0.01), base
    out[prefix + "scale"], out[prefix + "norm"] = np.full(3, 0.1, np.float32), np.ones(HIDDEN, np.float32)


def _block(out: dict, prefix: str, layer: int | None) -> None:
    """One trunk layer, or a draft stage when `layer` is None."""
    d, one = HIDDEN**-0.5, lambda n: np.ones(n, np.float32)
    _half(out, prefix + "a.")
    _half(out, prefix + "f.")
    z, group_in = prefix + "attn.", HEADS * HEAD_DIM // O_GROUPS
    out[z + "wq_a"], out[z + "q_norm"] = ((Q_RANK, HIDDEN), d), one(Q_RANK)
    out[z + "wq_b"] = ((HEADS * HEAD_DIM, Q_RANK), Q_RANK**-0.5)
    out[z + "wkv"], out[z + "kv_norm"] = ((HEAD_DIM, HIDDEN), d), one(HEAD_DIM)
    out[z + "wo_a"] = ((O_GROUPS, O_RANK, group_in), group_in**-0.5)
    out[z + "wo_b"] = ((HIDDEN, O_GROUPS * O_RANK), (O_GROUPS * O_RANK) ** -0.5 * 0.5)
    out[z + "sink"] = np.zeros(HEADS, np.float32)
    if layer in KV_SOURCES:
        out[z + "cwkv"], out[z + "cnorm"] = ((HEAD_DIM, HIDDEN), d), one(HEAD_DIM)
        out[z + "ik"], out[z + "iknorm"] = ((INDEX_DIM, HEAD_DIM), HEAD_DIM**-0.5), one(INDEX_DIM)
        if RATIOS[layer] == 2:
            out[z + "cgate"] = ((HEAD_DIM, HIDDEN), d)
    if layer in INDEX_SOURCES:
        out[z + "iq"], out[z + "iw"] = ((INDEX_HEADS * INDEX_DIM, Q_RANK), Q_RANK**-0.5), ((INDEX_HEADS, HIDDEN), d)
    z = prefix + "ffn."
    out[z + "gate"] = ((EXPERTS, HIDDEN), 0.02)
    for kind, count in (("w", EXPERTS), ("s", 1)):
        out[z + kind + "1"] = out[z + kind + "3"] = ((HIDDEN, count * EXPERT_DIM), d)
        out[z + kind + "2"] = ((count * EXPERT_DIM, HIDDEN), EXPERT_DIM**-0.5 * 0.5)
    if layer in ENGRAM_LAYERS:
        z, width = prefix + "engram.", COLUMNS * ENGRAM_DIM
        out[z + "table"] = ((sum(primes()[ENGRAM_LAYERS.index(layer)]), ENGRAM_DIM), 0.05)
        out[z + "wkv"] = (((STREAMS + 1) * HIDDEN, width), width**-0.5)
        out[z + "q_weight"] = out[z + "k_weight"] = np.ones((STREAMS, HIDDEN), np.float32)


def parameter_table() -> dict:
    """Name -> (shape, standard deviation) of a normal draw, or the constant start value as an array. Order is the order of drawing."""
    d, out = HIDDEN**-0.5, {}
    out["embed"], out["head"], out["norm"] = ((VOCAB, HIDDEN), 0.3), ((VOCAB, HIDDEN), d), np.ones(HIDDEN, np.float32)
    for i in range(LAYERS):
        _block(out, f"layers.{i}.", i)
    for s in range(STAGES):
        _block(out, f"mtp.{s}.", None)
    out["mtp.main"] = ((HIDDEN, len(TAPS) * HIDDEN), (len(TAPS) * HIDDEN) ** -0.5)
    out["mtp.mnorm"] = out["mtp.dnorm"] = np.ones(HIDDEN, np.float32)
    out["mtp.m1"], out["mtp.m2"], out["mtp.conf"] = ((VOCAB, MARKOV), 0.3), ((VOCAB, MARKOV), 0.02), ((HIDDEN + MARKOV,), 0.02)
    return out


def initial(seed: int = SEED) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Start values (float32) of all parameters, and the router biases (not trained by gradient)."""
    rng, out = np.random.default_rng(seed), {}
    for name, spec in parameter_table().items():
        out[name] = rng.standard_normal(spec[0], np.float32) * np.float32(spec[1]) if isinstance(spec, tuple) else spec.copy()
    prefixes = [f"layers.{i}." for i in range(LAYERS)] + [f"mtp.{s}." for s in range(STAGES)]
    return out, {p + "ffn.bias": np.zeros(EXPERTS, np.float32) for p in prefixes}
