"""Conversations that went on in memory come back: into their own conversation where that can take them, once, else as a copy that says so."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from dsv41chat.store import Store, StoreBusy, StoreFull
from dsv41chat.store.records import Message


@pytest.fixture
def disk(tmp_path: Path):
    with Store.open(tmp_path, background=False) as store:
        yield store


def begun(disk: Store) -> tuple[str, list[Message]]:
    """A conversation on disk whose second answer was cut by the disk, and its branch as the screen has it: with all of that answer."""
    key = disk.new_conversation(None, {"system": "be brief"}).id
    question = disk.add_message(key, None, "user", "first")
    disk.add_message(key, question.id, "assistant", "other branch")
    answer = disk.add_message(key, question.id, "assistant", "short")
    second = disk.add_message(key, answer.id, "user", "second")
    writer = disk.begin_answer(key, second.id, "nano", "f", {"seed": 1})
    writer.update("half", "", (), (1, 2))
    writer.checkpoint()
    disk._forget(writer)
    whole = replace(disk.message(writer.id), text="half and the rest", state="stopped", finish="cancelled", body_blob=None)
    return key, [question, answer, second, whole]


def in_memory(disk: Store, key: str, shown: list[Message]) -> Store:
    """The branch in memory, where it goes on."""
    memory = Store.memory(background=False)
    source = disk.conversation(key)
    memory.add_tree(shown, title=source.title, settings=source.settings, keep_ids=True, wish=key)
    memory.add_message(key, shown[-1].id, "user", "in memory")
    return memory


def texts(store: Store, key: str) -> list[str]:
    return [m.text for m in store.tree(key)]


def test_what_went_on_in_memory_comes_back_into_its_conversation(disk):
    key, shown = begun(disk)
    disk.queue_push(key, "sent in memory")
    memory = in_memory(disk, key, shown)
    memory.set_settings(key, {"system": "be long"})
    memory.rename(key, "other title")
    memory.queue_push(key, "waits")
    for _ in range(2):  # the second time for one that is there already
        assert disk.take_in(memory) == {key: key}
        assert texts(disk, key) == ["first", "other branch", "short", "second", "half and the rest", "in memory"]
        cut = disk.message(shown[-1].id)
        assert (cut.state, cut.finish, cut.params, cut.build_name, cut.body_ids) == ("stopped", "cancelled", {"seed": 1}, "nano", None)
        (row,) = disk.list_conversations()
        conversation = disk.conversation(key)
        assert (row.title, conversation.settings) == ("other title", {"system": "be long"})
        assert disk.message(conversation.leaf_id).text == "in memory"
        assert [item.text for item in disk.queued(key)] == ["waits"]
    assert disk.recovered == () and disk.locks.bury() == (), "no answer is left running"


def test_an_answer_that_was_written_after_all_keeps_what_is_stored_with_it(disk):
    """Its writer tries once more when its store is closed."""
    key, shown = begun(disk)
    with disk.db.write() as db:
        db.execute("UPDATE messages SET text = 'half and the rest', body_ids = ?, state = 'interrupted' WHERE id = ?", [b"abcd", shown[-1].id])
    disk.take_in(in_memory(disk, key, shown))
    cut = disk.message(shown[-1].id)
    assert (cut.text, cut.state, cut.finish, cut.body_blob) == ("half and the rest", "stopped", "cancelled", b"abcd")


@pytest.mark.parametrize("change", ["deleted", "open elsewhere", "another text", "moved"])
def test_what_cannot_come_back_becomes_a_copy_that_says_so(disk, tmp_path, change):
    key, shown = begun(disk)
    memory = in_memory(disk, key, shown)
    other = Store.open(tmp_path, background=False)
    if change == "deleted":
        disk.delete(key)
    elif change == "open elsewhere":
        other.lock(key)
    else:
        column, value = {"another text": ("text", "something else"), "moved": ("parent_id", None)}[change]
        with disk.db.write() as db:
            db.execute(f"UPDATE messages SET {column} = ? WHERE id = ?", [value, shown[1].id])
    before = disk.tree(key)
    made = disk.take_in(memory)[key]
    assert made != key and disk.tree(key) == before
    assert disk.conversation(made).title == "first (saved again)"
    assert texts(disk, made) == ["first", "short", "second", "half and the rest", "in memory"]
    other.close()


def test_a_branch_that_was_removed_meanwhile_comes_back(disk):
    key, shown = begun(disk)
    memory = in_memory(disk, key, shown)
    with disk.db.write() as db:
        db.execute("UPDATE messages SET state = 'interrupted' WHERE state = 'running'")
    disk.delete_branch(shown[1].id)
    assert disk.take_in(memory) == {key: key}
    assert texts(disk, key) == ["first", "other branch", "short", "second", "half and the rest", "in memory"]


def test_only_what_was_written_there_is_taken_and_all_or_nothing(disk, tmp_path, monkeypatch):
    key, _ = begun(disk)
    copy = Store.memory(copy_of=tmp_path, background=False)
    assert disk.take_in(copy) == {}
    one, two = (copy.new_conversation(name) for name in ("one", "two"))
    for made in (one, two):
        copy.add_message(made.id, None, "user", made.title)
    calls = []

    def full(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise StoreFull("the disk is full", "free some space")
        return add_tree(*args, **options)

    add_tree = disk.add_tree
    monkeypatch.setattr(disk, "add_tree", full)
    with pytest.raises(StoreFull):
        disk.take_in(copy)
    assert [row.id for row in disk.list_conversations()] == [key]
    monkeypatch.undo()
    assert disk.take_in(copy) == {one.id: one.id, two.id: two.id}
    assert {row.title for row in disk.list_conversations()} == {"first", "one", "two"}


def test_what_an_earlier_store_could_not_give_up_is_free(tmp_path, monkeypatch):
    """It could not be told to the disk; a store that cannot write leaves the earlier one alone."""
    earlier, later = (Store.open(tmp_path, background=False, busy_s=0.1) for _ in range(2))
    key = earlier.new_conversation("one").id
    earlier.lock(key)
    other = sqlite3.connect(tmp_path / "chat.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy):
        later.succeed(earlier)
    assert not earlier.closed

    def full() -> None:
        raise StoreFull("the disk is full", "free some space")

    monkeypatch.setattr(earlier.locks, "leave", full)
    other.close()
    later.succeed(earlier)
    assert earlier.closed and later.lock(key).here
    later.close()
