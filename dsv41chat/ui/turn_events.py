"""What a turn is asked to do and what it reports. Plain data: no widgets, no MLX, no SQLite.

A run yields, in this order: `Started`; `Saved` (the user's message, when it is new); `Loading`... and `Ready`; `Resuming` (a state lies on the
disk) and `Resumed`; then the
engine's `Residency`, `Prefill`, `Piece` and `DraftRound`; `Saved` (the answer, if a token was produced); and last exactly one
of `Finished` or `Failed`. `Warned`, `Noticed` and `StatusAsked` may come anywhere after `Started`. A run that fails early
skips what it did not reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsv41chat.engine.events import DraftRound, Loading, Piece, Prefill, Residency, TableState

__all__ = [
    "EXIT_CODES", "LEAF", "AppStart", "BuildRef", "BuildView", "ConversationView", "DraftRound", "Failed", "Finished", "Loading", "Noticed",
    "Piece", "Prefill", "Ready", "Residency", "Resumed", "Resuming", "Saved", "Started", "StatusAsked", "TableState", "TurnEvent", "TurnOptions",
    "TurnRequest", "Warned", "exit_code", "merge_events",
]  # fmt: skip

LEAF = "leaf"  # TurnRequest.parent_id: attach to the conversation's last leaf (message ids are hex, so no id reads like this)
# Of the options that a turn was sampled with, in the page of its numbers. Numbers; effort and draft may be words.
SHOWN_PARAMS = ("temperature", "top_k", "top_p", "min_p", "seed", "effort", "max_tokens", "draft")

EXIT_CODES: Mapping[str, int] = {
    "usage": 2, "config": 3, "build_missing": 4, "build_incomplete": 4, "build_unsupported": 4, "build_damaged": 4,
    "does_not_fit": 5, "out_of_memory": 5, "not_found": 6, "ambiguous": 6, "locked": 6, "context_full": 7, "store": 8,
    "timeout": 124, "interrupted": 130, "device_lost": 1, "internal": 1,
}  # fmt: skip


def exit_code(code: str) -> int:
    """The process exit code that belongs to an error code; 1 for one that is not listed."""
    return EXIT_CODES.get(code, 1)


@dataclass(frozen=True)
class TurnOptions:
    """How one answer is made. seed None: drawn at random and reported; max_tokens None: by effort (spec: app, section 10); max_answer_tokens
    None: no limit of the answer apart from its thinking.

    effort: off, low, high, max or an integer 1..100; draft: auto, off or a fixed depth; stop: strings that end the answer.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    max_answer_tokens: int | None = None
    effort: str | int = "high"
    draft: str | int = "auto"
    stop: tuple[str, ...] = ()
    loop_stop: bool = True
    keep_reasoning: bool = False
    v4_effort: str = "auto"

    @property
    def thinking(self) -> bool:
        return self.effort != "off"

    def token_limit(self) -> int:
        """max_tokens, or what stands for "auto": chat 8,192; thinking 65,536; effort max 131,072."""
        if self.max_tokens is not None:
            return self.max_tokens
        if not self.thinking:
            return 8192
        return 131072 if self.effort in ("max", 100) else 65536


@dataclass(frozen=True)
class TurnRequest:
    """Exactly one of `text`, `regenerate` and `continue_from` is given.

    conversation_id: None makes a new conversation, with `system`, `title` (default: the first line of the text) and `settings`
    (what it keeps for itself).
    text: a new user message under `parent_id` (LEAF, a message id, or None for a new first message). An edit of message m is
    its new text under m.parent_id. regenerate: id of an answer, or of a user message: one more answer beside the others.
    continue_from: id of an answer that was cut: a sibling that starts with all of its text.
    build: a build argument (folder, name or prefix), None: the conversation's, the configured, the last used, the embedded.
    queue_id, clear_draft: the text was waiting there; it leaves in the transaction that stores the message.
    build_first: make a new conversation only when there is a build of that name: a script that names one wrongly leaves nothing behind.
    What fails later (a damaged build, no back end) keeps the text.
    overrides: TurnOptions fields for this turn alone. session: turns with the same key share a lane (default: the conversation).
    """

    conversation_id: str | None = None
    text: str | None = None
    parent_id: str | None = LEAF
    regenerate: str | None = None
    continue_from: str | None = None
    system: str | None = None
    title: str | None = None
    build: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    queue_id: int | None = None
    clear_draft: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    session: str | None = None
    build_first: bool = False

    def __post_init__(self):
        if sum(x is not None for x in (self.text, self.regenerate, self.continue_from)) != 1:
            raise ValueError("a turn needs exactly one of text, regenerate and continue_from")


@dataclass(frozen=True)
class AppStart:
    """What the command line asks of the full screen: `ui.app.run_app(controller, AppStart(...)) -> exit code`.

    view: the conversation to open, None for a new one. prompt: put into the composer, sent at once with `send`; attachments:
    (name, text) of files and of piped input. build, system: for the first turn's TurnRequest. notices: sentences to show at
    start (interrupted answers, settings warnings, no conversation to continue). backend_missing: the one line to show when nothing can be loaded.
    theme, mouse: None leaves the setting. program: the name under which the program was called. unsaved: why the conversations could not
    be opened, so that nothing can be stored although it should be.
    """

    view: ConversationView | None = None
    prompt: str = ""
    attachments: tuple[tuple[str, str], ...] = ()
    build: str | None = None
    system: str | None = None
    title: str | None = None
    notices: tuple[str, ...] = ()
    backend_missing: str | None = None
    pick: bool = False
    send: bool = False
    readonly: bool = False
    theme: str | None = None
    mouse: bool | None = None
    save: bool = True
    program: str = "dsv41chat"
    unsaved: str = ""


