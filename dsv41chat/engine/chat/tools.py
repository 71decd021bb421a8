"""Prompt text of tools: declarations, calls, the order of results, and the response format.

The templates are protocol strings of the released models, byte for byte. Source: spec chat_encoding, sections 3.5 to 3.7.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .markers import DSML
from .messages import RenderOptions, ToolCall
from .segments import Segment, Special, Text, protocol


@dataclass(frozen=True)
class TagNames:
    """The three tags of a calls block. v41 writes a space before each name."""

    calls: str
    invoke: str
    parameter: str


TAGS = {"v4": TagNames("tool_calls", "invoke", "parameter"), "v41": TagNames(" calls", " invoke", " parameter")}

_DECLARATION = """\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<D[calls]>" block like the following:

<D[calls]>
<D[invoke] name="$TOOL_NAME">
<D[parameter] name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</D[parameter]>
...
</D[invoke]>
<D[invoke] name="$TOOL_NAME2">
...
</D[invoke]>
</D[calls]>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the \
value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool \
calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_STRICT = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_JSON_OBJECT_V4 = "You are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY."


def json_text(value: Any) -> str:
    """JSON as prompts write it: `, ` and `: ` between items, non-ASCII kept, keys in the given order."""
    return json.dumps(value, ensure_ascii=False)


def schemas(tools: Sequence[Mapping[str, Any]]) -> str:
    """One JSON object per line with exactly the keys name, description and parameters."""
    lines = []
    for tool in tools:
        function = tool.get("function", tool)  # declarations wrapped as {"type": "function", "function": {...}} are common
        description = function.get("description") or ""
        lines.append(json_text({"name": function["name"], "description": description, "parameters": function.get("parameters")}))
    return "\n".join(lines)


def _deferred(tool: Mapping[str, Any]) -> bool:
    return bool(tool.get("defer_loading") or tool.get("function", {}).get("defer_loading"))


def tools_block(family: str, tools: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """The declaration of all tools that are not deferred."""
    tags = TAGS[family]
    head = _DECLARATION
    for name in ("calls", "invoke", "parameter"):
        head = head.replace(f"D[{name}]", DSML + getattr(tags, name))
    visible = schemas([tool for tool in tools if not _deferred(tool)])
    # Without a visible tool v4 has one line break less, v41 keeps them all.
    strict = _STRICT[1:] if family == "v4" and not visible else _STRICT
    return [*protocol(head), Text(visible), Text(strict)]


def updated_tools(tools: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """The list that a v41 system message with tools of its own ends in (deferred ones included)."""
    return [Text("\n\n### Updated Tool Schemas\n\n" + schemas(tools))]


def response_format(family: str, options: RenderOptions) -> str | None:
    """The sentence that asks for JSON, or None. It is prompt text: nothing is enforced."""
    wanted = options.response_format
    if not isinstance(wanted, str):
        return _FORMAT + json_text(wanted)
    if wanted != "json_object":
        return None
    return _JSON_OBJECT_V4 if family == "v4" else _FORMAT + json_text({"type": "json_object"})


def open_tag(name: str, attributes: str = "") -> list[Segment]:
    return [Text("<"), Special(DSML), Text(f"{name}{attributes}>")]


def close_tag(name: str) -> list[Segment]:
    return [Text("</"), Special(DSML), Text(f"{name}>")]


def calls_open(family: str) -> list[Segment]:
    """The begin of a calls block; the generation header of a required call ends in it."""
    return [Text("\n\n"), *open_tag(TAGS[family].calls), Text("\n")]


def calls_block(family: str, calls: Sequence[ToolCall]) -> list[Segment]:
    """The calls of one assistant message. Values are raw: a value that spells a closing tag stays text."""
    out = calls_open(family)
    for call in calls:
        out += [*_invoke(family, call), Text("\n")]
    return out + close_tag(TAGS[family].calls)


def _invoke(family: str, call: ToolCall) -> list[Segment]:
    tags = TAGS[family]
    out = [*open_tag(tags.invoke, f' name="{call.name}"'), Text("\n")]
    parameters = call_parameters(call.arguments)
    for k, (key, value) in enumerate(parameters.items()):
        string = isinstance(value, str)
        out += [Text("\n" if k else ""), *open_tag(tags.parameter, f' name="{key}" string="{"true" if string else "false"}"')]
        out += [Text(value if string else json_text(value)), *close_tag(tags.parameter)]
    if parameters or family == "v41":
        out.append(Text("\n"))
    return out + close_tag(tags.invoke)


def call_parameters(arguments: str) -> dict[str, Any]:
    """The parameters of a call. Arguments that are no JSON object become the one text parameter `arguments`."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
