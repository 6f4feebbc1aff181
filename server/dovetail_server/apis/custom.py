"""Custom tools: a call of one is a text. To the model each is a function of one parameter, whatever the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from dovetail.contracts.requests import JsonObject
from dovetail.processing.refusals import wrong
from dovetail_server.apis.lark import MAX_CHARS, expression_of
from dovetail_server.schema.common import RequestModel

INPUT = "input"
"""The only parameter of a custom tool, as a function."""


class ToolText(RequestModel):
    """Any text."""

    type: Literal["text"]


@dataclass(slots=True)
class CustomTools:
    """The grammars of a body's custom tools.

    Attributes:
        unenforced: Places of grammars that the model is told of, and that nothing enforces.
        preferred: Places of grammars that are enforced where something here can, by the functions' names.
        num_lark: Characters of Lark grammars so far.
    """

    unenforced: list[str] = field(default_factory=list)
    preferred: dict[str, str] = field(default_factory=dict)
    num_lark: int = 0

    def as_function(self, name: str, about: str, grammar: tuple[str, str] | None, place: str) -> JsonObject:
        """Return a custom tool as a function of one text.

        A regular expression is enforced, or the request refused; a Lark grammar is enforced where that is possible.

        Args:
            name: What the model calls it.
            about: Its description, or nothing.
            grammar: What its text must match, syntax (`regex` or `lark`) and definition; None: any text.
            place: Where the grammar stands in the body.
        """
        value: JsonObject = {"type": "string"}
        made: JsonObject = {"name": name, "parameters": object_schema({INPUT: value}, [INPUT])}
        if grammar is not None:
            syntax, definition = grammar
            about += f"\n\n`{INPUT}` must match this {syntax} grammar:\n{definition}"
            if syntax == "regex":
                value["pattern"] = f"^(?:{definition})$"
                made["strict"] = True
            elif (found := self._lark(definition)) is not None:
                value["pattern"] = f"^(?:{found})$"
                self.preferred[name] = place
            else:
                self.unenforced.append(place)
        return {**made, "description": about.strip()} if about.strip() else made

    def _lark(self, definition: str) -> str | None:
        """Return the expression of a Lark grammar, if it has one; all of a request together may be as long as one."""
        self.num_lark += len(definition)
        return None if self.num_lark > MAX_CHARS else expression_of(definition)


def check_type(name: str, kind: str, types: Mapping[str, str]) -> None:
    """See that a `tool_choice` gives a tool the type that it is of: a call of a custom tool has another form.

    Args:
        name: The tool that it names; another error is told of one that is not there.
        kind: The type that it gives.
        types: The types of the tools, by name.

    Raises:
        RequestError: The tool is of another type.
    """
    if types.get(name, kind) != kind:
        raise wrong(f"tool_choice: the type of {name!r} is {types[name]!r} in tools (given: {kind!r})", "tool_choice")


def object_schema(properties: JsonObject, required: list[str]) -> JsonObject:
    """Return the schema of an object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool out of a function's arguments; of what was cut off, as much as there is."""
    for end in ("", '"}', "}"):
        try:
            found = msgspec.json.decode(arguments + end)
        except msgspec.MsgspecError:
            continue
        if isinstance(found, dict) and isinstance(found.get(INPUT), str):
            return str(found[INPUT])
        break
    return arguments


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that a custom tool is to the model, as JSON."""
    return msgspec.json.encode({INPUT: text}).decode()
