"""Scripted mode: what goes to stdout, what the options do, which exit code comes out (spec: app, sections 7 and 8)."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from dsv41chat.engine.errors import DoesNotFit, EngramReadError, PackDamaged
from dsv41chat.store import Store
from tests.ui.fakes import MARKERS, Script

HELLO = "Hello from the fake engine."


def ids_of(text: str) -> list[int]:
    return [*text.encode(), 257]


# output ------------------------------------------------------------------------------------------------------------------


def test_text_writes_the_answer_and_nothing_else(program):
    result = program("--headless", "hi")
    assert (result.code, result.out) == (0, HELLO + "\n")
    assert "conversation " in result.err


def test_a_final_newline_is_added_only_when_it_is_missing(program):
    assert program("--headless", "hi", script=Script("one\n")).out == "one\n"


def test_without_a_terminal_a_pipe_is_answered_and_it_says_so_once(program):
    result = program(stdin="hi\n")
    assert result.out == HELLO + "\n"
    assert result.err.count("answering as with --headless") == 1
    assert program.script.sessions[-1].calls[-1].prompt.ids[-4:-2] == tuple(b"hi")


def test_quiet_leaves_stderr_empty(program):
    assert program("-q", stdin="hi").err == ""


def test_json_is_one_object_with_everything(program):
    result = program("--json", "--temperature", "0.5", "--seed", "7", "hi")
    o = result.object
    assert o["v"] == 1 and o["type"] == "done" and o["turn"] == 0 and o["exit_code"] == 0
    assert o["text"] == HELLO and o["thinking"] == "" and o["finish"] == "stop"
    assert o["build"] == {"name": "nano", "family": "v41", "fingerprint": "f" * 64}
    assert o["params"] == {
        "temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 7,
        "max_tokens": 65536, "effort": "high", "draft": "auto", "context": 8192,
    }  # fmt: skip
    assert o["ids_hash"] == hashlib.sha256(np.array([263, *ids_of(HELLO)], "<u4").tobytes()).hexdigest()
    assert set(o["usage"]) == {
        "prompt_tokens", "cached_tokens", "prefilled_tokens", "thinking_tokens", "answer_tokens", "completion_tokens", "context_used",
        "context_limit",
    }  # fmt: skip
    assert o["usage"]["prompt_tokens"] == o["usage"]["cached_tokens"] + o["usage"]["prefilled_tokens"]
    assert set(o["timing"]) == {"load_s", "resume_s", "prefill_s", "first_token_s", "decode_s", "total_s", "prefill_tok_s", "decode_tok_s"}
    assert set(o["draft"]) == {"mode", "rounds", "proposed", "accepted", "by_depth"}
    assert set(o["residency"]) == {"cold_rows", "warm_rows", "bytes_read"}
    with Store.open(program.data, readonly=True) as store:
        stored = store.message(o["message_id"])
        assert (stored.text, stored.ids_hash, stored.conversation_id) == (HELLO, o["ids_hash"], o["conversation"])
        assert stored.ids == (263, *ids_of(HELLO))


def test_stream_json_begins_with_start_and_ends_with_done(program):
    result = program("--stream-json", "hi", script=Script("Grüße 👋🏽, 世界", thinking="hm\nhm"))
    types = [event["type"] for event in result.events]
    assert types[0] == "start" and types[-1] == "done" and types.count("start") == types.count("done") == 1
    assert types.index("load") < types.index("residency") < types.index("prefill") < types.index("delta")
    assert "draft" not in types
    assert "".join(e["text"] for e in result.of("delta") if e["channel"] == "answer") == "Grüße 👋🏽, 世界"
    assert "".join(e["text"] for e in result.of("delta") if e["channel"] == "thinking") == "hm\nhm"
    done = result.of("done")[0]
    assert "text" not in done and sum(e["tokens"] for e in result.of("delta")) == done["usage"]["completion_tokens"]
    assert [(m["role"], m["text"], m["finish"]) for m in result.of("message")] == [("user", "hi", None), ("assistant", "Grüße 👋🏽, 世界", "stop")]
    assert result.of("load")[-1]["done"] == result.of("load")[-1]["total"]
    assert result.of("prefill")[-1]["done"] == result.of("prefill")[-1]["total"]
    start = result.of("start")[0]
    assert set(start) == {"v", "type", "t", "turn", "version", "pid", "conversation", "parent", "build", "params", "engine"}
    assert start["engine"] == {"device": "cpu", "mlx": "0"}
    times = [event["t"] for event in result.events]
    assert times == sorted(times)


def test_draft_events_come_with_verbose(program):
    assert program("--stream-json", "-v", "hi").of("draft")


def test_no_stream_writes_once(program, monkeypatch):
    from dsv41chat.ui.output import Out

    writes = []
    original = Out.write
    monkeypatch.setattr(Out, "write", lambda self, text: (writes.append(text), original(self, text)))
    script = Script("a longer answer", delay_s=0.02)
    program("--headless", "hi", script=script)
    assert len(writes) > 3
    writes.clear()
    assert program("--headless", "--no-stream", "hi", script=script).out == "a longer answer\n"
    assert writes == ["a longer answer", "\n"]


def test_show_thinking_goes_to_stderr_dim_on_a_terminal(program, monkeypatch):
    script = Script("yes", thinking="let me see")
    result = program("--headless", "--show-thinking", "hi", script=script)
    assert result.out == "yes\n" and "let me see" in result.err and "\x1b" not in result.err
    assert "let me see" not in program("--headless", "hi", script=script).err
    assert "\x1b[2m" in program("--headless", "--show-thinking", "hi", script=script, terminal=True).err
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[2m" not in program("--headless", "--show-thinking", "hi", script=script, terminal=True).err


BLOCKS = "Here:\n```sh\nls\n```\nand\n~~~~python\nprint('```')\n~~~~\nend"


@pytest.mark.parametrize(
    ("options", "expected", "warned"),
    [
        (["--extract"], "ls\n", False),
        (["--extract", "python"], "print('```')\n", False),
        (["--extract=rust"], BLOCKS + "\n", True),
    ],
)
def test_extract(program, options, expected, warned):
    result = program("--headless", "hi", *options, script=Script(BLOCKS))
    assert result.out == expected and ("warning" in result.err) is warned


def test_extract_takes_a_lone_sentence_for_the_prompt(program):
    assert program("--headless", "--extract", "write some code", script=Script(BLOCKS)).out == "ls\n"


def test_output_file_appears_complete_and_is_not_overwritten(program, tmp_path):
    path = tmp_path / "answer.txt"
    result = program("--headless", "hi", "-o", str(path))
    assert (result.code, result.out, path.read_text()) == (0, "", HELLO + "\n")
    again = program("--headless", "hi", "-o", str(path))
    assert again.code == 2 and "exists already" in again.err and path.read_text() == HELLO + "\n"
    assert program("--headless", "hi", "-o", str(path), "--force", script=Script("new")).code == 0
    assert path.read_text() == "new\n"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_output_file_of_a_failed_run_holds_the_error_object_or_does_not_appear(program, tmp_path):
    script = Script(error=PackDamaged("bad bytes"), error_at=3)
    assert program("--headless", "hi", "-o", str(tmp_path / "a.txt"), script=script).code == 4
    assert not (tmp_path / "a.txt").exists()
    assert program("--json", "hi", "-o", str(tmp_path / "a.json"), script=script).code == 4
    assert json.loads((tmp_path / "a.json").read_text())["code"] == "build_damaged"
    assert program("--headless", "hi", "-o", str(tmp_path / "none" / "a.txt")).code == 2


def test_control_characters_reach_a_pipe_but_not_a_terminal(program):
    script = Script("red \x1b[31m text")
    assert program("--headless", "hi", script=script).out == "red \x1b[31m text\n"
    assert "\x1b[31m" not in program("--headless", "hi", script=script, terminal=True).out


def test_progress(program):
    assert "loading" not in program("--headless", "hi").err
    assert "loading weights 100%" in program("--headless", "--progress", "always", "hi").err
    assert "prefill" in program("--headless", "hi", terminal=True).err
    assert "prefill" not in program("--headless", "--progress", "never", "hi", terminal=True).err


def test_verbose_prints_timings(program):
    assert "tok/s" in program("--headless", "-v", "hi").err
    assert "tok/s" not in program("--headless", "hi").err


# input -------------------------------------------------------------------------------------------------------------------


def sent(program) -> str:
    """The text of the newest user message."""
    with Store.open(program.data, readonly=True) as store:
        path = store.path_to(store.last_conversation().leaf_id)
        return [m for m in path if m.role == "user"][-1].text


def test_files_then_stdin_then_prompt(program, tmp_path):
    (tmp_path / "a.txt").write_text("alpha\n")
    (tmp_path / "b.md").write_text("has ```` fence")
    program("--headless", "-f", str(tmp_path / "a.txt"), "question", "-f", str(tmp_path / "b.md"), stdin="piped\n")
    assert sent(program) == "File: a.txt\n```\nalpha\n```\n\nFile: b.md\n`````\nhas ```` fence\n`````\n\npiped\n\nquestion"


def test_stdin_alone_is_verbatim_without_its_last_newline(program):
    program(stdin="  two\n\nlines \n\n")
    assert sent(program) == "  two\n\nlines \n"


def test_dash_is_stdin_as_a_file(program):
    program("--headless", "-f", "-", "q", stdin="data\n")
    assert sent(program) == "File: stdin\n```\ndata\n```\n\nq"


def test_prompt_file_is_verbatim_and_keeps_its_place(program, tmp_path):
    (tmp_path / "p.txt").write_text(" from file \n")
    result = program("--json", "-p", "first", "--prompt-file", str(tmp_path / "p.txt"), "-p", "last")
    assert [t["turn"] for t in [result.object]] == [2] and len(result.object["turns"]) == 3
    with Store.open(program.data, readonly=True) as store:
        path = store.path_to(store.last_conversation().leaf_id)
    assert [m.text for m in path if m.role == "user"] == ["first", " from file \n", "last"]


def test_no_stdin_leaves_a_pipe_alone(program):
    program("--headless", "--no-stdin", "q", stdin="not read")
    assert sent(program) == "q"


@pytest.mark.parametrize("argv", [["--headless"], ["--headless", ""], ["--headless", " \n"], ["--headless", "-p", ""]])
def test_an_empty_message_is_a_usage_error(program, argv):
    result = program(*argv)
    assert result.code == 2 and result.out == ""


def test_no_terminal_and_no_prompt_is_a_usage_error_with_a_hint(program):
    result = program()
    assert result.code == 2 and "--headless" in result.err


def test_undecodable_input(program, tmp_path):
    for argv, stdin in ((["--json"], b"\xff\xfe"), (["--json", "-f", str(tmp_path / "x"), "q"], None)):
        (tmp_path / "x").write_bytes(b"ok \xc3(")
        result = program(*argv, stdin=stdin)
        assert result.code == 2 and result.object["code"] == "usage" and "UTF-8" in result.object["message"]
    result = program("--json", "bad \udcff argument")
    assert result.code == 2 and result.object["code"] == "usage"


def test_missing_file_is_a_usage_error(program, tmp_path):
    assert program("--headless", "q", "-f", str(tmp_path / "none")).code == 2


@pytest.mark.parametrize("spelling", MARKERS)
def test_a_marker_in_any_text_is_text(program, tmp_path, spelling):
    """Nothing a user sends becomes a control token; it comes back as it was written."""
    (tmp_path / "f.txt").write_text(spelling)
    echo = Script(answer=f"said {spelling}")
    result = program(
        "--json", "--effort", "off", "-s", f"system {spelling}", "-f", str(tmp_path / "f.txt"), f"prompt {spelling}", stdin=spelling, script=echo
    )
    assert result.object["text"] == f"said {spelling}"
    program("--json", "-c", "more", script=echo)
    first, second = echo.sessions[0].calls[0].prompt.ids, echo.sessions[-1].calls[-1].prompt.ids
    assert sum(i >= 256 for i in first) == 5  # BOS, System, User, Assistant, </think>
    assert sum(i >= 256 for i in second) == 9  # and </think> moves to the answer, EOS, User, Assistant, </think>
    assert bytes(i for i in first if i < 256).decode().count(spelling) == 4
    with Store.open(program.data, readonly=True) as store:
        assert spelling in store.message(result.object["message_id"]).text


# conversations -----------------------------------------------------------------------------------------------------------


def prompts(script: Script) -> list[tuple[int, ...]]:
    return [call.prompt.ids for session in script.sessions for call in session.calls]


def test_continue_and_resume_send_the_history_with_verbatim_ids(program):
    one = program("--json", "--effort", "off", "first").object
    script = Script("second answer")
    two = program("--json", "-c", "more", script=script).object
    assert two["conversation"] == one["conversation"]
    ids = prompts(script)[0]
    assert bytes(i for i in ids if i < 256).decode() == "first" + HELLO + "more"
    three = program("--json", "--resume", one["conversation"][:4], "third").object
    assert three["conversation"] == one["conversation"]
    four = program("--json", "--resume", "first", "by title").object
    assert four["conversation"] == one["conversation"]


def test_several_prompts_are_turns_that_reuse_the_lane(program):
    result = program("--stream-json", "--effort", "off", "-p", "one", "-p", "two")
    assert [e["turn"] for e in result.of("message")] == [0, 0, 1, 1]
    done = result.of("done")[0]
    assert done["usage"]["cached_tokens"] > 0 and [t["usage"]["cached_tokens"] for t in done["turns"]][0] == 0
    assert len(result.of("start")) == 1
    assert program("--headless", "-p", "one", "-p", "two").out == (HELLO + "\n") * 2


def test_no_cache_computes_every_prompt(program):
    result = program("--json", "--no-cache", "--effort", "off", "-p", "one", "-p", "two")
    assert result.object["usage"]["cached_tokens"] == 0


def test_conversation_makes_it_when_absent(program):
    one = program("--json", "--conversation", "notes", "a").object
    two = program("--json", "--conversation", "notes", "b").object
    assert one["conversation"] == two["conversation"]
    with Store.open(program.data, readonly=True) as store:
        assert store.conversation("notes").id == one["conversation"]


def test_branch_attaches_to_an_earlier_message(program):
    one = program("--json", "first").object
    program("--json", "-c", "second")
    three = program("--json", "--branch", one["message_id"], "other second").object
    assert three["conversation"] == one["conversation"]
    with Store.open(program.data, readonly=True) as store:
        assert [m.text for m in store.children(one["message_id"])] == ["second", "other second"]


def test_fork_copies_first(program):
    one = program("--json", "first").object
    two = program("--json", "-c", "--fork", "-s", "new system", "second").object
    assert two["conversation"] != one["conversation"]
    with Store.open(program.data, readonly=True) as store:
        assert len(store.tree(one["conversation"])) == 2 and len(store.tree(two["conversation"])) == 4
        assert store.conversation(two["conversation"]).settings["system"] == "new system"
    assert program("--headless", "--fork", "x").code == 2


def test_system_prompt(program, tmp_path):
    (tmp_path / "s.txt").write_text("be kind")
    script = Script()
    program("--headless", "--system-file", str(tmp_path / "s.txt"), "hi", script=script)
    assert b"be kind" in bytes(i for i in prompts(script)[0] if i < 256)
    refused = program("--json", "-c", "-s", "other", "hi")
    assert refused.code == 2 and "--fork" in refused.object["hint"]
    program("--headless", "-c", "again", script=script)
    assert b"be kind" in bytes(i for i in prompts(script)[-1] if i < 256)


def test_no_save_leaves_nothing(program):
    result = program("--json", "--no-save", "hi")
    assert result.code == 0 and not (program.data / "chat.db").exists()
    one = program("--json", "kept").object
    script = Script()
    two = program("--json", "--no-save", "-c", "not kept", script=script)
    assert two.code == 0 and b"kept" in bytes(i for i in prompts(script)[0] if i < 256)
    with Store.open(program.data, readonly=True) as store:
        assert len(store.tree(one["conversation"])) == 2


@pytest.mark.parametrize("argv", [["-c"], ["--resume", "abcd"], ["--resume", "no such title"], ["--branch", "abcdef"]])
def test_unknown_conversation(program, argv):
    result = program("--json", *argv, "hi")
    assert (result.code, result.object["code"]) == (6, "not_found")


def test_ambiguous_conversation(program):
    for _ in range(2):
        program("--headless", "same title")
    result = program("--json", "--resume", "same title", "hi")
    assert (result.code, result.object["code"]) == (6, "ambiguous")


def test_locked_conversation(program):
    from tests.ui.program import child

    one = program("--json", "first").object["conversation"]
    holder = child(program.data, ["--stream-json", "-c", "hold"], {"answer": "x" * 500, "delay_s": 0.02})
    try:
        while b'"delta"' not in holder.stdout.readline():
            assert holder.poll() is None
        result = program("--json", "--resume", one, "hi")
        assert (result.code, result.object["code"]) == (6, "locked")
    finally:
        holder.kill()
        holder.wait()


# options of the answer ---------------------------------------------------------------------------------------------------


def test_sampling_options_reach_the_engine(program):
    script = Script()
    program(
        "--headless", "hi", "--temperature", "0.7", "--top-p", "0.9", "--min-p", "0.1", "--top-k", "40", "--seed", "5", "--presence-penalty", "0.5",
        "--frequency-penalty", "-0.25", "--max-tokens", "3", "--draft", "off", "--stop", "A", "--stop", "B", "--context", "500", script=script,
    )  # fmt: skip
    call = script.sessions[0].calls[0]
    s = call.sampling
    assert (s.temperature, s.top_p, s.min_p, s.top_k, s.seed, s.presence_penalty, s.frequency_penalty) == (0.7, 0.9, 0.1, 40, 5, 0.5, -0.25)
    assert (call.max_tokens, call.draft, call.stop, call.loop_stop) == (3, "off", ("A", "B"), True)
    assert script.sessions[0].engine.context_limit == 500


def test_engine_options_reach_the_engine(program):
    script = Script()
    program("--headless", "hi", "--engram", "resident", "--context", "700", script=script)
    assert script.opened[0]["context"] == 700 and script.opened[0]["engram"].mode == "resident"


def test_only_one_process_holds_a_large_build(program):
    import fcntl

    script = Script(resident_bytes=5 << 30)
    assert program("--json", "hi", script=script).code == 0
    with open(program.data / "state" / "engine.lock", "a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused = program("--json", "hi", script=script)
        assert (refused.code, refused.object["code"]) == (5, "does_not_fit") and "--allow-second" in refused.object["hint"]
        assert program("--json", "--allow-second", "hi", script=script).code == 0
        assert program("--json", "hi").code == 0, "a small build needs no turn"


def test_log_file_and_debug_output(program, tmp_path):
    path = tmp_path / "my.log"
    result = program("--headless", "-vv", "--log-file", str(path), "hi", script=Script(error=ValueError("x"), error_at=0))
    assert "Traceback" in path.read_text() and "Traceback" in result.err and path.stat().st_mode & 0o777 == 0o600
    quiet = program("--headless", "hi", script=Script(error=ValueError("x"), error_at=0))
    assert "Traceback" not in quiet.err and "Traceback" in (program.data / "log" / "dsv41chat.log").read_text()
    assert "a secret question" not in path.read_text()


def test_max_tokens_stop_and_effort(program):
    assert program("--json", "hi", "--effort", "off", "--max-tokens", "5").object["text"] == "Hello"
    stopped = program("--json", "hi", "--stop", "from").object
    assert (stopped["text"], stopped["finish"]) == ("Hello ", "stop_string")
    script = Script("a", thinking="thought")
    assert program("--json", "hi", "--effort", "off", script=script).object["thinking"] == ""
    assert program("--json", "hi", "--effort", "low", script=script).object["thinking"] == "thought"
    assert program("--json", "hi", "--effort", "max").object["params"]["max_tokens"] == 131072
    assert program("--json", "hi", "--effort", "off").object["params"]["max_tokens"] == 8192


def test_the_answers_own_limit(program):
    script = Script("abcdef", thinking="a long thought")
    result = program("--json", "hi", "--max-answer-tokens", "3", script=script).object
    assert (result["thinking"], result["text"], result["finish"]) == ("a long thought", "abc", "length")
    assert result["usage"]["answer_tokens"] == 3 and result["params"]["max_answer_tokens"] == 3
    assert program("--json", "hi", "--max-answer-tokens", "9", script=script).object["finish"] == "stop"
    said = program("--headless", "hi", "--max-answer-tokens", "3", script=script)
    assert said.out == "abc\n" and "the length limit (--max-answer-tokens)" in said.err
    assert "(--max-tokens)" in program("--headless", "hi", "--max-answer-tokens", "9", "--max-tokens", "3", script=script).err
    for wrong in ("0", "auto", "x"):
        assert program("--json", "hi", "--max-answer-tokens", wrong).code == 2


def test_effort_stays_with_the_conversation(program):
    program("--headless", "--effort", "off", "hi")
    assert program("--json", "-c", "more").object["params"]["effort"] == "off"


def test_seeds(program):
    script = Script(answer=lambda ids, seed, temperature: f"seed {seed} at {temperature}")
    seeds = [program("--json", "--temperature", "0.8", "--seed", seed, "hi", script=script).object for seed in ("7", "7", "8")]
    assert seeds[0]["ids_hash"] == seeds[1]["ids_hash"] != seeds[2]["ids_hash"]
    drawn = {program("--json", "hi", script=script).object["params"]["seed"] for _ in range(3)}
    assert len(drawn) == 3


def test_a_draft_that_the_build_cannot_make_is_refused(program):
    result = program("--json", "--draft", "3", "hi")
    assert (result.code, result.object["code"]) == (2, "usage")
    assert program("--json", "--draft", "0", "hi").code == 0


@pytest.mark.parametrize("finish", ["length", "loop"])
def test_strict(program, finish):
    script = Script(finish=finish)
    assert program("--json", "hi", script=script).code == 0
    result = program("--json", "--strict", "hi", script=script)
    assert result.code == result.object["exit_code"] == {"length": 10, "loop": 11}[finish]


def test_load_only_and_dry_run_answer_nothing(program):
    script = Script()
    loaded = program("--json", "--load-only", script=script)
    assert loaded.object["context_limit"] == 8192 and loaded.object["finish"] == "load_only" and loaded.code == 0
    assert "loaded nano" in program("--load-only").out
    counted = program("--json", "--dry-run", "hi", script=script)
    assert counted.object["prompt_tokens"] == counted.object["prefill_tokens"] > 5 and counted.object["cached_tokens"] == 0
    assert prompts(script) == []
    with Store.open(program.data, readonly=True) as store:
        assert store.list_conversations() == []
    assert [e["type"] for e in program("--stream-json", "--load-only").events][-1] == "done"


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
    assert (result.code, result.object["code"]) == (7, "context_full") and prompts(script) == []
    assert "100" in result.object["message"]


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
    assert "cut after" not in program("-q", "--headless", "--max-tokens", "5", "hi").err
    assert "cut after" not in program("--json", "--max-tokens", "5", "hi").err, "scripts read finish"


def test_an_answer_that_changes_the_default_build_says_so(program, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    result = program("--headless", "-m", str(tmp_path / "other"), "hi")
    assert "other now answers new conversations by default, not nano" in result.err
    assert "by default" not in program("--headless", "-m", "other", "hi").err + program("--headless", "hi").err
    assert "nano now answers" in program("--headless", "-m", "nano", "hi").err


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
