"""Texts that no context holds: refused after a bounded reading, and never counted in one go."""

from __future__ import annotations

import io
import json
import os
import threading
from types import SimpleNamespace

import pytest

from dsv41chat.engine.chat import tokenizer as tokens
from dsv41chat.engine.errors import Cancelled, ContextFull
from dsv41chat.store import Store
from dsv41chat.ui import batch, commands, inputs
from dsv41chat.ui.interrupts import Interrupts
from tests.ui.fakes import FakeTokenizer, Script
from tests.ui.program import Program
from tests.ui.tui import chat_of, drawn, ended, make_app, running, say, shows, until


@pytest.fixture
def program(tmp_path, monkeypatch):
    return Program(tmp_path / "data", monkeypatch)


class Counting(FakeTokenizer):
    """Notes how long the texts are that it encodes. each: called before."""

    def __init__(self):
        super().__init__()
        self.lengths: list[int] = []
        self.each = lambda: None

    def encode_text(self, text):
        self.each()
        self.lengths.append(len(text))
        return super().encode_text(text)


class Endless(io.RawIOBase):
    """A device that never ends. given: the bytes it gave."""

    given = 0

    def read(self, size=-1):
        assert size >= 0, "it was to be read to its end"
        self.given += size
        return b"x" * size


def test_no_more_than_the_limit_is_read():
    for size, whole in ((99, True), (100, True), (101, False)):
        assert (inputs.read_bytes(io.BytesIO(b"x" * size), 100) is not None) is whole
    endless = Endless()
    assert inputs.read_bytes(endless, 3 << 20) is None and endless.given == (3 << 20) + 1
    assert inputs.read_bytes(io.BytesIO(b"x" * 5000), None) == b"x" * 5000


@pytest.mark.parametrize("how", ["file", "prompt", "system", "stdin"])
def test_a_text_beyond_the_limit_is_a_full_context(program, tmp_path, monkeypatch, how):
    monkeypatch.setattr(inputs.read_text, "__kwdefaults__", {"limit": 1000})
    monkeypatch.setattr(inputs.read_stdin, "__kwdefaults__", {"limit": 1000})
    path = tmp_path / "long.txt"
    path.write_text("x" * 1001)
    argv = {"file": ("-f", str(path), "hi"), "prompt": ("--prompt-file", str(path)), "system": ("hi", "--system-file", str(path)), "stdin": ()}[how]
    result = program("--json", *argv, stdin="x" * 1001 if how == "stdin" else None)
    assert (result.code, result.object["code"], result.object["exit_code"]) == (7, "context_full", 7)
    assert "1,000 bytes" in result.object["message"] and "does not fit" in result.object["message"]
    path.write_text("x" * 1000)
    assert program("--json", *argv, stdin="x" * 1000 if how == "stdin" else None).code == 0


def test_a_batch_beyond_its_limit_is_refused(program, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "MAX_BATCH_BYTES", 1000)
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 1000}) + "\n")
    for argv, stdin in (((str(path),), None), (("-",), path.read_text())):
        result = program("--headless", "--batch", *argv, stdin=stdin)
        assert result.code == 2 and "1,000 bytes" in result.err and not result.out


def test_a_long_text_is_encoded_only_as_far_as_the_context_reaches(program, tmp_path):
    tokenizer = Counting()
    script = Script(context_limit=3 * tokens.PIECE, tokenizer=tokenizer)
    path = tmp_path / "long.txt"
    path.write_text("x" * (3 << 20))
    result = program("--json", "-f", str(path), script=script)
    assert (result.code, result.object["code"]) == (7, "context_full") and script.prompts == []
    assert f"{script.context_limit:,}" in result.object["message"] and "does not fit" in result.object["message"]
    assert max(tokenizer.lengths) <= tokens.PIECE and sum(tokenizer.lengths) <= 5 * tokens.PIECE
    dry = program("--json", "--dry-run", "-f", str(path), script=script)
    assert (dry.code, dry.object["code"]) == (7, "context_full")
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"prompt": "x" * (3 << 20)}) + "\n" + json.dumps({"prompt": "hi"}) + "\n")
    lines = program("--headless", "--batch", str(items), script=script)
    assert lines.code == 9 and [line.get("ok") for line in lines.events] == [False, True]
    assert lines.events[0]["error"]["code"] == "context_full"
    assert max(tokenizer.lengths) <= tokens.PIECE


