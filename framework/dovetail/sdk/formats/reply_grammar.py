"""Parts of replies as structural grammars: the arguments that a tool takes, and messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import Messages

Tools = Sequence[Mapping[str, Any]]


def chosen(tools: Tools, choice: Any) -> Tools:
    """Return the tools that a `tool_choice` allows.

    Raises:
        RequestError: It names a tool that is not there.
    """
    if not isinstance(choice, Mapping):
        return tools
    name = choice.get("function", {}).get("name") if isinstance(choice.get("function"), Mapping) else None
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        text = f"tool_choice names the function {name!r}, which is not in tools: {names}"
        raise RequestError(text, param="tool_choice", code="invalid_value")
    return found


def arguments_schema(tool: Mapping[str, Any]) -> Any:
    """Return the JSON schema of a tool's arguments, which are an object.

    Raises:
        RequestError: It admits none.
    """
    given = tool["function"].get("parameters")
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kinds = given.get("type", "object")
    if isinstance(kinds, list) and "object" in kinds:
        return {**given, "type": "object"}
    if kinds and kinds != "object" and isinstance(kinds, (str, list)):
        text = f"tools: the arguments of {tool['function']['name']!r} have the type {json.dumps(kinds)}"
        hint = "arguments are an object: give 'type': 'object', and what it holds in 'properties'"
        raise RequestError(f"{text}; {hint}", param="tools", code="invalid_value")
    return {"type": "object", **given}


def other_messages(messages: Messages, *headers: str) -> Mapping[str, Any]:
    """Describe the messages before the last: any number of thinking and of free text under the given headers."""
    end = messages.ends[0] + messages.start + messages.role
    tags = [
        {"type": "tag", "begin": header + messages.body, "content": {"type": "any_text"}, "end": end}
        for header in (messages.thinking, *headers)
    ]
    return {"type": "tags_with_separator", "tags": tags, "separator": ""}


def answer_message(messages: Messages, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Describe the message of the answer with the given content, up to the end of the reply."""
    header = {"type": "const_string", "value": messages.answer + messages.body}
    return {"type": "sequence", "elements": [header, content]}
