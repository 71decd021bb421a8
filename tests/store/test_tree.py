"""Messages as a tree: paths, branches, leaves, forks and copies."""

from __future__ import annotations

import random

import pytest

from dsv41chat.store import Ambiguous, Locked, NotFound, Store


def test_a_user_message_is_committed_before_add_returns(store, open_store):
    conversation = store.new_conversation()
    message = store.add_message(conversation.id, None, "user", "hello", ids=[5, 4_294_967_295, 0])
    # Another connection sees only what is committed.
    other = open_store(readonly=True)
    assert other.message(message.id) == message
    assert message.ids == (5, 4_294_967_295, 0)
    assert message.ids_blob == b"\x05\0\0\0" + b"\xff" * 4 + b"\0" * 4
    assert (message.state, message.reasoning_ids, message.body_ids) == ("complete", None, None)
    assert other.conversation(conversation.id).leaf_id == message.id


def test_texts_come_back_as_they_were(store):
    conversation = store.new_conversation()
    text = "a\0b\r\n\ttab \x1b[31m \u200d 漢字 👩‍👩‍👧 e\u0301 <｜User｜> \U0010ffff"
    assert store.add_message(conversation.id, None, "user", text).text == text
    assert store.add_message(conversation.id, None, "user", "half \ud83d pair").text == "half \ufffd pair"


def test_refuses_wrong_roles_parents_and_ids(store):
    conversation, other = store.new_conversation(), store.new_conversation()
    message = store.add_message(conversation.id, None, "user", "hello")
    with pytest.raises(ValueError, match="role"):
        store.add_message(conversation.id, None, "robot", "x")
    with pytest.raises(NotFound, match="no message"):
        store.add_message(other.id, message.id, "user", "x")
    with pytest.raises(NotFound, match="no conversation"):
        store.add_message("00000000", None, "user", "x")
    with pytest.raises(ValueError, match="4294967295"):
        store.add_message(conversation.id, None, "user", "x", ids=[-1])
    assert [m.text for m in store.tree(conversation.id)] == ["hello"]


def test_edit_and_retry_are_siblings(store, clock, chain):
    conversation = store.new_conversation()
    question, answer, followup = chain(store, conversation.id, "q", "a", "f")
    clock.pass_seconds(1)
    retry = store.add_message(conversation.id, question.id, "assistant", "a2")
    clock.pass_seconds(1)
    edit = store.add_message(conversation.id, None, "user", "q2")
    assert [m.text for m in store.path_to(followup.id)] == ["q", "a", "f"]
    assert [m.text for m in store.path_to(retry.id)] == ["q", "a2"]
    assert [m.text for m in store.path_to(edit.id)] == ["q2"]
    assert store.path_to(None) == []
    assert [m.id for m in store.children(question.id)] == [answer.id, retry.id]
    assert [m.id for m in store.siblings(edit.id)] == [m.id for m in store.roots(conversation.id)] == [question.id, edit.id]
    assert store.forks(conversation.id) == {question.id: (1, 2), edit.id: (2, 2), answer.id: (1, 2), retry.id: (2, 2)}
    assert store.conversation(conversation.id).leaf_id == edit.id
    with pytest.raises(NotFound):
        store.path_to("0" * 12)


def test_a_branch_is_entered_at_the_leaf_looked_at_last(store, clock, chain):
    conversation = store.new_conversation()
    question, answer, followup = chain(store, conversation.id, "q", "a", "f")
    clock.pass_seconds(1)
    retry = store.add_message(conversation.id, question.id, "assistant", "a2")
    assert store.leaf_below(question.id).id == retry.id
    clock.pass_seconds(1)
    store.set_leaf(conversation.id, followup.id)
    assert store.leaf_below(question.id).id == followup.id
    assert store.conversation(conversation.id).leaf_id == followup.id
    assert store.leaf_below(retry.id).id == retry.id
    with pytest.raises(NotFound):
        store.set_leaf(store.new_conversation().id, followup.id)


def test_delete_branch_moves_the_leaf(store, chain):
    conversation = store.new_conversation()
    question, answer, followup = chain(store, conversation.id, "q", "a", "f")
    retry = store.add_message(conversation.id, question.id, "assistant", "a2")
    assert store.delete_branch(answer.id) == 2
    assert [m.id for m in store.tree(conversation.id)] == [question.id, retry.id]
    assert store.conversation(conversation.id).leaf_id == retry.id
    assert store.delete_branch(retry.id) == 1
    assert store.conversation(conversation.id).leaf_id == question.id
    assert store.delete_branch(question.id) == 1
    assert store.conversation(conversation.id).leaf_id is None
    assert not store.search("followup").hits


def test_delete_branch_refuses_while_an_answer_is_written(store):
    conversation = store.new_conversation()
    question = store.add_message(conversation.id, None, "user", "q")
    writer = store.begin_answer(conversation.id, question.id, None, None, None)
    writer.update("a")
    writer.checkpoint()
    with pytest.raises(Locked):
        store.delete_branch(question.id)


