"""`config.json` of a DeepSeek-V4 build -> a frozen, validated `V4Config`.

Two spellings are read: the release's (`compress_ratios`, `num_hash_layers`, `rope_scaling`) and the one that transformers saves
(`layer_types` with `compress_rates`, `mlp_layer_types`, `rope_parameters`). Nothing that changes the computation has a default:
the ratio lists that others assume for a missing field are wrong for both released models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsv41chat.engine.config import Fields, Yarn, parse_yarn, ring_rows
from dsv41chat.engine.errors import PackDamaged, PackUnsupported

OVERLAP_RATIO = 4
_ATTENTION_KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


@dataclass(frozen=True)
class V4Config:
    """DeepSeek-V4 trunk (Flash, Pro, 0731). Sizes in channels, rows and tokens.

    compress_ratios: one per trunk layer, 0 (window only), 4 (overlapping groups, indexer) or more (plain groups, all visible).
    draft_ratios: the entries after them, which describe draft blocks; whether those exist is decided by the tensors.
    n_routed_experts: of the scored layers. whole_experts: of hashed layers and draft blocks, whose experts are never pruned: the token
    table holds expert ids. Only the tensors tell it; without a look at them it is n_routed_experts.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    rms_norm_eps: float
    swiglu_limit: float
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    scoring_func: str
    routed_scaling_factor: float
    compress_ratios: tuple[int, ...]
    draft_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn
    max_position_embeddings: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    weight_block: int | None
    expert_dtype: str | None
    dspark: dict[str, Any]
    whole_experts: int
    family: str = "v4"

    # The V4 family has no n-gram tables.
    engram = None

    @property
    def shared_size(self) -> int:
        """Width of the shared expert."""
        return self.moe_intermediate_size * self.n_shared_experts

    def experts_of(self, hashed: bool) -> int:
        """Routed experts of a trunk layer."""
        return self.whole_experts if hashed else self.n_routed_experts

    @property
    def ring_rows(self) -> int:
        return ring_rows(self.sliding_window)

    @property
    def roll_rows(self) -> int:
        """How many rows a lane can go back, counted from the highest position ever written."""
        return self.ring_rows - self.sliding_window


def parse_v4(outer: dict[str, Any], source: str = "config.json") -> V4Config:
    """outer: the decoded config.json. Raises PackError with the address of the first fault."""
    if outer.get("vision_n_layers"):
        raise PackUnsupported(
            f"{source}: $.vision_n_layers is {outer['vision_n_layers']!r}: this is the vision variant, and only text is run", "use the text build"
        )
    f = Fields(_release_spelling(outer, source), source)
    quant = outer.get("quantization_config") or {}
    block = quant.get("weight_block_size")
    if block is not None and (not isinstance(block, list) or len(block) != 2 or block[0] != block[1]):
        raise PackUnsupported(f"{source}: $.quantization_config.weight_block_size is {block!r}, expected square blocks")
    layers, ratios = f.number("num_hidden_layers", int, 1), tuple(0 if r == 1 else r for r in f.integers("compress_ratios"))
    config = V4Config(
        **{
            name: f.number(name, int, 1)
            for name in (
                "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank o_groups "
                "sliding_window moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok index_n_heads index_head_dim "
                "index_topk max_position_embeddings hc_mult hc_sinkhorn_iters"
            ).split()
        },
        num_hash_layers=f.number("num_hash_layers", int, 0),
        **{
            name: f.number(name, float)
            for name in "rms_norm_eps swiglu_limit routed_scaling_factor rope_theta compress_rope_theta hc_eps".split()
        },
        scoring_func=f.raw("scoring_func"),
        compress_ratios=ratios[:layers],
        draft_ratios=ratios[layers:],
        yarn=parse_yarn(f),
        weight_block=block[0] if block else None,
        expert_dtype=outer.get("expert_dtype", quant.get("expert_dtype")),
        dspark={k: v for k, v in f.values.items() if k.startswith("dspark_")},
        whole_experts=f.number("n_routed_experts", int, 1),
    )
    _validate(config, f)
    return config


