"""The picture of the README: `python -m dsv41chat.bench.screenshot`. The full screen, the embedded model, three questions, no retouching."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from dsv41chat.settings import load_settings
from dsv41chat.store import Store
from dsv41chat.ui.app import ChatApp
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.screens.chat import ChatScreen
from dsv41chat.ui.turn import TurnController

PICTURE = Path(__file__).parents[1] / "ui" / "screen.svg"
WIDTH, HEIGHT = 120, 34
QUESTIONS = ("What is photosynthesis?", "What does the command tar do?", "What is 48 * 17?")


async def draw(data: Path) -> tuple[str, list[str]]:
    """(the screen as SVG, the answers), with conversations in the folder `data`."""
    settings = load_settings(data_dir=data, environ={}, flags={"ui.theme": "dark", "engine.model": "nano"})
    with Store.open(settings.paths.data) as store:
        host = EngineHost(settings, store)
        app = ChatApp(TurnController(store, host, settings))
        try:
            async with app.run_test(size=(WIDTH, HEIGHT), notifications=False) as pilot:
                chat = next(screen for screen in app.screen_stack if isinstance(screen, ChatScreen))
                await _until(lambda: host.engine is not None and not chat.switching)
                for number, question in enumerate(QUESTIONS, 1):
                    chat.composer.insert(question)
                    await pilot.press("enter")
                    await _until(lambda number=number: not chat.pump.running and _answers(chat, number))
                await pilot.pause()
                await _until(lambda: chat.status.phase == "idle")
                return app.export_screenshot(title="dsv41chat"), [entry.text for entry in chat.transcript.entries if entry.role == "answer"]
        finally:
            host.close()


def _answers(chat: ChatScreen, count: int) -> bool:
    return sum(entry.role == "answer" and entry.message is not None and bool(entry.receipt) for entry in chat.transcript.entries) >= count


async def _until(condition, seconds: float = 120.0) -> None:
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise TimeoutError("the screen did not get there")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m dsv41chat.bench.screenshot", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=PICTURE, help="default: the picture of the README")
    output = parser.parse_args(argv).output
    with tempfile.TemporaryDirectory() as folder:
        picture, answers = asyncio.run(draw(Path(folder)))
    output.write_text(picture, "utf-8")
    print(f"{output.name}: {len(answers)} answers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
