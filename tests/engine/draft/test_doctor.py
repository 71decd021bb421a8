"""`doctor drafting` and the bench arm, on the embedded pack."""

from __future__ import annotations

import json

from dsv41chat.bench import draft as bench
from dsv41chat.cli import main
from dsv41chat.engine import open_engine
from dsv41chat.engine.draft.doctor import examine
from dsv41chat.nano import embedded_pack
from tests import drafting


def test_doctor_shows_verdicts_and_keeps_costs(tmp_path, capfd):
    words = ["doctor", "drafting", "--model", "nano", "--data-dir", str(tmp_path / "data"), "--json"]
    assert main(words).code == 0
    first = json.loads(capfd.readouterr().out)
    assert [line["name"] for line in first[:2]] == ["drafter", "row check"] and first[0]["text"] == "dspark, up to 5 tokens a round"
    assert first[-1]["name"] == "costs"
    assert main([*words, "--no-measure"]).code == 0
    assert json.loads(capfd.readouterr().out) == first, "verdicts and costs are read back"


def test_doctor_names_what_is_missing(tmp_path):
    fast = open_engine(embedded_pack(), exact="fast").drafting
    assert [line.verdict for line in examine(fast, measure=False)] == ["ok", "warn"]
    none = open_engine(drafting.DATA / "v4").drafting
    assert examine(none)[0].text.startswith("none in this build")
    none.fault = "the drafter is left out: 1 of 9 tensors missing"
    assert examine(none)[0].verdict == "warn"


def test_bench_writes_a_receipt(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PROMPTS", {"facts": [("What is the capital of Japan?", False)]})
    monkeypatch.setattr(bench, "MODES", ("off", 2, "auto"))
    assert bench.main(["--repeats", "1", "--tokens", "6", "--long", "8", "--short", "0", "-o", str(tmp_path / "r.json")]) == 0
    receipt = json.loads((tmp_path / "r.json").read_text())
    assert set(receipt["own_greedy"]["all"]) == {"off", "2", "auto"} and receipt["unprofitable_long"]["tokens"] == 8
    assert receipt["own_greedy"]["all"]["2"]["by_depth"] and receipt["own_greedy"]["all"]["off"]["speed"] == 1
    assert str(tmp_path) not in (tmp_path / "r.json").read_text() and receipt["command"].endswith("--short 0 --seeds 3")
