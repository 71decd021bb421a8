"""States on disk: found by exact ids, shared by branches, checked on reading, kept within the budget, deleted for good."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sqlite3
import stat
from pathlib import Path

import pytest

from dsv41chat.settings import load_settings
from dsv41chat.store import StoreReadOnly, prompt_cache_index
from dsv41chat.store import prompt_cache_room as room
from dsv41chat.store.prompt_cache_files import CacheCorrupt, NoRoom
from dsv41chat.store.prompt_cache_put import Ticket
from tests.rights import ordinary_rights
from tests.store.states import FACTS, build_of, load, open_cache, packed, save

IDS = list(range(1000, 9000))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "prompt_cache"


@pytest.fixture
def cache(folder):
    cache = open_cache(folder)
    yield cache
    cache.close()


@pytest.fixture
def build(cache):
    return build_of(cache)


def files_of(folder: Path, kind: str = "*") -> list[Path]:
    return sorted(folder.glob(f"{kind}/??/*.safetensors"))


# finding ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pos", [1, 2, 63, 64, 65, 127, 128, 129, 640, 4097])
def test_round_trip(cache, build, pos):
    save(cache, build, IDS, pos)
    assert load(cache, build, IDS) == pos
    assert load(cache, build, IDS[:pos]) == 0, "one id must be left to run"
    assert load(cache, build, IDS[: pos + 1]) == pos


def test_the_deepest_prefix_is_found(cache, build):
    ticket = None
    for pos in (50, 64, 200, 333):
        ticket = save(cache, build, IDS, pos, ticket)
    for length, want in ((1000, 333), (333, 200), (201, 200), (200, 64), (65, 64), (64, 50), (50, 0)):
        assert load(cache, build, IDS[:length]) == want
    assert cache.find(build, packed(IDS[:1000]), above=333) is None


def test_one_id_decides(cache, build):
    """An equally long history with one other id, anywhere, is another history."""
    save(cache, build, IDS, 300)
    for at in (0, 63, 64, 150, 255, 256, 299):
        other = [*IDS[:at], 7, *IDS[at + 1 :]]
        assert load(cache, build, other) == 0
    other = [*IDS[:300], 7]
    assert load(cache, build, other) == 300


def test_another_build_finds_nothing(cache, build):
    save(cache, build, IDS, 300)
    other = build_of(cache, {"pack": "two"}, "two")
    assert load(cache, other, IDS) == 0
    assert cache.why_cold(other, "c", {}) == "other build"
    assert load(cache, build_of(cache), IDS) == 300, "the facts are the build, not the moment it was loaded"


def test_kinds_and_grid(cache, build):
    first = save(cache, build, IDS, 256, kind="P")
    save(cache, build, IDS, 300, first, kind="E")
    assert cache.find(build, packed(IDS), kinds="SPG", grid=128).pos == 256
    assert cache.find(build, packed(IDS), kinds="SPG", grid=512) is None


def test_hashes_that_agree_decide_nothing(cache, build):
    """A planted row with the right key and other tokens: found, read, refused, removed."""
    save(cache, build, IDS, 128)
    other = [*IDS[:5], 7, *IDS[6:]]
    from dsv41chat.store import prompt_cache_index as index

    blk, chain, rest = index.mark_key(build, packed(other[:128]))
    with cache.db.write() as db:
        db.execute("UPDATE mark SET chain = ?, rest = ?", [chain, rest])
    found = cache.find(build, packed(other))
    assert blk == 2 and found.pos == 128
    with pytest.raises(CacheCorrupt, match="token ids differ"):
        cache.read(build, found, packed(other))
    assert cache.find(build, packed(other)) is None and not files_of(cache.folder)


def test_reasons(cache, build):
    assert cache.why_cold(build, "c", {"effort": "high"}) == "no stored state"
    save(cache, build, IDS, 100, head={"effort": "high", "system text": "x"})
    assert cache.why_cold(build, "c", {"effort": "off", "system text": "x"}) == "other settings (effort changed)"
    assert cache.why_cold(build, "c", {"effort": "high", "system text": "y"}) == "other settings (system text changed)"
    assert cache.why_cold(build, "c", {"effort": "high", "system text": "x"}) == "no stored state before the change"
    room.evict(cache, 0, everything=True)
    assert cache.why_cold(build, "c", {"effort": "high", "system text": "x"}) == "state pruned"


# appending ----------------------------------------------------------------------------------------------------------------


def test_branches_share_their_prefix(cache, build):
    trunk = save(cache, build, IDS, 1000, conversation="a")
    one, two = [*IDS[:1000], *range(50)], [*IDS[:1000], *range(100, 150)]
    save(cache, build, one, 1050, trunk, conversation="a", turn=2)
    save(cache, build, two, 1050, trunk, conversation="b", turn=2)
    assert len(files_of(cache.folder, "seg")) == 3
    cache.forget("a")
    assert load(cache, build, [*two, 1]) == 1050, "the other branch keeps what it needs"
    assert load(cache, build, [*one, 1]) == 0
    assert len(files_of(cache.folder, "seg")) == 2
    cache.forget("b")
    assert not files_of(cache.folder)


def test_appending_costs_what_is_new(cache, build):
    """100 turns of 100 tokens with P and E write less than twice their rows and tails."""
    ids, ticket, rows, tails = list(range(20_000)), None, 0, 0
    for turn in range(1, 101):
        for pos, kind in ((turn * 100 - 30, "P"), (turn * 100, "E")):
            new = pos - (ticket.hi if ticket is not None else 0)
            rows, tails = rows + 8 * new, tails + 4 * 16
            ticket = save(cache, build, ids, pos, ticket, kind=kind, turn=turn)
        room.thin(cache, "c")
        room.merge(cache, ticket.seg_id)
    headers = 200 * 600
    assert cache.counters["bytes written"] < 2 * (rows + tails) + headers
    assert load(cache, build, ids) == 10_000
    with cache.db.read() as db:
        marks = db.execute("SELECT count(*) FROM mark").fetchone()[0]
    assert marks < 40, "old turns are thinned"
    assert cache.counters["merged"] > 0 and len(cache.find(build, packed(ids)).segments) < 120


def test_thinning_keeps_more_of_what_is_near():
    rows = [{"id": turn, "kind": "E", "pos": turn * 10, "turn": turn} for turn in range(1, 101)]
    gone = set(room.superseded(rows))
    kept = [row["turn"] for row in rows if row["id"] not in gone]
    assert kept[-8:] == list(range(93, 101)) and 15 <= len(kept) <= 25 and kept == sorted(kept)
    grid = [
        {"id": 200, "kind": "G", "pos": 900, "turn": 100},
        {"id": 201, "kind": "P", "pos": 1000, "turn": 100},
        {"id": 202, "kind": "S", "pos": 5, "turn": 1},
    ]
    assert room.superseded(rows + grid)[-1] == 200 and 202 not in room.superseded(rows + grid)


def test_the_same_mark_twice_is_one(cache, build):
    save(cache, build, IDS, 300, conversation="a")
    ticket = save(cache, build, IDS, 300, conversation="b")
    assert ticket.seg_id is not None and len(files_of(cache.folder)) == 2
    cache.forget("a")
    assert load(cache, build, IDS) == 300


def test_what_continues_a_lost_segment_is_not_written(cache, build):
    ticket = save(cache, build, IDS, 100)
    cache.forget("c")
    with pytest.raises(NoRoom, match="gone"):
        save(cache, build, IDS, 200, ticket)
    with pytest.raises(NoRoom, match="not saved"):
        save(cache, build, IDS, 200, Ticket(100, None, True))
    assert not files_of(cache.folder), "and nothing of it is left"


# damage -------------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["seg", "tail"])
@pytest.mark.parametrize("damage", ["header", "length", "body", "truncated", "missing", "emptied"])
def test_a_damaged_file_is_a_miss_with_a_reason(folder, kind, damage):
    cache = open_cache(folder)
    build = build_of(cache)
    first = save(cache, build, IDS, 400)
    save(cache, build, IDS, 700, first)
    with cache.db.read() as db:
        victim = folder / db.execute(f"SELECT file FROM {'seg WHERE hi' if kind == 'seg' else 'mark WHERE pos'} = 700").fetchone()[0]
    match damage:
        case "header":
            flip(victim, 30)
        case "length":
            flip(victim, 1)
        case "body":
            flip(victim, victim.stat().st_size - 3)
        case "truncated":
            os.truncate(victim, victim.stat().st_size - 1)
        case "emptied":
            os.truncate(victim, 0)
        case "missing":
            victim.unlink()
    with pytest.raises(CacheCorrupt, match={"missing": "missing file", "truncated": "truncated", "emptied": "truncated"}.get(damage, "checksum")):
        load(cache, build, IDS)
    assert not victim.exists() and load(cache, build, IDS) == 400, "the one before it is whole and stays"
    assert cache.why_cold(build, "c", {}) == "state damaged, removed"
    cache.close()


def test_a_damaged_first_segment_takes_what_stands_on_it(cache, build):
    ticket = save(cache, build, IDS, 200)
    ticket = save(cache, build, IDS, 300, ticket)
    save(cache, build, IDS, 400, ticket)
    with cache.db.read() as db:
        victim = cache.folder / db.execute("SELECT file FROM seg WHERE hi = 200").fetchone()[0]
    flip(victim, victim.stat().st_size - 1)
    with pytest.raises(CacheCorrupt):
        load(cache, build, IDS)
    assert load(cache, build, IDS) == 0 and not files_of(cache.folder)


def test_swapped_files_and_a_foreign_build(cache, build):
    save(cache, build, IDS, 300)
    other = build_of(cache, {"pack": "two"}, "two")
    save(cache, other, IDS, 300)
    a, b = files_of(cache.folder, "tail")
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)
    for one in (build, other):
        with pytest.raises(CacheCorrupt, match="different model build"):
            load(cache, one, IDS)
        assert load(cache, one, IDS) == 0


def test_a_newer_schema_is_set_aside(folder):
    cache = open_cache(folder)
    save(cache, build_of(cache), IDS, 300)
    with cache.db.write() as db:
        db.execute("UPDATE meta SET value = '2' WHERE key = 'schema_version'")
    cache.close()
    cache = open_cache(folder)
    assert "newer version" in cache.notices[0] and load(cache, build_of(cache), IDS) == 0
    save(cache, build_of(cache), IDS, 300)
    assert list(folder.glob("trash-*"))
    room.sweep(cache)
    assert not list(folder.glob("trash-*"))
    cache.close()
    again = open_cache(folder)
    assert again.notices == [] and load(again, build_of(again), IDS) == 300
    again.close()


def test_an_index_that_is_no_database(folder):
    open_cache(folder).close()
    (folder / "index.db").write_bytes(b"not a database at all" * 300)
    cache = open_cache(folder)
    assert "could not be read" in cache.notices[0]
    save(cache, build_of(cache), IDS, 100)
    cache.close()


@pytest.mark.parametrize("what", ["the folder above", "an empty folder", "a folder with states"])
def test_a_read_only_folder(folder, what):
    """Refused by name, and nothing in it is changed; once it can be written again its states are there."""
    if what == "a folder with states":
        with contextlib.closing(open_cache(folder)) as cache:
            save(cache, build_of(cache), IDS, 300)
    elif what == "an empty folder":
        folder.mkdir()
    sealed = [folder.parent] if what == "the folder above" else [folder, *folder.rglob("*")]
    before = {path: path.read_bytes() for path in sealed if path.is_file()}
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in sealed}
    for path in reversed(sealed):
        path.chmod(0o400 if path.is_file() else 0o500)
    try:
        with ordinary_rights(), pytest.raises(StoreReadOnly, match=re.escape(str(folder.parent))):
            open_cache(folder)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    with contextlib.closing(open_cache(folder)) as cache:
        assert load(cache, build_of(cache), IDS) == (300 if what == "a folder with states" else 0)


# room ---------------------------------------------------------------------------------------------------------------------


def test_the_folder_stays_within_the_budget(folder):
    """Two builds write past a small budget; after each write, and after the budget is lowered, everything in the folder fits."""
    budget = 420_000
    cache = open_cache(folder, budget)
    builds = [build_of(cache), build_of(cache, {"pack": "two"}, "two")]
    for number in range(30):
        ids = [number, *IDS[:4000]]
        save(cache, builds[number % 2], ids, 3000 + number, conversation=f"c{number}")
        assert room.folder_bytes(folder) <= budget
        assert load(cache, builds[number % 2], ids) == 3000 + number, "the one just written is there"
    assert cache.counters["evicted"] > 0
    cache.close()
    smaller = open_cache(folder, 250_000)
    room.enforce(smaller)
    assert room.folder_bytes(folder) <= 250_000
    smaller.close()


def test_pinned_and_held_states_survive(folder):
    cache = open_cache(folder, 420_000)
    build = build_of(cache)
    pinned, held = [1, *IDS], [2, *IDS]
    save(cache, build, pinned, 2000, conversation="pinned")
    assert cache.pin("pinned") == 1
    save(cache, build, held, 2000, conversation="held")
    for number in range(30):
        assert cache.find(build, packed(held)).pos == 2000
        save(cache, build, [10 + number, *IDS], 3000, conversation=f"c{number}")
    assert load(cache, build, pinned) == 2000 and load(cache, build, held) == 2000
    for number in range(40, 44):
        save(cache, build, [number, *IDS], 3000, conversation=f"c{number}")
    cache.pin("pinned", False)
    with pytest.raises(NoRoom, match="half the budget"):
        big = open_cache(folder, 30_000)
        try:
            big.pin("pinned")
        finally:
            big.close()
    cache.close()


def test_one_state_larger_than_the_budget(folder):
    cache = open_cache(folder, 20_000)
    with pytest.raises(NoRoom, match="larger than the cache's budget"):
        save(cache, build_of(cache), IDS, 5000)
    assert not files_of(folder)
    cache.close()


def test_a_disk_that_is_nearly_full(folder):
    cache = open_cache(folder)
    cache.min_free_bytes = 1 << 60
    with pytest.raises(NoRoom, match="nearly full"):
        save(cache, build_of(cache), IDS, 500)
    cache.close()


def test_old_conversations_go_first_and_shared_beginnings_last(folder):
    cache = open_cache(folder, 10_000_000)
    now = [1_000_000.0]
    cache.clock = lambda: now[0]
    build = build_of(cache)
    shared = save(cache, build, IDS, 1024, kind="S", conversation="a")
    for name in "abc":
        now[0] += 10
        save(cache, build, [*IDS[:1024], ord(name), *IDS], 1500, shared, conversation=name)
    cache._fresh = None
    cache.find(build, packed([5]))
    order = [id for group in room._victims(cache, None, None, False) for id in group]
    assert order == [2, 3, 4, 1]
    cache.close()


def test_prune_by_age_and_build(cache, build):
    other = build_of(cache, {"pack": "two"}, "two")
    save(cache, build, IDS, 300, conversation="a")
    save(cache, other, IDS, 300, conversation="a")
    cache._fresh = None
    room.evict(cache, 0, build="two")
    assert load(cache, build, IDS) == 300 and load(cache, other, IDS) == 0
    cache.find(build, packed([5]))
    room.evict(cache, 0, older_than=cache.clock() - 100)
    assert load(cache, build, IDS) == 300
    cache.find(build, packed([5]))
    room.evict(cache, 0, older_than=cache.clock() + 100)
    assert load(cache, build, IDS) == 0 and not files_of(cache.folder)


def test_the_sweep_takes_what_crashes_left(cache, build):
    save(cache, build, IDS, 300)
    folder = cache.folder
    orphan, young = folder / "seg" / "aa" / ("a" * 32 + ".safetensors"), folder / "tail" / "ab" / ("b" * 32 + ".safetensors")
    for path in (orphan, young):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 1000)
    os.utime(orphan, (1, 1))
    (folder / "tmp" / f"{'c' * 32}.999999999").write_bytes(b"x")
    mine = folder / "tmp" / f"{'d' * 32}.{os.getpid()}"
    mine.write_bytes(b"x")
    assert room.sweep(cache) == 2
    assert not orphan.exists() and young.exists() and mine.exists()
    assert room.used_bytes(cache) >= room.folder_bytes(folder), "what is left is counted"
    files_of(folder, "tail")[-1].unlink(missing_ok=True)
    for path in files_of(folder, "tail"):
        path.unlink()
    room.sweep(cache)
    assert load(cache, build, IDS) == 0 and cache.why_cold(build, "c", {}) == "state damaged, removed"


def test_merging_changes_nothing_that_is_read(cache, build):
    ids, ticket = list(range(5000)), None
    for turn in range(1, 120):
        ticket = save(cache, build, ids, turn * 20, ticket, turn=turn)
        room.thin(cache, "c")
    before = len(cache.find(build, packed(ids)).segments)
    assert before > room.MERGE_SEGMENTS
    gone = room.merge(cache, ticket.seg_id)
    assert gone > 0 and len(cache.find(build, packed(ids)).segments) == before - gone
    for length in (5000, 2301, 2300, 1000, 400):
        load(cache, build, ids[:length])
    assert load(cache, build, ids) == 2380
    save(cache, build, ids, 2400, ticket, turn=120)
    assert load(cache, build, ids) == 2400, "the last segment kept its id"
    assert room.merge(cache, ticket.seg_id) in range(before)


# privacy ------------------------------------------------------------------------------------------------------------------


def test_modes(cache, build):
    save(cache, build, IDS, 300)
    for parent, _, names in os.walk(cache.folder):
        assert stat.S_IMODE(os.stat(parent).st_mode) == 0o700
        for name in names:
            assert stat.S_IMODE(os.stat(os.path.join(parent, name)).st_mode) == 0o600, name


def test_an_open_folder_is_made_private(folder):
    folder.mkdir(mode=0o755)
    open_cache(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_deleting_leaves_no_trace(folder):
    """No file, and no run of the ids in the index, its log or anywhere else."""
    cache = open_cache(folder)
    build, rng = build_of(cache), random.Random(4)
    ids = [rng.randrange(1 << 17) for _ in range(500)]
    ticket = save(cache, build, ids, 190, conversation="secret")
    save(cache, build, ids, 250, ticket, conversation="secret")
    save(cache, build, IDS, 300, conversation="other")
    marker = packed(ids[128:131])

    def traces() -> list[str]:
        return [str(path) for path in folder.rglob("*") if path.is_file() and marker in path.read_bytes()]

    assert traces(), "the marker can be found at all"
    cache.forget("secret")
    assert traces() == []
    assert load(cache, build, IDS) == 300
    cache.close()
    assert traces() == []
    with sqlite3.connect(folder / "index.db") as db:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


# planted faults that must turn these tests red ------------------------------------------------------------------------------


def test_fault_a_reader_that_does_not_check(cache, build, monkeypatch):
    from dsv41chat.store import prompt_cache_read as module

    save(cache, build, IDS, 300)
    victim = files_of(cache.folder, "tail")[0]
    flip(victim, victim.stat().st_size - 3)
    whole = module.read_data
    monkeypatch.setattr(module, "read_data", lambda fd, header, crc, into: _unchecked(whole, fd, header, crc, into))
    with pytest.raises(AssertionError):
        load(cache, build, IDS)


def _unchecked(whole, fd, header, crc, into):
    try:
        whole(fd, header, crc, into)
    except CacheCorrupt:
        return


def test_what_others_keep_in_the_folder_is_let_be(folder):
    """cache.dir may name a folder of the user's own: moving a broken index aside and sweeping touch nothing else in it."""
    open_cache(folder).close()
    (folder / "notes.txt").write_text("mine")
    (folder / "trash-of-mine").mkdir()
    (folder / "index.db").write_bytes(b"broken" * 1000)
    cache = open_cache(folder)
    room.sweep(cache)
    room.evict(cache, 0, everything=True)
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "trash-of-mine").is_dir()
    assert not [path for path in folder.glob("trash-*") if path.name != "trash-of-mine"]
    cache.close()


