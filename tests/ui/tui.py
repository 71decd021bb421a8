"""A full screen application on a scripted engine and a store in memory, for Pilot tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from dsv41chat.settings import load_settings
from dsv41chat.store import Store
from dsv41chat.ui.app import ChatApp
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.screens.chat import ChatScreen
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script, fake_host


def make_app(tmp_path: Path, script: Script | None = None, start: AppStart | None = None, *, store: Store | None = None, config: str = "") -> ChatApp:
    """An application that is not running yet. Its store is in memory unless one is given."""
    file = tmp_path / "config.toml"
    file.write_text(config)
    settings = load_settings(config=file, data_dir=tmp_path / "data", environ={})
    store = store or Store.memory(background=False)
    host = EngineHost(settings, store, **fake_host(script, tmp_path / "fake-pack"))
    return ChatApp(TurnController(store, host, settings), start)


def stored(*texts: str) -> tuple[Store, str]:
    """A store with one conversation of alternating messages, and its id."""
    store = Store.memory(background=False)
    key = store.new_conversation().id
    parent = None
    for number, text in enumerate(texts):
        parent = store.add_message(key, parent, "assistant" if number % 2 else "user", text).id
    store.set_leaf(key, parent)
    return store, key


def chat_of(app: ChatApp) -> ChatScreen:
    return next(screen for screen in app.screen_stack if isinstance(screen, ChatScreen))


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for something that the running application will do."""
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen in time")


def screen_text(app: ChatApp) -> str:
    """What the terminal would show, without styles."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in lines)


async def say(pilot, app: ChatApp, text: str) -> None:
    """Types a message (as one paste, then Enter) and waits for the end of its turn."""
    chat = chat_of(app)
    chat.composer.focus()
    chat.composer.insert(text)
    await pilot.press("enter")
    await until(lambda: chat.pump.running or bool(chat._finish or chat._failure))
    await until(lambda: not chat.pump.running)
    await pilot.pause()
