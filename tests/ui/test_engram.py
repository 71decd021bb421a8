"""Tables under both front ends: residency as the drive has it, and a shard that is cut while an answer is being made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv41chat.cli import main
from dsv41chat.engine import open_engine
from dsv41chat.engine.engram.table import EngramSettings
from dsv41chat.engine.events import Piece, Residency, TableState
from dsv41chat.nano import embedded_pack
from dsv41chat.settings import load_settings
from dsv41chat.store import Store
from dsv41chat.ui.app import ChatApp
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.status import residency_text
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import AppStart
from tests.engine.engram.big_pack import grow_tables
from tests.engine.engram.tables import drop_file
from tests.ui.tui import chat_of, say, screen_text, shows, until

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="drops pages")


def shards(pack: Path) -> list[Path]:
    names = json.loads((pack / "model.safetensors.index.json").read_text())["weight_map"]
    return [pack / file for key, file in sorted(names.items()) if key.endswith("engram.embed.weight")]


def headless(pack: Path, data: Path, *words: str) -> list[dict]:
    command = [sys.executable, "-m", "dsv41chat", "--stream-json", "--data-dir", str(data), "--model", str(pack), "--max-tokens", "6", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def states(events: list[dict]) -> list[str]:
    """What the status line says, event by event."""
    tables = [event["tables"] for event in events if event["type"] == "residency"]
    return [residency_text(Residency(tuple(TableState(**table) for table in group))) for group in tables]


@linux
def test_cold_then_warm_then_cold_again(tmp_path):
    pack = tmp_path / "pack"
    grow_tables(embedded_pack(), pack, 1_000_000)
    question = "How does a lighthouse keeper spend the winter on a rock in the sea?"
    first = states(headless(pack, tmp_path / "data", question))
    assert first[0] == "engram probing" and all("cold" in text for text in first[1:]) and len(first) > 1
    # Where memory is short, some pages have to be read again.
    for _ in range(3):
        second = states(headless(pack, tmp_path / "data", question))
        if second[-1] == "engram warm":
            break
    assert second[-1] == "engram warm"
    for shard in shards(pack):
        drop_file(shard)
    third = states(headless(pack, tmp_path / "data", question))
    assert "engram warm" not in third and "cold" in third[-1]


@pytest.fixture
def pack(tmp_path) -> Path:
    return Path(shutil.copytree(embedded_pack(), tmp_path / "pack"))


def cutting_host(pack: Path):
    """make_host: real engine and positional reads; the second table is cut to a stump after the first piece of an answer."""
    shard = shards(pack)[1]

    def opener(folder, **options):
        engine = open_engine(folder, **options | {"engram": EngramSettings(access="pread", scales="mapped")})
        begin, opener.engine = engine.new_session, engine

        def new_session():
            session = begin()
            generate = session.generate

            def cut(*args, **kwargs):
                for event in generate(*args, **kwargs):
                    yield event
                    if isinstance(event, Piece) and opener.cuts:
                        opener.cuts -= 1
                        os.truncate(shard, engine.pack.table_specs[1].weight.offset + 64)

            session.generate = cut
            return session

        engine.new_session = new_session
        return engine

    opener.cuts = 1
    return lambda settings, store: EngineHost(settings, store, opener=opener), shard


def test_a_shard_cut_while_answering_in_scripted_mode(tmp_path, pack, capfd):
    make_host, shard = cutting_host(pack)
    words = ["--stream-json", "--data-dir", str(tmp_path / "data"), "--model", str(pack), "--max-tokens", "30", "--no-stdin", "Hello there"]
    assert main(words, make_host=make_host).code == 4
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    error = events[-1]
    assert error["type"] == "error" and error["code"] == "build_damaged" and error["exit_code"] == 4
    assert shard.name in error["message"] and "offset" in error["message"] and error["hint"]
    with Store.open(tmp_path / "data", readonly=True) as store:
        conversation = store.last_conversation()
        said = store.path_to(conversation.leaf_id)
        assert said[0].text == "Hello there"
        assert [(message.role, message.state) for message in said[1:]] in ([], [("assistant", "error")])


async def test_a_shard_cut_while_answering_in_full_screen(tmp_path, pack):
    make_host, shard = cutting_host(pack)
    whole = shard.read_bytes()
    (tmp_path / "config.toml").write_text("[chat]\nmax_tokens = 24\n")
    settings = load_settings(config=tmp_path / "config.toml", data_dir=tmp_path / "data", environ={})
    store = Store.memory(background=False)
    host = make_host(settings, store)
    app = ChatApp(TurnController(store, host, settings), AppStart(build=str(pack)))
    async with app.run_test(size=(120, 40)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "Hello there")
        await until(lambda: shard.name in screen_text(app).replace("\n", ""))
        assert "Traceback" not in await shows(app, "Hello there")
        assert store.path_to(chat.leaf_id)[0].text == "Hello there"
        # The file is whole again, but it is not the file that was opened: the next turn says so before it reads.
        shard.write_bytes(whole)
        await pilot.press("ctrl+r")
        await until(lambda: "changed while the app was running" in screen_text(app).replace("\n", " "))


@pytest.mark.parametrize("as_json", (True, False))
def test_doctor_engram(tmp_path, capfd, as_json):
    words = ["doctor", "engram", "--model", "nano", "--data-dir", str(tmp_path / "data"), "--no-measure", *(["--json"] if as_json else [])]
    assert main(words).code == 0
    out = capfd.readouterr().out
    if as_json:
        lines = json.loads(out)
        assert [line["name"] for line in lines][2:4] == ["pages", "residency probe"] and {line["build"] for line in lines} == {"nano"}
    else:
        assert "layers.1.engram" in out and "residency probe" in out and "rows/s" not in out


def test_doctor_engram_measures_and_remembers(tmp_path, capfd):
    data = tmp_path / "data"
    assert main(["doctor", "engram", "--model", "nano", "--data-dir", str(data)]).code == 0
    assert "cold decode" in capfd.readouterr().out
    with Store.open(data, readonly=True) as store:
        keys = list(store.facts)
    assert all(key.startswith("engram.path/") for key in keys)


def test_stats_page_has_the_tables():
    from dsv41chat.ui.details import table_rows

    engine = open_engine(embedded_pack())
    engine.tables.gather(0, [[1, 2, 3]])
    engine.tables.counters_of(engine.tables.tables[0]).fallback("no advice: pool instead")
    rows = table_rows(engine.table_stats())
    assert rows[0][0] == "layers.1.engram" and rows[0][1].startswith("3 rows of 3 lookups") and "1 advise" in rows[0][1]
    assert rows[1] == ("layers.1.engram", "1 times: no advice: pool instead")
    assert rows[-1][0] == "tables" and "probe" in rows[-1][1]
    assert table_rows({}) == []
    engine.close()


def test_settings_reach_the_reader(tmp_path, capfd):
    words = ["--stream-json", "--data-dir", str(tmp_path / "data"), "--model", "nano", "--max-tokens", "3", "--no-stdin", "Hello"]
    assert main([*words, "--engram", "resident"]).code == 0
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert set(states(events)) == {"engram resident"}
    assert events[-1]["residency"]["cold_rows"] == 0 and events[-1]["residency"]["warm_rows"] > 0
