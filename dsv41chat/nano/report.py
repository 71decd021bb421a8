"""What a training run did, from its log: the papers that go with the pack.

The trainer writes `eval.json` beside its shards (`write`). `python -m dsv41chat.nano.report RUN --data FOLDER --pack PACK` takes a finished run
into a pack: shards, index, digests, settings, provenance, eval.json, and the curve as a receipt. The card is written by hand.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

from . import evalset, export

_SET_FIELDS = ("n", "exact", "key", "fact", "perplexity", "fact_perplexity", "accepted", "tokens_per_verify", "confidence_gap")
_CONTROL_FIELDS = ("final", "engram", "entries", "n", "exact", "key", "fact", "fact_perplexity")
_CURVE_FIELDS = ("step", "f", "loss", "lm", "kl", "draft", "norm", "tok_s", "kinds", "load", "gate")
RECEIPTS = Path(__file__).parent / "receipts"


def read_log(folder: Path) -> list[dict]:
    """The records of the last command that wrote into `folder`."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return records[max(i for i, r in enumerate(records) if "command" in r) :]


def _only(record: dict, fields: tuple[str, ...]) -> dict:
    return {k: record[k] for k in fields if k in record}


def trainer_part(log: list[dict]) -> dict:
    """The final evaluation of a run, with the bar of every set."""
    finals = [r for r in log if "final" in r]
    plain = [r for r in finals if r["weights"] == "rounded" and "engram" not in r and "entries" not in r]
    return dict(
        how="teacher-forced on wordings, values and operand pairs of the test part; exact = every token of the answer, its end included, is the "
        "argmax; weights rounded as stored",
        sets={r["final"]: _only(r, _SET_FIELDS) | {"bar": evalset.SETS[r["final"]][1]} for r in plain},
        float32_weights={r["final"]: _only(r, ("n", "exact", "perplexity", "fact_perplexity")) for r in finals if r["weights"] == "float32"},
        controls=[_only(r, _CONTROL_FIELDS) for r in finals if "engram" in r or "entries" in r],
        draft="accepted: proposals kept of 5 at random places inside answers; tokens_per_verify: [greedy rounds over whole answers, verifies]; "
        "confidence_gap: predicted minus kept chance per position",
    )


def receipt(log: list[dict]) -> dict:
    """Command, machine, evaluations on the way and curve."""
    device = next(r for r in log if "device" in r)
    end = next(r for r in log if "trained" in r)
    return dict(
        command=log[0]["command"],
        **_only(device, ("device", "torch", "python")),
        parameters=_only(device, ("trunk", "tables", "drafter")),
        compile_seconds_and_peak_gib=[[r["warm"], r["seconds"], r["memory"]] for r in log if "warm" in r],
        **_only(end, ("tokens",)),
        steps=end["trained"],
        training_seconds=end["seconds"],
        exported=[_only(r, ("exported", "standing")) for r in log if "exported" in r],
        held_out_during_training=[{k: v for k, v in r.items() if k != "t"} for r in log if "quick" in r],
        curve=[_only(r, _CURVE_FIELDS) for r in log if "step" in r],
        note="f = share of the schedule. kinds = loss per reply token by kind since the last line. held_out: [whole answer exact, key exact, items], "
        "wordings of the test part.",
    )


def dump(path: Path, value: dict) -> None:
    """One line per entry of the outer level, one per item of its lists."""
    lines = []
    for key, item in value.items():
        text = json.dumps(item, ensure_ascii=False)
        if isinstance(item, list) and len(text) > 100:
            text = "[\n  " + ",\n  ".join(json.dumps(x, ensure_ascii=False) for x in item) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def write(folder: Path) -> None:
    """eval.json of the run that lies in `folder`."""
    dump(folder / "eval.json", {"trainer": trainer_part(read_log(folder))})


def install(run: Path, data: Path, pack: Path, receipts: Path) -> None:
    """Take a run's weights and papers into `pack`; figures of the product engine are of the old weights and go."""
    log, before = read_log(run), json.loads((pack / "provenance.json").read_text(encoding="utf-8"))
    shards = sorted(p.name for p in run.glob("model-*.safetensors"))
    for name in (*shards, "model.safetensors.index.json"):
        shutil.copyfile(run / name, pack / name)
    digests = {name: hashlib.sha256((pack / name).read_bytes()).hexdigest() for name in shards}
    (pack / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()), encoding="utf-8")
    export.write_settings(pack, data / "tokenizer.json")
    dump(pack / "eval.json", {"trainer": trainer_part(log)})
    done = receipt(log)
    part = dict(
        steps=done["steps"],
        tokens=done["tokens"],
        training_minutes=round(done["training_seconds"] / 60, 2),
        device=done["device"],
        torch=done["torch"],
        command=done["command"],
        started_from=before["shard_sha256"],
        receipt="dsv41chat/nano/receipts/training_continued.json",
    )
    papers = before | dict(continued=[*before.get("continued", []), part], shard_sha256=digests)
    export.write_json(pack / "provenance.json", papers)
    dump(receipts / "training_continued.json", done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder with the shards and log.jsonl of a run that was started with --start")
    parser.add_argument("--data", type=Path, required=True, help="folder written by dsv41chat.nano.corpus")
    parser.add_argument("--pack", type=Path, default=Path(__file__).parent / "pack")
    parser.add_argument("--receipts", type=Path, default=RECEIPTS)
    a = parser.parse_args()
    install(a.run, a.data, a.pack, a.receipts)


if __name__ == "__main__":
    main()
