"""The export page: format, scope, what to include, where to; write or copy."""

from __future__ import annotations

import re
import time
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from dsv41chat.store import Store
from dsv41chat.ui.export import export, markdown, message_dict, readable
from dsv41chat.ui.sanitize import json_text, visible_line
from dsv41chat.ui.screens.dialogs import LineScreen, Page

FORMATS = (("md", "markdown"), ("json", "json"), ("jsonl", "jsonl"), ("text", "text"))
SCOPES = (("branch", "this branch"), ("all", "all branches"), ("message", "selected message"))
INCLUDE = (("system", "system prompt"), ("thinking", "thinking"), ("numbers", "build and numbers"))
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
            return json_text(message_dict(path[0]), indent=1) + "\n"
        if request.format == "jsonl":
            return json_text({"conversation": conversation.id, **message_dict(path[0])}) + "\n"
        return _written(request, path)
    every = request.scope == "all"
    if request.format == "json":
        return export([conversation], store, "json", leaf=request.leaf, tree=every)
    if request.format == "jsonl":
        if every:
            return export([conversation], store, "jsonl")
        rows = [{"conversation": conversation.id, **message_dict(one)} for one in store.path_to(request.leaf)]
        return "".join(json_text(row) + "\n" for row in rows)
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


class ExportScreen(Page[ExportRequest | None]):
    """Returns what to export, None when it was closed."""

    BINDINGS = [Binding("escape", "close", "Close", show=False)]

    def __init__(self, conversation: Any, leaf: str | None, message: str | None):
        super().__init__()
        self._request = ExportRequest(conversation, leaf, message, path=Path(file_name(conversation.title, "md")))

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(visible_line(f'Export "{self._request.conversation.title}"'), markup=False, classes="dialog-title")
            yield OptionList(id="list", markup=False, compact=True)
            yield Static("enter chooses   esc closes", classes="dialog-foot")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._show("do:write")

    def _show(self, highlight: str) -> None:
        """One row per choice; the marks say in characters what is chosen."""
        request = self._request
        rows: list[tuple[str, str]] = []
        for name, label in FORMATS:
            rows.append((f"format:{name}", f"{'format' if not rows else '':8} ({'•' if name == request.format else ' '}) {label}"))
        for number, (name, label) in enumerate(scope for scope in SCOPES if scope[0] != "message" or request.message):
            rows.append((f"scope:{name}", f"{'scope' if not number else '':8} ({'•' if name == request.scope else ' '}) {label}"))
        if request.format in ("md", "text"):
            for number, (name, label) in enumerate(INCLUDE if request.format == "md" else INCLUDE[1:2]):
                rows.append((f"include:{name}", f"{'include' if not number else '':8} [{'x' if getattr(request, name) else ' '}] {label}"))
        rows.append(("path:", f"{'to':8} {visible_line(str(request.path))}"))
        rows += [("do:write", f"{'':8} [ write ]"), ("do:copy", f"{'':8} [ copy ]")]
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([Option(text, id=name) for name, text in rows])
        options.highlighted = next((index for index, (name, _) in enumerate(rows) if name == highlight), 0)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        what, _, name = event.option.id.partition(":")
        request = self._request
        if what == "format":
            known = {file_name(request.conversation.title, one) for one, _ in FORMATS}
            path = Path(file_name(request.conversation.title, name)) if str(request.path) in known else request.path
            self._request = replace(request, format=name, path=path)
        elif what == "scope":
            self._request = replace(request, scope=name)
        elif what == "include":
            self._request = replace(request, **{name: not getattr(request, name)})
        elif what == "path":
            self.app.push_screen(LineScreen("File to write (Tab completes)", str(request.path), complete=True), self._named)
            return
        else:
            self.dismiss(replace(request, copy=name == "copy"))
            return
        self._show(event.option.id)

    def _named(self, path: str | None) -> None:
        if path:
            self._request = replace(self._request, path=Path(path).expanduser())
        self._show("do:write")

    def action_close(self) -> None:
        self.dismiss(None)
