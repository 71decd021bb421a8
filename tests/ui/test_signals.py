"""What ends a scripted run from outside: signals, the time limit, a reader that goes away, kill -9. Real processes with pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dsv41chat.store import Store
from tests.ui.program import child

SLOW = {"answer": "word " * 400, "delay_s": 0.005}


def read_until(process: subprocess.Popen, type: str) -> list[dict]:
    """Events up to and with the first of `type`."""
    events = []
    while True:
        line = process.stdout.readline()
        assert line, process.stderr.read().decode()
        events.append(json.loads(line))
        if events[-1]["type"] == type:
            return events


def rest(process: subprocess.Popen) -> tuple[int, list[dict], str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, [json.loads(line) for line in out.splitlines()], err.decode()


def leaf(data, conversation: str):
    with Store.open(data, readonly=True) as store:
        return store.message(store.conversation(conversation).leaf_id)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_the_text_and_writes_the_last_event(tmp_path, number, code):
    process = child(tmp_path, ["--stream-json", "--effort", "off", "hi"], SLOW)
    events = read_until(process, "delta")
    process.send_signal(number)
    status, more, _ = rest(process)
    last = more[-1]
    assert (status, last["type"], last["code"], last["exit_code"]) == (code, "error", "interrupted", code)
    shown = "".join(e["text"] for e in [*events, *more] if e["type"] == "delta")
    stored = leaf(tmp_path, events[0]["conversation"])
    assert (stored.text, stored.state) == (shown, "stopped") and last["partial"]["text"] == shown
    assert [e["type"] for e in [*events, *more]].count("error") == 1


def test_sigquit_has_no_handler(tmp_path):
    """Whatever hangs, it ends at once; the shell gives 131."""
    process = child(tmp_path, ["--stream-json", "--effort", "off", "hi"], SLOW)
    read_until(process, "delta")
    process.send_signal(signal.SIGQUIT)
    assert rest(process)[0] == -signal.SIGQUIT


def test_sigint_in_text_mode(tmp_path):
    process = child(tmp_path, ["--headless", "--effort", "off", "hi"], SLOW)
    first = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and first == b"word " and out.endswith(b"\n")
    assert b"SIGINT" in err and b"--resume" in err and b"Traceback" not in err


def test_sigint_during_prefill_stores_no_answer(tmp_path):
    process = child(tmp_path, ["--stream-json", "--effort", "off", "x" * 3000], {"answer": "a", "prefill_s": 0.1})
    events = read_until(process, "prefill")
    process.send_signal(signal.SIGINT)
    status, more, _ = rest(process)
    assert status == 130 and more[-1]["partial"] is None
    assert leaf(tmp_path, events[0]["conversation"]).role == "user"


def test_sigint_while_loading(tmp_path):
    process = child(tmp_path, ["--stream-json", "hi"], SLOW | {"load_s": 1.5})
    read_until(process, "load")
    process.send_signal(signal.SIGINT)
    status, more, _ = rest(process)
    assert status == 130 and more[-1]["code"] == "interrupted"


def test_sigint_while_reading_input(tmp_path):
    process = child(tmp_path, ["--json"], {}, stdin=subprocess.PIPE)
    while not (tmp_path / "log" / "dsv41chat.log").exists():  # begun just before the input is read
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130
    assert json.loads(process.stdout.read())["code"] == "interrupted"
    process.stdin.close()


def test_a_second_sigint_leaves_at_once(tmp_path):
    process = child(tmp_path, ["--stream-json", "--effort", "off", "hi"], SLOW | {"ignore_cancel": True, "answer": "word " * 4000})
    events = read_until(process, "delta")
    process.send_signal(signal.SIGINT)
    # Signals are handled in the order of their numbers: once it says where it stands, the first one was.
    process.send_signal(signal.SIGUSR1)
    while b"status: " not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    status, more, _ = rest(process)
    assert status == 130 and more[-1]["code"] == "interrupted"
    stored = leaf(tmp_path, events[0]["conversation"])
    assert stored.state == "interrupted" and stored.text == "".join(e["text"] for e in [*events, *more] if e["type"] == "delta")


def small_pipe() -> tuple[int, int]:
    """A pipe that holds one page, so that a writer soon has to wait."""
    fcntl = pytest.importorskip("fcntl")
    reading, writing = os.pipe()
    if not hasattr(fcntl, "F_SETPIPE_SZ"):
        pytest.skip("the size of a pipe cannot be set here")
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    return reading, writing


LONG = {"answer": "word " * 1500}


def stored_text(data) -> str:
    """The newest answer in the store, "" before there is one."""
    with Store.open(data, readonly=True) as store:
        conversation = store.last_conversation()
        last = store.message(conversation.leaf_id) if conversation is not None and conversation.leaf_id else None
        return last.text if last is not None and last.role == "assistant" else ""


def test_a_second_sigint_leaves_a_reader_that_does_not_read(tmp_path):
    """The pipe is full, so the program waits in a write, where a flag is not seen."""
    reading, writing = small_pipe()
    process = child(tmp_path, ["--stream-json", "--effort", "off", "hi"], LONG, stdout=writing)
    os.close(writing)
    deadline = time.monotonic() + 120
    while stored_text(tmp_path) == "" and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1.5)  # the pipe holds about ten events: by now the next one waits
    assert process.poll() is None
    for _ in range(5):
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        try:
            process.wait(20)
            break
        except subprocess.TimeoutExpired:
            # So busy a machine that it saw both as one.
            continue
    assert process.wait(1) == 130
    os.close(reading)
    with Store.open(tmp_path, readonly=True) as store:
        assert store.message(store.last_conversation().leaf_id).text.startswith("word word")


def test_a_pipe_made_non_blocking_by_its_reader(tmp_path):
    reading, writing = small_pipe()
    os.set_blocking(writing, False)
    process = child(tmp_path, ["--stream-json", "-q", "--effort", "off", "hi"], LONG, stdout=writing)
    os.close(writing)
    time.sleep(3.0)
    with os.fdopen(reading, "rb") as pipe:
        events = [json.loads(line) for line in pipe]
    assert process.wait(300) == 0 and events[-1]["type"] == "done"
    assert "".join(e["text"] for e in events if e["type"] == "delta") == LONG["answer"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("mode", ["--headless", "--stream-json", "--json"])
def test_an_output_that_is_full(tmp_path, mode):
    with open("/dev/full", "wb") as full:
        process = child(tmp_path, [mode, "--effort", "off", "hi"], {}, stdout=full)
        assert process.wait(300) == 1
    err = process.stderr.read().decode()
    assert "cannot be written" in err and "Traceback" not in err
    with Store.open(tmp_path, readonly=True) as store:
        assert store.message(store.last_conversation().leaf_id).role == ("assistant" if mode != "--stream-json" else "user")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["conversations", "--help"], ["conversations", "list", "-h"], ["doctor", "--version"]])
def test_help_that_cannot_be_written(tmp_path, words):
    with open("/dev/full", "wb") as full:
        process = child(tmp_path, words, stdout=full)
        assert process.wait(300) == 1
    assert process.stderr.read().decode() == "dsv41chat: Standard output cannot be written: No space left on device.\n"


def test_help_whose_reader_has_gone_is_no_failure(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    process = child(tmp_path, ["--help"], stdout=writing)
    os.close(writing)
    assert process.wait(300) == 0 and process.stderr.read() == b""


def test_the_time_limit(tmp_path):
    # More time where a busy machine did not even come to the first word.
    for seconds in ("5", "20", "60"):
        words = ["--stream-json", "--effort", "off", "--timeout", seconds, "hi"]
        status, events, _ = rest(child(tmp_path, words, SLOW | {"answer": "word " * 4000}))
        last = events[-1]
        assert (status, last["code"], last["exit_code"]) == (124, "timeout", 124)
        if last["partial"]:
            break
    assert leaf(tmp_path, last["conversation"]).text == last["partial"]["text"] != ""


def test_the_time_limit_counts_reading_input(tmp_path):
    process = child(tmp_path, ["--json", "--timeout", "1.5"], {}, stdin=subprocess.PIPE)
    assert process.wait(300) == 124 and json.loads(process.stdout.read())["code"] == "timeout"
    process.stdin.close()


def test_sigusr1_prints_where_it_stands(tmp_path):
    process = child(tmp_path, ["--stream-json", "--effort", "off", "hi"], SLOW | {"answer": "word " * 120})
    read_until(process, "delta")
    process.send_signal(signal.SIGUSR1)
    status, _, err = rest(process)
    assert status == 0 and "status: answer" in err


@pytest.mark.parametrize("mode", ["--text", "--stream-json", "--json"])
def test_a_reader_that_goes_away_ends_it_quietly(tmp_path, mode):
    process = child(tmp_path, [mode, "-q", "--effort", "off", "hi"], {"answer": "word " * 300, "delay_s": 0.002})
    if mode == "--text":
        process.stdout.read(1)
    elif mode == "--stream-json":
        read_until(process, "delta")
    process.stdout.close()
    assert process.wait(300) == 141
    assert process.stderr.read() == b""
    with Store.open(tmp_path, readonly=True) as store:
        answer = store.message(store.last_conversation().leaf_id)
        assert answer.role == "assistant" and answer.text.startswith("word")
        assert answer.state == ("complete" if mode == "--json" else "stopped")


def test_closed_and_silent_standard_input_do_not_hang(tmp_path):
    assert rest(child(tmp_path, ["--stream-json", "hi"], {}, stdin=None, preexec_fn=lambda: __import__("os").close(0)))[0] == 0
    process = child(tmp_path, ["--stream-json", "--no-stdin", "hi"], {}, stdin=subprocess.PIPE)
    while (line := process.stdout.readline()) and json.loads(line)["type"] != "done":
        continue
    assert process.wait(300) == 0
    process.stdin.close()


def test_closed_standard_output(tmp_path):
    process = child(tmp_path, ["--headless", "-q", "hi"], {}, preexec_fn=lambda: __import__("os").close(1))
    assert process.wait(300) == 2 and b"Standard output is closed" in process.stderr.read()


def test_kill_9_loses_less_than_a_second(tmp_path):
    """Twice here with a scripted engine; twenty times with the embedded model in test_embedded.py."""
    for _ in range(2):
        assert kill_once(tmp_path, ["--effort", "off"], {"answer": "word " * 2000, "delay_s": 0.004}, after_s=2.7, promise_s=2.0)


def kill_once(data, options: list[str], script: dict | None, after_s: float, promise_s: float) -> bool:
    """Kill a streaming run `after_s` after its first delta: what was read `promise_s` before the kill is stored, and announced.

    The promise is one second; a loaded test machine gets another for its own delays. False if the answer ended before that.
    """
    process = child(data, ["--stream-json", *options, "tell me"], script, bufsize=0)
    conversation = read_until(process, "start")[0]["conversation"]
    seen: list[tuple[float, str]] = []
    began = None
    while began is None or time.monotonic() - began < after_s:
        line = process.stdout.readline()
        assert line, process.stderr.read().decode()
        event = json.loads(line)
        if event["type"] == "delta":
            began = began or time.monotonic()
            seen.append((time.monotonic(), event["text"]))
        if event["type"] == "done":
            process.communicate(timeout=300)
            return False
    killed = time.monotonic()
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()
    old = "".join(text for at, text in seen if at < killed - promise_s)
    status, _, err = rest(child(data, ["--stream-json", "--load-only"], {} if script is not None else None))
    assert status == 0 and "interrupted" in err and conversation in err
    stored = leaf(data, conversation)
    assert stored.state == "interrupted" and stored.text.startswith(old), (len(stored.text), len(old))
    return True
