"""`dsv41chat doctor`: every part has a line, what is wrong has a remedy, and one part that is broken hides no other."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from types import SimpleNamespace

from dsv41chat.engine.errors import PackIncomplete
from dsv41chat.settings import load_settings
from dsv41chat.store.prompt_cache import PromptCache
from dsv41chat.ui.host import EngineHost
from tests.rights import ordinary_rights


def lines(result) -> dict[str, dict]:
    return {line["name"]: line for line in result.object}


def test_everything_is_looked_at_and_nothing_is_made(program):
    result = program("doctor", "--json")
    found = lines(result)
    parts = ("versions", "settings", "data folder", "states folder", "disk", "database", "device", "memory", "build nano", "default build")
    assert set(parts) | {"terminal"} | {"colours", "keys", "characters", "clipboard"} <= set(found)
    assert result.code == 0 and {line["verdict"] for line in result.object} <= {"ok", "warn"}
    assert all(line["remedy"] for line in result.object if line["verdict"] != "ok")
    assert not (program.data / "chat.db").exists()
    text = program("doctor")
    assert text.out.startswith("ok ") and "0 failed" in text.err


def test_tables_of_the_embedded_build_are_sampled(program):
    found = lines(program("doctor", "--json", real=True))
    tables = [line["text"] for name, line in found.items() if name.endswith(".engram")]
    assert len(tables) == 2 and all("sampled pages in memory" in text or "resident" in text for text in tables)


def test_a_damaged_database_fails_with_a_remedy(program):
    for i in range(3):
        program("--headless", f"question {i} " + "words " * 2000)
    whole = lines(program("doctor", "--json"))["database"]
    assert whole["verdict"] == "ok" and "3 conversations" in whole["text"] and "intact" in whole["text"]
    path = program.data / "chat.db"
    with ordinary_rights():
        path.chmod(0o444)
        assert lines(program("doctor", "--json"))["database"]["verdict"] == "fail"
        path.chmod(0o600)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(path.read_bytes())
    data[8192:16384] = b"\xff" * 8192
    path.write_bytes(data)
    result = program("doctor", "--json")
    assert result.code == 1 and lines(result)["database"]["verdict"] == "fail" and lines(result)["database"]["remedy"]
    path.write_bytes(b"no database at all " * 500)
    result = program("doctor", "--json")
    assert result.code == 1 and lines(result)["database"]["verdict"] == "fail" and "build nano" in lines(result)


def test_settings_that_cannot_be_read_are_the_finding(program, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[chat]\ntemperature = 'hot'\n")
    result = program("doctor", "--config", str(path), "--json")
    assert result.code == 1 and "line 2" in lines(result)["settings"]["text"]
    assert "they need the settings" in lines(result)["the rest"]["text"], "that most was not looked at is said"
    path.write_text("[chat]\ntemprature = 1.0\n[engine]\nmodel = 'gone'\n")
    result = program("doctor", "--config", str(path), "--json")
    assert lines(result)["settings"]["verdict"] == "warn" and lines(result)["default build"]["verdict"] == "fail" and result.code == 1


def test_a_disk_without_room_fails(program, monkeypatch):
    for free, verdict, code in ((0, "fail", 1), (500_000_000, "warn", 0), (1 << 40, "ok", 0)):
        monkeypatch.setattr("dsv41chat.ui.doctor.shutil.disk_usage", lambda place, free=free: SimpleNamespace(total=1 << 41, used=0, free=free))
        result = program("doctor", "--json")
        assert (lines(result)["disk"]["verdict"], result.code) == (verdict, code)


def test_folders(program):
    program.data.mkdir(mode=0o755)
    (program.data / "log").write_text("a file")
    found = lines(program("doctor", "--json"))
    assert found["data folder"]["verdict"] == "warn" and found["data folder"]["remedy"].startswith("chmod 700")
    assert found["log folder"]["verdict"] == "fail" and "not a folder" in found["log folder"]["text"]


def test_a_broken_build_and_no_back_end(program, tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    monkeypatch.setenv("DSV41CHAT_ENGINE_MODEL_DIRS", str(tmp_path))

    def probe(self, ref, original=EngineHost.probe):
        if ref.name == "broken":
            raise PackIncomplete("3 of 61 shards are missing")
        return original(self, ref)

    monkeypatch.setattr(EngineHost, "probe", probe)
    found = lines(program("doctor", "--json"))
    assert found["build broken"]["verdict"] == "warn" and "61 shards" in found["build broken"]["text"] and found["build broken"]["remedy"]
    monkeypatch.setitem(__import__("sys").modules, "mlx.core", None)
    result = program("doctor", "--json", real=True)
    assert result.code == 1 and "pip install" in lines(result)["device"]["remedy"] and "terminal" in lines(result)


def test_a_part_is_still_asked_by_name(program):
    assert program("doctor", "nosuch").code == 2 and "did you mean engram" in program("doctor", "engrm").err
    assert program("doctor", "--nosuch").code == 2


def test_a_read_only_mount_is_no_matter_of_rights(program, monkeypatch):
    program("--headless", "hi")
    real = os.statvfs

    def mounted(place):
        found = {name: getattr(real(place), name) for name in dir(real(place)) if name.startswith("f_")}
        return SimpleNamespace(**found | {"f_flag": found["f_flag"] | os.ST_RDONLY})

    monkeypatch.setattr(os, "statvfs", mounted)
    result = program("doctor", "--json")
    found = lines(result)
    for name in ("data folder", "state folder", "database"):
        assert found[name]["verdict"] == "fail" and "mounted read-only" in found[name]["text"]
        assert "chmod" not in found[name]["remedy"] and "mount it for writing" in found[name]["remedy"]
    assert result.code == 1


def test_kept_states_are_looked_at_without_writing(program):
    """Where nothing may be written, and where it may: looking leaves no trace."""
    program("--headless", "hi")
    folder = load_settings(data_dir=program.data, environ={}).paths.states
    with closing(PromptCache.open(folder, 2**31)):
        pass
    before = sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))
    commands = [("cache", "stats"), ("cache", "list"), ("cache", "prune", "--all", "--dry-run"), ("conversations", "list")]
    for words in commands:
        assert program(*words).code == 0
    after = sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))
    assert [one for one in after if not one[0].endswith(("-wal", "-shm"))] == before
    with ordinary_rights():
        for path in (*folder.rglob("*"), folder):
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            for words in commands:
                assert program(*words).code == 0, words
            assert program("cache", "prune", "--all").code == 8
        finally:
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_damaged_database_is_one_answer_for_every_command(program):
    """Wherever the damage is: the same sentence, exit 8, and not a byte of the file changed. What only reads gives what is intact."""
    program("--headless", "question " + "words " * 2000)
    path = program.data / "chat.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        roots = dict(db.execute("SELECT name, rootpage FROM sqlite_master WHERE rootpage > 0"))
        pages = db.execute("PRAGMA page_count").fetchone()[0]
    whole = path.read_bytes()
    reading = [("conversations", "list"), ("conversations", "export", "--all"), ("conversations", "search", "words")]
    commands = [*reading, ("--headless", "hi"), ("--load-only",)]
    for page in (roots["builds"], roots["messages"], roots["messages_parent"], roots["facts"], pages):
        cut = bytearray(whole)
        cut[(page - 1) * 4096 : page * 4096] = b"\xff" * 4096
        for words in commands:
            for beside in program.data.glob("chat.db*"):
                beside.unlink()
            path.write_bytes(cut)
            done = program(*words)
            intact = page in (roots["builds"], roots["facts"]) and words in reading
            assert done.code == (0 if intact else 8) or (words in reading and done.code == 0), (page, words)
            if done.code:
                assert "is damaged: " in done.err and "stays as it is" in done.err and "export --all --format json -o" in done.err
            elif words[1] != "search":
                assert "question" in done.out
            assert path.read_bytes() == cut
        said = lines(program("doctor", "--json"))["database"]
        assert said["verdict"] == "fail" and said["text"] in done.err and said["remedy"] in done.err
