"""Every action of the full screen, by its key and by the palette: driven as a person would, its effect looked at.

The lists come from the keymap and from the palette itself, so an action without a row here is a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from textual.command import CommandList, CommandPalette

from dsv41chat.store import Store
from dsv41chat.ui.app import ChatApp
from dsv41chat.ui.keymap import COMPOSER, KEYS, TRANSCRIPT, Key
from dsv41chat.ui.render.entry import ANSWER, USER
from dsv41chat.ui.screens.builds import BuildsScreen
from dsv41chat.ui.screens.chat import ChatScreen
from dsv41chat.ui.screens.conversations import ConversationsScreen
from dsv41chat.ui.screens.dialogs import AskScreen, LineScreen, Page, TextScreen
from dsv41chat.ui.screens.export import ExportScreen
from dsv41chat.ui.screens.help import HelpScreen
from dsv41chat.ui.screens.search import SearchScreen
from dsv41chat.ui.screens.settings import SettingsScreen
from dsv41chat.ui.screens.welcome import WelcomeScreen
from dsv41chat.ui.turn_events import TurnRequest
from dsv41chat.ui.widgets.find_bar import FindBar
from dsv41chat.ui.widgets.sidebar import Sidebar
from tests.ui.fakes import Script
from tests.ui.tui import chat_of, make_app, until

LONG = "one needle, two needles\n\n```python\nx = 1  # " + "long " * 60 + "\n```\n\n" + "line\n\n" * 60
RECENT = [f"Recent {number}" for number in range(1, 10)]


@dataclass
class World:
    """One running application with a conversation of its own for each action. calls: what stand-ins were called with."""

    app: ChatApp
    chat: ChatScreen
    calls: list[str]
    script: Script
    before: Any = None

    @property
    def shown(self) -> Any:
        return self.chat.transcript

    def messages(self) -> list[Any]:
        return [entry.message for entry in self.shown.entries if entry.message is not None]

    def tree(self) -> int:
        return len(self.app.store.tree(self.chat.conversation.id))


@dataclass(frozen=True)
class Case:
    """prepare: brings about what the action needs. before: what to compare with afterwards. effect: True once it has happened."""

    effect: Callable[[World], bool]
    prepare: Callable[[World], Any] = lambda world: None
    before: Callable[[World], Any] = lambda world: None


def opens(kind: type) -> Case:
    return Case(lambda world: isinstance(world.app.screen, kind))


def calls(name: str, prepare: Callable[[World], Any] = lambda world: None) -> Case:
    return Case(lambda world: name in world.calls, prepare)


def answering(world: World) -> None:
    world.script.answer, world.script.delay_s = "word " * 2000, 0.01
    world.chat.start(TurnRequest(world.chat.conversation.id, text="go on", parent_id=world.chat.leaf_id), "go on")


def queued(world: World) -> None:
    world.app.store.queue_push(world.chat.conversation.id, "wait for me")
    world.chat.reload_queue()


def at_end(world: World) -> None:
    world.shown.end()


def at_start(world: World) -> None:
    world.shown.home()


def on(place: int) -> Callable[[World], None]:
    """The message of that number is the selected one."""
    return lambda world: world.shown.select(place)


def writing(text: str) -> Callable[[World], None]:
    return lambda world: world.chat.composer.insert(text)


def editing(world: World) -> None:
    world.chat.begin_edit(world.shown.entries[2])
    world.chat.composer.reset("another second question")


def searched(world: World) -> None:
    world.chat._query = "needle"
    world.chat._find_now()


def pasted(world: World) -> None:
    world.chat.composer.take("many words " * 2000)


def taken(world: World) -> None:
    world.chat.readonly, world.chat.holder = True, 1


def deleted(world: World) -> None:
    world.before = world.chat.conversation.id
    world.app.store.delete(world.before)
    world.chat.clear_conversation()


def last(world: World, role: str) -> Any:
    return world.chat._last(role)


def selected_role(world: World) -> str:
    return world.shown.selected_entry.role if world.shown.selected_entry is not None else ""


def titles(store: Store) -> list[str]:
    return [row.title for row in store.list_conversations(None, 9)]


SCROLL = {"before": lambda world: world.shown.scroll_y}
CASES: dict[str, Case] = {
    "chat.stop": Case(lambda w: not w.chat.pump.running and w.chat._finish.finish == "cancelled", answering),
    "app.palette": opens(CommandPalette),
    "list.open": opens(ConversationsScreen),
    "chat.new": Case(lambda w: w.chat.conversation is None),
    "app.help": opens(HelpScreen),
    "build.menu": opens(BuildsScreen),
    "view.sidebar": Case(lambda w: w.chat.query_one(Sidebar).display != w.before, before=lambda w: w.chat.query_one(Sidebar).display),
    "view.details": opens(TextScreen),
    "app.settings": opens(SettingsScreen),
    "chat.interrupt": Case(lambda w: not w.chat.composer.text, writing("to be cleared")),
    "app.quit": calls("leave"),
    "chat.regenerate": Case(lambda w: not w.chat.pump.running and w.tree() == w.before + 1, before=World.tree),
    "chat.thinking": Case(lambda w: last(w, ANSWER).thinking_view == "show"),
    "compose.editor": Case(lambda w: w.chat.composer.text == "edited outside"),
    "chat.find": Case(lambda w: w.chat.query_one(FindBar).display),
    "view.redraw": calls("refresh"),
    "view.page_up": Case(lambda w: w.shown.scroll_y < w.before, at_end, **SCROLL),
    "view.page_down": Case(lambda w: w.shown.scroll_y > w.before, at_start, **SCROLL),
    "view.home": Case(lambda w: w.shown.scroll_y == 0, at_end),
    "view.end": Case(lambda w: w.shown.follow and w.shown.scroll_y == w.shown.max_scroll_y, at_start),
    "app.welcome": opens(WelcomeScreen),
    "chat.continue": Case(lambda w: not w.chat.pump.running and w.messages()[-1].text.startswith(w.before) and w.messages()[-1].state == "complete",
                          before=lambda w: w.messages()[-1].text),
    "chat.show_thinking": Case(lambda w: {entry.thinking_view for entry in w.shown.entries} == {"show"}),
    "chat.fold_thinking": Case(lambda w: {entry.thinking_view for entry in w.shown.entries} == {"fold"}),
    "chat.hide_thinking": Case(lambda w: {entry.thinking_view for entry in w.shown.entries} == {"hide"}),
    "chat.effort": opens(AskScreen),
    "chat.system": opens(LineScreen),
    "chat.set": opens(LineScreen),
    "chat.rename": opens(LineScreen),
    "chat.pin": Case(lambda w: w.app.store.conversation(w.chat.conversation.id).pinned),
    "chat.undelete": opens(AskScreen),
    "chat.delete": opens(AskScreen),
    "chat.fork": Case(lambda w: w.chat.conversation.id != w.before, before=lambda w: w.chat.conversation.id),
    "chat.export": opens(ExportScreen),
    "chat.import": opens(LineScreen),
    "chat.save_only": Case(lambda w: w.tree() == w.before + 1 and w.chat.editing is None, editing, World.tree),
    "chat.queue_send": Case(lambda w: not w.chat.queue and not w.chat.pump.running and "wait for me" in [m.text for m in w.messages()], queued),
    "chat.queue_clear": Case(lambda w: not w.app.store.queued(w.chat.conversation.id), queued),
    "chat.search_all": opens(SearchScreen),
    "chat.save_again": calls("Saved."),
    "chat.takeover": Case(lambda w: not w.chat.readonly, taken),
    "build.add": opens(LineScreen),
    "compose.attach": opens(LineScreen),
    "paste.expand": Case(lambda w: w.chat.composer.text.count("many words") == 2000, pasted),
    "view.theme": opens(CommandPalette),
    "view.mouse": Case(lambda w: w.app.mouse_on != w.before, before=lambda w: w.app.mouse_on),
    "compose.send": Case(lambda w: not w.chat.pump.running and "to be sent" in [m.text for m in w.messages()], writing("to be sent")),
    "compose.newline": Case(lambda w: w.chat.composer.text.endswith("\n"), writing("first")),
    "compose.history": Case(lambda w: w.chat.composer.text == "sent before", lambda w: w.chat.composer.remember("sent before")),
    "compose.undo": Case(lambda w: w.chat.composer.text != "taken back", writing("taken back")),
    "message.previous": Case(lambda w: selected_role(w) == USER, on(3)),
    "message.next": Case(lambda w: w.shown.selected == 1, on(0)),
    "message.first": Case(lambda w: w.shown.selected == 0, on(3)),
    "message.last": Case(lambda w: w.shown.selected == 3 and w.shown.follow, on(0)),
    "message.unfold": Case(lambda w: w.shown.entries[3].thinking_view == "show", on(3)),
    "message.copy": Case(lambda w: w.app.clipboard == last(w, ANSWER).text, on(3)),
    "message.code": Case(lambda w: w.app.clipboard == last(w, ANSWER).code_blocks()[0], on(3)),
    "message.edit": Case(lambda w: w.chat.composer.text == "second question" and w.chat.editing is not None, on(2)),
    "message.regenerate": Case(lambda w: not w.chat.pump.running and w.tree() == w.before + 1, on(3), World.tree),
    "branch.previous": Case(lambda w: w.messages()[0].text == "other first question", on(0)),
    "branch.next": Case(lambda w: w.messages()[0].text == "newest first question", on(0)),
    "branch.list": Case(lambda w: isinstance(w.app.screen, AskScreen), on(0)),
    "branch.delete": Case(lambda w: isinstance(w.app.screen, AskScreen), on(3)),
    "view.wrap": Case(lambda w: w.shown.wrap_code != w.before, before=lambda w: w.shown.wrap_code),
    "view.left": Case(lambda w: w.shown._shift < w.before, lambda w: w.shown.shift(2), lambda w: w.shown._shift),
    "view.right": Case(lambda w: w.shown._shift > w.before, before=lambda w: w.shown._shift),
    "message.pager": calls("outside", on(3)),
    "message.mark": Case(lambda w: w.shown.entries[3].mark, on(3)),
    "find.open": Case(lambda w: w.chat.query_one(FindBar).display),
    "find.next": Case(lambda w: w.chat._hit == (w.before + 1) % len(w.chat._hits), searched, lambda w: w.chat._hit),
    "find.previous": Case(lambda w: w.chat._hit == (w.before - 1) % len(w.chat._hits), searched, lambda w: w.chat._hit),
    "message.suspend": calls("suspend"),
    **{
        f"list.recent{n}": Case(lambda w, n=n: w.chat.conversation.title == w.before[n - 1], before=lambda w: titles(w.app.store))
        for n in range(1, 10)
    },
}  # fmt: skip
# What the key does and the palette cannot: completing is a part of typing.
KEY_ONLY = {"app.palette", "compose.complete"}
NO_KEY_HERE = {"compose.complete"}  # tests/ui/test_chat.py and test_tools.py complete commands and paths


def grow(store: Store) -> tuple[str, str]:
    """A conversation with two questions, two answers and three branches at the first; (id, leaf of the middle one)."""
    conversation = store.new_conversation("Acted on")
    for text in ("other first question", "first question", "newest first question"):
        question = store.add_message(conversation.id, None, "user", text)
        writer = store.begin_answer(conversation.id, question.id, "nano", "f", {})
        writer.update(LONG, "a thought")
        answer = writer.finish("complete", finish="stop", text=LONG, thinking="a thought")
        if text == "first question":
            second = store.add_message(conversation.id, answer.id, "user", "second question")
            writer = store.begin_answer(conversation.id, second.id, "nano", "f", {})
            writer.update(LONG, "more thought")
            leaf = writer.finish("stopped", finish="cancelled", text=LONG, thinking="more thought").id
    store.set_leaf(conversation.id, leaf)
    return conversation.id, leaf


async def fresh(world: World, key: Key) -> None:
    """Back to a quiet chat screen with a new conversation on it, the keys where this action's key counts."""
    while isinstance(page := world.app.screen, Page | CommandPalette):
        page.dismiss(None)
        await until(lambda page=page: world.app.screen is not page)
    chat = world.chat
    if chat.pump.running:
        chat.stop_turn()
    await until(lambda: not chat.pump.running and not chat.switching)
    chat.close_find()
    chat.composer.reset()
    chat.readonly, chat.holder = False, None
    chat.action_thinking_all("fold")
    world.calls.clear()
    world.script.answer, world.script.delay_s = "a word or two", 0.0
    store = world.app.store
    for row in store.list_conversations(None):
        if row.title == "Acted on":
            store.unlock(row.id)
            store.delete(row.id)
    conversation, leaf = grow(store)
    if key.id.startswith("list.recent"):
        for title in RECENT:
            store.new_conversation(title)
    assert await chat.open_conversation(conversation, leaf=leaf)
    place = chat.transcript if key.context == TRANSCRIPT else chat.composer
    place.focus()
    await until(lambda: place.has_focus)


