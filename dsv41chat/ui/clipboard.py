"""Copying: the machine's own clipboard program, else tmux, else the terminal's OSC 52, and always the program's own."""

from __future__ import annotations

import asyncio
import base64
import shutil
from typing import Any

OSC_LIMIT = 74_000
TIMEOUT_S = 2.0


def routes(surroundings: Any) -> list[tuple[str, list[str]]]:
    """(name, command) of the clipboard programs to try, in order. surroundings: which variables of the session are set."""
    found = []
    if not surroundings.ssh:
        found.append(("pbcopy", ["pbcopy"]))
        if surroundings.wayland:
            found.append(("wl-copy", ["wl-copy"]))
        if surroundings.display:
            found += [("xclip", ["xclip", "-selection", "clipboard"]), ("xsel", ["xsel", "-ib"])]
    if surroundings.tmux:
        found.append(("tmux", ["tmux", "load-buffer", "-w", "-"]))
    return [(name, command) for name, command in found if shutil.which(command[0])]


async def copy(text: str, app: Any) -> str:
    """Copies and returns the sentence that says how. app: the running application (its clipboard, driver and folders)."""
    app._clipboard = text
    for name, command in routes(app.surroundings):
        if await _feed(command, text):
            return f"copied ({name})"
    encoded = base64.b64encode(text.encode("utf-8", "replace")).decode()
    if len(encoded) <= OSC_LIMIT and not app.is_headless:
        app.copy_to_clipboard(text)
        if app.surroundings.tmux:
            app.write_terminal(f"\x1bPtmux;\x1b\x1b]52;c;{encoded}\x07\x1b\\")
        return "sent to the terminal (OSC 52, cannot be confirmed)"
    path = await asyncio.to_thread(app.write_copy, text)
    return f"written to {path}"


async def _feed(command: list[str], text: str) -> bool:
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        await asyncio.wait_for(process.communicate(text.encode("utf-8", "replace")), TIMEOUT_S)
    except (OSError, TimeoutError):
        return False
    return process.returncode == 0
