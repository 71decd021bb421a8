"""Drafts and the queue: never in two places, never in none."""

from __future__ import annotations

import pytest

from dsv41chat.store import QUEUE_LIMIT, NotFound, QueueFull


@pytest.fixture
def conversation(store):
    return store.new_conversation("c").id


def test_one_draft_per_conversation_and_one_for_none(store, open_store, conversation, clock):
    store.save_draft(None, "first words")
    store.save_draft(conversation, "old")
    clock.pass_seconds(1)
    store.save_draft(conversation, "new\n\ud800", editing="abc", meta={"chips": [1]})
    other = open_store(readonly=True)
    draft = other.draft(conversation)
    assert (draft.text, draft.editing, draft.meta, draft.updated) == ("new\n\ufffd", "abc", {"chips": [1]}, clock())
    assert other.draft(None).text == "first words"
    store.save_draft(conversation, "")
    store.save_draft(None, "")
    assert store.draft(conversation) is None and store.draft(None) is None
    with pytest.raises(NotFound):
        store.save_draft("00000000", "x")


def test_sending_clears_the_draft_in_the_same_transaction(store, conversation):
    store.save_draft(conversation, "hello")
    store.add_message(conversation, None, "user", "something else")
    assert store.draft(conversation).text == "hello"
    store.add_message(conversation, None, "user", "hello", clear_draft=True)
    assert store.draft(conversation) is None


def test_the_first_message_clears_the_draft_from_before_the_conversation(store):
    store.save_draft(None, "hello\n")
    other = store.new_conversation()
    store.add_message(other.id, None, "user", "not this one", clear_draft=True)
    assert (store.draft(None).text, store.draft(None).editing) == ("hello\n", None)
    store.add_message(store.new_conversation().id, None, "user", "hello", clear_draft=True)
    assert store.draft(None) is None


def test_queue_is_first_in_first_out_and_limited(store, open_store, conversation):
    for number in range(QUEUE_LIMIT):
        store.save_draft(conversation, f"text {number}")
        store.queue_push(conversation, f"text {number}", {"n": number})
        assert store.draft(conversation) is None
    with pytest.raises(QueueFull):
        store.queue_push(conversation, "one too many")
    waiting = open_store(readonly=True).queued(conversation)
    assert [(item.text, item.meta) for item in waiting] == [(f"text {n}", {"n": n}) for n in range(QUEUE_LIMIT)]
    message = store.add_message(conversation, None, "user", waiting[0].text, queue_id=waiting[0].id)
    assert message.text == "text 0"
    assert [item.text for item in store.queued(conversation)] == ["text 1", "text 2", "text 3", "text 4"]
    store.queue_remove(waiting[1].id)
    with pytest.raises(NotFound):
        store.queue_remove(waiting[1].id)
    draft = store.queue_take_last(conversation)
    assert (draft.text, draft.meta) == ("text 4", {"n": 4}) and store.draft(conversation) == draft
    assert [item.text for item in store.queued(conversation)] == ["text 2", "text 3"]
    assert store.queue_take_last(store.new_conversation().id) is None


def test_a_failed_send_leaves_the_queue(store, conversation):
    item = store.queue_push(conversation, "wait")
    with pytest.raises(NotFound):
        store.add_message(conversation, "0" * 12, "user", item.text, queue_id=item.id)
    assert store.queued(conversation) == [item]


def test_prompt_history(store, conversation):
    other = store.new_conversation().id
    for where, role, text in [
        (conversation, "user", "mine old"),
        (other, "user", "theirs"),
        (other, "user", "both"),
        (conversation, "assistant", "no prompt"),
        (conversation, "user", "both"),
        (conversation, "user", "mine new"),
        (conversation, "user", "mine old"),
        (other, "user", "theirs new"),
    ]:
        store.add_message(where, None, role, text)
    assert store.prompt_history(conversation) == ["mine old", "mine new", "both", "theirs new", "theirs"]
    assert store.prompt_history(conversation, limit=2) == ["mine old", "mine new"]
    assert store.prompt_history() == ["theirs new", "mine old", "mine new", "both", "theirs"]
    store.delete(other)
    assert store.prompt_history() == ["mine old", "mine new", "both"]
