"""Conversations from our own JSON export. The whole file is checked before anything is stored, and nothing stored is overwritten."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsv41chat.settings import CONVERSATION_KEYS, KEYS, TURN_KEYS, coerce
from dsv41chat.store.records import LATEST, ROLES, STATES, Message, hash_ids, pack_ids
from dsv41chat.ui.export import SCHEMA
from dsv41chat.ui.output import UsageError
from dsv41chat.ui.turn_events import SHOWN_PARAMS

if TYPE_CHECKING:
    from dsv41chat.store import Conversation, Store

_ID = re.compile(r"[0-9a-f]{4,64}")
_MOST = 1 << 53  # of a figure: beyond it not every whole number is one in other programs' JSON
HINT = "dsv41chat conversations export ID --format json -o FILE writes such a file"


class ImportRefused(UsageError):
    """The file is none of ours, or damaged. Exit code 2; nothing was stored."""


@dataclass(frozen=True)
class Exported:
    """One conversation of a file. messages: parents before children. leaf: id of the one on screen, None where none is."""

    id: str
    title: str
    created: float
    updated: float
    leaf: str | None
    pinned: bool
    settings: dict[str, Any]
    messages: tuple[Message, ...]


def read(text: str, name: str) -> list[Exported]:
    """The conversations of an export: one object, or the array of `--all`.

    name: of the file, for the messages. Raises ImportRefused that names the place and what is wrong there.
    """
    try:
        data = json.loads(text, parse_constant=_no_number)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ImportRefused(f"{name} holds half of a surrogate pair ({half}), which is no character.", HINT) from None
    except (ValueError, RecursionError) as error:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) > 1 and lines[0].startswith('{"conversation"'):
            raise ImportRefused(f"{name} is a jsonl export, which does not hold the conversation itself.", HINT) from None
        raise ImportRefused(f"{name} is no JSON ({error}); it is cut or was written by another program.", HINT) from None
    values = data if isinstance(data, list) else [data]
    if not values:
        raise ImportRefused(f"{name} holds no conversation.", HINT)
    found = [_conversation(value, f"{name}: $[{number}]" if isinstance(data, list) else f"{name}: $") for number, value in enumerate(values)]
    ids = [one.id for one in found]
    if len(set(ids)) < len(ids):
        raise ImportRefused(f"{name} holds one conversation twice.", HINT)
    return found


def store(found: Iterable[Exported], target: Store) -> list[tuple[Exported, Conversation, str]]:
    """Store all conversations or none; each as (what was read, what it became, which ids were taken, in words: "" for none).

    Ids stay where they are free; a conversation that is there already becomes a second copy with ids of its own.
    Raises StoreError.
    """
    return [
        (one, made, " and ".join(words for words, taken in ((f"the id {one.id}", own), ("the ids of its messages", messages)) if taken))
        for one, (made, own, messages) in zip(found, target.add_conversations(found), strict=True)
    ]


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _conversation(value: Any, at: str) -> Exported:
    if not isinstance(value, dict) or value.get("type") != "conversation" or "v" not in value:
        raise ImportRefused(f"{at} is no conversation that dsv41chat exported.", HINT)
    if value["v"] != SCHEMA:
        written = f" (dsv41chat {value['version']})" if isinstance(value.get("version"), str) else ""
        raise ImportRefused(f"{at}.v is {value['v']!r}{written}; this version reads {SCHEMA}.", "update dsv41chat")
    get = _Fields(value, at)
    messages: dict[str, Message] = {}
    for number, row in enumerate(get("messages", list)):
        message = _message(row, f"{at}.messages[{number}]", messages)
        messages[message.id] = message
    leaf = get("leaf", str, none=True)
    if leaf is not None and leaf not in messages:
        raise ImportRefused(f"{at}.leaf is {leaf!r}, which is none of the messages.", HINT)
    settings = get("settings", dict)
    _check_settings(settings, f"{at}.settings")
    return Exported(
        get.id("id"), get("title", str), get.time("created"), get.time("updated"), leaf, get("pinned", bool, default=False), settings,
        tuple(messages.values()),
    )  # fmt: skip


def _message(value: Any, at: str, before: dict[str, Message]) -> Message:
    if not isinstance(value, dict):
        raise ImportRefused(f"{at} is no message.", HINT)
    get = _Fields(value, at)
    id, parent = get.id("id"), get("parent", str, none=True)
    if id in before:
        raise ImportRefused(f"{at}.id {id!r} is there twice.", HINT)
    if parent is not None and parent not in before:
        raise ImportRefused(f"{at}.parent {parent!r} is none of the messages before it.", HINT)
    build = _Fields(get("build", dict, none=True) or {}, f"{at}.build")
    role = get("role", str, among=ROLES)
    ids, ids_hash = get.ids("ids"), get("ids_hash", str, none=True)
    if role == "assistant" and ids is not None and ids_hash is not None and hash_ids(ids) != ids_hash:
        raise ImportRefused(f"{at}.ids do not have the hash {ids_hash[:12]}… that stands beside them: the file was changed or damaged.", HINT)
    finish, body_ids = get("finish", str, none=True), get.ids("body_ids")
    if finish == "stop_string":
        # Behind what such an answer shows there are ids that nobody saw, and no file can say which stop text that was.
        body_ids = None
    return Message(
        id=id,
        conversation_id="",
        parent_id=parent,
        role=role,
        text=get("text", str),
        thinking=get("thinking", str, none=True) or "",
        state=get("state", str, among=STATES),
        finish=finish,
        build_name=build("name", str, none=True),
        build_fingerprint=build("fingerprint", str, none=True),
        params=get.options("params"),
        usage=get.figures("usage"),
        timing=get.figures("timing"),
        meta=get("meta", dict, none=True),
        ids_hash=ids_hash,
        created=get.time("created"),
        updated=get.time("updated"),
        ids_blob=pack_ids(ids),
        reasoning_blob=pack_ids(get.ids("reasoning_ids")),
        body_blob=pack_ids(body_ids),
    )


def _check_settings(settings: dict[str, Any], at: str) -> None:
    """What a conversation keeps for itself counts in its next turn: it must be what a turn can use."""
    for name in CONVERSATION_KEYS:
        value = settings.get(name)
        if value is None:
            continue
        try:
            if name != "seed":
                coerce(KEYS[TURN_KEYS[name]], value)
            elif not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
                raise ValueError("a whole number")
        except ValueError as error:
            raise ImportRefused(f"{at}.{name} must be {error}, not {value!r}.", HINT) from None
    for name, kind in (("system", str), ("build", str), ("origin", dict)):
        if not isinstance(settings.get(name), kind | None):
            raise ImportRefused(f"{at}.{name} must be {'a text' if kind is str else 'an object'}.", HINT)
    if not isinstance((settings.get("origin") or {}).get("defaults"), dict | None):
        raise ImportRefused(f"{at}.origin.defaults must be an object.", HINT)


class _Fields:
    """Typed reads of one object. Each raises ImportRefused with the address of what is missing or wrong."""

    _WORDS = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}

    def __init__(self, value: dict[str, Any], at: str):
        self._value, self._at = value, at

    def __call__(self, name: str, kind: type, *, none: bool = False, among: tuple[str, ...] = (), default: Any = None) -> Any:
        value = self._value.get(name, default)
        if value is None and none:
            return None
        if not isinstance(value, kind):
            self._wrong(name, self._WORDS[kind] + (" or null" if none else ""))
        if among and value not in among:
            self._wrong(name, "one of " + ", ".join(among))
        return value

    def id(self, name: str) -> str:
        value = self(name, str)
        return value if _ID.fullmatch(value) else self._wrong(name, "an id in hex digits")

    def time(self, name: str) -> float:
        """Epoch seconds."""
        value = self._value.get(name)
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LATEST
        return float(value) if good else self._wrong(name, "a time in seconds")

    def ids(self, name: str) -> list[int] | None:
        """Token ids, or None."""
        value = self(name, list, none=True)
        if value is not None and not all(type(id) is int and 0 <= id < 1 << 32 for id in value):
            self._wrong(name, "a list of token ids")
        return value

    def figures(self, name: str) -> dict[str, Any] | None:
        """Counts, seconds and rates of a turn: the lines below an answer calculate with them."""
        value = self(name, dict, none=True)
        for key, figure in (value or {}).items():
            if figure is not None and (type(figure) not in (int, float) or not 0 <= figure < _MOST):
                _Fields(value, f"{self._at}.{name}")._wrong(key, "a number")
        return value and {key: figure for key, figure in value.items() if figure is not None}

    def options(self, name: str) -> dict[str, Any] | None:
        """How a turn was sampled. What is shown of it is a number, or one of the words that some options have."""
        value = self(name, dict, none=True)
        for key in SHOWN_PARAMS:
            option = (value or {}).get(key)
            number = type(option) in (int, float) and 0 <= option < 1 << 63
            if option is not None and not number and not (key in ("effort", "draft") and isinstance(option, str)):
                _Fields(value, f"{self._at}.{name}")._wrong(key, "a number or a text" if key in ("effort", "draft") else "a number")
        return value and {key: option for key, option in value.items() if option is not None or key not in SHOWN_PARAMS}

    def _wrong(self, name: str, expected: str) -> Any:
        value = repr(self._value.get(name))
        shown = value if len(value) <= 40 else value[:40] + "…"
        raise ImportRefused(f"{self._at}.{name} must be {expected}, not {shown}.", HINT)
