"""From the log of a training run to the papers of a pack."""

from __future__ import annotations

import json
import shutil

from dsv41chat.engine import probe_pack
from dsv41chat.nano import embedded_pack, export, report
from tests.nano.small_facts import folder

LOG = [
    dict(t=0, command="python -m dsv41chat.nano.train --start pack", corpus={}),
    dict(t=1, device="a machine", torch="2", python="3", trunk=1, tables=2, drafter=3),
    dict(t=2, warm="512", seconds=3.0, memory=1.0),
    dict(t=3, quick=0.0, standing=0.5, best=True, definitions=[0.9, 0.9, 10]),
    dict(t=4, step=50, f=0.5, loss=1.0, lm=0.5, kl=0.1, draft=0.2, norm=1.0, tok_s=10, kinds={}, load=[1, 1], gate=[1]),
    dict(t=5, trained=60, seconds=7.0, tokens=600, tok_s=10),
    dict(t=5, exported=1.0, standing=0.7),
    dict(t=6, final="definitions", weights="rounded", n=10, exact=0.9, perplexity=1.1, accepted=4.5),
    dict(t=6, final="definitions", weights="float32", n=10, exact=0.8, perplexity=1.1),
    dict(t=6, final="definitions", weights="rounded", engram="off", n=10, exact=0.0),
]


def _run(tmp_path):
    """A run folder: the shipped weights written again, and a log behind that of an earlier command."""
    run = tmp_path / "run"
    export.write_weights(run, *export.read_weights(embedded_pack()))
    lines = [dict(t=0, command="an earlier command"), dict(t=1, final="definitions", weights="rounded", n=1, exact=0.1), *LOG]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_run_becomes_a_pack_with_its_papers(tmp_path):
    run, pack, receipts, data = _run(tmp_path), tmp_path / "pack", tmp_path / "receipts", tmp_path / "data"
    shutil.copytree(embedded_pack(), pack)
    receipts.mkdir()
    data.mkdir()
    old = json.loads((pack / "provenance.json").read_text())
    report.install(run, folder(data), pack, receipts)
    sets = json.loads((pack / "eval.json").read_text())["trainer"]
    assert sets["sets"]["definitions"]["exact"] == 0.9 and sets["sets"]["definitions"]["bar"] == 0.9
    assert sets["float32_weights"]["definitions"]["exact"] == 0.8 and sets["controls"][0]["engram"] == "off"
    papers = json.loads((pack / "provenance.json").read_text())
    assert papers["continued"][-1]["started_from"] == old["shard_sha256"] and papers["steps"] == old["steps"]
    listed = dict(line.split("  ")[::-1] for line in (pack / "SHA256SUMS").read_text().splitlines())
    assert listed == papers["shard_sha256"]
    written = [json.loads(path.read_text()) for path in receipts.iterdir()]
    assert [r["steps"] for r in written] == [60] and (papers["continued"][-1]["receipt"].endswith(next(receipts.iterdir()).name))
    assert probe_pack(pack).has_tokenizer and (pack / "config.json").read_bytes() == (embedded_pack() / "config.json").read_bytes()
