"""`--batch`: one line out per line in, failures apart, interrupted and resumed (spec: app, section 8.4)."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest

from dsv41chat.cli_options import chat_parser
from dsv41chat.store import Store
from tests.ui.fakes import Script
from tests.ui.program import child

THREE = '{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": 7}\n{"id": "c", "prompt": "three"}\n'


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_three_items_with_a_bad_one(program):
    result = program("--batch", "-", "--seed", "5", stdin=THREE)
    a, b, c = lines(result.out)
    assert result.code == 9 and [row["id"] for row in (a, b, c)] == ["a", "b", "c"] and [row["ok"] for row in (a, b, c)] == [True, False, True]
    assert a["text"] == "Hello from the fake engine." and a["finish"] == "stop" and a["build"]["name"] == "nano" and a["usage"] and a["timing"]
    assert (a["seed"], c["seed"]) == (5, 7) and b["error"]["code"] == "usage" and "prompt must be a text" in b["error"]["message"]
    assert not (program.data / "chat.db").exists()


def test_fields_of_an_item(program, tmp_path):
    script = Script("abcdef", thinking="hm")
    items = [
        {"prompt": "x", "system": "sys", "params": {"max_tokens": 3, "effort": "off", "temperature": 0.5, "seed": 99, "stop": "d"}},
        {"id": 12, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "v"},
                                {"role": "user", "content": "w"}], "params": {"effort": "off", "max-answer-tokens": 2}},
    ]  # fmt: skip
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(item) + "\n\n" for item in items))
    result = program("--batch", str(path), script=script)
    first, second = lines(result.out)
    assert result.code == 0 and (first["id"], first["text"], first["seed"]) == ("1", "abc", 99) and (second["id"], second["text"]) == ("12", "ab")
    calls = script.sessions[0].calls
    assert calls[0].sampling.temperature == 0.5 and calls[0].stop == ("d",)
    assert bytes(i for i in calls[1].prompt.ids if i < 256) == b"suvw"
    assert len(script.sessions) == 1, "one session, so that a shared system prompt is computed once"


def test_a_shared_system_prompt_is_computed_once(program):
    items = "".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(3))
    rows = lines(program("--batch", "-", "-s", "a long system prompt", "--effort", "off", stdin=items).out)
    assert [row["usage"]["cached_tokens"] > 20 for row in rows] == [False, True, True]


@pytest.mark.parametrize("text", ["", "\n\n", '{"id":"a","prompt":"x"}\n{"id":"a","prompt":"y"}\n', '{"prompt":"x"}\n{"id":"1","prompt":"y"}\n'])
def test_usage_errors_before_anything_runs(program, text):
    script = Script()
    result = program("--batch", "-", stdin=text, script=script)
    assert result.code == 2 and result.out == "" and script.sessions == []


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("not json", "Line 1"), ("[1]", "not an object"), ('{"id":"z"}', "prompt or messages"), ('{"prompt":"x","params":{"efort":1}}', "effort"),
        ('{"prompt":"x","params":{"effort":"most"}}', "one of"), ('{"prompt":"  "}', "not empty"), ('{"prompt":"x","extra":1}', "unknown field"),
        ('{"messages":[{"role":"assistant","content":"x"}]}', "last message"), ('{"prompt":"\\ud800"}', "Line 1"),
        ('{"prompt":"x","conversation":"none here"}', "none here"),
    ],
)  # fmt: skip
def test_a_bad_item_is_its_own_line(program, item, said):
    result = program("--batch", "-", stdin=item + "\n")
    (row,) = lines(result.out)
    assert result.code == 9 and not row["ok"] and said in row["error"]["message"]


def test_fail_fast(program):
    assert len(lines(program("--batch", "-", "--fail-fast", stdin=THREE).out)) == 2


def test_save_makes_conversations(program):
    result = program("--batch", "-", "--save", stdin=THREE)
    with Store.open(program.data, readonly=True) as store:
        kept = {row.id for row in store.list_conversations()}
    assert {row["conversation"] for row in lines(result.out) if row["ok"]} == kept and len(kept) == 2


def test_an_item_may_continue_a_conversation(program):
    one = program("--json", "--effort", "off", "first").object["conversation"]
    item = json.dumps({"prompt": "second", "conversation": one}) + "\n"
    script = Script()
    assert program("--batch", "-", stdin=item, script=script).code == 0
    assert b"first" in bytes(i for i in script.sessions[0].calls[0].prompt.ids if i < 256)
    with Store.open(program.data, readonly=True) as store:
        assert len(store.tree(one)) == 2
    assert program("--batch", "-", "--save", stdin=item).code == 0
    with Store.open(program.data, readonly=True) as store:
        assert len(store.tree(one)) == 4


def test_a_build_that_is_not_there_leaves_nothing_behind(program):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    items = "".join(json.dumps(item) + "\n" for item in ({"prompt": "x"}, {"messages": turns}))
    result = program("--batch", "-", "--save", "-m", "nosuch", stdin=items)
    assert result.code == 9 and [row["error"]["code"] for row in lines(result.out)] == ["build_missing"] * 2
    assert program("conversations", "list", "--json").object == []


def test_output_file_and_resume(program, tmp_path):
    path = tmp_path / "out.jsonl"
    result = program("--batch", "-", "--batch-output", str(path), stdin=THREE)
    assert result.code == 9 and result.out == "" and len(lines(path.read_text())) == 3
    assert program("--batch", "-", "--batch-output", str(path), stdin=THREE).code == 2
    path.write_text(path.read_text() + '{"v": 1, "id": "cut')
    script = Script()
    again = program("--batch", "-", "--batch-output", str(path), "--resume-batch", stdin=THREE.replace("7", '"seven"'), script=script)
    rows = lines(path.read_text())
    assert again.code == 0 and len(script.sessions[0].calls) == 1
    assert sorted(row["id"] for row in rows if row["ok"]) == ["a", "b", "c"] and rows[-1]["id"] == "b"
    path.write_text("something else\n")
    assert program("--batch", "-", "--batch-output", str(path), "--resume-batch", stdin=THREE).code == 2
    assert path.read_text() == "something else\n"


def test_interrupted_and_resumed_has_no_duplicates(tmp_path):
    many = 40  # so many that a busy machine does not come to their end before the signal
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": str(i), "prompt": f"q{i}"}) + "\n" for i in range(many)))
    words = ["--batch", str(source), "--batch-output", str(out), "--effort", "off"]
    process = child(tmp_path / "data", words, {"answer": "word " * 40, "delay_s": 0.005}, stderr=subprocess.PIPE)
    while not out.exists() or out.read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=300)[1].decode()
    assert process.returncode == 130
    rows = lines(out.read_text())
    ended = f"batch: 0 of {len(rows) - 1} items failed; 1 was interrupted"
    assert ended + (f"; {many - len(rows)} did not run" if len(rows) < many else "") + "\n" in said
    assert rows[-1]["error"]["code"] == "interrupted" and all(row["ok"] for row in rows[:-1])
    process = child(tmp_path / "data", [*words, "--resume-batch"], {"answer": "short"})
    assert process.wait(300) == 0
    done = [row["id"] for row in lines(out.read_text()) if row["ok"]]
    assert sorted(done, key=int) == [str(i) for i in range(many)]


@pytest.mark.parametrize("argv", [["a prompt"], ["-c"], ["--json"], ["-o", "x"], ["--extract"], ["--strict"], ["-f", "x"], ["--fork"]])
def test_options_that_do_not_go_with_batch(program, argv):
    assert program("--batch", "-", *argv, stdin=THREE).code == 2


def test_what_a_line_may_hold_is_said_where_it_is_wrong(program):
    (row,) = lines(program("--batch", "-", stdin='{"prompt":"x","mesages":[]}\n').out)
    assert "did you mean messages" in row["error"]["message"]
    assert all(name in row["error"]["hint"] for name in ("id", "prompt", "messages", "system", "params", "conversation", "max_tokens"))
    assert '"prompt": "..."' in chat_parser().format_help() and "conversation may be added" in chat_parser().format_help()
    twice = program("--batch", "-", stdin='{"id":"a","prompt":"x"}\n\n{"id":"a","prompt":"y"}\n')
    assert twice.code == 2 and "'a' is there twice, in line 1 and in line 3" in twice.err


def test_the_end_of_a_batch_is_summed_up(program, tmp_path):
    assert "batch: 1 of 3 items failed\n" in program("--batch", "-", stdin=THREE).err
    assert program("-q", "--batch", "-", stdin=THREE).err == ""
    assert "1 of 2 items failed; 1 did not run" in program("--batch", "-", "--fail-fast", stdin=THREE).err
    out = str(tmp_path / "out.jsonl")
    program("--batch", "-", "--batch-output", out, stdin=THREE)
    assert "1 of 1 items failed; 2 were done before" in program("--batch", "-", "--batch-output", out, "--resume-batch", stdin=THREE).err


def test_a_resumed_batch_has_one_line_per_id(program, tmp_path):
    path = tmp_path / "out.jsonl"
    program("--batch", "-", "--batch-output", str(path), stdin=THREE)
    path.chmod(0o640)
    for _ in range(2):
        again = program("--batch", "-", "--batch-output", str(path), "--resume-batch", stdin=THREE)
        assert again.code == 9 and sorted(row["id"] for row in lines(path.read_text())) == ["a", "b", "c"]
    assert path.stat().st_mode & 0o777 == 0o640 and [p.name for p in tmp_path.glob(".out*")] == []
    other = '{"id": "d", "prompt": "four"}\n'
    assert program("--batch", "-", "--batch-output", str(path), "--resume-batch", stdin=other).code == 0
    assert [row["id"] for row in lines(path.read_text())] == ["a", "c", "b", "d"], "what this batch does not run stays"
