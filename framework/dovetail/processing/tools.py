"""Which tools a conversation lets the model call and how: OpenAI's `tools` and `tool_choice`, read once for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.tools import ToolParser
from dovetail.processing.refusals import unsupported, wrong
from dovetail.sdk.schemas import schema

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """What a conversation wants of tools.

    Attributes:
        tools: Those that the model may call.
        choice: `auto`, `required`, or OpenAI's object that names one.
        param: Name of the field that says so.
        parser: What reads and describes the model's calls.
        parallel: Whether several calls may be made.
        strict: Calls must conform to the tools' schemas.
        prefers_grammar: They should, where something can see to it.
    """

    tools: Tools
    choice: Any
    param: str
    parser: ToolParser
    parallel: bool
    strict: bool
    prefers_grammar: bool = False

    @property
    def needs_grammar(self) -> bool:
        """Whether this can only be kept by a grammar."""
        return self.choice != "auto" or self.strict


def tool_options(
    tools: Tools, choice: Any, parser: ToolParser | None, *, parallel: bool, names: tuple[str, str]
) -> ToolOptions | None:
    """Return the tools that the model may call and how, or None.

    Args:
        tools: As OpenAI writes them.
        choice: `tool_choice`; None is `auto`.
        parser: What reads the model's calls.
        parallel: Whether several calls may be made.
        names: The fields of the tools and of the choice, for errors.

    Raises:
        RequestError: A choice that means nothing, or tools without a parser for the model's calls.
    """
    field, name = names
    check_schemas(tools, field)
    tools, choice = allowed_tools(tools, choice)
    if isinstance(choice, Mapping) or choice == "required":
        if not tools:
            raise wrong(f"{name} needs tools", name)
    elif choice not in (None, "none", "auto"):  # a tuple: a choice may be a list, which has no hash
        raise wrong(f"{name} must be 'none', 'auto', 'required' or an object (given: {choice!r})", name)
    if not tools or choice == "none":
        return None
    if parser is None:
        why = "no tool-call parser is in use, so calls could not be recognised; start with --tool-call-parser NAME"
        raise unsupported(field, why)
    strict = any(tool["function"].get("strict") for tool in tools)
    return ToolOptions(
        tools=tools, choice=choice or "auto", param=name, parser=parser, parallel=parallel, strict=strict
    )


def named_function(choice: Any) -> Any:
    """Return the name in `{"type": "function", "function": {"name": …}}`, or in the flat form of it."""
    inner = choice.get("function", choice) if isinstance(choice, Mapping) else None
    return inner.get("name") if isinstance(inner, Mapping) else None


def check_schemas(tools: Sequence[Mapping[str, Any]], param: str) -> None:
    """Refuse a tool whose parameters are no JSON schema.

    Raises:
        RequestError: With the place of the schema as `param`.
    """
    for place, tool in enumerate(tools):
        try:
            schema.check(tool["function"].get("parameters") or {})
        except RequestError as error:
            where = f"{param}[{place}].parameters" if param == "functions" else f"{param}[{place}].function.parameters"
            raise RequestError(error.message, param=where, code=error.code) from None


def allowed_tools(tools: Tools, choice: Any) -> tuple[Tools, Any]:
    """Resolve OpenAI's `allowed_tools`: a subset of the tools, and whether one of them must be called.

    Raises:
        RequestError: It has another form, or names a tool that is not there.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, choice
    given = choice.get("allowed_tools", choice)
    inner = given if isinstance(given, Mapping) else {}
    mode, listed = inner.get("mode", "auto"), inner.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        why = 'tool_choice.allowed_tools must be {"mode": "auto" or "required", "tools": […]}'
        raise wrong(why, "tool_choice")
    names = {name for item in listed if isinstance(name := named_function(item), str)}
    kept = [tool for tool in tools if tool["function"]["name"] in names]
    if len(kept) != len(listed):
        why = "tool_choice.allowed_tools names a function that is not in tools"
        raise wrong(why, "tool_choice")
    return kept, mode
