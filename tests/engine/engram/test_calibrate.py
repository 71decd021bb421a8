"""Measured choices: stored per platform, volume and batch size, used at the next open; doctor's lines."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dsv41chat.engine.engram import calibrate as module
from dsv41chat.engine.engram.calibrate import calibrate, wants_calibration
from dsv41chat.engine.engram.doctor import examine
from dsv41chat.engine.engram.os_layer import LinuxLayer
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.table import EngramSettings
from tests.engine.engram.tables import FakeMac, NoAdvice, assert_rows, write_table

ROWS = 20_000


@pytest.fixture
def spec(tmp_path):
    return write_table(tmp_path / "table", ROWS)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    monkeypatch.setattr(module, "BATCHES", {"decode": (24, 3), "prefill": (2000, 1)})
    monkeypatch.setattr("dsv41chat.engine.engram.doctor.BATCHES", module.BATCHES)


class AlwaysCold(LinuxLayer):
    """A drive of which nothing is ever resident, and where one path is much faster by the clock."""

    def mincore(self, mapped, pages):
        return np.zeros(len(pages), bool)


def test_the_winner_is_stored_and_used(spec, monkeypatch):
    layer, facts = AlwaysCold(), {}
    reader = EngramReader.open([spec], EngramSettings(scales="mapped"), facts, os_layer=layer)
    seconds = {"pool": 1.0, "advise": 2.0}

    def timed(probe, size, path, rows, calls, rng):
        return module.Measured(size, path, rows / seconds[path], 1.0, 1.0)

    monkeypatch.setattr(module, "_time", timed)
    measured = calibrate(reader)
    assert {(m.size, m.path) for m in measured} == {(s, p) for s in ("decode", "prefill") for p in ("pool", "advise")}
    assert len(facts) == 2 and all(json.loads(value)["path"] == "pool" for value in facts.values())
    assert all(key.startswith("engram.path/linux/") for key in facts)
    ids = np.arange(24)[None]
    for again in (reader, EngramReader.open([spec], EngramSettings(scales="mapped"), facts, os_layer=layer)):
        assert_rows(again.gather(0, ids), spec, ids)
        assert again.counters()[spec.name]["batches"] == {"pool": 1}
        again.close()


def test_real_timing_runs_every_path_and_returns_rates(spec):
    reader = EngramReader.open([spec], EngramSettings(scales="mapped"), {}, os_layer=AlwaysCold())
    measured = calibrate(reader)
    assert len(measured) == 4 and all(m.rows_s > 0 and m.cold_share == 1 for m in measured)
    assert set(reader.facts) == {reader.fact_key(reader.tables[0], size) for size in module.BATCHES}
    reader.close()


def test_pages_that_were_in_memory_are_no_measurement(spec):
    class AlwaysWarm(LinuxLayer):
        drops_pages = False

        def mincore(self, mapped, pages):
            return np.ones(len(pages), bool)

    reader = EngramReader.open([spec], EngramSettings(scales="mapped"), {}, os_layer=AlwaysWarm())
    assert calibrate(reader) and not reader.facts
    reader.close()


def test_cancel_stops_between_batches(spec):
    reader = EngramReader.open([spec], None, {})
    assert calibrate(reader, cancel=lambda: True) == [] and not reader.facts
    reader.close()


@pytest.mark.parametrize("value", ("{", "[]", '{"path": "warp"}', '{"rows": 1}', 'null'))
def test_facts_that_make_no_sense_are_ignored(spec, value):
    reader = EngramReader.open([spec])
    facts = {reader.fact_key(reader.tables[0], "decode"): value}
    reader.close()
    reader = EngramReader.open([spec], None, facts)
    assert reader.desks[0].choices == {}
    reader.close()


def test_only_large_streamed_tables_want_calibration(spec, monkeypatch):
    reader = EngramReader.open([spec], None, {})
    assert not wants_calibration(reader)
    monkeypatch.setattr(module, "MIN_TABLE_BYTES", 1000)
    assert wants_calibration(reader)
    reader.facts |= {reader.fact_key(reader.tables[0], size): '{"path": "pool"}' for size in module.BATCHES}
    assert not wants_calibration(reader)
    reader.close()
    reader = EngramReader.open([spec], EngramSettings(mode="resident"), {})
    assert not wants_calibration(reader) and calibrate(reader) == []
    reader.close()


@pytest.mark.parametrize("layer", (LinuxLayer, FakeMac, lambda: NoAdvice(("process_madvise", "fadvise"))))
def test_doctor_lines(spec, layer):
    reader = EngramReader.open([spec, replace(spec, name="layers.14.engram")], EngramSettings(scales="mapped"), {}, os_layer=layer())
    lines = examine(reader)
    names = [line.name for line in lines]
    assert names[:4] == ["layers.1.engram", "layers.14.engram", "pages", "residency probe"]
    assert {"cold decode", "cold prefill", "warm decode"} <= set(names)
    assert "20,000 rows of 264 bytes, fp8, mapped" in lines[0].text
    assert all(line.verdict in ("ok", "warn") for line in lines)
    assert len(examine(reader, measure=False)) < len(lines)
    reader.close()
