"""Trained (or random) parameters -> a pack in release layout: release names, release bytes, four shards and an index.

Nothing here changes a value except by the rounding of the formats; the texts that go with the weights are written by `write_pack`'s caller.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from . import arch, quant

SHARDS = 4
_ATTENTION = {"wq_a": "wq_a", "wq_b": "wq_b", "wkv": "wkv", "wo_b": "wo_b"}
_HALVES = {"a": "attn", "f": "ffn"}

Tensor = tuple[str, str, np.ndarray]  # release name, safetensors dtype, array of raw bytes/bits in the tensor's shape


def _fp8(name: str, weight: np.ndarray) -> list[Tensor]:
    codes, scale = quant.fp8_tiles(weight)
    return [(name + ".weight", "F8_E4M3", codes), (name + ".scale", "F8_E8M0", scale)]


def _fp4(name: str, weight: np.ndarray) -> list[Tensor]:
    codes, scale = quant.fp4_rows(weight)
    return [(name + ".weight", "I8", codes.view(np.int8)), (name + ".scale", "F8_E8M0", scale)]


def _bf16(name: str, value: np.ndarray) -> list[Tensor]:
    return [(name, "BF16", quant.bf16(value))]


def _f32(name: str, value: np.ndarray) -> list[Tensor]:
    return [(name, "F32", np.ascontiguousarray(value, np.float32))]


def _block(p: dict, bias: dict, prefix: str, layer: int | None) -> Iterator[Tensor]:
    z = prefix + "attn."
    for half, release in _HALVES.items():
        yield from _bf16(f"{prefix}{release}_norm.weight", p[f"{prefix}{half}.norm"])
        for part in ("fn", "base", "scale"):
            yield from _f32(f"{prefix}hc_{release}_{part}", p[f"{prefix}{half}.{part}"])
    for ours, release in _ATTENTION.items():
        yield from _fp8(z + release, p[z + ours])
    yield from _fp8(z + "wo_a", p[z + "wo_a"].reshape(arch.O_GROUPS * arch.O_RANK, -1))
    yield from _bf16(z + "q_norm.weight", p[z + "q_norm"])
    yield from _bf16(z + "kv_norm.weight", p[z + "kv_norm"])
    yield from _f32(z + "attn_sink", p[z + "sink"])
    if layer in arch.KV_SOURCES:
        for ours, release in (("cwkv", "wkv"), ("cgate", "wgate"), ("cnorm", "norm")):
            if z + ours in p:
                yield from _bf16(f"{z}compressor.{release}.weight", p[z + ours])
        yield from _bf16(z + "indexer.wk.weight", p[z + "ik"])
        yield from _bf16(z + "indexer.k_norm.weight", p[z + "iknorm"])
    if layer in arch.INDEX_SOURCES:
        yield from _fp8(z + "indexer.wq_b", p[z + "iq"])
        yield from _bf16(z + "indexer.weights_proj.weight", p[z + "iw"])
    z = prefix + "ffn."
    yield from _bf16(z + "gate.weight", p[z + "gate"])
    yield from _f32(z + "gate.bias", bias[z + "bias"])
    yield from _f32(z + "gate.bias_vl", bias[z + "bias"])
    width = arch.EXPERT_DIM
    for e in range(arch.EXPERTS):
        part = slice(e * width, (e + 1) * width)
        yield from _fp4(f"{z}experts.{e}.w1", p[z + "w1"][:, part].T)
        yield from _fp4(f"{z}experts.{e}.w2", p[z + "w2"][part].T)
        yield from _fp4(f"{z}experts.{e}.w3", p[z + "w3"][:, part].T)
    for k in "123":
        yield from _fp8(f"{z}shared_experts.w{k}", p[z + "s" + k].T)


def release_tensors(p: dict, bias: dict) -> list[list[Tensor]]:
    """All tensors by shard: trunk, drafter, then one shard per engram layer with that layer's projections."""
    trunk = [*_bf16("embed.weight", p["embed"]), *_bf16("head.weight", p["head"]), *_bf16("norm.weight", p["norm"])]
    for i in range(arch.LAYERS):
        trunk += _block(p, bias, f"layers.{i}.", i)
    last, draft = f"mtp.{arch.STAGES - 1}.", []
    for s in range(arch.STAGES):
        draft += _block(p, bias, f"mtp.{s}.", None)
    draft += _fp8("mtp.0.main_proj", p["mtp.main"]) + _bf16("mtp.0.main_norm.weight", p["mtp.mnorm"])
    draft += _bf16(last + "norm.weight", p["mtp.dnorm"]) + _bf16(last + "markov_head.embed.weight", p["mtp.m1"])
    draft += _bf16(last + "markov_head.head.weight", p["mtp.m2"]) + _bf16(last + "confidence_head.proj.weight", p["mtp.conf"].reshape(1, -1))
    shards = [trunk, draft]
    for layer in arch.ENGRAM_LAYERS:
        z = f"layers.{layer}.engram."
        codes, scale = quant.fp8_rows(p[z + "table"])
        shards.append(
            [
                (z + "embed.weight", "F8_E4M3", codes),
                (z + "embed.scale", "F8_E8M0", scale),
                *_fp8(z + "wkv", p[z + "wkv"]),
                *_bf16(z + "q_weight", p[z + "q_weight"]),
                *_bf16(z + "k_weight", p[z + "k_weight"]),
            ]
        )
    return shards


def write_safetensors(path: Path, tensors: list[Tensor]) -> int:
    """Write one file with an 8-byte aligned header. -> payload bytes. (The stock writer has no e8m0 dtype for numpy input.)"""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, array in tensors:
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, _, array in tensors:
            f.write(np.ascontiguousarray(array).tobytes())
    return offset


