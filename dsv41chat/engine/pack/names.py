"""The tensors of a V4.1 release pack, from the config alone, and the strict gate: none missing, none unknown, all shapes right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.errors import PackDamaged, PackIncomplete, PackUnsupported
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.plan import LayerPlan

# What the text trunk does not use. Draft tensors have a gate of their own: drafter.py.
SKIPPED_PREFIXES = ("vision.", "aligner.", "image_")
DRAFT_PREFIX = "mtp."
_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Expected:
    """shape: of the decoded tensor. kind: `float` (bf16, f16 or f32 values), `linear` (may be stored as fp8 or fp4 blocks with a
    `.scale` sibling), `ids` (int32 or int64) or `table` (fp8 rows with row scales, mapped and never loaded)."""

    shape: tuple[int, ...]
    kind: str


def expected_v41(c: V41Config, plan: tuple[LayerPlan, ...]) -> dict[str, Expected]:
    """Every tensor of the text trunk by release name."""
    out = {
        "embed.weight": Expected((c.vocab_size, c.hidden_size), "float"),
        "head.weight": Expected((c.vocab_size, c.hidden_size), "float"),
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
    out = block_tensors(c, c.n_routed_experts)
    floats: dict[str, tuple[int, ...]] = {"ffn.gate.bias_vl": (c.n_routed_experts,)}
    linears: dict[str, tuple[int, int]] = {}
    if layer.scores:
        linears["attn.indexer.wq_b.weight"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        floats["attn.indexer.weights_proj.weight"] = (c.index_n_heads, d)
    if layer.owns_pool:
        floats |= {
            "attn.indexer.wk.weight": (c.index_head_dim, hd),
            "attn.indexer.k_norm.weight": (c.index_head_dim,),
            "attn.compressor.wkv.weight": (hd, d),
            "attn.compressor.norm.weight": (hd,),
        }
        if layer.ratio > 1:
            floats["attn.compressor.wgate.weight"] = (hd, d)
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


def scale_name(weight_name: str) -> str:
    return weight_name.removesuffix("weight") + "scale"


def scale_block(weight: TensorRef, scale: TensorRef) -> int:
    """Edge of the square fp8 blocks that a scale describes, 0 for the fp4 layout (one scale per row and 32 inputs).

    Shapes decide, names do not. Raises PackDamaged when neither layout fits.
    """
    rows, columns = weight.shape[0], weight.shape[-1]
    if weight.dtype == "I8" and scale.shape == (rows, columns // 16):
        return 0
    for block in (32, 64, 128):
        if weight.dtype == "F8_E4M3" and scale.shape == (-(-rows // block), -(-columns // block)):
            return block
    raise PackDamaged(
        f"{scale.name} is {scale.dtype} {list(scale.shape)}, which does not fit {weight.name} {weight.dtype} {list(weight.shape)} "
        f"(file {scale.file.name}, offset {scale.offset:,})"
    )


def check_names(
    tensors: dict[str, TensorRef], expected: dict[str, Expected], layers: int, block: int | None, ignored: Collection[str] = ()
) -> list[str]:
    """The gate before any data is read. ignored: names that may be there and are not used.

    Returns notes about skipped families. Raises PackIncomplete, PackDamaged or PackUnsupported.
    """
    skipped: Counter[str] = Counter()
    known = set(expected) | {scale_name(n) for n, e in expected.items() if e.kind != "float"}
    unexpected = []
    for name in tensors:
        if name in known or name.startswith(DRAFT_PREFIX):
            continue
        parts = name.split(".")
        past = parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit() and int(parts[1]) >= layers
        if name in ignored or name.startswith(SKIPPED_PREFIXES) or past or name.endswith("rotary_emb.inv_freq"):
            skipped[parts[0]] += 1
        else:
            unexpected.append(name)
    missing = [n for n in expected if n not in tensors]
    if missing or unexpected:
        words = [
            f"{len(names)} tensors {what}: {', '.join(sorted(names)[:8])}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise PackIncomplete("; ".join(words), "the build does not match its config.json; copy or convert it again")
    for name, want in expected.items():
        check_tensor(tensors, name, want, block)
    return [f"{count} tensors of {family} are not used by the text trunk" for family, count in sorted(skipped.items())]


def check_tensor(tensors: dict[str, TensorRef], name: str, want: Expected, block: int | None) -> None:
    ref, scale = tensors[name], tensors.get(scale_name(name)) if want.kind != "float" else None
    shape = ref.shape[:-1] + (ref.shape[-1] * 2,) if ref.dtype == "I8" and ref.shape else ref.shape
    if shape != want.shape:
        raise PackDamaged(f"{name} is {list(shape)}, the config expects {list(want.shape)} (file {ref.file.name}, offset {ref.offset:,})")
    if want.kind == "ids":
        if ref.dtype not in ("I32", "I64"):
            raise PackUnsupported(f"{name} has dtype {ref.dtype}; token tables are I32 or I64")
    elif want.kind == "table":
        if ref.dtype != "F8_E4M3" or scale is None or scale.dtype != "F8_E8M0" or scale.shape != (want.shape[0], want.shape[1] // 32):
            found = f"{ref.dtype} with " + (f"scale {scale.dtype} {list(scale.shape)}" if scale else "no scale")
            raise PackUnsupported(f"{name}: table rows are {found}; expected F8_E4M3 with F8_E8M0 [{want.shape[0]}, {want.shape[1] // 32}]")
    elif ref.dtype in ("F8_E4M3", "I8"):
        if want.kind != "linear":
            raise PackUnsupported(f"{name} is {ref.dtype}; this tensor is never stored in blocks")
        if scale is None:
            raise PackIncomplete(f"{name} is {ref.dtype} but {scale_name(name)} is missing")
        if scale.dtype not in ("F8_E8M0", "U8"):
            raise PackUnsupported(f"{scale.name} is {scale.dtype}, expected F8_E8M0")
        found = scale_block(ref, scale)
        # A matrix no larger than a block fits several sizes, which then mean the same.
        fits = block is not None and scale.shape == (-(-ref.shape[0] // block), -(-ref.shape[-1] // block))
        if found and block and found != block and not fits:
            raise PackDamaged(f"{scale.name} {list(scale.shape)} means blocks of {found}, $.quantization_config.weight_block_size says {block}")
    elif ref.dtype not in _FLOATS:
        raise PackUnsupported(f"{name} has dtype {ref.dtype}; this engine loads {', '.join(_FLOATS)}, F8_E4M3 and packed FP4 (I8)")
    elif scale is not None:
        raise PackDamaged(f"{scale.name} is there, but {name} is {ref.dtype} and needs no scale")
