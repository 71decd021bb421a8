"""`dsv41chat bench ui`: the full screen on a real terminal with a long conversation, while text streams in and keys are typed.

A child runs the application in a pseudo terminal; this process types a key every 90 ms, resizes the terminal once and reads
what is drawn. Times of both processes come from the same clock. The engine is scripted: only the front end is measured.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

from dsv41chat.bench.receipt import OUTPUT_HELP, environment, write_receipt
from dsv41chat.store import Store

WIDTH, HEIGHT = 120, 40
KEY_S = 0.090
SEARCH_WORDS = 120
# Each key is a letter that stands nowhere else on the screen, so its arrival there can be seen in the terminal's own bytes.
ALPHABETS = ((0x3B1, 0x3C9), (0x430, 0x44F), (0x410, 0x42F), (0x561, 0x586), (0x10D0, 0x10F0))
LETTERS = [chr(code) for first, last in ALPHABETS for code in range(first, last)]
PROSE = "Some words of ordinary prose with **bold** and `code` here and there, then a comma. " * 4 + "\n\n"
CONTENTS = {
    "prose": PROSE,
    "code": "```python\n" + "def double(x):\n    return x * 2  # a comment\n\n" * 60 + "```\n\n",
    "list": "".join(f"{n}. item number {n} with some words\n" for n in range(1, 301)) + "\n",
    "table": "| name | square | words |\n|---|--:|---|\n" + "".join(f"| row {n} | {n * n} | some words |\n" for n in range(200)) + "\n",
    "cjk": "日本語のテキストは長いので折り返しが必要です。絵文字 😀 と 👩‍👩‍👧 も。" * 5 + "\n\n",
}
TARGETS = {
    "first_frame_s": 0.5, "open_s": 1.0, "resize_s": 0.3, "idle_cpu": 0.01, "key_p99_ms": 50.0, "ui_thread_cpu": 0.2, "search_ms": 300.0,
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--messages", type=int, default=10_000, help="messages already in the conversation")
    parser.add_argument("--search-messages", type=int, default=100_000, help="messages to search in; 0 leaves it out")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of each stream")
    parser.add_argument("--rate", type=float, default=100.0, help="tokens per second")
    parser.add_argument("--contents", nargs="+", choices=CONTENTS, default=list(CONTENTS))
    parser.add_argument("-o", "--output", type=Path, help=OUTPUT_HELP)


def fill(store: Store, messages: int) -> str:
    """A conversation with `messages` short messages; returns its id."""
    conversation = store.new_conversation("Measured")
    parent = None
    with store.db.write():
        for number in range(messages):
            text = f"message {number}: " + "words and more words " * 12
            parent = store.add_message(conversation.id, parent, "assistant" if number % 2 else "user", text).id
    return conversation.id


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p95, p99, max in milliseconds."""
    ordered = sorted(values)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return {name: round(1000 * at(share), 2) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))} if ordered else {}


def run_content(folder: Path, conversation: str, name: str, rate: float, seconds: float) -> dict[str, Any]:
    """One stream of one kind of text in a fresh process."""
    whole = CONTENTS[name]
    wanted = int(rate * seconds) * 4
    text = (whole * (wanted // len(whole) + 1))[:wanted]
    source, out = folder / "text.md", folder / f"{name}.json"
    source.write_text(text, "utf-8")
    arguments = [str(folder / "data"), conversation, str(source), str(rate), str(seconds), str(out)]
    command = [sys.executable, "-m", "dsv41chat.bench.ui_program", *arguments]
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    began = time.monotonic()
    environ = {**os.environ, "TERM": "xterm-256color"}
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True)
    os.close(slave)
    keys = _type_and_read(master, child, out, began + 4 * seconds + 120)
    os.close(master)
    if not out.exists():
        raise RuntimeError(f"the {name} run ended with {child.returncode} and no measurement")
    found = json.loads(out.read_text())
    if found["failure"]:
        raise RuntimeError(f"the {name} run failed: {found['failure']}")
    ideal = len(text) / 4 / rate
    return {
        "first_frame_s": round(found["first_frame_at"] - began, 3), "open_s": round(found["open_s"], 3),
        "resize_s": round(max(found["resize_s"][1:], default=0.0), 3), "idle_cpu": round(found["idle_cpu"], 4),
        "stream_cpu": round(found["stream_cpu"], 3), "ui_thread_cpu": round(found["ui_thread_cpu"], 3),
        "behind_s": round(found["stream_s"] - ideal, 2), "keys": len(keys),
        "key_ms": percentiles(keys), "lag_ms": percentiles(found["lag_s"]), "flush_ms": percentiles(found["flush_s"]),
        "flush_mean_ms": round(1000 * statistics.mean(found["flush_s"]), 2), "sent_equals_kept": found["sent_equals_kept"],
        "drawn_equals_whole": found["drawn_equals_whole"],
    }  # fmt: skip


def _type_and_read(master: int, child: subprocess.Popen, out: Path, deadline: float) -> list[float]:
    """Drains the terminal, types from the moment that text streams, resizes once. Returns seconds from key to screen, per key."""
    waiting: dict[bytes, float] = {}
    found: list[float] = []
    letters = iter(LETTERS)
    seen = b""
    typed = 0
    streaming = resized = False
    following = 0.0
    while child.poll() is None:
        now = time.monotonic()
        if now > deadline:
            child.kill()
            break
        if select.select([master], [], [], 0.01)[0]:
            try:
                data = os.read(master, 1 << 16)
            except OSError:
                break
            seen = seen[-8:] + data
            for letter in [letter for letter in waiting if letter in seen]:
                found.append(time.monotonic() - waiting.pop(letter))
        streaming = streaming or b"gen " in seen
        if streaming and now >= following and not out.exists() and (letter := next(letters, None)) is not None:
            waiting[letter.encode()] = time.monotonic()
            os.write(master, letter.encode())
            typed += 1
            following = now + KEY_S
            if typed == 40 and not resized:
                resized = True
                fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT - 6, WIDTH - 20, 0, 0))
    child.wait(30)
    return found


