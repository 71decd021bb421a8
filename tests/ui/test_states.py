"""Turns on the embedded pack with states on disk: what is read again, what is not, and that no answer ever changes."""

from __future__ import annotations

import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsv41chat.nano import embedded_pack
from dsv41chat.store.prompt_cache_room import folder_bytes
from tests.rights import ordinary_rights
from tests.ui.chats import GREEDY, SEEDED, THINKING, Chat, in_answer, in_prefill

LONG = "Sinkhorn iterations normalise the rows and the columns of a matrix by turns until both sums are one. " * 2
SHORT = "How often, and why?"


# Reads its weights anew for every turn, as a process does; what this file is about lies in the states and in who goes on with them.
OWN_WEIGHTS = "test_each_turn_in_a_new_process[greedy]"


@pytest.fixture(autouse=True)
def weights_once(request):
    if request.node.name != OWN_WEIGHTS:
        request.getfixturevalue("shared_weights")


def fresh(data, talk) -> list[str]:
    """The hashes of `talk` with nothing kept and every prompt read from its first token."""
    with Chat(data, cache=False) as chat:
        hashes = talk(chat)
        assert not chat.folder.exists()
        return hashes


@pytest.mark.parametrize("options", [GREEDY, SEEDED, THINKING], ids=["greedy", "seeded", "thinking"])
def test_each_turn_in_a_new_process(tmp_path, options):
    """Three turns, each by a program of its own: only the new message is read, and the ids are those of a chat without states."""
    texts = [LONG, SHORT, "And then?"]
    hashes, before = [], 0
    for text in texts:
        with Chat(tmp_path / "kept") as chat:
            got = chat.say(text, options)
            message_ids = len(chat.host.tokenizer().encode_text(text))
            hashes.append(got.hash)
            if before:
                assert got.resumed.source == "disk" and got.prefilled <= message_ids + 8
                assert got.rows == got.prefilled + got.end.usage["completion_tokens"] - 1, "the usage figures are the trunk's own count"
            assert got.told == []
            before = got.end.usage["prompt_tokens"]
    assert hashes == fresh(tmp_path / "cold", lambda chat: [chat.say(text, options).hash for text in texts])


LENGTHS = [pytest.param(1, id="short"), pytest.param(20, marks=pytest.mark.slow, id="over 1,000 tokens")]


@pytest.mark.parametrize("times", LENGTHS)
@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_edit_regenerate_and_back(tmp_path, options, times):
    """A retry reads one id; an edit what follows it; the old branch is as it was."""

    def talk(chat):
        first = chat.say(LONG * times, options)
        second = chat.say(SHORT, options)
        third = chat.say("And then?", options)
        retry = chat.say(None, options, regenerate=third.message.id)
        edited = chat.say("How seldom?", options, parent_id=first.message.id)
        back = chat.say("Go on.", options, parent_id=third.message.id)
        changed = chat.say("Quite another beginning of it all.", options, parent_id=None)
        talk.said = (first, second, third, retry, edited, back, changed)
        return [said.hash for said in talk.said]

    with Chat(tmp_path / "kept") as chat:
        hashes = talk(chat)
        first, second, third, retry, edited, back, changed = talk.said
        assert times == 1 or first.end.usage["prompt_tokens"] > 1000
        # A seed moves by the sibling's number, so that the retry of a sampled answer may be another one.
        assert retry.prefilled == 1 and (options is SEEDED or retry.hash == third.hash)
        assert edited.cached >= first.end.usage["context_used"] - 1
        assert back.cached >= third.end.usage["context_used"] - 1
        assert changed.cached < 10 and changed.resumed.cold is None, "the first message has no history to be cold about"
    assert hashes == fresh(tmp_path / "cold", talk)


