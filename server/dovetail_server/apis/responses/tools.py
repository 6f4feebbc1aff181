"""Tools of a response. Those that the client runs are functions to the model; its calls become the API's items again.

Tools that OpenAI's servers run have no meaning here: they are left out, and the reply names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Dropped, JsonObject
from dovetail.contracts.tables import table
from dovetail.processing.refusals import unsupported, wrong
from dovetail_server.apis.custom import CustomTools, check_type, custom_arguments
from dovetail_server.apis.dropped import check_optional
from dovetail_server.apis.responses import objects as ro
from dovetail_server.apis.responses.tool_schema import (
    CLIENT_RUN,
    NamespaceTool,
    ResponsesCustomTool,
    ResponsesHostedTool,
    ResponseTool,
    ToolGrammar,
    tool_model,
)

MAX_TOOLS = 1024
CLIENT_TOOLS: dict[str, JsonObject] = table(__file__, "client_tools.json")
"""Description and parameters of each tool that the client runs and the API describes."""


@dataclass(slots=True)
class ReadTools(CustomTools):
    """The tools of a body.

    Attributes:
        functions: As the chat API has them.
        places: Where each stands in the body.
        calls: By a function's name what its calls become; those of others are plain function calls.
        dropped: What the server cannot run.
    """

    functions: list[JsonObject] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    calls: dict[str, JsonObject] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)

    def add(self, function: JsonObject, place: str) -> None:
        """Add a function."""
        self.functions.append({"type": "function", "function": function})
        self.places.append(place)

    def named_calls(self) -> Iterator[tuple[str, JsonObject]]:
        """Yield each function's name with what its calls become: nothing where they are plain ones."""
        for tool in self.functions:
            name = tool["function"]["name"]
            yield name, self.calls.get(name, {})

    def renamed(self) -> JsonObject:
        """Return how refusals that speak of functions name their places in the body."""
        return {
            rf"tools\[{at}\]\.function": place
            for at, place in enumerate(self.places)
            if place != f"tools[{at}]"
        }  # fmt: skip


def tools_in(items: Iterable[tuple[int, JsonObject]], place: str, found: list[tuple[str, Any]]) -> Iterator[JsonObject]:
    """Pass on `opened` items, each with its place, and add to `found` the tools that stand among them."""
    for at, item in items:
        if item["type"] == "additional_tools":
            found += [(f"{place}[{at}].tools[{k}]", tool_model(tool)) for k, tool in enumerate(item["tools"])]
        yield item


def read_tools(tools: Sequence[tuple[str, Any]]) -> ReadTools:
    """Read the tools of a body, each given with its place.

    Raises:
        RequestError: One is wrong, or two have one name where only one of them can be told.
    """
    made = ReadTools()
    num = sum(len(tool.tools) if isinstance(tool, NamespaceTool) else 1 for _, tool in tools)
    if num > MAX_TOOLS:
        raise wrong(f"tools and those in namespaces may be {MAX_TOOLS} together (given: {num})", "tools")
    for place, tool in tools:
        if isinstance(tool, ResponsesHostedTool):
            made.dropped.append(Dropped(param=f"{place}.type", what=tool.type))
        elif isinstance(tool, NamespaceTool):
            for k, inner in enumerate(tool.tools):
                _add(made, inner, f"{place}.tools[{k}]", tool.name)
        elif isinstance(tool, ResponseTool | ResponsesCustomTool):
            _add(made, tool, place, None)
        else:
            made.add({"name": tool.type, **CLIENT_TOOLS[tool.type]}, place)
            made.calls[tool.type] = {"type": tool.type}
    _check_names(made)
    return made


def _check_names(made: ReadTools) -> None:
    """Refuse two tools of one name whose calls would not be told apart."""
    seen: set[str] = set()
    for tool, place in zip(made.functions, made.places, strict=True):
        name = tool["function"]["name"]
        if name in seen and name in made.calls:
            raise wrong(f"{place}: another tool is called {name!r}, too; give each its own name", place)
        seen.add(name)


