"""Stored records as people read them: receipts, clock times, ages, sizes. No widgets."""

from __future__ import annotations

import os
import time
from datetime import datetime
from typing import Any

from dsv41chat.ui.render.entry import ANSWER, NOTICE, USER, Entry
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.turn_events import cut_words

ENDINGS = {
    "cancelled": "stopped by you",
    "stop_string": "stop text",
    "error": "error",
    "interrupted": "interrupted",
}
STATE_ENDINGS = {"stopped": "stopped by you", "interrupted": "interrupted", "error": "error"}


def clock(seconds: float) -> str:
    """Local time of day of an epoch time."""
    return datetime.fromtimestamp(seconds).strftime("%H:%M")


def age(seconds: float, now: float | None = None) -> str:
    """How long ago, in at most a word or two."""
    now = time.time() if now is None else now
    passed = max(0, now - seconds)
    if passed < 60:
        return "now"
    if passed < 3600:
        return f"{int(passed // 60)} min"
    days = (datetime.fromtimestamp(now).date() - datetime.fromtimestamp(seconds).date()).days
    if days == 0:
        return f"{int(passed // 3600)} h"
    if days == 1:
        return "yesterday"
    return f"{days} d" if days < 60 else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d")


def day_group(seconds: float, now: float | None = None) -> str:
    """Today, Yesterday or Older."""
    now = time.time() if now is None else now
    days = (datetime.fromtimestamp(now).date() - datetime.fromtimestamp(seconds).date()).days
    return "Today" if days <= 0 else "Yesterday" if days == 1 else "Older"


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def receipt(message: Any) -> str:
    """The line under an answer, from what was stored with it; empty while it has no numbers."""
    usage, timing, params = message.usage or {}, message.timing or {}, message.params or {}
    parts = []
    thinking, answer = usage.get("thinking_tokens", 0), usage.get("answer_tokens", 0)
    if usage:
        parts.append(f"{thinking:,} thinking + {answer:,} tok" if thinking and message.thinking else f"{answer:,} tok")
    if timing.get("decode_tok_s"):
        parts.append(f"{timing['decode_tok_s']:.1f} tok/s")
    if timing.get("first_token_s"):
        parts.append(f"first {duration(timing['first_token_s'])}")
    if usage:
        resumed = f"resumed {usage['cached_tokens']:,}, " if usage.get("cached_tokens") else ""
        spent = f" ({timing['prefill_s']:.2f} s)" if resumed and timing.get("prefill_s") else ""
        parts.append(f"{resumed}prefilled {usage.get('prefilled_tokens', 0):,}{spent}")
    ending = cut_words(message.finish, usage) or ENDINGS.get(message.finish or "") or STATE_ENDINGS.get(message.state, "")
    if ending:
        parts.append(ending)
    if params.get("temperature") and params.get("seed") is not None:
        parts.append(f"seed {params['seed']}")
    return " · ".join(parts)


def thinking_note(tokens: int, seconds: float | None) -> str:
    if not tokens:
        return ""
    spent = f" · {duration(seconds)}" if seconds else ""
    return f"{tokens:,} tokens{spent}"


def entry_of(message: Any, branch: str = "") -> Entry:
    """A stored message as the transcript shows it."""
    answer = message.role == "assistant"
    label = visible_line(message.build_name or "answer") if answer else "you" if message.role == "user" else message.role
    entry = Entry(message.id, ANSWER if answer else USER, label, clock(message.created), message.text, message.thinking or "")
    update_entry(entry, message, branch)
    return entry


def update_entry(entry: Entry, message: Any, branch: str | None = None) -> None:
    """Takes over what a stored message says beside its text."""
    entry.message = message
    entry.key = message.id
    if branch is not None:
        entry.branch = branch
    if message.role == "assistant":
        entry.clock = clock(message.created)
        entry.receipt = receipt(message)
        usage, timing = message.usage or {}, message.timing or {}
        entry.thinking_note = thinking_note(usage.get("thinking_tokens", 0), timing.get("thinking_s"))


def readonly_reason(holder: int | None, store: Any) -> str:
    """Why nothing can be written in a conversation. holder: the pid of the process that has it open, None for no such process."""
    if holder is not None:
        return f"Open by process {holder} elsewhere: read-only here."
    folder = store.path.parent if store.path is not None else None
    if folder is not None and not os.access(folder, os.W_OK):
        return f"Read-only: the folder {folder} cannot be written by this user. What is there can be read."
    return "Read-only: opened with --readonly. Start without it to write here."


def notice(text: str, key: str = "", error: bool = False) -> Entry:
    """A line of the program's own in the transcript."""
    return Entry(key or f"notice-{time.monotonic_ns()}", NOTICE, text=text, style="error" if error else "notice")