@pytest.mark.slow
def test_edit_at_every_message_of_a_long_chat(tmp_path):
    """Six turns; every message is edited in a new process, then the old branch goes on."""
    texts = [LONG, "One more?", "Two more?", "Three more?", "Four more?", "Five more?"]

    def talk(chat):
        said = [chat.say(text) for text in texts]
        out = [s.hash for s in said]
        for k, text in enumerate(texts):
            parent = said[k - 1].message.id if k else None
            edited = chat.say(text + " Really", parent_id=parent)
            talk.cached.append((edited.cached, said[k - 1].end.usage["context_used"] - 1 if k else 0))
            back = chat.say("Go on", parent_id=said[-1].message.id)
            talk.back.append((back.cached, said[-1].end.usage["context_used"] - 1))
            out += [edited.hash, back.hash]
        return out

    talk.cached, talk.back = [], []
    with Chat(tmp_path / "kept") as chat:
        hashes = talk(chat)
    assert all(got >= want for got, want in talk.cached) and all(got >= want for got, want in talk.back)
    assert hashes == fresh(tmp_path / "cold", talk)


CANCELLED_IN = ["prefill", "thinking", "answer", "answer seeded"]
FAR = [pytest.param(f"{where}{how}", 20, marks=pytest.mark.slow) for where in CANCELLED_IN[:3] for how in ("", " seeded")]


@pytest.mark.parametrize(("where", "times"), [*((where, 1) for where in CANCELLED_IN), *FAR])
def test_cancelled_turns(tmp_path, where, times):
    """After a cancel the next turn, here and in a new process, answers as without states. `stop` acts on events, so on both sides alike."""
    where, _, seeded = where.partition(" ")
    options = (THINKING if where == "thinking" else GREEDY) | ({"temperature": 0.8, "seed": 5} if seeded else {})
    stop = in_prefill if where == "prefill" else in_answer(2)

    def cancelled(chat):
        chat.say(LONG * times, options)
        # Words at random come to no end before the cancel arrives, however busy the machine is.
        endless = options | {"max_tokens": 200, "temperature": 100.0, "seed": 5}
        return chat.say(LONG * 2 if where == "prefill" else SHORT, options if where == "prefill" else endless, stop=stop)

    with Chat(tmp_path / "kept") as chat:
        gone = cancelled(chat)
        assert gone.end.finish == "cancelled"
        produced = tuple(gone.end.ids)
        parent = gone.message.id if gone.message is not None else chat.store.conversation(chat.id).leaf_id
    with Chat(tmp_path / "kept") as chat:
        after = chat.say("And then?", options, parent_id=parent)
        assert after.cached > 0 and after.told == []
        path = chat.store.path_to(after.message.id)
    # The same history, made without states: the cancelled answer's ids are what they were.
    with Chat(tmp_path / "cold", cache=False) as chat:
        copy = chat.store.add_tree(path[:-2], settings={})
        want = chat.say("And then?", options, conversation_id=copy.id)
    assert want.hash == after.hash and want.cached == 0
    assert produced == tuple(gone.end.ids)