def write_weights(folder: Path, p: dict, bias: dict) -> dict[str, str]:
    """Shards, `model.safetensors.index.json` and SHA256SUMS, which `models verify --full` compares, of copies too. -> file name: sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    index, total, digests = {}, 0, {}
    for k, tensors in enumerate(release_tensors(p, bias), 1):
        name = f"model-{k:05d}-of-{SHARDS:05d}.safetensors"
        total += write_safetensors(folder / name, tensors)
        index.update({t[0]: name for t in tensors})
        digests[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()), encoding="utf-8")
    return digests


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1, sort_keys=False) + "\n", encoding="utf-8")


def write_settings(folder: Path, tokenizer_json: Path) -> None:
    """config.json, generation_config.json, tokenizer.json and tokenizer_config.json for the given tokenizer."""
    from .tokenizer import compressed_map, marker_ids

    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer_json.resolve() != (folder / "tokenizer.json").resolve():
        (folder / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
    ids = marker_ids(tokenizer_json)
    write_json(folder / "config.json", arch.config(len(set(compressed_map(tokenizer_json))), ids))
    write_json(folder / "generation_config.json", {"temperature": 0, "effort": "off", "max_tokens": 512})
    write_json(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_eos_token": False,
            "bos_token": arch.BOS,
            "eos_token": arch.EOS,
            "pad_token": arch.PAD,
            "model_max_length": 8192,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def read_weights(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The inverse of `write_weights`: parameters (float32, as the formats hold them) and router biases under the trainer's names."""
    raw: dict[str, tuple[str, np.ndarray]] = {}
    for path in sorted(Path(folder).glob("model-*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, t in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                a, b = t["data_offsets"]
                kind = {"F32": "<f4", "BF16": "<u2"}.get(t["dtype"], "u1")
                raw[name] = t["dtype"], np.frombuffer(data[8 + size + a : 8 + size + b], kind).reshape(t["shape"])

    def value(name: str) -> np.ndarray:
        dtype, array = raw[name]
        if dtype == "F32":
            return array.copy()
        if dtype == "BF16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return quant.decode(dtype, array, raw[name.removesuffix("weight") + "scale"][1])

    shapes, bias_shapes = arch.initial()
    out = {k: np.empty(v.shape, np.float32) for k, v in shapes.items()}
    bias = {k: value(k.replace("ffn.bias", "ffn.gate.bias")) for k in bias_shapes}
    for ours, release, pick in _names():
        target = out[ours]
        if pick is None:
            target[...] = value(release).reshape(target.shape)
        else:
            target[pick] = value(release).T
    return out, bias


def _names() -> Iterator[tuple[str, str, tuple | None]]:
    """(our name, release name, None or the part of our [in, out] matrix that the release holds transposed)."""
    everything = slice(None)
    blocks = [(f"layers.{i}.", i) for i in range(arch.LAYERS)] + [(f"mtp.{s}.", None) for s in range(arch.STAGES)]
    yield from (("embed", "embed.weight", None), ("head", "head.weight", None), ("norm", "norm.weight", None))
    for prefix, layer in blocks:
        z = prefix + "attn."
        for half, release in _HALVES.items():
            yield f"{prefix}{half}.norm", f"{prefix}{release}_norm.weight", None
            for part in ("fn", "base", "scale"):
                yield f"{prefix}{half}.{part}", f"{prefix}hc_{release}_{part}", None
        for name in (*_ATTENTION, "wo_a", "q_norm", "kv_norm"):
            yield z + name, z + name + ".weight", None
        yield z + "sink", z + "attn_sink", None
        if layer in arch.KV_SOURCES:
            for ours, release in (("cwkv", "compressor.wkv"), ("cnorm", "compressor.norm"), ("ik", "indexer.wk"), ("iknorm", "indexer.k_norm")):
                yield z + ours, f"{z}{release}.weight", None
            if arch.RATIOS[layer] == 2:
                yield z + "cgate", z + "compressor.wgate.weight", None
        if layer in arch.INDEX_SOURCES:
            yield z + "iq", z + "indexer.wq_b.weight", None
            yield z + "iw", z + "indexer.weights_proj.weight", None
        z, width = prefix + "ffn.", arch.EXPERT_DIM
        yield z + "gate", z + "gate.weight", None
        for e in range(arch.EXPERTS):
            part = slice(e * width, (e + 1) * width)
            for k, pick in (("1", (everything, part)), ("2", (part, everything)), ("3", (everything, part))):
                yield f"{z}w{k}", f"{z}experts.{e}.w{k}.weight", pick
        for k in "123":
            yield f"{z}s{k}", f"{z}shared_experts.w{k}.weight", (everything, everything)
        if layer in arch.ENGRAM_LAYERS:
            z = prefix + "engram."
            for ours, release in (("table", "embed.weight"), ("wkv", "wkv.weight"), ("q_weight", "q_weight"), ("k_weight", "k_weight")):
                yield z + ours, z + release, None
    last = f"mtp.{arch.STAGES - 1}."
    yield from (
        ("mtp.main", "mtp.0.main_proj.weight", None),
        ("mtp.mnorm", "mtp.0.main_norm.weight", None),
        ("mtp.dnorm", last + "norm.weight", None),
        ("mtp.m1", last + "markov_head.embed.weight", None),
        ("mtp.m2", last + "markov_head.head.weight", None),
        ("mtp.conf", last + "confidence_head.proj.weight", None),
    )
