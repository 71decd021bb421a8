"""What every format and dialect is refused with, by name and before weights are read."""

from __future__ import annotations

import json
import re
from functools import lru_cache

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import probe_pack
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.errors import PackDamaged, PackIncomplete, PackUnsupported
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.store import Store
from tests.engine.pack import packs as p
from tests.engine.pack.test_dialects import DIALECTS, TEXT_ONLY, without_engram
from tests.engine.pack.test_formats import AFFINE, CASES, MXFP4, wo_a_slices

SAMPLES = {f"{case} {family}": (case, family) for case, families in CASES.items() for family in families} | {
    f"dialect {dialect} {family}": (dialect, family) for dialect, family in DIALECTS
}


@lru_cache
def sample(label: str):
    """(family, config, tensors) of one pack."""
    case, family = SAMPLES[label]
    values, config = p.tensors(family), p.CONFIGS[family]
    if label.startswith("dialect"):
        choose, layout, renaming, _ = DIALECTS[case, family]
        if case == "L":
            values, config = without_engram(values), TEXT_ONLY
        return family, config, renaming(p.flat(p.encode(values, choose)[0], **layout))
    parts = wo_a_slices(p.encode(values, CASES[case][family])[0])
    return family, config, p.flat(parts, stacked="exl3" not in case and case != "release")


def is_part_of(name: str, *words: str) -> bool:
    return ".1." in name and all(word in name for word in words)


def victim(tensors) -> str:
    """A tensor of layer 1's wkv, whatever it is called: its scales, its suh or its weight."""
    mine = [n for n in tensors if is_part_of(n, "attn.") and any(w in n for w in (".wkv.", ".kv_proj.")) and "compressor" not in n]
    return next(n for leaf in (".scales", ".suh", ".scale", "_inv", ".weight") for n in mine if n.endswith(leaf))


@pytest.fixture
def refused_by_the_program(program, tmp_path, monkeypatch):
    """Asks a build something: exit 4, one sentence that names the tensor or the shard, the question kept, and no weight was read."""

    def check(family, config, tensors, match, cut: int = 0):
        folder = p.write(tmp_path / "pack", config, tensors, family=family)
        shard = folder / "model-00001-of-00001.safetensors"
        if cut:
            shard.write_bytes(shard.read_bytes()[:-cut])
        read = []
        with monkeypatch.context() as patch:
            patch.setattr(TensorRef, "bytes", lambda ref: read.append(ref.name))
            patch.setattr(EngramReader, "open", lambda *args, **options: read.append("a table"))
            found = program("--json", "-m", str(folder), "hi", real=True)
        assert (found.code, found.object["type"], found.object["exit_code"]) == (4, "error", 4)
        assert re.search(match, found.object["message"]), found.object["message"]
        assert "\n" not in found.object["message"] and not read
        with Store.open(program.data, readonly=True) as store:
            assert [m.text for m in store.tree(found.object["conversation"])] == ["hi"]

    return check


@pytest.mark.parametrize("label", SAMPLES)
class TestEveryPack:
    """Through the command line, for each format and dialect."""

    def test_a_missing_tensor(self, label, refused_by_the_program):
        family, config, tensors = sample(label)
        gone = victim(tensors)
        match = r"layers\.1\.attn\.wkv\.\w+ is missing|1 tensors missing: layers\.1\.attn\.wkv\.weight"
        refused_by_the_program(family, config, {k: v for k, v in tensors.items() if k != gone}, match)

    def test_an_extra_tensor(self, label, refused_by_the_program):
        family, config, tensors = sample(label)
        extra = {"layers.1.attn.surprise.weight": ("BF16", np.zeros((2, 2), np.uint16))}
        refused_by_the_program(family, config, tensors | extra, r"1 tensors unexpected: layers\.1\.attn\.surprise\.weight")

    def test_a_mis_shaped_tensor(self, label, refused_by_the_program):
        family, config, tensors = sample(label)
        name = victim(tensors)
        tag, array = tensors[name]
        match = r"(wkv|kv_proj)\.\w+ is .*\(file model-00001-of-00001\.safetensors, offset"
        refused_by_the_program(family, config, tensors | {name: (tag, array[:-1])}, match)

    def test_a_truncated_shard(self, label, refused_by_the_program):
        family, config, tensors = sample(label)
        refused_by_the_program(family, config, tensors, r"model-00001-of-00001\.safetensors is truncated: its header describes", cut=10)


def test_the_sound_packs_are_not_refused(tmp_path):
    """Else the faults above would prove nothing."""
    for label in SAMPLES:
        family, config, tensors = sample(label)
        assert probe_pack(p.write(tmp_path / label, config, tensors, family=family)).family == family


