"""Finding a drafter (test T13): by tensors, complete or not at all, with one line that says what is wrong."""

from __future__ import annotations

import json

import pytest

from dsv41chat.engine import probe_pack
from dsv41chat.engine.pack.build import open_pack
from dsv41chat.engine.pack.index import read_header
from dsv41chat.nano import embedded_pack
from dsv41chat.nano.export import write_safetensors
from tests import drafting
from tests.drafting import DATA


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    kinds = {"dspark": ("v41", "dspark"), "v4-dspark": ("v4", "dspark"), "mtp": ("v4", "mtp")}
    return {name: drafting.write_with_drafter(DATA / source, folder / name, kind) for name, (source, kind) in kinds.items()}


def without(folder, target, keep=lambda name: True, rename=lambda name: name, **config):
    """A copy of a pack with some tensors, under other names, and other values in its (text) config."""
    target.mkdir()
    outer = json.loads((folder / "config.json").read_text())
    outer.get("text_config", outer).update(config)
    (target / "config.json").write_text(json.dumps(outer))
    refs = read_header(folder / "model.safetensors")
    kept = [(rename(n), r.dtype, drafting._Shaped(r.bytes().reshape(-1), r.shape)) for n, r in refs.items() if keep(n)]
    write_safetensors(target / "model.safetensors", kept)
    return target


def test_kinds_stages_and_bytes(packs):
    for name, (kind, stages) in {"dspark": ("dspark", 3), "v4-dspark": ("dspark", 3), "mtp": ("mtp", 1)}.items():
        pack = open_pack(packs[name])
        assert pack.drafter == kind == probe_pack(packs[name]).drafter and len(pack.found.plan.prefixes) == stages
        refs = read_header(packs[name] / "model.safetensors")
        assert pack.drafter_bytes == sum(r.nbytes for n, r in refs.items() if n.startswith("mtp."))
        assert not any("draft" in note for note in pack.notes)
    assert len(open_pack(embedded_pack()).found.plan.prefixes) == 2 and open_pack(embedded_pack()).drafter == "dspark"


def test_absent(packs):
    """The config may go on announcing what a conversion has dropped."""
    pack = open_pack(DATA / "v4")
    assert pack.drafter is None and pack.found.fault is None and pack.drafter_bytes == 0


@pytest.mark.parametrize(
    ("name", "keep", "words"),
    [
        ("dspark", lambda n: not n.startswith("mtp.2."), ["4 of 66", "mtp.1.confidence_head.proj.weight", "mtp.1.markov_head"]),
        ("dspark", lambda n: not n.startswith("mtp.1."), ["stages are [0, 2]", "without a gap"]),
        ("dspark", lambda n: not n.endswith("main_proj.weight"), ["1 of", "mtp.0.main_proj.weight"]),
        ("v4-dspark", lambda n: not n.endswith("hc_head_fn") or not n.startswith("mtp."), ["1 of", "mtp.2.hc_head_fn"]),
        ("mtp", lambda n: not n.endswith("enorm.weight"), ["1 of", "mtp.0.enorm.weight"]),
    ],
    ids=["last stage", "gap", "projection", "collapse", "norm"],
)
def test_incomplete(packs, tmp_path, name, keep, words):
    pack = open_pack(without(packs[name], tmp_path / "p", keep))
    assert pack.drafter is None and all(w in pack.found.fault for w in words), pack.found.fault
    assert pack.found.fault in pack.notes and pack.found.fault in probe_pack(pack.folder).notes and "\n" not in pack.found.fault


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"dspark_markov_rank": 7}, "[160, 160], the config expects [160, 7]"),
        ({"dspark_target_layer_ids": [6, 9]}, "$.dspark_target_layer_ids is [6, 9]"),
        ({"dspark_noise_token_id": 160}, "$.dspark_noise_token_id is 160"),
        ({"dspark_block_size": None}, "$.dspark_block_size is None"),
    ],
)
def test_contradictions(packs, tmp_path, config, words):
    pack = open_pack(without(packs["dspark"], tmp_path / "p", **config))
    assert pack.drafter is None and words in pack.found.fault


def test_the_count_in_the_config_does_not_matter(packs, tmp_path):
    pack = open_pack(without(packs["dspark"], tmp_path / "p", num_nextn_predict_layers=1))
    assert pack.drafter == "dspark" and len(pack.found.plan.prefixes) == 3


def test_another_index_and_none(packs, tmp_path):
    """A next-token block under `mtp.1` or a bare `mtp`."""
    for index, prefix in enumerate(("mtp.1.", "mtp.")):
        pack = open_pack(without(packs["mtp"], tmp_path / str(index), rename=lambda n, p=prefix: n.replace("mtp.0.", p)))
        assert pack.drafter == "mtp" and pack.found.plan.prefixes == (prefix.rstrip("."),)


def test_what_nobody_asked_for_is_named(packs, tmp_path):
    folder = without(packs["dspark"], tmp_path / "p")
    refs = read_header(folder / "model.safetensors")
    items = [(n, r.dtype, drafting._Shaped(r.bytes().reshape(-1), r.shape)) for n, r in refs.items()]
    norm = next(item for item in items if item[0] == "norm.weight")
    write_safetensors(folder / "model-again.safetensors", [*items, ("mtp.0.odd", *norm[1:]), ("mtp.1.ffn.gate.bias_vl", *norm[1:])])
    (folder / "model.safetensors").unlink()
    pack = open_pack(folder)
    assert pack.drafter == "dspark" and "1 tensors of the drafter are not used: mtp.0.odd" in pack.notes
