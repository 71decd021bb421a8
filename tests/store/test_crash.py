"""What is left when a process is killed, and that the living are let be."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv41chat.store import Locked, NotFound, Store
from tests.store.streamer import word

ROOT = Path(__file__).parents[2]


def start(data_dir, seed):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.store.streamer", str(data_dir), str(seed)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    conversation_id, message_id = process.stdout.readline().split()
    return process, conversation_id, message_id


def kill(process) -> tuple[float, list[tuple[int, float]]]:
    """When it was killed (monotonic), and (number, monotonic) of every token that it reported."""
    os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    lines = process.stdout.read().splitlines()
    process.wait()
    process.stdout.close()
    # The last line may be cut.
    return killed, [(int(number), float(stamp)) for number, stamp in (line.split() for line in lines if line.count(" ") == 1 and "." in line)]


def check_rest(store, message_id, killed, tokens, promise_s) -> int:
    """What is stored must be one moment's text, and a token older than the promise must be in it. Returns how many of those there were."""
    old = [number for number, stamp in tokens if stamp < killed - promise_s]
    try:
        message = store.message(message_id)
    except NotFound:
        assert not old, "killed before its first checkpoint"
        return 0
    assert message.state == "interrupted" and message.id in store.recovered
    stored = len(message.body_ids)
    assert message.body_ids == tuple(range(stored))
    assert message.text == "".join(map(word, range(stored))), "text and ids are of one moment"
    lost = [number for number in old if number >= stored]
    assert not lost, f"tokens {lost[0]}..{lost[-1]} were older than {promise_s} s"
    assert store.path_to(message_id)[0].text.startswith("question of")
    # Saved text is found; its first word is in every one of these answers.
    assert message_id in {hit.message_id for hit in store.search(word(0), conversation_id=message.conversation_id).hits}
    return len(old)


def kill_rounds(data_dir, seeds, promise_s):
    """Several writers on one database at once, killed one after the other at random moments."""
    rng = random.Random(len(seeds))
    running = [start(data_dir, seed) for seed in seeds]
    killed = []
    try:
        for process, conversation_id, message_id in running:
            time.sleep(rng.uniform(0.3, 2.5))
            killed.append((message_id, conversation_id, *kill(process)))
    finally:
        for process, *_ in running:
            process.kill()
            process.wait()
    promised = 0
    with Store.open(data_dir) as store:
        for message_id, conversation_id, when, tokens in killed:
            promised += check_rest(store, message_id, when, tokens, promise_s)
            # The name of the dead is free.
            assert store.lock(conversation_id).here
        with store.db.read() as db:
            assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            assert db.execute("SELECT count(*) FROM processes").fetchone()[0] == 1
    assert promised > 0, "nothing was old enough to be promised: the test has tested nothing"
    with Store.open(data_dir) as store:
        assert store.recovered == ()


def test_kill_9_while_streaming(data_dir):
    """Four writers. The promise is one second; a loaded test machine gets another for its own delays."""
    kill_rounds(data_dir, range(4), promise_s=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(12))
def test_kill_9_while_streaming_many_times(data_dir, round_):
    kill_rounds(data_dir, [round_ * 2, round_ * 2 + 1], promise_s=1.0)


def test_the_living_are_let_be(data_dir):
    process, conversation_id, message_id = start(data_dir, 99)
    try:
        while not (line := process.stdout.readline()).startswith("3 "):
            assert line
        with Store.open(data_dir) as store:
            deadline = time.monotonic() + 120
            while not store.tree(conversation_id)[1:] and time.monotonic() < deadline:
                time.sleep(0.05)
            assert store.recovered == () and store.message(message_id).state == "running"
            holder = store.lock_holder(conversation_id)
            assert (holder.pid, holder.here, holder.alive) == (process.pid, False, True)
            with pytest.raises(Locked, match=str(process.pid)) as caught:
                store.lock(conversation_id)
            assert (caught.value.code, caught.value.pid) == ("locked", process.pid)
            with pytest.raises(Locked):
                store.add_message(conversation_id, None, "user", "x")
            # Other conversations go on side by side.
            mine = store.new_conversation()
            store.lock(mine.id)
            assert store.add_message(mine.id, None, "user", "x").text == "x"

            # A suspended process is not dead.
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(Locked):
                store.lock(conversation_id)
            os.kill(process.pid, signal.SIGCONT)

            kill(process)
            with Store.open(data_dir, readonly=True) as reader:
                assert reader.message(message_id).state == "interrupted", "shown as what it is, also where nothing can be written"
            assert store.lock(conversation_id).here
            assert store.message(message_id).state == "interrupted"
            assert store.add_message(conversation_id, message_id, "user", "go on").parent_id == message_id
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
