"""The conversation that goes into a prompt: plain values, no ids of any particular tokenizer except verbatim ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import EngineError
from .markers import TASKS

ROLES = ("system", "user", "assistant", "tool", "latest_reminder")


class MalformedConversation(EngineError):
    """Messages in an order, or with values, that no prompt is defined for."""

    code = "usage"


@dataclass(frozen=True)
class ToolCall:
    """One call of an assistant message. arguments: JSON text as the model produced it (kept even when it is no valid JSON)."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message.

    role: one of ROLES; `developer` is read as system.
    content: plain text, whatever it spells. images: character offsets in content at which the application inserts an
    image placeholder (v41; user and tool messages).
    reasoning: None means that the answer was given without a thinking part ("" is an empty one).
    prefix: the model continues this (last, assistant) message. tools: declared by this system message (v41).
    task: a short-output task of a user message (markers.TASKS).
    content_ids: the ids of this text as once encoded; they are inserted instead of encoding content again. They may hold
    no control id but one image placeholder per entry of images.
    reasoning_ids, body_ids: the sampled ids of an answer, between <think> and </think> and after </think> up to EOS
    (tool calls included). Each is inserted instead of the text it stands for; body_ids also instead of tool_calls. For a
    prefix message an empty body counts as "not begun".
    """

    role: str
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    prefix: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    content_ids: tuple[int, ...] | None = None
    reasoning_ids: tuple[int, ...] | None = None
    body_ids: tuple[int, ...] | None = None
    images: tuple[int, ...] = ()
    task: str | None = None

    def __post_init__(self) -> None:
        if self.role == "developer":
            object.__setattr__(self, "role", "system")


@dataclass(frozen=True)
class RenderOptions:
    """How a conversation is put to the model.

    thinking: with a thinking part; effort counts only then. tools: JSON function declarations {name, description,
    parameters, defer_loading}. tool_choice: auto, none or required. response_format: "text", "json_object" or a JSON schema.
    keep_reasoning: in thinking mode, earlier answers keep their thinking part although no tools are declared.
    v4_effort: which effort texts a V4 pack was trained with (effort.detect_v4_profile).
    """

    thinking: bool
    effort: str | int = "high"
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    response_format: str | Mapping[str, Any] = "text"
    keep_reasoning: bool = False
    v4_effort: str = "official"

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


def join_parts(parts: Sequence[str | None]) -> tuple[str, tuple[int, ...]]:
    """(content, images) of a message given as parts: texts, and None for each image. Parts are joined by a blank line."""
    content, images = "", []
    for k, part in enumerate(parts):
        content += "\n\n" if k else ""
        if part is None:
            images.append(len(content))
        else:
            content += part
    return content, tuple(images)


def check_conversation(messages: Sequence[Message], options: RenderOptions, family: str) -> None:
    """Raise MalformedConversation unless a prompt is defined for these messages."""
    if not messages:
        raise MalformedConversation("a prompt needs at least one message")
    if options.tool_choice not in ("auto", "none", "required"):
        raise MalformedConversation(f"tool_choice {options.tool_choice!r} is not auto, none or required")
    if isinstance(options.response_format, str) and options.response_format not in ("text", "json_object"):
        raise MalformedConversation(f"response format {options.response_format!r} is neither text, json_object nor a schema")
    last = len(messages) - 1
    if messages[last].prefix and options.has_tools and options.tool_choice == "required":
        raise MalformedConversation("tool_choice required cannot continue a message that has already begun")
    due: set[str] | None = None  # call ids still to be answered; None outside the results of an assistant message
    for i, m in enumerate(messages):
        at = f"messages[{i}]"
        if m.role not in ROLES:
            raise MalformedConversation(f"{at}: unknown role {m.role!r}", f"use one of {', '.join(ROLES)}")
        if m.prefix and (m.role != "assistant" or i != last):
            raise MalformedConversation(f"{at}: only a last message of the assistant can be continued")
        _check_extras(m, at, family, messages[i + 1] if i < last else None)
        if m.role == "tool":
            if due is None or m.tool_call_id not in due:
                raise MalformedConversation(f"{at}: the result {m.tool_call_id!r} does not follow the call that it answers")
            due.discard(m.tool_call_id)
            continue
        if due:
            raise MalformedConversation(f"{at}: the call {min(due)!r} has no result yet")
        due = {call.id for call in m.tool_calls} if m.role == "assistant" and m.tool_calls else None
        if due is not None and len(due) != len(m.tool_calls):
            raise MalformedConversation(f"{at}: two calls share one id")
        if m.role == "latest_reminder" and i and messages[i - 1].role == "latest_reminder":
            raise MalformedConversation(f"{at}: two reminders in a row")
    if due and not messages[last].prefix:
        raise MalformedConversation(f"the call {min(due)!r} has no result yet")


def _check_extras(m: Message, at: str, family: str, following: Message | None) -> None:
    """Fields that only some roles or families have."""
    if m.tool_calls and m.role != "assistant":
        raise MalformedConversation(f"{at}: only the assistant calls tools")
    if m.images:
        if family != "v41" or m.role not in ("user", "tool"):
            raise MalformedConversation(f"{at}: images are understood in user and tool messages of V4.1 only")
        if m.content_ids is None and (list(m.images) != sorted(m.images) or not 0 <= m.images[0] <= m.images[-1] <= len(m.content)):
            raise MalformedConversation(f"{at}: image offsets must ascend within the text")
    if m.task is not None:
        if m.role != "user" or m.task not in TASKS:
            raise MalformedConversation(f"{at}: unknown task {m.task!r}", f"user messages can ask for {', '.join(TASKS)}")
        if following is not None and following.role != "assistant":
            raise MalformedConversation(f"{at}: a task must be the end of the user's turn")
