"""Tensor names as builds spell them -> release names. Headers only; no data is read.

One ordered table covers the release's own names, those of MLX conversions (with or without `language_model.` / `model.`) and those
of transformers.
"""

from __future__ import annotations

import re
from dataclasses import replace

from dsv41chat.engine.errors import PackDamaged
from dsv41chat.engine.pack.index import ITEM_BYTES, TensorRef

_COMPRESSOR = (("kv_proj", "wkv"), ("gate_proj", "wgate"), ("position_bias", "ape"), ("kv_norm", "norm"))
_ATTENTION = (
    ("q_a_proj", "wq_a"), ("q_a_norm", "q_norm"), ("q_b_proj", "wq_b"), ("kv_proj", "wkv"), ("o_a_proj", "wo_a"), ("o_b_proj", "wo_b"),
    ("sinks", "attn_sink"),
)  # fmt: skip
_EXPERT = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
_RULES = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"^language_model\.", ""),
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.(?:hc_)?(fn|base|scale)$", r"hc_head_\1"),
        (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.weight_scale_inv$", ".scale"),
        (r"\.e_score_correction_bias$", ".bias"),
        # The indexer sits inside the compressor in transformers, and owns a compressor in the release.
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        *((rf"\.compressor\.{a}(?=\.|$)", f".compressor.{b}") for a, b in _COMPRESSOR),
        *((rf"\.attn\.{a}(?=\.|$)", f".attn.{b}") for a, b in _ATTENTION),
        # What transformers 5.24 writes for kv_norm when it saves a model.
        (r"^(layers\.\d+\.attn)\.norm\.weight$", r"\1.kv_norm.weight"),
        (r"\.switch_mlp\.", ".experts."),
        *((rf"(\.(?:shared_)?experts(?:\.\d+)?)\.{a}$", rf"\1.{b}.weight") for a, b in _EXPERT),
        *((rf"(\.(?:shared_)?experts(?:\.\d+)?)\.{a}\.", rf"\1.{b}.") for a, b in _EXPERT),
    )
)


def release_name(name: str) -> str:
    """The release's name for a V4 tensor name of any dialect; a name that no rule knows comes back unchanged."""
    for pattern, to in _RULES:
        name = pattern.sub(to, name)
    return name


def release_tensors(tensors: dict[str, TensorRef]) -> dict[str, TensorRef]:
    """The same tensors by release name. Each keeps the name that its file has, for messages.

    A fused `experts.gate_up_proj` [E, 2 * width, D] becomes one view per expert and half, gate rows first; a grouped `wo_a`
    [G, rank, in] becomes [G * rank, in]. Both are the same bytes. Raises PackDamaged when two tensors get one name.
    """
    out: dict[str, TensorRef] = {}
    for original, ref in tensors.items():
        name = release_name(original)
        parts = _split_gate_up(name, ref) if name.endswith(".experts.gate_up_proj") else {name: ref}
        for key, part in parts.items():
            if key in out:
                words = f"{original} and {out[key].name} are two names for {key}"
                raise PackDamaged(words, "the build holds tensors of two layouts; convert it again")
            if key.endswith(".attn.wo_a.weight") and len(part.shape) == 3:
                part = replace(part, shape=(part.shape[0] * part.shape[1], part.shape[2]))
            out[key] = part
    return _unstack_down(out)


def _split_gate_up(name: str, ref: TensorRef) -> dict[str, TensorRef]:
    experts, double, inputs = ref.shape
    width, out = double // 2, {}
    nbytes = width * inputs * ITEM_BYTES[ref.dtype]
    for e in range(experts):
        for half, w in enumerate(("w1", "w3")):
            key = name.replace(".gate_up_proj", f".{e}.{w}.weight")
            out[key] = replace(ref, shape=(width, inputs), offset=ref.offset + (2 * e + half) * nbytes, nbytes=nbytes)
    return out


def _unstack_down(tensors: dict[str, TensorRef]) -> dict[str, TensorRef]:
    """Beside experts that came apart from a fused tensor, a stacked w2 is taken apart too: one layout per layer."""
    out: dict[str, TensorRef] = {}
    for name, ref in tensors.items():
        prefix = name.removesuffix(".w2.weight")
        if not name.endswith(".experts.w2.weight") or f"{prefix}.0.w1.weight" not in tensors:
            out[name] = ref
            continue
        nbytes = ref.nbytes // ref.shape[0]
        for e in range(ref.shape[0]):
            out[f"{prefix}.{e}.w2.weight"] = replace(ref, shape=ref.shape[1:], offset=ref.offset + e * nbytes, nbytes=nbytes)
    return out
