"""Frozen rows of the store, and how ids and settings become columns.

All times are epoch seconds (float) in UTC. Ids of rows are random hex.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONVERSATION_DIGITS = 8
MESSAGE_DIGITS = 12
ROLES = ("system", "user", "assistant", "tool")
STATES = ("running", "complete", "stopped", "interrupted", "error")
LATEST = 1e11  # no time in seconds is later
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """title: '' until the first user message or a rename. leaf_id: the message last looked at, None while empty.

    settings: what the conversation keeps for itself (sampling, effort, system). view: state of the screen.
    """

    id: str
    title: str
    created: float
    updated: float
    used: float
    leaf_id: str | None
    settings: dict[str, Any]
    view: dict[str, Any]
    pinned: bool
    deleted: float | None


@dataclass(frozen=True, slots=True)
class ConversationSummary:
    """A line of the list. messages: on all branches, system texts apart; None where damage hides them.

    context_used: tokens after the newest answer.
    """

    id: str
    title: str
    created: float
    updated: float
    used: float
    leaf_id: str | None
    pinned: bool
    deleted: float | None
    messages: int | None
    context_used: int | None
    build_name: str | None
    build_fingerprint: str | None


@dataclass(frozen=True, slots=True)
class Message:
    """A node of the tree. state: one of STATES; finish: why an answer ended; meta: whatever else the turn keeps."""

    id: str
    conversation_id: str
    parent_id: str | None
    role: str
    text: str
    thinking: str = ""
    state: str = "complete"
    finish: str | None = None
    build_name: str | None = None
    build_fingerprint: str | None = None
    params: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    timing: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None
    ids_hash: str | None = None
    created: float = 0.0
    updated: float = 0.0
    seq: int = 0  # order of arrival in its store
    ids_blob: bytes | None = field(default=None, repr=False)
    reasoning_blob: bytes | None = field(default=None, repr=False)
    body_blob: bytes | None = field(default=None, repr=False)

    @property
    def ids(self) -> tuple[int, ...] | None:
        """Of a text: its encoding, if it was stored. Of an answer: every emitted id, the stop id included."""
        return unpack_ids(self.ids_blob)

    @property
    def reasoning_ids(self) -> tuple[int, ...] | None:
        """Sampled ids of the thinking part, verbatim."""
        return unpack_ids(self.reasoning_blob)

    @property
    def body_ids(self) -> tuple[int, ...] | None:
        """Sampled ids after the thinking part, verbatim, without the stop id."""
        return unpack_ids(self.body_blob)


@dataclass(frozen=True, slots=True)
class Draft:
    """Text that was typed and not sent. editing: the message it is to replace, if any."""

    text: str
    editing: str | None
    meta: dict[str, Any] | None
    updated: float


@dataclass(frozen=True, slots=True)
class Queued:
    """A message that waits for the running turn to end."""

    id: int
    conversation_id: str
    text: str
    meta: dict[str, Any] | None
    created: float


@dataclass(frozen=True, slots=True)
class Build:
    """folder: None for the embedded build, which is found through the package."""

    name: str
    folder: Path | None
    family: str | None
    fingerprint: str | None
    added: float
    last_used: float | None


def new_id(digits: int) -> str:
    return secrets.token_hex(digits // 2)


def pack_ids(ids: Sequence[int] | None) -> bytes | None:
    """Ids as little-endian uint32. None stays None. Raises ValueError for a value outside 0 .. 2**32 - 1."""
    if ids is None:
        return None
    try:
        packed = array("I", ids)
    except OverflowError as error:
        raise ValueError(f"a token id is outside 0 .. 4294967295: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(blob: bytes | None) -> tuple[int, ...] | None:
    """The inverse of `pack_ids`. Raises ValueError if the length is no multiple of 4."""
    if blob is None:
        return None
    packed = array("I")
    packed.frombytes(blob)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def hash_ids(ids: Sequence[int]) -> str:
    """sha256, in hex, of ids as little-endian uint32."""
    return hashlib.sha256(pack_ids(ids) or b"").hexdigest()


def to_json(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def from_json(text: str | None) -> dict[str, Any] | None:
    """The object of a JSON column. None for NULL, and for what is no object: of a damaged row the rest is still good."""
    try:
        value = None if text is None else json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def storable(text: str) -> str:
    """Text as SQLite takes it: half of a surrogate pair is no character and becomes U+FFFD; anything else stays."""
    return _SURROGATE.sub("\ufffd", text)


MESSAGE_COLUMNS = (
    "seq, id, conversation_id, parent_id, role, text, thinking, state, finish, build_name, build_fingerprint, params, usage, timing, meta, "
    "ids_hash, created, updated, ids, reasoning_ids, body_ids"
)


def moment(value: Any) -> float:
    """Epoch seconds; 0 where damage has left no time."""
    return value if isinstance(value, float) and 0 <= value < LATEST else 0.0


def message(row: Mapping[str, Any]) -> Message:
    """row: MESSAGE_COLUMNS by name."""
    return Message(
        seq=row["seq"],
        id=row["id"],
        conversation_id=row["conversation_id"],
        parent_id=row["parent_id"],
        role=row["role"],
        text=row["text"],
        thinking=row["thinking"],
        state=row["state"] if row["state"] in STATES else "interrupted",
        finish=row["finish"],
        build_name=row["build_name"],
        build_fingerprint=row["build_fingerprint"],
        params=from_json(row["params"]),
        usage=from_json(row["usage"]),
        timing=from_json(row["timing"]),
        meta=from_json(row["meta"]),
        ids_hash=row["ids_hash"],
        created=moment(row["created"]),
        updated=moment(row["updated"]),
        ids_blob=row["ids"],
        reasoning_blob=row["reasoning_ids"],
        body_blob=row["body_ids"],
    )


def conversation(row: Mapping[str, Any]) -> Conversation:
    """row: every column of the table by name."""
    return Conversation(
        id=row["id"],
        title=row["title"],
        created=moment(row["created"]),
        updated=moment(row["updated"]),
        used=moment(row["used"]),
        leaf_id=row["leaf_id"],
        settings=from_json(row["settings"]) or {},
        view=from_json(row["view"]) or {},
        pinned=bool(row["pinned"]),
        deleted=row["deleted"],
    )
