"""States that cannot be used, through the command line and on the screen: one line, the same answer, and silence afterwards."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.ui.chats import GREEDY, Chat

pytestmark = pytest.mark.usefixtures("shared_weights")
TEXTS = ("Sinkhorn iterations normalise the rows and the columns of a matrix by turns until both sums are one. " * 2, "How often?", "And then?")
OPTIONS = ("--temperature", "0", "--effort", "off", "--max-tokens", "6", "--draft", "off")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A data folder with one turn and its states, and the ids' hashes of all turns of a chat without states."""
    base = tmp_path_factory.mktemp("states")
    with Chat(base / "kept") as chat:
        said = chat.say(TEXTS[0])
    with Chat(base / "cold", cache=False) as chat:
        hashes = [chat.say(text).hash for text in TEXTS]
    assert said.hash == hashes[0]
    return base / "kept", hashes


def flip(at: int):
    """Changes one bit of a file, counted from its end when `at` is negative."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return damage


def foreign(path: Path) -> None:
    """The file says that another build made it."""
    data = path.read_bytes()
    found = re.search(rb'"fp":\s*"([0-9a-f]+)"', data)
    path.write_bytes(data[: found.start(1)] + found[1][::-1] + data[found.end(1) :])


def swap(folder: Path) -> None:
    a, b = sorted(folder.glob("tail/??/*"))
    whole = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(whole)


def newer(folder: Path) -> None:
    with sqlite3.connect(folder / "index.db") as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")


def each(kind: str, damage):
    return lambda folder: [damage(path) for path in folder.glob(f"{kind}/??/*")]


UNUSABLE = r"Saved state for this chat could not be used \({}\); re-reading \d+ tokens"
# What a file's size tells, the sweep at the start may find before the turn does.
BY_SIZE = UNUSABLE + "|cold: state damaged, removed; reading \\d+ of \\d+ tokens"
FAULTS = {
    **{f"{where} of a {kind}": (each(kind, flip(at)), UNUSABLE.format("checksum"))
       for kind in ("seg", "tail") for where, at in (("header", 30), ("body", -5))},
    **{f"truncated {kind}": (each(kind, lambda path: os.truncate(path, path.stat().st_size - 1)), BY_SIZE.format("truncated"))
       for kind in ("seg", "tail")},
    **{f"missing {kind}": (each(kind, Path.unlink), BY_SIZE.format("missing (?:file|segment)")) for kind in ("seg", "tail")},
    "swapped tails": (swap, BY_SIZE.format("(?:wrong place|truncated)")),
    "tails of another build": (each("tail", foreign), UNUSABLE.format("different model build")),
    "a newer index": (newer, "The index of the saved states was written by a newer version"),
    "no index": (lambda folder: (folder / "index.db").write_bytes(b"no database " * 900), "The index of the saved states could not be read"),
}  # fmt: skip


def lines_about_states(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if re.search(r"[Ss]aved state|Computed states|computed states|cold:", line)]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_line_and_the_same_answer(program, first, fault, monkeypatch):
    data, hashes = first
    monkeypatch.setattr("dsv41chat.store.prompt_cache.MIN_FREE_BYTES", 0)
    shutil.copytree(data, program.data)
    damage, said = FAULTS[fault]
    damage(program.data / "cache" / "prompt_cache")
    second = program("--json", "-c", *OPTIONS, TEXTS[1], real=True)
    (line,) = lines_about_states(second.err)
    assert re.search(said, line), line
    assert second.code == 0 and second.object["ids_hash"] == hashes[1] and second.object["usage"]["cached_tokens"] == 0
    third = program("--json", "-c", *OPTIONS, TEXTS[2], real=True)
    assert lines_about_states(third.err) == [] and third.object["ids_hash"] == hashes[2]
    assert third.object["usage"]["cached_tokens"] == second.object["usage"]["context_used"] - 1


def test_a_full_disk(program, first, monkeypatch):
    """Nothing can be written: said once, the answers are what they were, and once there is room states are kept again."""
    data, hashes = first
    monkeypatch.setattr("dsv41chat.store.prompt_cache.MIN_FREE_BYTES", 0)
    shutil.copytree(data, program.data)

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dsv41chat.store.prompt_cache_put.write_file", full)
        second = program("--json", "-c", *OPTIONS, TEXTS[1], real=True)
    (line,) = lines_about_states(second.err)
    assert "The disk is full: computed states are not kept for 10 minutes." in line
    assert second.code == 0 and second.object["ids_hash"] == hashes[1]
    third = program("--json", "-c", *OPTIONS, TEXTS[2], real=True)
    assert lines_about_states(third.err) == [] and third.object["ids_hash"] == hashes[2]


async def test_the_screen_says_it_too(first, tmp_path, monkeypatch):
    """When the conversation's state is brought back behind the reader's back, before there is a next message."""
    from dsv41chat.ui.app import ChatApp
    from dsv41chat.ui.screens.chat import ChatScreen
    from dsv41chat.ui.turn_events import AppStart
    from tests.ui.tui import say, until

    data, hashes = first
    shutil.copytree(data, tmp_path / "data")
    each("tail", flip(-5))(tmp_path / "data/cache/prompt_cache")
    told, tell = [], ChatScreen.tell
    monkeypatch.setattr(ChatScreen, "tell", lambda self, text, *rest: told.append(text) or tell(self, text, *rest))
    chat = Chat(tmp_path / "data", flags={f"chat.{name}": value for name, value in GREEDY.items() if name != "draft"})
    conversation = chat.store.last_conversation().id
    app = ChatApp(chat.controller, AppStart(chat.controller.open(conversation)))
    async with app.run_test(size=(110, 30)) as pilot:
        await until(lambda: len(told) > 0)
        await say(pilot, app, TEXTS[1])
    message = chat.store.message(chat.store.conversation(conversation).leaf_id)
    chat.close()
    assert len([text for text in told if re.search(UNUSABLE.format("checksum"), text)]) == 1, told
    assert message.ids_hash == hashes[1]
