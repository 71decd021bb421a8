"""Sampled ids to events: thinking, answer and tool calls, told apart by id.

Text that merely spells `</think>` or a tool tag stays text, because structure is read from control ids only. What the
events add up to does not depend on how the ids arrive. Source: spec chat_encoding, section 6.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from .detokenize import Detokenizer
from .markers import DSML, END_THINK, check_family
from .tokenizer import ChatTokenizer

STARTS = ("reasoning", "content", "reasoning_continuation", "content_continuation", "tool")


@dataclass(frozen=True)
class Delta:
    """More text of one channel: thinking or answer. Complete characters, never empty."""

    channel: str
    text: str


@dataclass(frozen=True)
class ReasoningEnd:
    """The thinking part is over (closed, or a tool call began inside it)."""


@dataclass(frozen=True)
class ToolCallStart:
    index: int
    name: str


@dataclass(frozen=True)
class ToolArgsDelta:
    """More of the arguments' JSON text. It is not checked while it streams."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """arguments: the whole text. valid: the call was closed and its arguments are a JSON object; else never execute it."""

    index: int
    arguments: str
    valid: bool


@dataclass(frozen=True)
class Finish:
    """reason: tool_calls when the model stopped after a call, else what `finish` was given."""

    reason: str


ParserEvent = Delta | ReasoningEnd | ToolCallStart | ToolArgsDelta | ToolCallEnd | Finish

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_CALLS = ("calls", "tool_calls")


class StreamParser:
    """Feed sampled ids (never EOS), then `finish` once.

    start: EncodedPrompt.start. tools: tool calls are recognised; without, their markup is ordinary text. Tags of both
    families are accepted. opened: EncodedPrompt.opened.

    channel: the one that text goes to now. finished: the calls block is closed, everything after it is ignored.
    reasoning_ids, body_ids: the fed ids as a later prompt repeats them (see messages.Message).
    """

    def __init__(self, tokenizer: ChatTokenizer, family: str, start: str, tools: bool = False, opened: tuple[int, ...] = ()):
        check_family(family)
        if start not in STARTS:
            raise ValueError(f"unknown start {start!r}: expected one of {', '.join(STARTS)}")
        self._detokenizer = Detokenizer(tokenizer)
        self._end_think = tokenizer.find_marker(END_THINK)
        self._dsml = tokenizer.find_marker(DSML) if tools else None
        self._tools = tools
        self._state = "tool" if start == "tool" else start.removesuffix("_continuation")
        self._leading = start in ("reasoning", "content")  # line breaks at the begin of a part are not shown
        self._held = ""  # text that is shown only if no marker follows it
        self._held_ids = 0  # how many of the last ids lie wholly in the held text
        self._reasoning_ids: list[int] = []
        self._body_ids: list[int] = list(opened) if start == "tool" else []
        self._events: list[ParserEvent] = []
        self._calls = _CallReader(self._events)

    @property
    def channel(self) -> str:
        return "thinking" if self._state == "reasoning" else "answer"

    @property
    def finished(self) -> bool:
        return self._calls.finished

    @property
    def reasoning_ids(self) -> tuple[int, ...]:
        return tuple(self._reasoning_ids)

    @property
    def body_ids(self) -> tuple[int, ...]:
        return tuple(self._body_ids)

    def feed(self, id: int) -> list[ParserEvent]:
        if self.finished:
            self._body_ids.append(id)
        elif id == self._dsml and self._opens_tag():
            self._marker(id)
        elif id == self._end_think and self._state != "tool":
            self._close_thinking(id)
        else:
            (self._reasoning_ids if self._state == "reasoning" else self._body_ids).append(id)
            text = self._detokenizer.feed(id)
            if self._state == "tool":
                self._calls.text(text)
            else:
                self._text(text)
        return self._take()

    def finish(self, reason: str) -> list[ParserEvent]:
        """reason: why generation ended: stop, length, cancelled or a front end's own word."""
        self._detokenizer.finish()
        if self._state == "tool":
            self._calls.cut()
        else:
            self._emit(self._held)
            self._held = ""
        self._events.append(Finish("tool_calls" if reason == "stop" and self._calls.count else reason))
        return self._take()

    def _take(self) -> list[ParserEvent]:
        events = self._events[:]
        self._events.clear()
        return events

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(Delta(self.channel, text))

    def _text(self, text: str) -> None:
        """Show text, but keep what a marker would swallow: line breaks, then the begin of a tag."""
        if self._leading:
            text = text.lstrip("\n")
            self._leading = not text
        if not text:
            self._held_ids += 1  # half a character, or a line break that is not shown
            return
        whole = self._held + text
        shown = whole
        if self._tools:
            shown = shown.removesuffix("</") if shown.endswith("</") else shown.removesuffix("<")
        shown = shown.rstrip("\n")
        new = whole[len(shown) :]
        # An id that is partly shown belongs to what comes before the marker.
        self._held_ids = self._held_ids + 1 if new == whole else int(len(new) >= len(text))
        self._held = new
        self._emit(shown)

    def _close_thinking(self, id: int) -> None:
        self._detokenizer.finish()
        if self._state == "content":
            self._body_ids.append(id)  # a second one means nothing
            return
        if "<" in self._held:
            self._emit(self._held)
        self._events.append(ReasoningEnd())
        self._state, self._held, self._held_ids, self._leading = "content", "", 0, True

    def _opens_tag(self) -> bool:
        """Whether a marker id here belongs to a tag; elsewhere it is text, as in an answer that explains the markup."""
        if self._state == "tool":
            return self._calls.expects_marker
        return self._held.endswith("<")

    def _marker(self, id: int) -> None:
        """A tool tag's marker. The held `<` or `</` before it says whether the tag opens or closes."""
        self._detokenizer.finish()
        if self._state == "reasoning":
            # The ids of the tag's begin move to the body, where the next prompt will repeat them behind a </think>.
            cut = len(self._reasoning_ids) - self._held_ids
            self._body_ids += self._reasoning_ids[cut:]
            del self._reasoning_ids[cut:]
            self._events.append(ReasoningEnd())
        if self._state != "tool":
            self._calls.text(self._held)
            self._state, self._held, self._held_ids = "tool", "", 0
        self._body_ids.append(id)
        self._calls.marker()


