"""Tiny packs of both families, written without the program's own codecs.

Every name is spelled out here. A pack is made of float32 tensors by release name; a *store* turns one matrix into the tensors that a format
has and into the values that a reader must get from them, by `mx.dequantize`, by the golden byte tables or by the reference decoder of
EXL3. So each pack has a twin in plain float32 whose logits it must reproduce.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.engine.pack import exl3_reference

DATA = Path(__file__).parents[2] / "data"
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "I64": 8, "I16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}

Tensor = tuple[str, np.ndarray]  # safetensors tag; the bytes in the tensor's shape
Parts = dict[str, Tensor]
Stored = tuple[dict[str, Tensor], np.ndarray]  # parts by leaf; float32 values that they mean

_ROPE = {"rope_type": "yarn", "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}
_COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "qk_rope_head_dim": 32,
    "q_lora_rank": 128, "o_lora_rank": 128, "o_groups": 2, "sliding_window": 8, "moe_intermediate_size": 128, "n_routed_experts": 3,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu", "index_n_heads": 1, "index_head_dim": 128, "index_topk": 4,
    "rope_theta": 10000.0, "compress_rope_theta": 160000.0, "rope_scaling": _ROPE, "max_position_embeddings": 4096, "hc_mult": 2,
    "hc_sinkhorn_iters": 2, "hc_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
ENGRAM_LAYER, ENGRAM_ROWS = 1, 11 + 13 + 17 + 19  # one prime per column, from engram_vocab_size on
V41: dict[str, Any] = {
    "model_type": "deepseek_v41", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 250,
    "text_config": _COMMON | {
        "model_type": "deepseek_v41_text", "num_hidden_layers": 4, "rms_norm_eps": 1e-20, "compress_ratios": [0, 2, 1, 1],
        "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2], "candidate_source_layer_id": 2, "candidate_topk_blocks": 4,
        "candidate_block_size": 2, "engram_layer_ids": [ENGRAM_LAYER], "engram_num_embeddings": [ENGRAM_ROWS], "engram_max_ngram_size": 3,
        "engram_n_heads": 2, "engram_head_dim": 64, "engram_vocab_size": 10, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 200,
    },
}  # fmt: skip
V4: dict[str, Any] = _COMMON | {
    "model_type": "deepseek_v4", "num_hidden_layers": 3, "rms_norm_eps": 1e-6, "compress_ratios": [0, 4, 12, 0], "num_hash_layers": 1,
}  # fmt: skip
CONFIGS = {"v41": V41, "v4": V4}
IDS = np.random.default_rng(11).integers(3, 249, 40)


# values ----------------------------------------------------------------------------------------------------------------


def tensors(family: str, config: dict[str, Any] | None = None, seed: int = 5) -> dict[str, np.ndarray]:
    """float32 (and one int64) tensors by release name, experts one by one, everything exact in bfloat16."""
    outer = config or CONFIGS[family]
    c, rng = outer.get("text_config", outer), np.random.default_rng(seed)
    d, hd, s, experts, width = c["hidden_size"], c["head_dim"], c["hc_mult"], c["n_routed_experts"], c["moe_intermediate_size"]
    wide, v41 = c["num_attention_heads"] * hd, family == "v41"

    def normal(*shape: int, size: float = 1.0) -> np.ndarray:
        return bf16_exact((rng.standard_normal(shape) * size).astype(np.float32))

    def matrix(out: int, into: int, size: float = 1.0) -> np.ndarray:
        return normal(out, into, size=size * into**-0.5)

    def ones(n: int) -> np.ndarray:
        return bf16_exact((1 + 0.2 * rng.standard_normal(n)).astype(np.float32))

    w = {"embed.weight": normal(c["vocab_size"], d), "head.weight": matrix(c["vocab_size"], d, 2.0), "norm.weight": ones(d)}
    if not v41:
        w |= {"hc_head_fn": matrix(s, s * d), "hc_head_base": normal(s, size=0.5), "hc_head_scale": np.array([0.75], np.float32)}
    for i in range(c["num_hidden_layers"]):
        p, ratio = f"layers.{i}.", c["compress_ratios"][i]
        for half in ("attn", "ffn"):
            w[f"{p}hc_{half}_fn"], w[f"{p}hc_{half}_base"] = matrix((2 + s) * s, s * d), normal((2 + s) * s, size=0.5)
            w[f"{p}hc_{half}_scale"], w[f"{p}{half}_norm.weight"] = np.array([0.75, 1, 1.25], np.float32), ones(d)
        w[f"{p}attn.wq_a.weight"], w[f"{p}attn.q_norm.weight"] = matrix(c["q_lora_rank"], d), ones(c["q_lora_rank"])
        w[f"{p}attn.wq_b.weight"] = matrix(wide, c["q_lora_rank"])
        w[f"{p}attn.wkv.weight"], w[f"{p}attn.kv_norm.weight"] = matrix(hd, d), ones(hd)
        w[f"{p}attn.wo_a.weight"] = matrix(c["o_groups"] * c["o_lora_rank"], wide // c["o_groups"])
        w[f"{p}attn.wo_b.weight"] = matrix(d, c["o_groups"] * c["o_lora_rank"])
        w[f"{p}attn.attn_sink"] = normal(c["num_attention_heads"])
        rows, index_dim = c["index_n_heads"] * c["index_head_dim"], c["index_head_dim"]
        if v41 and i in c["index_source_layer_ids"]:
            w[f"{p}attn.indexer.wq_b.weight"] = matrix(rows, c["q_lora_rank"])
            w[f"{p}attn.indexer.weights_proj.weight"] = matrix(c["index_n_heads"], d)
        if v41 and i in c["kv_source_layer_ids"]:
            w[f"{p}attn.compressor.wkv.weight"], w[f"{p}attn.compressor.norm.weight"] = matrix(hd, d), ones(hd)
            w[f"{p}attn.indexer.wk.weight"], w[f"{p}attn.indexer.k_norm.weight"] = matrix(index_dim, hd), ones(index_dim)
            if ratio > 1:
                w[f"{p}attn.compressor.wgate.weight"] = matrix(hd, d, 2.0)
        if not v41 and ratio:
            halves, pools = (2 if ratio == 4 else 1), {"attn.compressor": hd}
            if ratio == 4:
                pools["attn.indexer.compressor"] = index_dim
                w[f"{p}attn.indexer.wq_b.weight"] = matrix(rows, c["q_lora_rank"])
                w[f"{p}attn.indexer.weights_proj.weight"] = matrix(c["index_n_heads"], d)
            for name, dim in pools.items():
                w[f"{p}{name}.wkv.weight"], w[f"{p}{name}.wgate.weight"] = matrix(halves * dim, d), matrix(halves * dim, d, 2.0)
                w[f"{p}{name}.ape"], w[f"{p}{name}.norm.weight"] = normal(ratio, halves * dim), ones(dim)
        w[f"{p}ffn.gate.weight"] = matrix(experts, d, 2.0)
        if not v41 and i < c["num_hash_layers"]:
            picks = [rng.permutation(experts)[: c["num_experts_per_tok"]] for _ in range(c["vocab_size"])]
            w[f"{p}ffn.gate.tid2eid"] = np.stack(picks).astype(np.int64)
        else:
            w[f"{p}ffn.gate.bias"] = normal(experts, size=0.25)
        if v41:
            w[f"{p}ffn.gate.bias_vl"] = normal(experts, size=0.25)
        for owner in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
            for m, out, into in (("w1", width, d), ("w3", width, d), ("w2", d, width)):
                w[f"{p}ffn.{owner}.{m}.weight"] = matrix(out, into, 1.5)
        if v41 and i in c.get("engram_layer_ids", ()):
            columns, dim = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"], c["engram_head_dim"]
            w[f"{p}engram.embed.weight"] = normal(c["engram_num_embeddings"][c["engram_layer_ids"].index(i)], dim)
            w[f"{p}engram.wkv.weight"] = matrix((s + 1) * d, columns * dim)
            w[f"{p}engram.q_weight"], w[f"{p}engram.k_weight"] = ones(s * d).reshape(s, d), ones(s * d).reshape(s, d)
    return w


def bf16_exact(value: np.ndarray) -> np.ndarray:
    """Cut to the leading 16 bits: the same number in bfloat16 and in float32."""
    return (np.ascontiguousarray(value, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_bits(value: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(value, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


# one matrix in every format --------------------------------------------------------------------------------------------


def plain(tag: str) -> Callable[[np.ndarray], Stored]:
    def store(w: np.ndarray) -> Stored:
        if tag == "I64":
            return {"": (tag, w)}, w
        bits = {"F32": lambda v: v, "BF16": bf16_bits, "F16": lambda v: v.astype(np.float16)}[tag](w)
        return {"": (tag, np.ascontiguousarray(bits))}, (bits.astype(np.float32) if tag == "F16" else w)

    return store


def mlx(mode: str, bits: int, group: int, scale_tag: str = "BF16") -> Callable[[np.ndarray], Stored]:
    """MLX's quantiser, and MLX's dequantiser for the values; affine scales and biases as written builds have them."""

    def store(w: np.ndarray) -> Stored:
        parts = mx.quantize(mx.array(w).astype(mx.bfloat16 if scale_tag == "BF16" else mx.float16), group_size=group, bits=bits, mode=mode)
        if mode != "affine":
            values = mx.dequantize(parts[0], parts[1], group_size=group, bits=bits, mode=mode, dtype=mx.float32)
            return {"weight": ("U32", np.array(parts[0])), "scales": ("U8", np.array(parts[1]))}, np.array(values)
        exact = [p.astype(mx.float32) for p in parts[1:]]
        values = mx.dequantize(parts[0], *exact, group_size=group, bits=bits)
        raw = [np.array(p.view(mx.uint16)) for p in parts[1:]]
        return {"weight": ("U32", np.array(parts[0])), "scales": (scale_tag, raw[0]), "biases": (scale_tag, raw[1])}, np.array(values)

    return store


def _tables() -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in mx.load(str(DATA / "checkpoints/byte_tables.safetensors")).items()}


def _scale_bytes(top: np.ndarray, largest: float) -> np.ndarray:
    return (127 + np.ceil(np.log2(np.maximum(top, 1e-6) / largest))).astype(np.uint8)


def fp8(block: int, tag: str = "F8_E4M3", scale_tag: str = "F8_E8M0") -> Callable[[np.ndarray], Stored]:
    """Nearest code of the golden table under one power of two per square block."""

    def store(w: np.ndarray) -> Stored:
        (rows, columns), table = w.shape, _tables()
        up, across = -(-rows // block), -(-columns // block)
        whole = np.zeros((up * block, across * block), np.float32)
        whole[:rows, :columns] = w
        scale = _scale_bytes(np.abs(whole.reshape(up, block, across, block)).max((1, 3)), 448)
        factor = np.repeat(np.repeat(table["e8m0.expected"][scale], block, 0), block, 1)[:rows, :columns]
        order = np.argsort(table["e4m3.expected"][:127])
        codes = order[np.searchsorted(table["e4m3.expected"][order], np.abs(w) / factor, side="right") - 1].astype(np.uint8)
        codes = codes | (np.signbit(w).astype(np.uint8) << 7)
        if scale_tag == "F32":
            return {"weight": (tag, codes), "scale": (scale_tag, table["e8m0.expected"][scale])}, table["e4m3.expected"][codes] * factor
        return {"weight": (tag, codes), "scale": (scale_tag, scale)}, table["e4m3.expected"][codes] * factor

    return store


def fp8_rows(tag: str = "F8_E4M3", scale_tag: str = "F8_E8M0") -> Callable[[np.ndarray], Stored]:
    """Rows with one scale per 32 values: table rows, and MXFP8 under release names."""

    def store(w: np.ndarray) -> Stored:
        table, groups = _tables(), w.reshape(w.shape[0], -1, 32)
        scale = _scale_bytes(np.abs(groups).max(-1), 448)
        factor = np.repeat(table["e8m0.expected"][scale], 32, 1)
        order = np.argsort(table["e4m3.expected"][:127])
        codes = order[np.searchsorted(table["e4m3.expected"][order], np.abs(w) / factor, side="right") - 1].astype(np.uint8)
        codes = codes | (np.signbit(w).astype(np.uint8) << 7)
        return {"weight": (tag, codes), "scale": (scale_tag, scale)}, table["e4m3.expected"][codes] * factor

    return store


def fp4(w: np.ndarray) -> Stored:
    """Pairs of codes, the even input in the low nibble, one scale per row and 32 inputs."""
    table, groups = _tables(), w.reshape(w.shape[0], -1, 32)
    scale = _scale_bytes(np.abs(groups).max(-1), 6)
    factor = np.repeat(table["e8m0.expected"][scale], 32, 1)
    codes = np.searchsorted(table["e2m1.expected"][:8], np.abs(w) / factor, side="right") - 1
    codes = (codes | np.where(np.signbit(w) & (codes > 0), 8, 0)).astype(np.uint8)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8)
    return {"weight": ("I8", packed), "scale": ("F8_E8M0", scale)}, table["e2m1.expected"][codes] * factor


def exl3(bits: float, codebook: str, seed: int = 0, legacy: bool = False) -> Callable[[np.ndarray], Stored]:
    """A random trellis scaled to the size of w: any bit pattern is a valid one. Values by the reference decoder."""

    def store(w: np.ndarray) -> Stored:
        rng = np.random.default_rng([seed, *w.shape, int(abs(w[0, :8]).sum() * 1e4)])
        out, into = w.shape
        trellis = rng.integers(-(1 << 15), 1 << 15, (into // 16, out // 16, int(16 * bits))).astype(np.int16)
        words = [rng.integers(-(1 << 15), 1 << 15, n // 16).astype(np.int16) for n in (into, out)]
        signs = [exl3_reference.unpack_signs(part) for part in words]
        size = np.float16(1.0 if legacy else w.std() / 1.2)
        suh, svh = signs[0], (signs[1] * size).astype(np.float16)
        parts: dict[str, Tensor] = {"trellis": ("I16", trellis)}
        parts |= {"su": ("I16", words[0]), "sv": ("I16", words[1])} if legacy else {"suh": ("F16", suh), "svh": ("F16", svh)}
        if codebook != "3inst":
            multiplier = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[codebook]
            parts[codebook] = ("I32", np.array(multiplier, np.uint32).view(np.int32))
        return parts, np.ascontiguousarray(exl3_reference.dense(trellis, suh, svh, codebook).T).astype(np.float32)

    return store


# a whole pack ----------------------------------------------------------------------------------------------------------


def stack(group: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The parts of several matrices side by side."""
    return {leaf: (tag, np.stack([parts[leaf][1] for parts in group])) for leaf, (tag, _) in group[0].items()}


