"""Conversions: each recipe loads strictly and computes what it should, a killed one goes on to the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.config import read_config_json
from dsv41chat.engine.convert.convert import convert_pack, plan_conversion
from dsv41chat.engine.convert.recipes import RECIPES
from dsv41chat.engine.errors import Cancelled, DoesNotFit, PackIncomplete, PackUnsupported
from dsv41chat.engine.pack.build import build_drafter, build_trunk, open_pack
from dsv41chat.engine.pack.formats import identify
from dsv41chat.nano import embedded_pack
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import CASES, logits, wo_a_slices
from tests.engine.pack.test_refusals import sample


def source(folder, family, case="release"):
    parts, _ = p.encode(p.tensors(family), CASES[case][family])
    return p.write(folder, p.CONFIGS[family], p.flat(wo_a_slices(parts)), family=family)


def run(source, target, recipe, **options):
    convert_pack(plan_conversion(source, target, recipe, **options))
    return open_pack(target)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def every_matrix(pack):
    return {name: want for name, want in pack.expected.items() if want.kind in ("linear", "lookup")}


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_the_lossless_repack_keeps_every_value(family, tmp_path):
    before = open_pack(source(tmp_path / "release", family))
    after = run(tmp_path / "release", tmp_path / "native", "native")
    for name, want in every_matrix(before).items():
        a, b = (identify(pack.index.tensors, name, want.shape) for pack in (before, after))
        assert np.array_equal(a.values(), b.values()), name
        assert b.label == {"fp4": "mxfp4", "bf16": "bf16"}.get(a.label, "mxfp8"), name
    for name, want in before.expected.items():
        if want.kind in ("float", "ids", "table"):
            assert before.index.tensors[name].bytes().tobytes() == after.index.tensors[name].bytes().tobytes(), name
    np.testing.assert_allclose(logits(tmp_path / "native"), logits(tmp_path / "release"), atol=5e-4)
    assert not any("config.json" in note for note in after.notes)


EXPECTED = {
    "affine-8": {"layers.1.ffn.experts.0.w1": "affine 8 g64", "layers.1.attn.wq_a": "affine 8 g64", "head": "affine 8 g64"},
    "affine-6": {"layers.1.ffn.experts.0.w1": "affine 6 g64"},
    "affine-4": {"layers.1.ffn.experts.0.w1": "affine 4 g64", "embed": "affine 4 g64"},
    "mixed-4_8": {"layers.1.ffn.experts.0.w2": "affine 4 g64", "layers.1.attn.wo_a": "affine 8 g64", "layers.1.attn.compressor.wkv": "bf16"},
    "mixed-2.4": {
        "layers.1.ffn.experts.0.w2": "affine 2 g128", "layers.1.attn.wq_b": "affine 6 g128", "layers.1.ffn.shared_experts.w1": "affine 8 g64",
    },
    "2bit-dq": {
        "layers.1.ffn.experts.0.w1": "affine 2 g32", "layers.1.ffn.experts.0.w2": "affine 2 g64", "layers.1.attn.compressor.wkv": "affine 4 g64",
        "layers.2.ffn.experts.0.w1": "affine 2 g64", "layers.1.attn.indexer.weights_proj": "affine 4 g64",
    },
}  # fmt: skip


@pytest.mark.parametrize("recipe", EXPECTED)
def test_recipes(recipe, tmp_path):
    """Widths as the recipe says, values within a step of the source, a folder that needs no notes, and the model still runs."""
    before = open_pack(source(tmp_path / "release", "v4"))
    after = run(tmp_path / "release", tmp_path / "out", recipe)
    for module, label in EXPECTED[recipe].items():
        name = f"{module}.weight"
        assert identify(after.index.tensors, name, after.expected[name].shape).label == label
    for name, want in every_matrix(before).items():
        a, b = (identify(pack.index.tensors, name, want.shape) for pack in (before, after))
        if b.label.startswith("affine"):
            groups = a.values().reshape(want.shape[0], -1, b.group)
            step = np.repeat((groups.max(-1) - groups.min(-1)) / (2**b.bits - 1), b.group, 1)
            assert (np.abs(a.values() - b.values()) <= 1.1 * step + 2**-7 * np.abs(a.values()).max()).all(), name
    assert not after.notes and np.isfinite(logits(tmp_path / "out")).all()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["conversion"]["recipe"] == recipe and config["conversion"]["source_fingerprint"] == before.fingerprint
    assert "quantization_config" not in config and config["quantization"]["layers.1.attn.wq_a"]["mode"] == "affine"


@pytest.mark.parametrize("bits", ["8", "6", "4"])
def test_tables_can_be_made_smaller(bits, tmp_path):
    source(tmp_path / "release", "v41")
    after = run(tmp_path / "release", tmp_path / "out", "mixed-4_8", table=bits)
    name = "layers.1.engram.embed.weight"
    ref = after.index.tensors[name]
    assert ref.dtype == "U32" and ref.shape == (p.ENGRAM_ROWS, 64 * int(bits) // 32)
    values = mx.array(open_values(open_pack(tmp_path / "release"), name)).astype(mx.bfloat16)
    want = mx.quantize(values, group_size=64, bits=int(bits))
    got = [after.index.tensors[name.replace("weight", leaf)].bytes().tobytes() for leaf in ("weight", "scales", "biases")]
    assert got == [np.array(want[0]).tobytes(), *(np.array(part.view(mx.uint16)).tobytes() for part in want[1:])]
    assert np.isfinite(logits(tmp_path / "out")).all()


def open_values(pack, name):
    return identify(pack.index.tensors, name, pack.expected[name].shape).values()


@pytest.mark.parametrize("recipe", ["mixed-4_8-engram6", "mixed-4_8-engram4"])
def test_recipes_that_name_the_table(recipe, tmp_path):
    source(tmp_path / "release", "v41")
    after = run(tmp_path / "release", tmp_path / "out", recipe)
    assert after.index.tensors["layers.1.engram.embed.weight"].shape[1] == 64 * int(recipe[-1]) // 32


@pytest.mark.parametrize("label", ["exl3-experts v4", "mixed v41", "dialect M v4"])
def test_other_sources(label, tmp_path):
    family, config, tensors = sample(label)
    p.write(tmp_path / "in", config, tensors, family=family)
    after = run(tmp_path / "in", tmp_path / "out", "affine-8")
    assert identify(after.index.tensors, "layers.1.ffn.experts.1.w1.weight", (128, 128)).label == "affine 8 g64"
    native = run(tmp_path / "in", tmp_path / "same", "native")
    np.testing.assert_allclose(logits(tmp_path / "same"), logits(tmp_path / "in"), atol=5e-4)
    assert native.formats == {{"fp8 32x32": "mxfp8"}.get(k, k): n for k, n in open_pack(tmp_path / "in").formats.items()}


@pytest.mark.parametrize("drafter, label", [("keep", "mxfp4"), ("exact", "mxfp4"), ("q8", "affine 8 g64"), ("drop", None)])
def test_the_drafter_of_the_embedded_pack(drafter, label, tmp_path):
    after = run(embedded_pack(), tmp_path / "out", "native", drafter=drafter)
    assert (after.found.plan is None) == (label is None) and after.found.fault is None
    if label:
        name = "mtp.0.ffn.experts.0.w1.weight"
        assert identify(after.index.tensors, name, after.found.plan.expected[name].shape).label == label
        assert build_drafter(after, build_trunk(after), rounded=True).block == read_config_json(embedded_pack())["text_config"]["dspark_block_size"]


SCRIPT = """
import os, signal, sys
from dsv41chat.engine.convert.convert import convert_pack, plan_conversion
at = int(sys.argv[3])
seen = []
def progress(group, done, total):
    seen.append(done)
    if len(seen) == at:
        os.kill(os.getpid(), signal.SIGKILL)
