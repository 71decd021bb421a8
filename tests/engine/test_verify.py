"""What `models verify` sees in headers and small files, and what only reading every byte shows."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import numpy as np
import pytest

from dsv41chat.engine import probe_pack
from dsv41chat.engine.convert.convert import convert_pack, plan_conversion
from dsv41chat.engine.errors import Cancelled, PackDamaged, PackIncomplete
from dsv41chat.engine.verify import verify_full, verify_plain
from dsv41chat.nano import embedded_pack
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import CASES, wo_a_slices


@pytest.fixture
def nano(tmp_path):
    folder = tmp_path / "nano"
    shutil.copytree(embedded_pack(), folder)
    return folder


def tiny(folder, case="release", change=lambda tensors: None):
    parts, _ = p.encode(p.tensors("v4"), CASES[case]["v4"])
    found = p.flat(wo_a_slices(parts), stacked=case in ("native", "nvfp4"))
    change(found)
    return p.write(folder, p.V4, found, family="v4")


def test_a_good_pack(nano, tmp_path):
    assert [found.name for found in verify_plain(nano, cache_dir=tmp_path)] == ["headers", "shards", "tokenizer", "token map"]


def longer(folder):
    with open(folder / "model-00002-of-00004.safetensors", "ab") as f:
        f.write(b"\0" * 7)


def gap(folder):
    path = folder / "model-00001-of-00004.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
    header[last]["data_offsets"] = [v + 64 for v in header[last]["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :] + b"\0" * 64)


def other_total(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))


def pointer(folder):
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")


@pytest.mark.parametrize(
    "damage, kind, words",
    [
        (longer, PackDamaged, r"model-00002-of-00004\.safetensors has [\d,]+ bytes, its header describes"),
        (gap, PackDamaged, "the tensor before it ends at"),
        (other_total, PackDamaged, r"index\.json says [\d,]+ bytes of tensors, the shards hold"),
        (pointer, PackDamaged, "tokenizer.json is a Git LFS pointer"),
        (lambda f: (f / "tokenizer.json").unlink(), PackIncomplete, "has no tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), PackDamaged, "tokenizer"),
        (lambda f: (f / "model-00003-of-00004.safetensors").unlink(), PackIncomplete, "1 of 4 shards are missing: model-00003"),
    ],
)
def test_plain_faults(damage, kind, words, nano, tmp_path):
    damage(nano)
    with pytest.raises(kind, match=words):
        list(verify_plain(nano, cache_dir=tmp_path))


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sums(folder, shard, value):
    (folder / "SHA256SUMS").write_text(f"{value} *{shard.name}\n")


def hub(folder, shard, value):
    path = folder / ".cache/huggingface/download" / f"{shard.name}.metadata"
    path.parent.mkdir(parents=True)
    path.write_text(f"{'c' * 40}\n{value}\n1700000000.0\n")


@pytest.mark.parametrize("publish", [sums, hub])
def test_checksums(publish, tmp_path):
    folder = tiny(tmp_path / "pack")
    shard = next(folder.glob("*.safetensors"))
    publish(folder, shard, digest(shard))
    found = list(verify_full(folder, done={}))
    assert found[0].what == "1 files have the published sha256" and found[1].what.endswith("a foreign codebook")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(PackDamaged, match=f"{shard.name} has the sha256 {digest(shard)}, published is"):
        list(verify_full(folder, done={}))


def test_without_a_digest_it_says_so(tmp_path):
    first = next(verify_full(tiny(tmp_path / "pack"), done={}))
    assert first.what.startswith("not compared: of 1 of 1 files no sha256 is known") and not first.checked


def test_a_damaged_copy_of_the_embedded_pack_is_another_build_and_found(tmp_path):
    """One bit in the middle of the largest shard, in a copy that keeps the dates of the sound one."""
    copy, done = tmp_path / "copy", {}
    shutil.copytree(embedded_pack(), copy)
    assert [found.what for found in verify_full(copy, done=done) if found.name == "checksums"] == ["4 files have the published sha256"]
    sound = probe_pack(embedded_pack()).fingerprint
    assert probe_pack(copy).fingerprint == sound
    shard = copy / "model-00001-of-00004.safetensors"
    stat = shard.stat()
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.unlink()
    shard.write_bytes(data)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert probe_pack(copy).fingerprint != sound
    with pytest.raises(PackDamaged, match=f"{shard.name} has the sha256 {digest(shard)}, published is"):
        list(verify_full(copy, done=done))


def test_a_conversion_carries_its_digests(tmp_path):
    convert_pack(plan_conversion(tiny(tmp_path / "in"), tmp_path / "out", "mixed-4_8"))
    assert next(verify_full(tmp_path / "out", done={})).what == "4 files have the published sha256"
    shard = tmp_path / "out/model-layers-01.safetensors"
    data = bytearray(shard.read_bytes())
    data[-20] ^= 4
    shard.write_bytes(data)
    with pytest.raises(PackDamaged, match="model-layers-01.safetensors has the sha256"):
        list(verify_full(tmp_path / "out", done={}))


def test_it_goes_on_where_it_was_stopped(tmp_path):
    convert_pack(plan_conversion(tiny(tmp_path / "in"), tmp_path / "out", "affine-8"))
    done, seen = {}, []
    with pytest.raises(Cancelled, match="are not read again"):
        list(verify_full(tmp_path / "out", done=done, progress=lambda name, read, total: seen.append(name), cancel=lambda: len(set(seen)) >= 2))
    first = dict(done)
    assert 0 < len(first) < 4
    read = []
    list(verify_full(tmp_path / "out", done=done, progress=lambda name, read_, total: read.append(name)))
    again = {name for name in read if read.count(name) > 1}
    assert {key.split(".", 2)[2].rsplit(".", 2)[0] for key in first}.isdisjoint(again) and len(done) == 4


def spoil(name, value):
    def change(tensors):
        key = next(k for k in sorted(tensors) if k.endswith(name))
        tag, array = tensors[key]
        tensors[key] = tag, np.where(np.arange(array.size).reshape(array.shape) == 3, value, array).astype(array.dtype)

    return change


@pytest.mark.parametrize(
    "case, change, words",
    [
        ("release", spoil("experts.1.w1.scale", 255), "holds the byte 255"),
        ("native", spoil("w1.scales", 255), "holds a NaN scale"),
        ("nvfp4", spoil("w1.scales", 127), "holds a NaN scale"),
        ("exl3-experts", lambda t: t.update({"layers.1.ffn.experts.0.w1.mcg": ("I32", np.array(7, np.int32))}), "does not hold the multiplier"),
    ],
)
def test_only_reading_shows(case, change, words, tmp_path):
    folder = tiny(tmp_path / "pack", case, change)
    with pytest.raises(PackDamaged, match=words):
        list(verify_full(folder, done={}))