def test_a_long_text_that_fits_is_answered(program, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("x" * (1 << 19))
    result = program("--json", "-f", str(path), script=Script(context_limit=1 << 20))
    assert result.code == 0 and result.object["usage"]["prompt_tokens"] > 1 << 19


def test_a_signal_is_heard_between_the_pieces(program, tmp_path, monkeypatch):
    tokenizer = Counting()
    made = []
    enter = Interrupts.__enter__
    monkeypatch.setattr(Interrupts, "__enter__", lambda self: made.append(self) or enter(self))

    def each():
        if len(tokenizer.lengths) == 2:
            made[-1]._stop(143)

    tokenizer.each = each
    path = tmp_path / "long.txt"
    path.write_text("x" * (1 << 20))
    result = program("--json", "-f", str(path), script=Script(context_limit=1 << 22, tokenizer=tokenizer))
    assert (result.code, result.object["code"], result.object["exit_code"]) == (143, "interrupted", 143)
    assert len(tokenizer.lengths) == 3


@pytest.mark.parametrize("stop", [124, 130, 143])
def test_a_full_context_keeps_its_exit_code_after_a_signal(program, monkeypatch, stop):
    """The object names one code and its exit code, whatever came while the prompt was encoded."""
    tokenizer = Counting()
    made = []
    enter = Interrupts.__enter__
    monkeypatch.setattr(Interrupts, "__enter__", lambda self: made.append(self) or enter(self))
    tokenizer.each = lambda: made[-1]._stop(stop) if made[-1].code is None else None
    result = program("--json", "--timeout", "600", "x" * 200, script=Script(context_limit=100, tokenizer=tokenizer))
    assert (result.code, result.object["exit_code"], result.object["code"]) == (7, 7, "context_full")


def test_a_counted_text_stops_when_it_has_enough():
    tokenizer = Counting()
    assert tokens.count_text(tokenizer, "x" * 100_000) == 100_000
    tokenizer.lengths.clear()
    assert 20_000 < tokens.count_text(tokenizer, "x" * 100_000, 20_000) <= 100_000 and len(tokenizer.lengths) == 2
    with pytest.raises(Cancelled):
        tokens.count_text(tokenizer, "x", stopped=lambda: True)


@pytest.mark.parametrize("text", ["word " * 20_000, "a" * 50_000, "漢字" * 25_000, " \n" * 25_000, "1234567890" * 5_000])
def test_pieces_count_about_what_the_whole_has(text):
    from dsv41chat.nano import embedded_pack

    whole = tokens.ChatTokenizer.from_file(embedded_pack() / "tokenizer.json")
    exact, pieces = len(whole.encode_text(text)), tokens.count_text(whole, text)
    assert abs(pieces - exact) <= len(text) // tokens.PIECE, "one a cut at most"
    assert tokens.count_text(whole, text, exact) == pieces, "what just fits is never refused"


def test_an_attached_file_is_read_to_the_limit_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "a.txt"
    path.write_text("x" * 1001)
    with pytest.raises(commands.CommandError, match="1,000 bytes"):
        commands.read_attachment(str(path))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(commands.CommandError, match="is not a file"):
        commands.read_attachment(str(pipe))
    with pytest.raises(commands.CommandError, match="cannot be read"):
        commands.read_attachment(str(tmp_path))


def test_nothing_of_a_text_that_was_not_read_is_stored(program, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs.read_text, "__kwdefaults__", {"limit": 10})
    path = tmp_path / "long.txt"
    path.write_text("x" * 11)
    assert program("--json", "-f", str(path), "hi").code == 7
    with pytest.raises(ContextFull):
        inputs.read_text(str(path), "it")
    if (program.data / "chat.db").exists():
        with Store.open(program.data, readonly=True) as store:
            assert store.last_conversation() is None


async def test_the_screen_counts_a_large_file_in_pieces(tmp_path):
    tokenizer = Counting()
    path = tmp_path / "long.txt"
    path.write_text("some words\n" * 40_000)
    app = make_app(tmp_path, Script(tokenizer=tokenizer))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        chat.composer.insert(f"/read {path}")
        await pilot.press("enter")
        await until(lambda: "[file 1: long.txt" in chat.composer.text)
        await until(lambda: chat.status.forecast >= 440_000)
        assert max(tokenizer.lengths) <= tokens.PIECE
        await pilot.press("enter")
        await shows(app, "This message alone has")
        assert max(tokenizer.lengths) <= tokens.PIECE


@pytest.fixture
def counting():
    """A tokenizer that takes its time with each piece of a text of w, until it is let go. pieces: those it was given."""
    tokenizer = Counting()
    go, pieces, encode = threading.Event(), [], tokenizer.encode_text

    def slowly(text):
        if text.startswith("wwww"):
            pieces.append(text)
            go.wait(60 if len(pieces) == 1 else 0)
        return encode(text)

    tokenizer.encode_text = slowly
    yield SimpleNamespace(tokenizer=tokenizer, go=go, pieces=pieces)
    go.set()


BIG = "w" * (tokens.PIECE * 6)


@pytest.mark.parametrize("away", ["ctrl+n", "ctrl+c", "backspace"])
async def test_a_count_ends_with_its_text(tmp_path, counting, away):
    """What is counted is gone from the composer: its count does not go on, and is not shown for another text."""
    app = make_app(tmp_path, Script(tokenizer=counting.tokenizer))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        chat.composer.take(BIG)
        await until(lambda: len(counting.pieces) == 1)
        await pilot.press(away)
        await until(lambda: chat.composer.text == "")
        await drawn(app)
        counting.go.set()
        await until(lambda: not [worker for worker in app.workers if worker.group == "chips" and not worker.is_finished])
        assert len(counting.pieces) == 1 and chat.status.forecast == 0 and "full" not in await drawn(app)
        if away == "ctrl+c":
            await pilot.press("ctrl+z")
            assert chat.composer.expanded() == BIG, "it was said that this brings it back"
            await until(lambda: chat.status.forecast >= len(BIG))
            await pilot.press("ctrl+c")
        chat.composer.take("x" * 9000)
        await until(lambda: chat.status.forecast >= 9000)


async def test_a_count_goes_on_while_one_types(tmp_path, counting):
    app = make_app(tmp_path, Script(tokenizer=counting.tokenizer))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        chat.composer.take(BIG)
        await until(lambda: len(counting.pieces) == 1)
        await pilot.press(*"more")
        await drawn(app)
        counting.go.set()
        await until(lambda: chat.status.forecast >= len(BIG))
        assert len(counting.pieces) == 6, "from the beginning for each key"


@pytest.mark.parametrize("meanwhile", ["nothing", "ctrl+n", "f1"])
async def test_a_late_question_about_a_message_comes_only_while_it_is_on_the_screen(tmp_path, counting, meanwhile):
    app = make_app(tmp_path, Script(tokenizer=counting.tokenizer, context_limit=1000))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        counting.pieces += ["as if it had been counted"] * 10
        chat.composer.insert(BIG)
        # The turn reads as much as the context holds; the question reads all.
        late, count = threading.Event(), app.count_tokens
        app.count_tokens = lambda *words: late.wait(60) and count(*words)
        chat.composer.submit()
        await shows(app, "The message is saved.")
        if meanwhile != "nothing":
            await pilot.press(meanwhile)
            await drawn(app)
        late.set()
        if meanwhile == "f1":
            await until(lambda: app.screen is not chat)
            assert "This message alone" not in await drawn(app)
            await pilot.press("escape")
        if meanwhile != "ctrl+n":
            await shows(app, "This message alone has")
        else:
            await until(lambda: not [worker for worker in app.workers if worker.group == "context" and not worker.is_finished])
            assert app.screen is chat and "This message alone" not in await drawn(app)


class Slow:
    """Stands in for a disk: a read goes on until it is let go, or until its reader wants no more."""

    def __init__(self, monkeypatch):
        self.go, self.reads, self.ended = threading.Event(), 0, 0
        plain = inputs.read_bytes

        def read(file, limit, note=lambda done: None):
            self.reads += 1
            try:
                while not self.go.wait(0.01):
                    note(1000)
                return plain(file, limit, note)
            finally:
                self.ended += 1

        monkeypatch.setattr(inputs, "read_bytes", read)


@pytest.fixture
def slow(monkeypatch):
    disk = Slow(monkeypatch)
    yield disk
    disk.go.set()


@pytest.mark.parametrize("how", ["command", "tab"])
async def test_the_screen_lives_while_a_file_is_read(tmp_path, slow, how):
    """What is typed stands behind the file, and Enter sends both once it is read."""
    path = tmp_path / "long.txt"
    path.write_text("some words\n" * 1000)
    app = make_app(tmp_path, Script())
    async with running(app) as (pilot, chat):
        chat.composer.insert(f"/read {path}" if how == "command" else f"see @{path}")
        await pilot.press("enter" if how == "command" else "tab")
        await shows(app, "[file 1: long.txt, reading]", "reading long.txt 9% · Esc cancels")
        await pilot.press(*"what", "enter", "n")
        assert chat.conversation is None and chat.composer.text.endswith("what\nn")
        chat.save_draft(now=True)
        kept = app.store.draft(None)
        assert "reading]" not in kept.text and not (kept.meta or {}).get("chips") and kept.text.endswith("what\nn")
        slow.go.set()
        await ended(chat)
        text = app.store.path_to(chat.leaf_id)[0].text
        assert text == ("" if how == "command" else "see ") + inputs.fenced("long.txt", path.read_text()) + "\n\nwhat\nn"


@pytest.mark.parametrize("typed", ["", "more"])
async def test_esc_ends_the_reading_of_a_file(tmp_path, slow, typed):
    path = tmp_path / "long.txt"
    path.write_text("some words\n")
    app = make_app(tmp_path, Script())
    async with running(app, notifications=True) as (pilot, chat):
        chat.composer.insert(f"/read {path}")
        await pilot.press("enter")
        await until(lambda: slow.reads == 1)
        await pilot.press(*typed, *(["enter"] if typed else []), "escape")
        await until(lambda: slow.ended == 1 and not chat._readings)
        assert chat.composer.text == (f"{typed}\n" if typed else f"/read {path}") and "reading long.txt" not in await drawn(app)
        await shows(app, "Not read: long.txt.")
        assert chat.conversation is None, "the message that waited for it is not sent without it"
        chat.composer.reset(f"/read {path}")
        slow.go.set()
        await pilot.press("enter")
        await until(lambda: "[file 1: long.txt, 1 line]" in chat.composer.text)


async def test_a_file_that_cannot_be_read_gives_its_command_back(tmp_path):
    odd = tmp_path / "a] b.txt"
    odd.write_text("text")
    app = make_app(tmp_path, Script())
    async with running(app, notifications=True) as (pilot, chat):
        chat.composer.insert(f"/read {tmp_path}/none")
        await pilot.press("enter")
        # Of a notice the lines break where the path of the temporary folder lets them.
        await until(lambda: any("cannot be read" in note.message for note in app._notifications))
        await until(lambda: chat.composer.text == f"/read {tmp_path}/none")
        chat.composer.reset(f"/read {odd}")
        await pilot.press("enter")
        await until(lambda: "[file 1: a) b.txt, 1 line]" in chat.composer.text)
        assert chat.composer.expanded() == inputs.fenced("a] b.txt", "text") + "\n\n", "a bracket in its name does not hide its text"
        await pilot.press("ctrl+z", "ctrl+y")
        assert "[file 1: a) b.txt, 1 line]" in chat.composer.text