def test_one_build_under_two_names_is_listed_under_both(folder):
    """The states are the same ones: both names find them, list them and prune them."""
    cache = open_cache(folder)
    with cache.db.write() as db:
        # A row from before names were kept.
        values = [prompt_cache_index.fingerprint(FACTS), '{"name": "old"}']
        db.execute("INSERT INTO build(fp, family, info, created, last_used) VALUES (?, 'v41', ?, 1, 1)", values)
    save(cache, build_of(cache, name="one"), IDS, 100)
    save(cache, build_of(cache, name="two"), IDS, 200, conversation="d")
    build_of(cache, name="one")
    (stats,) = room.stats(cache)["builds"]
    assert (stats["name"], stats["names"], stats["entries"]) == ("one", ["one", "two", "old"], 2)
    assert [(row["build"], row["builds"]) for row in room.listing(cache)] == [("one", ["one", "two", "old"])] * 2
    for name, marks in (("three", 0), ("two", 1), ("one", 1)):  # the newest is in use
        assert room.would_evict(cache, 0, build=name)[0] == marks
    for number in range(20):
        build_of(cache, name=f"n{number}")
    assert len(room.stats(cache)["builds"][0]["names"]) == 8


def test_the_lists_say_that_two_names_are_one_build(program):
    with contextlib.closing(open_cache(load_settings(data_dir=program.data, environ={}).paths.states)) as cache:
        save(cache, build_of(cache, name="one"), IDS, 100)
    for words in (("cache", "stats"), ("cache", "list")):
        shown = program(*words)
        assert " = " not in shown.out and "two names" not in shown.err
    with contextlib.closing(open_cache(load_settings(data_dir=program.data, environ={}).paths.states)) as cache:
        build_of(cache, name="two")
    for words in (("cache", "stats"), ("cache", "list")):
        shown = program(*words)
        assert "two = one" in shown.out and "the same build under two names" in shown.err
