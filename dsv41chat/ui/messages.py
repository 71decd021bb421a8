"""Messages between the widgets of the full screen. Small, frozen in meaning: what happened, not what to do."""

from __future__ import annotations

from textual import events
from textual.message import Message


class DraftChanged(Message):
    """The composer's text changed; only the last one matters."""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, DraftChanged)


class RemoveQueued(Message):
    """Del was pressed in an empty composer: the last queued message goes."""


class Hint(Message):
    """A line for the user that is not worth a notice that stays."""

    def __init__(self, text: str, severity: str = "information"):
        super().__init__()
        self.text, self.severity = text, severity


class Completions(Message):
    """What Tab could become; empty when it was decided."""

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found


class TypedPaste(events.Paste):
    """A text that came as keys, too fast for a hand. Keys that follow it at once belong to it."""


# For whoever takes pastes it is one.
TypedPaste.handler_name = events.Paste.handler_name
