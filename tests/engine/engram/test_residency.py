"""The probe and its traps, the latch, the budget, cold behaviour (9.6)."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv41chat.engine.engram.os_layer import LinuxLayer, Unsupported, page_runs
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.residency import Latch, ResidencyProbe
from dsv41chat.engine.engram.table import EngramSettings
from tests.engine.engram.tables import FakeMac, assert_rows, drop_file, write_table

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="drops pages and asks mincore")
ROWS = 40_000
MAPPED = dict(scales="mapped")


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("t") / "table", ROWS)


def mapped_file(reader):
    return next(iter(reader._files.values()))


def resident_pages(reader) -> int:
    file = mapped_file(reader)
    return int(reader.os.mincore(file.mapped, np.arange(-(-file.size // reader.os.page_size))).sum())


def drop(reader):
    file = mapped_file(reader)
    drop_file(file.path, file.mapped.mmap)


def can_drop(reader) -> bool:
    drop(reader)
    return resident_pages(reader) == 0


@linux
@pytest.mark.parametrize("path", ("direct", "advise", "pool", "nocache"))
@pytest.mark.parametrize("access", ("mmap", "pread"))
def test_a_cold_row_costs_a_page_and_no_read_ahead(spec, path, access):
    watch = EngramReader.open([spec], EngramSettings(**MAPPED))
    if not can_drop(watch):
        pytest.skip("this file system keeps its pages")
    reader = EngramReader.open([spec], EngramSettings(path=path, access=access, **MAPPED))
    drop(watch)
    ids = np.random.default_rng(0).permutation(ROWS)[:100]
    assert_rows_after = reader.gather(0, ids)
    grown = resident_pages(watch)
    # Without a map the probe is RWF_NOWAIT, which starts to read the 64 pages it asks about.
    limit = 450 if path != "nocache" else 0 if access == "mmap" else 250
    assert grown <= limit, f"{grown} pages for 100 rows"
    assert path == "nocache" or grown >= 100
    assert_rows(assert_rows_after, spec, ids)
    reader.close()
    watch.close()


@linux
def test_nocache_keeps_pages_that_were_there_before(spec):
    reader = EngramReader.open([spec], EngramSettings(path="nocache", **MAPPED))
    if not can_drop(reader):
        pytest.skip("this file system keeps its pages")
    ids = np.random.default_rng(0).permutation(ROWS)[:1000]
    kept = ids[:20]
    for file, pages in reader.tables[0].pages(kept):
        for page in pages.tolist():
            os.pread(file.fd, 1, page * reader.os.page_size)
    before = resident_pages(reader)
    assert before > 0
    assert_rows(reader.gather(0, kept), spec, kept)
    reader.gather(0, ids[:50])
    reader.gather(0, ids)
    assert before <= resident_pages(reader) <= before + 20  # the kernel may hold back a page it is busy with
    assert reader.counters()[spec.name]["dropped_pages"] > 900
    reader.close()


def test_latch_has_hysteresis():
    latch = Latch()
    states = []
    for resident in (64, 64, 60, 56, 55, 62, 61, 62, 62, 61, 57, 56, 55, 64):
        latch.update(64, resident)
        states.append(latch.state)
    cold_again = ["cold"] * 4
    assert states == ["probing", "warm", "warm", "warm", "cold", *cold_again[:3], "warm", "warm", "warm", "warm", "cold", "cold"]


@linux
def test_cold_then_warm_then_cold(spec):
    reader = EngramReader.open([spec], EngramSettings(**MAPPED))
    if not can_drop(reader):
        pytest.skip("this file system keeps its pages")
    rng = np.random.default_rng(0)
    state = lambda: reader.residency()[0].state
    assert state() == "probing"
    few = [rng.integers(0, ROWS, (1, 24)) for _ in range(200)]
    reader.gather(0, few[0])
    assert state() == "cold"
    os.pread(mapped_file(reader).fd, 0, 0)
    with open(spec.weight.file, "rb") as file:
        while file.read(1 << 24):
            pass
    for ids in few[:16]:
        reader.gather(0, ids)
    assert state() == "cold"  # one warm probe is not yet a verdict
    for ids in few[16:32]:
        reader.gather(0, ids)
    assert state() == "warm"
    batches = reader.counters()[spec.name]["batches"]
    reader.gather(0, few[40])
    assert reader.counters()[spec.name]["batches"]["direct"] == batches.get("direct", 0) + 1
    drop(reader)
    for ids in few[:64]:
        reader.gather(0, ids)
        drop(reader)
    assert state() == "cold"
    sampled, resident = reader.residency()[0].sampled, reader.residency()[0].resident
    assert sampled > 0 and resident < sampled
    reader.close()


@linux
def test_read_ahead_does_not_make_a_table_look_warm(spec):
    """Pages that were asked for ahead are not probed when their rows are staged."""
    reader = EngramReader.open([spec], EngramSettings(**MAPPED))
    if not can_drop(reader):
        pytest.skip("this file system keeps its pages")
    rng = np.random.default_rng(1)
    for _ in range(40):
        ids = rng.integers(0, ROWS, (1, 24))
        reader.prefetch([ids])
        drop(reader)  # nothing stays: only an honest probe says so
        with reader.stage([ids]) as ticket:
            ticket.rows(0)
    assert reader.residency()[0].state == "cold"
    assert set(reader.counters()[spec.name]["batches"]) == {"advise"}
    reader.close()


@linux
def test_a_slow_warm_batch_asks_for_a_probe(spec):
    reader = EngramReader.open([spec], EngramSettings(**MAPPED))
    governor = reader.desks[0].governor
    governor.latch.state = "warm"
    governor._tokens_since_probe = 0
    for _ in range(20):
        governor.took(1e-5)
    assert not governor._suspicious
    governor.took(1e-3)
    assert governor._suspicious
    reader.gather(0, np.arange(24)[None])
    assert not governor._suspicious and governor.latch.sampled > 0
    reader.close()


FOREIGN = """
import os, sys
sys.path.insert(0, {root!r})
import numpy as np
import numpy.random, zlib
from pathlib import Path
from dsv41chat.engine.engram.os_layer import LinuxLayer
from dsv41chat.engine.engram.regions import Table, TableFile
from dsv41chat.engine.engram.residency import ResidencyProbe
os.setegid(65534)
os.seteuid(65534)
layer = LinuxLayer()
file = TableFile(layer, Path({path!r}), True)
pages = np.arange(0, file.size // layer.page_size, 7)
probe = ResidencyProbe(layer)
print(int(layer.mincore(file.mapped, pages).sum()), layer.mincore_truthful(file.path), int(probe.resident(file, pages).sum()), len(pages), probe.kind)
"""


@linux
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="becomes another user")
def test_a_foreign_users_mincore_is_not_believed(tmp_path):
    """The kernel calls every page resident to a user who neither owns the file nor may write it."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        os.chmod(folder, 0o755)
    spec = write_table(tmp_path / "table", 20_000)
    os.chmod(spec.weight.file, 0o644)
    drop_file(spec.weight.file)
    root = str(Path(__file__).parents[3])
    code = FOREIGN.format(root=root, path=str(spec.weight.file))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "Permission denied" in done.stderr:
        pytest.skip("the other user cannot reach the files")
    assert done.returncode == 0, done.stderr
    claimed, truthful, found, pages, kind = done.stdout.split()
    assert truthful == "False" and kind == "nowait"
    assert int(claimed) == int(pages)  # the trap is real on this kernel
    assert int(found) < int(pages) // 10


class LyingLayer(LinuxLayer):
    def mincore(self, mapped, pages):
        return np.ones(len(pages), bool)

    def memory(self):
        return 1 << 20, 1 << 20


def test_a_probe_that_calls_everything_resident_of_a_table_larger_than_memory_is_retired(spec):
    reader = EngramReader.open([spec], EngramSettings(**MAPPED), os_layer=LyingLayer())
    assert "larger than memory" in reader.probe.refused["mincore"]
    assert reader.probe.kind != "mincore"
    reader.close()


class BlindMac(FakeMac):
    def mincore(self, mapped, pages):
        return np.zeros(len(pages), bool)


def test_on_macos_mincore_must_first_see_a_page_that_was_read(spec):
    reader = EngramReader.open([spec], EngramSettings(**MAPPED), os_layer=BlindMac())
    assert "just read" in reader.probe.refused["mincore"] and reader.probe.kind == "latency"
    ids = np.arange(100)[None]
    assert_rows(reader.gather(0, ids), spec, ids)
    reader.close()
    reader = EngramReader.open([spec], EngramSettings(**MAPPED), os_layer=FakeMac())
    assert reader.probe.kind == "mincore" and not reader.probe.refused
    reader.close()


class NoProbes(LinuxLayer):
    def mincore(self, mapped, pages):
        raise OSError(38, "not implemented")

    def nowait(self, fd, pages):
        raise Unsupported("no")

    def latency(self, fd, pages):
        raise OSError(5, "no")


def test_without_any_probe_everything_is_cold(spec):
    reader = EngramReader.open([spec], EngramSettings(**MAPPED), os_layer=NoProbes())
    ids = np.arange(48)[None]
    for _ in range(3):
        assert_rows(reader.gather(0, ids), spec, ids)
    assert reader.probe.kind == "none" and set(reader.probe.refused) == {"mincore", "nowait", "latency"}
    assert reader.residency()[0].state == "cold"
    assert set(reader.counters()[spec.name]["batches"]) == {"advise"}
    reader.close()


@linux
def test_holes_are_not_called_resident_before_they_are_read(tmp_path):
    path = tmp_path / "holes"
    with open(path, "wb") as file:
        file.truncate(1 << 24)
    layer = LinuxLayer()
    fd = layer.open(path)
    mapped = layer.map(fd, 1 << 24)
    assert not layer.mincore(mapped, np.arange(100)).any()
    layer.close(fd)


def test_the_budget_turns_cold_batches_to_nocache_and_a_new_request_resets_it(spec):
    reader = EngramReader.open([spec], EngramSettings(cache_budget=1 << 20, **MAPPED), os_layer=NoProbes())
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, (40, 24))
    for _ in range(3):
        assert_rows(reader.gather(0, ids), spec, ids)
    assert reader.counters()[spec.name]["batches"] == {"nocache": 3}
    few = ids[:1]
    reader.begin_request()
    for _ in range(6):
        reader.gather(0, few)
    assert reader.counters()[spec.name]["batches"] == {"nocache": 4, "advise": 5}
    assert reader.prefetch([few])._jobs == [None]  # nothing is read ahead into a cache that is over its budget
    reader.close()


