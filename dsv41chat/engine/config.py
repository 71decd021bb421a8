"""The configuration of a pack: `config.json` -> a frozen, validated `V41Config` (`V4Config`: config_v4.py).

A field that changes what the model computes has no default: a config without it is refused by name. The only value that
the release leaves out, `gate_temp`, is 1.0 by its definition. Three spellings of the same fields are read: the nested hub
layout (`text_config` over the outer level), a flat dictionary of the same names, and the flat inference names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv41chat.engine.errors import PackDamaged, PackIncomplete, PackMissing, PackUnsupported

_OUTER_KEYS = ("model_type", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "quantization", "quantization_config")

# our name -> the flat inference name, where the two differ
_INFERENCE_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "sliding_window": "window_size",
    "rms_norm_eps": "norm_eps",
    "moe_intermediate_size": "moe_inter_dim",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "max_position_embeddings": "max_seq_len",
    "engram_pad_token_id": "engram_pad_id",
}


@dataclass(frozen=True)
class Yarn:
    """Frequency scaling of the compressed layers; `original` is the trained context in tokens."""

    factor: float
    beta_fast: float
    beta_slow: float
    original: int


@dataclass(frozen=True)
class EngramConfig:
    """layer_ids: layers that carry a table; table_rows: rows of each; columns = (max_ngram - 1) * n_heads rows a token."""

    layer_ids: tuple[int, ...]
    table_rows: tuple[int, ...]
    max_ngram: int
    n_heads: int
    head_dim: int
    vocab_size: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def columns(self) -> int:
        return (self.max_ngram - 1) * self.n_heads


@dataclass(frozen=True)
class V41Config:
    """DeepSeek-V4.1 text trunk. Sizes in channels, rows and tokens; lists are per layer."""

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
    num_experts_per_tok: int
    scoring_func: str
    routed_scaling_factor: float
    gate_temp: float
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn
    max_position_embeddings: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram: EngramConfig | None
    bos_token_id: int
    eos_token_id: int
    image_token_id: int
    weight_block: int | None
    expert_dtype: str | None
    dspark: dict[str, Any]
    family: str = "v41"

    @property
    def ring_rows(self) -> int:
        return ring_rows(self.sliding_window)

    @property
    def roll_rows(self) -> int:
        """How many rows a lane can go back, counted from the highest position ever written."""
        return self.ring_rows - self.sliding_window


def ring_rows(window: int) -> int:
    """Slots of a window lane: the smallest power of two >= max(2W, W + 8)."""
    return 1 << (max(2 * window, window + 8) - 1).bit_length()


class Fields:
    """Looks a field up under its names and raises with its address when it is absent or of the wrong kind."""

    def __init__(self, values: dict[str, Any], source: str, root: str = "$"):
        self.values, self.source, self.root = values, source, root

    def raw(self, name: str) -> Any:
        for key in (name, _INFERENCE_NAMES.get(name)):
            if key is not None and key in self.values:
                return self.values[key]
        raise PackUnsupported(
            f"{self.source}: {self.root}.{name} is missing; its value changes what the model computes, so none is assumed",
            "take config.json from the original upload",
        )

    def number(self, name: str, kind: type, low: float | None = None) -> Any:
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind is int and value != int(value)):
            raise PackDamaged(f"{self.source}: $.{name} is {value!r}, expected {'an integer' if kind is int else 'a number'}")
        if low is not None and value < low:
            raise PackDamaged(f"{self.source}: $.{name} is {value!r}, expected at least {low}")
        return kind(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.raw(name)
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise PackDamaged(f"{self.source}: $.{name} is {value!r}, expected a list of integers")
        return tuple(value)


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a folder as a dictionary. Raises PackMissing, PackIncomplete or PackDamaged."""
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise PackMissing(f"{folder} is not a folder", "dsv41chat models list shows the known builds")
    if not path.is_file():
        raise PackIncomplete(f"{folder} has no config.json", "copy the whole build folder, config.json included")
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PackDamaged(f"{path} cannot be read as JSON: {error}", "copy config.json again from its source") from error
    if not isinstance(outer, dict):
        raise PackDamaged(f"{path} holds {type(outer).__name__}, expected an object", "copy config.json again from its source")
    return outer