def test_message_references(store, chain):
    conversation = store.new_conversation()
    ids = [m.id for m in chain(store, conversation.id, *"abcd")]
    with store.db.write() as db:
        for old, new in zip(ids, ["abcd00000000", "abcd10000000", "abce00000000", "ffff00000000"]):
            db.execute("UPDATE messages SET id = ? WHERE id = ?", [new, old])
            db.execute("UPDATE messages SET parent_id = ? WHERE parent_id = ?", [new, old])
        db.execute("UPDATE conversations SET leaf_id = NULL")
    assert store.message("abce", conversation.id).text == "c"
    assert store.message("FFFF").text == "d"
    with pytest.raises(Ambiguous) as caught:
        store.message("abcd")
    assert {key for key, _ in caught.value.candidates} == {"abcd00000000", "abcd10000000"}
    for bad in ("abc", "0000", "", "%"):
        with pytest.raises(NotFound):
            store.message(bad)
    with pytest.raises(NotFound):
        store.message("ffff", store.new_conversation().id)


def test_fork_copies_the_branch_with_everything(store):
    conversation = store.new_conversation(settings={"effort": "off"})
    question = store.add_message(conversation.id, None, "user", "q", ids=[1, 2], meta={"chips": [1]})
    store.add_message(conversation.id, question.id, "assistant", "other branch")
    with store.begin_answer(conversation.id, question.id, "nano", "f00d", {"seed": 3}) as writer:
        answer = writer.finish("complete", "stop", "a", "t", [7, 8, 9], [7], [8], {"context_used": 5}, {"total_s": 1.5})
    copy = store.fork(conversation.id, title="copy")
    old, new = store.path_to(answer.id), store.tree(copy.id)
    assert [m.text for m in new] == ["q", "a"] and copy.leaf_id == new[-1].id
    assert copy.settings == {"effort": "off"} and copy.title == "copy"
    own = {"id", "seq", "conversation_id", "parent_id", "updated"}
    for before, after in zip(old, new):
        assert {before.id, before.conversation_id}.isdisjoint({after.id, after.conversation_id})
        assert all(getattr(before, name) == getattr(after, name) for name in before.__slots__ if name not in own)


def test_a_conversation_moves_to_a_store_in_memory(store, chain):
    conversation = store.new_conversation()
    messages = chain(store, conversation.id, "q", "a", "f")
    with Store.memory(background=False) as memory:
        copy = memory.add_tree(store.tree(conversation.id), keep_ids=True)
        assert copy.title == "q" and copy.leaf_id == messages[-1].id
        assert [m.id for m in memory.path_to(copy.leaf_id)] == [m.id for m in messages]
        with pytest.raises(NotFound, match="parent"):
            memory.add_tree(messages[1:])
        assert len(memory.list_conversations()) == 1, "a failed copy must leave nothing"


@pytest.mark.parametrize("seed", range(5))
def test_random_trees_agree_with_a_dictionary(store, seed, clock):
    """Every operation of the tree against the same tree held as plain parents."""
    rng = random.Random(seed)
    conversations = [store.new_conversation().id for _ in range(2)]
    parents: dict[str, str | None] = {}
    home: dict[str, str] = {}
    order: list[str] = []
    for step in range(120):
        clock.pass_seconds(1)
        conversation = rng.choice(conversations)
        inside = [key for key in order if home[key] == conversation]
        if inside and rng.random() < 0.06:
            victim = rng.choice(inside)
            gone = {key for key in order if victim in path(parents, key)}
            assert store.delete_branch(victim) == len(gone)
            order = [key for key in order if key not in gone]
        else:
            parent = rng.choice([None, *inside[-6:]]) if inside else None
            key = store.add_message(conversation, parent, rng.choice(["user", "assistant"]), f"text {step}").id
            parents[key], home[key] = parent, conversation
            order.append(key)
    for conversation in conversations:
        inside = [key for key in order if home[key] == conversation]
        assert [m.id for m in store.tree(conversation)] == inside
        leaf = store.conversation(conversation).leaf_id
        assert leaf in inside or (leaf is None and not inside)
        for key in inside:
            assert [m.id for m in store.path_to(key)] == path(parents, key)
            among = [other for other in inside if parents[other] == parents[key]]
            assert [m.id for m in store.siblings(key)] == among
            assert [m.id for m in store.children(key)] == [other for other in inside if parents[other] == key]
            assert store.forks(conversation).get(key, (1, 1)) == (among.index(key) + 1, len(among))
    with store.db.read() as db:
        assert not db.execute("PRAGMA foreign_key_check").fetchall()
        db.execute("INSERT INTO messages_fts(messages_fts) VALUES ('integrity-check')")


def path(parents, key):
    found = []
    while key is not None:
        found.append(key)
        key = parents[key]
    return found[::-1]


def test_very_long_conversations(store, chain):
    """Thousands of messages in one line: neither SQLite's nor Python's depth limits are met."""
    conversation = store.new_conversation()
    with store.db.write():
        leaf = chain(store, conversation.id, *(f"message {number}" for number in range(3000)))[-1].id
    messages = store.path_to(leaf)
    assert [m.text.split()[1] for m in messages] == [str(number) for number in range(3000)]
    assert store.leaf_below(messages[0].id).id == leaf
    assert store.delete_branch(messages[1500].id) == 1500
    store.purge(conversation.id)
    assert store.list_conversations() == []