convert_pack(plan_conversion(sys.argv[1], sys.argv[2], "mixed-4_8-engram6"), resume=True, progress=progress)
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(source, digests of its conversion)"""
    folder = tmp_path_factory.mktemp("uninterrupted")
    source(folder / "release", "v41")
    run(folder / "release", folder / "whole", "mixed-4_8-engram6")
    return folder / "release", digests(folder / "whole")


@pytest.mark.parametrize("at", [1, 40, 200])
def test_a_killed_conversion_goes_on_to_the_same_bytes(at, uninterrupted, tmp_path):
    release, whole = uninterrupted
    target = tmp_path / "killed"
    found = subprocess.run([sys.executable, "-c", SCRIPT, str(release), str(target), str(at)], timeout=120)
    assert found.returncode == -signal.SIGKILL
    with pytest.raises(PackIncomplete, match="killed is a half-converted build"):
        open_pack(target)
    manifests = sorted(target.glob("model-*.manifest.json"))
    done = [*manifests, *(path.with_name(path.name.replace(".manifest.json", ".safetensors")) for path in manifests)]
    finished = {path: path.stat().st_mtime_ns for path in done}
    assert at == 1 or finished
    with pytest.raises(PackUnsupported, match="holds a part of a conversion"):
        run(release, target, "mixed-4_8-engram6")
    convert_pack(plan_conversion(release, target, "mixed-4_8-engram6"), resume=True)
    assert digests(target) == whole
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in finished.items())


def test_what_is_refused(tmp_path, monkeypatch):
    source(tmp_path / "release", "v4")
    with pytest.raises(PackUnsupported, match="'q9' is no recipe"):
        plan_conversion(tmp_path / "release", tmp_path / "out", "q9")
    with pytest.raises(PackUnsupported, match="is the source itself"):
        plan_conversion(tmp_path / "release", tmp_path / "release", "native")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("mine")
    with pytest.raises(PackUnsupported, match="is not empty"):
        run(tmp_path / "release", tmp_path / "other", "native")
    with pytest.raises(Cancelled):
        convert_pack(plan_conversion(tmp_path / "release", tmp_path / "part", "native"), cancel=lambda: True)
    with pytest.raises(PackUnsupported, match="another source, recipe or version"):
        convert_pack(plan_conversion(tmp_path / "release", tmp_path / "part", "affine-8"), resume=True)
    monkeypatch.setattr("shutil.disk_usage", lambda path: os.terminal_size((0, 0)) and type("Usage", (), {"free": 1000})())
    with pytest.raises(DoesNotFit, match="are still to be written"):
        convert_pack(plan_conversion(tmp_path / "release", tmp_path / "full", "native"))


def test_sizes_are_known_before_anything_is_written(tmp_path):
    plan = plan_conversion(source(tmp_path / "release", "v4"), tmp_path / "out", "mixed-4_8")
    assert not (tmp_path / "out").exists()
    convert_pack(plan)
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) == plan.bytes_out
    assert 4.5 < plan.bits_per_weight < 9.5 and set(RECIPES) >= {"native", "mixed-2.4", "2bit-dq"}
