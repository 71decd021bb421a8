"""What a damaged or foreign pack is refused with, before any weight is read."""

from __future__ import annotations

import json
import shutil
import struct

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from dsv41chat.engine import open_engine, probe_pack, verify_goldens
from dsv41chat.engine.errors import Cancelled, PackDamaged, PackError, PackIncomplete, PackMissing
from dsv41chat.engine.pack.index import read_header
from dsv41chat.nano import embedded_pack
from tests.v41 import DATA, PACK, golden, run, trunk


@pytest.fixture
def pack(tmp_path):
    folder = tmp_path / "pack"
    shutil.copytree(PACK, folder)
    for extra in folder.glob("*.safetensors"):
        if extra.name != "model.safetensors":
            extra.unlink()
    return folder


def edit_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_header(folder, change, keep: int | None = None):
    """Rewrite the safetensors header; tensor offsets stay valid because they are relative to the data area."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes((struct.pack("<Q", len(text)) + text + raw[8 + size :])[:keep])


def test_the_golden_pack_is_accepted(pack):
    info = probe_pack(pack)
    assert (info.family, info.context, info.drafter, info.has_tokenizer) == ("v41", 4096, None, False)
    assert info.table_bytes == (304 + 462) * 33


def test_a_missing_tensor_is_named(pack):
    edit_header(pack, lambda h: h.pop("layers.3.attn.wq_a.weight"))
    with pytest.raises(PackIncomplete, match=r"1 tensors missing: layers\.3\.attn\.wq_a\.weight"):
        probe_pack(pack)


def test_an_unexpected_tensor_is_named(pack):
    edit_header(pack, lambda h: h.update({"layers.2.attn.surprise": h["layers.2.attn_norm.weight"]}))
    with pytest.raises(PackIncomplete, match=r"1 tensors unexpected: layers\.2\.attn\.surprise"):
        probe_pack(pack)


def test_known_families_beside_the_trunk_are_skipped_aloud(pack):
    norm = lambda h: h["layers.2.attn_norm.weight"]
    edit_header(pack, lambda h: h.update({"vision.norm.weight": norm(h), "mtp.0.x": norm(h), "layers.7.attn_norm.weight": norm(h)}))
    notes = "\n".join(probe_pack(pack).notes)
    assert all(f"1 tensors of {family}" in notes for family in ("vision", "layers"))
    assert "the drafter is left out" in notes


def test_a_mis_shaped_tensor_is_named_with_its_place(pack):
    edit_header(pack, lambda h: h["layers.3.attn.wq_a.weight"].update(shape=[64, 32]))
    with pytest.raises(PackDamaged, match=r"wq_a\.weight is \[64, 32\], the config expects \[32, 64\] \(file model\.safetensors, offset"):
        probe_pack(pack)


def test_a_truncated_shard(pack):
    path = pack / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(PackDamaged, match="truncated: its header describes"):
        probe_pack(pack)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>404</html>", "web page"),
        (b"", "too few"),
        (struct.pack("<Q", 2**40) + b"{}", "announces a header"),
        (struct.pack("<Q", 5) + b"hello", "not valid safetensors JSON"),
        (struct.pack("<Q", 2) + b"[]", "not valid safetensors JSON"),
    ],
)
def test_what_is_no_safetensors_file(pack, content, words):
    (pack / "model.safetensors").write_bytes(content)
    with pytest.raises(PackDamaged, match=words):
        probe_pack(pack)


def test_sizes_that_contradict_the_shape(pack):
    edit_header(pack, lambda h: h["layers.3.attn.wq_a.weight"].update(dtype="F32"))
    with pytest.raises(PackDamaged, match="not valid safetensors JSON: layers.3.attn.wq_a.weight is F32"):
        probe_pack(pack)


def test_an_index_with_missing_shards(pack):
    names = list(read_header(pack / "model.safetensors"))
    weight_map = {n: "model.safetensors" for n in names} | {names[0]: "model-00002-of-00002.safetensors"}
    (pack / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(PackIncomplete, match="1 of 2 shards are missing: model-00002-of-00002.safetensors"):
        probe_pack(pack)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd"])
def test_an_index_may_not_leave_the_folder(pack, shard):
    (pack / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": shard}}))
    with pytest.raises(PackDamaged, match="leaves the folder"):
        probe_pack(pack)


def test_an_indexed_tensor_that_its_shard_lacks(pack):
    weight_map = {n: "model.safetensors" for n in (*read_header(pack / "model.safetensors"), "head.extra")}
    (pack / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(PackIncomplete, match="in the index but not in their shard: head.extra"):
        probe_pack(pack)


def test_two_files_and_no_index(pack):
    shutil.copy(pack / "model.safetensors", pack / "model-2.safetensors")
    with pytest.raises(PackDamaged, match="no model.safetensors.index.json says which counts"):
        probe_pack(pack)


def test_no_folder_no_config_no_weights(tmp_path, pack):
    with pytest.raises(PackMissing):
        probe_pack(tmp_path / "nothing")
    (pack / "model.safetensors").unlink()
    with pytest.raises(PackIncomplete, match="no model"):
        probe_pack(pack)
    (pack / "config.json").write_text("{")
    with pytest.raises(PackDamaged, match="JSON"):
        probe_pack(pack)
    (pack / "config.json").unlink()
    with pytest.raises(PackIncomplete, match="config.json"):
        probe_pack(pack)


def _text(**changes):
    return lambda config: config["text_config"].update(changes)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c.update(model_type="llama"), r"\$\.model_type is 'llama'"),
        (lambda c: c["text_config"].pop("rope_theta"), r"\$\.text_config\.rope_theta is missing"),
        (_text(hidden_size="64"), r"\$\.hidden_size is '64', expected an integer"),
        (_text(candidate_topk_blocks=1), r"candidate_topk_blocks is 1, expected at least .* = 2"),
        (_text(compress_ratios=[0, 2, 2]), "compress_ratios"),
        (_text(compress_ratios=[0, 4, 4, 4, 1, 1, 1]), "ratios 0, 1 or 2"),
        (_text(kv_source_layer_ids=[3, 4]), "layer 1 has compress ratio 2, but no kv source"),
        (_text(index_source_layer_ids=[3, 4, 6]), "no index source serves it"),
        (_text(engram_vocab_size=50), "primes of the engram columns sum to"),
        (_text(engram_compressed_vocab_size=101), "has 100 compressed ids"),
        (_text(tie_word_embeddings=True), "tie_word_embeddings"),
        (_text(scoring_func="relu"), "scoring_func is 'relu'"),
        (_text(rope_scaling={"rope_type": "linear"}), "rope_type is 'linear'"),
    ],
)
def test_config_faults_are_refused_with_their_address(pack, change, words):
    edit_config(pack, change)
    with pytest.raises(PackError, match=words):
        open_engine(pack)


def test_a_map_of_another_size(pack):
    path = pack / "engram_token_map.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:-1]))
    with pytest.raises(PackDamaged, match="159"):
        open_engine(pack)


def test_without_map_and_tokenizer_engram_is_not_skipped(pack):
    (pack / "engram_token_map.json").unlink()
    with pytest.raises(PackIncomplete, match="engram_token_map.json"):
        open_engine(pack)


@pytest.mark.parametrize("short_golden", [24], indirect=True)
def test_flat_and_inference_names_read_the_same(pack, short_golden):
    nested = json.loads((pack / "config.json").read_text())
    want = probe_pack(pack)
    flat = {**nested, **nested["text_config"], "model_type": "deepseek_v41"}
    flat.pop("text_config")
    (pack / "config.json").write_text(json.dumps(flat))
    assert probe_pack(pack).context == want.context
    renamed = {"hidden_size": "dim", "sliding_window": "window_size", "num_hidden_layers": "n_layers", "scoring_func": "score_func"}
    for ours, theirs in renamed.items():
        flat[theirs] = flat.pop(ours)
    scaling = flat.pop("rope_scaling")
    flat |= {"rope_factor": scaling["factor"], "beta_fast": 32, "beta_slow": 1, "original_seq_len": scaling["original_max_position_embeddings"]}
    (pack / "config.json").write_text(json.dumps(flat))
    report = verify_goldens(pack, short_golden, atol=2e-4)
    assert report.ok


def test_loading_can_be_cancelled():
    with pytest.raises(Cancelled):
        open_engine(embedded_pack(), cancel=lambda: True)


def test_packed_weights_equal_decoded_ones():
    """The fp8 and fp4 bytes of the embedded pack as MLX words: the same values, so the same logits to rounding."""
    ids = np.arange(3, 43)
    decoded = run(trunk(mx.float32, True, embedded_pack()), ids)
    packed = run(trunk(mx.float32, True, embedded_pack(), packed=True), ids)
    np.testing.assert_allclose(packed, decoded, atol=2e-3)


def test_the_fingerprint_is_what_the_pack_is(pack, tmp_path):
    first = probe_pack(pack).fingerprint
    copy = tmp_path / "copy"
    shutil.copytree(pack, copy)
    assert probe_pack(copy).fingerprint == first
    edit_config(copy, _text(max_position_embeddings=2048))
    assert probe_pack(copy).fingerprint != first
    raw = bytearray((pack / "model.safetensors").read_bytes())
    raw[-5] ^= 1
    (pack / "model.safetensors").write_bytes(raw)
    assert probe_pack(pack).fingerprint != first


@pytest.fixture(scope="module", params=[60])
def short_golden(request, tmp_path_factory):
    """The first ids of the golden sequence with their positions: the same checks in a part of the time."""
    g, path, count = golden(), tmp_path_factory.mktemp("golden") / "short.safetensors", request.param
    near = g["positions"] < count
    tensors = {"input_ids": g["input_ids"][:count], "positions": g["positions"][near]}
    for variant in ("no_quant", "cache_quant"):
        name = f"logits.engram_on.{variant}.ref64"
        tensors[name] = np.ascontiguousarray(g[name][near])
    save_file(tensors, path)
    return path


def swap_rows(path, name):
    ref = read_header(path)[name]
    raw, row = bytearray(path.read_bytes()), ref.nbytes // ref.shape[0]
    a, b = (slice(ref.offset + i * row, ref.offset + (i + 1) * row) for i in (0, 1))
    raw[a], raw[b] = raw[b], raw[a]
    path.write_bytes(raw)


@pytest.mark.parametrize("short_golden", [24], indirect=True)
@pytest.mark.parametrize(
    "spoil", [lambda p: edit_config(p, _text(rope_theta=20000)), lambda p: swap_rows(p / "model.safetensors", "layers.2.attn.wkv.weight")]
)
def test_verification_names_the_first_wrong_position(pack, spoil, short_golden):
    spoil(pack)
    report = verify_goldens(pack, short_golden, atol=2e-4)
    hard = [c for c in report.checks if c.hard]
    assert not report.ok and hard and all(c.first_bad in (0, 1, 2, 3, 4, 5) for c in hard)


def test_verification_passes_and_reports_rounding(pack, short_golden):
    report = verify_goldens(pack, short_golden, atol=2e-4, chunks=(7,))
    assert report.ok and {c.mode for c in report.checks} == {"one-shot", "chunks", "decode"}
    assert {c.hard for c in report.checks if "cache_quant" in c.name} == {False}
    assert all(c.max_abs <= 1e-3 for c in report.checks)


def test_a_file_without_checks_gives_an_empty_report():
    assert verify_goldens(PACK, DATA / "v41/native_packing.safetensors").checks == ()
