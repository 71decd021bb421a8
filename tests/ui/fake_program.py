"""The full screen with a scripted engine as a program of its own, for tests at terminal level:

    python -m tests.ui.fake_program DATA_FOLDER ANSWER_FILE DELAY_S [CONVERSATION]

ANSWER_FILE: the answer, or (.json) keyword arguments of Script.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from textual.binding import Binding

from dsv41chat.settings import load_settings
from dsv41chat.store import Store
from dsv41chat.ui import app
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.screens.chat import ChatScreen
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script, fake_host


class FaultyScreen(ChatScreen):
    """F12: a fault in the screen itself."""

    BINDINGS = [Binding("f12", "sabotage", priority=True)]

    def action_sabotage(self) -> None:
        raise RuntimeError("planted fault")


def main(data: str, answer: str, delay_s: str, conversation: str | None = None) -> int:
    settings = load_settings(data_dir=data, environ={key: os.environ[key] for key in ("VISUAL",) if key in os.environ})
    text = Path(answer).read_text("utf-8")
    script = Script(**{"delay_s": float(delay_s), **(json.loads(text) if answer.endswith(".json") else {"answer": text})})
    with Store.open(settings.paths.data) as store:
        host = EngineHost(settings, store, **fake_host(script))
        controller = TurnController(store, host, settings)
        view = controller.open(conversation) if conversation else None
        app.ChatScreen = FaultyScreen
        code = app.run_app(controller, AppStart(view=view, notices=tuple(f"interrupted: {key}" for key in store.recovered)))
        host.close(2.0)
        if controller.last_conversation_id:
            print(f"resume with: dsv41chat --resume {controller.last_conversation_id}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
