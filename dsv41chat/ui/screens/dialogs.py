"""Small dialogs: a question with choices, one line of input, a text to read."""

from __future__ import annotations

import os
from collections.abc import Callable

from textual import events
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, ScreenResultType
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from dsv41chat.ui.commands import complete_path
from dsv41chat.ui.sanitize import visible, visible_line
from dsv41chat.ui.widgets.field import Field


class Page(ModalScreen[ScreenResultType]):
    """What opens over the chat. It closes once: keys that come faster than it goes would close what lies below, or nothing at all."""

    _dismissed = False

    def on_mount(self) -> None:
        """Notices about what was done before would cover the page; errors stay. Textual calls it beside that of a subclass."""
        for toast in [one for one in self.app._notifications if one.severity != "error"]:
            self.app._unnotify(toast)

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        if self._dismissed:
            return AwaitComplete.nothing()
        self._dismissed = True
        return super().dismiss(result)


class AskScreen(Page[str | None]):
    """A question with named choices; a digit chooses by number. Returns the chosen name, None when it was closed."""

    BINDINGS = [Binding("escape", "dismiss_none", "Close", show=False)]

    def __init__(self, question: str, choices: list[tuple[str, str]]):
        super().__init__()
        self._question, self._choices = question, choices

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(visible(self._question), markup=False, classes="dialog-title")
            yield OptionList(*(Option(visible_line(label), id=name) for name, label in self._choices), markup=False)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)

    def on_key(self, event: events.Key) -> None:
        """A digit is the choice of that number."""
        if event.key.isdecimal() and 1 <= int(event.key) <= len(self._choices):
            event.stop()
            self.dismiss(self._choices[int(event.key) - 1][0])

    def action_dismiss_none(self) -> None:
        self.dismiss(None)


class LineScreen(Page[str | None]):
    """One line of input. Returns the text, None when it was closed. complete: Tab completes paths.

    check: what is wrong with a text, in a sentence, or nothing; with a wrong one the dialog says so and stays.
    """

    BINDINGS = [Binding("escape", "dismiss_none", "Close", show=False), Binding("tab", "complete", "Complete", show=False, priority=True)]

    def __init__(self, title: str, value: str = "", complete: bool = False, check: Callable[[str], str] = lambda text: ""):
        super().__init__()
        self._title, self._value, self._complete, self._check = title, value, complete, check

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(visible_line(self._title), markup=False, classes="dialog-title")
            yield Field(self._value)
            yield Static("", markup=False, id="completions")
            yield Static("", markup=False, id="wrong")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        wrong = self._check(event.value)
        self._say_wrong(wrong)
        if not wrong:
            self.dismiss(event.value)

    def on_input_changed(self) -> None:
        self._say_wrong("")

    def _say_wrong(self, text: str) -> None:
        line = self.query_one("#wrong", Static)
        line.update(visible_line(text))
        line.display = bool(text)

    def action_complete(self) -> None:
        if self._complete:
            entry = self.query_one(Input)
            found = complete_path(entry.value)
            if found:
                entry.value = os.path.commonprefix(found)
                entry.cursor_position = len(entry.value)
            self.query_one("#completions", Static).update(visible("\n".join(found[:8])) if len(found) > 1 else "")

    def action_dismiss_none(self) -> None:
        self.dismiss(None)


class TextScreen(Page[None]):
    """A text to read; the arrow keys scroll."""

    BINDINGS = [Binding("escape,q", "close", "Close", show=False)]

    def __init__(self, title: str, text: str):
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog dialog-wide"):
            yield Static(visible_line(self._title), markup=False, classes="dialog-title")
            with VerticalScroll():
                yield Static(visible(self._text), markup=False)
            yield Static("esc closes", classes="dialog-foot")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def action_close(self) -> None:
        self.dismiss(None)
