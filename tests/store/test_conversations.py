"""Conversations: references, titles, lists, deletion."""

from __future__ import annotations

import pytest

from dsv41chat.store import Ambiguous, Locked, NotFound
from dsv41chat.store.conversations import DAY_S
from dsv41chat.store.titles import cell_width, cut, title_of


def rename_id(store, old, new):
    with store.db.write() as db:
        db.execute("UPDATE conversations SET id = ? WHERE id = ?", [new, old])


def test_ids_are_hex_of_eight_digits(store):
    ids = {store.new_conversation().id for _ in range(50)}
    assert len(ids) == 50 and all(len(key) == 8 and int(key, 16) >= 0 for key in ids)


def test_references(store):
    for key, title in [("abcd0001", "one"), ("abcd0002", "two"), ("beef0001", "abcd"), ("beef0002", "same"), ("beef0003", "same")]:
        rename_id(store, store.new_conversation(title).id, key)
    assert store.conversation("abcd0001").title == "one"
    assert store.conversation("ABCD0002").title == "two"
    assert store.conversation("two").id == "abcd0002"
    assert store.conversation("abcd").id == "beef0001", "an exact title wins over the beginning of an id"
    with pytest.raises(Ambiguous, match="abcd0002 'two'") as caught:
        store.conversation("abcd0")
    assert caught.value.code == "ambiguous" and set(caught.value.candidates) == {("abcd0001", "one"), ("abcd0002", "two")}
    with pytest.raises(Ambiguous):
        store.conversation("same")
    for bad in ("abc", "Two", "", "ffff", "abcd0001x", "beef000%"):
        with pytest.raises(NotFound) as missing:
            store.conversation(bad)
        assert missing.value.code == "not_found" and "conversations list" in missing.value.hint


def test_title_is_the_first_line_of_the_first_user_message(store):
    conversation = store.new_conversation()
    store.add_message(conversation.id, None, "system", "be brief")
    assert store.conversation(conversation.id).title == ""
    first = store.add_message(conversation.id, None, "user", "\n\n  Why \t are there two\x1b tables? \nmore")
    assert store.conversation(conversation.id).title == "Why are there two tables?"
    store.add_message(conversation.id, first.id, "user", "another")
    assert store.conversation(conversation.id).title == "Why are there two tables?"
    store.rename(conversation.id, " Tables \n")
    assert store.conversation(conversation.id).title == "Tables"
    store.rename(conversation.id, "")
    assert store.conversation(conversation.id).title == "Why are there two tables?"
    named = store.new_conversation("given")
    store.add_message(named.id, None, "user", "hello")
    assert store.conversation(named.id).title == "given"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("a" * 60, "a" * 60),
        ("a" * 61, "a" * 59 + "…"),
        ("漢" * 30, "漢" * 30),
        ("漢" * 31, "漢" * 29 + "…"),
        ("e\u0301" * 60, "e\u0301" * 60),
        ("🙂" * 31, "🙂" * 29 + "…"),
        ("word " * 20, ("word " * 12)[:59].rstrip() + "…"),
        ("\x1b[31mred\x07\u2028line", "[31mred"),
        (" \n\t\n", ""),
        ("x" * 1_000_000, "x" * 59 + "…"),
    ],
)
def test_titles_are_cut_at_sixty_cells(text, title):
    assert title_of(text) == title
    assert sum(map(cell_width, title_of(text))) <= 60


def test_cut_never_widens():
    assert cut("漢字", 4) == "漢字" and cut("漢字", 3) == "漢…" and cut("漢字", 2) == "…" and cut("", 0) == ""


def test_list_is_newest_first_with_numbers_of_the_newest_answer(store, clock):
    first = store.new_conversation("first")
    question = store.add_message(first.id, None, "user", "q")
    store.begin_answer(first.id, question.id, "old build", "f0", {}).finish("complete", "stop", "a", ids=[1], usage={"context_used": 10})
    clock.pass_seconds(1)
    store.begin_answer(first.id, question.id, "nano", "f1", {}).finish("complete", "stop", "b", ids=[1], usage={"context_used": 22_276})
    store.add_message(first.id, None, "system", "not counted")
    clock.pass_seconds(1)
    second = store.new_conversation("Second")
    lines = store.list_conversations()
    assert [line.id for line in lines] == [second.id, first.id]
    assert (lines[1].messages, lines[1].context_used, lines[1].build_name, lines[1].build_fingerprint) == (3, 22_276, "nano", "f1")
    assert (lines[0].messages, lines[0].context_used, lines[0].build_name) == (0, None, None)
    clock.pass_seconds(1)
    store.add_message(first.id, question.id, "user", "again")
    assert [line.title for line in store.list_conversations()] == ["first", "Second"]
    assert [line.title for line in store.list_conversations(limit=1)] == ["first"]
    assert [line.title for line in store.list_conversations(limit=1, offset=1)] == ["Second"]
    assert [line.title for line in store.list_conversations(build="nano")] == ["first"]
    assert [line.title for line in store.list_conversations(sort="title")] == ["first", "Second"]
    assert [line.title for line in store.list_conversations(sort="created")] == ["Second", "first"]
    assert [line.title for line in store.list_conversations(sort="size")] == ["first", "Second"]
    store.pin(second.id)
    assert [line.title for line in store.list_conversations(pinned_first=True)] == ["Second", "first"]
    assert [line.title for line in store.list_conversations()] == ["first", "Second"]