async def drawn(world: World) -> None:
    done = asyncio.Event()
    world.chat.call_after_refresh(done.set)
    await done.wait()


def stand_in(world: World, monkeypatch) -> None:
    """What would leave the program or the terminal is noted instead."""
    app, chat, note = world.app, world.chat, world.calls.append
    refresh, outside = app.refresh, "edited outside"

    def tell(text: str, severity: str = "information") -> None:
        note(text)

    monkeypatch.setattr(app, "leave", lambda code=0: note("leave"))
    monkeypatch.setattr(app, "action_suspend_process", lambda: note("suspend"))
    monkeypatch.setattr(app, "refresh", lambda *args, **kwargs: (note("refresh"), refresh(*args, **kwargs))[1])
    monkeypatch.setattr(chat, "_outside", lambda *args, **kwargs: (note("outside"), outside)[1])
    monkeypatch.setattr(chat, "tell", tell)


@asynccontextmanager
async def acting(tmp_path, monkeypatch) -> AsyncIterator[tuple[World, Any]]:
    """A running application with its stand-ins, and the pilot that drives it."""
    script = Script(answer="a word or two")
    app = make_app(tmp_path, script)
    async with app.run_test(size=(120, 20)) as pilot:
        world = World(app, chat_of(app), [], script)
        await until(lambda: not world.chat.starting and not world.chat.switching)
        stand_in(world, monkeypatch)
        yield world, pilot


