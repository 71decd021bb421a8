"""The bench arm on a file of a few megabytes: it proves cold, checks rows, and its receipt names no machine."""

from __future__ import annotations

import getpass
import json
import platform
import sys

import numpy as np
import pytest

from dsv41chat.bench import engram
from dsv41chat.bench.table_file import ColdIds, TableFile, read_ahead_kb
from dsv41chat.cli import main
from dsv41chat.engine.engram.os_layer import LinuxLayer

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="proves cold pages the Linux way")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(engram, "SIZES", (24, 6144))
    monkeypatch.setattr(engram, "REPEATS", {24: 1, 6144: 2})
    monkeypatch.setattr(engram, "COLD_CALLS", {24: 2, 6144: 1})
    monkeypatch.setattr(engram, "SLOW_CALLS", {24: 1, 6144: 1})
    monkeypatch.setattr(engram, "WARM_CALLS", {24: 2, 6144: 1})
    monkeypatch.setattr(engram, "fio_limit", lambda file: None)
    monkeypatch.setattr(engram, "token_cost", lambda file, cold: {"rows_ms_per_token": {"p50_ms": 0.1}})
    monkeypatch.setattr(engram, "embedded_cost", lambda: {})
    monkeypatch.setattr(engram, "peer_arm", lambda file, folder: None)


def test_a_receipt_with_every_arm(small, tmp_path, capsys):
    words = ["bench", "engram", "--gigabytes", "0.04", "--rounds", "1", "--folder", str(tmp_path), "-o", str(tmp_path / "out")]
    assert main(words).code == 0
    (path,) = (tmp_path / "out").iterdir()
    assert path.name.endswith(".json") and "-engram-linux-" in path.name
    receipt = json.loads(path.read_text())
    assert receipt["limit"]["pages_s"] and receipt["file_bytes"] > 3.9e7 and "read_ahead_kb" in receipt
    for name in ("auto", "direct", "advise", "pool", "nocache", "numpy.memmap", "numpy.memmap MADV_RANDOM"):
        arm = receipt["arms"][name]
        assert arm["cold 24"]["p50_ms"] > 0 and arm["cold 6144"]["share_of_limit"] > 0, name
    assert receipt["arms"]["pool"]["batches"].keys() == {"pool"}
    assert "warm 24" in receipt["arms"]["auto"]
    text = path.read_text()
    for secret in (str(tmp_path), "/home", "/root", platform.node() or "?", "/tmp"):
        assert secret not in text
    assert f'"{getpass.getuser()}"' not in text
    assert [item.name for item in tmp_path.iterdir()] == ["out"], "the generated file is gone"


def test_rows_can_be_checked_from_their_ids(tmp_path):
    file = TableFile(tmp_path, 3000)
    file.write()
    assert file.path.stat().st_size == file.size
    ids = np.array([0, 1, 2999, 77])
    raw = np.fromfile(file.path, np.uint8)
    for slot, spec in enumerate(file.specs):
        parts = [raw[ref.offset : ref.end].reshape(ref.shape)[ids] for ref in spec.regions]
        file.check(slot, ids, *parts)
        for part in parts:
            part[2, 3] ^= 1
            with pytest.raises(ValueError, match=f"table {slot}"):
                file.check(slot, ids, *parts)
            part[2, 3] ^= 1
        with pytest.raises(ValueError):
            file.check(1 - slot, ids, *parts)


def test_cold_ids_are_cold_and_fresh(tmp_path):
    file = TableFile(tmp_path, 40_000)
    file.write()
    cold = ColdIds(file, LinuxLayer())
    cold.drop()
    ids, pages = cold.take(0, 200, True)
    if cold.resident(0, np.arange(2000), True).any():
        pytest.skip("this file system keeps its pages")
    assert len(np.unique(ids)) == 200 and 200 < pages <= 800
    with open(file.path, "rb") as stream:
        stream.seek(file.specs[0].weight.offset)
        stream.read(file.rows * 256)
    assert cold.resident(0, ids, True).all()
    with pytest.raises(RuntimeError, match="too much of the file"):
        cold.take(0, 200, True)


def test_read_ahead_is_a_number_or_unknown(tmp_path):
    value = read_ahead_kb(tmp_path)
    assert value is None or value >= 0
