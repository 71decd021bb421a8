"""Effects of options that no other test shows. `test_effects.py` holds the list that none may be missing from."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from dsv41chat.engine.goldens import Check
from dsv41chat.nano import embedded_pack
from tests.ui.chats import Chat


def test_plain_is_the_line_mode(program, monkeypatch):
    seen = []
    monkeypatch.setattr("dsv41chat.ui.plain.run_plain", lambda controller, start: seen.append(start) or 0)
    monkeypatch.setattr("dsv41chat.ui.app.run_app", lambda controller, start: pytest.fail("that is the full screen"))
    assert program("--plain", "hi", terminal=True).code == 0 and seen[0].prompt == "hi"
    assert program("--plain", stdin="hi\n").code == 0 and seen[1].attachments == (), "it reads its lines there"


def test_verify_options_reach_the_comparison(program, monkeypatch, tmp_path):
    seen = []
    report = SimpleNamespace(ok=True, checks=(Check("logits", "decode", 3, 0.0, 1.0, None, True, True),))
    monkeypatch.setattr("dsv41chat.ui.builds._verify_goldens", lambda folder, goldens, **options: seen.append(options) or report)
    (tmp_path / "g").touch()
    words = ["models", "verify", "nano", "--goldens", str(tmp_path / "g"), "--dtype", "bfloat16", "--atol", "0.25", "--chunks", "1,7,128"]
    assert program(*words, real=True).code == 0
    assert seen == [{"dtype": "bfloat16", "atol": 0.25, "chunks": (1, 7, 128)}]


def test_convert_options_reach_the_conversion(program, monkeypatch, tmp_path):
    seen = {}
    pack = SimpleNamespace(folder=embedded_pack(), index=SimpleNamespace(tensors={}))
    plan = SimpleNamespace(pack=pack, groups=(), bytes_out=1, bits_per_weight=4.0, mark={})
    monkeypatch.setattr("dsv41chat.engine.plan_conversion", lambda *words, **options: seen.update(options, recipe=words[2]) or plan, raising=False)
    monkeypatch.setattr("dsv41chat.engine.convert_pack", lambda plan, **options: seen.update(resume=options["resume"]), raising=False)
    words = ["models", "convert", "nano", str(tmp_path / "new"), "--recipe", "affine-4", "--engram", "6", "--drafter", "q8", "--resume"]
    result = program(*words, "--yes", "--json", real=True)
    assert result.object["ok"] and result.err.startswith(f"nano -> {tmp_path / 'new'}: affine-4")
    assert seen == {"table": "6", "drafter": "q8", "recipe": "affine-4", "resume": True}
    bank = {}
    made = SimpleNamespace(bytes_out=1)
    monkeypatch.setattr("dsv41chat.engine.plan_bank", lambda *words, **options: bank.update(options, release=words[1]) or made, raising=False)
    monkeypatch.setattr("dsv41chat.engine.write_bank", lambda plan, progress: None, raising=False)
    words = ["models", "convert", "nano", str(tmp_path / "b"), "--recipe", "drafter-bank", "--from", str(embedded_pack()), "--drafter", "q8", "--yes"]
    assert program(*words, real=True).code == 0 and bank == {"drafter": "q8", "release": embedded_pack()}


@pytest.mark.usefixtures("shared_weights")
def test_cache_prune_to_a_size_and_of_a_build(tmp_path, capfd):
    from dsv41chat.cli import main

    with Chat(tmp_path / "kept") as chat:
        for number in range(3):
            chat.new(f"Conversation {number}. " + "The lighthouse at the end of the long pier shines in the evening. " * 3)
        name = chat.host.view.name

    def command(*words: str):
        assert main([*words, "--json", "--data-dir", str(tmp_path / "kept")]).code == 0
        return json.loads(capfd.readouterr().out)

    before = command("cache", "stats")["bytes"]
    folder = {path: path.stat().st_size for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    for more in ([], ["--dry-run"]):
        assert main(["cache", "prune", "--build", "another", "--data-dir", str(tmp_path / "kept"), *more]).code == 4
        assert f"There is no build 'another'. States are kept of: {name}." in capfd.readouterr().err
    assert {path: path.stat().st_size for path in folder} == folder, "nothing was touched"
    part = command("cache", "prune", "--to", str(before // 2))
    assert part["entries"] > 0 and 0 < part["bytes"] <= before // 2 and command("cache", "stats")["bytes"] == part["bytes"]
    command("cache", "prune", "--build", name)
    assert command("cache", "stats")["entries"] == 0


BENCHES = {
    "draft": (
        ["--build", str(embedded_pack()), "--repeats", "2", "--tokens", "3", "--long", "4", "--short", "5", "--seeds", "6"],
        lambda seen: seen[1:6] == (2, 3, 4, 5, 6),
    ),
    "resume": (["--tokens", "7", "8", "--repeats", "2", "--folder", "."], lambda seen: seen[1:] == ((7, 8), 2) and seen[0].parent.name == ""),
    "engram": (
        ["--gigabytes", "0.001", "--rounds", "3", "--note", "a quiet machine", "--folder", "."],
        lambda seen: seen[1] < 5000 and seen[2] == 3 and seen[0].parent.name == "",
    ),
    "ui": (
        ["--messages", "1", "--search-messages", "2", "--seconds", "3", "--rate", "4", "--contents", "cjk", "table"],
        lambda seen: seen[:5] == (1, 2, 3.0, 4.0, ["cjk", "table"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("arm", BENCHES)
def test_bench_options_reach_their_arm(program, monkeypatch, tmp_path, arm):
    """--output names the receipt; the rest reaches what is measured (the measurements have tests of their own)."""
    words, good = BENCHES[arm]
    seen, written = [], []
    run = lambda *arguments, **named: seen.append((*arguments, *named.values())) or (0 if arm == "ui" else {"bars": {}})
    monkeypatch.setattr(f"dsv41chat.bench.{arm}.run", run)
    if arm != "ui":
        monkeypatch.setattr(f"dsv41chat.bench.{arm}.write_receipt", lambda path, name, payload: written.append((path, payload)) or path)
    monkeypatch.chdir(tmp_path)
    assert program("bench", arm, *words, "--output", str(tmp_path / "receipt.json")).code == 0
    assert good(seen[0]), seen
    assert (seen[0][-1] if arm == "ui" else written[0][0]) == tmp_path / "receipt.json"
    assert arm != "engram" or written[0][1]["setup"] == "a quiet machine"