async def by_palette(world: World, pilot, key: Key) -> None:
    """Opens the palette, goes to the action in its list and presses Enter."""
    await pilot.press("ctrl+p")
    app, title = world.app, key.title
    if key.id.startswith("list.recent"):
        title = f"Open: {world.before[int(key.id[-1]) - 1]}"

    def found() -> int | None:
        if not isinstance(app.screen, CommandPalette):
            return None
        options = app.screen.query_one(CommandList).options
        return next((index for index, option in enumerate(options) if option.hit.text == title), None)

    await until(lambda: found() is not None)
    app.screen.query_one(CommandList).highlighted = found()
    await pilot.press("enter")


ACTED = [key for key in KEYS if key.id not in NO_KEY_HERE]
# The first and the last of the nine recent conversations are with the others of the list; by the palette those between are the same again.
BETWEEN = [f"list.recent{n}" for n in range(2, 9)]
GROUPS = {name: [key for key in ACTED if key.id.split(".")[0] in sections and key.id not in BETWEEN] for name, sections in {
    "app": ("app", "list", "build"), "chat": ("chat", "paste", "compose"), "view": ("view", "find"), "message": ("message", "branch"),
}.items()} | {"between": [key for key in ACTED if key.id in BETWEEN]}  # fmt: skip
TRIED = [(way, group) for group in GROUPS for way in ("key", "palette") if (way, group) != ("palette", "between")]


