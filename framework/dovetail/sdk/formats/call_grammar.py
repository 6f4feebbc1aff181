"""Tool calls as structural grammars, in the shape in which each format writes them.

For `ToolParser.grammar`. `calls_grammar` puts calls together, alone or in one section; the functions below it write one
call's arguments: as JSON, as tags around values, or as Python's keywords. What the grammar allows, the format's parser
reads back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.sdk.formats.presence import presences
from dovetail.sdk.formats.reply_grammar import arguments_schema, chosen
from dovetail.sdk.formats.schema_types import properties_of
from dovetail.sdk.formats.tagged_values import tagged_value
from dovetail.sdk.formats.tags import CDATA_START, Tags, matchers

Node = Mapping[str, Any]
Tool = Mapping[str, Any]
NOTHING: Node = {"type": "const_string", "value": ""}


def text(value: str) -> Node:
    """Describe a fixed text."""
    return {"type": "const_string", "value": value}


def sequence(*elements: Node) -> Node:
    """Describe parts that follow each other."""
    return {"type": "sequence", "elements": [*elements]}


def optional(node: Node) -> Node:
    """Describe a part that may be missing."""
    return {"type": "or", "elements": [node, NOTHING]}


def name_of(tool: Tool) -> str:
    """Return a tool's name."""
    return str(tool["function"]["name"])


def json_arguments(tool: Tool) -> Node:
    """Describe a call's arguments as a JSON object."""
    return {"type": "json_schema", "json_schema": arguments_schema(tool)}


def calls_grammar(
    tools: Sequence[Tool],
    choice: Any,
    parallel: bool,
    call: Callable[[Tool], tuple[str, Node, str]],
    *,
    section: tuple[str, str] | None = None,
    separator: str = "",
    trigger: str,
    before: Node | None = None,
    instead: Node | None = None,
) -> GrammarSpec:
    """Describe the calls that a `tool_choice` allows.

    Args:
        tools: As OpenAI writes them.
        choice: `auto`: free text in which calls may stand; else calls and nothing more.
        parallel: Whether more than one call may be made.
        call: What stands before a tool's arguments, the arguments, and what stands behind them.
        section: What stands around all calls together, where the format has such markers.
        separator: What stands between two calls.
        trigger: What begins a call, or the section of calls, in free text.
        before: What stands before the first call, where `choice` is not `auto`, or `instead` is given.
        instead: What may stand in place of the calls where `choice` is `auto`, for formats whose calls do not stand in
            free text.
    """
    tags = [
        {"type": "tag", "begin": begin, "content": content, "end": end}
        for begin, content, end in map(call, chosen(tools, choice))
    ]
    only_one = not parallel or isinstance(choice, Mapping)
    run: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }
    node: Node = run if section is None else {"type": "tag", "begin": section[0], "content": run, "end": section[1]}
    if choice == "auto" and instead is not None:
        node = {"type": "or", "elements": [instead, node]}
    elif choice == "auto":
        tags = tags if section is None else [dict(node)]
        node = {
            "type": "triggered_tags",
            "triggers": [trigger],
            "tags": [{key: value for key, value in tag.items() if key != "type"} for tag in tags],
            "stop_after_first": only_one or section is not None,
        }
    if before is not None and (choice != "auto" or instead is not None):
        node = sequence(before, node)
    return GrammarSpec(kind=Kind.STRUCTURAL, source=json.dumps({"type": "structural_tag", "format": node}))


def tagged_arguments(
    tool: Tool,
    tags: Tags,
    *,
    key: Callable[[str, bool], str] | None = None,
    behind_key: str = "",
    behind_value: str = "\n",
    section_end: str = "",
) -> Node:
    """Describe a call's arguments as tags: the declared ones, in the schema's order, those that are required at least.

    Args:
        tool: The tool.
        tags: The format's.
        key: Writes a key between its tags, given whether its value is a string. Default: the key alone.
        behind_key: What stands between the key's tags and the value's, where the value has an opening tag.
        behind_value: What stands behind the value's closing tag.
        section_end: What stands behind all calls.
    """
    schema = arguments_schema(tool)
    newline = "\n" if tags.newlines else ""
    parts: dict[str, Node] = {}
    properties = properties_of(schema)
    marks = [tags.value_end, tags.call_end, section_end, *(tags.key[0] + name for name in properties)]
    marks += [text + name for text, meant in tags.spelled if meant == tags.key[0] for name in properties]
    marks += [CDATA_START] if tags.cdata else []
    for name, declared in properties.items():
        found = tagged_value(declared, schema, tuple(filter(None, marks)))
        is_string, value = found.is_string, found.node
        shown = name if key is None else key(name, is_string)
        ended = matchers(tags)["key"].scan(shown + tags.key[1], 0, 0)
        is_read = ended == (len(shown + tags.key[1]), 0, len(tags.key[1])) and tags.read_key(shown)[0] == name
        check_name(tool, name, is_read=is_read)
        begin = tags.key[0] + shown + tags.key[1] + behind_key + tags.value_start + newline
        parts[name] = {"type": "tag", "begin": begin, "content": value, "end": newline + tags.value_end + behind_value}
    return in_orders(parts, schema)


def in_orders(items: Mapping[str, Node], schema: Mapping[str, Any], comma: str = "") -> Node:
    """Describe a call's arguments in each way in which a schema lets them stand together.

    Args:
        items: Each argument, by name.
        schema: That of all.
        comma: What stands between two of them.
    """
    nodes = []
    for option in presences(schema)[0]:
        some = {name: node for name, node in items.items() if name not in option.absent}
        if comma:
            nodes.append(_joined(some, option.required, comma))
        else:
            parts = [node if name in option.required else optional(node) for name, node in some.items()]
            nodes.append(sequence(*parts) if parts else NOTHING)
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}


def _joined(items: Mapping[str, Node], needed: Set[str], comma: str) -> Node:
    """Describe arguments with something between them: the required ones, then any of the others."""
    required = [name for name in items if name in needed]
    others = [name for name in items if name not in required]

    def rest(names: Sequence[str]) -> list[Node]:
        return [optional(sequence(text(comma), items[name])) for name in names]

    if required:
        first, *more = required
        return sequence(items[first], *(sequence(text(comma), items[name]) for name in more), *rest(others))
    options = [sequence(items[name], *rest(others[at + 1 :])) for at, name in enumerate(others)]
    return {"type": "or", "elements": [*options, NOTHING]}


def check_name(tool: Tool, name: str, *, is_read: bool) -> None:
    """Refuse a parameter whose name would be read back as another one, or as none.

    Raises:
        RequestError: Its name is not one that `is_read`.
    """
    if not is_read:
        text = f"tools: calls of this format cannot name the parameter {name!r} of {name_of(tool)!r}"
        hint = "use letters, digits, '_', '-' and '.', a letter first, or leave it out of a tool that is enforced"
        raise RequestError(f"{text}; {hint}", param="tools", code="unsupported_parameter")