def test_page_runs():
    starts, lengths = page_runs(np.array([3, 4, 5, 9, 11, 12]))
    assert starts.tolist() == [3, 9, 11] and lengths.tolist() == [3, 1, 2]
    assert page_runs(np.zeros(0, np.int64))[0].size == 0


def test_probe_samples_pages_of_the_batch_not_of_the_table(spec):
    asked = []

    class Watching(LinuxLayer):
        def mincore(self, mapped, pages):
            asked.append(pages)
            return super().mincore(mapped, pages)

    reader = EngramReader.open([spec], EngramSettings(**MAPPED), os_layer=Watching())
    asked.clear()
    ids = np.arange(1000, 1300)
    reader.gather(0, ids[None])
    (pages,) = asked
    assert len(pages) <= 64
    assert set(pages.tolist()) <= set(((spec.weight.offset + ids * 256) // reader.os.page_size).tolist())
    assert ResidencyProbe(LinuxLayer()).sample_size == 64
    reader.close()


@linux
def test_mapped_pages_stay_below_their_bound(spec, monkeypatch):
    """What was touched through the map counts as the process's memory until it is unmapped."""
    monkeypatch.setattr("dsv41chat.engine.engram.regions.UNMAP_ABOVE_BYTES", 0)
    looks = []

    class Counting(LinuxLayer):
        def unmap_touched(self, mapped):
            looks.append(self.mapped_resident_bytes())
            super().unmap_touched(mapped)

    reader = EngramReader.open([spec], EngramSettings(path="direct", **MAPPED), os_layer=Counting())
    ids = np.arange(ROWS)
    for lo in range(0, ROWS, 4096):
        reader.gather(0, ids[lo : lo + 4096][None])
    assert len(looks) >= 2 * (ROWS // 4096) - 1
    after = Counting().mapped_resident_bytes()
    assert after < max(looks)
    reader.close()