def test_every_action_has_a_case_and_a_way():
    assert set(CASES) == {key.id for key in ACTED}
    assert sorted(key.id for keys in GROUPS.values() for key in keys) == sorted(CASES)
    assert {key.id for key in KEYS if not key.action} == KEY_ONLY - {"app.palette"}


async def test_the_palette_lists_every_action_and_nothing_else(tmp_path):
    app = make_app(tmp_path)
    async with app.run_test(size=(120, 20)):
        await until(lambda: not chat_of(app).starting)
        listed = {command.title for command in app.get_system_commands(app.screen)}
        assert listed == {key.title for key in KEYS if key.id not in KEY_ONLY and not key.id.startswith("list.recent")}


@pytest.mark.parametrize("way, group", TRIED)
async def test_actions(tmp_path, monkeypatch, way, group):
    await each_has_its_effect(tmp_path, monkeypatch, way, group)


@pytest.mark.slow
async def test_actions_between_by_the_palette(tmp_path, monkeypatch):
    await each_has_its_effect(tmp_path, monkeypatch, "palette", "between")


async def each_has_its_effect(tmp_path, monkeypatch, way: str, group: str) -> None:
    async with acting(tmp_path, monkeypatch) as (world, pilot):
        tried = 0
        for key in GROUPS[group]:
            if (way == "key" and not key.key) or (way == "palette" and key.id in KEY_ONLY):
                continue
            await fresh(world, key)
            case = CASES[key.id]
            if key.id == "chat.undelete":
                deleted(world)
            case.prepare(world)
            await drawn(world)
            world.before = case.before(world)
            if way == "palette":
                if key.context == TRANSCRIPT and key.id.startswith(("message", "branch")):
                    world.chat.transcript.focus()
                await by_palette(world, pilot, key)
            else:
                assert key.context != COMPOSER or world.chat.composer.has_focus
                await pilot.press(key.key.split(",")[0])
            try:
                await until(partial(case.effect, world))
            except AssertionError:
                raise AssertionError(f"{key.id} by {way} had no effect; said: {world.calls}") from None
            tried += 1
        assert tried


