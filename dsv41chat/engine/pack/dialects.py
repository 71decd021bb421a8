"""Tensor names as builds spell them -> release names. Headers only; no data is read.

One ordered table covers the release's own names, those of MLX conversions (with or without `language_model.` / `model.`) and those
of transformers.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from dsv41chat.engine.errors import PackDamaged
from dsv41chat.engine.pack.index import TensorRef

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
        (r"\.weight_scale(?:_inv)?$", ".scale"),
        (r"\.rank0\.", "."),
        (r"\.e_score_correction_bias$", ".bias"),
        # The indexer sits inside the compressor in transformers, and owns a compressor in the release.
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        *((rf"\.compressor\.{a}(?=\.|$)", f".compressor.{b}") for a, b in _COMPRESSOR),
        *((rf"\.attn\.{a}(?=\.|$)", f".attn.{b}") for a, b in _ATTENTION),
        # What transformers 5.24 writes for kv_norm when it saves a model.
        (r"^(layers\.\d+\.attn)\.norm\.weight$", r"\1.kv_norm.weight"),
        (r"\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.indexer\.k_proj\.", ".indexer.wk."),
        (r"(?:\.experts)?\.switch_mlp\.", ".experts."),
        *((rf"(\.(?:shared_)?experts(?:\.\d+)?)\.{a}$", rf"\1.{b}.weight") for a, b in _EXPERT),
        *((rf"(\.(?:shared_)?experts(?:\.\d+)?)\.{a}\.", rf"\1.{b}.") for a, b in _EXPERT),
    )
)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_STACKED = re.compile(r"^(.*\.experts)\.(w[123])\.(weight|scale|scales|biases|trellis|suh|svh|su|sv)$")


@lru_cache
def _rename(template: str) -> str:
    for pattern, to in _RULES:
        template = pattern.sub(to, template)
    return template


def release_name(name: str) -> str:
    """The release's name for a tensor name of any dialect; a name that no rule knows comes back unchanged."""
    # The rules never look at a number, so names that differ in nothing else share one look-up.
    numbers = iter(_NUMBER.findall(name))
    return _NUMBER.sub(lambda _: next(numbers), _rename(_NUMBER.sub("0", name)))


def release_tensors(tensors: dict[str, TensorRef]) -> dict[str, TensorRef]:
    """The same tensors by release name. Each keeps the name that its file has, for messages.

    Stacked experts [E, out, ...] become one view per expert; a fused `experts.gate_up_proj` [E, 2 * width, D] one per expert and half,
    gate rows first; a grouped `wo_a` [G, rank, ...] becomes [G * rank, ...]. All are the same bytes.
    Raises PackDamaged when two tensors get one name.
    """
    out: dict[str, TensorRef] = {}
    for original, ref in tensors.items():
        name = release_name(original)
        for key, part in _views(name, ref).items():
            if key in out:
                words = f"{original} and {out[key].name} are two names for {key}"
                raise PackDamaged(words, "the build holds tensors of two layouts; convert it again")
            out[key] = part
    return out


def _views(name: str, ref: TensorRef) -> dict[str, TensorRef]:
    if name.endswith(".experts.gate_up_proj") and len(ref.shape) == 3 and ref.shape[1] % 2 == 0:
        halves = replace(ref, shape=(2 * ref.shape[0], ref.shape[1] // 2, ref.shape[2]))
        return {name.replace(".gate_up_proj", f".{i // 2}.w{1 + 2 * (i % 2)}.weight"): part for i, part in enumerate(_split(halves))}
    if (match := _STACKED.match(name)) and len(ref.shape) > 1 and ref.shape[0]:
        prefix, which, leaf = match.groups()
        return {f"{prefix}.{e}.{which}.{leaf}": part for e, part in enumerate(_split(ref))}
    if ".attn.wo_a." in name and len(ref.shape) == 3 and not name.endswith(".trellis"):
        return {name: replace(ref, shape=(ref.shape[0] * ref.shape[1], ref.shape[2]))}
    return {name: ref}


def _split(ref: TensorRef) -> list[TensorRef]:
    """One view per index of the first axis."""
    nbytes = ref.nbytes // ref.shape[0]
    return [replace(ref, shape=ref.shape[1:], offset=ref.offset + i * nbytes, nbytes=nbytes) for i in range(ref.shape[0])]
