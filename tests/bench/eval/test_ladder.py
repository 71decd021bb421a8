"""Layer by layer divergence: equal builds, planted faults found where they are, runs that were killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsv41chat.bench.eval.divergence import Ladder, differs, distance
from dsv41chat.bench.eval.ladder import findings, lines
from dsv41chat.engine.convert.convert import convert_pack, plan_conversion
from dsv41chat.engine.convert.prune import plan_prune, prune_pack
from dsv41chat.engine.errors import PackUnsupported
from dsv41chat.engine.layerwise import LayerWalk
from dsv41chat.engine.pack.build import open_pack
from dsv41chat.engine.pack.index import read_header
from dsv41chat.nano import embedded_pack
from tests import programs, v41
from tests.engine.pack import packs as p
from tests.engine.test_prune import TEXT, source
from tests.engine.v4 import tiny


def resharded(folder: Path, target: Path) -> Path:
    """The same tensors, dealt out to three other shards."""
    target.mkdir()
    refs = [ref for path in sorted(folder.glob("model*.safetensors")) for ref in read_header(path).values()]
    shards = [{ref.name: (ref.dtype, _Raw(ref)) for ref in refs[i::3]} for i in range(3)]
    names = [f"model-part-{i}.safetensors" for i in range(3)]
    for name, found in zip(names, shards):
        p.write_safetensors(target / name, found)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {t: n for n, found in zip(names, shards) for t in found}}))
    for path in folder.glob("*.json"):
        if path.name != "model.safetensors.index.json":
            shutil.copyfile(path, target / path.name)
    return target


class _Raw:
    """A tensor's bytes, in its shape."""

    def __init__(self, ref):
        self.shape, self.nbytes, self.dtype = ref.shape, ref.nbytes, ref.dtype
        self._bytes = ref.bytes().tobytes()

    def tobytes(self):
        return self._bytes


@pytest.fixture(scope="module")
def tiny_packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder")
    tiny.write_pack(folder / "v4")
    return {"v41": v41.PACK, "v4": folder / "v4", "nano": embedded_pack()}


def climb(reference, variant, count=70, folder=None, texts=2, **options):
    """All rows of a ladder between two walks; ids from a seed."""
    rng, vocab = np.random.default_rng(4), reference.pack.config.vocab_size
    ids = [rng.integers(3, vocab - 1, count + 10 * t).tolist() for t in range(texts)]

    def write(name, fill):
        fill(folder / name)
        return folder / name

    ladder, rows = Ladder(reference, variant, ids, folder, write), []
    for number in range(ladder.steps):
        rows.append(ladder.step(number))
        ladder.clear(number)
    return rows


def differing(rows, mode):
    return [row["part"] for row in rows if row["part"] != "head" and differs(row[mode])]


@pytest.mark.parametrize("family", ["v41", "v4", "nano"])
def test_the_same_weights_in_other_shards_differ_nowhere(family, tiny_packs, tmp_path):
    copy = resharded(tiny_packs[family], tmp_path / "copy")
    packs = [open_pack(path) for path in (tiny_packs[family], copy)]
    assert packs[0].fingerprint != packs[1].fingerprint
    rows = climb(*(LayerWalk(pack) for pack in packs), folder=tmp_path, texts=1 if family == "nano" else 2)
    for row in rows:
        for mode in ("forced", "free"):
            found = row[mode]
            assert (found["rel"], found["max"], found["cos"]) == (0, 0, 1), row
            assert found.get("mix") in (None, 0) and found.get("made") in (None, 0) and found.get("picked") in (None, 1), row
            assert (found.get("kl", 0), found.get("top1", 1)) == (0, 1)
    assert findings(rows)["equal"] and not list(tmp_path.glob("*-[0-9]-*.safetensors"))


@pytest.mark.parametrize("family, index", [("v41", 0), ("v41", 3), ("v41", 5), ("v4", 1), ("v4", 2)])
def test_a_wrong_rope_base_is_found_at_its_layer(family, index, tiny_packs, tmp_path):
    pack = open_pack(tiny_packs[family])
    plan = list(pack.plan)
    plan[index] = replace(plan[index], rope=replace(plan[index].rope, base=plan[index].rope.base * 2))
    rows = climb(LayerWalk(pack), LayerWalk(replace(pack, plan=tuple(plan))), folder=tmp_path)
    place = f"layer {index}"
    assert differing(rows, "forced") == [place] and findings(rows)["first"] == findings(rows)["worst"] == place
    assert differing(rows, "free") == [f"layer {i}" for i in range(index, len(plan))]
    assert rows[-1]["forced"]["rel"] == 0 < rows[-1]["free"]["rel"] and rows[-1]["free"]["kl"] > 0