async def test_the_palette_acts_on_the_last_message_when_none_is_selected(tmp_path, monkeypatch):
    async with acting(tmp_path, monkeypatch) as (world, pilot):
        for action in ("message.copy", "message.code", "message.edit", "message.mark", "message.unfold", "message.pager", "message.previous"):
            key = next(key for key in KEYS if key.id == action)
            await fresh(world, key)
            world.chat.composer.focus()
            world.shown.selected = None
            await by_palette(world, pilot, key)
            effect = (lambda w: w.chat.focused is w.shown) if action == "message.previous" else CASES[action].effect
            await until(partial(effect, world))


async def test_effort_and_options_from_the_palette(tmp_path, monkeypatch):
    async with acting(tmp_path, monkeypatch) as (world, pilot):
        await fresh(world, next(key for key in KEYS if key.id == "chat.effort"))
        world.chat.composer.insert("a draft")
        world.chat.action_ask_effort()
        await until(lambda: isinstance(world.app.screen, AskScreen))
        await pilot.press("3")
        stored = lambda: world.app.store.conversation(world.chat.conversation.id).settings
        await until(lambda: stored().get("effort") == "high")
        world.chat.action_ask_option("set")
        await until(lambda: isinstance(world.app.screen, LineScreen))
        await pilot.press(*"temperature", "space", *"0.7", "enter")
        await until(lambda: stored().get("temperature") == 0.7)
        assert world.chat.composer.text == "a draft", "what is being written stays"
