"""The search line above the composer."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Input, Static

from dsv41chat.ui.widgets.field import Field


class FindBar(Horizontal):
    """Posts Query while typing, Step for Enter and shift+Enter, Closed for Esc."""

    BINDINGS = [
        Binding("enter,down", "step(1)", "Next", show=False),
        Binding("shift+enter,up", "step(-1)", "Previous", show=False),
    ]

    class Query(Message):
        def __init__(self, text: str):
            super().__init__()
            self.text = text

    class Step(Message):
        def __init__(self, direction: int):
            super().__init__()
            self.direction = direction

    def compose(self) -> ComposeResult:
        yield Static("find ", classes="find-label")
        yield Field(compact=True, placeholder="text in this conversation", id="find-input")
        yield Static("", id="find-count")

    def open(self) -> None:
        self.display = True
        self.query_one(Input).focus()

    def show_count(self, text: str) -> None:
        self.query_one("#find-count", Static).update(text)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Query(event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Step(1))

    def action_step(self, direction: int) -> None:
        self.post_message(self.Step(direction))
