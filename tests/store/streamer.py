"""Run as a program by test_crash.py: streams an answer into a store until it is killed.

    python -m tests.store.streamer DATA_DIR SEED
Prints `conversation message` once, then a line `number monotonic` for every token, after the store was told of it.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from dsv41chat.store import Store


def word(number: int) -> str:
    return f"word{number} "


def main() -> None:
    rng = random.Random(int(sys.argv[2]))
    store = Store.open(Path(sys.argv[1]), busy_s=30)
    conversation = store.new_conversation()
    store.lock(conversation.id)
    question = store.add_message(conversation.id, None, "user", f"question of {sys.argv[2]}")
    writer = store.begin_answer(conversation.id, question.id, "nano", "f00d", {"seed": int(sys.argv[2])})
    print(conversation.id, writer.id, flush=True)
    text, ids = "", []
    for number in range(1_000_000):
        # Quick tokens, and pauses in which nothing wakes the writer.
        time.sleep(rng.choice([0.0, 0.001, 0.01, 0.03] * 8 + [0.7]))
        text += word(number)
        ids.append(number)
        writer.update(text, "", [], ids)
        print(number, time.monotonic(), flush=True)


if __name__ == "__main__":
    main()