def test_no_false_hits(tmp_path):
    """Other effort, other system text, one other id, another build: read again, with the reason; the same build elsewhere hits."""
    with Chat(tmp_path / "kept") as chat:
        first = chat.say(LONG)
    with Chat(tmp_path / "kept") as chat:
        other = chat.say(SHORT, THINKING)
        assert other.cached < 10 and "other settings (effort changed)" in other.told[0]
        conversation = chat.store.conversation(chat.id)
        chat.store.set_settings(chat.id, {**conversation.settings, "system": "Answer briefly."})
        other = chat.say(SHORT, THINKING, parent_id=first.message.id)
        assert other.cached < 10 and "other settings (system text changed)" in other.told[0]
        assert chat.new(LONG.replace("rows", "cows")).cached < 40

    def build(name: str):
        shutil.copytree(embedded_pack(), tmp_path / name)
        return tmp_path / name

    with Chat(tmp_path / "kept", pack=build("copy")) as chat:
        chat.id = first.end.conversation_id
        chat.store.set_settings(chat.id, {})
        again = chat.say(SHORT, parent_id=first.message.id, build=str(tmp_path / "copy"))
        assert again.cached == first.end.usage["context_used"] - 1 and again.told == []

    def other_config(folder: Path) -> None:
        config = (folder / "config.json").read_bytes()
        (folder / "config.json").write_bytes(config.replace(b"{", b"{ ", 1))

    def other_header(folder: Path) -> None:
        """One byte in a shard's header that changes nothing else: its last space becomes a line feed."""
        shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        data = bytearray(shard.read_bytes())
        end = 8 + int.from_bytes(data[:8], "little")
        assert data[end - 1 : end] == b" ", "the header is padded"
        data[end - 1] = 0x0A
        shard.write_bytes(data)

    for change in (other_config, other_header):
        changed = build(change.__name__)
        change(changed)
        with Chat(tmp_path / "kept", pack=changed) as chat:
            chat.id = first.end.conversation_id
            foreign = chat.say(SHORT, parent_id=first.message.id, build=str(changed))
            assert foreign.cached == 0 and "cold: other build" in foreign.told[0] and foreign.hash == again.hash
    with Chat(tmp_path / "kept", pack=tmp_path / "copy") as chat:
        chat.id = first.end.conversation_id
        back = chat.say(SHORT, parent_id=first.message.id, build=str(tmp_path / "copy"))
        assert back.prefilled == 1 and back.hash == again.hash, "switching back resumes"


def test_a_state_that_breaks_the_prompt_is_dropped_and_the_prompt_read_again(tmp_path, monkeypatch):
    from dsv41chat.engine.errors import EngramReadError
    from dsv41chat.engine.session import Session

    with Chat(tmp_path / "kept") as chat:
        chat.say(LONG)
    whole, calls = Session.advance, []

    def failing(self, ids, *rest):
        calls.append(self.target.n)
        if self.target.n:
            raise EngramReadError("rows.safetensors: read at offset 123 failed")
        return whole(self, ids, *rest)

    monkeypatch.setattr(Session, "advance", failing)
    with Chat(tmp_path / "kept") as chat:
        got = chat.say(SHORT)
        assert got.cached == 0 and len(calls) == 2 and got.end.finish != "error"
        assert chat.host.states.stats()["counters"]["removed: prefill failed"] == 1


def test_switched_off(tmp_path):
    """No folder, no trace; conversations are stored all the same."""
    for flags in ({"cache.enabled": False}, {"cache.budget": 0}):
        settings_off = Chat(tmp_path / "a", flags=flags)
        settings_off.host.states = type(settings_off.host.states).of(settings_off.settings)
        settings_off.say("Hello there")
        kept = settings_off.store.path_to(settings_off.store.last_conversation().leaf_id)
        assert not settings_off.folder.exists() and kept[0].text == "Hello there"
        settings_off.close()


def test_the_budget_holds_and_the_open_conversation_resumes(tmp_path):
    """Five conversations of two builds past a small budget: the folder is within it after each, and the open one goes on."""
    budget, other = 900_000, tmp_path / "other"
    shutil.copytree(embedded_pack(), other)
    (other / "config.json").write_bytes((other / "config.json").read_bytes().replace(b"{", b"{ ", 1))
    written = 0
    for number in range(5):
        with Chat(tmp_path / "kept", budget=budget, pack=other if number % 2 else None) as chat:
            chat.new(f"Conversation {number}. " + LONG)
            folder = chat.folder
            assert chat.host.settle(60)
            counters = chat.host.states.stats()["counters"]
            written = counters["bytes written"]
        assert folder_bytes(folder) <= budget
    assert written > 1.2 * budget and counters["evicted"] > 0
    with Chat(tmp_path / "kept", budget=budget) as chat:
        assert chat.say(SHORT).cached > 0
    assert folder_bytes(folder) <= budget


