"""A device that runs out of memory or stops answering: the text is kept, the next turn works or says what to do."""

from __future__ import annotations

import pytest

from dsv41chat.engine.errors import DeviceLost, DoesNotFit, OutOfMemory, device_failure
from tests.ui.fakes import Script
from tests.ui.tui import chat_of, ended, make_app, say, shows

METAL_MEMORY = "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
METAL_TIMEOUT = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(METAL_MEMORY), OutOfMemory), (RuntimeError(METAL_TIMEOUT), DeviceLost), (MemoryError(), OutOfMemory),
        (RuntimeError("[malloc_or_wait] Unable to allocate 9000000000 bytes."), OutOfMemory),
        (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), OutOfMemory),
        (RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"), OutOfMemory),
        (RuntimeError("cudaGraphLaunch failed: an illegal memory access was encountered"), DeviceLost),
        (RuntimeError("[reshape] Cannot reshape array of size 3"), None), (ValueError("out of memory"), None), (DoesNotFit("out of memory"), None),
    ],
)  # fmt: skip
def test_what_the_device_says(error, kind):
    failure = device_failure(error)
    assert (failure is None) if kind is None else (type(failure) is kind and bool(failure.hint) and "\n" not in str(failure))


def test_out_of_memory_keeps_the_text_and_begins_a_new_lane(program):
    script = Script("a long answer", error=RuntimeError(METAL_MEMORY), error_at=6)
    failed = program("--json", "--effort", "off", "hi", script=script)
    error = failed.object
    assert (failed.code, error["code"], error["partial"]["text"]) == (5, "out_of_memory", "a long") and "Traceback" not in failed.err
    assert program("--json", "-c", "more", script=Script("fine")).object["text"] == "fine"
    # In one process: the lane that broke is not used again.
    script.error_at = 3
    result = program("--json", "--effort", "off", "-p", "one", script=script)
    assert result.code == 5 and program.hosts[-1]._sessions == {}


def test_a_lost_device_answers_nothing_more(program):
    script = Script("a long answer", error=RuntimeError(METAL_TIMEOUT), error_at=6)
    failed = program("--json", "--effort", "off", "hi", script=script)
    assert (failed.code, failed.object["code"], failed.object["partial"]["text"]) == (1, "device_lost", "a long")
    assert "Restart needed: the GPU stopped answering" in failed.object["message"]


async def test_on_the_screen(tmp_path):
    script = Script("a long answer", error=RuntimeError(METAL_TIMEOUT), error_at=5)
    app = make_app(tmp_path, script, config='[chat]\neffort = "off"\n')
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        await shows(app, "Restart needed: the GPU stopped answering", "a lon")
        assert app.store.message(chat.leaf_id).text == "a lon"
        # The next one is refused before anything is computed, and kept.
        calls = [len(session.calls) for session in script.sessions]
        script.error = None
        await say(pilot, app, "again")
        await ended(chat)
        assert chat._failure.code == "device_lost" and [len(session.calls) for session in script.sessions] == calls
        assert [m.text for m in app.store.tree(chat.conversation.id) if m.role == "user"] == ["hello", "again"]


def test_loading_that_runs_out_of_memory(program):
    result = program("--json", "hi", script=Script(load_error=RuntimeError(METAL_MEMORY)))
    assert (result.code, result.object["code"]) == (5, "out_of_memory")
