"""Conversations as text, Markdown and JSON. Reads the store only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dsv41chat import __version__
from dsv41chat.store.errors import StoreError
from dsv41chat.store.records import hash_ids
from dsv41chat.ui.sanitize import json_text
from dsv41chat.ui.turn_events import cut_words

if TYPE_CHECKING:
    from dsv41chat.store import Conversation, Message, Store

FORMATS = ("md", "json", "jsonl", "text")
SCHEMA = 1


def export(
    conversations: Sequence[Conversation],
    store: Store,
    format: str,
    *,
    leaf: str | None = None,
    tree: bool = True,
    many: bool = False,
    parsed: bool = False,
    unread: Callable[[Conversation, StoreError], None] | None = None,
) -> Any:
    """The text of `conversations` in one of FORMATS.

    json: the whole tree of each with ids, parents, parameters and receipts; one object, with `many` an array. jsonl: one message
    a line. md and text: the branch that ends in `leaf` (default: `Store.shown_leaf`). tree False: only that branch in json too.
    parsed: the JSON value instead of its text. unread: told of each conversation that cannot be read, which is then left out; without
    it the first StoreError is raised.
    """

    def each(write: Callable[[Conversation], Any]) -> Iterator[Any]:
        for conversation in conversations:
            try:
                yield write(conversation)
            except StoreError as error:
                if unread is None:
                    raise
                unread(conversation, error)

    end = lambda c: leaf or store.shown_leaf(c.id)
    if format == "json":
        values = list(each(lambda c: _as_dict(c, end(c), store.tree(c.id) if tree else store.path_to(end(c)))))
        value = values if many else values[0]
        return value if parsed else json_text(value, indent=1) + "\n"
    if format == "jsonl":
        rows = lambda c: [{"conversation": c.id, **message_dict(m)} for m in store.tree(c.id)]
        return "".join(json_text(row) + "\n" for found in each(rows) for row in found)
    write = markdown if format == "md" else readable
    return "\n".join(each(lambda c: write(c, store.path_to(end(c)))))


def _as_dict(conversation: Conversation, leaf: str | None, messages: Sequence[Message]) -> dict[str, Any]:
    c = conversation
    return {
        "v": SCHEMA, "type": "conversation", "version": __version__, "id": c.id, "title": c.title, "created": c.created, "updated": c.updated,
        "leaf": leaf, "pinned": c.pinned, "settings": c.settings, "messages": [message_dict(m) for m in messages],
    }  # fmt: skip


def message_dict(m: Message) -> dict[str, Any]:
    """One message with everything that is stored about it, without an answer's ids where they have not their hash. created: epoch seconds, UTC."""
    ids = m.ids if m.role != "assistant" or m.ids is None or m.ids_hash in (None, hash_ids(m.ids)) else None
    return {
        "id": m.id, "parent": m.parent_id, "role": m.role, "text": m.text, "thinking": m.thinking, "state": m.state, "finish": m.finish,
        "build": {"name": m.build_name, "fingerprint": m.build_fingerprint} if m.build_name else None, "params": m.params, "usage": m.usage,
        "timing": m.timing, "meta": m.meta, "ids_hash": m.ids_hash, "ids": ids, "reasoning_ids": m.reasoning_ids, "body_ids": m.body_ids,
        "created": m.created, "updated": m.updated,
    }  # fmt: skip


def mark(m: Message) -> str:
    """How an answer ended, in words, when it is not complete; "" otherwise."""
    if m.state in ("running", "interrupted", "stopped", "error"):
        return m.state
    return cut_words(m.finish, m.usage)


def markdown(conversation: Conversation, path: Sequence[Message], *, thinking: bool = False, system: bool = True, numbers: bool = True) -> str:
    """One branch as Markdown. The options are the check boxes of the export page."""
    lines = [f"# {conversation.title or conversation.id}", ""]
    if system and conversation.settings.get("system"):
        lines += ["## System", "", conversation.settings["system"], ""]
    for m in path:
        name = "You" if m.role == "user" else m.build_name or m.role.title()
        ended = mark(m)
        lines += [f"## {name}" + (f" ({ended})" if ended else ""), ""]
        if thinking and m.thinking:
            lines += [*(f"> {line}".rstrip() for line in m.thinking.splitlines()), ""]
        lines += [m.text, ""]
        if numbers and m.role == "assistant":
            lines += [f"*{_numbers(m)}*", ""]
    return "\n".join(lines)


def readable(conversation: Conversation, path: Sequence[Message], *, thinking: bool = False) -> str:
    """One branch as plain text: a header line and the text of each message."""
    lines = [f"{conversation.title or '(no title)'}  [{conversation.id}]", ""]
    if conversation.settings.get("system"):
        lines += ["system", conversation.settings["system"], ""]
    for m in path:
        name = "you" if m.role == "user" else m.build_name or m.role
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(m.created))
        ended = mark(m)
        lines.append(f"{name}  {when}  [{m.id}]" + (f"  ({ended})" if ended else ""))
        if thinking and m.thinking:
            lines += ["(thinking)", m.thinking, "(answer)"]
        lines += [m.text, ""]
    return "\n".join(lines)


def outline(conversation: Conversation, store: Store) -> str:
    """Every message of every branch on a line, indented where branches part. * marks the branch on screen, words what was taken back."""
    tree, taken_back = store.tree(conversation.id), store.taken_back(conversation.id)
    children: dict[str | None, list[Message]] = {}
    parents = {m.id: m.parent_id for m in tree}
    for m in tree:
        children.setdefault(m.parent_id, []).append(m)
    shown, leaf = set(), store.shown_leaf(conversation.id)
    while leaf is not None:
        shown.add(leaf)
        leaf = parents.get(leaf)
    lines = [f"{conversation.title or '(no title)'}  [{conversation.id}]"]
    stack = [(m, 0) for m in reversed(children.get(None, []))]
    while stack:
        m, depth = stack.pop()
        first = " ".join(m.text.split())[:60]
        ended = "taken back" if m.id in taken_back else mark(m)
        lines.append(f"{'*' if m.id in shown else ' '} {'  ' * depth}[{m.id}] {m.role}: {first}" + (f"  ({ended})" if ended else ""))
        below = children.get(m.id, [])
        stack += [(child, depth + (len(below) > 1)) for child in reversed(below)]
    return "\n".join(lines) + "\n"


def _numbers(m: Message) -> str:
    usage, timing = m.usage or {}, m.timing or {}
    parts = [m.build_name or "", datetime.fromtimestamp(m.created, UTC).strftime("%Y-%m-%d %H:%M UTC")]
    if usage.get("completion_tokens") is not None:
        parts.append(f"{usage['completion_tokens']:,} tokens")
    if timing.get("decode_tok_s"):
        parts.append(f"{timing['decode_tok_s']:.1f} tok/s")
    if m.params and m.params.get("seed") is not None:
        parts.append(f"seed {m.params['seed']}")
    return " · ".join(part for part in parts if part)