def refused(tmp_path, change, kind, match, choose=lambda name: AFFINE[4], family="v4", load=False, **layout):
    parts, _ = p.encode(p.tensors(family), choose)
    found = p.flat(wo_a_slices(parts), **layout)
    change(found)
    folder = p.write(tmp_path, p.CONFIGS[family], found, family=family)
    with pytest.raises(kind, match=match):
        if load:
            pack = open_pack(folder)
            build_trunk(pack, dtype=mx.float32)
        else:
            open_pack(folder)


def exl3_pack(name):
    return p.exl3(2, "mcg") if ".ffn.experts." in name else p.plain("BF16")


def rename_key(old, new):
    return lambda t: t.update({new: t.pop(old)})


EXPERT = "layers.1.ffn.experts.1.w1."
MARK = ("I32", np.array(0x83DCD12D, np.uint32).view(np.int32))


@pytest.mark.parametrize(
    "change, kind, match, load",
    [
        (lambda t: t.update({EXPERT + "mul1": MARK}), PackDamaged, "two codebook markers, mcg and mul1", False),
        (lambda t: t.update({EXPERT + "mcg": MARK}), PackDamaged, r"w1\.mcg does not hold the multiplier 0xcbac1fed", True),
        (lambda t: t.pop(EXPERT + "suh"), PackIncomplete, r"experts\.1\.w1\.suh is missing", False),
        (lambda t: t.update({EXPERT + "weight": ("BF16", np.zeros((128, 128), np.uint16))}), PackDamaged, r"w1\.weight does not belong", False),
        (lambda t: t.update({EXPERT + "scale": ("F16", np.zeros(1, np.float16))}), PackDamaged, r"w1\.scale does not belong", False),
        (lambda t: t.update({EXPERT + "trellis": ("I16", np.zeros((8, 8, 40), np.int16))}), PackUnsupported, "2.5 bits per weight exist with", False),
        (lambda t: t.update({EXPERT + "trellis": ("I16", np.zeros((8, 8, 33), np.int16))}), PackDamaged, r"trellis is I16 \[8, 8, 33\]", False),
        (lambda t: t.update({EXPERT + "svh": ("F16", np.zeros(64, np.float16))}), PackDamaged, r"svh is F16 \[64\]", False),
        (rename_key(EXPERT + "trellis", EXPERT + "rank1.trellis"), PackIncomplete, r"missing: layers\.1\.ffn\.experts\.1\.w1\.weight", False),
    ],
)
def test_exl3_faults(change, kind, match, load, tmp_path):
    refused(tmp_path, change, kind, match, exl3_pack, load=load)


def test_a_sole_rank_is_the_matrix(tmp_path):
    parts, _ = p.encode(p.tensors("v4"), exl3_pack)
    found = {n.replace("experts.1.w1.trellis", "experts.1.w1.rank0.trellis"): t for n, t in p.flat(parts).items()}
    assert open_pack(p.write(tmp_path, p.V4, found, family="v4")).formats["exl3 2 mcg"] == 27


W = "layers.1.attn.wq_a."


@pytest.mark.parametrize(
    "change, kind, match, load",
    [
        (lambda t: t.pop(W + "biases"), PackIncomplete, r"wq_a\.biases is missing beside", False),
        (lambda t: t.pop(W + "weight"), PackIncomplete, r"1 tensors missing: layers\.1\.attn\.wq_a\.weight", False),
        (lambda t: t.update({W + "scale": t[W + "scales"]}), PackDamaged, r"wq_a\.scale does not belong to affine", False),
        (lambda t: t.update({W + "weight": ("U32", np.zeros((128, 28), np.uint32))}), PackUnsupported, "mean 7 bits in groups of 64", False),
        (lambda t: t.update({W + k: ("BF16", np.zeros((128, 8), np.uint16)) for k in ("scales", "biases")}), PackUnsupported, "groups of 16", False),
        (lambda t: t.update({W + "weight": ("U16", np.zeros((128, 16), np.uint16))}), PackDamaged, "is U16", False),
        (lambda t: t.update({W + "weight": ("F8_E5M2", np.zeros((128, 16), np.uint8))}), PackDamaged, "is F8_E5M2", False),
        (lambda t: t.update({"layers.1.ffn.gate.scales": t[W + "scales"]}), PackIncomplete, r"unexpected: layers\.1\.ffn\.gate\.scales", False),
        (lambda t: t.pop("layers.2.ffn.experts.w2.weight"), PackIncomplete, r"experts\.w2\.weight \(all 3 experts\)", False),
        (lambda t: t.pop("layers.1.ffn.experts.w3.scales"), PackIncomplete, r"experts\.0\.w3\.scales is missing", False),
    ],
)
def test_mlx_faults(change, kind, match, load, tmp_path, monkeypatch):
    monkeypatch.setitem(p.SIZES, "U16", 2)
    monkeypatch.setitem(p.SIZES, "F8_E5M2", 1)
    refused(tmp_path, change, kind, match, load=load, stacked=True)


