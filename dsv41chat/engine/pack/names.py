"""The tensors of a V4.1 pack by release name, from the config alone. The gate that compares them with a folder: gate.py."""

from __future__ import annotations

from dataclasses import dataclass

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.plan import LayerPlan


@dataclass(frozen=True)
class Expected:
    """shape: of the decoded tensor. kind: `float` (always stored as bf16, f16 or f32 values), `linear` (a matrix in any format),
    `lookup` (a matrix of which rows are read), `ids` (int32 or int64) or `table` (mapped and never loaded).

    optional: conversions that are made for text leave it out.
    """

    shape: tuple[int, ...]
    kind: str
    optional: bool = False


def expected_v41(c: V41Config, plan: tuple[LayerPlan, ...]) -> dict[str, Expected]:
    """Every tensor of the text trunk by release name."""
    out = {
        "embed.weight": Expected((c.vocab_size, c.hidden_size), "lookup"),
        "head.weight": Expected((c.vocab_size, c.hidden_size), "linear"),
        "norm.weight": Expected((c.hidden_size,), "float"),
    }
    for layer in plan:
        out.update({f"layers.{layer.index}.{name}": e for name, e in _layer(c, layer).items()})
    return out


def block_tensors(c: V41Config, experts: int) -> dict[str, Expected]:
    """What every layer and every draft stage has, without a prefix: two mixes, norms, attention projections, router, experts."""
    d, hd, moe, s = c.hidden_size, c.head_dim, c.moe_intermediate_size, c.hc_mult
    wide = c.num_attention_heads * hd
    floats: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (d,),
        "ffn_norm.weight": (d,),
        "attn.q_norm.weight": (c.q_lora_rank,),
        "attn.kv_norm.weight": (hd,),
        "attn.attn_sink": (c.num_attention_heads,),
        "ffn.gate.weight": (experts, d),
        "ffn.gate.bias": (experts,),
    }
    for half in ("attn", "ffn"):
        floats |= {f"hc_{half}_fn": ((2 + s) * s, s * d), f"hc_{half}_base": ((2 + s) * s,), f"hc_{half}_scale": (3,)}
    linears: dict[str, tuple[int, int]] = {
        "attn.wq_a.weight": (c.q_lora_rank, d),
        "attn.wq_b.weight": (wide, c.q_lora_rank),
        "attn.wkv.weight": (hd, d),
        "attn.wo_a.weight": (c.o_groups * c.o_lora_rank, wide // c.o_groups),
        "attn.wo_b.weight": (d, c.o_groups * c.o_lora_rank),
    }
    for owner in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
        linears |= {f"ffn.{owner}.w1.weight": (moe, d), f"ffn.{owner}.w2.weight": (d, moe), f"ffn.{owner}.w3.weight": (moe, d)}
    return {k: Expected(v, "float") for k, v in floats.items()} | {k: Expected(v, "linear") for k, v in linears.items()}


def _layer(c: V41Config, layer: LayerPlan) -> dict[str, Expected]:
    d, hd, s = c.hidden_size, c.head_dim, c.hc_mult
    out = block_tensors(c, c.n_routed_experts) | {"ffn.gate.bias_vl": Expected((c.n_routed_experts,), "float", optional=True)}
    floats: dict[str, tuple[int, ...]] = {}
    linears: dict[str, tuple[int, int]] = {}
    if layer.scores:
        linears["attn.indexer.wq_b.weight"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        linears["attn.indexer.weights_proj.weight"] = (c.index_n_heads, d)
    if layer.owns_pool:
        linears |= {"attn.indexer.wk.weight": (c.index_head_dim, hd), "attn.compressor.wkv.weight": (hd, d)}
        floats |= {"attn.indexer.k_norm.weight": (c.index_head_dim,), "attn.compressor.norm.weight": (hd,)}
        if layer.ratio > 1:
            linears["attn.compressor.wgate.weight"] = (hd, d)
    out |= {k: Expected(v, "float") for k, v in floats.items()} | {k: Expected(v, "linear") for k, v in linears.items()}
    if layer.engram_slot >= 0:
        e = c.engram
        out |= {
            "engram.embed.weight": Expected((e.table_rows[layer.engram_slot], e.head_dim), "table"),
            "engram.wkv.weight": Expected(((s + 1) * d, e.columns * e.head_dim), "linear"),
            "engram.q_weight": Expected((s, d), "float"),
            "engram.k_weight": Expected((s, d), "float"),
        }
    return out
