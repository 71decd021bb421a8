"""What a training run did, from its log: the papers that go with the pack.

The trainer writes `eval.json` beside its shards (`write`). `python -m dsv41chat.nano.report run RUN --data FOLDER` takes a finished run into the
pack: shards, index, digests, settings, provenance, eval.json, and the curve as a receipt. `... report product` puts the figures of the product
engine (`receipts/evaluation_*.json` of these very weights) into eval.json. The card is written by hand.
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


def pack_digest(pack: Path) -> str:
    """sha256 over the digests of the weight files, the config and the tokenizer."""
    whole = hashlib.sha256()
    for path in sorted([*pack.glob("model-*.safetensors"), pack / "config.json", pack / "tokenizer.json"]):
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


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
    done, earlier = receipt(log), before.get("continued", [])
    name = "training_continued" + (f"_{len(earlier) + 1}" if earlier else "") + ".json"
    part = dict(
        steps=done["steps"],
        tokens=done["tokens"],
        training_minutes=round(done["training_seconds"] / 60, 2),
        device=done["device"],
        torch=done["torch"],
        command=done["command"],
        started_from=before["shard_sha256"],
        receipt=f"dsv41chat/nano/receipts/{name}",
    )
    papers = before | dict(continued=[*earlier, part], shard_sha256=digests)
    export.write_json(pack / "provenance.json", papers)
    dump(receipts / name, done)


def pooled(sets: dict[str, dict], names: list[str]) -> float:
    """Right answers of some sets together."""
    return round(sum(sets[n]["right"] for n in names) / sum(sets[n]["n"] for n in names), 4)


def product_part(receipts: Path, digest: str) -> dict:
    """The product's figures for the weights with this digest: [right, items, tokens per verify] per set and seed, controls, denials, endings."""
    found = {}
    for path in sorted(receipts.glob("evaluation_*.json")):
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["pack_sha256"] == digest:
            found[path.stem.removeprefix("evaluation_")] = value["sets"]
    seeds = {name: {k: v for k, v in found[name].items() if "right" in v} for name in found if name.startswith("seed")}
    out: dict = dict(
        how="greedy, drafted, the product's engine on the CPU and its chat encoder; receipts/evaluation_*.json hold commands and failures",
        **{name: {k: [v["right"], v["n"], v["tokens_per_verify"]] for k, v in sets.items()} for name, sets in seeds.items()},
    )
    both = [k for k in next(iter(seeds.values()), {}) if all(k in sets for sets in seeds.values())]
    if len(seeds) > 1 and both:
        out["pooled_same_sets"] = dict(sets=len(both), **{name: pooled(sets, both) for name, sets in seeds.items()})
    for name in ("zeroed", "shuffled"):
        if name in found:
            out[f"tables_{name}"] = {k: [v["right"], v["n"]] for k, v in found[name].items()}
    for name, sets in found.items():
        if "false_dont_know" in sets:
            out.setdefault("false_dont_know", {})[name] = [sets["false_dont_know"][k] for k in ("denied", "n")]
        if "random" in sets:
            out["random_conversations"] = {k: v for k, v in sets["random"].items() if k != "seconds"}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    run = what.add_parser("run", help="take a run that was started with --start into the pack")
    run.add_argument("run", type=Path, help="folder with its shards and log.jsonl")
    run.add_argument("--data", type=Path, required=True, help="folder written by dsv41chat.nano.corpus")
    product = what.add_parser("product", help="the product's receipts into eval.json")
    for part in (run, product):
        part.add_argument("--pack", type=Path, default=Path(__file__).parent / "pack")
        part.add_argument("--receipts", type=Path, default=RECEIPTS)
    a = parser.parse_args()
    if a.what == "run":
        install(a.run, a.data, a.pack, a.receipts)
    else:
        papers = json.loads((a.pack / "eval.json").read_text(encoding="utf-8"))
        dump(a.pack / "eval.json", papers | {"product": product_part(a.receipts, pack_digest(a.pack))})


if __name__ == "__main__":
    main()
