"""The tensors of a V4 pack, from the config alone. Kinds: names.py; the gate: gate.py."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dsv41chat.engine.config_v4 import V4Config
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.names import Expected
from dsv41chat.engine.plan import LayerPlan

_DRAFT_GATE = re.compile(r"^mtp(\.\d+)?\.ffn\.gate\.weight$")


def expected_v4(c: V4Config, plan: tuple[LayerPlan, ...], stacked: bool = False) -> dict[str, Expected]:
    """Every tensor of the trunk by release name. stacked: routed experts are one tensor [E, out, in] per matrix, as converters write
    them, instead of one per expert.

    `linear` are the matrices that a release or a converter may store in fewer bits; the router is never among them.
    """
    s = c.hc_mult
    out = {
        "embed.weight": Expected((c.vocab_size, c.hidden_size), "lookup"),
        "head.weight": Expected((c.vocab_size, c.hidden_size), "linear"),
        "norm.weight": Expected((c.hidden_size,), "float"),
        "hc_head_fn": Expected((s, s * c.hidden_size), "float"),
        "hc_head_base": Expected((s,), "float"),
        "hc_head_scale": Expected((1,), "float"),
    }
    for layer in plan:
        experts = c.experts_of(layer.hashed)
        parts = _block(c) | _router(c, layer.hashed, experts) | _experts(c, stacked, experts) | _compressed(c, layer)
        out |= {f"layers.{layer.index}.{name}": e for name, e in parts.items()}
    return out


def ignored_v4(c: V4Config, plan: tuple[LayerPlan, ...]) -> set[str]:
    """Tensors that releases ship and the text trunk does not use: router biases of image rows and of hashed layers."""
    hashed = {f"layers.{layer.index}.ffn.gate.bias" for layer in plan if layer.hashed}
    return hashed | {f"layers.{layer.index}.ffn.gate.bias_vl" for layer in plan}


def expected_block(c: V4Config, prefix: str, stacked: bool = False) -> dict[str, Expected]:
    """One window-only, score-routed layer under `prefix` (such as `mtp.0`): the body of every draft block."""
    return {f"{prefix}.{name}": e for name, e in (_block(c) | _router(c, False, c.whole_experts) | _experts(c, stacked, c.whole_experts)).items()}


def _block(c: V4Config) -> dict[str, Expected]:
    d, s, wide = c.hidden_size, c.hc_mult, c.num_attention_heads * c.head_dim
    floats: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (d,),
        "ffn_norm.weight": (d,),
        "attn.q_norm.weight": (c.q_lora_rank,),
        "attn.kv_norm.weight": (c.head_dim,),
        "attn.attn_sink": (c.num_attention_heads,),
    }
    for half in ("attn", "ffn"):
        floats |= {f"hc_{half}_fn": ((2 + s) * s, s * d), f"hc_{half}_base": ((2 + s) * s,), f"hc_{half}_scale": (3,)}
    linears: dict[str, tuple[int, ...]] = {
        "attn.wq_a.weight": (c.q_lora_rank, d),
        "attn.wq_b.weight": (wide, c.q_lora_rank),
        "attn.wkv.weight": (c.head_dim, d),
        "attn.wo_a.weight": (c.o_groups * c.o_lora_rank, wide // c.o_groups),
        "attn.wo_b.weight": (d, c.o_groups * c.o_lora_rank),
    }
    return _kinds(floats, linears)


def whole_experts(tensors: Mapping[str, TensorRef], c: V4Config) -> int:
    """Experts of the blocks that pruning leaves whole, by the shape of one of their routers: more than n_routed_experts, or as many."""
    gates = [*(f"layers.{i}.ffn.gate.weight" for i in range(c.num_hash_layers)), *(name for name in tensors if _DRAFT_GATE.match(name))]
    shapes = [tensors[name].shape for name in gates if name in tensors]
    return max(shapes[0][0], c.n_routed_experts) if shapes and shapes[0] else c.n_routed_experts


def _router(c: V4Config, hashed: bool, experts: int) -> dict[str, Expected]:
    gate = {"ffn.gate.weight": Expected((experts, c.hidden_size), "float")}
    if hashed:
        return gate | {"ffn.gate.tid2eid": Expected((c.vocab_size, c.num_experts_per_tok), "ids")}
    return gate | {"ffn.gate.bias": Expected((experts,), "float")}


def _experts(c: V4Config, stacked: bool, experts: int) -> dict[str, Expected]:
    d, width, shared = c.hidden_size, c.moe_intermediate_size, c.shared_size
    linears: dict[str, tuple[int, ...]] = {}
    for w, out, into in (("w1", shared, d), ("w2", d, shared), ("w3", shared, d)):
        linears[f"ffn.shared_experts.{w}.weight"] = (out, into)
    for w, out, into in (("w1", width, d), ("w2", d, width), ("w3", width, d)):
        if stacked:
            linears[f"ffn.experts.{w}.weight"] = (experts, out, into)
        else:
            linears |= {f"ffn.experts.{e}.{w}.weight": (out, into) for e in range(experts)}
    return _kinds({}, linears)


def _compressed(c: V4Config, layer: LayerPlan) -> dict[str, Expected]:
    floats: dict[str, tuple[int, ...]] = {}
    linears: dict[str, tuple[int, ...]] = {}
    halves = 2 if layer.overlap else 1
    pools = {"attn.compressor": c.head_dim} if layer.owns_pool else {}
    if layer.scores:
        pools["attn.indexer.compressor"] = c.index_head_dim
        linears["attn.indexer.wq_b.weight"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        linears["attn.indexer.weights_proj.weight"] = (c.index_n_heads, c.hidden_size)
    for prefix, width in pools.items():
        floats |= {f"{prefix}.ape": (layer.ratio, halves * width), f"{prefix}.norm.weight": (width,)}
        linears |= {f"{prefix}.{w}.weight": (halves * width, c.hidden_size) for w in ("wkv", "wgate")}
    return _kinds(floats, linears)


def _kinds(floats: dict[str, tuple[int, ...]], linears: dict[str, tuple[int, ...]]) -> dict[str, Expected]:
    return {k: Expected(v, "float") for k, v in floats.items()} | {k: Expected(v, "linear") for k, v in linears.items()}
