"""From one real build to another in one conversation, across families and formats; what does not fit is refused with its sum."""

from __future__ import annotations

import gc
import re
import shutil
import time
import weakref

import numpy as np
import pytest

from dsv41chat.engine import engine
from dsv41chat.engine.admission import plan_memory
from dsv41chat.engine.device import Machine
from dsv41chat.engine.errors import DoesNotFit, PackDamaged
from dsv41chat.engine.pack.build import open_pack
from dsv41chat.nano import embedded_pack
from dsv41chat.store import Store
from dsv41chat.ui.host import EngineHost
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import CASES, MXFP4
from tests.engine.test_admission import fake_root
from tests.ui.terminal import Terminal

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


@pytest.mark.parametrize("family, keys", [("v4", ["qat_sim"]), ("v41", ["cache_quant", "linear_input_fp8"])])
def test_info_names_the_roundings_that_act_on_a_family(program, v4, family, keys):
    info = program("models", "info", str(v4) if family == "v4" else "nano", "--json", real=True).object
    assert list(info["settings"]) == ["engine.routes", *(f"engine.{key}" for key in keys)] and info["family"] == family


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


def test_under_a_cgroup_limit_the_suggested_context_runs(program, monkeypatch, tmp_path):
    """Exit 5 names a context; with it the same command answers, and the menu has shown it beforehand."""
    plan, read = plan_memory(open_pack(embedded_pack()), routes="auto"), engine.read_machine
    used = 2 * 10**9 - plan.resident - plan.scratch - int(plan.state(5000))
    limits = {"memory.max": 2 * 10**9, "memory.current": used}
    files = {"proc/self/cgroup": "0::/job\n"} | {f"sys/fs/cgroup/job/{name}": f"{value}\n" for name, value in limits.items()}
    root = fake_root(tmp_path / "root", files)
    monkeypatch.setattr(engine, "read_machine", lambda: read(root, "cpu"))
    (row,) = program("models", "list", "--json", real=True).object
    refused = program("--json", "--context", "8192", *SHORT, "hi", real=True)
    assert (refused.code, refused.object["code"]) == (5, "does_not_fit") and "of 2.0 GB" in refused.object["message"]
    context = re.search(r"--context (\d+)", refused.object["hint"])[1]
    assert 4096 <= int(context) == row["admitted_context"] < 8192
    answered = program("--json", "--resume", refused.object["conversation"], "--context", context, *SHORT, "hi again", real=True)
    assert answered.code == 0 and answered.object["usage"]["context_limit"] == int(context)


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


# in a terminal -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(v4, tmp_path):
    """A build whose headers are right and whose weights are not: it is refused while it loads."""
    parts, _ = p.encode(p.tensors("v4", CONFIG), lambda name: MXFP4 if ".ffn.experts." in name else p.plain("BF16"))
    found = p.flat(parts, stacked=True)
    tag, scales = found["layers.1.ffn.experts.w1.scales"]
    found["layers.1.ffn.experts.w1.scales"] = tag, np.full_like(scales, 255)
    folder = p.write(tmp_path / "V4-broken", CONFIG, found, family="v4")
    shutil.copy(v4 / "tokenizer.json", folder)
    return folder


def until(found, timeout_s: float = 120.0):
    """What `found` returns once it is not None."""
    deadline = time.monotonic() + timeout_s
    while (value := found()) is None:
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
    return value


class Screen:
    """The real screen on one conversation, driven by keys; what it did is read from the screen and from the store."""

    def __init__(self, terminal: Terminal, store: Store, builds: tuple[str, ...]):
        self.terminal, self.store, self.builds = terminal, store, builds

    def history(self) -> list:
        last = self.store.last_conversation()
        return self.store.path_to(last.leaf_id) if last is not None and last.leaf_id else []

    def say(self, text: str) -> str:
        """The name of the build that answers, once the turn is over: while it runs the menu reads no headers."""
        self.terminal.type(text)
        self.terminal.wait(f"│ {text}")
        time.sleep(0.2)  # an Enter right behind other keys is taken for a part of a paste
        self.terminal.keys("Enter")

        def answer():
            *_, question, answer = [None, None, *self.history()]
            whole = answer is not None and answer.role == "assistant" and answer.state == "complete" and question.text == text
            return answer.build_name if whole else None

        name = until(answer)
        self.terminal.wait("esc stop", gone=True)
        return name

    def listed(self) -> dict[str, int] | None:
        """Line of each build in the menu; None as long as one of them is not read."""
        lines = self.terminal.screen.splitlines()
        found = {name: n for n, line in enumerate(lines) for name in self.builds if f" {name} " in line and " ctx " in line and "MB" in line}
        return found if len(found) == len(self.builds) else None

    def switch(self, now: str, to: str, said: str) -> str:
        """F2, the row of `to`, Enter; returns the menu as it was shown before the choice."""
        self.terminal.keys("F2")
        line = until(self.listed)
        step = line[to] - line[now]
        self.terminal.keys(*["Down" if step > 0 else "Up"] * abs(step))
        menu = self.terminal.wait("Switching now")
        self.terminal.keys("Enter")
        self.terminal.wait(said)
        return menu


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_on_the_real_screen_there_and_back(program, v4, broken, tmp_path):
    """nano, a V4 build, one that fails to load, nano: the cost is said before, a failure leaves the old build answering, and all of it
    is one conversation."""
    for folder in (v4, broken):
        assert program("models", "add", str(folder), real=True).code == 0
    with Terminal(tmp_path, 110, 40) as terminal, Store.open(program.data, readonly=True) as store:
        terminal.run("-m", "dsv41chat", "--data-dir", str(program.data), *SHORT, "-m", "nano")
        terminal.wait("Ask anything")
        screen = Screen(terminal, store, ("nano", "V4-tiny", "V4-broken"))
        answered = [screen.say("one")]
        menu = screen.switch("nano", "V4-tiny", "V4-tiny answers from now on")
        used = screen.history()[-1].usage["context_used"]
        assert f"Switching now: history {used:,} tokens must be prefilled by the new build" in menu
        answered.append(screen.say("two"))
        screen.switch("V4-tiny", "V4-broken", "V4-broken was not loaded")
        shown = terminal.wait("goes on answering")
        assert "V4-tiny goes on answering" in shown and "NaN" in shown
        answered.append(screen.say("three"))
        screen.switch("V4-tiny", "nano", "nano answers from now on")
        answered.append(screen.say("four"))
        assert answered == ["nano", "V4-tiny", "V4-tiny", "nano"]
        path = screen.history()
        assert [m.text for m in path if m.role == "user"] == ["one", "two", "three", "four"]
        assert len({m.build_fingerprint for m in path if m.role == "assistant"}) == 2
        terminal.keys("C-q")
        terminal.wait("exit=0")


def test_the_build_before_is_gone_when_the_next_is_there(v4, tmp_path):
    """Its weights can be most of the machine's memory."""
    from dsv41chat.settings import load_settings

    host = EngineHost(load_settings(config=None, data_dir=tmp_path), None)
    gc.disable()
    try:
        drain(host.load(host.probe(host.find("nano"))))
        trunk = weakref.ref(host.engine.trunk)
        drain(host.load(host.probe(host.find(str(v4)))))
        assert host.engine.family == "v4" and trunk() is None
    finally:
        gc.enable()
        host.close()
