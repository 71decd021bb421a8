"""R1: every path returns the bytes that one os.pread per row returns."""

import os

import numpy as np
import pytest

from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.table import EngramSettings, TableRef, TableSpec
from tests.engine.engram.tables import FORMATS, FakeMac, NoAdvice, assert_rows, oracle, refuse_linux_calls, straddlers, write_table

ROWS = 20_000
PATHS = ("auto", "direct", "advise", "pool", "nocache")
ROW_SETTINGS = [
    dict(path=path, access=access, scales=scales)
    for path in PATHS
    for access in ("mmap", "pread")
    for scales in ("mapped", "resident")
] + [dict(mode="resident"), dict(path="nocache", row_cache=700), dict(path="pool", row_cache=64)]


@pytest.fixture(scope="module", params=FORMATS)
def spec(request, tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("t") / "table.safetensors", ROWS, request.param)


@pytest.fixture(scope="module")
def batches(spec):
    """[(ids, what one os.pread per row returns)]"""
    return [(ids, oracle(spec, ids)) for ids in id_batches(spec)]


def id_batches(spec):
    rng = np.random.default_rng(1)
    edge = straddlers(spec)
    yield np.array([[0, ROWS - 1, 0, 5, 5]])
    yield rng.permutation(ROWS)[:24].reshape(1, 24)
    yield np.resize(edge, 48).reshape(2, 24)
    yield np.concatenate([rng.integers(0, ROWS, 3000), edge, [0, ROWS - 1]]).reshape(-1, 1)
    yield np.zeros((0, 24), np.int64)
    yield rng.integers(0, ROWS, (2, 24)).astype(np.int32)


@pytest.mark.parametrize("settings", ROW_SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_every_path_returns_the_bytes_of_one_pread_per_row(spec, batches, settings):
    with_straddlers = straddlers(spec)
    assert len(with_straddlers) > 50  # the data area is misaligned on purpose
    reader = EngramReader.open([spec], EngramSettings(**settings))
    try:
        for _ in range(2):
            for ids, want in batches:
                assert_rows(reader.gather(0, ids), spec, ids, want)
                with reader.stage([ids], urgent=False) as ticket:
                    assert_rows(ticket.rows(0), spec, ids, want)
        counted = reader.counters()[spec.name]["batches"]
        if reader.settings.path != "auto":
            assert set(counted) - {"direct"} <= {settings["path"]}
            if "row_cache" not in settings and settings["path"] != "direct":
                assert counted.get("direct", 0) == 4  # the empty batches
        if reader.settings.mode == "resident":
            assert set(counted) == {"resident"}
        assert reader.staging.in_flight == 0
    finally:
        reader.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("access", ("mmap", "pread"))
def test_macos_paths_return_the_same_bytes_without_linux_calls(spec, batches, path, access, monkeypatch):
    refuse_linux_calls(monkeypatch)
    layer = FakeMac()
    reader = EngramReader.open([spec], EngramSettings(path=path, access=access), os_layer=layer)
    for ids, want in batches:
        assert_rows(reader.gather(0, ids), spec, ids, want)
    if path == "advise":
        assert layer.advised
    if path != "auto":
        assert set(reader.counters()[spec.name]["batches"]) <= {path, "direct"}
    reader.close()


@pytest.mark.parametrize("forbidden, left", [(("process_madvise",), "fadvise"), (("process_madvise", "fadvise"), "none")])
def test_forbidden_advice_falls_back_and_says_why(spec, batches, forbidden, left):
    reader = EngramReader.open([spec], EngramSettings(path="advise"), os_layer=NoAdvice(forbidden))
    for ids, want in batches:
        assert_rows(reader.gather(0, ids), spec, ids, want)
    counters = reader.counters()
    assert counters["reader"]["advise"] == left
    assert set(counters["reader"]["refused"]) == set(forbidden)
    assert any("not permitted" in reason for reason in counters[spec.name]["fallbacks"])
    if left == "none":
        assert counters[spec.name]["batches"]["pool"] > 0
    reader.close()


def test_two_tables_in_one_shard_and_scales_in_another(tmp_path):
    first = write_table(tmp_path / "a", 3000, name="layers.1.engram")
    second = write_table(tmp_path / "a", 2000, start=1_000_003, append=True, seed=3, name="layers.14.engram")
    other = write_table(tmp_path / "b", 2000, seed=4)
    third = TableSpec("layers.20.engram", 256, 2000, second.weight, other.scale)
    tables = [first, second, third]
    reader = EngramReader.open(tables, EngramSettings(scales="mapped"))
    rng = np.random.default_rng(0)
    for n in (1, 200):
        rows = [rng.integers(0, spec.rows, (n, 24)) for spec in tables]
        with reader.stage(rows) as ticket:
            for slot in (1, 0, 2):
                assert_rows(ticket.rows(slot), tables[slot], rows[slot])
    reader.close()


@pytest.mark.parametrize("bad", ([-1], [ROWS], [0, 1 << 62], np.array([2**64 - 1], np.uint64)))
def test_ids_outside_the_table_raise_before_anything_is_read(spec, bad):
    reader = EngramReader.open([spec])
    with pytest.raises(IndexError, match="outside 0 <= row < 20000"):
        reader.stage([np.array(bad)])
    assert reader.counters()[spec.name]["lookups"] == 0
    with pytest.raises(TypeError):
        reader.gather(0, np.array([0.5]))
    reader.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("access", ("mmap", "pread"))
def test_rows_of_a_table_of_full_size(tmp_path, path, access):
    """A sparse file as large as the release's second table: addresses beyond 2^32 are right on every path."""
    rows, file = 384_016_682, tmp_path / "full"
    with open(file, "wb") as out:
        out.truncate(208 + rows * 264)
    if os.stat(file).st_blocks * 512 > 1 << 20:
        pytest.skip("this file system has no sparse files")
    spec = TableSpec("layers.14.engram", 256, rows, TableRef(file, 208 + rows * 8, "F8_E4M3", (rows, 256)), TableRef(file, 208, "F8_E8M0", (rows, 8)))
    ids = np.array([0, 1, rows // 2, rows - 1])
    rng = np.random.default_rng(5)
    with open(file, "r+b") as out:
        for ref in spec.regions:
            for row in ids.tolist():
                out.seek(ref.offset + row * ref.row_bytes)
                out.write(rng.integers(1, 127, ref.row_bytes, np.uint8).tobytes())
    reader = EngramReader.open([spec], EngramSettings(path=path, access=access, scales="mapped"))
    packed = reader.gather(0, ids)
    assert_rows(packed, spec, ids)
    assert packed.weight.all(1).all()
    assert_rows(reader.gather(0, np.resize(ids, 600)), spec, np.resize(ids, 600))
    reader.close()
