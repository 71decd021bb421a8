"""`--batch`: a JSON-lines file of prompts in, one result line each out, in input order (spec: app, section 8.4).

Items run one after the other on one session, so a system prompt that they share is computed once. Without --save nothing is
stored: every item lives in a store in memory.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv41chat.engine.errors import ContextFull, EngineError
from dsv41chat.settings import KEYS, TURN_KEYS, coerce, near
from dsv41chat.store import StoreError
from dsv41chat.ui.inputs import decode, read_stdin, read_text
from dsv41chat.ui.interrupts import Interrupts
from dsv41chat.ui.output import SCHEMA, Out, OutputFailed, Stderr, UsageError, show_progress
from dsv41chat.ui.sanitize import json_text
from dsv41chat.ui.turn_events import Failed, Finished, Noticed, Started, TurnRequest, exit_code

if TYPE_CHECKING:
    from dsv41chat.store import Store
    from dsv41chat.ui.turn import TurnController

FAILED_ITEMS = 9
MAX_BATCH_BYTES = 256 << 20  # of all items: they are in memory at once
_FIELDS = ("id", "prompt", "messages", "system", "params", "conversation")
_SESSION = "batch"
_PARAMS = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "max_tokens", "max_answer_tokens", "effort",
    "draft", "seed", "stop",
)  # fmt: skip


ITEM_FIELDS = f"an item is an object with {', '.join(_FIELDS)}; params may hold {', '.join(_PARAMS)}"


@dataclass(frozen=True)
class Item:
    """One line. error: why it cannot run. messages: (role, content) in order, the last one the user's."""

    id: str
    messages: tuple[tuple[str, str], ...] = ()
    system: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    conversation: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Plan:
    """How the items run. disk: under no saving, the database to read an item's conversation from."""

    build: str | None = None
    system: str | None = None
    seed: int | None = None
    output: str | None = None
    resume: bool = False
    fail_fast: bool = False
    save: bool = False
    disk: Store | None = None
    force: bool = False


def read_items(path: str, *, use_stdin: bool = True) -> list[Item]:
    """The items of a file, or of standard input for "-". Raises UsageError: unreadable, too large, empty, a repeated id."""
    try:
        text = _read(path, use_stdin)
    except ContextFull:
        raise UsageError(f"{path} has more than {MAX_BATCH_BYTES:,} bytes.", hint="several batches, one after the other") from None
    numbered = [(number, _item(line, number)) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not numbered:
        raise UsageError(f"{path}: there are no items.", hint=ITEM_FIELDS)
    seen: dict[str, int] = {}
    for number, item in numbered:
        if item.id in seen:
            where = f"in line {seen[item.id]} and in line {number}"
            raise UsageError(f"{path}: the id {item.id!r} is there twice, {where}.", hint="one id per line, or none")
        seen[item.id] = number
    return [item for _, item in numbered]


def _read(path: str, use_stdin: bool) -> str:
    if path != "-":
        return read_text(path, path, limit=MAX_BATCH_BYTES)
    text = read_stdin(limit=MAX_BATCH_BYTES) if use_stdin else None
    if text is None:
        raise UsageError("--batch - needs piped input.")
    return text


def _item(line: str, number: int) -> Item:
    id = str(number)
    try:
        data = json.loads(line)
        if not isinstance(data, dict):
            raise ValueError("it is not an object")
        if "id" in data:
            if not isinstance(data["id"], str | int) or isinstance(data["id"], bool):
                raise ValueError("id must be a text")
            id = str(data["id"])
        unknown = [name for name in data if name not in _FIELDS]
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}{near(unknown[0], _FIELDS)}")
        for name in ("prompt", "system", "conversation"):
            if name in data and not isinstance(data[name], str):
                raise ValueError(f"{name} must be a text")
        return Item(id, _messages(data), data.get("system"), _params(data.get("params", {})), data.get("conversation"))
    except ValueError as error:
        return Item(id, error=f"Line {number} cannot be used: {error}.")


