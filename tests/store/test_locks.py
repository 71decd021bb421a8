"""Names, heartbeats, and who counts as dead."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from dsv41chat.store import Locked, NotFound, StoreReadOnly, locks
from dsv41chat.store.locks import BEAT_S, STALE_S, is_alive, process_birth, this_host


def pretend(store, **columns):
    """Give the process row of `store` other values, as if another process had written it."""
    with store.db.write() as db:
        for column, value in columns.items():
            db.execute(f"UPDATE processes SET {column} = ? WHERE token = ?", [value, store.locks.token])


def test_a_name_has_one_holder(store, open_store):
    other = open_store()
    assert store.locks.holder("build:resident") is None
    holder = store.locks.acquire("build:resident")
    assert (holder.here, holder.alive, holder.pid) == (True, True, os.getpid())
    assert store.locks.acquire("build:resident") == holder
    seen = other.locks.holder("build:resident")
    assert (seen.here, seen.alive, seen.pid) == (False, True, os.getpid())
    with pytest.raises(Locked, match=f"pid {os.getpid()}"):
        other.locks.acquire("build:resident")
    other.locks.release("build:resident")
    assert store.locks.holder("build:resident").here, "only its holder gives a name up"
    store.locks.release("build:resident")
    assert other.locks.acquire("build:resident").here


def test_close_gives_names_up(store, open_store):
    conversation = store.new_conversation()
    other = open_store()
    other.lock(conversation.id)
    other.close()
    assert store.lock(conversation.id).here
    with pytest.raises(NotFound):
        store.lock("00000000")


def test_a_dead_process_is_taken_over(store, open_store):
    """Its pid is gone: a child that has ended, and one that has ended but was not collected."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    zombie.stdout.read()
    while process_birth(zombie.pid) is not None:
        time.sleep(0.01)
    conversation = store.new_conversation()
    for pid in (dead.pid, zombie.pid):
        other = open_store()
        other.lock(conversation.id)
        pretend(other, pid=pid, birth="")
        assert store.lock_holder(conversation.id).alive is False
        assert store.lock(conversation.id).here
        store.unlock(conversation.id)
    zombie.wait()
    zombie.stdout.close()


def test_a_pid_that_was_given_to_another_process(store, open_store):
    other = open_store()
    other.locks.acquire("name")
    pretend(other, birth="another birth")
    assert store.locks.acquire("name").here


def test_where_a_pid_says_nothing_the_heartbeat_decides(store, open_store, clock, monkeypatch):
    other = open_store()
    other.locks.acquire("name")
    pretend(other, host="elsewhere 1", pid=1)
    clock.pass_seconds(STALE_S - 1)
    with pytest.raises(Locked, match="elsewhere"):
        store.locks.acquire("name")
    other.locks.beat()
    clock.pass_seconds(STALE_S - 1)
    with pytest.raises(Locked):
        store.locks.acquire("name")
    clock.pass_seconds(2)
    assert store.locks.acquire("name").here


def test_liveness(monkeypatch):
    row = {"host": this_host(), "pid": os.getpid(), "birth": process_birth(os.getpid()), "heartbeat": 0.0}
    assert is_alive(row, now=1e9), "a living process is alive whatever its heartbeat is"
    assert not is_alive({**row, "birth": "other"}, now=0.0)
    monkeypatch.setattr(locks, "process_birth", lambda pid: "")
    assert is_alive(row, now=STALE_S - 1) and not is_alive(row, now=STALE_S + 1)
    assert is_alive(row, now=-1e9), "a clock that was set back kills nobody"


@pytest.mark.skipif(not os.path.exists("/bin/ps") and not os.path.exists("/usr/bin/ps"), reason="no ps here")
def test_births_from_ps():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        birth = locks._birth_from_ps(child.pid)
        assert birth and birth == locks._birth_from_ps(child.pid)
    finally:
        child.communicate(b"\n")
    assert locks._birth_from_ps(child.pid) is None


def test_births():
    assert process_birth(os.getpid()) == process_birth(os.getpid()) != ""
    assert process_birth(1) is not None, "a process of another user exists"
    assert process_birth(2**22 + 1) is None


def test_heartbeats_come_in_time_and_a_removed_row_comes_back(store, open_store, clock):
    other = open_store(readonly=True)
    store.locks.acquire("name")
    first = other.locks.holder("name").heartbeat
    clock.pass_seconds(BEAT_S / 2)
    assert store._keeper.tick() == pytest.approx(BEAT_S / 2)
    assert other.locks.holder("name").heartbeat == first
    clock.pass_seconds(BEAT_S / 2)
    store._keeper.tick()
    assert other.locks.holder("name").heartbeat == first + BEAT_S
    with store.db.write() as db:
        db.execute("DELETE FROM processes")
    assert other.locks.holder("name") is None
    clock.pass_seconds(BEAT_S)
    store._keeper.tick()
    assert store.locks.acquire("name").here


def test_an_answer_of_a_process_taken_for_dead_is_not_lost(store, open_store):
    conversation = store.new_conversation()
    other = open_store()
    writer = other.begin_answer(conversation.id, None, None, None, None)
    writer.update("before")
    writer.checkpoint()
    pretend(other, birth="another birth")
    assert store.locks.bury() == (writer.id,)
    assert store.message(writer.id).state == "interrupted"
    writer.update("before and after")
    assert writer.finish("complete").text == "before and after"
    assert store.message(writer.id).state == "complete"


def test_running_rows_without_a_process_are_interrupted(store, open_store):
    conversation = store.new_conversation()
    writer = store.begin_answer(conversation.id, None, None, None, None)
    writer.update("x")
    writer.checkpoint()
    with store.db.write() as db:
        db.execute("UPDATE messages SET owner = 'gone'")
    assert open_store().recovered == (writer.id,)


def test_a_reader_holds_nothing(store, open_store):
    conversation = store.new_conversation()
    reader = open_store(readonly=True)
    with pytest.raises(StoreReadOnly):
        reader.lock(conversation.id)
