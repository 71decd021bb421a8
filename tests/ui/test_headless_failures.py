"""Scripted mode: what goes wrong, with which words and which exit code (spec: app, section 8.3)."""

from __future__ import annotations

import os

import pytest

from dsv41chat.engine.errors import DoesNotFit, EngramReadError
from dsv41chat.store import Store
from tests.ui.fakes import HELLO, Script

# failures ----------------------------------------------------------------------------------------------------------------


def test_missing_build_is_one_object_and_exit_4(program):
    result = program("--json", "-m", "nothing", "hi")
    assert result.code == 4 and result.object["code"] == "build_missing" and result.object["type"] == "error"
    stream = program("--stream-json", "-m", "nothing", "hi")
    assert [e["type"] for e in stream.events][0] == "start" and [e["type"] for e in stream.events][-1] == "error"
    text = program("--headless", "-m", "nothing", "hi")
    assert text.out == "" and "models list" in text.err


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (EngramReadError("row 5 of file x"), 4, "build_damaged"),
        (MemoryError("4 GB"), 5, "out_of_memory"),
        (ValueError("a surprise"), 1, "internal"),
    ],
)
def test_an_error_while_answering_keeps_the_text(program, error, code, name):
    result = program("--json", "hi", "--effort", "off", script=Script(error=error, error_at=5))
    assert (result.code, result.object["code"], result.object["exit_code"]) == (code, name, code)
    assert result.object["partial"] == {"text": "Hello", "thinking": ""}
    with Store.open(program.data, readonly=True) as store:
        leaf = store.message(store.conversation(result.object["conversation"]).leaf_id)
        assert (leaf.text, leaf.state) == ("Hello", "error")


def test_an_error_before_the_first_token_leaves_no_answer(program):
    result = program("--json", "hi", script=Script(error=EngramReadError("x"), error_at=0))
    assert result.object["partial"] is None
    with Store.open(program.data, readonly=True) as store:
        assert [m.role for m in store.tree(result.object["conversation"])] == ["user"]


def test_does_not_fit(program):
    result = program("--json", "hi", script=Script(load_error=DoesNotFit("needs 197 GB", hint="--context 32768")))
    assert (result.code, result.object["code"], result.object["hint"]) == (5, "does_not_fit", "--context 32768")
    with Store.open(program.data, readonly=True) as store:
        assert [m.text for m in store.tree(result.object["conversation"])] == ["hi"]


def test_context_full_before_any_engine_work(program):
    script = Script(context_limit=100)
    result = program("--json", "x" * 200, script=script)
    assert (result.code, result.object["code"]) == (7, "context_full") and script.prompts == []
    assert "100" in result.object["message"] and result.object["hint"].startswith("a shorter text"), "the build holds no more"
    more = program("--json", "-c", "y" * 20, script=script)
    assert more.code == 7 and more.object["hint"].startswith("a new conversation"), "this one holds an earlier message"
    less = program("--json", "--context", "90", "x" * 200, script=script)
    assert less.code == 7 and less.object["hint"].startswith("--context with a larger number, ")


def test_a_context_that_the_build_does_not_have(program):
    result = program("--json", "--context", "8193", "hi")
    assert (result.code, result.object["code"], result.object["conversation"]) == (2, "usage", None)
    assert "8,192" in result.object["message"] and result.object["hint"] == "--context 8192"
    with Store.open(program.data, readonly=True) as store:
        assert store.last_conversation() is None
    assert program("--json", "--context", "8192", "hi").code == 0


def test_no_tokenizer(program):
    result = program("--json", "hi", script=Script(tokenizer=None))
    assert (result.code, result.object["code"]) == (4, "build_incomplete")


def test_config_errors(program, tmp_path, monkeypatch):
    path = tmp_path / "c.toml"
    path.write_text("[chat]\ntemperature = 'hot'\n")
    result = program("--json", "--config", str(path), "hi")
    assert (result.code, result.object["code"]) == (3, "config") and "line 2" in result.object["message"]
    assert program("--json", "--config", str(tmp_path / "none.toml"), "hi").code == 3
    monkeypatch.setenv("DSV41CHAT_CHAT_TOP_P", "2")
    assert program("--json", "hi").code == 3


