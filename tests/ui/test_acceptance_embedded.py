"""All sixteen acceptance checks once with the embedded model, in real terminals and pipes (spec: app, section 12). Takes minutes.

So hot a temperature draws evenly from all ids and seldom meets one that ends the answer: that is how an answer gets long here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsv41chat.nano import embedded_pack
from dsv41chat.store import Store
from tests.ui.contents import CONTENTS
from tests.ui.program import child
from tests.ui.terminal import Terminal
from tests.ui.test_acceptance import path_of
from tests.ui.test_acceptance import test_13_without_a_back_end_it_starts_searches_and_exports as without_a_back_end

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")]

CLEAN = "0 0 1"
SHORT = ["--max-tokens", "8"]
# With this seed the answer to "go" has all its 4,000 tokens.
LONG = ["--temperature", "100", "--seed", "4", "--effort", "off", "--max-tokens", "4000"]


def start(terminal: Terminal, data: Path, *options: str) -> None:
    terminal.run("-m", "dsv41chat", "--data-dir", str(data), *options)
    terminal.wait("esc" if "--send" in options else "Enter send")


def ask(terminal: Terminal, text: str, shown: str = "prefilled") -> str:
    """Sends `text` and waits for `shown` below it."""
    send(terminal, text)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        screen = terminal.screen
        if shown in screen.rpartition(text)[2]:
            return screen
        time.sleep(0.1)
    raise AssertionError(f"{shown!r} did not come below {text!r}:\n{terminal.screen}")


def send(terminal: Terminal, text: str) -> None:
    terminal.type(text)
    terminal.keys("Enter")


def stop(terminal: Terminal) -> None:
    """Stops the running answer and waits until it is kept."""
    terminal.keys("Escape")
    terminal.wait("stopped by you")


@contextmanager
def streaming(folder: Path, more_than: int) -> Iterator[Terminal]:
    """A terminal in which a long answer runs and has more than so many tokens."""
    with Terminal(folder) as terminal:
        start(terminal, folder / "data", *LONG)
        send(terminal, "go")
        running(terminal, more_than)
        yield terminal


def program(data: Path) -> list[str]:
    return [sys.executable, "-m", "dsv41chat", "--data-dir", str(data)]


def run(data: Path, *words: str, environ: dict[str, str] | None = None) -> str:
    """What a command that succeeds writes to stdout."""
    environ = {**os.environ, **(environ or {})}
    return subprocess.run([*program(data), *words], capture_output=True, text=True, check=True, env=environ, stdin=subprocess.DEVNULL).stdout


def finished(process: subprocess.Popen, code: int = 0, given: bytes | None = None) -> bytes:
    """What a child has written when it ended with `code`."""
    out, _ = process.communicate(given, timeout=120)
    assert process.returncode == code
    return out


def leave(terminal: Terminal) -> str:
    terminal.keys("C-q")
    return terminal.wait("exit=0")


def tokens(screen: str) -> int:
    """How many tokens of the running answer the status line counts; -1 where it does not."""
    found = re.search(r"gen (?:[\d.,]+ tok/s )?([\d,]+)", screen)
    return int(found[1].replace(",", "")) if found else -1


def running(terminal: Terminal, more_than: int = 0) -> str:
    """Waits until an answer has more than so many tokens."""
    deadline = time.monotonic() + 120
    while tokens(screen := terminal.screen) <= more_than:
        assert time.monotonic() < deadline, screen
        time.sleep(0.1)
    return screen


@pytest.mark.parametrize("bracketed", [True, False])
def test_1_typed_and_pasted_text_is_one_message(tmp_path, bracketed):
    with Terminal(tmp_path) as terminal:
        start(terminal, tmp_path / "data", *SHORT)
        terminal.type("typed: ")
        terminal.paste("first line\nsecond line\nthird line", bracketed)
        terminal.wait("third line")
        terminal.keys("Enter")
        terminal.wait("prefilled")
        leave(terminal)
    with Store.open(tmp_path / "data", readonly=True) as store:
        (conversation,) = store.list_conversations()
        question, answer = store.tree(conversation.id)
    assert question.text == "typed: first line\nsecond line\nthird line" and answer.build_name == "nano" and answer.state == "complete"


def transcript(screen: str) -> list[str]:
    """The lines between the header and the composer, without the scrollbar."""
    return [line[:98].rstrip() for line in screen.splitlines()[1:-5]]


@pytest.mark.parametrize("name", CONTENTS)
def test_2_streamed_text_is_complete_and_drawn_as_the_whole(tmp_path, name):
    """The model goes on from an answer that was stopped: the text of each kind, then its own words. Opened again it looks the same."""
    data = tmp_path / "data"
    with Store.open(data) as store:
        key = store.new_conversation("Stopped").id
        writer = store.begin_answer(key, store.add_message(key, None, "user", "go").id, "nano", "", {})
        writer.update(CONTENTS[name])
        writer.finish("stopped", "cancelled")
    options = ["--resume", key, "--temperature", "100", "--seed", "3", "--effort", "off", "--max-tokens", "60"]
    with Terminal(tmp_path, environ={"TMUX": ""}) as terminal:
        start(terminal, data, *options)
        terminal.wait("loading", gone=True)
        send(terminal, "/continue")
        terminal.wait("length limit")
        time.sleep(1.0)
        streamed = transcript(terminal.screen)
        answer = path_of(data)[-1]
        assert answer.text.startswith(CONTENTS[name]) and len(answer.text) > len(CONTENTS[name])
        leave(terminal)
        start(terminal, data, *options)
        terminal.wait("length limit")
        time.sleep(1.0)
        assert transcript(terminal.screen) == streamed
        leave(terminal)
    assert json.loads(run(data, "conversations", "export", key, "--format", "json"))["messages"][-1]["text"] == answer.text


def test_3_scrolled_up_the_view_stays_and_end_follows(tmp_path):
    with streaming(tmp_path, 600) as terminal:
        terminal.keys("PageUp")
        terminal.wait("new text below")
        before = terminal.screen
        assert transcript(running(terminal, tokens(before) + 300))[:-1] == transcript(before)[:-1]
        terminal.keys("C-End")
        terminal.wait("new text below", gone=True)
        at_end = transcript(terminal.screen)
        running(terminal, tokens(terminal.screen) + 200)
        assert transcript(terminal.screen) != at_end
        stop(terminal)
        leave(terminal)


def test_4_esc_in_prefill_in_thinking_and_in_the_answer(tmp_path):
    data = tmp_path / "data"
    with Terminal(tmp_path) as terminal:
        start(terminal, data, "--temperature", "100", "--effort", "high", "--max-tokens", "4000")
        terminal.wait("loading", gone=True)
        paste = " ".join(f"word{n}" for n in range(1400))
        terminal.paste(paste)
        terminal.wait("[paste 1")
        terminal.keys("End", "Enter")
        terminal.wait("prefill ")
        terminal.keys("Escape")
        terminal.wait("editing message 1")
        terminal.keys("Escape")
        terminal.wait("editing message 1", gone=True)
        terminal.keys("C-n")
        ask(terminal, "now think", "thinking  ")
        stop(terminal)
        send(terminal, "/effort off")
        send(terminal, "now answer")
        running(terminal, 30)
        terminal.keys("Escape")
        terminal.wait("gen ", gone=True)
        send(terminal, "/set temperature 0")
        ask(terminal, "define photosynthesis")
        leave(terminal)
    with Store.open(data, readonly=True) as store:
        second, first = store.list_conversations()
        assert [message.text for message in store.tree(first.id)] == [paste]
        path = store.path_to(store.conversation(second.id).leaf_id)
    assert [m.state for m in path] == ["complete", "stopped", "complete", "stopped", "complete", "complete"]
    assert path[1].thinking and not path[1].text and path[3].text and not path[3].thinking and path[5].text


def test_5_an_edit_makes_a_branch_and_both_are_exported(tmp_path):
    data = tmp_path / "data"
    with Terminal(tmp_path, 100, 40) as terminal:
        start(terminal, data, *SHORT)
        for number in range(1, 6):
            ask(terminal, f"define number {number}")
        terminal.keys("Tab")
        terminal.wait("c copy")
        terminal.keys("g", "e")
        terminal.wait("editing message 1")
        send(terminal, " again")
        terminal.wait("2/2")
        terminal.wait("number 5", gone=True)
        terminal.keys("Tab")
        terminal.wait("c copy")
        terminal.keys("g", "[")
        terminal.wait("number 5")
        assert "1/2" in terminal.screen
        terminal.keys("C-p")
        terminal.wait("Search for commands")
        send(terminal, "export")
        terminal.wait("all branches")
        terminal.keys("Home", *["Down"] * 5, "Enter")
        terminal.wait("(•) all branches")
        terminal.keys("End", "Up", "Enter")
        terminal.wait("define-number-1")
        leave(terminal)
    (file,) = tmp_path.glob("define-number-1-*.md")
    text = file.read_text("utf-8")
    assert "branch 1 of 2" in text and "branch 2 of 2" in text and "define number 5" in text and "define number 1 again" in text


def test_6_kill_9_while_streaming(tmp_path):
    data = tmp_path / "data"
    with streaming(tmp_path, 100) as terminal:
        seen = tokens(terminal.screen)
        time.sleep(2.0)  # the promised second, and one for a loaded machine
        terminal.kill()
        terminal.reset()
        start(terminal, data, "-c", *SHORT)
        assert "was interrupted" in terminal.wait("ctrl+R answers again")
        answer = path_of(data)[-1]
        assert answer.state == "interrupted" and len(answer.body_ids) >= seen - 1
        terminal.keys("C-r")
        terminal.wait("2/2")
        leave(terminal)


def test_7_kill_term(tmp_path):
    with streaming(tmp_path, 30) as terminal:
        os.kill(terminal.pid, signal.SIGTERM)
        terminal.wait("exit=143")
        assert terminal.modes == CLEAN
    assert path_of(tmp_path / "data")[-1].state == "stopped"


def test_8_resize_while_streaming(tmp_path):
    with streaming(tmp_path, 30) as terminal:
        terminal.resize(39, 9)
        terminal.wait("Generation continues")
        terminal.resize(100, 30)
        running(terminal, 60)
        stop(terminal)
        leave(terminal)


def test_9_lines_to_a_pipe(tmp_path):
    events = [json.loads(line) for line in run(tmp_path, "--stream-json", "-q", "hi", *SHORT).splitlines()]
    assert [events[0]["type"], events[-1]["type"]] == ["start", "done"]
    words = shlex.join([*program(tmp_path), "--stream-json", "-q", "hi", *LONG])
    shell = f"{{ {words}; echo $? > '{tmp_path}/code'; }} | head -1"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)
    assert (tmp_path / "code").read_text().strip() == "141"
    process = child(tmp_path, ["--stream-json", "-q", "hi", *LONG])
    while json.loads(process.stdout.readline())["type"] != "delta":
        continue
    process.send_signal(signal.SIGINT)
    assert json.loads(finished(process, 130).splitlines()[-1])["code"] == "interrupted"


def test_10_a_missing_build_is_one_object(tmp_path):
    process = child(tmp_path, ["--json", "-m", "nothing-of-this-name", "hi"])
    assert json.loads(finished(process, 4))["code"] == "build_missing"


def test_11_a_batch(tmp_path):
    three = '{"id": "a", "prompt": "define tree"}\n{"id": "b", "prompt": 7}\n{"id": "c", "prompt": "define bird"}\n'
    process = child(tmp_path / "data", ["--batch", "-", *SHORT], stdin=subprocess.PIPE)
    assert [json.loads(line)["ok"] for line in finished(process, 9, three.encode()).splitlines()] == [True, False, True]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": str(n), "prompt": f"q{n}"}) + "\n" for n in range(6)))
    words = ["--batch", str(source), "--batch-output", str(target)]
    process = child(tmp_path / "data", [*words, "--temperature", "100", "--effort", "off", "--max-tokens", "150"])
    while not target.exists() or target.read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    process = child(tmp_path / "data", [*words, *SHORT, "--resume-batch"])
    assert process.wait(120) == 0
    assert sorted(row["id"] for row in map(json.loads, target.read_text().splitlines()) if row["ok"]) == list("012345")


def test_12_closed_and_silent_input(tmp_path):
    process = child(tmp_path, ["--json", "hi", *SHORT], stdin=None, preexec_fn=lambda: os.close(0))
    assert json.loads(finished(process))["text"]
    process = child(tmp_path, ["--json", "--no-stdin", "hi", *SHORT], stdin=subprocess.PIPE)
    assert json.loads(process.stdout.readline())["text"] and process.wait(120) == 0
    process.stdin.close()


def test_13_without_a_back_end(tmp_path, no_back_end):
    """What the embedded model said before is searched and exported."""
    process = child(tmp_path / "first", ["--json", "define hazel", *SHORT])
    said = json.loads(finished(process))
    without_a_back_end(tmp_path, no_back_end)
    found = run(tmp_path / "first", "conversations", "list", "--search", "hazel", "--json", environ=no_back_end)
    assert [row["id"] for row in json.loads(found)] == [said["conversation"]]
    assert said["text"].strip()[:20] in run(tmp_path / "first", "conversations", "export", said["conversation"], environ=no_back_end)


def colourful(code: str) -> bool:
    """Whether a sequence chooses a colour that is no grey."""
    numbers = [int(number or 0) for number in code.split(";")]
    if numbers[0] in (38, 48) and len(numbers) == 5 and numbers[1] == 2:
        return len(set(numbers[2:])) > 1
    if numbers[0] in (38, 48) and len(numbers) == 3 and numbers[1] == 5:
        return numbers[2] not in (0, 7, 8, 15, 16, 59, 102, 145, 188, 231, *range(232, 256))
    return any(30 < number < 37 or 40 < number < 47 or 90 < number < 97 or 100 < number < 107 for number in numbers)


def test_14_themes_and_no_colour(tmp_path):
    """One conversation in all: the same text, and with NO_COLOR nothing but greys."""
    data, shown, coloured = tmp_path / "data", {}, {}
    process = child(data, ["--json", "define tree", "--temperature", "0"])
    key = json.loads(finished(process))["conversation"]
    for theme in ("dark", "light", "ansi", "no-color"):
        folder = tmp_path / theme
        folder.mkdir()
        environ, options = ({"NO_COLOR": "1"}, []) if theme == "no-color" else ({}, ["--theme", theme])
        with Terminal(folder, environ=environ) as terminal:
            start(terminal, data, "--resume", key, *options)
            terminal.wait("prefilled")
            terminal.wait("idle")
            time.sleep(1.0)
            shown[theme] = transcript(terminal.screen)
            coloured[theme] = {code for code in re.findall(r"\x1b\[([\d;]*)m", terminal.coloured) if colourful(code)}
            leave(terminal)
    assert len({tuple(lines) for lines in shown.values()}) == 1
    assert [bool(coloured[theme]) for theme in shown] == [True, True, True, False], coloured
    assert coloured["dark"] != coloured["light"]


def test_15_two_processes_on_one_conversation(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with Terminal(one) as first, Terminal(two) as second:
        start(first, tmp_path / "data", *SHORT)
        ask(first, "define tree")
        start(second, tmp_path / "data", "-c", *SHORT)
        second.wait("read-only here")
        second.type("more")
        second.keys("Enter")
        second.wait("This conversation is")
        assert len(path_of(tmp_path / "data")) == 2
        ask(first, "define bird")
        leave(first)
        leave(second)
    assert len(path_of(tmp_path / "data")) == 4


def test_16_a_failed_switch_leaves_the_old_build_answering(tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(embedded_pack(), broken)
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1000])
    with Terminal(tmp_path) as terminal:
        start(terminal, tmp_path / "data", *SHORT)
        ask(terminal, "define tree")
        send(terminal, f"/build {broken}")
        assert "nano goes on answering" in terminal.wait("was not loaded")
        ask(terminal, "define bird")
        leave(terminal)
    assert {message.build_name for message in path_of(tmp_path / "data") if message.role == "assistant"} == {"nano"}