def test_list_searches_titles_and_texts(store):
    tables = store.new_conversation("Engram Tables")
    other = store.new_conversation("Other")
    store.add_message(other.id, None, "user", "what about engram rows?")
    find = lambda *args, **kw: {line.title for line in store.list_conversations(*args, **kw)}
    assert find("engram") == {"Engram Tables", "Other"}
    assert find("engram", titles_only=True) == {"Engram Tables"}
    assert find("gram tab") == {"Engram Tables"}
    assert find("ngram ro") == {"Other"}, "parts of words are found by reading"
    assert find("nothing") == set()
    store.delete(tables.id)
    assert find("engram") == {"Other"} and find("engram", deleted=True) == {"Engram Tables"}


def test_last_conversation_is_the_one_used_last(store, clock):
    assert store.last_conversation() is None
    first = store.new_conversation()
    clock.pass_seconds(1)
    second = store.new_conversation()
    assert store.last_conversation().id == second.id
    clock.pass_seconds(1)
    store.touch(first.id)
    assert store.last_conversation().id == first.id
    clock.pass_seconds(1)
    store.add_message(second.id, None, "user", "hi")
    assert store.last_conversation().id == second.id
    store.delete(second.id)
    assert store.last_conversation().id == first.id


def test_settings_and_view_stay_with_the_conversation(store):
    conversation = store.new_conversation(settings={"effort": "off", "temperature": 0.5})
    assert store.conversation(conversation.id).settings == {"effort": "off", "temperature": 0.5}
    store.set_settings(conversation.id, {"system": "漢"})
    store.set_view(conversation.id, {"scroll": 12, "folds": ["a"]})
    read = store.conversation(conversation.id)
    assert (read.settings, read.view) == ({"system": "漢"}, {"scroll": 12, "folds": ["a"]})
    with pytest.raises(NotFound):
        store.set_settings("00000000", {})


def test_delete_undelete_purge(store, clock):
    kept, gone = store.new_conversation("kept"), store.new_conversation("gone")
    message = store.add_message(gone.id, None, "user", "findable words")
    with pytest.raises(NotFound):
        store.delete(gone.id, "00000000")
    assert len(store.list_conversations()) == 2, "all or none"
    store.delete(gone.id)
    assert [line.title for line in store.list_conversations()] == ["kept"]
    assert [line.title for line in store.list_conversations(deleted=True)] == ["gone"]
    with pytest.raises(NotFound):
        store.conversation("gone")
    assert store.conversation("gone", deleted=True).deleted == clock()
    assert store.search("findable").hits == ()
    store.undelete(gone.id)
    assert store.search("findable").hits[0].message_id == message.id
    store.delete(gone.id)
    clock.pass_seconds(30 * DAY_S - 1)
    assert store.purge_deleted(30) == ()
    clock.pass_seconds(2)
    assert store.purge_deleted(30) == (gone.id,)
    assert store.list_conversations(deleted=True) == []
    with pytest.raises(NotFound):
        store.message(message.id)
    assert store.conversation(kept.id).title == "kept"


def test_no_trace_of_a_purged_conversation_is_left_in_the_files(store, data_dir):
    conversation = store.new_conversation("zebrafish title")
    other = store.new_conversation("other")
    store.add_message(other.id, None, "user", "hay " * 500)
    question = store.add_message(conversation.id, None, "user", "zebrafish question", ids=[0x7A65627A] * 8)
    with store.begin_answer(conversation.id, question.id, "nano", "f", {}) as writer:
        for number in range(1, 200):
            writer.update("zebrafish answer " * number, "zebrafish thought " * number, [0x7A65627A] * number)
            writer.checkpoint()
        writer.finish("complete", "stop", ids=[0x7A65627A] * 200)
    store.save_draft(conversation.id, "zebrafish draft")
    store.queue_push(conversation.id, "zebrafish queued")
    bytes_of = lambda: b"".join(path.read_bytes() for path in data_dir.iterdir()).lower()
    assert b"zebrafish" in bytes_of() and b"zbez" in bytes_of()
    store.purge(conversation.id)
    assert b"zebrafish" not in bytes_of() and b"zbez" not in bytes_of()
    assert store.search("hay").hits


def test_a_conversation_open_elsewhere_is_not_changed(store, open_store):
    conversation = store.new_conversation("mine")
    other = open_store()
    store.lock(conversation.id)
    for change in (
        lambda: other.add_message(conversation.id, None, "user", "x"),
        lambda: other.begin_answer(conversation.id, None, None, None, None),
        lambda: other.delete(conversation.id),
        lambda: other.purge(conversation.id),
    ):
        with pytest.raises(Locked):
            change()
    store.add_message(conversation.id, None, "user", "mine")
    store.delete(conversation.id)
    assert other.purge_deleted(-1) == ()
    store.unlock(conversation.id)
    assert other.purge_deleted(-1) == (conversation.id,)


def test_a_message_that_is_back_in_the_composer_is_not_counted(store):
    """It is the draft that replaces it, or was taken off the branch on screen; answered, it counts whatever is written."""
    key = store.new_conversation().id
    count = lambda: store.list_conversations()[0].messages
    first = store.add_message(key, None, "user", "question").id
    assert count() == 1, "sent, and not answered yet"
    store.save_draft(key, "question", editing=first)
    assert count() == 0
    store.save_draft(key, "")
    assert count() == 1
    store.set_leaf(key, None)
    assert count() == 0
    store.set_leaf(key, first)
    answer = store.add_message(key, first, "assistant", "answer").id
    store.save_draft(key, "question", editing=first)
    assert count() == 2
    store.add_message(key, answer, "user", "too long")
    assert count() == 3
    store.set_leaf(key, answer)
    assert count() == 2
