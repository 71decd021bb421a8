"""kill -9 on the full screen in a real terminal, at any moment: what was on the screen a second ago is there again (spec: app, 4.8)."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dsv41chat.store import Store
from tests.ui.terminal import Terminal

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

# One second each is promised; a loaded test machine gets another for its own delays.
PROMISE_S = 2.0
DRAFT_S = 3.0  # a draft is written a second after it changed, by another thread
Launch = Callable[[Terminal, Path, str | None], None]


@dataclass
class Seen:
    """What the screen showed, and when (monotonic seconds): questions that were sent, texts in the queue, the draft, tokens of the answer."""

    sent: list[tuple[float, str]] = field(default_factory=list)
    queued: list[tuple[float, str]] = field(default_factory=list)
    draft: tuple[float, str] | None = None
    tokens: list[tuple[float, int]] = field(default_factory=list)


def count(screen: str) -> int:
    found = re.search(r"gen (?:[\d.,]+ tok/s )?([\d,]+)", screen)
    return int(found[1].replace(",", "")) if found else 0


class Round:
    """One life of the program, up to its kill."""

    def __init__(self, terminal: Terminal, number: int):
        self.terminal, self.number, self.seen = terminal, number, Seen()

    def text(self, what: str) -> str:
        return f"{what}{self.number}"

    def send(self, text: str) -> None:
        self.terminal.type(text)
        self.terminal.keys("Enter")
        self.terminal.wait(f"  {text}\n") if text else None
        self.seen.sent.append((time.monotonic(), text))

    def streaming(self) -> None:
        self.send(self.text("question"))
        deadline = time.monotonic() + 120
        while not count(screen := self.terminal.screen) and "tok/s · " not in screen:
            assert time.monotonic() < deadline, screen
            time.sleep(0.05)

    def queue(self) -> None:
        self.streaming()
        for text in (self.text("later"), self.text("last")):
            self.terminal.type(text)
            self.terminal.keys("Enter")
            # Noise may have met the id that ends an answer: then it is sent at once.
            queued, deadline = f"{len(self.seen.queued) + 1}: {text}", time.monotonic() + 120
            while queued not in (screen := self.terminal.screen) and f"  {text}\n" not in screen:
                assert time.monotonic() < deadline, screen
                time.sleep(0.1)
            (self.seen.queued if queued in screen else self.seen.sent).append((time.monotonic(), text))

    def compose(self) -> None:
        self.terminal.type(self.text("draft"))
        self.seen.draft = (time.monotonic(), self.text("draft"))

    def stopped(self) -> None:
        self.streaming()
        self.terminal.keys("Escape")
        self.terminal.wait("tok/s · ")
        self.terminal.wait("gen ", gone=True)

    def edit(self) -> None:
        """The first message of this conversation is being edited; its text stands in the composer."""
        self.stopped()
        self.terminal.keys("Tab")
        self.terminal.wait("c copy")
        self.terminal.keys("g", "e")
        self.terminal.wait("editing message 1")
        self.terminal.type("changed")
        self.seen.draft = (time.monotonic(), self.text("question") + "changed")

    def edited(self) -> None:
        """The answer on the new branch streams."""
        self.edit()
        text, self.seen.draft = self.seen.draft[1], None
        self.terminal.keys("Enter")
        self.terminal.wait(f"  {text}\n")
        self.seen.sent.append((time.monotonic(), text))

    def begin(self) -> None:
        self.send(self.text("question"))

    def run(self, scenario: str, wait_s: float) -> float:
        """Brings the program to the scenario, waits, kills it. Returns when."""
        getattr(self, scenario)()
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            self.seen.tokens.append((time.monotonic(), count(self.terminal.screen)))
            time.sleep(0.1)
        killed = time.monotonic()
        self.terminal.kill()
        return killed


SCENARIOS = ("streaming", "queue", "compose", "edit", "edited", "begin")


def check(store: Store, seen: Seen, killed: float) -> None:
    """What the store must hold after the kill."""
    with store.db.read() as db:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert not [m for row in store.list_conversations() for m in store.tree(row.id) if m.state == "running"], "nothing runs any more"
    conversation = store.last_conversation() if seen.sent else None
    tree = store.tree(conversation.id) if conversation is not None else []
    texts = [message.text for message in tree if message.role == "user"]
    waiting = [item.text for item in store.queued(conversation.id)] if seen.sent else []
    assert texts + waiting == [text for _, text in [*seen.sent, *seen.queued]], "every message that was shown, once"
    # What was queued waits, unless the answer before it came to its own end.
    assert len(waiting) == len(seen.queued) or any(message.state == "complete" for message in tree)
    if seen.draft is not None and seen.draft[0] < killed - DRAFT_S:
        assert store.draft(conversation.id if seen.sent else None).text == seen.draft[1]
    shown = max([tokens for at, tokens in seen.tokens if at < killed - PROMISE_S], default=0)
    if shown:
        answer = next(message for message in reversed(tree) if message.role == "assistant")
        assert len(answer.body_ids) + 1 >= shown
        # Noise may have met the id that ends an answer.
        assert answer.state == ("interrupted" if answer.id in store.recovered else "complete")


def finished(store: Store) -> dict[str, str]:
    """Every message of every conversation: nothing of an earlier life may change."""
    return {message.id: message.text for row in store.list_conversations() for message in store.tree(row.id)}


def kills(tmp_path: Path, launch: Launch, moments: list[tuple[str, float]]) -> None:
    """One life after another on the same data."""
    data, old = tmp_path / "data", {}
    for number, (scenario, wait_s) in enumerate(moments):
        print(f"round {number}: {scenario}, killed after {wait_s:.3f} s")
        folder = tmp_path / str(number)
        folder.mkdir()
        with Terminal(folder, 100, 30) as terminal:
            launch(terminal, data, None)
            terminal.wait("loading", gone=True)
            life = Round(terminal, number)
            killed = life.run(scenario, wait_s)
            with Store.open(data) as store:
                check(store, life.seen, killed)
                now = finished(store)
                assert {key: now.get(key) for key in old} == old
                old = now
                key = store.last_conversation().id if life.seen.sent else None
                waiting = store.queued(key) if key is not None else []
        with Terminal(folder, 100, 30) as terminal:
            launch(terminal, data, key)
            if life.seen.sent:
                # The title, so it is there however long the answer is.
                terminal.wait(life.seen.sent[0][1])
            for place, item in enumerate(waiting, 1):
                terminal.wait(f"queued {place}: {item.text}")
            # Where the build still loads it asks, because a message waits; Enter says quit.
            terminal.keys("C-q")
            terminal.until_after("Enter", "exit=0", when="keep running")
        with Store.open(data) as store:
            # The next life begins with an empty composer and a new conversation.
            store.save_draft(None, "")


def scripted(terminal: Terminal, data: Path, key: str | None) -> None:
    answer = terminal.folder / "answer.md"
    answer.write_text("".join(f"w{n} " for n in range(9000)))
    terminal.run("-m", "tests.ui.fake_program", str(data), str(answer), "0.004", *([key] if key else []))
    terminal.wait("Enter send")


def embedded(terminal: Terminal, data: Path, key: str | None) -> None:
    """So hot, it draws evenly from all ids and seldom meets one that ends the answer."""
    options = ["--temperature", "100", "--effort", "off", "--max-tokens", "4000", *(["--resume", key] if key else [])]
    terminal.run("-m", "dsv41chat", "--data-dir", str(data), *options)
    terminal.wait("Enter send")


def test_killed_at_three_moments(tmp_path):
    kills(tmp_path, scripted, [("queue", 2.3), ("edit", 3.1), ("edited", 0.4)])


@pytest.mark.slow
def test_killed_at_thirty_random_moments(tmp_path):
    """Of the real program with the embedded model. KILL_SEED repeats a run."""
    seed = int(os.environ.get("KILL_SEED", time.time_ns() % 1_000_000))
    print(f"KILL_SEED={seed}")
    rng = random.Random(seed)
    kills(tmp_path, embedded, [(rng.choice(SCENARIOS), rng.uniform(0.0, 4.0)) for _ in range(30)])
