"""The answer's row while it grows: begun at the first token, checkpointed by the store, finished once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dsv41chat.engine.events import Done
from dsv41chat.store import StoreError
from dsv41chat.ui.turn_events import BuildView, Piece

if TYPE_CHECKING:
    from dsv41chat.store import Store

log = logging.getLogger(__name__)


class AnswerRow:
    """What has arrived of one answer, as text and as ids, and its row in the store."""

    def __init__(self, store: Store, build: BuildView, question: Any, kept: Any, params: dict, end_think: int | None, start: str):
        """question: the user's message. kept: the answer that is continued, or None. start: of the prompt, see `EncodedPrompt`."""
        self._store, self._build, self._question = store, build, question
        self._params = params
        self._end_think = end_think
        self._thinks = start.startswith("reasoning")
        self._writer: Any = None
        self._end: dict[str, Any] | None = None  # how it ended, once the engine has said so
        self.stored: Any = None  # the row that `keep` left
        self.unstored: Any = None  # its record, where `keep` could not store it
        self._kept = {"text": kept.text if kept else "", "thinking": kept.thinking if kept else ""}
        self._new = {"text": "", "thinking": ""}
        self._ids: list[int] = []
        self._reasoning_ids = list(kept.reasoning_ids or ()) if kept else []
        self._body_ids = list(kept.body_ids or ()) if kept else []
        self._offsets = (len(self._reasoning_ids), len(self._body_ids))

    def add(self, piece: Piece) -> None:
        """Take a piece in, before it is shown."""
        if not piece.ids and not piece.text:
            return
        self._new["thinking" if piece.channel == "thinking" else "text"] += piece.text
        self._ids.extend(piece.ids)
        for id in piece.ids:
            if self._thinks and id == self._end_think:
                self._thinks = False
            else:
                (self._reasoning_ids if self._thinks else self._body_ids).append(id)
        if self._writer is not None:
            self._writer.update(**self._fields())
            return
        self._begin()
        self._writer.update(**self._fields())
        try:
            # The row exists before the first token is shown, so that the next start can say how this one ended.
            self._writer.checkpoint()
        except StoreError as error:
            log.warning("the answer could not be begun in the store: %s", error)  # `failure` tells the front end

    @property
    def failure(self) -> StoreError | None:
        """Why the newest checkpoint could not be written."""
        return self._writer.failure if self._writer is not None else None

    def complete(self, done: Done, timing: dict) -> Any:
        """Store the end of an answer; None if no token was produced."""
        if not done.ids and self._writer is None:
            return None
        if self._writer is None:
            self._begin()
        self._new = {"text": done.text, "thinking": done.thinking}
        # The pieces hold the stop id and what followed a stop string; the engine's own lists are the ones to repeat.
        self._reasoning_ids[self._offsets[0] :] = done.reasoning_ids
        self._body_ids[self._offsets[1] :] = done.body_ids
        state = "stopped" if done.finish == "cancelled" else "complete"
        self._end = {"state": state, "finish": done.finish, "ids": done.ids, "usage": done.usage, "timing": timing}
        return self._writer.finish(**self._end, **self._fields())

    def keep(self, state: str) -> dict | None:
        """Store what was produced before a failure and return it; None if there was nothing.

        state: of an answer that the failure has cut; one that came to its own end keeps that, with its figures.
        """
        if self._writer is None:
            return None
        end = self._end or {"state": state, "finish": state, "ids": tuple(self._ids)}
        try:
            self.stored = self._writer.finish(**end, **self._fields())
        except StoreError as error:
            log.error("the answer could not be stored: %s", error)
            self.unstored = self._writer.unwritten()
        return dict(self._new)

    def _begin(self) -> None:
        question = self._question
        self._writer = self._store.begin_answer(question.conversation_id, question.id, self._build.name, self._build.fingerprint, self._params)

    def _fields(self) -> dict:
        return {
            "text": self._kept["text"] + self._new["text"], "thinking": self._kept["thinking"] + self._new["thinking"],
            "reasoning_ids": self._reasoning_ids, "body_ids": self._body_ids,
        }  # fmt: skip
