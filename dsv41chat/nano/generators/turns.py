"""One exchange of a conversation, and what the conversation so far means for the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = (
    "none",
    "word",
    "unkword",
    "python",
    "command",
    "geo",
    "element",
    "sum",
    "sumthink",
    "mul",
    "multhink",
    "div",
    "convert",
    "told",
    "recall",
    "nottold",
    "correct",
    "meta",
    "talk",
    "scope",
    "unkother",
    "needle",
)
KIND_ID = {kind: i for i, kind in enumerate(KINDS)}


@dataclass
class Turn:
    """user: the message; key: the part of the answer that names what was asked (a prefix of `answer`); thought: the reasoning text."""

    user: str
    answer: str
    kind: str
    key: str = ""
    thought: str = ""
    short: str = ""  # answer as it stands in the history of a thinking conversation, where it differs
    topic: str = ""  # intent, for follow-ups of the same kind


@dataclass
class State:
    """What has been said: told values by name, and the turns so far."""

    told: dict[str, str] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    first_word: str = ""

    @property
    def last(self) -> Turn | None:
        return self.turns[-1] if self.turns else None