@dataclass(frozen=True)
class BuildRef:
    """A build that was found but not opened. absent: name of the one that would have answered and is not there."""

    name: str
    folder: Path
    embedded: bool = False
    registered: bool = False
    absent: str = field(default="", compare=False)


@dataclass(frozen=True)
class BuildView:
    """A build whose headers were read. context: the pack's own maximum; drafter: its kind or None; bytes: on disk.

    resident_bytes: in memory, once loaded. formats: matrices by format. admission: the engine's `Admission`, None where nobody asked.
    """

    name: str
    folder: Path
    family: str
    fingerprint: str
    embedded: bool = False
    context: int | None = None
    drafter: str | None = None
    resident_bytes: int = 0
    table_bytes: int = 0
    bytes: int = 0
    has_tokenizer: bool = True
    notes: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    formats: Mapping[str, int] = field(default_factory=dict)
    admission: Any = None

    def as_dict(self) -> dict[str, str]:
        """The `build` field of scripts."""
        return {"name": self.name, "family": self.family, "fingerprint": self.fingerprint}


@dataclass(frozen=True)
class ConversationView:
    """A conversation as opened: the messages from the first to the shown leaf.

    readonly: another live process holds it (`holder`: its pid); interrupted: the last message is an answer that a process left
    unfinished when it died.
    """

    conversation: Any
    messages: tuple[Any, ...]
    readonly: bool = False
    holder: int | None = None
    interrupted: bool = False


@dataclass(frozen=True)
class Started:
    """build: None when it could not be found. params: what is known before loading; `Ready.params` is final."""

    conversation_id: str
    parent_id: str | None
    build: BuildView | None
    params: dict
    device: str | None
    mlx: str | None


@dataclass(frozen=True)
class Ready:
    """The engine is loaded and the prompt is encoded. load_s: 0 when it was loaded already."""

    build: BuildView
    params: dict
    device: str
    mlx: str
    load_s: float
    prompt_tokens: int
    context_limit: int


@dataclass(frozen=True)
class Resuming:
    """A stored state of so many tokens is being read from the disk."""

    tokens: int


@dataclass(frozen=True)
class Resumed:
    """How much of the prompt was computed before. source: memory, disk or none; seconds: what bringing it back took.

    cold: why a conversation with earlier answers found nothing, in words. damaged: why a stored state could not be used.
    """

    tokens: int
    prompt_tokens: int
    seconds: float
    source: str
    cold: str | None = None
    damaged: str | None = None

    @property
    def trouble(self) -> str | None:
        """The sentence about a damaged state; None without one."""
        if self.damaged is None:
            return None
        return f"Saved state for this chat could not be used ({self.damaged}); re-reading {self.prompt_tokens - self.tokens:,} tokens."


@dataclass(frozen=True)
class Saved:
    """A message row was committed; `message` is the store's record."""

    message: Any


@dataclass(frozen=True)
class Warned:
    code: str
    message: str


@dataclass(frozen=True)
class Noticed:
    """Something to tell once that is no warning (which model answers, that a build was not found)."""

    code: str
    message: str


@dataclass(frozen=True)
class StatusAsked:
    """Somebody called `ask_status`: the front end says where the turn stands."""


@dataclass(frozen=True)
class Finished:
    """finish: stop, length, stop_string, loop or cancelled. message: the stored answer; None if no token was produced.

    text, thinking: what this turn added (a continuation's kept text is in `message` only). ids_hash: of all emitted ids.
    """

    conversation_id: str
    finish: str
    message: Any
    text: str
    thinking: str
    ids: tuple[int, ...]
    ids_hash: str
    seed: int
    usage: dict
    timing: dict
    draft: dict
    residency: dict


@dataclass(frozen=True)
class Failed:
    """The turn ended without a complete answer, or with one that could not be stored.

    partial: {text, thinking} that was produced, or None; answer: its record, where it is stored; unstored: its record, where it is not.
    status: the exit code, where it is not the one of EXIT_CODES. prompt_tokens: of a prompt that was
    encoded and not run, else 0.
    """

    code: str
    message: str
    hint: str = ""
    conversation_id: str | None = None
    partial: dict | None = None
    status: int | None = None
    prompt_tokens: int = 0
    answer: Any = None
    unstored: Any = None

    @property
    def exit_code(self) -> int:
        return exit_code(self.code) if self.status is None else self.status


TurnEvent = (
    Started
    | Saved
    | Loading
    | Ready
    | Resuming
    | Resumed
    | Residency
    | Prefill
    | Piece
    | DraftRound
    | Warned
    | Noticed
    | StatusAsked
    | Finished
    | Failed
)


def cut_words(finish: str | None, usage: Mapping[str, Any] | None) -> str:
    """Why an answer is not whole although nobody stopped it, in two words; "" for one that is, or that ended otherwise."""
    usage = usage or {}
    if finish == "length" and usage.get("context_used", 0) >= usage.get("context_limit", math.inf):
        return "context full"
    return {"length": "length limit", "loop": "loop stopped"}.get(finish or "", "")


def merge_events(a: Any, b: Any) -> Any:
    """Join two neighbouring engine events: pieces of one channel, draft rounds (their counts add up). None: they stay apart."""
    if isinstance(a, Piece) and isinstance(b, Piece) and a.channel == b.channel:
        return replace(a, text=a.text + b.text, ids=a.ids + b.ids)
    if isinstance(a, DraftRound) and isinstance(b, DraftRound):
        return DraftRound(b.depth, a.proposed + b.proposed, a.accepted + b.accepted)
    return None
