"""A drafter given to a build that was converted without one."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from dsv41chat.engine.convert.bank import plan_bank, write_bank
from dsv41chat.engine.convert.convert import convert_pack, plan_conversion
from dsv41chat.engine.errors import Cancelled, PackError, PackIncomplete, PackUnsupported
from dsv41chat.engine.pack.build import build_drafter, build_trunk, open_pack
from dsv41chat.engine.pack.formats import identify
from dsv41chat.engine.verify import verify_full
from dsv41chat.nano import embedded_pack
from tests.engine.test_convert import source


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bank") / "trunk"
    convert_pack(plan_conversion(embedded_pack(), folder, "mixed-4_8", drafter="drop"))
    assert open_pack(folder).found.plan is None
    return folder


@pytest.mark.parametrize("drafter, label", [("exact", "mxfp4"), ("q8", "affine 8 g64")])
def test_a_bank(trunk, drafter, label, tmp_path):
    """The trunk's files are the same files; the new shard is the release's drafter, every value of it where exact."""
    before = {path.name: path.stat().st_mtime_ns for path in trunk.iterdir()}
    target = tmp_path / "with"
    write_bank(plan_bank(trunk, embedded_pack(), target, drafter=drafter))
    pack, release = open_pack(target), open_pack(embedded_pack())
    assert pack.found.fault is None and pack.found.plan.kind == release.found.plan.kind and not pack.notes
    assert all((target / name).samefile(trunk / name) for name in before if name.endswith(".safetensors"))
    assert {path.name: path.stat().st_mtime_ns for path in trunk.iterdir()} == before
    for name, want in release.found.plan.expected.items():
        if want.kind == "linear":
            a, b = (identify(p.index.tensors, name, want.shape) for p in (release, pack))
            assert b.label == (label if ".experts." in name or drafter == "q8" else "bf16")
            if drafter == "exact":
                assert np.array_equal(a.values(), b.values()), name
    built, own = (build_drafter(p, build_trunk(p), rounded=True) for p in (pack, release))
    assert (type(built), built.block, len(built.stages)) == (type(own), own.block, len(own.stages))
    provenance = json.loads((target / "config.json").read_text())["mtp_provenance"]
    assert provenance["source_fingerprint"] == release.fingerprint and {len(f["sha256"]) for f in provenance["files"]} == {64}
    assert list(verify_full(target, done={}))


def test_it_goes_on_after_a_stop(trunk, tmp_path):
    target = tmp_path / "with"
    with pytest.raises(Cancelled):
        write_bank(plan_bank(trunk, embedded_pack(), target), cancel=lambda: True)
    with pytest.raises(PackIncomplete, match="half-converted"):
        open_pack(target)
    write_bank(plan_bank(trunk, embedded_pack(), target))
    assert open_pack(target).found.plan is not None and not list(target.glob("*.tmp"))


def test_what_is_refused(trunk, tmp_path):
    with pytest.raises(PackUnsupported, match="has a drafter already"):
        plan_bank(embedded_pack(), embedded_pack(), tmp_path / "x")
    with pytest.raises(PackIncomplete, match="has no usable drafter"):
        plan_bank(trunk, trunk, tmp_path / "x")
    other = source(tmp_path / "other", "v41")
    with pytest.raises(PackUnsupported, match="are different models: hidden_size"):
        plan_bank(other, embedded_pack(), tmp_path / "x")
    with pytest.raises(PackError, match="is one of the sources"):
        plan_bank(trunk, embedded_pack(), trunk)
    (tmp_path / "full").mkdir()
    os.close(os.open(tmp_path / "full/file", os.O_CREAT))
    with pytest.raises(PackUnsupported, match="is not empty"):
        write_bank(plan_bank(trunk, embedded_pack(), tmp_path / "full"))