def with_real_heads(outer: dict[str, Any]) -> dict[str, Any]:
    """A config whose head counts were padded for other engines, with the counts of its weights (`virtual_heads_from`)."""
    text = outer.get("text_config")
    if isinstance(text, dict):
        outer = {**outer, "text_config": {**text, **(text.get("virtual_heads_from") or outer.get("virtual_heads_from") or {})}}
    return {**outer, **(outer.get("virtual_heads_from") or {})}


def family_of(outer: dict[str, Any]) -> str:
    """The model family of a config dictionary: `v41` or `v4`. Raises PackUnsupported for anything else."""
    kind = outer.get("model_type")
    families = {"deepseek_v41": "v41", "deepseek_v41_text": "v41", "deepseek_v4": "v4"}
    if kind not in families:
        raise PackUnsupported(
            f"config.json: $.model_type is {kind!r}; this program runs {', '.join(sorted(families))}", "choose a DeepSeek-V4 or V4.1 build"
        )
    return families[kind]


def parse_v41(outer: dict[str, Any], source: str = "config.json") -> V41Config:
    """outer: the decoded config.json in any of the three spellings. Raises PackError with the address of the first fault."""
    text = outer.get("text_config", {})
    if not isinstance(text, dict):
        raise PackDamaged(f"{source}: $.text_config is {text!r}, expected an object")
    f = Fields({**outer, **text, **{k: outer[k] for k in _OUTER_KEYS if k in outer}}, source, "$.text_config")
    quant = outer.get("quantization_config") or {}
    block = quant.get("weight_block_size")
    if block is not None and (not isinstance(block, list) or len(block) != 2 or block[0] != block[1]):
        raise PackUnsupported(f"{source}: $.quantization_config.weight_block_size is {block!r}, expected square blocks")
    config = V41Config(
        **{
            name: f.number(name, int, 1)
            for name in (
                "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank o_groups "
                "sliding_window moe_intermediate_size n_routed_experts num_experts_per_tok index_n_heads index_head_dim index_topk "
                "candidate_topk_blocks candidate_block_size max_position_embeddings hc_mult hc_sinkhorn_iters"
            ).split()
        },
        **{name: f.number(name, int, 0) for name in ("candidate_source_layer_id", "bos_token_id", "eos_token_id", "image_token_id")},
        **{
            name: f.number(name, float)
            for name in "rms_norm_eps swiglu_limit routed_scaling_factor rope_theta compress_rope_theta hc_eps".split()
        },
        **{name: f.integers(name) for name in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")},
        scoring_func=f.raw("scoring_func"),
        gate_temp=f.number("gate_temp", float) if "gate_temp" in f.values else 1.0,
        yarn=parse_yarn(f),
        engram=_parse_engram(f),
        weight_block=block[0] if block else None,
        expert_dtype=quant.get("expert_dtype"),
        dspark={k: v for k, v in f.values.items() if k.startswith("dspark_")},
    )
    _validate(config, f)
    return config


def parse_yarn(f: Fields) -> Yarn:
    """`rope_scaling`, or the flat inference names of its fields. Attention factors are not part of the model and are ignored."""
    scaling = f.values.get("rope_scaling")
    if scaling is None:
        names = {"factor": "rope_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow", "original_max_position_embeddings": "original_seq_len"}
        scaling = {"rope_type": "yarn", **{k: f.values[v] for k, v in names.items() if v in f.values}}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise PackUnsupported(f"{f.source}: $.rope_scaling.rope_type is {kind!r}, expected 'yarn'")
    g = Fields(scaling, f"{f.source} $.rope_scaling")
    original = g.number("original_max_position_embeddings", int, 1)
    return Yarn(g.number("factor", float, 1), g.number("beta_fast", float), g.number("beta_slow", float), original)


def _parse_engram(f: Fields) -> EngramConfig | None:
    if not f.values.get("engram_layer_ids"):
        return None
    layers, rows = f.integers("engram_layer_ids"), f.integers("engram_num_embeddings")
    if len(layers) != len(rows) or list(layers) != sorted(set(layers)):
        raise PackDamaged(f"{f.source}: $.engram_layer_ids {list(layers)} and $.engram_num_embeddings {list(rows)} do not pair up in ascending order")
    number = lambda name: f.number(name, int, 1)
    return EngramConfig(
        layers,
        rows,
        number("engram_max_ngram_size"),
        number("engram_n_heads"),
        number("engram_head_dim"),
        number("engram_vocab_size"),
        f.number("engram_pad_token_id", int, 0),
        number("engram_compressed_vocab_size"),
    )


def _validate(c: V41Config, f: Fields) -> None:
    def refuse(address: str, value: Any, expected: str) -> None:
        raise PackUnsupported(f"{f.source}: $.{address} is {value!r}, expected {expected}")

    if f.values.get("tie_word_embeddings"):
        refuse("tie_word_embeddings", True, "false (a V4.1 head has its own weights)")
    if f.values.get("attention_bias"):
        refuse("attention_bias", True, "false")
    if f.values.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", f.values["hidden_act"], "'silu'")
    if not f.values.get("norm_topk_prob", True):
        refuse("norm_topk_prob", False, "true")
    if f.values.get("num_key_value_heads", 1) != 1:
        refuse("num_key_value_heads", f.values["num_key_value_heads"], "1 (one latent is key and value)")
    if f.values.get("n_shared_experts", 1) != 1:
        refuse("n_shared_experts", f.values["n_shared_experts"], "1")
    if c.scoring_func not in ("sqrtsoftplus", "sigmoid", "softmax"):
        refuse("scoring_func", c.scoring_func, "sqrtsoftplus, sigmoid or softmax")
    if len(c.compress_ratios) < c.num_hidden_layers:
        refuse("compress_ratios", list(c.compress_ratios), f"at least {c.num_hidden_layers} entries")
    if any(r not in (0, 1, 2) for r in c.compress_ratios[: c.num_hidden_layers]):
        refuse("compress_ratios", list(c.compress_ratios), "ratios 0, 1 or 2 in the trunk")
    if c.head_dim % 32 or c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > min(c.head_dim, c.index_head_dim):
        refuse("head_dim", c.head_dim, f"a multiple of 32 with an even rope part ($.qk_rope_head_dim is {c.qk_rope_head_dim})")
    if c.num_attention_heads * c.head_dim % c.o_groups:
        refuse("o_groups", c.o_groups, f"a divisor of {c.num_attention_heads * c.head_dim}")
    if c.num_experts_per_tok > c.n_routed_experts:
        refuse("num_experts_per_tok", c.num_experts_per_tok, f"at most {c.n_routed_experts}")
    if c.candidate_topk_blocks * c.candidate_block_size < c.index_topk:
        least = -(-c.index_topk // c.candidate_block_size)
        refuse("candidate_topk_blocks", c.candidate_topk_blocks, f"at least index_topk / candidate_block_size = {least}")
    if c.engram and any(not 0 <= i < c.num_hidden_layers for i in c.engram.layer_ids):
        refuse("engram_layer_ids", list(c.engram.layer_ids), f"layers of 0..{c.num_hidden_layers - 1}")
    if c.engram and (c.engram.head_dim % 32 or c.engram.max_ngram < 2):
        refuse("engram_head_dim", c.engram.head_dim, "a multiple of 32, with n-grams of at least 2")
