"""Ends and edges of the full screen that somebody met in use."""

from __future__ import annotations

import asyncio

import pytest

from tests.ui.fakes import Script
from tests.ui.tui import chat_of, make_app, until


@pytest.mark.parametrize("enter", [False, True])
async def test_quitting_while_a_build_loads_is_quiet_and_keeps_the_text(tmp_path, enter):
    app = make_app(tmp_path, Script(load_s=1.0))
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: chat.switching)
        await pilot.press(*"words", *(["enter"] if enter else []))
        await pilot.press("ctrl+q")
    # The load goes on reporting for a while.
    await asyncio.sleep(1.2)
    assert app.return_code == 0 and not complaints
    assert app.store.draft(None).text == "words"