class _CallReader:
    """Tags, names and values of a calls block; writes events into the parser's list."""

    def __init__(self, events: list[ParserEvent]):
        self._events = events
        self.count = 0
        self.finished = False
        self._where = "between"  # between tags, in a tag's header, or in a value
        self._before = ""  # the last two characters before a marker
        self._closing = False
        self._header = ""
        self._quoted = False  # the header read so far ends inside double quotes
        self._held = ""  # end of a value that may be the begin of a closing tag
        self._string = False
        self._open = False  # a call is open
        self._arguments = ""
        self._parameters = 0

    def text(self, text: str) -> None:
        while text and not self.finished:
            if self._where != "header":
                self._before = (self._before + text)[-2:]
                if self._where == "value":
                    self._value(text)
                return
            end = self._header_end(text)
            if end < 0:
                self._header += text
                return
            self._header += text[:end]
            text = text[end + 1 :]
            self._before = ""
            self._tag()

    @property
    def expects_marker(self) -> bool:
        """Only the begin of a closing tag ends a value."""
        return self._where != "value" or self._held == "</"

    def marker(self) -> None:
        """The marker of a tag: a value ends here, and the tag's header begins."""
        if self._where == "value" and self._string:
            self._argument('"')
        self._closing = self._before == "</"
        self._where, self._header, self._quoted, self._held, self._before = "header", "", False, "", ""

    def cut(self) -> None:
        """The stream or the block ended: a call that is still open stays incomplete."""
        if self._open:
            if self._where == "value" and self._held:
                self._argument(self._shown(self._held))
            self._end(closed=False)

    def _header_end(self, text: str) -> int:
        """Index in text of the first > outside double quotes, or -1."""
        for i, char in enumerate(text):
            if char == '"':
                self._quoted = not self._quoted
            elif char == ">" and not self._quoted:
                return i
        return -1

    def _tag(self) -> None:
        header = self._header.strip(" ")
        kind = re.split(r"\s", header, maxsplit=1)[0]
        attributes = dict(_ATTRIBUTE.findall(header))
        self._where = "between"
        if self._closing:
            if kind == "invoke" and self._open:
                self._end(closed=True)
            elif kind in _CALLS:
                self.cut()
                self.finished = True
        elif kind == "invoke":
            self.cut()
            self._open, self._arguments, self._parameters = True, "", 0
            self._events.append(ToolCallStart(self.count, attributes.get("name", "")))
            self.count += 1
        elif kind == "parameter" and self._open:
            self._where, self._string = "value", attributes.get("string") == "true"
            key = json.dumps(attributes.get("name", ""), ensure_ascii=False)
            self._argument((", " if self._parameters else "{") + key + ": " + ('"' if self._string else ""))
            self._parameters += 1

    def _value(self, text: str) -> None:
        whole = self._held + text
        shown = whole.removesuffix("</") if whole.endswith("</") else whole.removesuffix("<")
        self._held = whole[len(shown) :]
        if shown:
            self._argument(self._shown(shown))

    def _shown(self, value: str) -> str:
        return json.dumps(value, ensure_ascii=False)[1:-1] if self._string else value

    def _argument(self, text: str) -> None:
        self._arguments += text
        self._events.append(ToolArgsDelta(self.count - 1, text))

    def _end(self, closed: bool) -> None:
        valid = False
        if closed:
            self._argument("}" if self._parameters else "{}")
            try:
                valid = isinstance(json.loads(self._arguments), dict)
            except (ValueError, RecursionError):
                valid = False
        self._open = False
        self._events.append(ToolCallEnd(self.count - 1, self._arguments, valid))
