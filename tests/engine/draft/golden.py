"""The drafting goldens: tiny drafters with known inputs and outputs, loaded through the pack's own gate and loader."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from dsv41chat.engine.config import V41Config, Yarn
from dsv41chat.engine.config_v4 import V4Config
from dsv41chat.engine.draft.load import load_draft_model
from dsv41chat.engine.kernels.routes import KernelRoutes
from dsv41chat.engine.pack.drafter import find_drafter
from dsv41chat.engine.pack.index import read_header
from dsv41chat.engine.pack.matrix import floats
from dsv41chat.engine.pack.names import Expected
from dsv41chat.engine.pack.source import WeightSource

DATA = Path(__file__).parents[2] / "data" / "drafting"


def arrays(name: str) -> dict[str, np.ndarray]:
    """Tensors of `<name>.safetensors`: integers as they are, floats as float32."""
    out = {}
    for key, ref in read_header(DATA / f"{name}.safetensors").items():
        out[key] = np.frombuffer(ref.bytes(), np.int32).reshape(ref.shape) if ref.dtype == "I32" else floats(ref)
    return out


def v41_config(k: dict) -> V41Config:
    """A V4.1 configuration whose draft stages have the golden's sizes; what only the trunk uses is filled in."""
    return V41Config(
        vocab_size=k["vocab"], hidden_size=k["dim"], num_hidden_layers=3, num_attention_heads=k["heads"], head_dim=k["hd"],
        qk_rope_head_dim=k["rd"], q_lora_rank=k["q_lora"], o_lora_rank=k["o_lora"], o_groups=k["groups"], sliding_window=k["window"],
        rms_norm_eps=k["norm_eps"], swiglu_limit=k["lim"], moe_intermediate_size=k["inter"], n_routed_experts=9, num_experts_per_tok=2,
        scoring_func="sqrtsoftplus", routed_scaling_factor=k["route_scale"], gate_temp=1.0, compress_ratios=(0, 0, 0),
        kv_source_layer_ids=(), index_source_layer_ids=(), index_n_heads=1, index_head_dim=k["rd"], index_topk=1,
        candidate_source_layer_id=0, candidate_topk_blocks=1, candidate_block_size=1, rope_theta=k["theta"], compress_rope_theta=k["theta"],
        yarn=Yarn(1.0, 32.0, 1.0, 64), max_position_embeddings=4096, hc_mult=k["hc"], hc_sinkhorn_iters=k["iters"], hc_eps=k["hc_eps"],
        engram=None, bos_token_id=0, eos_token_id=1, image_token_id=0, weight_block=None, expert_dtype=None, dspark=dspark(k),
    )  # fmt: skip


def dspark(k: dict) -> dict:
    return {
        "dspark_block_size": k["block"], "dspark_noise_token_id": k["noise"], "dspark_target_layer_ids": [0, 1, 2],
        "dspark_markov_rank": k["rank"], "dspark_n_routed_experts": k["experts"], "dspark_num_experts_per_tok": k["topk"],
    }  # fmt: skip


def v4_config(k: dict) -> V4Config:
    return V4Config(
        vocab_size=k["vocab"], hidden_size=k["dim"], num_hidden_layers=3, num_attention_heads=k["heads"], head_dim=k["hd"],
        qk_rope_head_dim=k["rd"], q_lora_rank=k["q_lora"], o_lora_rank=k["o_lora"], o_groups=k["groups"], sliding_window=k["window"],
        rms_norm_eps=k["norm_eps"], swiglu_limit=k["lim"], moe_intermediate_size=k["inter"],
        n_routed_experts=k["experts"], whole_experts=k["experts"],
        n_shared_experts=1, num_experts_per_tok=k["topk"], num_hash_layers=0, scoring_func="sqrtsoftplus",
        routed_scaling_factor=k["route_scale"], compress_ratios=(0, 0, 0), draft_ratios=(0,), index_n_heads=1, index_head_dim=k["rd"],
        index_topk=1, rope_theta=k["theta"], compress_rope_theta=k["theta"], yarn=Yarn(1.0, 32.0, 1.0, 64), max_position_embeddings=4096,
        hc_mult=k["hc"], hc_sinkhorn_iters=k["iters"], hc_eps=k["hc_eps"], weight_block=None, expert_dtype=None,
        dspark=dspark(k) if k["stages"] > 1 else {},
    )  # fmt: skip


def model(name: str, rounded: bool, dtype: mx.Dtype = mx.float32):
    """A golden drafter (v41_dspark, v4_dspark or v4_mtp) on a stand-in for the trunk that holds its embedding and head."""
    sizes = json.loads((DATA / "config.json").read_text())[name]
    config = (v41_config if name.startswith("v41") else v4_config)(sizes)
    tensors = read_header(DATA / f"{name}_weights.safetensors")
    found = find_drafter(tensors, config)
    assert found.fault is None and not found.notes
    head = {"head.weight": Expected((config.vocab_size, config.hidden_size), "linear")}
    source = WeightSource(tensors, found.plan.expected | head, dtype, False, False)
    trunk = SimpleNamespace(
        config=config, embed=source.array("embed.weight"), head=source.linear("head.weight", dtype=mx.float32), dtype=dtype,
        routes=KernelRoutes(),
    )  # fmt: skip
    return load_draft_model(found.plan, trunk, source, rounded)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())
