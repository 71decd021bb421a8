"""Scripted mode: what goes to stdout, and where the message comes from (spec: app, sections 7 and 8)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from dsv41chat.engine.errors import PackDamaged
from dsv41chat.store import Store
from dsv41chat.ui.commands import CommandError, read_attachment
from tests.ui.fakes import HELLO, MARKERS, Script


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


def test_extract_without_a_block_writes_nothing_under_strict(program):
    result = program("--headless", "hi", "--extract", "rust", "--strict", script=Script(BLOCKS))
    assert (result.code, result.out) == (12, "") and "no rust block; nothing was written" in result.err
    assert program("--headless", "hi", "--extract", "sh", "--strict", script=Script(BLOCKS)).code == 0
    assert program("--headless", "hi", "--extract", "rust", "--strict", script=Script("no code", finish="length")).code == 10


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


def test_a_device_as_the_output_file_is_written_and_stays(program):
    assert program("--headless", "hi", "-o", os.devnull).code == 0 and not os.path.isfile(os.devnull)
    full = Path("/dev/full")
    if full.exists():
        assert program("--headless", "hi", "-o", str(full)).code == 1 and full.is_char_device()


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


BINARY = "is not text (it holds NUL bytes)."
NO_TEXT = [(b"a\0b", BINARY), (b"\x93\x01\xf0\x07", "is not text (byte 0: 0x93)."), (b"caf\xe9", "is not valid UTF-8 (byte 3: 0xe9).")]


@pytest.mark.parametrize(("data", "why"), NO_TEXT)
def test_every_way_in_has_one_rule_for_what_is_text(program, tmp_path, data, why):
    """-f, --prompt-file, standard input and /read. Another program's way to write text is not what binary data is."""
    path = tmp_path / "x"
    path.write_bytes(data)
    for argv, what in ((["-f", str(path), "q"], path), (["--prompt-file", str(path)], path), ([], "Standard input")):
        result = program("--json", *argv, stdin=None if argv else data)
        assert result.code == 2 and result.object["message"] == f"{what} {why}"
        assert ("iconv" in result.object["hint"]) == ("UTF-8" in why)
    with pytest.raises(CommandError, match=re.escape(f"{path} {why}")):
        read_attachment(str(path))


def test_the_mark_at_the_beginning_of_a_text_is_not_sent(program, tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("\ufeffalpha\ufeff\n", "utf-8")
    program("--headless", "-f", str(path), "--prompt-file", str(path))
    assert sent(program) == "File: x.txt\n```\nalpha\ufeff\n```\n\nalpha\ufeff\n"
    program("--headless", stdin="\ufeffpiped")
    assert sent(program) == "piped"
    assert read_attachment(str(path)) == ("x.txt", "alpha\ufeff\n")


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