def test_missing_experts_are_listed(tmp_path):
    gone = [f"layers.2.ffn.experts.{e}.w2.weight" for e in (0, 2)]
    match = r"2 tensors missing: layers\.2\.ffn\.experts\.\{0,2\}\.w2\.weight"
    refused(tmp_path, lambda t: [t.pop(n) for n in gone], PackIncomplete, match, fp4_experts)


def fp4_experts(name):
    return p.fp4 if ".ffn.experts." in name else p.plain("BF16")


def mxfp4_experts(name):
    return MXFP4 if ".ffn.experts." in name else p.plain("BF16")


@pytest.mark.parametrize("choose, name", [(fp4_experts, "experts.1.w1.scale"), (mxfp4_experts, "scales")])
def test_a_nan_scale_is_refused_when_it_is_read(choose, name, tmp_path):
    def spoil(tensors):
        key = next(n for n in tensors if n.endswith(name))
        tag, array = tensors[key]
        tensors[key] = tag, np.where(np.arange(array.size).reshape(array.shape) == 5, 255, array).astype(np.uint8)

    refused(tmp_path, spoil, PackDamaged, "NaN", choose, load=True)


def test_a_config_that_is_wrong_about_widths_is_only_noted(tmp_path):
    parts, _ = p.encode(p.tensors("v4"), lambda name: AFFINE[4])
    said = {"group_size": 64, "bits": 4, "model.layers.1.attn.wq_a": {"group_size": 32, "bits": 8}, "model.layers.1.attn.wkv": False}
    folder = p.write(tmp_path, p.V4 | {"quantization": said}, p.flat(parts), family="v4")
    notes = open_pack(folder).notes
    found = next(note for note in notes if "wrong about 2 modules" in note)
    assert found.endswith("layers.1.attn.wkv: no quantisation in config.json, affine 4 g64 by its shapes")


def test_a_config_that_is_right_is_not_noted(tmp_path):
    parts, _ = p.encode(p.tensors("v41"), lambda n: p.fp8_rows() if "engram.embed" in n else AFFINE[4] if ".ffn.experts." in n else AFFINE[8])
    said = {"group_size": 64, "bits": 8, "expert_bits": 4, "engram_bits": None, "modules": {"layers.0.attn.wq_a": {"group_size": 64, "bits": 8}}}
    folder = p.write(tmp_path, p.V41 | {"quantization": said}, p.flat(parts, stacked=True), family="v41")
    assert not any("config.json" in note for note in open_pack(folder).notes)


def test_a_build_without_engram_is_not_taken_for_one_with_it(tmp_path):
    parts, _ = p.encode(without_engram(p.tensors("v41")), lambda name: AFFINE[4])
    with pytest.raises(PackIncomplete, match="announces Engram in layers 1, and none of its tensors is here"):
        open_pack(p.write(tmp_path, p.V41, p.flat(parts), family="v41"))


def test_scales_written_as_floats_must_be_powers_of_two(tmp_path):
    choose = lambda name: p.fp8(128, scale_tag="F32") if name == "layers.1.attn.wq_a.weight" else p.plain("BF16")
    parts, _ = p.encode(p.tensors("v4"), choose)
    good = p.flat(parts)
    build_trunk(open_pack(p.write(tmp_path / "good", p.V4, good, family="v4")), dtype=mx.float32)
    bad = good | {W + "scale": ("F32", good[W + "scale"][1] * 1.5)}
    with pytest.raises(PackDamaged, match="not powers of two"):
        build_trunk(open_pack(p.write(tmp_path / "bad", p.V4, bad, family="v4")), dtype=mx.float32)


def test_code_of_a_pack_is_never_run(tmp_path):
    parts, _ = p.encode(p.tensors("v4"), lambda name: p.plain("BF16"))
    folder = p.write(tmp_path, p.V4 | {"auto_map": {"AutoModel": "evil.Model"}, "model_file": "evil.py"}, p.flat(parts), family="v4")
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    assert json.loads((folder / "config.json").read_text())["model_file"] == "evil.py"
    build_trunk(open_pack(folder), dtype=mx.float32)
