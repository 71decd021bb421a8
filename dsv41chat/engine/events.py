"""What an engine says while it loads and answers. Front ends map these one to one to what they show or print."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Loading:
    """stage: map, weights, tables, drafter, warmup or ready; unit: bytes, layers or rows."""

    stage: str
    done: int
    total: int
    unit: str


@dataclass(frozen=True)
class TableState:
    """name as `layers.1.engram`; state: warm, cold, probing or resident; sampled/resident: pages of the last probe."""

    name: str
    state: str
    sampled: int = 0
    resident: int = 0


@dataclass(frozen=True)
class Residency:
    tables: tuple[TableState, ...]


@dataclass(frozen=True)
class Prefill:
    """cached: ids whose state was reused; done of total: ids of the rest that have run; tok_s: mean rate so far."""

    cached: int
    done: int
    total: int
    tok_s: float


@dataclass(frozen=True)
class Piece:
    """channel: thinking or answer; text: complete characters only (may be empty); ids: accepted ids since the last piece."""

    channel: str
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class DraftRound:
    """A round that verified proposals, or the first of several that do not (depth 0)."""

    depth: int
    proposed: int
    accepted: int


@dataclass(frozen=True)
class Done:
    """The end of an answer. finish: stop, length, stop_string, loop or cancelled.

    ids: every emitted id, the stop id included; reasoning_ids/body_ids: the verbatim ids of the two parts as a later
    prompt must repeat them (see chat/encode.py). usage, timing, draft, residency: the fields scripts see.
    """

    finish: str
    ids: tuple[int, ...]
    reasoning_ids: tuple[int, ...]
    body_ids: tuple[int, ...]
    thinking: str
    text: str
    usage: dict = field(default_factory=dict)
    timing: dict = field(default_factory=dict)
    draft: dict = field(default_factory=dict)
    residency: dict = field(default_factory=dict)
