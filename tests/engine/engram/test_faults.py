"""R9, R10: changed files and failing reads end in an error that names file and offset; nothing hangs, nothing becomes zeros."""

import errno
import os
import shutil

import numpy as np
import pytest

from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.table import EngramSettings
from dsv41chat.engine.errors import Cancelled, DoesNotFit, EngramReadError
from tests.engine.engram.tables import FaultyDisk, assert_rows, write_table

ROWS = 20_000


@pytest.fixture
def spec(tmp_path):
    return write_table(tmp_path / "model-00047.safetensors", ROWS)


IDS = np.random.default_rng(0).integers(0, ROWS, (100, 24))


@pytest.mark.parametrize("path", ("direct", "advise", "pool", "nocache"))
@pytest.mark.parametrize("access", ("mmap", "pread"))
@pytest.mark.parametrize("rows", (1, 100))
def test_a_failing_drive(spec, path, access, rows):
    layer = FaultyDisk()
    reader = EngramReader.open([spec], EngramSettings(path=path, access=access, scales="mapped"), os_layer=layer)
    layer.armed = True
    ticket = reader.stage([IDS[:rows]])
    with pytest.raises(EngramReadError, match="model-00047.safetensors.*Input/output error") as caught:
        ticket.rows(0)
    ticket.cancel()
    assert caught.value.file == spec.weight.file and caught.value.offset > 0 and caught.value.hint
    assert reader.prefetch([IDS]) is not None  # a hint never raises
    layer.armed = False
    with reader.stage([IDS[:rows]]) as again:
        assert_rows(again.rows(0), spec, IDS[:rows])
    reader.close()
    assert reader.staging.in_flight == 0


@pytest.mark.parametrize("path", ("direct", "advise", "pool", "nocache"))
@pytest.mark.parametrize("rows", (1, 100))
def test_a_file_that_is_cut_under_positional_reads(spec, path, rows):
    reader = EngramReader.open([spec], EngramSettings(path=path, access="pread", scales="mapped"))
    os.truncate(spec.weight.file, spec.weight.offset + 1000)
    with pytest.raises(EngramReadError, match="the file ends") as caught:
        reader.gather(0, IDS[:rows])
    assert caught.value.file == spec.weight.file
    assert f"{caught.value.offset:,}" in str(caught.value)
    reader.close()


@pytest.mark.parametrize("path", ("direct", "advise", "pool"))
@pytest.mark.parametrize("rows", (1, 100))
def test_a_mapped_file_that_is_cut_is_noticed_before_it_is_touched(spec, path, rows):
    """Reading past its end through the map would kill the process."""
    reader = EngramReader.open([spec], EngramSettings(path=path, access="mmap", scales="mapped"))
    reader.gather(0, IDS[:rows])
    os.truncate(spec.weight.file, spec.weight.offset + 1000)
    with pytest.raises(EngramReadError, match="the file ends there, it had") as caught:
        reader.gather(0, IDS[:rows])
    assert caught.value.offset == spec.weight.offset + 1000
    reader.close()


def change_replace(path):
    shutil.copy(path, str(path) + ".new")
    os.replace(str(path) + ".new", path)


def change_truncate(path):
    os.truncate(path, os.path.getsize(path) - 10)


def change_write(path):
    with open(path, "r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(1, 1))


CHANGES = {
    "another file": change_replace,
    "its size": change_truncate,
    "written to": change_write,
    "No such file": os.unlink,
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_file_ends_the_request_before_it_reads(spec, what):
    reader = EngramReader.open([spec])
    reader.begin_request()
    CHANGES[what](spec.weight.file)
    with pytest.raises(EngramReadError, match=f"weight files changed while the app was running.*{what}") as caught:
        reader.begin_request()
    assert caught.value.file == spec.weight.file and "estart" in caught.value.hint
    reader.close()


def test_an_unchanged_file_passes(spec):
    reader = EngramReader.open([spec])
    os.utime(spec.weight.file, ns=(os.stat(spec.weight.file).st_atime_ns + 1, os.stat(spec.weight.file).st_mtime_ns))
    for _ in range(3):
        reader.begin_request()
    reader.close()


def test_an_interrupted_read_is_continued(spec):
    class Trickle(FaultyDisk):
        def pread_into(self, fd, buffer, offset):
            return super().pread_into(fd, buffer[:100], offset)

    reader = EngramReader.open([spec], EngramSettings(access="pread", path="pool"), os_layer=Trickle())
    assert_rows(reader.gather(0, IDS), spec, IDS)
    reader.close()


def test_resident_tables_survive_a_missing_volume(spec):
    layer = FaultyDisk(errno.ENODEV)
    reader = EngramReader.open([spec], EngramSettings(mode="resident"), os_layer=layer)
    layer.armed = True
    packed = reader.gather(0, IDS)
    layer.armed = False
    assert_rows(packed, spec, IDS)
    assert reader.residency()[0].state == "resident"
    reader.close()


def test_tables_that_do_not_fit_are_refused_before_they_are_copied(spec):
    class Small(FaultyDisk):
        def memory(self):
            return 1 << 30, ROWS * 264 - 1

    layer = Small()
    with pytest.raises(DoesNotFit, match="need 0.0 GB in memory") as caught:
        EngramReader.open([spec], EngramSettings(mode="resident"), os_layer=layer)
    assert "--engram stream" in caught.value.hint
    EngramReader.open([spec], EngramSettings(mode="stream"), os_layer=layer).close()


def test_copying_tables_reports_progress_and_can_be_stopped(spec):
    seen = []
    reader = EngramReader.open([spec], EngramSettings(mode="resident"), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (ROWS * 264, ROWS * 264) and len(seen) == 2
    reader.close()

    def stop(done, total):
        raise Cancelled("loading was cancelled")

    with pytest.raises(Cancelled):
        EngramReader.open([spec], EngramSettings(mode="resident"), progress=stop)
