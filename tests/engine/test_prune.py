"""Pruned builds: what is kept, which bytes, which files, and what a killed run leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import SamplingParams, open_engine
from dsv41chat.engine.chat.encode import Message, RenderOptions, encode_prompt
from dsv41chat.engine.chat.tokenizer import ChatTokenizer
from dsv41chat.engine.convert.calibrate import DEFAULT_TEXT, CalibrationText, Tally
from dsv41chat.engine.convert.prune import plan_prune, prune_pack
from dsv41chat.engine.errors import Cancelled, PackDamaged, PackIncomplete, PackUnsupported
from dsv41chat.engine.nn.moe import MoE
from dsv41chat.engine.nn.moe_v4 import MoEV4
from dsv41chat.engine.pack.build import build_drafter, build_trunk, open_pack
from dsv41chat.engine.pack.index import open_index
from dsv41chat.engine.verify import verify_full
from dsv41chat.nano import embedded_pack
from tests.drafting import write_with_drafter
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import CASES, wo_a_slices
from tests.engine.test_convert import digests
from tests.engine.v4 import tiny
from tests.v41 import run

EXPERTS, KEEP = 5, 3
TEXT = CalibrationText("ids", "0" * 64, tuple(tuple(np.random.default_rng(seed).integers(3, 249, 50).tolist()) for seed in range(4)))


def config(family, experts=EXPERTS):
    outer = json.loads(json.dumps(p.CONFIGS[family]))
    outer.get("text_config", outer)["n_routed_experts"] = experts
    return outer


def source(folder, family, case="release", **layout):
    """Two shards: one with everything of the experts and routers, one without."""
    parts, meant = p.encode(p.tensors(family, config(family)), CASES[case][family])
    found = p.flat(wo_a_slices(parts), **layout)
    routed = {name: tensor for name, tensor in found.items() if ".ffn.experts." in name or ".ffn.gate." in name}
    rest = {name: tensor for name, tensor in found.items() if name not in routed}
    return p.write(folder, config(family), [routed, rest], family=family), meant


def prune(folder, target, keep=KEEP, **options):
    return prune_pack(plan_prune(folder, target, keep, lambda pack: TEXT), **options)


def bytes_of(folder):
    return {name: (ref.dtype, ref.shape, ref.bytes().tobytes()) for name, ref in open_index(folder).tensors.items()}


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_pruning_nothing_changes_nothing(family, tmp_path):
    folder, _ = source(tmp_path / "in", family)
    before = digests(folder)
    done = prune(folder, tmp_path / "out", EXPERTS)
    assert bytes_of(tmp_path / "out") == bytes_of(folder) and done.written == [] and done.agreement == 1
    assert all((tmp_path / "out" / name).samefile(folder / name) for name in done.linked) and len(done.linked) == 2
    assert digests(folder) == before


FORMATS = [
    ("release", "v41", {}), ("release", "v4", {}), ("affine-4", "v41", {"stacked": True}), ("affine-4", "v4", {"stacked": True}),
    ("native", "v41", {"stacked": True}), ("native", "v4", {}), ("mixed", "v41", {"stacked": True}), ("nvfp4", "v4", {"stacked": True}),
    ("plain-f16", "v41", {"stacked": True}), ("exl3-experts", "v41", {}), ("exl3-full", "v4", {}),
]  # fmt: skip


@pytest.mark.parametrize("case, family, layout", FORMATS)
def test_the_bytes_are_those_of_quantising_fewer_experts(case, family, layout, tmp_path):
    """Leave the experts out of the float weights, encode what is left: every tensor of the pruned build, byte for byte."""
    folder, _ = source(tmp_path / "in", family, case, **layout)
    before = digests(folder)
    done = prune(folder, tmp_path / "out")
    pruned = {layer: experts for layer, experts in done.kept.items()}
    assert pruned and all(len(experts) == KEEP for experts in pruned.values()) and (family == "v41") == (0 in pruned)
    left, origin = {}, {}
    for name, value in p.tensors(family, config(family)).items():
        parts = name.split(".")
        kept = pruned.get(int(parts[1])) if parts[0] == "layers" else None
        if kept is not None and ".ffn.experts." in name:
            if int(parts[4]) not in kept:
                continue
            parts[4] = str(kept.index(int(parts[4])))
        elif kept is not None and ".ffn.gate." in name:
            value = value[kept]
        left[".".join(parts)], origin[".".join(parts)] = value, name
    parts, _ = p.encode(left, lambda name: CASES[case][family](origin[name]))
    want = p.flat(wo_a_slices(parts), **layout)
    got = bytes_of(tmp_path / "out")
    assert {name: (tag, array.shape, array.tobytes()) for name, (tag, array) in want.items()} == got
    assert digests(folder) == before and (tmp_path / "out/model-00002-of-00002.safetensors").samefile(folder / "model-00002-of-00002.safetensors")
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert found["n_routed_experts"] == KEEP == found.get("text_config", found)["n_routed_experts"]
    assert found["reap"]["kept"] == {str(layer): experts for layer, experts in done.kept.items()} and found["reap"]["of"] == EXPERTS
    assert [f.what for f in verify_full(tmp_path / "out", done={}) if f.name == "checksums"][0].startswith("1 files have the published sha256")


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_it_computes_what_a_router_with_fewer_choices_computes(family, tmp_path):
    folder, _ = source(tmp_path / "in", family)
    done = prune(folder, tmp_path / "out")
    pruned, whole = (build_trunk(open_pack(path), cache_quant=False) for path in (tmp_path / "out", folder))
    for layer in whole.layers:
        if layer.plan.index in done.kept:
            gone = np.full(EXPERTS, -1e9, np.float32)
            gone[done.kept[layer.plan.index]] = 0
            layer.moe.bias = layer.moe.bias + mx.array(gone)
    np.testing.assert_allclose(run(pruned, p.IDS), run(whole, p.IDS), atol=1e-5)


def by_hand(moe, meant, prefix, x, tallies):
    """Router and experts in float64 numpy from the decoded weights: adds one window to (sums, counts)."""
    w = lambda name: meant[f"{prefix}.{name}"].astype(np.float64)
    score = np.sqrt(np.logaddexp(0, x @ w("gate.weight").T))
    for row, s in zip(x, score):
        picks = np.argsort(-(s + w("gate.bias")), kind="stable")[: moe.picks]
        for e in picks:
            gate, up = w(f"experts.{e}.w1.weight") @ row, w(f"experts.{e}.w3.weight") @ row
            gate, up = np.minimum(gate, moe.limit), np.clip(up, -moe.limit, moe.limit)
            y = w(f"experts.{e}.w2.weight") @ (gate / (1 + np.exp(-gate)) * up)
            tallies[0][e] += s[e] / s[picks].sum() * moe.factor * np.sqrt((y * y).sum())
            tallies[1][e] += 1


@pytest.mark.parametrize("family, moe_class", [("v41", MoE), ("v4", MoEV4)])
def test_an_independent_saliency_keeps_the_same_experts(family, moe_class, tmp_path, monkeypatch):
    folder, meant = source(tmp_path / "in", family)
    done = prune(folder, tmp_path / "out")
    trunk, seen, call = build_trunk(open_pack(folder)), [], moe_class.__call__
    monkeypatch.setattr(moe_class, "__call__", lambda self, x, about: (seen.append((self, np.array(x, np.float64))), call(self, x, about))[1])
    tallies = {}
    for window in TEXT.windows:
        seen.clear()
        run(trunk, list(window))
        for layer, (moe, x) in zip(trunk.layers, seen):
            if not layer.plan.hashed:
                index = layer.plan.index
                by_hand(moe, meant, f"layers.{index}.ffn", x, tallies.setdefault(index, (np.zeros(EXPERTS), np.zeros(EXPERTS))))
    kept = {index: sorted(np.argsort(-sums / np.maximum(counts, 1))[:KEEP].tolist()) for index, (sums, counts) in tallies.items()}
    assert kept == done.kept
    # The wrong measure, how often an expert is used, would have kept others.
    assert {index: sorted(np.argsort(-counts)[:KEEP].tolist()) for index, (_, counts) in tallies.items()} != kept


def test_unused_experts_go_first_and_ties_keep_the_lower_number():
    tally = Tally.empty(5)
    tally.add(0, np.array([[0, 3], [3, 4]]), np.array([[2.0, 1e-9], [1e-9, 2.0]]))
    tally.add(1, np.array([[0, 4]]), np.array([[2.0, 2.0]]))
    assert tally.kept(3) == [0, 3, 4] and tally.kept(1) == [0] and tally.kept(4) == [0, 1, 3, 4]
    assert tally.saliency(1).tolist() == [2, -1, -1, -1, 2]


def test_token_tables_and_the_drafter_keep_all_experts(tmp_path):
    tiny.write_pack(tmp_path / "tiny")
    folder = write_with_drafter(tmp_path / "tiny", tmp_path / "in", "mtp")
    experts = open_pack(folder).config.n_routed_experts
    pruned = open_pack(prune_into(folder, tmp_path / "out", experts - 1))
    assert pruned.config.n_routed_experts == experts - 1 and pruned.config.whole_experts == experts and pruned.found.fault is None
    trunk = build_trunk(pruned)
    assert [layer.moe.gate.weight.shape[0] for layer in trunk.layers] == [experts if layer.plan.hashed else experts - 1 for layer in trunk.layers]
    drafter = build_drafter(pruned, trunk, rounded=False)
    assert drafter is not None and drafter.stage.moe.gate.weight.shape[0] == experts


def prune_into(folder, target, keep):
    text = CalibrationText("ids", "0" * 64, tuple(tuple(i % 90 + 3 for i in window) for window in TEXT.windows))
    prune_pack(plan_prune(folder, target, keep, lambda pack: text))
    return target


SCRIPT = """
import os, signal, sys
from tests.engine.test_prune import TEXT
from dsv41chat.engine.convert import calibrate, prune
at, seen, write = int(sys.argv[3]), [], calibrate._write
def step(*args):
    seen.append(args)
    if len(seen) == at:
        os.kill(os.getpid(), signal.SIGKILL)
