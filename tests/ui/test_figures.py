"""Every figure that is shown is the engine's: one resumed turn on the screen and in a script, against the trunk's own row counter."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from dsv41chat.settings import load_settings
from dsv41chat.store import Store
from dsv41chat.ui.app import ChatApp
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import AppStart
from tests.ui.chats import Chat
from tests.ui.tui import chat_of, drawn, say, shows, until

pytestmark = pytest.mark.usefixtures("shared_weights")
FIRST = "Sinkhorn iterations normalise the rows and the columns of a matrix by turns until both sums are one. " * 2
SECOND = "How often, and why?"


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("draft", ["off", "auto"])
async def test_a_resumed_turn_is_told_alike_everywhere(tmp_path, program, draft):
    with Chat(tmp_path / "kept") as chat:
        chat.say(FIRST)
        chat.say("Go on.")
        key = chat.id
    shutil.copytree(tmp_path / "kept", program.data)
    flags = {"chat.temperature": 0.0, "chat.max_tokens": 12, "engine.draft": draft}
    settings = load_settings(data_dir=tmp_path / "kept", environ={}, flags=flags, turn={"effort": "off"})
    with Store.open(settings.paths.data, background=False) as store:
        host = EngineHost(settings, store)
        controller = TurnController(store, host, settings)
        app = ChatApp(controller, AppStart(view=controller.open(key)))
        async with app.run_test(size=(140, 40)) as pilot:
            chat = chat_of(app)
            await until(lambda: host.engine is not None and not chat.switching)
            await until(lambda: host._sessions.get(key) is not None)
            before = host._sessions[key].rows_run
            await say(pilot, app, SECOND)
            done, rows = chat._finish, host._sessions[key].rows_run - before
            await shows(app, "prefilled")
            shown = await drawn(app)
            message = store.message(chat.leaf_id)
        host.close(60)
    usage = done.usage
    status = re.search(r"ctx ([\d,]+)/([\d,]+) .* cached ([\d,]+) \+([\d,]+)", shown)
    receipt = re.search(r"([\d,]+) tok · .* · resumed ([\d,]+), prefilled ([\d,]+)", shown.rpartition(SECOND)[2])
    assert status and receipt, shown
    # The status line, the receipt, the stored message and the event of the turn.
    account = ("cached_tokens", "prefilled_tokens")
    assert [number(one) for one in status.groups()] == [usage[name] for name in ("context_used", "context_limit", *account)]
    assert [number(one) for one in receipt.groups()] == [usage[name] for name in ("answer_tokens", *account)]
    assert message.usage == usage and message.ids_hash == done.ids_hash
    # The trunk: a row for every prompt id that was read and for every id that was tried in a round; the first round has the prompt's last row.
    assert usage["cached_tokens"] > 0 and rows == usage["prefilled_tokens"] + done.draft["rounds"] - 1 + done.draft["proposed"]
    assert usage["prompt_tokens"] == usage["cached_tokens"] + usage["prefilled_tokens"] and usage["completion_tokens"] == len(done.ids)
    assert usage["context_used"] == usage["prompt_tokens"] + usage["completion_tokens"]
    # The same turn in a script, on a copy of the same data.
    words = ["--resume", key, "--temperature", "0", "--max-tokens", "12", "--effort", "off", "--draft", draft, SECOND]
    scripted = program("--json", *words, real=True).object
    assert scripted["usage"] == usage and scripted["ids_hash"] == done.ids_hash
    stored = json.loads(program("conversations", "export", key, "--format", "json").out)["messages"][-1]
    assert stored["usage"] == usage