def scaled(folder: Path, target: Path, name: str) -> Path:
    """A copy of a one-file pack with one float tensor 1.05 times as large."""
    shutil.copytree(folder, target)
    ref = read_header(target / "model.safetensors")[name]
    data = bytearray((target / "model.safetensors").read_bytes())
    raw = np.frombuffer(bytes(data[ref.offset : ref.offset + ref.nbytes]), "<u2" if ref.dtype == "BF16" else "<f4")
    value = (raw.astype(np.uint32) << 16).view(np.float32) if ref.dtype == "BF16" else raw
    value = (value * np.float32(1.05)).astype(np.float32)
    raw = (value.view(np.uint32) >> 16).astype("<u2") if ref.dtype == "BF16" else value
    data[ref.offset : ref.offset + ref.nbytes] = raw.tobytes()
    (target / "model.safetensors").write_bytes(data)
    return target


PARTS = [
    "attn.wo_b.weight", "ffn.shared_experts.w2.weight", "hc_ffn_scale", "attn.kv_norm.weight", "ffn_norm.weight", "attn.wq_b.weight",
    "hc_attn_base",
]  # fmt: skip
SPECIAL = [
    ("v41", 1, "attn.compressor.norm.weight"), ("v41", 3, "attn.indexer.k_norm.weight"), ("v41", 4, "attn.indexer.k_norm.weight"),
    ("v41", 1, "engram.q_weight"), ("v41", 3, "engram.wkv.weight"), ("v4", 1, "attn.compressor.ape"),
    ("v4", 1, "attn.indexer.compressor.norm.weight"), ("v4", 0, "ffn.gate.weight"), ("v4", 3, "ffn.gate.weight"),
]  # fmt: skip


@pytest.mark.parametrize(
    "family, index, name", [("v41", i, PARTS[i]) for i in range(7)] + [("v4", i, PARTS[i + 3]) for i in range(4)] + SPECIAL
)
def test_a_scaled_tensor_is_found_at_its_layer(family, index, name, tiny_packs, tmp_path):
    """One in every layer, and those that reach other layers through entries, keys, mixes and tables; made and mix show what h does not."""
    changed = scaled(tiny_packs[family], tmp_path / "changed", f"layers.{index}.{name}")
    rows = climb(LayerWalk(open_pack(tiny_packs[family])), LayerWalk(open_pack(changed)), folder=tmp_path, count=90, texts=1)
    assert differing(rows, "forced") == [f"layer {index}"], [row["forced"] for row in rows]
    assert [row["part"] for row in rows[: index + 1] if differs(row["free"])] == []
    if ".indexer." not in name:  # keys that are longer all alike change no choice
        assert differing(rows, "free") == [f"layer {i}" for i in range(index, len(rows) - 2)]


def test_embedding_and_head_are_parts_of_their_own(tiny_packs, tmp_path):
    walk = lambda path: LayerWalk(open_pack(path))
    rows = climb(walk(v41.PACK), walk(scaled(v41.PACK, tmp_path / "embed", "embed.weight")), folder=tmp_path)
    assert differing(rows, "forced") == ["embedding"] and rows[0]["forced"]["cos"] > 0.9999 and abs(rows[0]["forced"]["rel"] - 0.05) < 0.01
    rows = climb(walk(v41.PACK), walk(scaled(v41.PACK, tmp_path / "head", "head.weight")), folder=tmp_path)
    assert findings(rows)["first"] == "head" and differing(rows, "free") == [] and rows[-1]["forced"]["rel"] == rows[-1]["free"]["rel"] > 0.04


def test_coarser_formats_are_further_away(tmp_path):
    folder, _ = source(tmp_path / "in", "v41", "plain-f32")
    reference, found = LayerWalk(open_pack(folder)), []
    for recipe in ("affine-8", "affine-6", "affine-4"):
        convert_pack(plan_conversion(folder, tmp_path / recipe, recipe))
        rows = climb(reference, LayerWalk(open_pack(tmp_path / recipe)), folder=tmp_path)
        layers = [row for row in rows if row["part"].startswith("layer")]
        last = layers[-1]["free"]
        found.append((np.mean([row["forced"]["rel"] for row in layers]), last["rel"], -last["cos"], rows[-1]["free"]["kl"]))
        assert found[-1][0] < found[-1][1], "errors add up"
    assert all(a < b for a, b in zip(found[0], found[1])) and all(a < b for a, b in zip(found[1], found[2]))


def test_a_pruned_build_is_a_variant_and_another_model_is_not(tiny_packs, tmp_path):
    folder, _ = source(tmp_path / "in", "v4")
    prune_pack(plan_prune(folder, tmp_path / "out", 4, lambda pack: TEXT))
    rows = climb(LayerWalk(open_pack(folder)), LayerWalk(open_pack(tmp_path / "out")), folder=tmp_path)
    assert rows[1]["forced"]["rel"] == 0 < rows[2]["forced"]["rel"], "the layer with a token table keeps its experts"
    with pytest.raises(PackUnsupported, match="are different models: vocab_size, hidden_size"):
        climb(LayerWalk(open_pack(folder)), LayerWalk(open_pack(tiny_packs["v4"])), folder=tmp_path)