def _messages(data: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    if ("prompt" in data) == ("messages" in data):
        raise ValueError("it needs either prompt or messages")
    if "prompt" in data:
        messages = [("user", data["prompt"])]
    else:
        if not isinstance(data["messages"], list) or not data["messages"]:
            raise ValueError("messages must be a list that is not empty")
        messages = []
        for index, m in enumerate(data["messages"]):
            if not isinstance(m, dict) or not isinstance(m.get("content"), str) or m.get("role") not in ("system", "user", "assistant"):
                raise ValueError(f"messages[{index}] needs a role (system, user, assistant) and content")
            messages.append((m["role"], m["content"]))
    if messages[-1][0] != "user" or not messages[-1][1].strip():
        raise ValueError("the last message must be the user's and not empty")
    for _, content in messages:
        content.encode("utf-8")  # half a surrogate pair is a ValueError as well
    return tuple(messages)


def _params(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError("params must be an object")
    params: dict[str, Any] = {}
    for name, value in data.items():
        name = name.replace("-", "_")
        if name not in _PARAMS:
            raise ValueError(f"unknown parameter {name!r}{near(name, _PARAMS)}")
        if name == "seed":
            good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
            expected = "a whole number"
        elif name == "max_answer_tokens":
            good, expected = isinstance(value, int) and not isinstance(value, bool) and value > 0, "a whole number of at least 1"
        elif name == "stop":
            value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ()
            good, expected = bool(value) and all(isinstance(s, str) and s for s in value), "a text or a list of texts"
        else:
            try:
                value, good, expected = coerce(KEYS[TURN_KEYS[name]], value), True, ""
            except ValueError as error:
                good, expected = False, str(error)
        if not good:
            raise ValueError(f"{name} must be {expected}")
        params[name] = None if (name, value) == ("max_tokens", "auto") else value
    return params


def run(items: Sequence[Item], controller: TurnController, plan: Plan, out: Out, stderr: Stderr, interrupts: Interrupts) -> int:
    """Run the items and write their lines. Returns the exit code: 0, 9 with failed items, 130 and the like when interrupted."""
    done: set[str] = set()
    writer: Any = out
    if plan.output is not None:
        again = {item.id for item in items}
        writer = _ResultFile(Path(plan.output).expanduser(), resume=plan.resume, force=plan.force, again=again)
        done = writer.done
    interrupts.on_stop, interrupts.on_abort = controller.cancel, controller.abort
    base = secrets.randbelow(1 << 31) if plan.seed is None else plan.seed
    ran = failed = cut = 0
    told: set[str] = set()
    try:
        for index, item in enumerate(items):
            if item.id in done:
                continue
            line, ended = _run_item(item, controller, plan, base + index, stderr, interrupts, told)
            writer.write(json_text({"v": SCHEMA, "id": item.id} | line) + "\n")
            if ended:
                cut = 1
                return interrupts.code or 130
            ran += 1
            failed += not line["ok"]
            if failed and plan.fail_fast:
                break
    finally:
        if writer is not out:
            writer.close()
        _sum_up(len(items), len([item for item in items if item.id in done]), ran, failed, cut, stderr)
    return FAILED_ITEMS if failed else 0


def _sum_up(items: int, done: int, ran: int, failed: int, cut: int, stderr: Stderr) -> None:
    """One line for people: stdout or a file holds one line per item, and nobody counts them. cut: 1 when one was interrupted."""
    left = items - done - ran - cut
    parts = [f"{done:,} were done before"] * (done > 0) + ["1 was interrupted"] * cut + [f"{left:,} did not run"] * (left > 0)
    stderr.notice(f"batch: {failed:,} of {ran:,} items failed" + "".join(f"; {part}" for part in parts))


def _run_item(
    item: Item, controller: TurnController, plan: Plan, seed: int, stderr: Stderr, interrupts: Interrupts, told: set[str]
) -> tuple[dict[str, Any], bool]:
    """The fields of the item's line, and whether the whole batch was interrupted. told: notices that an earlier item has given."""
    if interrupts.code is not None:
        return _error(*interrupts.error), True
    if item.error is not None:
        return _error("usage", item.error, ITEM_FIELDS), False
    try:
        request = _request(item, controller, plan, seed)
    except (StoreError, EngineError) as error:
        return _error(error.code, str(error), error.hint), False
    build = None
    events = controller.run(request, lambda: interrupts.code is not None)
    for event in events:
        if isinstance(event, Started):
            build = event.build.as_dict() if event.build else None
        elif isinstance(event, Failed):
            if interrupts.code is not None and event.code == "interrupted":
                return _error(*interrupts.error), True
            return _error(event.code, event.message, event.hint), False
        elif isinstance(event, Finished):
            if event.finish == "cancelled":
                return _error(*interrupts.error), True
            return {
                "ok": True, "text": event.text, "thinking": event.thinking, "finish": event.finish, "ids_hash": event.ids_hash,
                "usage": event.usage, "timing": event.timing, "seed": event.seed, "build": build,
                **({"conversation": event.conversation_id} if plan.save else {}),
            }, False  # fmt: skip
        elif isinstance(event, Noticed):
            # Which model answers is news once.
            if event.message not in told:
                told.add(event.message)
                show_progress(stderr, event)
        else:
            show_progress(stderr, event)
    raise RuntimeError("the turn ended without saying how")


def _request(item: Item, controller: TurnController, plan: Plan, seed: int) -> TurnRequest:
    """Store what comes before the item's last message; ask for that one."""
    store = controller.store
    system = item.system if item.system is not None else plan.system
    messages = list(item.messages)
    parent_id = None
    conversation_id = None
    source = plan.disk or store
    conversation = source.conversation(item.conversation) if item.conversation is not None else None
    # Before anything of the item is stored: without its build it leaves nothing behind.
    controller.host.resolve(plan.build, conversation)
    if conversation is not None:
        if plan.disk is not None:
            path = source.path_to(conversation.leaf_id)
            conversation = store.add_tree(path, title=conversation.title, settings=conversation.settings)
        conversation_id, parent_id = conversation.id, conversation.leaf_id
    else:
        if messages[0][0] == "system":
            system = messages.pop(0)[1]
        if len(messages) > 1:
            system = controller.settings.chat.system if system is None else system
            conversation_id = store.new_conversation(None, {"system": system} if system else {}).id
    for role, content in messages[:-1]:
        parent_id = store.add_message(conversation_id, parent_id, role, content).id
    return TurnRequest(
        conversation_id, text=messages[-1][1], parent_id=parent_id, system=system, build=plan.build,
        overrides={"seed": seed} | item.params, session=_SESSION, build_first=True,
    )  # fmt: skip


def _error(code: str, message: str, hint: str = "") -> dict[str, Any]:
    return {"ok": False, "error": {"code": code, "message": message, "hint": hint, "exit_code": exit_code(code)}}


class _ResultFile:
    """The output file: appended to, a line at a time, each one on disk before the next item runs."""

    def __init__(self, path: Path, *, resume: bool, force: bool, again: set[str]):
        """again: ids of this batch; what an earlier run could not do of them is done again, and its line goes."""
        self.done: set[str] = set()
        self._again, self._path = again, path
        if path.exists() and not (resume or force):
            raise UsageError(f"{path} exists already.", hint="--resume-batch continues it, --force overwrites it")
        try:
            self._file = open(path, "r+b" if resume and path.exists() else "w+b")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
        if resume:
            self._repair(str(path))

    def _repair(self, name: str) -> None:
        """Note which items are done; drop a last line that was cut, and the failures of items that run again: one line per id."""
        kept, dropped = [], False
        for number, line in enumerate(self._file.read().split(b"\n")[:-1], 1):
            try:
                row = json.loads(decode(line, name))
                id, ok = str(row["id"]), row.get("ok") is True
            except (ValueError, AttributeError, KeyError):
                raise UsageError(f"{name}, line {number} is not a result of a batch.", hint="choose another --batch-output") from None
            if ok:
                self.done.add(id)
            if ok or id not in self._again:
                kept.append(line)
            else:
                dropped = True
        if dropped:
            self._replace(name, b"".join(line + b"\n" for line in kept))
            return
        self._file.seek(sum(len(line) + 1 for line in kept))
        self._file.truncate()

    def _replace(self, name: str, data: bytes) -> None:
        """Give the file other contents, whole or not at all, and go on at its end."""
        path = Path(name)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            file = open(temporary, "xb+")  # noqa: SIM115 - closed by close()
            os.fchmod(file.fileno(), os.fstat(self._file.fileno()).st_mode & 0o777)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise UsageError(f"{name} cannot be written: {error.strerror}.") from error
        self._file.close()
        self._file = file

    def write(self, text: str) -> None:
        """Raises OutputFailed; a line that was cut goes when the batch is resumed."""
        try:
            self._file.write(text.encode("utf-8"))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OutputFailed(f"{self._path} cannot be written: {error.strerror}.", "--resume-batch goes on with the rest") from error

    def close(self) -> None:
        # What a failed write has left in the buffer is tried once more, and was said already.
        with suppress(OSError):
            self._file.close()