@pytest.mark.parametrize("how", ["in the chat", "by command"])
def test_deleting_a_conversation_deletes_its_states(tmp_path, how):
    """At once, although the conversation itself can be brought back for a while; the states of another one stay."""
    from dsv41chat.cli import main

    with Chat(tmp_path / "kept") as chat:
        gone = chat.say(LONG).end.conversation_id
        ids = chat.session().target.lane.ids[40:43]
        kept = chat.new("Quite another conversation, long enough to be worth a file. " * 4)
    marker = b"".join(int(i).to_bytes(4, "little") for i in ids)
    traces = lambda: [path for path in chat.folder.rglob("*") if path.is_file() and marker in path.read_bytes()]
    assert traces()
    if how == "by command":
        assert main(["conversations", "delete", gone, "--yes", "--data-dir", str(tmp_path / "kept")]).code == 0
    else:
        with Chat(tmp_path / "kept") as chat:
            chat.store.delete(gone)
    assert traces() == [] and len(list(chat.folder.glob("tail/??/*"))) == 2
    with Chat(tmp_path / "kept") as chat:
        chat.id = kept.end.conversation_id
        assert chat.say(SHORT).cached == kept.end.usage["context_used"] - 1


def test_the_last_answer_is_sealed_in_idle_time_and_a_new_message_ends_that(tmp_path):
    """Thinking is dropped from later prompts, so the answer is read again without it; a message that comes first does that itself."""
    with Chat(tmp_path / "kept") as chat:
        sealed = lambda: chat.host.states.cache.counters["sealed"]
        first = chat.say(LONG, THINKING)
        assert chat.host.settle(60)
        assert chat.session().rows_run > first.rows, "the answer was read again"
        assert sealed() == 1 and not chat.host.states.sealing_due
        rows = chat.session().rows_run
        second = chat.say(SHORT, THINKING)
        assert second.prefilled <= len(chat.host.tokenizer().encode_text(SHORT)) + 8
        assert second.rows == chat.session().rows_run - rows
        # Nobody waits: the next message comes before the answer was read again.
        third = chat.say("And then?", THINKING)
        assert third.cached >= second.end.usage["prompt_tokens"] - 1 and third.resumed.source == "memory"
        chat.host.rest(0.0)
        chat.host.disturb()
    talk = lambda chat: [chat.say(text, THINKING).hash for text in (LONG, SHORT, "And then?")]
    hashes = fresh(tmp_path / "cold", talk)
    assert hashes[1:] == [second.hash, third.hash]


@pytest.mark.parametrize("who", ["a message", "an opened conversation"])
def test_measuring_the_rows_gives_way_and_is_taken_up_again(tmp_path, monkeypatch, who):
    """Not known before: the self-test stops at its next forward, keeps no verdict, and when nothing runs goes on with the width it was at."""
    from dsv41chat.engine import invariance

    begun, held, go = [], threading.Event(), threading.Event()

    class Counted(invariance.Target):
        def rows(self, ids, *args, **options):
            begun.append(len(ids))
            if len(begun) == 4:
                held.set()
                assert go.wait(60)
            return super().rows(ids, *args, **options)

    monkeypatch.setattr(invariance, "Target", Counted)
    monkeypatch.setattr(invariance, "WIDTHS", (8, 32))
    monkeypatch.setattr(invariance, "_stock_like", lambda engine: False)
    with Chat(tmp_path / "kept") as chat, ThreadPoolExecutor() as pool:
        chat.say(LONG)
        known = lambda: invariance.rows_known(chat.host.engine)
        chat.host.rest(0.0)
        assert held.wait(60)
        rest, due = chat.host.rest, []
        monkeypatch.setattr(chat.host, "rest", lambda: due.append("again"))
        wants = pool.submit(chat.say, SHORT) if who == "a message" else pool.submit(chat.controller.prepare, chat.id)
        chat.host._disturbed.wait(10)
        go.set()
        wants.result(60)
        assert begun == [128, 8, 8, 8] and not known() and not chat.host.engine.row_invariant
        assert due == ["again"]
        rest(0.0)
        deadline = time.monotonic() + 60
        while not known() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert chat.host.engine.row_invariant and begun[4:] == [8, 8, 8, 104, 32, 32, 32, 32], "the call that all are compared with stands"


