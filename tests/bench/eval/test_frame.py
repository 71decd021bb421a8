"""Runs that go on after a kill, their keys and locks, receipts, and the page made of them."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from dsv41chat.bench.eval import ARMS, arm, ppl, selfcheck
from dsv41chat.bench.eval.frame import STALE_S, Run, builds, command, numeric_options
from dsv41chat.bench.eval.report import newest
from dsv41chat.cli_commands import Context
from dsv41chat.settings import load_settings
from dsv41chat.store.receipts import Receipts
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.output import Stderr, UsageError
from tests.ui.fakes import fake_host


class Killed(Exception):
    """Stands for a process that is gone: nothing after it runs."""


@pytest.fixture
def context(tmp_path):
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "config.json").write_text("{}")
    settings = load_settings(data_dir=tmp_path / "data")
    made = Context(None, settings, Stderr(-1), lambda settings, store: EngineHost(settings, store, **fake_host(folder=pack)))
    yield made
    made.close()


def measure(context, parameters, die_after=None, fresh=False):
    """Square the numbers of `parameters`, one unit of work each; (result, units of work done by this process)."""
    worked = []
    with Run(context, "ppl", builds(context, ["nano"]), parameters, fresh=fresh) as run:
        for n in range(run.state.get("done", 0), parameters["n"]):
            worked.append(n)
            run.state.setdefault("squares", []).append(n * n)
            run.state["done"] = n + 1
            run.save()
            if len(worked) == die_after:
                raise Killed
        receipt = run.finish({"squares": run.state["squares"]}, summary="squares", command=command("ppl", "nano", "--n", parameters["n"]))
    return receipt, worked


def test_a_stopped_run_goes_on_and_gives_the_same_result(context):
    whole, worked = measure(context, {"n": 6})
    assert worked == list(range(6))
    for stop in (1, 2):
        with pytest.raises(Killed):
            measure(context, {"n": 6}, die_after=stop)
    again, worked = measure(context, {"n": 6})
    assert worked == [3, 4, 5] and again["result"] == whole["result"]
    with pytest.raises(Killed):
        measure(context, {"n": 6}, die_after=3)
    assert measure(context, {"n": 7})[1] == list(range(7)), "other parameters are another run"
    assert measure(context, {"n": 6}, fresh=True)[1] == list(range(6)), "--fresh forgets"
    assert not list((context.settings.paths.state / "eval").iterdir()), "what is finished leaves no state"


def test_a_half_written_state_is_never_read(context):
    run = Run(context, "ppl", builds(context, ["nano"]), {})
    with run:
        run.state["done"] = 1
        run.save()
        (run.folder / ".state.json.abcd").write_text('{"sec')  # what a kill inside a write leaves
    with Run(context, "ppl", builds(context, ["nano"]), {}) as again:
        assert again.state == {"done": 1}
        again.write("rows.bin", lambda path: path.write_bytes(b"rows"))
        assert sorted(p.name for p in again.folder.iterdir() if not p.name.startswith(".")) == ["lock", "rows.bin", "state.json"]


def test_two_processes_do_not_share_a_run(context):
    with Run(context, "ppl", builds(context, ["nano"]), {}):
        with pytest.raises(UsageError, match="Another process"), Run(context, "ppl", builds(context, ["nano"]), {}):
            pass
        with Run(context, "ppl", builds(context, ["nano"]), {"window": 1}):
            pass


def test_the_key_is_made_of_all_that_can_change_a_figure(context):
    build = builds(context, ["nano"])
    keys = {Run(context, *words).key for words in (("ppl", build, {}), ("ladder", build, {}), ("ppl", build * 2, {}), ("ppl", build, {"a": 1}))}
    run = Run(context, "ppl", build, {})
    assert len(keys | {run.key}) == 4 and set(numeric_options(context)) == {"cache_quant", "linear_input_fp8", "qat_sim", "exact", "routes"}
    assert run.environment["device"] == "cpu" and {"commit", "versions"} <= set(run.environment)


def test_states_that_nobody_went_on_with_go(context):
    folder = context.settings.paths.state / "eval"
    for name, age in (("ppl-old", STALE_S + 60), ("ppl-new", 60)):
        (folder / name).mkdir(parents=True)
        (folder / name / "state.json").write_text("{}")
        os.utime(folder / name / "state.json", (time.time() - age,) * 2)
    with Run(context, "ppl", builds(context, ["nano"]), {}):
        assert not (folder / "ppl-old").exists() and (folder / "ppl-new").exists()


def test_receipts_name_what_was_measured_and_no_folder(context, tmp_path):
    receipt, _ = measure(context, {"n": 2})
    (kept,) = Receipts(context.settings.paths.state).all("f" * 64)
    assert kept == receipt and str(tmp_path) not in json.dumps(kept)
    assert kept["build"]["fingerprint"] == "f" * 64 and kept["command"] == "dsv41chat eval ppl nano --n 2" and kept["parameters"] == {"n": 2}
    assert command("ladder", tmp_path / "a" / "b", "--against", "/x/y.txt") == "dsv41chat eval ladder b --against y.txt"


def test_receipts_of_a_build_newest_first_and_damaged_ones_left_out(tmp_path):
    store = Receipts(tmp_path)
    assert store.all("ab") == [] and store.last("ab", "ppl") is None
    for number, (arm_, key) in enumerate((("ppl", "a"), ("ladder", "b"), ("ppl", "c"))):
        store.put("ab", arm_, key, {"arm": arm_, "summary": key * 9, "short": key, "time": number})
    (tmp_path / "receipts" / "ab" / "ppl-x.json").write_text("{")
    (tmp_path / "receipts" / "ab" / "ppl-y.json").write_text('{"arm": "ppl"}')
    assert [r["short"] for r in store.all("ab")] == ["c", "b", "a"] and store.last("ab", "ppl")["short"] == "c"
    assert store.figures("ab") == {"ppl": {"summary": "c" * 9, "short": "c", "time": 2}} and store.figures("cd") == {}
    with pytest.raises(ValueError):
        store.all("../ab")


def test_a_page_keeps_the_newest_of_equal_measurements():
    def receipt(time, window, against="x"):
        return {"arm": "ppl", "time": time, "parameters": {"window": window}, "builds": [{"fingerprint": against}]}

    rows = [receipt(3, 64), receipt(2, 128), receipt(1, 64), receipt(0, 64, "y")]
    assert newest(rows) == [rows[0], rows[1], rows[3]]


def test_nothing_measured_is_said(program):
    done = program("eval", "report", "nano", "--json")
    assert done.code == done.object["exit_code"] == 2 and done.object["code"] == "usage"
    assert "Nothing has been measured of nano" in done.object["message"] and "dsv41chat eval selfcheck nano" in done.object["hint"]
    assert program("eval", "report").code == 2 and program("eval", "rep").code == 2


def test_every_arm_says_what_it_is(program):
    help = program("completion", "words", "--", "eval", "").out.split()
    assert help == sorted(ARMS)
    for name in ARMS:
        module = arm(name)
        assert module.HELP and module.EXAMPLE.startswith(name) and callable(module.run)
        options = program("completion", "words", "--", "eval", name, "--").out.split()
        assert "--json" in options and "--output" in options


def cells(line: str) -> list[str]:
    """The cells of a line of a table, as Markdown divides it."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_a_bar_in_a_cell_begins_no_other_cell():
    check = {
        "contract": "decode", "what": "a|b", "ok": True, "rows": 96, "max_abs": 0.0, "near_ties": 0, "flipped": 0, "flips": [],
    }  # fmt: skip
    result = {"checks": [check], "row_invariant": True, "dtype": "float32", "drafter": "none"}
    table = [line for line in selfcheck.markdown({"result": result}).splitlines() if line.startswith("|")]
    assert [len(cells(line)) for line in table] == [4, 4, 4]
    assert cells(table[2]) == ["decode", "a|b", "ok", "96 rows, max |difference| 0, 0 near-ties"]
    build = {"name": "one|two", "fingerprint": "f", "ppl": 2.0, "low": 1.9, "high": 2.1}
    corpus = {"name": "c", "tokens": 1, "windows": 1, "skipped": 0, "too_long": 0}
    page = ppl.markdown({"result": {"builds": [build], "pairs": [], "corpus": corpus, "notes": []}}).splitlines()
    assert cells(page[0])[2] == "by one|two [95 %]" and [cells(page[2])[0], len(cells(page[2]))] == ["one|two", 3]


@pytest.mark.parametrize("name", [name for name in ARMS if name != "report"])
def test_no_arm_joins_the_cells_of_a_table_itself(name):
    source = Path(arm(name).__file__).read_text("utf-8")
    assert "markdown_table(" in source and not re.search(r""" \| (['"])\.join""", source)