def _add(made: ReadTools, tool: ResponseTool | ResponsesCustomTool, place: str, namespace: str | None) -> None:
    if tool.name is None:
        raise RequestError(f"{place}.name is required", param=f"{place}.name", code="missing_required_parameter")
    if tool.defer_loading:
        raise unsupported(f"{place}.defer_loading", "all tools stand in the prompt; leave it out")
    name = function_name(tool.name, namespace)
    call: JsonObject = {} if namespace is None else {"namespace": namespace, "name": tool.name}
    if isinstance(tool, ResponsesCustomTool):
        given = tool.format
        grammar = (given.syntax, given.definition) if isinstance(given, ToolGrammar) else None
        function = made.as_function(name, tool.description or "", grammar, f"{place}.format")
        call = {**call, "type": "custom"}
    else:
        hidden = {"type", "allowed_callers", "defer_loading"}
        function = {**tool.model_dump(exclude=hidden, exclude_none=True), "name": name}
    made.add(function, place)
    if call:
        made.calls[name] = call


def function_name(name: str, namespace: str | None) -> str:
    """Return what a tool is called where the model sees it."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def chat_choice(choice: Any, given: ReadTools) -> Any:
    """Return `tool_choice` in the chat API's form, by the tools that are given.

    Raises:
        RequestError: It names no tool that a client runs or gives it another type, or asks for a call where one of the
            tools cannot be run.
    """
    is_list = isinstance(choice, dict) and choice.get("type") == "allowed_tools"
    check_optional(given.dropped, choice.get("mode", "auto") if is_list else choice)
    if not isinstance(choice, dict):
        return choice
    types = {name: str(call.get("type", "function")) for name, call in given.named_calls()}
    if not is_list:
        return _named(choice, types)
    if not isinstance(listed := choice.get("tools"), list):
        return choice
    left_out = [one.what for one in given.dropped]
    kept = [tool for tool in listed if not (isinstance(tool, dict) and tool.get("type") in left_out)]
    return {**choice, "tools": [_named(tool, types) for tool in kept]}


def _named(choice: Any, types: Mapping[str, str]) -> JsonObject:
    """Return what names a tool in the chat API's form; `types` has those of the tools."""
    kind, name = (choice.get("type"), choice.get("name")) if isinstance(choice, dict) else (None, None)
    if kind in CLIENT_RUN:
        name = kind
    elif kind not in ("function", "custom") or not isinstance(name, str):
        text = (
            'tool_choice must be "none", "auto", "required", {"type": "function" or "custom", "name": …}, '
            f'{{"type": {", ".join(CLIENT_RUN)}}} or allowed_tools'
        )
        raise RequestError(text, param="tool_choice", code="invalid_value")
    namespace = choice.get("namespace")
    name = function_name(str(name), namespace if isinstance(namespace, str) else None)
    check_type(name, str(kind), types)
    return {"type": "function", "function": {"name": name}}


def tool_echo(tool: Any) -> JsonObject:
    """Return a tool as the response shows it, `strict` as it was taken."""
    if not isinstance(tool, ResponseTool):
        return dict(tool.model_dump(exclude_none=True))
    shown: JsonObject = {"type": "function", "name": tool.name, "description": tool.description}
    if tool.output_schema is not None:
        shown["output_schema"] = tool.output_schema
    return {**shown, "parameters": tool.parameters, "strict": bool(tool.strict)}


def client_call(kind: str, ids: JsonObject, arguments: str) -> ro.ClientCall | None:
    """Return the item of a call that the client runs; None where the model wrote no such call."""
    try:
        if kind == "local_shell":
            return ro.LocalShellCall(**ids, action=msgspec.json.decode(arguments, type=ro.ExecAction))
        if kind == "shell":
            return ro.ShellCall(**ids, action=msgspec.json.decode(arguments, type=ro.ShellAction))
        return ro.ApplyPatchCall(**ids, operation=msgspec.json.decode(arguments, type=ro.PatchOperation))
    except msgspec.MsgspecError:
        return None


def function_call(item: JsonObject) -> tuple[str, str]:
    """Return the function that an item calls where the model sees it, and its arguments."""
    kind, name = item["type"], function_name(item.get("name", ""), item.get("namespace"))
    if kind == "function_call":
        return name, item["arguments"]
    if kind == "custom_tool_call":
        return name, custom_arguments(item["input"])
    if kind == "apply_patch_call":
        return "apply_patch", _json(item["operation"])
    action = {key: value for key, value in item["action"].items() if key != "type" and value is not None}
    return kind.removesuffix("_call"), _json(action)


def call_result(item: JsonObject) -> Any:
    """Return what a call gave: a text, or parts."""
    output = item.get("output")
    if item["type"] == "shell_call_output":
        return _json(output)
    return item["status"] if output is None else output


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