def test_strict_mode_resumes_only_on_the_grid(tmp_path, monkeypatch):
    """As on a route whose rows depend on their neighbours: marks at multiples of the chunk, no ends, nothing from memory."""
    from dsv41chat.engine.engine import Engine

    monkeypatch.setattr(Engine, "row_invariant", property(lambda self: False))
    flags = {"cache.strict": True}
    with Chat(tmp_path / "kept", flags=flags) as chat:
        first = chat.say(LONG * 4)
        assert first.end.usage["prompt_tokens"] > 140
        second = chat.say(SHORT)
        assert second.cached % chat.host.engine.prefill_chunk == 0 and second.cached > 0 and second.resumed.source == "disk"
        kinds = chat.host.states.stats()["by_kind"]
        assert "E" not in kinds and kinds["P"] >= 1
    talk = lambda chat: [chat.say(text).hash for text in (LONG * 4, SHORT)]
    assert fresh(tmp_path / "cold", talk) == [first.hash, second.hash]


def test_a_shared_system_text_is_read_once(tmp_path):
    system = "You are a careful assistant who answers briefly and names the sources of every figure that you give. " * 5
    with Chat(tmp_path / "kept") as chat:
        first = chat.new(SHORT, system=system)
        assert first.cached == 0
    with Chat(tmp_path / "kept") as chat:
        other = chat.new("What is a matrix?", system=system)
        assert other.cached > 0 and other.cached % 128 == 0 and other.told == []
        assert chat.host.states.stats()["by_kind"]["S"] == 1
    talk = lambda chat: [chat.new(text, system=system).hash for text in (SHORT, "What is a matrix?")]
    assert fresh(tmp_path / "cold", talk) == [first.hash, other.hash]


def test_a_long_prefill_that_was_stopped_goes_on_from_the_grid(tmp_path, monkeypatch):
    """Marks that a long prefill leaves on its way; here the grid is as fine as a short test needs, and the cancel comes right after one."""
    from dsv41chat.ui import states as module

    monkeypatch.setattr(module, "LONG_GRID", 128)
    monkeypatch.setattr(module, "LONG_GAP", 64)
    keep, text = module.States.keep, LONG * 6
    with Chat(tmp_path / "kept") as chat, monkeypatch.context() as patch:

        def keep_and_stop(self, session, kind, turn):
            keep(self, session, kind, turn)
            if kind == "G":
                chat.controller.cancel()

        patch.setattr(module.States, "keep", keep_and_stop)
        stopped = chat.say(text)
        assert stopped.end.finish == "cancelled" and stopped.message is None
    with Chat(tmp_path / "kept") as chat:
        again = chat.say(text, parent_id=None)
        assert again.resumed.source == "disk" and 128 <= again.cached < again.end.usage["prompt_tokens"] - 1
        assert again.prefilled == again.rows - again.end.usage["completion_tokens"] + 1
    assert fresh(tmp_path / "cold", lambda chat: [chat.say(text).hash]) == [again.hash]


def test_the_estimate_knows_the_stored_states(tmp_path):
    from dsv41chat.ui.turn_events import TurnRequest

    with Chat(tmp_path / "kept") as chat:
        first = chat.say(LONG)
    with Chat(tmp_path / "kept") as chat:
        request = TurnRequest(first.end.conversation_id, text=SHORT, overrides=GREEDY)
        same = chat.controller.estimate(request)
        other = chat.controller.estimate(TurnRequest(first.end.conversation_id, text=SHORT, overrides=THINKING))
        assert same["cached_tokens"] == first.end.usage["context_used"] - 1 and other["cached_tokens"] == 0
        assert chat.say(SHORT).cached == same["cached_tokens"]


