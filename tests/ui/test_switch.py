"""From one real build to another in one conversation, across families and formats; what does not fit is refused with its sum."""

from __future__ import annotations

import shutil

import pytest

from dsv41chat.engine import engine
from dsv41chat.engine.device import Machine
from dsv41chat.engine.errors import DoesNotFit, PackDamaged
from dsv41chat.nano import embedded_pack
from dsv41chat.store import Store
from dsv41chat.ui.host import EngineHost
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import CASES

SHORT = ("--effort", "off", "--max-tokens", "4", "--temperature", "0")
CONFIG = p.V4 | {"vocab_size": 4096, "sliding_window": 64}


@pytest.fixture(scope="module")
def v4(tmp_path_factory):
    """A V4 build with affine matrices and the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("builds") / "V4-tiny"
    parts, _ = p.encode(p.tensors("v4", CONFIG), CASES["affine-4"]["v4"])
    p.write(folder, CONFIG, p.flat(parts, stacked=True), family="v4")
    shutil.copy(embedded_pack() / "tokenizer.json", folder)
    return folder


def small(available: int) -> Machine:
    return Machine("cpu", 2 * 10**9, available, 2 * 10**9, "memory")


def test_to_another_family_and_back(program, v4):
    """The history stays, each answer records its build, and the first build answers as if nothing had happened."""
    first = program("--json", *SHORT, "hi", real=True).object
    words = ["--json", "--resume", first["conversation"], *SHORT]
    second = program(*words, "-m", str(v4), "and now", real=True).object
    third = program(*words, "-m", "nano", "back again", real=True).object
    assert [o["build"]["family"] for o in (first, second, third)] == ["v41", "v4", "v41"]
    assert third["build"]["fingerprint"] == first["build"]["fingerprint"] != second["build"]["fingerprint"]
    with Store.open(program.data, readonly=True) as store:
        path = store.path_to(third["message_id"])
    assert [m.text for m in path if m.role == "user"] == ["hi", "and now", "back again"]
    assert [m.build_name for m in path if m.role == "assistant"] == ["nano", "V4-tiny", "nano"]


def test_a_build_that_does_not_fit(program, v4, monkeypatch):
    """Exit 5 with the whole sum and a remedy; --force goes on; the conversation stays usable."""
    first = program("--json", *SHORT, "hi", real=True).object
    monkeypatch.setattr(engine, "read_machine", lambda: small(50 << 20))
    words = ["--json", "--resume", first["conversation"], "-m", str(v4), *SHORT]
    refused = program(*words, "still there?", real=True)
    o = refused.object
    assert refused.code == 5 and (o["code"], o["exit_code"]) == ("does_not_fit", 5)
    assert "in use now" in o["message"] and "weights" in o["message"] and "of 2.0 GB" in o["message"] and o["hint"]
    rows = {row["name"]: row for row in program("models", "list", "--json", real=True).object}
    assert rows["nano"]["fits"] == "no" and rows["nano"]["admitted_context"] == 0
    forced = program(*words, "--force", "and now?", real=True)
    assert forced.code == 0 and forced.object["build"]["name"] == "V4-tiny"
    monkeypatch.undo()
    again = program("--json", "--resume", first["conversation"], "-m", "nano", *SHORT, "on", real=True)
    assert again.code == 0 and again.object["conversation"] == first["conversation"]


def drain(stream) -> list:
    return list(stream)


@pytest.mark.parametrize("fault", ["memory", "damage"])
def test_a_failing_switch_leaves_the_old_build_answering(program, v4, monkeypatch, fault, tmp_path):
    from dsv41chat.settings import load_settings

    host = EngineHost(load_settings(config=None, data_dir=tmp_path), None)
    try:
        nano = host.probe(host.find("nano"))
        drain(host.load(nano))
        broken = tmp_path / "broken"
        shutil.copytree(v4, broken)
        target = host.probe(host.find(str(broken)))
        if fault == "memory":
            real, calls = engine.read_machine, []

            def once():
                calls.append(1)
                return small(50 << 20) if len(calls) == 1 else real()

            monkeypatch.setattr(engine, "read_machine", once)
            kind = DoesNotFit
        else:
            monkeypatch.setattr(engine, "build_drafter", damaged_once(engine.build_drafter))
            kind = PackDamaged
        with pytest.raises(kind):
            drain(host.load(target))
        assert host.view is not None and host.view.name == "nano" and host.engine is not None and host.engine.family == "v41"
    finally:
        host.close()


def damaged_once(real):
    left = [1]

    def build(*args, **options):
        if left:
            left.pop()
            raise PackDamaged("a tensor is not what it was")
        return real(*args, **options)

    return build
