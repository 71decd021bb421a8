"""Packs of random weights with the shapes of a release, or of the embedded model, and a chosen number of layers and experts.

Layers differ (each has its own values, and its place in the release's plan), routing is spread (router rows are random and have no
bias), and an id that would end an answer is never the likeliest. Tensors carry the names that MLX conversions use, so peers open the
same files. Quantised matrices get random words whose values have mean 0 and deviation in^-1/2; nothing is quantised from floats, so
packs of any size are made slice by slice. As EXL3 (`form`) the same matrices are trellises, of which any words are a valid one. A
drafter's stages come after the trunk, whose values do not depend on them.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.config import family_of, parse_v41, read_config_json
from dsv41chat.engine.config_v4 import parse_v4
from dsv41chat.engine.ops.exl3 import BLOCK
from dsv41chat.engine.pack.build import Pack
from dsv41chat.engine.pack.dialects import release_tensors
from dsv41chat.engine.pack.drafter import drafter_tensors, find_drafter
from dsv41chat.engine.pack.index import PackIndex, TensorRef
from dsv41chat.engine.pack.names import Expected, expected_v41
from dsv41chat.engine.pack.names_v4 import expected_v4
from dsv41chat.engine.plan import build_plan
from dsv41chat.engine.published import V4_FLASH, V4_FLASH_0731, V41_FLASH
from dsv41chat.nano import embedded_pack

GROUP = 64
FORMS = {"affine": (4, 8, 32), "exl3": (1, 2, 3, 4, 5, 6, 7, 8)}
_CODEBOOK, _DEVIATION = "3inst", 1.2437  # the one without a marker, so that experts can be stacked; of its values
_WORDS_AT_ONCE = 1 << 23
_QUIET_IDS = 32
_YARN = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}
_COMMON: dict[str, Any] = {
    "vocab_size": 129280, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "o_lora_rank": 1024,
    "o_groups": 8, "sliding_window": 128, "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "swiglu_limit": 10.0,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000, "compress_rope_theta": 160000,
    "max_position_embeddings": 1048576, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rope_scaling": _YARN,
    "tie_word_embeddings": False,
}  # fmt: skip
_V41: dict[str, Any] = _COMMON | {
    "model_type": "deepseek_v41_text", "hidden_size": 5120, "num_hidden_layers": 40, "q_lora_rank": 1280, "rms_norm_eps": 1e-20,
    "moe_intermediate_size": 2304, "n_routed_experts": 384, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20,
    "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32,
    "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
}  # fmt: skip
_V4: dict[str, Any] = _COMMON | {
    "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43, "q_lora_rank": 1024, "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "compress_ratios": [0, 0] + [4, 128] * 20 + [4], "index_n_heads": 64,
    "num_hash_layers": 3, "bos_token_id": 0, "eos_token_id": 1, "architectures": ["DeepseekV4ForCausalLM"],
}  # fmt: skip
# Its config says 1, and three stages are there.
_0731 = V4_FLASH_0731 | {"num_nextn_predict_layers": 3}
SHAPES = ("v41", "v4", "nano")
MADE = "random_weights.json"
# own: what the release of the shape carries (V4: the next-token block); dspark: what V4-Flash-0731 has in its place.
DRAFTERS = ("own", "dspark")

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
# Release names -> names that the peer of a family and this program read, in order. mlx-vlm keeps most of the release's.
_V4_NAMES = ((re.compile(r"^head\."), "lm_head."),) + tuple(
    (re.compile(rf"\.experts\.{w}\."), f".switch_mlp.{to}.") for w, to in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
)
_V41_NAMES = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"^embed\.", "model.embed_tokens."), (r"^head\.", "lm_head."), (r"^(norm\.|layers\.)", r"model.\1"), (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."), (r"\.attn_norm\.", ".input_layernorm."), (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_", r".\1_hc."), (r"\.attn_sink$", ".sinks"), (r"\.wq_a\.", ".q_a_proj."), (r"\.wq_b\.", ".q_b_proj."),
        (r"\.wkv\.", ".kv_proj."), (r"\.wgate\.", ".gate_proj."), (r"\.wo_a\.", ".o_a_proj."), (r"\.wo_b\.", ".o_b_proj."),
        (r"\.q_norm\.", ".q_a_norm."), (r"\.compressor\.norm\.", ".compressor.kv_norm."), (r"\.indexer\.wk\.", ".indexer.k_proj."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"), (r"\.experts\.w1\.", ".experts.switch_mlp.gate_proj."),
        (r"\.experts\.w2\.", ".experts.switch_mlp.down_proj."), (r"\.experts\.w3\.", ".experts.switch_mlp.up_proj."),
        (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."), (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
        (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    )
)  # fmt: skip


def config_of(shape: str, layers: int | None, experts: int | None, drafter: str | None = None) -> dict[str, Any]:
    """config.json of a pack: the first `layers` of the release's plan, `experts` routed experts; None: as many as it has.

    nano: the embedded model's, without its engram tables. drafter: one of DRAFTERS, or None.
    """
    own: dict[str, Any] = {}
    if shape == "nano":
        outer = deepcopy(read_config_json(embedded_pack()))
        text = outer["text_config"]
        for key in [k for k in text if k.startswith(("engram_", "dspark_")) or k == "num_nextn_predict_layers"]:
            own[key] = text.pop(key)
        outer.pop("quantization_config", None)
    elif shape == "v41":
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264}
        outer = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": deepcopy(_V41), **ids}
    else:
        outer = deepcopy(_V4)
    text = outer.get("text_config", outer)
    count = layers or text["num_hidden_layers"]
    if not 0 < count <= text["num_hidden_layers"]:
        raise ValueError(f"the shape {shape} has 1 to {text['num_hidden_layers']} layers, not {count}")
    text["num_hidden_layers"], text["compress_ratios"] = count, text["compress_ratios"][:count]
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        if key in text:
            text[key] = [i for i in text[key] if i < count]
    if drafter is not None:
        own = own if shape == "nano" else V41_FLASH["text_config"] if shape == "v41" else _0731 if drafter == "dspark" else V4_FLASH
        text |= _drafter_config(own, count, experts)
    text["n_routed_experts"] = experts or text["n_routed_experts"]
    return outer


def _drafter_config(own: dict[str, Any], layers: int, experts: int | None) -> dict[str, Any]:
    """The keys of a release's drafter for a trunk of its first `layers`: taps as far from the last layer as there, at most `experts`."""
    found = {k: v for k, v in own.items() if k.startswith("dspark_") or k == "num_nextn_predict_layers"}
    if taps := found.get("dspark_target_layer_ids"):
        found["dspark_target_layer_ids"] = [t for t in (t - taps[-1] - 1 + layers for t in taps) if t >= 0]
    for key in ("dspark_n_routed_experts", "dspark_num_experts_per_tok"):
        if key in found and experts is not None:
            found[key] = min(experts, found[key])
    return found


