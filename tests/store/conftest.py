"""Stores with a clock that stands still until a test moves it."""

from __future__ import annotations

import pytest

from dsv41chat.store import Store


class Clock:
    """Both clocks of a store: seconds that pass when a test says so."""

    def __init__(self, now: float = 1_000_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def open_store(data_dir, clock):
    """Opens stores of one folder; all are closed at the end. background=False: nothing happens but what the test does."""
    stores = []

    def open_(**options):
        store = Store.open(data_dir, **{"clock": clock, "monotonic": clock, "background": False, "busy_s": 0.3, **options})
        stores.append(store)
        return store

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store) -> Store:
    return open_store()


@pytest.fixture
def chain():
    """Adds texts below each other, user and assistant in turns; returns the messages."""

    def add(store, conversation_id, *texts, parent=None):
        messages = []
        for number, text in enumerate(texts):
            messages.append(store.add_message(conversation_id, parent, "assistant" if number % 2 else "user", text))
            parent = messages[-1].id
        return messages

    return add