calibrate._write = lambda path, fill: (step(path), write(path, fill), step(path))
prune.prune_pack(prune.plan_prune(sys.argv[1], sys.argv[2], 3, lambda pack: TEXT), resume=True, progress=step)
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(source, what pruning it gave, digests of the pruned build)"""
    folder = tmp_path_factory.mktemp("uninterrupted")
    found, _ = source(folder / "in", "v41")
    return found, prune(found, folder / "whole"), digests(folder / "whole")


@pytest.mark.parametrize("at", [3, 14, 31, 60])
def test_a_killed_run_goes_on_to_the_same_bytes(at, uninterrupted, tmp_path):
    folder, done, whole = uninterrupted
    target = tmp_path / "killed"
    found = subprocess.run([sys.executable, "-c", SCRIPT, str(folder), str(target), str(at)], timeout=120)
    assert found.returncode == -signal.SIGKILL
    with pytest.raises(PackIncomplete, match="killed is a half-pruned build"):
        open_pack(target)
    with pytest.raises(PackUnsupported, match="holds a part of a pruning"):
        prune(folder, target)
    assert prune(folder, target, resume=True) == done
    assert digests(target) == whole


def test_what_is_refused(tmp_path):
    folder, _ = source(tmp_path / "in", "v4")
    with pytest.raises(PackUnsupported, match="uses 2 for every token"):
        prune(folder, tmp_path / "out", 1)
    with pytest.raises(PackUnsupported, match="is the source itself"):
        prune(folder, folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("mine")
    with pytest.raises(PackUnsupported, match="no pruning began there"):
        prune(folder, tmp_path / "other")
    with pytest.raises(Cancelled):
        prune(folder, tmp_path / "part", cancel=lambda: True)
    with pytest.raises(PackUnsupported, match="another source, text, number of experts or version"):
        prune(folder, tmp_path / "part", 4, resume=True)
    tokenizer = ChatTokenizer.from_file(embedded_pack() / "tokenizer.json")
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(PackIncomplete, match="too few to calibrate with"):
        CalibrationText.read(tmp_path / "short.txt", tokenizer, "v41")
    (tmp_path / "bad.jsonl").write_text("no json")
    with pytest.raises(PackDamaged, match="cannot be read as a text"):
        CalibrationText.read(tmp_path / "bad.jsonl", tokenizer, "v41")


def test_links_are_made_to_the_files_behind_links(tmp_path):
    """Download folders hold symbolic links to their blobs."""
    folder, _ = source(tmp_path / "blobs", "v41")
    (tmp_path / "in").mkdir()
    for path in folder.iterdir():
        os.symlink(path, tmp_path / "in" / path.name)
    done = prune(tmp_path / "in", tmp_path / "out")
    (name,) = done.linked
    assert not (tmp_path / "out" / name).is_symlink() and (tmp_path / "out" / name).stat().st_ino == (folder / name).stat().st_ino


def test_tables_of_a_sub_folder_come_along(tmp_path):
    parts, _ = p.encode(p.tensors("v41", config("v41")), CASES["release"]["v41"])
    found = p.flat(parts)
    tables = {name: tensor for name, tensor in found.items() if ".engram.embed." in name}
    folder = p.write(tmp_path / "in", config("v41"), {name: tensor for name, tensor in found.items() if name not in tables}, family="v41")
    (folder / "engram").mkdir()
    p.write_safetensors(folder / "engram/model-00009.safetensors", tables)
    done = prune(folder, tmp_path / "out")
    assert done.linked == ["engram/model-00009.safetensors"] and (tmp_path / "out" / done.linked[0]).samefile(folder / done.linked[0])
    assert open_pack(tmp_path / "out").table_bytes > 0


@pytest.mark.parametrize("keep", [0.5, pytest.param(0.75, marks=pytest.mark.slow)])
def test_the_embedded_model_pruned_still_chats(keep, tmp_path):
    read = lambda pack: CalibrationText.read(DEFAULT_TEXT, ChatTokenizer.from_file(pack.folder / "tokenizer.json"), "v41", 256)
    done = prune_pack(plan_prune(embedded_pack(), tmp_path / "out", keep, read))
    assert {len(experts) for experts in done.kept.values()} == {round(8 * keep)} and 0.5 < done.agreement <= 1
    assert not list((tmp_path / "out").glob("*calibration*")) and len(done.linked) == 3
    engine = open_engine(tmp_path / "out")
    prompt = encode_prompt(engine.tokenizer, engine.family, [Message("user", "define photosynthesis")], RenderOptions(thinking=False))
    answers = [[*engine.new_session().generate(prompt, SamplingParams(), max_tokens=24, draft=mode)][-1] for mode in ("off", 5)]
    assert answers[0].ids == answers[1].ids and answers[0].text.startswith("The word photosynthesis")
    engine.close()


def test_the_command(program, tmp_path):
    (tmp_path / "mine.txt").write_text("The lighthouse at the end of the long pier shines in the evening. " * 20)
    words = ("models", "prune", "nano", str(tmp_path / "out"), "--experts", "75%", "--tokens", "100", "--yes", "--json")
    done = program(*words, "--text", str(tmp_path / "mine.txt"), "--resume", real=True)
    assert done.code == 0 and (done.object["experts"], done.object["of"], len(done.object["kept"]["0"])) == (6, 8, 6), done.err
    assert done.object["written"] == ["model-00001-of-00004.safetensors"] and open_pack(tmp_path / "out").config.n_routed_experts == 6
    reap = json.loads((tmp_path / "out/config.json").read_text())["reap"]
    assert (reap["text"], reap["tokens"], reap["windows"]) == ("mine.txt", 102, 2)
    again = program(*words, real=True)
    assert again.code == 4 and "no pruning began there" in again.object["message"]
    assert program(*words[:4], "--experts", "0%", real=True).code == 2