def _release_spelling(outer: dict[str, Any], source: str) -> dict[str, Any]:
    """The fields under their release names; a dictionary that has them already is only copied."""
    values = dict(outer)
    if "compress_ratios" not in values and "layer_types" in values:
        kinds, rates = values["layer_types"], values.get("compress_rates")
        if not isinstance(rates, dict) or any(kind not in rates for kind in _ATTENTION_KINDS[1:]):
            raise PackUnsupported(f"{source}: $.compress_rates is {rates!r}, expected the rates of {' and '.join(_ATTENTION_KINDS[1:])}")
        unknown = [kind for kind in kinds if kind not in _ATTENTION_KINDS]
        if unknown:
            raise PackUnsupported(f"{source}: $.layer_types has {unknown[0]!r}, expected {', '.join(_ATTENTION_KINDS)}")
        values["compress_ratios"] = [rates[kind] if kind != _ATTENTION_KINDS[0] else 0 for kind in kinds]
    if "num_hash_layers" not in values and "mlp_layer_types" in values:
        hashed = [kind == "hash_moe" for kind in values["mlp_layer_types"]]
        if sorted(hashed, reverse=True) != hashed:
            raise PackUnsupported(f"{source}: $.mlp_layer_types has a hash_moe layer after a scored one")
        values["num_hash_layers"] = sum(hashed)
    ropes = values.get("rope_parameters")
    if isinstance(ropes, dict) and isinstance(ropes.get("main"), dict) and isinstance(ropes.get("compress"), dict):
        main, compress = ropes["main"], ropes["compress"]
        values.setdefault("rope_scaling", compress)
        for name, part in (("rope_theta", main), ("compress_rope_theta", compress)):
            if "rope_theta" in part:
                values.setdefault(name, part["rope_theta"])
        if "partial_rotary_factor" in main:
            values.setdefault("partial_rotary_factor", main["partial_rotary_factor"])
    if "qk_rope_head_dim" not in values and isinstance(values.get("partial_rotary_factor"), float) and isinstance(values.get("head_dim"), int):
        values["qk_rope_head_dim"] = round(values["partial_rotary_factor"] * values["head_dim"])
    return values


def _validate(c: V4Config, f: Fields) -> None:
    def refuse(address: str, value: Any, expected: str) -> None:
        raise PackUnsupported(f"{f.source}: $.{address} is {value!r}, expected {expected}")

    fixed = {"tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "norm_topk_prob": True, "num_key_value_heads": 1}
    for name, value in fixed.items():
        if f.values.get(name, value) != value:
            refuse(name, f.values[name], repr(value))
    if c.scoring_func not in ("sqrtsoftplus", "sigmoid", "softmax"):
        refuse("scoring_func", c.scoring_func, "sqrtsoftplus, sigmoid or softmax")
    if len(c.compress_ratios) < c.num_hidden_layers:
        refuse("compress_ratios", list(c.compress_ratios), f"at least {c.num_hidden_layers} entries")
    if any(r != 0 and r < OVERLAP_RATIO for r in c.compress_ratios):
        refuse("compress_ratios", list(c.compress_ratios), "0, 4 or more in the trunk")
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > min(c.head_dim, c.index_head_dim):
        refuse("qk_rope_head_dim", c.qk_rope_head_dim, f"an even number up to {min(c.head_dim, c.index_head_dim)}")
    if c.index_head_dim & (c.index_head_dim - 1):
        refuse("index_head_dim", c.index_head_dim, "a power of two (its channels are mixed by a Hadamard matrix)")
    if c.num_attention_heads % c.o_groups:
        refuse("o_groups", c.o_groups, f"a divisor of {c.num_attention_heads}")
    if c.num_experts_per_tok > c.n_routed_experts:
        refuse("num_experts_per_tok", c.num_experts_per_tok, f"at most {c.n_routed_experts}")
    if c.num_hash_layers > c.num_hidden_layers:
        raise PackDamaged(f"{f.source}: $.num_hash_layers is {c.num_hash_layers}, the trunk has {c.num_hidden_layers} layers")
