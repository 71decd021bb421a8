"""The export page: format, scope, what to include, where to; write or copy."""

from __future__ import annotations

import json
import re
import time
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Checkbox, Input, RadioButton, RadioSet, Static

from dsv41chat.store import Store
from dsv41chat.ui.export import export, markdown, message_dict, readable
from dsv41chat.ui.sanitize import visible_line

FORMATS = (("md", "markdown"), ("json", "json"), ("jsonl", "jsonl"), ("text", "text"))
SCOPES = (("branch", "this branch"), ("all", "all branches"), ("message", "selected message"))
ENDINGS = {"md": ".md", "json": ".json", "jsonl": ".jsonl", "text": ".txt"}


@dataclass(frozen=True)
class ExportRequest:
    """leaf: end of the branch on screen; message: the selected message, if any. copy: to the clipboard instead of `path`."""

    conversation: Any
    leaf: str | None
    message: str | None
    format: str = "md"
    scope: str = "branch"
    system: bool = True
    thinking: bool = False
    numbers: bool = True
    path: Path = Path()
    copy: bool = False


def compose_export(store: Store, request: ExportRequest) -> str:
    """The text that a request asks for. Raises StoreError."""
    conversation, message = request.conversation, request.message
    if request.scope == "message" and message is not None:
        path = [store.message(message)]
        if request.format == "json":
            return json.dumps(message_dict(path[0]), ensure_ascii=False, indent=1) + "\n"
        if request.format == "jsonl":
            return json.dumps({"conversation": conversation.id, **message_dict(path[0])}, ensure_ascii=False) + "\n"
        return _written(request, path)
    every = request.scope == "all"
    if request.format == "json":
        return export([conversation], store, "json", leaf=request.leaf, tree=every)
    if request.format == "jsonl":
        if every:
            return export([conversation], store, "jsonl")
        rows = [{"conversation": conversation.id, **message_dict(one)} for one in store.path_to(request.leaf)]
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if not every:
        return _written(request, store.path_to(request.leaf))
    tree = store.tree(conversation.id)
    parents = {one.parent_id for one in tree}
    leaves = [one for one in tree if one.id not in parents]
    parts = []
    for number, leaf in enumerate(leaves, 1):
        head = f"<!-- branch {number} of {len(leaves)} -->" if request.format == "md" else f"=== branch {number} of {len(leaves)} ==="
        parts.append(head + "\n\n" + _written(request, store.path_to(leaf.id)))
    return "\n".join(parts)


def _written(request: ExportRequest, path: list[Any]) -> str:
    if request.format == "md":
        return markdown(request.conversation, path, thinking=request.thinking, system=request.system, numbers=request.numbers)
    return readable(request.conversation, path, thinking=request.thinking)


def file_name(title: str, format: str, day: float | None = None) -> str:
    """A name made of the title and the day: engram-questions-2026-01-31.md."""
    plain = unicodedata.normalize("NFKC", title).casefold()
    slug = re.sub(r"[^\w]+", "-", plain).strip("-_")[:60].rstrip("-") or "conversation"
    return f"{slug}-{time.strftime('%Y-%m-%d', time.localtime(day))}{ENDINGS[format]}"


def free_path(path: Path) -> Path:
    """`path`, or with a number before its ending when it exists already."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


class ExportScreen(ModalScreen[ExportRequest | None]):
    """Returns what to export, None when it was closed."""

    BINDINGS = [Binding("escape", "close", "Close", show=False)]

    def __init__(self, conversation: Any, leaf: str | None, message: str | None):
        super().__init__()
        self._conversation, self._leaf, self._message = conversation, leaf, message
        self._named = False

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog dialog-full", id="export"):
            yield Static(visible_line(f'Export "{self._conversation.title}"'), markup=False, classes="dialog-title")
            with Horizontal(id="export-options"):
                yield RadioSet(*(RadioButton(label, value=name == "md", id=f"format-{name}") for name, label in FORMATS), id="format", compact=True)
                scopes = [scope for scope in SCOPES if scope[0] != "message" or self._message]
                yield RadioSet(*(RadioButton(label, value=name == "branch", id=f"scope-{name}") for name, label in scopes), id="scope", compact=True)
                with Vertical(id="include"):
                    yield Checkbox("system prompt", True, id="system", compact=True)
                    yield Checkbox("thinking", False, id="thinking", compact=True)
                    yield Checkbox("build and numbers", True, id="numbers", compact=True)
            yield Input(file_name(self._conversation.title, "md"), id="export-path", compact=True)
            with Horizontal(classes="dialog-buttons"):
                yield Button("write", id="write", compact=True)
                yield Button("copy", id="copy", compact=True)
            yield Static("tab moves   space chooses   enter on write or copy   esc closes", classes="dialog-foot")

    def _format(self) -> str:
        button = self.query_one("#format", RadioSet).pressed_button
        return button.id.removeprefix("format-") if button is not None else "md"

    def on_radio_set_changed(self, event: RadioSet.Changed) -> None:
        path = self.query_one("#export-path", Input)
        known = {file_name(self._conversation.title, name) for name, _ in FORMATS}
        if event.radio_set.id == "format" and path.value in known:
            path.value = file_name(self._conversation.title, self._format())

    def on_input_submitted(self) -> None:
        self._done(copy=False)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self._done(copy=event.button.id == "copy")

    def _done(self, copy: bool) -> None:
        scope = self.query_one("#scope", RadioSet).pressed_button
        self.dismiss(
            ExportRequest(
                self._conversation, self._leaf, self._message, self._format(), scope.id.removeprefix("scope-") if scope is not None else "branch",
                self.query_one("#system", Checkbox).value, self.query_one("#thinking", Checkbox).value,
                self.query_one("#numbers", Checkbox).value, Path(self.query_one("#export-path", Input).value).expanduser(), copy,
            )  # fmt: skip
        )

    def action_close(self) -> None:
        self.dismiss(None)