def search_times(folder: Path, messages: int) -> dict[str, Any]:
    """Milliseconds to the first page of results in a store of `messages` messages."""
    ends = ("lan", "der", "tom", "fin", "gor", "pel")
    words = [first + end for first in ("ba", "ko", "lu", "mi", "te", "sa", "no", "ri") for end in ends]
    with Store.open(folder / "search") as store:
        conversation = store.new_conversation("Searched")
        for start in range(0, messages, 5000):
            with store.db.write():
                for number in range(start, min(messages, start + 5000)):
                    text = " ".join(words[(number * 7 + step * 13) % len(words)] for step in range(SEARCH_WORDS - 1)) + f" word{number % 997}"
                    store.add_message(conversation.id, None, "user", text)
        times = {}
        for name, query in (("rare word", "word77 "), ("two words", "balan word5 "), ("prefix", "word9"), ("common word", "balan ")):
            runs = []
            for _ in range(5):
                began = time.perf_counter()
                hits = store.search(query).hits
                runs.append(time.perf_counter() - began)
            times[name] = {"ms": round(1000 * statistics.median(runs), 1), "hits": len(hits)}
    return times


def run(messages: int, search_messages: int, seconds: float, rate: float, contents: list[str], output: Path) -> int:
    """Measures, prints a table, writes the receipt. Returns 0; a drawn text that differs from the sent one is 1."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dsv41chat-bench-") as name:
        folder = Path(name)
        with Store.open(folder / "data") as store:
            conversation = fill(store, messages)
        print(f"{'content':8} {'open s':>7} {'key p50':>8} {'p99 ms':>7} {'lag p99':>8} {'max ms':>7} {'flush':>6} {'cpu':>5} {'behind s':>8}  text")
        for content in contents:
            row = rows[content] = run_content(folder, conversation, content, rate, seconds)
            same = row["sent_equals_kept"] and row["drawn_equals_whole"]
            key, lag = row["key_ms"], row["lag_ms"]
            print(
                f"{content:8} {row['open_s']:7.2f} {key.get('p50', 0):8.1f} {key.get('p99', 0):7.1f} {lag['p99']:8.1f} {lag['max']:7.0f} "
                f"{row['flush_mean_ms']:6.1f} {row['ui_thread_cpu']:5.2f} {row['behind_s']:8.2f}  {'equal' if same else 'DIFFERS'}"
            )
        searched = search_times(folder, search_messages) if search_messages else {}
        for query, found in searched.items():
            print(f"search, {query}: {found['ms']} ms, {found['hits']} results")
    good = all(row["sent_equals_kept"] and row["drawn_equals_whole"] for row in rows.values())
    payload = {
        "what": "ui", **environment(("textual", "rich", "markdown-it-py", "sqlite-utils")), "load_average": os.getloadavg()[0],
        "terminal": [WIDTH, HEIGHT], "messages": messages, "seconds": seconds, "rate": rate, "targets": TARGETS, "contents": rows,
        "search_messages": search_messages, "search": searched, "text_equal": good,
    }  # fmt: skip
    print(write_receipt(output, "ui", payload))
    return 0 if good else 1


def run_options(args: argparse.Namespace) -> int:
    return run(args.messages, args.search_messages, args.seconds, args.rate, args.contents, args.output)
