"""Esc and ctrl+C while a prompt is read or an answer streams: what is kept, what the lines around it say, what goes on afterwards."""

from __future__ import annotations

import re

import pytest

from tests.ui.fakes import Script
from tests.ui.tui import chat_of, ended, make_app, screen_text, until


async def stopped_in_prefill(pilot, chat, text: str = "word " * 200) -> int:
    """Sends `text` and stops when some of it was read; returns how many tokens."""
    chat.composer.insert(text)
    await pilot.press("enter")
    await until(lambda: chat.status.prefilled >= 128)
    await pilot.press("escape")
    await ended(chat)
    return chat._finish.usage["prefilled_tokens"]


async def test_the_status_line_says_what_was_read_before_the_stop(tmp_path):
    app = make_app(tmp_path, Script(prefill_s=0.05))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: app.host.engine is not None and not chat.switching)
        read = await stopped_in_prefill(pilot, chat)
        assert 128 <= read < 800, "the prompt has a thousand tokens"
        await until(lambda: [int(shown.replace(",", "")) for shown in re.findall(r"cached 0 \+([\d,]+)", screen_text(app))] == [read])


@pytest.mark.parametrize("where", ["new", "other"])
async def test_the_notice_about_a_queue_stays_with_its_conversation(tmp_path, where):
    app = make_app(tmp_path, Script(answer="word " * 2000, delay_s=0.01))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await until(lambda: app.host.engine is not None and not chat.switching)
        other = app.store.new_conversation("the other one").id
        chat.composer.insert("question")
        await pilot.press("enter")
        await until(lambda: chat.status.answer > 3)
        chat.composer.insert("waits")
        await pilot.press("enter")
        await until(lambda: len(chat.queue) == 1)
        await pilot.press("escape")
        await until(lambda: any("1 queued: send" in toast.message for toast in app._notifications))
        await until(lambda: "1 queued: send" in screen_text(app))
        chat.tell("something else")
        await until(lambda: any(toast.message == "something else" for toast in app._notifications))
        key = chat.conversation.id
        if where == "new":
            await pilot.press("ctrl+n")
        else:
            assert await chat.open_conversation(other)
        await until(lambda: chat.conversation is None or chat.conversation.id == other)
        await until(lambda: [toast.message for toast in app._notifications] == ["something else"])
        await until(lambda: "queued" not in screen_text(app))
        assert await chat.open_conversation(key)
        await until(lambda: any("1 queued: send" in toast.message for toast in app._notifications))
