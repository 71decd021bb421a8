"""Every format of both families loads strictly and computes what its plain float32 twin computes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.pack.build import build_trunk, open_pack
from tests.engine.pack import packs as p
from tests.v41 import run

FP8, FP8_V4, FP4, BF16 = p.fp8(32), p.fp8(128), p.fp4, p.plain("BF16")
AFFINE = {bits: p.mlx("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)}
MXFP4, MXFP8, NVFP4 = p.mlx("mxfp4", 4, 32), p.mlx("mxfp8", 8, 32), p.mlx("nvfp4", 4, 16)


def routed(name: str) -> bool:
    return ".ffn.experts." in name


def release(name: str):
    """As the vendor stores them."""
    if name.endswith("engram.embed.weight"):
        return p.fp8_rows()
    small = any(part in name for part in ("embed", "head", "compressor", "indexer.wk", "weights_proj"))
    return FP4 if routed(name) else BF16 if small else FP8


def release_v4(name: str):
    return FP8_V4 if release(name) is FP8 else release(name)


def table_or(store):
    """The Engram table stays as the release has it."""
    return lambda name: p.fp8_rows() if name.endswith("engram.embed.weight") else store(name) if callable(store) else store


def everything(store):
    return table_or(lambda name: store)


def native(name: str):
    """mxfp4 experts, mxfp8 else, embedding and head affine 8: the lossless repack."""
    return MXFP4 if routed(name) else AFFINE[8] if name in ("embed.weight", "head.weight") else MXFP8


def mixed(name: str):
    """Another width for nearly every module, float16 scales for one."""
    if routed(name):
        return AFFINE[2] if ".w2." in name else p.mlx("affine", 3, 128)
    if "wo_a" in name or "compressor" in name:
        return BF16
    return {"wq_a": AFFINE[5], "wq_b": NVFP4, "wkv": p.mlx("affine", 6, 32, "F16"), "wo_b": MXFP8}.get(name.split(".")[-2], AFFINE[8])


def exl3_experts(name: str):
    """Only routed experts are trellises; K and codebook change from one to the next."""
    if not routed(name):
        return release(name)
    e = int(name.split(".")[4])
    return [p.exl3(2, "mcg"), p.exl3(2.5, "mul1"), p.exl3(3, "3inst", legacy=True)][e % 3]


def exl3_full(name: str):
    if any(part in name for part in ("embed", "weights_proj")) or "engram.embed" in name:
        return p.fp8_rows() if "engram" in name else BF16
    return p.exl3({"wq_a": 6, "wkv": 5, "w1": 1.5, "w3": 3.5, "w2": 4}.get(name.split(".")[-2], 8), "mul1")


CASES = {
    "release": {"v41": release, "v4": release_v4},
    "plain-f32": {"v41": everything(p.plain("F32")), "v4": everything(p.plain("F32"))},
    "plain-f16": {"v41": everything(p.plain("F16")), "v4": everything(p.plain("F16"))},
    **{f"affine-{bits}": {"v41": everything(store), "v4": everything(store)} for bits, store in AFFINE.items()},
    "mxfp4": {"v41": everything(MXFP4), "v4": everything(MXFP4)},
    "mxfp8": {"v41": everything(MXFP8), "v4": everything(MXFP8)},
    "nvfp4": {"v41": everything(NVFP4), "v4": everything(NVFP4)},
    "native": {"v41": table_or(native), "v4": native},
    "mixed": {"v41": table_or(mixed), "v4": mixed},
    "exl3-experts": {"v41": exl3_experts, "v4": exl3_experts},
    "exl3-full": {"v41": exl3_full, "v4": exl3_full},
}
ALL = [(case, family) for case, families in CASES.items() for family in families]


def wo_a_slices(parts):
    """EXL3 packs hold wo_a as one matrix per group."""
    out, slices = {}, {}
    for name, found in parts.items():
        if ".wo_a." in name and "trellis" in found:
            slices[name] = found
        else:
            out[name] = found
    for name, found in slices.items():
        trellis = found["trellis"][1]
        for g in range(2):
            half = slice(g * trellis.shape[1] // 2, (g + 1) * trellis.shape[1] // 2)
            rows = slice(g * 128, (g + 1) * 128)
            piece = found | {"trellis": ("I16", np.ascontiguousarray(trellis[:, half])), "svh": ("F16", found["svh"][1][rows])}
            out[name.replace("wo_a.weight", f"wo_a.slice.{g}.weight")] = piece
    return out


def make(folder, family, choose, *, rename=lambda tensors: tensors, **layout):
    """(pack folder, twin folder) of one format."""
    parts, meant = p.encode(p.tensors(family), choose)
    parts = wo_a_slices(parts)
    table = {k: v for name, found in parts.items() if "engram.embed" in name for k, v in p.by_name(name, found).items()}
    p.write_twin(folder / "twin", family, meant, table)
    found = rename(p.flat(parts, **layout))
    names = list(found)
    halves = [{n: found[n] for n in names[i::2]} for i in range(2)]
    return p.write(folder / "pack", p.CONFIGS[family], halves, family=family), folder / "twin"


def logits(folder, **options):
    return run(build_trunk(open_pack(folder), dtype=mx.float32, cache_quant=False, **options), p.IDS)


@pytest.mark.parametrize("case, family", ALL)
def test_a_format_computes_what_its_twin_computes(case, family, tmp_path):
    pack, twin = make(tmp_path, family, CASES[case][family], stacked="exl3" not in case and case != "release")
    got, want = logits(pack), logits(twin)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, atol=5e-4)


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_release_bytes_as_mlx_words(family, tmp_path):
    """packed: what a GPU or a large pack gets; the same values, so the same logits."""
    pack, twin = make(tmp_path, family, CASES["release"][family])
    np.testing.assert_allclose(logits(pack, packed=True), logits(twin), atol=5e-4)
