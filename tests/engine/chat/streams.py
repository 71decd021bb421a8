"""Run a parser and add up what it says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dsv41chat.engine.chat.stream_parser import Delta, Finish, StreamParser, ToolArgsDelta, ToolCallEnd, ToolCallStart


@dataclass
class Collected:
    thinking: str = ""
    answer: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = ""


def collect(parser: StreamParser, ids: Iterable[int], finish: str) -> Collected:
    """Feed, finish, add up; checks on the way that deltas are whole and that call ends repeat the deltas."""
    events = [event for id in ids for event in parser.feed(id)]
    events += parser.finish(finish)
    got = Collected()
    for event in events:
        match event:
            case Delta(channel, text):
                assert text and text.encode()
                setattr(got, channel, getattr(got, channel) + text)
            case ToolCallStart(index, name):
                assert index == len(got.calls)
                got.calls.append((name, ""))
            case ToolArgsDelta(index, text):
                got.calls[index] = (got.calls[index][0], got.calls[index][1] + text)
            case ToolCallEnd(index, arguments, _):
                assert got.calls[index][1] == arguments
            case Finish(reason):
                got.finish = reason
    assert isinstance(events[-1], Finish)
    return got
