"""Scripted mode: whole conversations, and what the options of an answer do (spec: app, sections 7 and 8)."""

from __future__ import annotations

import pytest

from dsv41chat.store import Store
from tests.ui.fakes import HELLO, Script

# conversations -----------------------------------------------------------------------------------------------------------


def test_continue_and_resume_send_the_history_with_verbatim_ids(program):
    one = program("--json", "--effort", "off", "first").object
    script = Script("second answer")
    two = program("--json", "-c", "more", script=script).object
    assert two["conversation"] == one["conversation"]
    ids = script.prompts[0]
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
    assert b"be kind" in bytes(i for i in script.prompts[0] if i < 256)
    refused = program("--json", "-c", "-s", "other", "hi")
    assert refused.code == 2 and "--fork" in refused.object["hint"]
    program("--headless", "-c", "again", script=script)
    assert b"be kind" in bytes(i for i in script.prompts[-1] if i < 256)


def test_no_save_leaves_nothing(program):
    result = program("--json", "--no-save", "hi")
    assert result.code == 0 and not (program.data / "chat.db").exists()
    one = program("--json", "kept").object
    script = Script()
    two = program("--json", "--no-save", "-c", "not kept", script=script)
    assert two.code == 0 and b"kept" in bytes(i for i in script.prompts[0] if i < 256)
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
        assert (result.code, result.object["code"]) == (6, "locked") and "--readonly" in result.object["hint"]
        refused = program("--headless", "-c", "hi")
        assert refused.code == 6 and "resume with" not in refused.err, "nothing of it was kept"
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
    assert "fit" not in counted.err and "dry_run" not in program("--dry-run", "hi", script=script).out
    full = program("--json", "--dry-run", "hi " * 9000, script=script)
    assert full.code == full.object["exit_code"] == 7 and full.object["prompt_tokens"] > 8192
    assert "warning: the prompt does not fit" in full.err
    assert script.prompts == []
    with Store.open(program.data, readonly=True) as store:
        assert store.list_conversations() == []
    assert [e["type"] for e in program("--stream-json", "--load-only").events][-1] == "done"


def test_one_token_is_one(program):
    assert "cut after 1 token: the length limit (--max-tokens)." in program("--headless", "--effort", "off", "--max-tokens", "1", "hi").err
