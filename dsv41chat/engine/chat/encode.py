"""Conversations to prompts, for both families. Source: spec chat_encoding, section 3.

    v4 : BOS [effort] [system] turns ... <｜Assistant｜> (<think> | </think>)
    v41: BOS [<｜System｜> [effort] [system]] turns ... <｜Assistant｜> (<think> | </think>)

The last pair is the generation header. A prompt is first a list of segments (`render`), then ids (`encode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import tools as tool_text
from .effort import effort_text
from .markers import ASSISTANT, BOS, END_THINK, EOS, IMAGE, REMINDER, SYSTEM, TASKS, THINK, USER, check_family
from .messages import MalformedConversation, Message, RenderOptions, ToolCall, check_conversation, join_parts
from .segments import Ids, Segment, Special, Text, encode
from .tokenizer import ChatTokenizer

__all__ = [
    "EncodedPrompt",
    "Ids",
    "MalformedConversation",
    "Message",
    "RenderOptions",
    "Segment",
    "Special",
    "Text",
    "ToolCall",
    "encode",
    "encode_prompt",
    "join_parts",
    "render",
]

_BLANK_LINE = Text("\n\n")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's ids and what the other parts must know about them.

    start: where the parser begins: reasoning, content, reasoning_continuation, content_continuation or tool.
    system_end: number of ids before the first turn (mark S). header_start: index of the <｜Assistant｜> that the answer
    follows (of the task token where a task replaces it). tools: tool calls are to be recognised in the answer.
    opened: with start `tool`, the last ids of the prompt, which open the calls block: they belong to the answer's body_ids.
    """

    ids: tuple[int, ...]
    start: str
    system_end: int
    header_start: int
    family: str = "v41"
    tools: bool = False
    opened: tuple[int, ...] = ()


@dataclass
class _Turn:
    """A message on its way into the prompt: its role, its content as segments, and where it came from."""

    role: str
    body: list[Segment]
    message: Message


@dataclass
class _Prompt:
    """Segments so far, and the indices at which the parts of the prompt begin."""

    out: list[Segment] = field(default_factory=list)
    system_end: int = 0
    header_start: int = 0
    opened_start: int | None = None


def render(family: str, messages: Sequence[Message], options: RenderOptions) -> list[Segment]:
    """The segments of a prompt. Assumes a well-formed conversation (`check_conversation`)."""
    return _render(check_family(family), messages, options).out


def encode_prompt(tokenizer: ChatTokenizer, family: str, messages: Sequence[Message], options: RenderOptions) -> EncodedPrompt:
    """Check, render and encode. Raises MalformedConversation, BadEffort, PackIncomplete (a needed marker is absent)."""
    check_conversation(messages, options, check_family(family))
    prompt = _render(family, messages, options)
    # A control token stands at each border, so the parts encode to the same ids as the whole.
    cuts = [prompt.system_end, prompt.header_start, len(prompt.out) if prompt.opened_start is None else prompt.opened_start]
    parts = [encode(prompt.out[a:b], tokenizer) for a, b in zip([0, *cuts], [*cuts, len(prompt.out)])]
    return EncodedPrompt(
        ids=tuple(id for part in parts for id in part),
        start=_start(prompt, messages[-1]),
        system_end=len(parts[0]),
        header_start=len(parts[0]) + len(parts[1]),
        family=family,
        tools=options.has_tools,
        opened=tuple(parts[3]),
    )


def _start(prompt: _Prompt, last: Message) -> str:
    """The parser's first state. A continued part that is still empty has nothing to continue."""
    if prompt.opened_start is not None:
        return "tool"
    match prompt.out[-1]:
        case Special(spelling) if spelling == THINK:
            return "reasoning"
        case Special(spelling) if spelling == ASSISTANT:  # v4, thinking, nothing written yet: the model opens the part
            return "reasoning"
        case Special():
            return "content"
    tail = prompt.out[prompt.header_start :]
    inside = Special(THINK) in tail and Special(END_THINK) not in tail and not _has_body(last)
    return "reasoning_continuation" if inside else "content_continuation"


def _render(family: str, messages: Sequence[Message], options: RenderOptions) -> _Prompt:
    turns = [_Turn(m.role, _content(m), m) for m in messages]
    if family == "v4":
        turns = _merge_users(_hoist_systems(turns))
    _sort_results(turns)
    format_text = tool_text.response_format(family, options)
    effort = effort_text(family, options.effort, options.v4_effort) if options.thinking else ""
    if (options.has_tools or format_text) and not (turns and turns[0].role == "system"):
        turns.insert(0, _Turn("system", [], Message("system")))

    prompt = _Prompt()
    out = prompt.out
    out.append(Special(BOS))
    if family == "v4":
        out += _text(effort)
    elif turns and (effort or turns[0].role == "system"):
        out += [Special(SYSTEM), *_text(effort)]
    prompt.system_end = len(out)

    for i, turn in enumerate(turns):
        before = turns[i - 1] if i else None
        match turn.role:
            case "system":
                out += [Special(SYSTEM)] if i else []
                out += turn.body
                if i == 0:
                    out += [_BLANK_LINE, *tool_text.tools_block(family, options.tools)] if options.has_tools else []
                    out += [_BLANK_LINE, Text(format_text)] if format_text else []
                if family == "v41" and turn.message.tools:
                    out += tool_text.updated_tools(turn.message.tools)
                if i == 0:
                    prompt.system_end = len(out)
            case "user":
                out.append(_BLANK_LINE if before and before.role in ("user", "tool") else Special(USER))
                out += turn.body
                if turn.message.task:
                    _task(prompt, turn.message.task, options)
            case "tool":
                joined = before and (before.role == "tool" or (before.role == "user" and family == "v41"))
                out.append(_BLANK_LINE if joined else Special(USER))
                out += [Text("<tool_result>"), *turn.body, Text("</tool_result>")]
            case "latest_reminder":
                out += [Special(REMINDER), *turn.body]
            case "assistant":
                after_task = before is not None and before.message.task is not None
                _assistant(prompt, turn.message, family, options, last=i == len(turns) - 1 and turn.message.prefix, after_task=after_task)

    ends_in_task = bool(turns) and turns[-1].message.task is not None
    if not (turns and turns[-1].message.prefix) and not ends_in_task:
        prompt.header_start = len(out)
        out += [Special(ASSISTANT), Special(THINK if options.thinking else END_THINK)]
    if options.has_tools and options.tool_choice == "required":
        prompt.opened_start = len(out)
        out += tool_text.calls_open(family)
    return prompt


