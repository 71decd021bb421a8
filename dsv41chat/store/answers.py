"""One answer while it is generated: a single row that is written again and again until it is finished.

`update` only takes note of what there is and never waits for the disk. The row is written at the first token, then CHECKPOINT_S after
the last time or after CHECKPOINT_TOKENS, by the store's keeper thread: also when the next token is long in coming, so that a
killed process loses less than a second of text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsv41chat.store import records
from dsv41chat.store.errors import NotFound, StoreClosed, StoreError
from dsv41chat.store.part import Part
from dsv41chat.store.records import Message
from dsv41chat.store.tree import insert_message

if TYPE_CHECKING:
    from dsv41chat.store.store import Store

# Leaves a fifth of the promised second for the commit itself.
CHECKPOINT_S = 0.8
CHECKPOINT_TOKENS = 200


class AnswerWriter:
    """id: of the message, known before its row exists. failure: why the last checkpoint was not written, None if it was.

    Used by one thread (the one that runs the turn); the keeper joins in behind a lock. As a context manager it finishes what was
    left open: as interrupted, or as error if the block raised.
    """

    def __init__(self, store: Store, row: dict[str, Any], monotonic: Callable[[], float], on_change: Callable[[], None]):
        self.id: str = row["id"]
        self.conversation_id: str = row["conversation_id"]
        self.failure: StoreError | None = None
        self.finished = False
        self._store = store
        self._row = row
        self._monotonic = monotonic
        self._on_change = on_change
        self._state_lock = threading.Lock()  # the fields below; held for moments only
        self._write_lock = threading.RLock()  # the row; held during a commit
        self._text = self._thinking = ""
        self._reasoning: tuple[Sequence[int], int] = ((), 0)
        self._body: tuple[Sequence[int], int] = ((), 0)
        self._dirty = False
        self._stored = False
        self._attempted = False
        self._last_write = 0.0
        self._last_tokens = 0
        self._end_columns: dict[str, Any] = {}

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.finished:
            return
        try:
            if self.produced:
                self.finish("interrupted" if kind is None else "error")
            else:
                self.discard()
        except StoreError:
            # The exception that ended the block says more than this one; `failure` keeps this one.
            if kind is None:
                raise

    @property
    def produced(self) -> bool:
        """Whether anything was generated yet."""
        return bool(self._text or self._thinking or self._reasoning[1] or self._body[1])

    def update(self, text: str, thinking: str = "", reasoning_ids: Sequence[int] = (), body_ids: Sequence[int] = ()) -> None:
        """Everything generated so far. Cheap, never waits, never raises StoreError (see `failure`).

        The id sequences are not copied: they may grow afterwards, but what they hold now must stay. After the store was closed nothing
        happens: its close() has finished the answer.
        """
        if self.finished and self._store.closed:
            return
        self._require_open()
        with self._state_lock:
            self._text, self._thinking = text, thinking
            self._reasoning = (reasoning_ids, len(reasoning_ids))
            self._body = (body_ids, len(body_ids))
            was_dirty, self._dirty = self._dirty, True
        # The keeper sleeps while nothing is dirty, then until the next checkpoint.
        if self.produced and (not was_dirty or self.due_in() <= 0.0):
            self._on_change()

    @property
    def waiting(self) -> bool:
        """Whether something was generated that is not in the row yet."""
        return self._dirty and self.produced

    def due_in(self) -> float:
        """Seconds until a checkpoint may be written; not above 0: at once."""
        if not self._attempted or self._tokens() - self._last_tokens >= CHECKPOINT_TOKENS:
            return 0.0
        return self._last_write + CHECKPOINT_S - self._monotonic()

    def checkpoint(self) -> None:
        """Write the row now if anything is new. Raises StoreError."""
        with self._write_lock:
            if not self.finished and self.waiting:
                self._write({"state": "running"})

    def checkpoint_if_due(self) -> None:
        """For the keeper: `checkpoint` when it is time; an error is kept in `failure` and tried again later."""
        if self.waiting and self.due_in() <= 0.0:
            try:
                self.checkpoint()
            except (StoreError, TypeError, ValueError):
                # Kept in `failure`; the front end shows it, finish() raises it.
                return

    def finish(
        self,
        state: str,
        finish: str | None = None,
        text: str | None = None,
        thinking: str | None = None,
        ids: Sequence[int] | None = None,
        reasoning_ids: Sequence[int] | None = None,
        body_ids: Sequence[int] | None = None,
        usage: Mapping[str, Any] | None = None,
        timing: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Message:
        """Write the row for the last time and return it.

        state: complete, stopped, interrupted or error. finish: why it ended. ids: every emitted id, the stop id included; their hash is
        stored with them. What is None stays as the last update or begin_answer said. Raises StoreError; the answer is then not
        finished and may be finished again, here or in another store.
        """
        if state not in records.STATES or state == "running":
            raise ValueError(f"an answer cannot end in state {state!r}")
        with self._write_lock:
            self._require_open()
            with self._state_lock:
                self._text = self._text if text is None else text
                self._thinking = self._thinking if thinking is None else thinking
                self._reasoning = self._reasoning if reasoning_ids is None else (reasoning_ids, len(reasoning_ids))
                self._body = self._body if body_ids is None else (body_ids, len(body_ids))
            last: dict[str, Any] = {"state": state, "finish": finish, "owner": None}
            if ids is not None:
                last |= {"ids": records.pack_ids(ids), "ids_hash": records.hash_ids(ids)}
            for column, value in (("usage", usage), ("timing", timing), ("params", params), ("meta", meta)):
                if value is not None:
                    last[column] = records.to_json(value)
            self._end_columns = last
            self._write(last)
            self._end()
        return self._store.message(self.id)

    def unwritten(self) -> Message:
        """The answer as the last `finish` wanted to store it: where that was refused, it goes on elsewhere under its own id."""
        nothing = {name: None for name in records.MESSAGE_COLUMNS.split(", ")}
        return records.message(nothing | {"seq": 0} | self._row | self._columns(self._end_columns))

    def discard(self) -> None:
        """Nothing was generated: no answer remains, and the leaf is the question again. Raises StoreError."""
        with self._write_lock:
            self._require_open()
            if self._stored:
                with self._store.db.write() as db:
                    db.execute("DELETE FROM messages WHERE id = ?", [self.id])
                    db.execute(
                        "UPDATE conversations SET leaf_id = ? WHERE id = ? AND leaf_id IS NULL", [self._row["parent_id"], self.conversation_id]
                    )
            self._end()

    # -- parts

    def _require_open(self) -> None:
        if self.finished:
            raise StoreClosed("the store is closed") if self._store.closed else ValueError("the answer is finished")

    def _tokens(self) -> int:
        return self._reasoning[1] + self._body[1]

    def _end(self) -> None:
        self.finished = True
        self._store._forget(self)

    def _write(self, columns: dict[str, Any]) -> None:
        self._dirty = False
        self._attempted, self._last_write, self._last_tokens = True, self._monotonic(), self._tokens()
        try:
            self._write_row(self._columns(columns))
        except BaseException as error:
            self._dirty = True
            # Ids that are none raise ValueError in the thread that gave them; the keeper, which must live on, reads it here.
            self.failure = error if isinstance(error, StoreError) else StoreError(f"the answer cannot be stored: {error}")
            raise
        self._stored = True
        self.failure = None

    def _columns(self, columns: dict[str, Any]) -> dict[str, Any]:
        with self._state_lock:
            text, thinking, reasoning, body = self._text, self._thinking, self._reasoning, self._body
        return columns | {
            "text": records.storable(text),
            "thinking": records.storable(thinking),
            "reasoning_ids": records.pack_ids(reasoning[0][: reasoning[1]]),
            "body_ids": records.pack_ids(body[0][: body[1]]),
            "updated": self._store.clock(),
        }

    def _write_row(self, columns: dict[str, Any]) -> None:
        with self._store.db.write() as db:
            if not self._stored:
                insert_message(db, self._row | columns)
                return
            # Whatever state another process gave the row in the belief that this one was dead: this one writes it.
            names = ", ".join(f"{name} = ?" for name in columns)
            if db.execute(f"UPDATE messages SET {names} WHERE id = ?", [*columns.values(), self.id]).rowcount == 0:
                raise NotFound(f"message {self.id!r} was removed while it was written", "the text is still on the screen; copy or export it")
            db.execute("UPDATE conversations SET updated = ? WHERE id = ?", [columns["updated"], self.conversation_id])


class Answers(Part):
    def begin_answer(
        self,
        conversation_id: str,
        parent_id: str | None,
        build_name: str | None,
        build_fingerprint: str | None,
        params: Mapping[str, Any] | None,
        *,
        meta: Mapping[str, Any] | None = None,
    ) -> AnswerWriter:
        """Begin an answer below `parent_id`. No row exists before its first token.

        Raises NotFound, Locked (the conversation is open in another process), or another StoreError.
        """
        self._require_writable(conversation_id)
        self._require_parent(conversation_id, parent_id)
        self.locks.register()
        row = {
            "id": records.new_id(records.MESSAGE_DIGITS),
            "conversation_id": conversation_id,
            "parent_id": parent_id,
            "role": "assistant",
            "build_name": build_name,
            "build_fingerprint": build_fingerprint,
            "params": records.to_json(params),
            "meta": records.to_json(meta),
            "owner": self.locks.token,
            "created": self.clock(),
        }
        return self._watch(row)
