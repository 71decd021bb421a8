"""A user's file as windows of token ids, each with the ids that are scored.

    *.npy     a flat array of token ids, taken as they are (also for a build without a tokenizer)
    *.jsonl   one item a line: a text ("..." or {"text": "..."}), or a conversation {"messages": [{"role", "content"}, ...]} with optional
              "thinking" and "effort", whose last message must be the assistant's: its answer is scored, the rest is context
    other     UTF-8 text

Texts are cut into windows of `window` ids that start `stride` ids apart; a window's ids that an earlier one has scored are context only.
A text's window begins with the begin-of-text id, so that its first id has a context too. A conversation is one window, whatever its length.
Lines that are not UTF-8, or no item, are skipped and counted. Source: spec, checkpoints, section 7.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv41chat.ui.output import UsageError

if TYPE_CHECKING:
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer

_BLOCK_CHARACTERS = 1 << 18


@dataclass(frozen=True)
class Window:
    """ids[first:] are scored, each from the logits of the id before it; first >= 1."""

    ids: tuple[int, ...]
    first: int

    @property
    def scored(self) -> int:
        return len(self.ids) - self.first


@dataclass(frozen=True)
class Cutting:
    """window, stride: in ids; tokens: stop after so many scored ids, None: all. bos: texts' windows begin with it. longest: ids a build holds."""

    window: int
    stride: int
    tokens: int | None = None
    bos: bool = True
    longest: int = 1 << 30


@dataclass(frozen=True)
class Corpus:
    """windows, and what became of the file. sha256: of the file. skipped: lines that could not be decoded; too_long: conversations beyond
    what the build holds. ids_sha256: of all windows with what is scored: equal digests mean that two builds saw the same."""

    name: str
    sha256: str
    windows: tuple[Window, ...]
    skipped: int
    too_long: int
    ids_sha256: str

    @property
    def scored(self) -> int:
        return sum(window.scored for window in self.windows)

    def described(self) -> dict[str, Any]:
        """As it stands in a result."""
        return {
            "name": self.name, "sha256": self.sha256, "ids_sha256": self.ids_sha256, "windows": len(self.windows), "tokens": self.scored,
            "context_tokens": sum(window.first for window in self.windows), "skipped": self.skipped, "too_long": self.too_long,
        }  # fmt: skip


