"""`eval table`: variants are written once and measured over the same windows; the expected order is judged by paired intervals."""

from __future__ import annotations

import json

import pytest

from dsv41chat.bench.eval import ppl, table
from dsv41chat.bench.eval.bootstrap import Estimate
from dsv41chat.bench.eval.table import VARIANTS, Variant, verdict
from dsv41chat.engine.convert.calibrate import DEFAULT_TEXT
from dsv41chat.engine.convert.recipes import RECIPES
from dsv41chat.nano import CORPORA


def test_the_variants_are_those_of_the_recipes_and_each_is_made_of_an_earlier_one():
    names = ["", *(variant.name for variant in VARIANTS)]
    for variant in VARIANTS:
        earlier = names[: names.index(variant.name)]
        assert variant.of in earlier and variant.after in earlier and (variant.recipe in RECIPES) != (0 < variant.share < 1)
    wanted = {"affine-8", "mixed-4_8", "affine-4", "mixed-4_8-engram6", "mixed-4_8-engram4"}
    assert {v.recipe for v in VARIANTS if v.recipe} == wanted and [v.share for v in VARIANTS if not v.recipe] == [0.75, 0.5]


def test_verdicts():
    assert verdict(Estimate(1.02, 1.01, 1.03)) == "as expected" and verdict(Estimate(0.98, 0.97, 0.99)) == "reversed"
    assert verdict(Estimate(1.02, 0.99, 1.05)) == verdict(Estimate(1.0, None, None)) == verdict(Estimate(1.0, 1.0, 1.0)) == "not told apart"


def test_experts_are_not_chosen_by_the_texts_that_judge_them():
    judged = {m["content"] for name in ("chat", "facts") for line in CORPORA[name].read_text().splitlines() for m in json.loads(line)["messages"][:1]}
    chosen_by = {m["content"] for line in DEFAULT_TEXT.read_text().splitlines() for m in json.loads(line)["messages"]}
    assert not judged & chosen_by


@pytest.mark.usefixtures("shared_weights")
def test_the_whole_table_by_one_command(program, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "CALIBRATION_TOKENS", 96)
    monkeypatch.setattr(
        table,
        "VARIANTS",
        (Variant("engram4", recipe="mixed-4_8-engram4"), Variant("pruned", of="engram4", share=0.5, after="engram4")),
    )
    lines = CORPORA["facts"].read_text().splitlines()
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines[:2] if name == "one" else lines[2:4]))
    corpora = ["--corpus", str(tmp_path / "one.jsonl"), "--corpus", str(tmp_path / "two.jsonl")]
    argv = ["eval", "table", *corpora, "--folder", str(tmp_path / "made"), "--tokens", "30"]
    measured, plain = [], ppl.measure

    def dies_in_the_second(context, made, options, **more):
        measured.append(options.corpus.name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return plain(context, made, options, **more)

    monkeypatch.setattr(ppl, "measure", dies_in_the_second)
    assert program(*argv, real=True).code == 130
    done = program(*argv, "--json", real=True)
    assert done.code == 0, done.err
    assert measured == ["two.jsonl", "one.jsonl", "one.jsonl"], "the finished corpus was not measured again"
    found = done.object
    assert [row["name"] for row in found["rows"]] == ["nano", "engram4", "pruned"] and list(found["corpora"]) == ["one.jsonl", "two.jsonl"]
    base, converted, pruned = found["rows"]
    assert base["corpora"]["one.jsonl"]["ratio"] is None and base["bits_per_weight"] is None and converted["bits_per_weight"] > 4
    assert pruned["bytes"] < converted["bytes"] and len({row["fingerprint"] for row in found["rows"]}) == 3
    assert [(pair["build"], pair["after"]) for pair in found["order"]] == [("engram4", ""), ("pruned", "engram4")] * 2
    config = json.loads((tmp_path / "made" / "engram4" / "config.json").read_text())
    tables = {path: entry for path, entry in config["quantization"].items() if isinstance(entry, dict) and ".engram.embed" in path}
    assert tables and {(entry["bits"], entry["group_size"]) for entry in tables.values()} == {(4, 32)}
    page = program("eval", "report", "nano", real=True).out
    assert "| expected to be no better | than | one.jsonl | two.jsonl |" in page and "3 builds on one.jsonl, two.jsonl" in page
    before = (tmp_path / "made" / "pruned" / "config.json").stat().st_mtime_ns
    done = program(*argv, "--fresh", "--output", str(tmp_path / "table.json"), real=True)
    assert done.code == 0 and "--tokens 30" in json.loads((tmp_path / "table.json").read_text())["command"]
    assert (tmp_path / "made" / "pruned" / "config.json").stat().st_mtime_ns == before
    config["conversion"]["source_fingerprint"] = "0" * 64
    (tmp_path / "made" / "engram4" / "config.json").write_text(json.dumps(config))
    refused = program(*argv, real=True)
    assert refused.code == 2 and "made of another build" in refused.err