def test_distance_is_what_it_says():
    import mlx.core as mx

    a, b = np.array([[3.0, 4.0], [1.0, 0.0]]), np.array([[3.0, 4.0], [1.0, 1.0]])
    found = distance(mx.array(a), mx.array(b))
    assert found["rel"] == pytest.approx(0.5) and found["max"] == pytest.approx(1) and found["cos"] == pytest.approx((1 + 0.5**0.5) / 2)


KILLING = """
import os, signal, sys
from dsv41chat.bench.eval import frame
from dsv41chat.cli import main
at, seen = int(sys.argv[1]), []
def dying(call):
    def then(self, *args):
        found = call(self, *args)
        seen.append(1)
        if len(seen) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return found
    return then
frame.Run.save, frame.Run.write = dying(frame.Run.save), dying(frame.Run.write)
sys.exit(main(sys.argv[2:]).code)
"""


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_a_killed_ladder_gives_identical_numbers(family, tiny_packs, program, tmp_path):
    """kill -9 after files and after saves, across borders between an owner of entries and the layers that read them."""
    name = "layers.1.attn.wo_b.weight"
    changed = scaled(tiny_packs[family], tmp_path / "changed", name)
    words = ["eval", "ladder", str(changed), "--against", str(tiny_packs[family]), "--tokens", "80"]
    whole = program(*words, "--json", real=True)
    assert whole.code == 0 and whole.object["first"] == whole.object["worst"] == "layer 1", whole.err
    data = ["--json", "--data-dir", str(tmp_path / "killed")]
    for at in (4, 6):  # the second goes further than the first
        done = subprocess.run([sys.executable, "-c", KILLING, str(at), *words, *data], env=programs.environment(), capture_output=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
    killed = program.at(tmp_path / "killed")
    again = killed(*words, "--json", real=True)
    assert "going on where an earlier run was stopped" in again.err
    assert again.out == whole.out
    page = killed("eval", "report", str(changed), real=True).out
    assert "First difference in layer 1, the largest in layer 1" in page and "| layer 3 |" in page
    receipt = json.loads(next((tmp_path / "killed").rglob("ladder-*.json")).read_text())
    assert lines(receipt)[0].startswith("changed against") and str(tmp_path) not in json.dumps(receipt)


@pytest.mark.usefixtures("shared_weights")
def test_the_command(tmp_path):
    (tmp_path / "mine.txt").write_text("The lighthouse at the end of the long pier shines in the evening.")
    words = ["eval", "ladder", "nano", "--against", "nano", "--text", str(tmp_path / "mine.txt"), "--tokens", "8", "--dtype", "bfloat16"]
    done = programs.run(tmp_path / "data", *words, "--fresh", "--output", str(tmp_path / "receipt.json"))
    assert done.code == 0 and done.json["equal"] and done.json["text"]["name"] == "mine.txt" and done.json["text"]["tokens"] == 8, done.stderr
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["parameters"]["dtype"] == "bfloat16" and receipt["summary"] == "no difference from nano in any layer"
    assert programs.run(tmp_path / "data", *words[:4], "nano", "--text", "absent.txt").code == 2


MEASURE = """
import json, resource, sys, threading, time
from dsv41chat.cli import main
code = main(sys.argv[1:]).code
print(json.dumps({"code": code, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), file=sys.stderr)
"""


@pytest.mark.slow
def test_memory_stays_below_the_size_of_the_build(tmp_path):
    """A build of more than 2 GB against its conversion, one layer at a time: the peak of the whole process is far below either."""
    from tests.engine.test_big_packs import write_big

    changes = {"num_hidden_layers": 12, "compress_ratios": [0, 4, 12, 4, 12, 4, 12, 4, 12, 4, 12, 0, 0]}
    folder = write_big(tmp_path / "big", 26, None, **changes)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size > 2 * 10**9
    convert_pack(plan_conversion(folder, tmp_path / "small", "affine-4"))
    words = ["eval", "ladder", str(tmp_path / "small"), "--against", str(folder), "--tokens", "128", "--json", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run([sys.executable, "-c", MEASURE, *words], env=programs.environment(), capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stderr.strip().splitlines()[-1])
    print(f"pack {size:,} bytes, peak {measured['peak']:,}")
    assert measured["code"] == 0 and measured["peak"] < 0.8 * size
    assert json.loads(done.stdout)["rows"][-1]["free"]["rel"] > 0
    os.sync()