def read_corpus(path: Path, tokenizer: ChatTokenizer | None, family: str, vocab: int, cutting: Cutting) -> Corpus:
    """Raises UsageError for a file that is not there, holds nothing to score, or does not fit the build."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}.", hint="--corpus FILE") from error
    if tokenizer is None and path.suffix != ".npy":
        raise UsageError("This build has no tokenizer.json, so it cannot read text.", hint="--corpus IDS.npy, an array of token ids")
    reader = _Reader(tokenizer, family, cutting)
    windows: list[Window] = []
    left = cutting.tokens
    for window in reader.windows(path, data):
        if left is not None:
            if left <= 0:
                break
            if window.scored > left and not reader.whole:
                window = Window(window.ids[: window.first + left], window.first)
            left -= window.scored
        windows.append(window)
    if not windows:
        why = f": {reader.skipped:,} lines could not be read" if reader.skipped else ""
        raise UsageError(f"{path.name} has nothing to score{why}.", hint="dsv41chat eval ppl -h")
    largest = max(max(window.ids) for window in windows)
    if largest >= vocab or min(min(window.ids) for window in windows) < 0:
        raise UsageError(f"{path.name} holds the token id {largest}; this build has the ids 0 to {vocab - 1}.", hint="--corpus of this tokenizer")
    digest = hashlib.sha256()
    for window in windows:
        digest.update(np.array([len(window.ids), window.first, *window.ids], "<u4").tobytes())
    return Corpus(path.name, hashlib.sha256(data).hexdigest(), tuple(windows), reader.skipped, reader.too_long, digest.hexdigest())


class _Reader:
    """Counts what it leaves out. whole: the last window is a conversation, which is not cut."""

    def __init__(self, tokenizer: ChatTokenizer | None, family: str, cutting: Cutting):
        self.tokenizer, self.family, self.cutting = tokenizer, family, cutting
        self.skipped = self.too_long = 0
        self.whole = False

    def windows(self, path: Path, data: bytes) -> Iterator[Window]:
        if path.suffix == ".npy":
            yield from self._array(path)
        elif path.suffix == ".jsonl":
            for line in data.splitlines():
                if line.strip():
                    yield from self._item(line)
        else:
            yield from self._cut(self._text_ids(data), [self._bos()] if self.cutting.bos else [])

    def _array(self, path: Path) -> Iterator[Window]:
        try:
            ids = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise UsageError(f"{path.name} is no array of numpy: {error}.") from error
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise UsageError(f"{path.name} holds {ids.dtype} {list(ids.shape)}; a flat array of whole numbers is needed.")
        yield from self._cut(iter(ids.tolist()), [])

    def _item(self, line: bytes) -> Iterator[Window]:
        from dsv41chat.engine.chat.effort import BadEffort
        from dsv41chat.engine.chat.messages import MalformedConversation

        try:
            item = json.loads(line.decode("utf-8"))
            item = {"text": item} if isinstance(item, str) else item
            if isinstance(item.get("text"), str):
                made = list(self._cut(iter(self.tokenizer.encode_text(item["text"])), [self._bos()] if self.cutting.bos else []))
            else:
                made = [self._conversation(item)]
        except (ValueError, TypeError, LookupError, AttributeError, MalformedConversation, BadEffort):
            self.skipped += 1
            return
        self.whole = "text" not in item
        for window in made:
            if len(window.ids) > self.cutting.longest:
                self.too_long += 1
            else:
                yield window

    def _conversation(self, item: dict[str, Any]) -> Window:
        """The ids of the chat itself, up to the end id of the last answer. Raises ValueError where nothing can be scored."""
        from dsv41chat.engine.chat.encode import Message, RenderOptions, encode_prompt
        from dsv41chat.engine.chat.markers import END_THINK, EOS

        messages = [Message(m["role"], m["content"], reasoning=m.get("reasoning")) for m in item["messages"]]
        answer = messages.pop()
        if answer.role != "assistant":
            raise ValueError("the last message is not the assistant's")
        thinking = bool(item.get("thinking", answer.reasoning is not None))
        options = RenderOptions(thinking=thinking, effort=item.get("effort", "high"))
        ids = list(encode_prompt(self.tokenizer, self.family, messages, options).ids)
        first = len(ids)
        if thinking:
            ids += [*self.tokenizer.encode_text(answer.reasoning or ""), self.tokenizer.marker(END_THINK)]
        ids += [*self.tokenizer.encode_text(answer.content), self.tokenizer.marker(EOS)]
        return Window(tuple(ids), first)

    def _text_ids(self, data: bytes) -> Iterator[int]:
        """Ids of the lines that are UTF-8, read block by block at line ends, so that a cap does not encode all of a long file."""
        block: list[str] = []
        size = 0
        for line in data.splitlines(keepends=True):
            try:
                block.append(line.decode("utf-8"))
            except UnicodeDecodeError:
                self.skipped += 1
                continue
            size += len(line)
            if size >= _BLOCK_CHARACTERS:
                yield from self.tokenizer.encode_text("".join(block))
                block, size = [], 0
        yield from self.tokenizer.encode_text("".join(block))

    def _cut(self, ids: Iterator[int], head: list[int]) -> Iterator[Window]:
        """Windows over a stream of ids; `head` stands before each one and is never scored."""
        window, stride = self.cutting.window, self.cutting.stride
        held: list[int] = []
        scored = 0 if head else 1  # of `held`: what needs no scoring any more
        for id in ids:
            held.append(id)
            if len(held) == window:
                yield Window((*head, *held), len(head) + scored)
                held = held[stride:]
                scored = max(len(held), 0 if head else 1)
        if len(held) > scored:
            yield Window((*head, *held), len(head) + scored)

    def _bos(self) -> int:
        from dsv41chat.engine.chat.markers import BOS

        return self.tokenizer.marker(BOS)