def test_settings_warnings_reach_scripts(program, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[chat]\ntemprature = 1.0\n")
    result = program("--stream-json", "--config", str(path), "hi")
    (warning,) = result.of("warning")
    assert "chat.temperature" in warning["message"] and "chat.temperature" in result.err


def test_store_failure(program):
    program.data.mkdir()
    (program.data / "chat.db").write_bytes(b"not a database, certainly" * 100)
    result = program("--json", "hi")
    assert (result.code, result.object["code"]) == (8, "store")


def test_no_back_end_names_the_install_command(program, monkeypatch):
    from dsv41chat.engine import backend

    monkeypatch.setitem(__import__("sys").modules, "mlx.core", None)
    result = program("--json", "hi", real=True)
    assert (result.code, result.object["code"]) == (4, "build_unsupported") and backend.install_command() in result.object["message"]
    assert "\n" not in result.object["message"]
    text = program("--headless", "hi", real=True)
    assert text.out == "" and text.code == 4 and "pip install" in text.err.splitlines()[-1]


USAGE = [
    ["--temprature", "1", "hi"], ["--temperature", "-1", "hi"], ["--temperature", "hot", "hi"], ["--top-p", "0", "hi"], ["--top-k", "1.5", "hi"],
    ["--seed", "-1", "hi"], ["--max-tokens", "0", "hi"], ["--effort", "most", "hi"], ["--draft", "x", "hi"], ["--context", "0", "hi"],
    ["--stop", "", "hi"], ["--timeout", "0", "hi"], ["two", "prompts"], ["-c", "--resume", "abcd", "hi"], ["--engram", "disk", "hi"],
    ["--json", "--no-stream", "hi"], ["--json", "--extract", "--", "hi"], ["--stream-json", "--show-thinking", "hi"],
    ["--json", "--stream-json", "hi"],
    ["--pick", "--headless", "hi"], ["--theme", "dark", "--json", "hi"], ["--save", "hi"], ["--batch-output", "x", "hi"],
    ["--quiet", "--verbose", "hi"], ["-s", "a", "--system-file", "b", "hi"], ["--load-only", "--dry-run"], ["--readonly", "--json", "hi"],
]  # fmt: skip


@pytest.mark.parametrize("argv", USAGE, ids=" ".join)
def test_unusable_options_exit_2_with_a_reason(program, argv):
    result = program("--headless", *argv)
    assert result.code == 2
    if "--json" in argv or "--stream-json" in argv:
        assert result.events[-1]["code"] == "usage" and result.events[-1]["exit_code"] == 2
    else:
        assert result.out == "" and result.err.startswith("dsv41chat: ")


def test_unknown_options_name_near_ones(program):
    assert "--temperature" in program("--headless", "--temprature", "1", "hi").err
    assert program("--headless", "hi", "--", "--not-an-option").code == 2
    assert program("--headless", "--", "--not-an-option").code == 0


def test_a_prompt_that_reads_like_a_command(program):
    assert program("--headless", "-p", "models").out == HELLO + "\n"
    assert program("--headless", "--", "models").out == HELLO + "\n"
    assert "not available" in program("serve").err


def test_options_may_stand_anywhere(program):
    assert program("hi", "--headless").code == program("--headless", "hi").code == program("--seed", "3", "hi", "--headless").code == 0


def test_first_start_names_the_embedded_model_once(program):
    first, second = program("--headless", "hi"), program("--headless", "hi")
    assert "models add" in first.err and "models add" not in second.err and first.out == HELLO + "\n"


def test_an_interrupted_answer_is_announced_at_the_next_start(program):
    from tests.ui.program import child

    dying = child(program.data, ["--stream-json", "--effort", "off", "hi"], {"answer": "word " * 200, "delay_s": 0.005})
    while b'"delta"' not in dying.stdout.readline():
        assert dying.poll() is None
    dying.kill()
    dying.wait()
    result = program("--stream-json", "next")
    assert "interrupted" in result.err and [w["code"] for w in result.of("warning")] == ["interrupted"]
    assert "interrupted" not in program("--headless", "once more").err


def test_a_build_that_is_not_there_leaves_no_conversation(program, monkeypatch):
    for words in (["--headless"], ["--json"], ["--stream-json"], ["--conversation", "a title", "--json"]):
        result = program(*words, "-m", "nosuch", "hi")
        assert result.code == 4 and "kept" not in result.err
    assert program("conversations", "list", "--json").object == []
    one = program("--json", "hi").object["conversation"]
    assert program("--json", "-c", "-m", "nosuch", "kept anyway").object["conversation"] == one
    with Store.open(program.data, readonly=True) as store:
        assert [m.text for m in store.tree(one) if m.role == "user"] == ["hi", "kept anyway"]
    assert program("--json", "-c", "--fork", "-m", "nosuch", "hi").code == 4
    assert [row["id"] for row in program("conversations", "list", "--json").object] == [one], "nor a copy"


def test_a_route_that_this_machine_does_not_have_leaves_no_conversation(program, monkeypatch, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[engine]\nroutes = "cuda"\n')
    other = ["--config", str(path)]
    result = program("--json", *other, "hi")
    assert (result.code, result.object["code"], result.object["conversation"]) == (4, "build_unsupported", None)
    assert result.object["hint"] == f"dsv41chat config unset engine.routes --config {path}" and "this device is cpu" in result.object["message"]
    loading = program("--headless", "--load-only", *other, real=True)
    assert loading.code == 4 and f"Try: dsv41chat config unset engine.routes --config {path}" in loading.err
    monkeypatch.setenv("DSV41CHAT_ENGINE_ROUTES", "cuda")
    assert program("--json", "hi").object["hint"] == "unset DSV41CHAT_ENGINE_ROUTES"
    monkeypatch.delenv("DSV41CHAT_ENGINE_ROUTES")
    assert program("conversations", "list", "--json").object == []
    said = program("config", "set", "engine.routes", "metal", *other)
    assert said.code == 0 and "no build can be loaded with it on this machine: the route metal is for metal" in said.err
    assert "warning" not in program("config", "set", "engine.routes", "blas", *other).err


def test_a_new_conversation_that_got_no_answer_is_named(program):
    long = program("--headless", "x" * 200, script=Script(context_limit=100))
    (said,) = [line for line in long.err.splitlines() if "kept unanswered" in line]
    (row,) = program("conversations", "list", "--json").object
    assert long.code == 7 and f"conversation {row['id']}" in said and f"conversations delete {row['id']}" in said
    late = program("--json", "--timeout", "0.01", "hi", script=Script(load_s=0.2))
    assert late.code == 124 and "kept unanswered" in late.err
    assert "kept unanswered" not in program("--json", "-c", "x" * 200, script=Script(context_limit=100)).err


def test_an_answer_that_is_not_whole_says_so(program):
    for words, said in ((["--max-tokens", "5"], "cut after 5 tokens: the length limit (--max-tokens)"), ([], "")):
        result = program("--headless", "--effort", "off", *words, "hi")
        assert (said in result.err) and ("warning" in result.err) is bool(said)
    assert "repeats itself" in program("--headless", "hi", script=Script(finish="loop")).err
    assert "is full (--context)" in program("--headless", "--effort", "off", "hi", script=Script("x" * 200, context_limit=100)).err
    last = program("conversations", "list", "--json").object[0]["id"]
    for words in ([], ["--tree"]):
        assert "(context full)" in program("conversations", "show", last, *words).out, "the same reason afterwards"
    assert "cut after" not in program("-q", "--headless", "--max-tokens", "5", "hi").err
    assert "cut after" not in program("--json", "--max-tokens", "5", "hi").err, "scripts read finish"


def test_an_answer_that_changes_the_default_build_says_so(program, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    result = program("--headless", "-m", str(tmp_path / "other"), "hi")
    assert "other now answers new conversations by default, not nano" in result.err
    assert "by default" not in program("--headless", "-m", "other", "hi").err + program("--headless", "hi").err
    assert "nano now answers" in program("--headless", "-m", "nano", "hi").err


def test_a_default_build_that_is_not_there_is_told_and_stays_the_default(program, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    first = program("--json", "-m", str(tmp_path / "other"), "hi").object["conversation"]
    (tmp_path / "other").rename(tmp_path / "unplugged")
    for words in (["hi"], ["--resume", first, "go on"]):
        result = program("--headless", *words)
        assert result.code == 0 and "other is not where it was; nano answers" in result.err
    assert program("--json", "hi").object["build"]["name"] == "nano"
    (tmp_path / "unplugged").rename(tmp_path / "other")
    back = program("--json", "hi")
    assert back.object["build"]["name"] == "other" and "not where it was" not in back.err


@pytest.mark.parametrize("argv", [["--headless", "-p", "hi"], ["--json", "hi"], ["conversations", "list"], ["models", "list", "--json"]])
def test_a_closed_stdout_is_refused_before_anything_runs(program, monkeypatch, argv):
    import io
    import sys

    from dsv41chat import cli

    err = io.StringIO()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", err)
    assert cli.main(["--data-dir", str(program.data), *argv]).code == 2
    assert "Standard output is closed" in err.getvalue() and not (program.data / "chat.db").exists()


def test_what_shares_a_terminal_begins_its_own_line(monkeypatch):
    import io
    import sys

    from dsv41chat.engine.events import Piece
    from dsv41chat.ui.output import Out, Stderr, TextSink

    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    def written(stderr_is_file=False):
        both = Terminal(io.BytesIO(), encoding="utf-8", write_through=True)
        monkeypatch.setattr(sys, "stdout", both)
        log = io.StringIO()
        stderr = Stderr(color=False, stream=log if stderr_is_file else both)
        sink = TextSink(Out(), stderr, lambda: 0.0, stream=True, show_thinking=True, extract=None)
        for event in (Piece("thinking", "hm", (1,)), Piece("answer", "one ", (2,)), Piece("answer", "two", (3,))):
            sink.event(event)
        stderr.line("warning: first")
        sink.event(Piece("answer", "three", (4,)))
        sink.turn_done()
        stderr.line("end")
        return both.buffer.getvalue().decode().replace("\r", ""), log.getvalue()

    assert written()[0] == "hm\none two\nwarning: first\nthree\nend\n"
    assert written(stderr_is_file=True) == ("one twothree\n", "hm\nwarning: first\nend\n")


@pytest.mark.parametrize("one", [True, False])
def test_what_shares_a_file_or_a_pipe_begins_its_own_line(monkeypatch, tmp_path, one):
    """`>log 2>&1`: the lines for people meet the answer there; in files of their own they do not."""
    import io
    import sys

    from dsv41chat.engine.events import Piece
    from dsv41chat.ui.output import Out, Stderr, TextSink

    file = io.TextIOWrapper((tmp_path / "out").open("wb", buffering=0), write_through=True)
    same = os.fdopen(os.dup(file.fileno()), "wb", buffering=0) if one else (tmp_path / "err").open("wb", buffering=0)
    monkeypatch.setattr(sys, "stdout", file)
    stderr = Stderr(color=False, stream=io.TextIOWrapper(same, write_through=True))
    sink = TextSink(Out(), stderr, lambda: 0.0, stream=True, show_thinking=True, extract=None)
    sink.event(Piece("thinking", "hm", (1,)))
    sink.event(Piece("answer", "The", (2,)))
    stderr.line("warning: first")
    sink.event(Piece("answer", " end", (3,)))
    stderr.line("warning: second")
    sink.turn_done()
    stderr.line("resume")
    written = (tmp_path / "out").read_text()
    if one:
        assert written == "hm\nThe\nwarning: first\n end\nwarning: second\nresume\n"
    else:
        assert written == "The end\n" and (tmp_path / "err").read_text() == "hm\nwarning: first\nwarning: second\nresume\n"
