"""A full screen application on a scripted engine and a store in memory, for Pilot tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import textual.app
import textual.pilot
from textual._context import active_app
from textual.message_pump import MessagePump

from dsv41chat.settings import load_settings
from dsv41chat.store import Store
from dsv41chat.ui.app import ChatApp
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.screens.chat import ChatScreen
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script, fake_host


def make_app(tmp_path: Path, script: Script | None = None, start: AppStart | None = None, *, store: Store | None = None, config: str = "") -> ChatApp:
    """An application that is not running yet. Its store is in memory unless one is given. Toasts stay: a busy machine may be slow to look."""
    file = tmp_path / "config.toml"
    file.write_text(config)
    settings = load_settings(config=file, data_dir=tmp_path / "data", environ={})
    store = store or Store.memory(background=False)
    host = EngineHost(settings, store, **fake_host(script, tmp_path / "fake-pack"))
    app = ChatApp(TurnController(store, host, settings), start)
    notify = app.notify
    app.notify = lambda *words, timeout=None, **options: notify(*words, timeout=600, **options)
    return app


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


async def ready(app: ChatApp) -> ChatScreen:
    """The chat screen once the start is over and the build is loaded."""
    chat = chat_of(app)
    await until(lambda: app.host.engine is not None and not chat.switching and not chat.starting)
    return chat


@asynccontextmanager
async def running(app: ChatApp, **options: Any) -> AsyncIterator[tuple[textual.pilot.Pilot, ChatScreen]]:
    """Runs an application on a screen of 100 by 30; gives the pilot and the chat screen when it is ready. options: of Textual's `run_test`."""
    async with app.run_test(**{"size": (100, 30)} | options) as pilot:
        yield pilot, await ready(app)


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Waits for something that the running application will do; what is not there yet (LookupError) counts as not done."""
    deadline = time.monotonic() + timeout_s
    while True:
        problem = None
        try:
            if condition():
                return
        except LookupError as error:
            problem = error
        # A machine that stood still must not be the reason: the last look comes after the time.
        if time.monotonic() > deadline:
            app = active_app.get(None)
            raise AssertionError(f"it did not happen in time; on the screen:\n{screen_text(app) if app is not None else ''}") from problem
        await asyncio.sleep(0.02)


async def shows(app: ChatApp, *texts: str, timeout_s: float = 60.0) -> str:
    """Waits until all of these texts are on the screen together; returns the screen."""
    shown = ""

    def all_there() -> bool:
        nonlocal shown
        shown = screen_text(app)
        return all(text in shown for text in texts)

    try:
        await until(all_there, timeout_s)
    except AssertionError:
        missing = [text for text in texts if text not in shown]
        raise AssertionError(f"{missing} did not appear on the screen:\n{shown}") from None
    return shown


async def drawn(app: ChatApp) -> str:
    """Waits until what was sent to the application before this is handled and drawn; returns the screen.

    For what must not be on it: where something is to come, wait for that as well.
    """
    for _ in range(2):  # the second time for what handling the first led to
        await handled()
        done = asyncio.Event()
        app.screen.call_after_refresh(done.set)
        await asyncio.wait_for(done.wait(), 60)
    return screen_text(app)


KEY_S = 0.01  # twice after each key: the composer takes keys that come faster for a paste


async def handled(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Waits until no message waits in the running application and none is being handled. Some (a stream) never rest: `max_sleep` (s) ends it.

    It stands in for Textual's own `wait_for_idle`, which takes a process that gets no time from a busy machine for an idle one.
    """
    app = active_app.get(None)
    deadline = time.monotonic() + max_sleep
    await asyncio.sleep(max(min_sleep, KEY_S))
    while app is not None and not all(map(resting, (app, *app._registry))) and time.monotonic() < deadline:
        await asyncio.sleep(0.002)


# Every pilot waits so after each of its keys.
textual.app.wait_for_idle = textual.pilot.wait_for_idle = handled


def resting(pump: MessagePump) -> bool:
    """Whether a message pump waits for its next message."""
    if not pump._running or pump._closed or pump._closing:
        return True
    ready = pump._message_queue.ready_event
    return pump._pending_message is None and not ready.is_set() and any(not waiter.done() for waiter in ready._waiters)


def screen_text(app: ChatApp) -> str:
    """What the terminal would show, without styles."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in lines)


async def say(pilot, app: ChatApp, text: str) -> None:
    """Types a message (as one paste, then Enter) and waits for the end of its turn."""
    chat = chat_of(app)
    # The end of an earlier turn is not that of this one.
    chat._finish = chat._failure = None
    chat.composer.focus()
    chat.composer.insert(text)
    await pilot.press("enter")
    await ended(chat)
    await pilot.pause()


async def ended(chat: ChatScreen) -> None:
    """Waits for the end of a turn that starts (`start` forgets the end before) or that runs."""
    await until(lambda: (chat._finish is not None or chat._failure is not None) and not chat.pump.running)
