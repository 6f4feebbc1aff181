"""Parsing finished outputs, for clients that generate with `/generate` and separate the parts afterwards."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.plugins import Registry
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.text.parsing.fitted import bound_reasoning, bound_tools
from dovetail.text.tokenizer.tokenizer import check_text
from dovetail_server.apis.parsing.schema import (
    ParsedCall,
    ParsedCalls,
    ParseFunctionCallRequest,
    SeparatedReasoning,
    SeparateReasoningRequest,
)
from dovetail_server.errors import catalogue as errors

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor

encode = msgspec.json.encode


def separate_reasoning(text: Processor, request: SeparateReasoningRequest) -> bytes:
    """Split an output into reasoning and content, and return the reply; CPU work.

    Raises:
        RequestError: There is no such parser.
    """
    check_text(request.text, param="text")
    parser: ReasoningParser | None = text.reasoning
    if request.reasoning_parser is not None:
        parser = built_in(text, "reasoning_parser", request.reasoning_parser)
    if parser is None:
        why = "the server uses no reasoning parser; name one in reasoning_parser"
        raise errors.unsupported("reasoning_parser", why)
    machine = make_parser(parser.spec(text.tokenizer, text.template, ParserRequest()))
    if request.prompt_tail is not None:
        check_text(request.prompt_tail, param="prompt_tail")
        machine.prime(request.prompt_tail)
    reply = parse_full(machine, text=request.text)
    return encode(SeparatedReasoning(reply.reasoning or "", reply.content or ""))


def parse_calls(text: Processor, request: ParseFunctionCallRequest) -> bytes:
    """Find the tool calls of an output, and return the reply; CPU work.

    Raises:
        RequestError: There is no such parser.
    """
    check_text(request.text, param="text")
    parser: ToolParser | None = text.tools
    if request.tool_call_parser is not None:
        parser = built_in(text, "tool_parser", request.tool_call_parser)
    if parser is None:
        why = "the server uses no tool-call parser; name one in tool_call_parser"
        raise errors.unsupported("tool_call_parser", why)
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
    places = {tool["function"]["name"]: place for place, tool in enumerate(tools)}
    reply = parse_full(make_parser(parser.extend(FormatSpec(), tools)), text=request.text)
    calls = [ParsedCall(places.get(call.name, -1), call.name, call.arguments) for call in reply.tool_calls]
    return encode(ParsedCalls(reply.content or "", calls))


def built_in(text: Processor, kind: str, name: str) -> Any:
    """Return a built-in parser by name. A request never makes the server import anybody else's code.

    Raises:
        RequestError: There is none of this name.
    """
    registry = installed()
    param = {"reasoning_parser": "reasoning_parser", "tool_parser": "tool_call_parser"}[kind]
    try:
        record = registry.resolve(kind, name)
    except PluginError:
        record = None
    if record is None or not record.builtin:
        known = ", ".join(sorted(r.name for r in registry.of_kind(kind) if r.builtin and r.usable))
        raise RequestError(
            f"{param} {name!r} is no built-in parser; possible: {known}", param=param, code="invalid_value"
        )
    parser = import_planned(as_planned(record))()
    bind = bound_reasoning if kind == "reasoning_parser" else bound_tools
    return bind(parser, text.template)


@cache
def installed() -> Registry:
    """Return what is installed."""
    return Registry.scan()