async def test_both_front_ends_take_turns(tmp_path):
    """Scripted, full screen, scripted: each goes on from what the other left, and the answers are those of a chat without states."""
    from dsv41chat.ui.app import ChatApp
    from dsv41chat.ui.turn_events import AppStart
    from tests.ui.tui import chat_of, say

    options = {f"chat.{name}": value for name, value in GREEDY.items() if name != "draft"}
    with Chat(tmp_path / "kept", flags=options) as chat:
        first = chat.say(LONG)
        conversation = first.end.conversation_id
    chat = Chat(tmp_path / "kept", flags=options)
    app = ChatApp(chat.controller, AppStart(chat.controller.open(conversation)))
    async with app.run_test(size=(100, 30)) as pilot:
        await say(pilot, app, SHORT)
        second = chat_of(app)._finish or chat.store.message(chat.store.conversation(conversation).leaf_id)
    message = chat.store.message(chat.store.conversation(conversation).leaf_id)
    chat.close()
    assert second is not None and message.usage["cached_tokens"] == first.end.usage["context_used"] - 1
    with Chat(tmp_path / "kept", flags=options) as chat:
        third = chat.say("And then?")
        assert third.cached == message.usage["context_used"] - 1
    talk = lambda chat: [chat.say(text).hash for text in (LONG, SHORT, "And then?")]
    assert fresh(tmp_path / "cold", talk) == [first.hash, message.ids_hash, third.hash]


def test_an_opened_conversation_is_made_ready(tmp_path):
    with Chat(tmp_path / "kept") as chat:
        first = chat.say(LONG)
        assert chat.controller.prepare(chat.id).source == "memory"
    with Chat(tmp_path / "kept") as chat:
        assert chat.controller.prepare(first.end.conversation_id) is None, "nothing is loaded for it"
        for _ in chat.controller.load(chat.host.resolve(None, None)):
            continue
        found = chat.controller.prepare(first.end.conversation_id)
        assert (found.tokens, found.source) == (first.end.usage["context_used"] - 1, "disk")
        second = chat.say(SHORT)
        assert second.resumed.source == "memory" and second.cached == found.tokens


def test_pinned_states_follow_the_conversation(tmp_path):
    with Chat(tmp_path / "kept") as chat:
        chat.say(LONG)
        chat.host.settle(60)
        assert chat.host.states.pin(chat.id) == "2 states are pinned."
        chat.say(SHORT)
    with Chat(tmp_path / "kept") as chat:
        chat.say("And then?")
        chat.host.settle(60)
        with chat.host.states.cache.db.read() as db:
            turns = db.execute("SELECT DISTINCT turn FROM conv_mark c JOIN mark m ON m.id = c.mark_id WHERE pinned").fetchall()
        assert turns == [(3,)]
        assert chat.host.states.pin(chat.id, False) == "The states are no longer pinned."


