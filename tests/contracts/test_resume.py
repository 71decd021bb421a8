"""A conversation that goes on in another process answers as one that never stopped, and reads only what is new."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from dsv41chat.store import Store
from tests.programs import environment, run, turn

FIRST = "Sinkhorn iterations normalise rows and columns by turns. " * 3
LONG = "Sinkhorn iterations normalise the rows and the columns of a matrix by turns until both sums are one. " * 60
SECOND = "How often?"
GREEDY = ("--temperature", "0", "--effort", "off")
SEEDED = ("--temperature", "0.8", "--seed", "3", "--effort", "off")
THINKING = ("--temperature", "0", "--effort", "high")


def test_turn_two_in_a_new_process_resumes_exactly(tmp_path, program):
    """Each turn that keeps or resumes a state has a process of its own; those without states are taken here."""
    kept, cold = tmp_path / "kept", tmp_path / "cold"
    first = turn(kept, FIRST, *GREEDY, more=False)
    second = turn(kept, SECOND, *GREEDY)
    assert first.usage["cached_tokens"] == 0
    # All but the pending id of the answer; new are that id, the end of the answer, the message and its markers.
    assert second.usage["cached_tokens"] == first.usage["context_used"] - 1
    assert second.usage["prefilled_tokens"] <= len(SECOND) + 8
    assert second.json["timing"]["resume_s"] > 0
    for got, text, more in ((first, FIRST, False), (second, SECOND, True)):
        words = ["--json", *(["-c"] if more else []), "-p", text, "--max-tokens", "12", *GREEDY, "--no-cache"]
        want = program.at(cold)(*words, real=True).object
        assert want["ids_hash"] == got.json["ids_hash"] and want["usage"]["cached_tokens"] == 0
    assert not (cold / "cache" / "prompt_cache").exists()


def test_nothing_is_kept_without_saving(tmp_path):
    data = tmp_path / "data"
    found = run(data, "--headless", "--no-save", "-p", FIRST, "--max-tokens", "2", *GREEDY)
    assert found.code == 0 and not (data / "cache" / "prompt_cache").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [GREEDY, SEEDED, THINKING], ids=["greedy", "seeded", "thinking"])
def test_a_long_history(tmp_path, options):
    """More than 1,000 tokens: three turns, an edit of the first message and back, each in a process of its own."""
    hashes = {}
    for name, words in (("kept", ()), ("cold", ("--no-cache",))):
        data = tmp_path / name
        said = [turn(data, LONG, *options, *words, more=False)]
        said += [turn(data, text, *options, *words) for text in (SECOND, "And then?")]
        with Store.open(data, readonly=True) as store:
            leaf = store.last_conversation().leaf_id
            ends = [m.id for m in store.path_to(leaf) if m.role == "assistant"]
        edit = ("--resume", said[0].json["conversation"], "--branch")
        said.append(turn(data, "How seldom?", *options, *words, *edit, ends[0], more=False))
        said.append(turn(data, "Go on.", *options, *words, *edit, ends[-1], more=False))
        if name == "kept":
            assert said[0].usage["prompt_tokens"] > 1000
            for found in said[1:]:
                assert found.usage["prefilled_tokens"] <= 20 and found.usage["cached_tokens"] > 1000, found.json
        else:
            assert all(found.usage["cached_tokens"] == 0 for found in said)
        hashes[name] = [found.json["ids_hash"] for found in said]
    assert hashes["kept"] == hashes["cold"]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped(tmp_path, signum):
    """Interrupted or killed in the middle of its prefill; the next turn answers as ever, and the folder is whole."""
    kept, cold = tmp_path / "kept", tmp_path / "cold"
    turn(kept, FIRST, *GREEDY, more=False)
    command = [sys.executable, "-m", "dsv41chat", "--headless", "-c", "-p", LONG, "--stream-json", "--data-dir", str(kept), *GREEDY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(), stdin=subprocess.DEVNULL)
    for line in process.stdout:
        if '"type": "prefill"' in line or '"type":"prefill"' in line:
            break
    time.sleep(0.5)
    process.send_signal(signum)
    process.stdout.read()
    assert process.wait(60) == (130 if signum == signal.SIGINT else -9)
    with Store.open(kept) as store:
        conversation = store.last_conversation()
        first = next(m for m in store.path_to(conversation.leaf_id) if m.role == "assistant")
    again = turn(kept, SECOND, *GREEDY, "--branch", first.id)
    assert again.usage["cached_tokens"] > 40
    turn(cold, FIRST, *GREEDY, "--no-cache", more=False)
    assert turn(cold, SECOND, *GREEDY, "--no-cache").json["ids_hash"] == again.json["ids_hash"]
    pruned = run(kept, "cache", "prune", "--all")
    assert pruned.code == 0 and not list((kept / "cache" / "prompt_cache").glob("*/??/*"))
