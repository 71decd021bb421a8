"""A disk without room: the failure is said once, and no temporary file stays."""

from __future__ import annotations

import errno
import io
import os

import pytest

from dsv41chat.store import Store
from dsv41chat.ui import batch
from dsv41chat.ui.output import Out
from tests.ui.fakes import Script
from tests.ui.program import Program


class Full(io.FileIO):
    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    return Program(tmp_path / "data", monkeypatch, Script("one two"))


@pytest.fixture
def full(monkeypatch):
    """Binary files by descriptor, as outputs are, are on a full disk; what waits in their buffer fails again when they close."""
    fdopen = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda fd, mode="r", *a, **k: io.BufferedWriter(Full(fd, "wb")) if mode == "wb" else fdopen(fd, mode, *a, **k))


def test_an_export_to_a_full_disk(program, tmp_path, request):
    assert program("--headless", "hi").code == 0
    request.getfixturevalue("full")
    result = program("conversations", "export", "--all", "--format", "json", "-o", str(tmp_path / "out" / "a.json"))
    assert result.code == 1 and result.err.count("cannot be written: No space left on device") == 1
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("mode", [(), ("--json",), ("--stream-json",), ("--no-stream",)])
def test_an_answer_to_a_full_disk(program, tmp_path, full, mode):
    result = program("--headless", *mode, "-o", str(tmp_path / "out" / "a.txt"), "hi")
    lines = [line for line in result.err.splitlines() if line.startswith("dsv41chat: ")]
    assert result.code == 1 and len(lines) == 1 and "a.txt cannot be written: No space left on device" in lines[0], result.err
    with Store.open(program.data, readonly=True) as store:
        place = f"  Try: dsv41chat conversations show {store.last_conversation().id}"
    # The first line of a stream comes before there is an answer.
    assert lines[0].endswith(place) == ("--stream-json" not in mode)
    assert os.listdir(tmp_path / "out") == []


def test_a_batch_file_on_a_full_disk(program, tmp_path, monkeypatch):
    items, results = tmp_path / "items.jsonl", tmp_path / "out" / "results.jsonl"
    items.write_text('{"prompt": "hi"}\n{"prompt": "there"}\n')
    monkeypatch.setattr(batch, "open", lambda *words: io.BufferedRandom(Full(words[0], "w+b")), raising=False)
    result = program("--batch", str(items), "--batch-output", str(results))
    (said,) = [line for line in result.err.splitlines() if line.startswith("dsv41chat: ")]
    assert result.code == 1 and said == f"dsv41chat: {results} cannot be written: No space left on device.  Try: --resume-batch goes on with the rest"


def test_a_batch_whose_reader_is_full_claims_nothing_stored(program, monkeypatch):
    monkeypatch.setattr(Out, "_write_all", lambda self, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    result = program("--batch", "-", stdin='{"prompt": "hi"}\n')
    assert result.code == 1 and "dsv41chat: Standard output cannot be written: No space left on device.\n" in result.err


def test_a_batch_file_that_cannot_be_replaced(program, tmp_path, monkeypatch):
    items, results = tmp_path / "items.jsonl", tmp_path / "out" / "results.jsonl"
    items.write_text('{"prompt": "hi"}\n')
    results.write_text('{"id": "1", "ok": false}\n')

    def fail(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    result = program("--headless", "--batch", str(items), "--batch-output", str(results), "--resume-batch")
    assert result.code == 2 and "No space left on device" in result.err
    assert os.listdir(tmp_path / "out") == ["results.jsonl"]