def test_a_folder_that_cannot_be_used_is_said_once_and_changes_nothing(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with Chat(tmp_path / "kept", flags={"cache.dir": str(blocked)}) as chat:
        assert chat.folder == blocked
        first, second = chat.say(LONG), chat.say(SHORT)
        assert len([text for text in first.told if "Computed states are not kept" in text]) == 1 and second.told == []
        assert "not kept" in chat.host.states.stats()["off"]
    assert fresh(tmp_path / "cold", lambda chat: [chat.say(text).hash for text in (LONG, SHORT)]) == [first.hash, second.hash]


def test_a_folder_that_became_read_only(tmp_path):
    """One line, the same answer, no state used or lost; when it can be written again the next turn goes on from the first one's state."""
    with Chat(tmp_path / "kept") as chat:
        first, folder = chat.say(LONG), chat.folder
    sealed = [folder, *folder.rglob("*")]
    modes = {path: path.stat().st_mode & 0o777 for path in sealed}
    for path in reversed(sealed):
        path.chmod(0o400 if path.is_file() else 0o500)
    try:
        with ordinary_rights(), Chat(tmp_path / "kept") as chat:
            second = chat.say(SHORT)
            third = chat.say("And then?")
            assert len([text for text in second.told if "Computed states are not kept" in text]) == 1 and third.told == []
            assert second.cached == 0 and second.message.state == "complete"
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    with Chat(tmp_path / "kept") as chat:
        again = chat.say(SHORT, parent_id=first.message.id)
        assert again.told == [] and again.cached == first.end.usage["context_used"] - 1 and again.hash == second.hash
    talk = lambda chat: [chat.say(text).hash for text in (LONG, SHORT, "And then?")]
    assert fresh(tmp_path / "cold", talk) == [first.hash, second.hash, third.hash]


def test_drafted_turns_resume_with_their_drafter(tmp_path):
    """Rings go with the lane: the resumed turn proposes and accepts what the turn that never stopped does."""
    drafted = GREEDY | {"draft": 2, "max_tokens": 10}
    with Chat(tmp_path / "one") as chat:
        whole = [chat.say(text, drafted) for text in (LONG, SHORT)]
        if chat.session().drafter.block < 2:
            pytest.skip("this pack has no drafter")
    resumed = []
    for text in (LONG, SHORT):
        with Chat(tmp_path / "two") as chat:
            resumed.append(chat.say(text, drafted))
    assert [said.hash for said in resumed] == [said.hash for said in whole]
    assert resumed[1].resumed.source == "disk" and resumed[1].end.draft == whole[1].end.draft


def test_the_commands(tmp_path, capfd):
    """`cache stats|list|prune`, `conversations list` and `doctor states` say what there is; texts survive a prune."""
    import json

    from dsv41chat.cli import main

    with Chat(tmp_path / "kept") as chat:
        chat.say(LONG)
        name = chat.id

    def command(*words: str):
        assert main([*words, "--json", "--data-dir", str(tmp_path / "kept")]).code == 0
        return json.loads(capfd.readouterr().out)

    stats = command("cache", "stats")
    assert stats["entries"] == 2 and stats["builds"][0]["entries"] == 2 and 0 < stats["bytes"] <= stats["budget"]
    assert stats["counters"]["read from the start"] == 1 and stats["by_kind"] == {"E": 1, "P": 1}
    (row,) = command("cache", "list")
    assert row["conversation"] == name and row["entries"] == 2 and row["tokens"] > 60
    assert command("conversations", "list")[0]["cached"] == row["bytes"]
    assert [line["verdict"] for line in command("doctor", "states", "--model", "nano")] == ["ok", "ok"]
    assert command("cache", "prune", "--older-than", "1d")["entries"] == 0
    assert command("cache", "prune", "--all", "--dry-run")["entries"] == 2
    assert main(["cache", "prune", "--older-than", "1d", "--data-dir", str(tmp_path / "kept")]).code == 0
    shown = capfd.readouterr().out
    assert re.fullmatch(r"0 states removed; the folder holds [\d.]+ kB(, [\d.]+ \w+ less than before)?\n", shown), shown
    assert command("cache", "prune", "--all")["entries"] == 2
    assert main(["cache", "stats", "--data-dir", str(tmp_path / "kept")]).code == 0
    shown = capfd.readouterr().out.splitlines()[0]
    assert re.fullmatch(r"0 states, [\d.]+ .?B for the index, of [\d.]+ .?B in \S+", shown), shown
    assert command("cache", "stats")["entries"] == 0 and command("conversations", "list")[0]["cached"] == 0
    with Chat(tmp_path / "kept") as chat:
        again = chat.say(SHORT)
        assert again.cached == 0 and "cold: state pruned" in again.told[0]
