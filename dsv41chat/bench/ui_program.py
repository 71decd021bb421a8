"""The full screen as `bench ui` runs it in a terminal of its own: it measures itself and writes what it found to a file.

    python -m dsv41chat.bench.ui_program DATA CONVERSATION TEXT_FILE RATE SECONDS OUT
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from dsv41chat.bench.scripted import scripted_host
from dsv41chat.settings import load_settings
from dsv41chat.store import Store
from dsv41chat.ui import app as app_module
from dsv41chat.ui.host import EngineHost
from dsv41chat.ui.render.entry import ANSWER, Entry, Renderer
from dsv41chat.ui.render.wrap import copy_lines
from dsv41chat.ui.screens.chat import ChatScreen
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import AppStart, TurnRequest

LAG_STEP_S = 0.002
IDLE_S = 3.0
SETTLE_S = 10.0  # opening is over and the caret rests
LOAD_S = 60.0


class MeasuredScreen(ChatScreen):
    """Runs the whole measurement by itself; keys come from the terminal."""

    seconds = 10.0
    conversation_ref = ""
    text = ""
    out = Path()

    def __init__(self) -> None:
        super().__init__()
        self.found: dict = {"resize_s": [], "lag_s": [], "flush_s": []}

    def on_mount(self) -> None:
        super().on_mount()
        self.call_after_refresh(lambda: self.found.setdefault("first_frame_at", time.monotonic()))
        self.spawn(self._measure(), "measure")

    def on_resize(self, event) -> None:
        began = time.monotonic()
        super().on_resize(event)
        self.call_after_refresh(lambda: self.found["resize_s"].append(time.monotonic() - began))

    async def _measure(self) -> None:
        deadline = time.monotonic() + LOAD_S
        while self.switching or self.app.host.engine is None:
            if time.monotonic() > deadline:
                self.app.leave(1)
                return
            await asyncio.sleep(0.05)
        began = time.monotonic()
        await self.open_conversation(self.conversation_ref)
        await self._drawn()
        self.found["open_s"] = time.monotonic() - began
        await asyncio.sleep(min(SETTLE_S, self.seconds))
        cpu, began = time.process_time(), time.monotonic()
        await asyncio.sleep(IDLE_S)
        self.found["idle_cpu"] = (time.process_time() - cpu) / (time.monotonic() - began)
        await self._stream()
        self.out.write_text(json.dumps(self.found))
        self.app.leave()

    async def _drawn(self) -> None:
        drawn = asyncio.Event()
        self.call_after_refresh(drawn.set)
        await drawn.wait()

    async def _stream(self) -> None:
        deliver = self.pump._deliver

        def timed(batch) -> None:
            began = time.perf_counter()
            deliver(batch)
            self.found["flush_s"].append(time.perf_counter() - began)

        self.pump._deliver = timed
        cpu, own, began = time.process_time(), time.thread_time(), time.monotonic()
        self.start(TurnRequest(self.conversation.id, text="go", parent_id=self.leaf_id), "go")
        entry = self._answer
        while self.pump.running and time.monotonic() - began < 4 * self.seconds + 30:
            step = time.perf_counter()
            await asyncio.sleep(LAG_STEP_S)
            self.found["lag_s"].append(time.perf_counter() - step - LAG_STEP_S)
        spent = time.monotonic() - began
        self.found["stream_cpu"] = (time.process_time() - cpu) / spent
        # The target is the UI thread's; the scripted engine and the store are other threads of this process.
        self.found["ui_thread_cpu"] = (time.thread_time() - own) / spent
        self.found["stream_s"] = spent
        await self._drawn()
        self.found["failure"] = self._failure.message if self._failure is not None else None
        self.found["sent_equals_kept"] = entry.text == self.text
        self.found["drawn_equals_whole"] = self._drawing(entry) == self._drawing(Entry("whole", ANSWER, text=self.text))

    def _drawing(self, entry: Entry) -> str:
        """All lines of the body of an entry, unwrapped."""
        view = self.transcript
        renderer = Renderer(view._get_renderer().options)
        parts = [part for part in entry.parts(True) if part.kind == "body"]
        return "\n".join(copy_lines((line.joint, line.text) for line in renderer.lines(part)) for part in parts)


def main(data: str, conversation: str, text_file: str, rate: str, seconds: str, out: str) -> int:
    text = Path(text_file).read_text("utf-8")
    MeasuredScreen.conversation_ref, MeasuredScreen.text = conversation, text
    MeasuredScreen.seconds, MeasuredScreen.out = float(seconds), Path(out)
    app_module.ChatScreen = MeasuredScreen
    settings = load_settings(data_dir=data, environ={})
    with Store.open(settings.paths.data) as store:
        host = EngineHost(settings, store, **scripted_host(text, float(rate)))
        code = app_module.run_app(TurnController(store, host, settings), AppStart(theme="dark"))
        host.close(2.0)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
