"""Answers while they are generated: when they are written, what is in the row, how they end."""

from __future__ import annotations

import hashlib
import struct
import threading
import time

import pytest

from dsv41chat.store import Locked, NotFound, Store, StoreError, StoreFull, hash_ids
from dsv41chat.store.answers import CHECKPOINT_S, CHECKPOINT_TOKENS


@pytest.fixture
def question(store):
    conversation = store.new_conversation()
    return store.add_message(conversation.id, None, "user", "q")


@pytest.fixture
def writer(store, question):
    return store.begin_answer(question.conversation_id, question.id, "nano", "f00d", {"seed": 7}, meta={"continues": None})


@pytest.fixture
def stored(open_store, writer):
    """The answer as another process would see it; None while there is no row."""
    reader = open_store(readonly=True)

    def read():
        try:
            return reader.message(writer.id)
        except NotFound:
            return None

    return read


def test_no_row_before_the_first_token(store, writer, stored, question):
    store._keeper.tick()
    writer.update("", "", [], [])
    store._keeper.tick()
    assert stored() is None and not writer.produced
    assert store.conversation(question.conversation_id).leaf_id == question.id


def test_first_token_then_time_then_tokens(store, writer, stored, clock, question):
    tick = store._keeper.tick
    ids: list[int] = []

    def generate(count, seconds=0.0):
        ids.extend(range(len(ids), len(ids) + count))
        clock.pass_seconds(seconds)
        writer.update(f"{len(ids)} tokens", "", (), ids)

    generate(1)
    assert tick() > 0 and stored().text == "1 tokens"
    assert store.conversation(question.conversation_id).leaf_id == writer.id
    generate(1, CHECKPOINT_S - 0.1)
    assert tick() == pytest.approx(0.1) and stored().text == "1 tokens"
    # The next token is long in coming; what there is must be written all the same.
    clock.pass_seconds(0.11)
    tick()
    assert stored().text == "2 tokens" and stored().body_ids == (0, 1) and stored().state == "running"
    generate(CHECKPOINT_TOKENS - 1)
    tick()
    assert stored().text == "2 tokens"
    generate(1)
    tick()
    assert stored().text == f"{CHECKPOINT_TOKENS + 2} tokens" and stored().body_ids == tuple(ids)
    assert len(store.tree(question.conversation_id)) == 2, "one row, updated"


def test_the_promise_of_one_second_leaves_room_for_the_commit():
    assert CHECKPOINT_S <= 0.8 and CHECKPOINT_TOKENS <= 200


def test_growing_lists_are_cut_at_what_the_update_said(writer, stored):
    reasoning, body = [1, 2], [3]
    writer.update("x", "y", reasoning, body)
    reasoning.append(99)
    body.extend([98, 97])
    writer.checkpoint()
    assert (stored().reasoning_ids, stored().body_ids) == ((1, 2), (3,))


def test_finish_writes_everything(store, writer, stored, clock):
    writer.update("par", "thi", [1], [2])
    writer.checkpoint()
    before = stored()
    assert (before.state, before.text, before.thinking, before.params, before.meta) == ("running", "par", "thi", {"seed": 7}, {"continues": None})
    assert before.ids is None and before.ids_hash is None
    clock.pass_seconds(3)
    message = writer.finish(
        "complete", "stop", "part", "think", [1, 9, 2, 0], [1, 9], [2], {"completion_tokens": 4}, {"total_s": 3.0}, params={"seed": 8}, meta={"n": 1}
    )
    assert message == stored()
    assert (message.state, message.finish, message.text, message.thinking) == ("complete", "stop", "part", "think")
    assert (message.ids, message.reasoning_ids, message.body_ids) == ((1, 9, 2, 0), (1, 9), (2,))
    assert message.ids_hash == hashlib.sha256(struct.pack("<4I", 1, 9, 2, 0)).hexdigest() == hash_ids([1, 9, 2, 0])
    assert (message.usage, message.timing, message.params, message.meta) == ({"completion_tokens": 4}, {"total_s": 3.0}, {"seed": 8}, {"n": 1})
    assert (message.build_name, message.build_fingerprint) == ("nano", "f00d")
    assert message.updated == message.created + 3
    with pytest.raises(ValueError, match="finished"):
        writer.finish("complete")
    with pytest.raises(ValueError, match="finished"):
        writer.update("more")
    assert store._keeper.writers == ()


@pytest.mark.parametrize("state", ["complete", "stopped", "interrupted", "error"])
def test_finish_keeps_what_the_last_update_said(writer, state):
    writer.update("text", "thought", [1], [2, 3])
    message = writer.finish(state, ids=[1, 2, 3])
    assert (message.state, message.text, message.thinking, message.reasoning_ids, message.body_ids) == (state, "text", "thought", (1,), (2, 3))


def test_an_answer_cannot_end_running(writer):
    for state in ("running", "done", ""):
        with pytest.raises(ValueError):
            writer.finish(state)


def test_discard_leaves_no_row_and_the_question_as_leaf(store, writer, stored, question):
    writer.update("x", "", [], [1])
    writer.checkpoint()
    assert (stored().state, stored().text, stored().body_ids, stored().parent_id) == ("running", "x", (1,), question.id)
    writer.discard()
    assert stored() is None and store.children(question.id) == []
    assert store.conversation(question.conversation_id).leaf_id == question.id
    with pytest.raises(ValueError, match="finished"):
        writer.discard()


def test_a_switch_of_branch_during_the_answer_stays(store, writer, question):
    writer.update("x", "", [], [1])
    writer.checkpoint()
    store.set_leaf(question.conversation_id, question.id)
    writer.update("xy", "", [], [1, 2])
    writer.finish("complete")
    assert store.conversation(question.conversation_id).leaf_id == question.id


