"""The pack that ships: complete, small, what its papers say, and made by the exporter's formats."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from dsv41chat.engine import probe_pack
from dsv41chat.nano import arch, embedded_pack, export, quant, tokenizer
from dsv41chat.nano.random_pack import write


def test_sizes_and_papers():
    pack = embedded_pack()
    files = {p.name: p for p in pack.iterdir()}
    assert sum(p.stat().st_size for p in files.values()) <= 30_000_000 and all(p.stat().st_size <= 16_000_000 for p in files.values())
    papers = json.loads(files["provenance.json"].read_text())
    for name, digest in papers["shard_sha256"].items():
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() == digest
    listed = [line.split("  ") for line in files["SHA256SUMS"].read_text().splitlines()]
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    assert {name: digest for digest, name in listed} == papers["shard_sha256"] and [name for _, name in listed] == shards
    assert hashlib.sha256(files["tokenizer.json"].read_bytes()).hexdigest() == papers["tokenizer_sha256"] == papers["corpus"]["tokenizer_sha256"]
    notices = files["DATA_LICENSES.md"].read_text()
    assert all(word in notices for word in ("Princeton University", "Python Software Foundation", "GeoNames", "CC BY 4.0", "periodictable"))


def test_config_follows_the_architecture_table():
    pack = embedded_pack()
    ids = tokenizer.marker_ids(pack / "tokenizer.json")
    count = len(set(tokenizer.compressed_map(pack / "tokenizer.json")))
    assert json.loads((pack / "config.json").read_text()) == arch.config(count, ids)
    info = probe_pack(pack)
    assert info.family == "v41" and info.has_tokenizer


def test_reading_and_writing_the_weights_again_keeps_every_value(tmp_path):
    """Bytes may differ: a tile whose largest value was rounded down gets the next smaller scale, on which all its values lie too."""
    first = export.read_weights(embedded_pack())
    export.write_weights(tmp_path, *first)
    for before, after in zip(first, export.read_weights(tmp_path)):
        assert before.keys() == after.keys() and all(np.array_equal(v, after[k]) for k, v in before.items())


def test_random_pack_repeats(tmp_path):
    for name in ("a", "b"):
        write(embedded_pack() / "tokenizer.json", tmp_path / name, seed=3)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert probe_pack(tmp_path / "a").resident_bytes == probe_pack(embedded_pack()).resident_bytes


@pytest.mark.parametrize("value, code", [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (-5.0, 14), (6.0, 7), (-0.1, 0)])
def test_fp4_midpoints_go_to_the_even_code(value, code):
    assert quant.e2m1(np.array([value], np.float32))[0] == code


def test_fp8_rounds_to_nearest_even_and_keeps_subnormals():
    values = np.array([0, 2**-9, 2**-10, 3 * 2**-10, 17.0, 19.0, 448.0, -448.0], np.float32)
    assert quant.e4m3(values).tolist() == [0, 1, 0, 2, 0x58, 0x5A, 0x7E, 0xFE]


def test_rounding_is_idempotent():
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    for pack in (quant.fp8_tiles, quant.fp4_rows, quant.fp8_rows):
        dtype = "I8" if pack is quant.fp4_rows else "F8_E4M3"
        codes, scale = pack(w)
        once = quant.decode(dtype, codes, scale)
        codes2, scale2 = pack(once)
        assert np.array_equal(quant.decode(dtype, codes2, scale2), once) and np.abs(once - w).max() < 0.6
