"""A few screens as text, with fixed clock and theme. To renew them: SNAPSHOTS=write pytest tests/ui/test_snapshots.py"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from textual.filter import Monochrome

from dsv41chat.store import Store
from tests.ui.fakes import Script
from tests.ui.tui import chat_of, drawn, make_app, say, screen_text, shows, until

FOLDER = Path(__file__).parent / "snapshots"
ANSWER = "Each table belongs to *one* layer 世界.\n\n```python\nrows = table[addresses]\n```\n\n1. one\n2. two\n\n"
ANSWER += "| a | b |\n|---|--:|\n| 1 | 漢字 |\n"


def text_of(app) -> str:
    return "\n".join(line.rstrip() for line in screen_text(app).splitlines()) + "\n"


async def check(app, name: str) -> None:
    path = FOLDER / f"{name}.txt"
    await drawn(app)
    if os.environ.get("SNAPSHOTS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text_of(app), "utf-8")
    wanted = path.read_text("utf-8")
    try:
        await until(lambda: text_of(app) == wanted)
    except AssertionError:
        assert text_of(app) == wanted


@pytest.fixture(autouse=True)
def fixed(monkeypatch):
    """Nothing on the screen depends on the moment or on the machine."""
    monkeypatch.setattr("dsv41chat.ui.present.clock", lambda seconds: "14:02")
    monkeypatch.setattr("dsv41chat.ui.screens.chat_turns.clock", lambda seconds: "14:02")
    monkeypatch.setattr("dsv41chat.ui.screens.conversations.age", lambda seconds: "3 min")
    monkeypatch.setattr("dsv41chat.ui.widgets.sidebar.age", lambda seconds: "3 min")
    monkeypatch.setattr("dsv41chat.ui.present.receipt", lambda message: "312 tok · 44.8 tok/s · first 0.6 s · resumed 21,888, prefilled 78")
    monkeypatch.setattr("dsv41chat.ui.present.thinking_note", lambda tokens, seconds: f"{tokens} tokens · 18 s")
    monkeypatch.setattr("dsv41chat.ui.screens.chat_turns.thinking_note", lambda tokens, seconds: f"{tokens} tokens · 18 s")
    monkeypatch.setattr("dsv41chat.ui.app.ChatApp.memory", lambda app: None)


SIZES = {"narrow": (40, 16), "normal": (80, 24), "wide": (120, 30)}


@pytest.mark.parametrize("name", SIZES)
async def test_chat(tmp_path, name):
    app = make_app(tmp_path, Script(answer=ANSWER, thinking="let me see"), store=Store.memory(background=False))
    app.unsaved = ""
    async with app.run_test(size=SIZES[name]) as pilot:
        await until(lambda: app.host.engine is not None and not chat_of(app).switching)
        if name == "normal":
            await check(app, "start")
        await say(pilot, app, "Why are there two tables?")
        if name == "wide":
            await shows(app, "3 min")
        await check(app, f"chat-{name}")


async def test_picker_and_too_small(tmp_path):
    store = Store.memory(background=False)
    for title in ("Engram questions", "Sinkhorn notes 世界"):
        store.add_message(store.new_conversation(title).id, None, "user", title)
    app = make_app(tmp_path, Script(), store=store)
    async with app.run_test(size=(80, 20)) as pilot:
        await until(lambda: not chat_of(app).starting)
        await pilot.press("ctrl+o")
        await shows(app, "Engram")
        await check(app, "picker")
        await pilot.press("escape")
        await until(lambda: app.screen is chat_of(app))
        await pilot.resize_terminal(36, 8)
        await shows(app, "too small")
        await check(app, "too-small")


@pytest.mark.parametrize("theme", ["dark", "light", "ansi", "no-color"])
async def test_the_text_is_the_same_in_every_theme(tmp_path, theme, monkeypatch):
    if theme == "no-color":
        monkeypatch.setenv("NO_COLOR", "1")
    app = make_app(tmp_path, Script(answer=ANSWER, thinking="let me see"), config="" if theme == "no-color" else f'[ui]\ntheme = "{theme}"\n')
    app.unsaved = ""
    async with app.run_test(size=SIZES["normal"]) as pilot:
        await say(pilot, app, "Why are there two tables?")
        await check(app, "chat-normal")
        assert any(isinstance(one, Monochrome) for one in app._filters) == (theme == "no-color")
        assert chat_of(app).transcript.follow