def test_a_block_ends_its_answer(store, question):
    begin = lambda: store.begin_answer(question.conversation_id, question.id, None, None, None)
    with begin() as nothing:
        pass
    with begin() as some:
        some.update("some")
    with pytest.raises(RuntimeError), begin() as failed:
        failed.update("fail")
        raise RuntimeError
    with pytest.raises(NotFound):
        store.message(nothing.id)
    assert store.message(some.id).state == "interrupted" and store.message(failed.id).state == "error"


def test_an_answer_needs_a_parent_in_its_conversation(store, question):
    with pytest.raises(NotFound):
        store.begin_answer(question.conversation_id, "0" * 12, None, None, None)
    with pytest.raises(NotFound):
        store.begin_answer("00000000", None, None, None, None)


def test_removed_under_its_writer(store, open_store, writer):
    writer.update("x")
    writer.checkpoint()
    with open_store().db.write() as db:
        db.execute("UPDATE conversations SET leaf_id = NULL")
        db.execute("DELETE FROM messages WHERE id = ?", [writer.id])
    writer.update("xy")
    with pytest.raises(NotFound, match="removed"):
        writer.finish("complete")
    assert isinstance(writer.failure, NotFound)


def test_ids_that_are_none_do_not_end_the_keeper(store, writer, clock):
    writer.update("x", "", [], [-1])
    store._keeper.tick()
    assert "cannot be stored" in str(writer.failure)
    with pytest.raises(ValueError):
        writer.checkpoint()
    writer.update("x", "", [], [1])
    assert writer.finish("complete").text == "x" and writer.failure is None


def test_full_disk_is_kept_as_failure_and_ends_when_there_is_room(store, writer, stored, clock):
    writer.update("small", "", [], [1])
    store._keeper.tick()
    with store.db.read() as db:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages + 1}")
    clock.pass_seconds(CHECKPOINT_S)
    writer.update("large " * 20_000, "", [], [1, 2])
    store._keeper.tick()
    assert isinstance(writer.failure, StoreFull) and "disk is full" in str(writer.failure) and writer.failure.hint
    assert stored().text == "small", "the row stays as it was"
    with pytest.raises(StoreFull):
        writer.finish("complete", "stop")
    assert not writer.finished
    with store.db.read() as db:
        db.execute("PRAGMA max_page_count = 1000000")
    assert writer.finish("complete", "stop").text == "large " * 20_000
    assert writer.failure is None


def test_close_writes_what_is_open(open_store, question, data_dir):
    store = open_store()
    begin = lambda: store.begin_answer(question.conversation_id, question.id, None, None, None)
    written, empty = begin(), begin()
    written.update("unwritten text")
    store.close()
    written.update("the engine was one token ahead")
    store.close()
    again = open_store()
    assert again.message(written.id).text == "unwritten text" and again.message(written.id).state == "interrupted"
    assert again.recovered == ()
    with pytest.raises(NotFound):
        again.message(empty.id)


def test_the_keeper_writes_without_being_asked(data_dir):
    """The real thread and the real clock: the first token, and a last token that nothing follows."""
    before = set(threading.enumerate())
    with Store.open(data_dir) as store, Store.open(data_dir, readonly=True) as reader:
        conversation = store.new_conversation()
        writer = store.begin_answer(conversation.id, None, None, None, None)
        for text in ("first", "first and last"):
            writer.update(text)
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and [m.text for m in reader.tree(conversation.id)] != [text]:
                time.sleep(0.02)
            assert [m.text for m in reader.tree(conversation.id)] == [text]
        writer.finish("complete")
    assert not any(thread.name == "dsv41chat-store" for thread in set(threading.enumerate()) - before)


def test_two_threads_and_a_keeper(data_dir):
    """A worker streams while another thread reads, renames and queues: nothing fails, nothing is lost."""
    with Store.open(data_dir) as store:
        conversation = store.new_conversation("t")
        question = store.add_message(conversation.id, None, "user", "q")
        failures: list[BaseException] = []
        done = threading.Event()

        def work():
            try:
                for _ in range(3):
                    with store.begin_answer(conversation.id, question.id, "nano", "f", {}) as writer:
                        for number in range(100):
                            writer.update("x" * number, "", [], range(number))
                        writer.finish("complete", "stop", ids=range(100))
                    store.facts["k"] = "v"
            except BaseException as error:
                failures.append(error)
            finally:
                done.set()

        thread = threading.Thread(target=work)
        thread.start()
        number = 0
        while not done.is_set():
            number += 1
            store.rename(conversation.id, f"title {number}")
            store.save_draft(conversation.id, f"draft {number}")
            assert store.path_to(question.id)[0].text == "q"
            store.search("xxx")
        thread.join()
        assert not failures
        assert [m.ids_hash for m in store.children(question.id)] == [hash_ids(range(100))] * 3
        assert store.conversation(conversation.id).title == f"title {number}"


def test_works_in_memory_from_two_threads():
    with Store.memory() as store:
        conversation = store.new_conversation()
        errors: list[Exception] = []

        def work():
            try:
                for number in range(50):
                    store.add_message(conversation.id, None, "user", str(number))
            except StoreError as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and len(store.tree(conversation.id)) == 100
        writer = store.begin_answer(conversation.id, None, None, None, None)
        writer.update("x")
        assert writer.finish("complete").state == "complete"
        store.lock(conversation.id)


def test_another_store_cannot_answer_in_a_locked_conversation(store, open_store, question):
    open_store().lock(question.conversation_id)
    with pytest.raises(Locked):
        store.begin_answer(question.conversation_id, question.id, None, None, None)
