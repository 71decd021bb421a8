"""The engine's promises on a loaded build: they hold, and each planted fault turns the contract red that it breaks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from dsv41chat.bench.eval import contracts
from dsv41chat.bench.eval.contracts import (
    Compared,
    Trace,
    decode_is_prefill,
    drafted_is_plain,
    plain_answer,
    plan,
    resumed_is_uninterrupted,
    rollback,
    same_answer,
)  # fmt: skip
from dsv41chat.bench.eval.selfcheck import evaluate, summary, table
from dsv41chat.engine import open_engine, snapshot
from dsv41chat.engine.draft import verify
from dsv41chat.engine.rows import Rows
from dsv41chat.engine.target import Target
from dsv41chat.nano import embedded_pack
from tests import programs, v41
from tests.bench.eval.test_ladder import KILLING
from tests.drafting import write_with_drafter
from tests.engine.v4 import tiny


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selfcheck")
    tiny.write_pack(folder / "tiny")
    write_with_drafter(folder / "tiny", folder / "v4", "mtp")
    write_with_drafter(v41.PACK, folder / "v41", "dspark")
    found = {name: open_engine(folder / name) for name in ("v41", "v4")} | {"nano": open_engine(embedded_pack())}
    yield found
    for engine in found.values():
        engine.close()


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(contracts, "ANSWER_TOKENS", 20)


def ids_of(engine, count=70):
    return np.random.default_rng(2).integers(3, engine.trunk.config.vocab_size - 1, count).tolist()


def check(engine, folder, count=70):
    """(broken contracts, results by contract) of one check each."""
    ids = ids_of(engine, count)
    found = {
        "decode": decode_is_prefill(engine, ids), "rollback": rollback(engine, ids, 8),
        "drafted": drafted_is_plain(engine, ids, "seeded", "misled", plain_answer(engine, ids, "seeded")),
        "resume": resumed_is_uninterrupted(engine, ids, 51, folder),
    }  # fmt: skip
    return {name for name, result in found.items() if not result["ok"]}, found


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_the_promises_hold(family, engines, tmp_path):
    engine, ids = engines[family], ids_of(engines[family])
    broken, found = check(engine, tmp_path)
    assert not broken, found
    assert found["decode"]["max_abs"] == found["rollback"]["max_abs"] == found["resume"]["max_abs"] == 0 and found["decode"]["rows"] >= 48
    for name, mode in (("greedy", "adaptive"), ("seeded", contracts._modes(engine)[-2])):
        result = drafted_is_plain(engine, ids, name, mode, plain_answer(engine, ids, name))
        assert result["ok"] and result["tokens"] == 20, (name, mode, result)


def one_short(monkeypatch):
    """Calls of one row do not see the group that closes at their row."""
    length = Rows.length
    monkeypatch.setattr(Rows, "length", lambda self, ratio: length(self, ratio) - (1 if self.n == 1 else 0))


def keeps_one_more(monkeypatch):
    """A cut round leaves the first rejected row in the lane."""

    def commit(self, trial, keep):
        self._open = None
        self.lane.n += min(trial.count, keep + 1)
        del self.lane.ids[self.lane.n :]

    monkeypatch.setattr(Target, "commit", commit)


def forgets_a_ring(monkeypatch):
    """A restored state has lost the window rows of one layer."""
    restore = snapshot.restore

    def lossy(session, *words):
        restore(session, *words)
        lane = session.target.lane
        lane.buffers["window.2"] = lane.buffers["window.2"] * 0  # of MLX or numpy, as the route keeps it

    monkeypatch.setattr(snapshot, "restore", lossy)


def believes_its_drafter(monkeypatch):
    """The second guess of a round is taken without a look."""
    walk = verify._walk

    def credulous(target, logits, n, guesses, select, emit):
        chosen = lambda row, position: guesses[1] if len(guesses) > 1 and position == n + 2 else select(row, position)
        return walk(target, logits, n, guesses, chosen, emit)

    monkeypatch.setattr(verify, "_walk", credulous)


@pytest.mark.parametrize("family", ["v41", "v4"])
@pytest.mark.parametrize(
    "fault, must, may",
    [
        (one_short, "decode", {"drafted"}), (keeps_one_more, "rollback", {"drafted"}), (forgets_a_ring, "resume", set()),
        (believes_its_drafter, "drafted", set()),
    ],
)  # fmt: skip
def test_a_fault_turns_its_contract_red(fault, must, may, family, engines, tmp_path, monkeypatch):
    fault(monkeypatch)
    broken, found = check(engines[family], tmp_path)
    assert must in broken and broken <= {must} | may, found
    checks = [{"name": name, "contract": contracts.CONTRACTS[name], "what": "all"} | result for name, result in found.items()]
    result = evaluate(checks) | {"dtype": "float32", "row_invariant": True, "drafter": "none"}
    assert not result["ok"] and contracts.CONTRACTS[must] in result["broken"] and contracts.CONTRACTS[must] in summary(result)
    assert "BROKEN" in table({"result": result})


def test_a_state_that_does_not_come_back_is_a_break(engines, tmp_path, monkeypatch):
    from dsv41chat.ui.states import States

    monkeypatch.setattr(States, "keep", lambda self, session, kind, turn: None)
    result = resumed_is_uninterrupted(engines["v4"], ids_of(engines["v4"]), 40, tmp_path)
    assert not result["ok"] and "was not found again" in result["note"]


def test_near_ties_and_flips_come_with_both_logits():
    first = np.array([[0, 3, 2.9995, 1], [5, 1, 0, 0], [1, 2, 0, 0]], np.float32)
    second = np.array([[0, 2.9999, 3, 1], [5, 1, 0, 0], [1, 2, 0, 0]], np.float32)
    exact, loose = Compared(None), Compared(1e-3)
    for compared in (exact, loose):
        compared.add(first, second, 40)
    assert (exact.far, loose.far) == (1, 0) and exact.near_ties == loose.near_ties == 1
    (flip,) = loose.flips
    assert flip == {"position": 40, "ids": [1, 2], "first": [3.0, 2.9995], "second": [2.9999, 3.0]} and loose.verdict()["ok"]
    loose.add(first + 1, second, 50)
    assert loose.far == 3 and not loose.verdict()["ok"]
    # One row may be further away than all of them together.
    pooled, one = Compared(0.05), np.eye(40, dtype=np.float32)
    pooled.add(one, one + 0.15 * np.eye(40, k=1, dtype=np.float32) * (np.arange(40) == 7)[:, None], 0)
    assert pooled.verdict()["ok"] and pooled.verdict()["relative_l2"] == 0.0237
    pooled.add(one, 1.1 * one, 40)
    assert not pooled.far and not pooled.verdict()["ok"] and not Compared(None).verdict(state_equal=False)["ok"]
    rows = [{9: first[0], 10: first[1]}, {9: first[0], 10: np.array([1, 5, 0, 0], np.float32)}]
    result = same_answer(Trace([1, 0], rows[0]), Trace([1, 1], rows[1]), 9)
    assert not result["ok"] and result["tokens"] == 1 and result["near_ties"] == 1 and not result["near_tie"]
    assert result["flips"] == [{"position": 10, "ids": [0, 1], "first": [5.0, 1.0], "second": [1.0, 5.0]}]


def test_what_is_planned_for_the_embedded_model(engines):
    jobs = [(contract, what) for contract, what, _ in plan(engines["nano"], 80)]
    assert jobs[:2] == [("decode", "80 tokens"), ("rollback", "up to 6 rows")] and [what for contract, what in jobs if contract == "resume"] == [
        "after 37 tokens", "after 41 tokens", "after 79 tokens",
    ]  # fmt: skip
    modes = ["adaptive", "depth 1", "depth 5", "misled"]
    assert [what for contract, what in jobs if contract == "drafted"] == [f"{name}, {mode}" for name in ("greedy", "seeded") for mode in modes]
    ids = contracts.text(engines["nano"], 80)
    assert len(ids) == 80 and len(set(ids)) > 30


SHORT = """
from dsv41chat.bench.eval import contracts
contracts.ANSWER_TOKENS = 6
contracts._modes = lambda engine: ["adaptive", "misled"]
"""


@pytest.mark.usefixtures("shared_weights")
def test_the_command(program, tmp_path, monkeypatch):
    """Exit 4 and the contract by name where a fault is planted; killed and run again, the same numbers."""
    monkeypatch.setattr(contracts, "ANSWER_TOKENS", 6)
    monkeypatch.setattr(contracts, "_modes", lambda engine: ["adaptive", "misled"])
    words = ["eval", "selfcheck", "nano", "--tokens", "64", "--dtype", "float32", "--json"]
    whole = program(*words, "--fresh", "--output", str(tmp_path / "receipt.json"), real=True)
    assert json.loads((tmp_path / "receipt.json").read_text())["arm"] == "selfcheck"
    assert whole.code == 0 and whole.object["ok"] and len(whole.object["checks"]) == 9 and whole.object["row_invariant"], whole.err
    command = [sys.executable, "-c", SHORT + KILLING, "6", *words, "--data-dir", str(tmp_path / "killed")]
    assert subprocess.run(command, env=programs.environment(), capture_output=True, timeout=300).returncode == -signal.SIGKILL
    again = program.at(tmp_path / "killed")(*words, real=True)
    assert "going on where an earlier run was stopped" in again.err and again.out == whole.out
    receipt = json.loads(next(program.data.rglob("selfcheck-*.json")).read_text())
    assert receipt["summary"].startswith("selfcheck: 9 checks hold") and receipt["short"] == "selfcheck ok" and receipt["result"]["ok"]
    assert program(*words[:3], "--tokens", "9000", real=True).code == 2
    commit = Target.commit
    monkeypatch.setattr(Target, "commit", lambda self, trial, keep: commit(self, trial, min(trial.count, keep + 1)))
    monkeypatch.setattr(contracts, "_modes", lambda engine: ["adaptive"])
    faulty = program.at(tmp_path / "faulty")(*words, real=True)
    assert faulty.code == 4 and "nano breaks rejected rows never happened" in faulty.err
    assert "rejected rows never happened" in faulty.object["broken"]
