"""Killed at every step of the write path, and two processes in one folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsv41chat.store import prompt_cache_room as room
from tests.store.states import build_of, load, open_cache, packed, save

ROOT = Path(__file__).parents[2]
STEPS = (
    "room", "seg created", "seg piece", "seg synced", "seg renamed", "tail created", "tail piece", "tail synced", "tail renamed", "begun",
    "seg row", "rows", "committed", "unlinked", "merge created", "merge piece", "merge synced", "merge renamed", "merge rows",
)  # fmt: skip
QUICK = ("seg piece", "tail renamed", "rows", "committed", "merge renamed")
IDS = list(range(10_000))


def start(*words: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.store.states", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def killed_at(folder, step: str, count: int) -> None:
    process = start(folder, step, count)
    out, err = process.communicate(timeout=120)
    assert process.returncode == -9, f"{step} was never reached: {out[-100:]} {err[-500:]}"
    published = [int(line) for line in out.split()]
    cache = open_cache(folder)
    build = build_of(cache)
    room.sweep(cache, orphan_s=0.0)
    rows = {row["file"] for row in _query(cache, "SELECT file FROM seg UNION ALL SELECT file FROM mark")}
    found = {str(path.relative_to(folder)) for path in folder.glob("*/*/*.safetensors")}
    assert found == rows, "no file without a row, no row without a file"
    assert not list((folder / "tmp").iterdir()) and not _query(cache, "SELECT * FROM trash")
    if step != "unlinked" or published[-1] < 1880:
        last = published[-1] if published else 0
        assert load(cache, build, IDS) in (last, last + 20 if last else 120), "at most the mark at work is lost"
        for pos in published[-3:]:
            assert load(cache, build, IDS[: pos + 1]) == pos
    # And life goes on.
    save(cache, build, [7, *IDS], 500, conversation="d")
    assert load(cache, build, [7, *IDS]) == 500
    assert _query(cache, "PRAGMA integrity_check")[0]["integrity_check"] == "ok" and not _query(cache, "PRAGMA foreign_key_check")
    cache.close()


def _query(cache, sql: str) -> list[dict]:
    with cache.db.read() as db:
        return list(db.query(sql))


@pytest.mark.parametrize("step", QUICK)
def test_kill_9(tmp_path, step):
    killed_at(tmp_path / "states", step, 3 if not step.startswith("merge") else 1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 20])
@pytest.mark.parametrize("step", STEPS)
def test_kill_9_at_every_step(tmp_path, step, count):
    killed_at(tmp_path / "states", step, 1 if step.startswith("merge") else count)


def test_every_step_is_known(tmp_path):
    """A write path that grew a step grows this list too."""
    seen: set[str] = set()
    cache = open_cache(tmp_path / "states", hook=seen.add)
    build, ticket = build_of(cache), None
    for turn in range(1, 90):
        ticket = save(cache, build, IDS, 100 + 20 * turn, ticket, turn=turn)
        room.thin(cache, "c")
        room.merge(cache, ticket.seg_id)
    cache.close()
    assert seen == set(STEPS)


def two_writers(folder, seconds: float) -> None:
    """Two processes write, thin, evict and forget in one folder; afterwards everything that is there is whole."""
    running = [start(folder, "write", seed, seconds) for seed in (1, 2)]
    for process in running:
        out, err = process.communicate(timeout=seconds + 120)
        assert process.returncode == 0 and not err, err[-2000:]
        done, missed = map(int, out.split())
        assert done > 10 and missed <= done / 10
    cache = open_cache(folder)
    room.sweep(cache, orphan_s=0.0)
    rows = {row["file"] for row in _query(cache, "SELECT file FROM seg UNION ALL SELECT file FROM mark")}
    assert {str(path.relative_to(folder)) for path in folder.glob("*/*/*.safetensors")} == rows
    build = build_of(cache)
    for row in _query(cache, "SELECT * FROM mark"):
        segments = _segments(cache, row["seg_id"])
        assert segments is not None and segments[-1].hi == row["pos"]
    assert room.folder_bytes(folder) <= 400_000 + 2**18
    assert cache.find(build, packed([1, 2, 3])) is None
    cache.close()


def _segments(cache, seg_id):
    from dsv41chat.store.prompt_cache_index import segments_to

    with cache.db.read() as db:
        return segments_to(db, seg_id)


def test_two_processes(tmp_path):
    two_writers(tmp_path / "states", 3.0)


@pytest.mark.slow
def test_two_processes_for_half_a_minute(tmp_path):
    two_writers(tmp_path / "states", 30.0)