def _text(text: str) -> list[Segment]:
    return [Text(text)] if text else []


def _sampled(ids: tuple[int, ...]) -> list[Segment]:
    return [Ids(ids, sampled=True)] if ids else []


def _content(m: Message) -> list[Segment]:
    """A message's own text: verbatim ids if there are any, else text with the application's image placeholders."""
    if m.content_ids is not None and m.role != "assistant":
        return [Ids(m.content_ids, images=len(m.images))] if m.content_ids else []
    out: list[Segment] = []
    at = 0
    for offset in m.images:
        out += [*_text(m.content[at:offset]), Special(IMAGE)]
        at = offset
    return out + _text(m.content[at:])


def _hoist_systems(turns: list[_Turn]) -> list[_Turn]:
    """v4: all system texts that are not empty become one system turn at the front."""
    systems = [turn for turn in turns if turn.role == "system"]
    if not systems:
        return turns
    body: list[Segment] = []
    for turn in systems:
        body += [_BLANK_LINE, *turn.body] if body and turn.body else turn.body
    return [_Turn("system", body, Message("system")), *(turn for turn in turns if turn.role != "system")]


def _merge_users(turns: list[_Turn]) -> list[_Turn]:
    """v4: neighbouring user messages are one turn."""
    out: list[_Turn] = []
    for turn in turns:
        if out and turn.role == out[-1].role == "user":
            joiner = [_BLANK_LINE] if out[-1].body and turn.body else []
            out[-1] = _Turn("user", [*out[-1].body, *joiner, *turn.body], turn.message)
        else:
            out.append(turn)
    return out


def _sort_results(turns: list[_Turn]) -> None:
    """Within each run of user and tool turns, put the results into the order of the calls they answer.

    Results fill the places that results have in the run, so user texts stay where they are. An unknown id counts as the
    first call.
    """
    order: dict[str | None, int] = {}
    slots: list[int] = []
    for i, turn in enumerate([*turns, None]):
        if turn is not None and turn.role == "tool":
            slots.append(i)
        elif turn is None or turn.role != "user":
            ranked = sorted((turns[k] for k in slots), key=lambda t: order.get(t.message.tool_call_id, 0))
            for k, result in zip(slots, ranked):
                turns[k] = result
            slots = []
            if turn is not None and turn.role == "assistant":
                order = {call.id: k for k, call in enumerate(turn.message.tool_calls)}


def _task(prompt: _Prompt, task: str, options: RenderOptions) -> None:
    """A task token stands instead of the generation header; `action` follows it."""
    prompt.header_start = len(prompt.out)
    if task == "action":
        prompt.out += [Special(ASSISTANT), Special(THINK if options.thinking else END_THINK)]
    prompt.out.append(Special(TASKS[task]))


def _has_body(m: Message) -> bool:
    return bool(m.body_ids) or (m.body_ids is None and (m.content != "" or bool(m.tool_calls)))


def _assistant(prompt: _Prompt, m: Message, family: str, options: RenderOptions, *, last: bool, after_task: bool) -> None:
    """One answer. last: it is the message that the model continues. after_task: its header was the task's.

    Thinking parts are all or nothing: with declared tools every earlier answer keeps its own, otherwise none does. The
    families differ in what a missing thinking part means: v4 goes by the message, v41 by the mode.
    """
    out = prompt.out
    if not after_task:
        if last:
            prompt.header_start = len(out)
        out.append(Special(ASSISTANT))
        reasoning = _text(m.reasoning or "") if m.reasoning_ids is None else _sampled(m.reasoning_ids)
        keep = options.has_tools or last or (options.keep_reasoning and options.thinking)
        show = keep and ((m.reasoning is not None or bool(m.reasoning_ids)) if family == "v4" else options.thinking)
        if show:
            out += [Special(THINK), *reasoning]
        # A continued answer in thinking mode is closed only when something stands after its thinking part (for v4, calls
        # alone do not count behind a thinking part).
        begun = _has_body(m) and not (show and family == "v4" and m.body_ids is None and m.content == "")
        if begun or not last or not options.thinking:
            out.append(Special(END_THINK))
    if m.body_ids is not None:
        out += _sampled(m.body_ids)
    else:
        out += _text(m.content)
        out += tool_text.calls_block(family, m.tool_calls) if m.tool_calls else []
    if not last:
        out.append(Special(EOS))