def by_name(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts under their full names; a part "" is the tensor itself."""
    return {(name.removesuffix("weight") + leaf if leaf else name): tensor for leaf, tensor in parts.items()}


def write_safetensors(path: Path, found: dict[str, Tensor]) -> None:
    header, at = {}, 0
    for name, (tag, array) in found.items():
        assert array.nbytes == math.prod(array.shape) * SIZES[tag], (name, tag, array.dtype)
        header[name] = {"dtype": tag, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for _, array in found.values()))


def write(folder: Path, config: dict[str, Any], shards: list[dict[str, Tensor]] | dict[str, Tensor], *, family: str) -> Path:
    """config.json, shards with their index, and the token map of a V4.1 pack."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if family == "v41":
        (folder / "engram_token_map.json").write_text(json.dumps([i % 200 for i in range(256)]))
    shards = [shards] if isinstance(shards, dict) else shards
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, found in zip(names, shards):
        write_safetensors(folder / name, found)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {t: n for n, found in zip(names, shards) for t in found}}))
    return folder


def write_twin(folder: Path, family: str, values: dict[str, np.ndarray], table: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    """The same model in plain float32. table: the tensors of the Engram table, which has no plain form."""
    found = dict(table)
    for name, w in values.items():
        if not name.endswith("engram.embed.weight"):
            found |= by_name(name, plain("I64" if w.dtype == np.int64 else "F32")(w)[0])
    return write(folder, config or CONFIGS[family], found, family=family)


def is_matrix(name: str) -> bool:
    """Whether builds may store this tensor in fewer bits."""
    owner = name.removesuffix(".weight").split(".")[-1]
    return name.endswith(".weight") and owner not in ("norm", "attn_norm", "ffn_norm", "q_norm", "kv_norm", "k_norm", "gate")


def encode(values: dict[str, np.ndarray], choose: Callable[[str], Callable[[np.ndarray], Stored]]) -> tuple[dict[str, Parts], dict[str, np.ndarray]]:
    """(parts by leaf of every tensor, the values they mean). choose: name -> store; tensors that are no matrices stay plain."""
    parts, meant = {}, {}
    for name, w in values.items():
        kind = "I64" if w.dtype == np.int64 else "BF16" if name.endswith(("weight", "ape")) else "F32"
        parts[name], meant[name] = (choose(name) if is_matrix(name) else plain(kind))(w)
    return parts, meant


def flat(parts: dict[str, dict[str, Tensor]], *, stacked: bool = False, wo_a_groups: int = 0) -> dict[str, Tensor]:
    """Tensors by release name. stacked: experts [E, ...] under `experts.w1`; wo_a_groups: wo_a as [groups, rank, ...]."""
    out: dict[str, Tensor] = {}
    experts: dict[str, list[dict[str, Tensor]]] = {}
    for name, found in parts.items():
        pieces = name.split(".")
        if stacked and "experts" in pieces:
            at = pieces.index("experts")
            experts.setdefault(".".join([*pieces[: at + 1], *pieces[at + 2 :]]), []).append(found)
            continue
        if wo_a_groups and ".wo_a." in name:
            found = {leaf: (tag, a.reshape(wo_a_groups, a.shape[0] // wo_a_groups, *a.shape[1:])) for leaf, (tag, a) in found.items()}
        out |= by_name(name, found)
    return out | {k: v for name, group in experts.items() for k, v in by_name(name, stack(group)).items()}