def expected_of(config: dict[str, Any]) -> dict[str, Expected]:
    """Every tensor by release name, a drafter's last; routed experts as one stack per matrix, `experts.w1`."""
    c = parse_v4(config) if family_of(config) == "v4" else parse_v41(config)
    found = expected_v4(c, build_plan(c), stacked=True) if c.family == "v4" else expected_v41(c, build_plan(c))
    if stages := config.get("text_config", config).get("num_nextn_predict_layers", 0):
        found |= drafter_tensors(c, list(range(stages)))
    out, counts = {}, Counter(match.expand(r"\1.\3") for match in map(_EXPERT.match, found) if match)
    for name, want in found.items():
        match = _EXPERT.match(name)
        if match and match[2] == "0":
            stack = match.expand(r"\1.\3")
            out[stack] = Expected((counts[stack], *want.shape), "linear")
        elif not match and not want.optional:
            out[name] = want
    return out


def peer_name(name: str, family: str) -> str:
    for pattern, to in _V4_NAMES if family == "v4" else _V41_NAMES:
        name = pattern.sub(to, name)
    return name


def write_pack(
    folder: Path, shape: str, layers: int | None = None, experts: int | None = None, bits: int = 4, seed: int = 0, form: str = "affine",
    drafter: str | None = None,
) -> Path:
    """bits: as `FORMS` has them; of affine ones 32 means float32 throughout, the others are in groups of 64. drafter: one of DRAFTERS. One
    file per layer. Returns the folder. Raises ValueError for a width that the form does not have."""
    if bits not in FORMS[form]:
        raise ValueError(f"{form} matrices have {', '.join(map(str, FORMS[form]))} bits here, not {bits}")
    config = config_of(shape, layers, experts, drafter)
    if form == "exl3":
        config["quantization_config"] = {"quant_method": "exl3", "bits": bits, "codebook": _CODEBOOK}
    elif bits != 32:
        config["quantization"] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    folder.mkdir(parents=True, exist_ok=True)
    weight_map, total = {}, 0
    for file, tensors in _files(expected_of(config), config, bits, form, np.random.SeedSequence(seed)):
        mx.save_safetensors(str(folder / file), tensors, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(a.nbytes for a in tensors.values())
        del tensors
        mx.clear_cache()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    made = {"shape": shape, "layers": layers, "experts": experts, "bits": bits, "seed": seed, "form": form, "drafter": drafter}
    (folder / MADE).write_text(json.dumps(made))
    return folder


def made_as(folder: Path) -> dict[str, Any] | None:
    """How `write_pack` was asked for a build; None for other builds."""
    try:
        return json.loads((folder / MADE).read_text())
    except (OSError, ValueError):
        return None


def outline_pack(
    shape: str, layers: int | None = None, experts: int | None = None, bits: int = 4, form: str = "affine", drafter: str | None = None
) -> Pack:
    """The pack that `write_pack` would write, without writing it: for `outline_trunk`, which reads no values."""
    config = config_of(shape, layers, experts, drafter)
    parsed = (parse_v4 if family_of(config) == "v4" else parse_v41)(config)
    plan, refs = build_plan(parsed), {}
    for name, want in expected_of(config).items():
        for key, (tag, stored) in _stored(name, want, config, bits, form).items():
            size = int(np.prod(stored)) * {"F32": 4, "BF16": 2, "F16": 2, "I16": 2, "U32": 4, "I32": 4}[tag]
            refs[key] = TensorRef(key, Path("none"), tag, stored, 0, size)
    expected = expected_v4(parsed, plan) if family_of(config) == "v4" else expected_v41(parsed, plan)
    index = PackIndex(Path("none"), release_tensors(refs), ())
    return Pack(Path("none"), parsed, plan, index, expected, "0" * 64, {}, (), find_drafter(index.tensors, parsed))


def _stored(name: str, want: Expected, config: dict[str, Any], bits: int, form: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(tag, shape) of what is stored for a tensor, by its name in the file."""
    key, shape = peer_name(name, family_of(config)), want.shape
    if want.kind == "ids":
        return {key: ("I32", shape)}
    if _packs(name, want, config, bits, form) and form == "exl3":
        return {
            f"{stem}{leaf}": (tag, part)
            for stem, whole in _trellises(name, key, shape, config)
            for leaf, (tag, part) in _trellis_parts(whole, bits).items()
        }
    if not _packs(name, want, config, bits, form):
        narrow = bits != 32 and _narrow(name, shape)
        return {key: ("BF16" if narrow else "F32", shape)}
    stem, rows = key.removesuffix("weight"), (*shape[:-1], shape[-1] // GROUP)
    return {key: ("U32", (*shape[:-1], shape[-1] * bits // 32)), f"{stem}scales": ("BF16", rows), f"{stem}biases": ("BF16", rows)}


def _narrow(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the release stores it in bfloat16. A norm in float32 would make a peer compute everything behind it in float32."""
    return name.endswith("norm.weight") or (len(shape) > 1 and not name.endswith(("_fn", "ape")))


def _packs(name: str, want: Expected, config: dict[str, Any], bits: int, form: str) -> bool:
    kept = "compressor" in name or "weights_proj" in name
    if form == "exl3":
        return want.kind == "linear" and not kept and not any(n % BLOCK for _, part in _trellises(name, name, want.shape, config) for n in part[-2:])
    return bits != 32 and want.kind in ("linear", "lookup") and not kept and want.shape[-1] % GROUP == 0


def _trellises(name: str, key: str, shape: tuple[int, ...], config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """(name up to the leaf, [..., out, in]) of what a matrix is stored as: the grouped one is a slice per group."""
    stem = key.removesuffix("weight")
    if not name.endswith(".wo_a.weight"):
        return [(stem, shape)]
    groups = config.get("text_config", config)["o_groups"]
    return [(f"{stem}slice.{g}.", (shape[0] // groups, shape[1])) for g in range(groups)]


def _trellis_parts(shape: tuple[int, ...], bits: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    *lead, rows, columns = shape
    return {"trellis": ("I16", (*lead, columns // 16, rows // 16, 16 * bits)), "suh": ("F16", (*lead, columns)), "svh": ("F16", (*lead, rows))}


def _trellis(shape: tuple[int, ...], bits: int, rng: np.random.Generator, quiet: int = 0) -> dict[str, mx.array]:
    """Random words between signs of the inputs and scales of the outputs; the first `quiet` outputs are 0."""
    parts = {leaf: part for leaf, (_, part) in _trellis_parts(shape, bits).items()}
    signs = lambda shape: rng.integers(0, 2, shape, dtype=np.int8) * 2.0 - 1.0
    size = shape[-1] ** -0.5 / _DEVIATION * (0.8 + 0.4 * rng.random(parts["svh"], dtype=np.float32))
    svh = signs(parts["svh"]) * size
    svh[..., :quiet] = 0
    words = _random_words(int(np.prod(parts["trellis"])) // 2, rng).view(np.int16).reshape(parts["trellis"])
    half = lambda a: mx.array(a.astype(np.float16))
    return {"trellis": mx.array(words), "suh": half(signs(parts["suh"])), "svh": half(svh)}


def _random_words(count: int, rng: np.random.Generator) -> np.ndarray:
    """uint32 [count], by all processors; the same ones however many there are."""
    starts = range(0, count, _WORDS_AT_ONCE)
    seeds, out = rng.integers(0, 1 << 63, len(starts)), np.empty(count + count % 2, np.uint32)

    def fill(start: int, seed: int) -> None:
        size = min(_WORDS_AT_ONCE, out.size - start)
        out[start : start + size].view(np.uint64)[:] = np.random.SFC64(int(seed)).random_raw(size // 2)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, starts, seeds))
    return out[:count]


def _files(
    expected: dict[str, Expected], config: dict[str, Any], bits: int, form: str, seeds: np.random.SeedSequence
) -> Iterator[tuple[str, dict]]:
    groups = config.get("text_config", config)["o_groups"]
    parts: dict[str, dict[str, Expected]] = {}
    for name, want in expected.items():
        match = re.match(r"(layers|mtp)\.(\d+)\.", name)
        part = "head" if match is None else f"{'draft-' * (match[1] == 'mtp')}{int(match[2]):03}"
        parts.setdefault(f"model-{part}.safetensors", {})[name] = want
    for (file, names), seed in zip(parts.items(), seeds.spawn(len(parts))):
        rng, out = np.random.default_rng(seed), {}
        for name, want in names.items():
            for key, value in _tensor(name, want, config, bits, form, rng).items():
                whole = (".o_a_proj." in key or ".wo_a." in key) and ".slice." not in key
                out[key] = value.reshape(groups, value.shape[0] // groups, -1) if whole else value
        mx.eval(list(out.values()))
        yield file, out


def _tensor(name: str, want: Expected, config: dict[str, Any], bits: int, form: str, rng: np.random.Generator) -> dict[str, mx.array]:
    stem, shape = peer_name(name, family_of(config)), want.shape
    if want.kind == "ids":
        experts = config.get("text_config", config)["n_routed_experts"]
        table = np.stack([rng.permutation(experts)[: shape[1]] for _ in range(shape[0])])
        return {stem: mx.array(table.astype(np.int32))}
    if _packs(name, want, config, bits, form) and form == "exl3":
        quiet = _QUIET_IDS if name == "head.weight" else 0
        found = _trellises(name, stem, shape, config)
        return {f"{part}{leaf}": value for part, whole in found for leaf, value in _trellis(whole, bits, rng, quiet).items()}
    if want.kind == "lookup" and form == "exl3":
        # The largest table that stays plain: numbers of size 1 to 2 straight from random bits.
        words = _random_words(int(np.prod(shape)) // 2, rng).view(np.uint16).reshape(shape)
        return {stem: mx.array(words & np.uint16(0x807F) | np.uint16(0x3F80)).view(mx.bfloat16)}
    if not _packs(name, want, config, bits, form):
        values = _floats(name, shape, rng)
        if name == "head.weight":
            values[:_QUIET_IDS] = 0
        narrow = bits != 32 and _narrow(name, shape)
        return {stem: mx.array(values).astype(mx.bfloat16 if narrow else mx.float32)}
    # Words are uniform, so a value's deviation is scale * sqrt((2^2b - 1) / 12); the bias takes the mean away.
    words = mx.array(rng.integers(0, 1 << 32, (*shape[:-1], shape[-1] * bits // 32), dtype=np.uint32))
    step = (12 / (4**bits - 1)) ** 0.5 * shape[-1] ** -0.5
    scales = step * (0.8 + 0.4 * rng.random((*shape[:-1], shape[-1] // GROUP), dtype=np.float32))
    biases = -scales * (2**bits - 1) / 2
    if name == "head.weight":
        scales[:_QUIET_IDS] = biases[:_QUIET_IDS] = 0
    stem = stem.removesuffix(".weight")
    return {f"{stem}.weight": words, f"{stem}.scales": mx.array(scales).astype(mx.bfloat16), f"{stem}.biases": mx.array(biases).astype(mx.bfloat16)}


def _floats(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name.endswith("norm.weight"):
        return 1 + 0.1 * rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("gate.bias"):
        return np.zeros(shape, np.float32)
    if name.endswith("_scale"):
        return np.ones(shape, np.float32)
    deviation = 1.0 if name == "embed.weight" or len(shape) == 1 else shape[-1] ** -0.5
    return deviation * rng.standard_normal(shape, dtype=np.float32)
