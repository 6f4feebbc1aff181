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
from dovetail.plugins.kinds import normalise
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
        parser = named(text, "reasoning_parser", request.reasoning_parser, text.reasoning)
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
        parser = named(text, "tool_parser", request.tool_call_parser, text.tools)
    if parser is None:
        why = "the server uses no tool-call parser; name one in tool_call_parser"
        raise errors.unsupported("tool_call_parser", why)
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
    places = {tool["function"]["name"]: place for place, tool in enumerate(tools)}
    reply = parse_full(make_parser(parser.extend(FormatSpec(), tools)), text=request.text)
    calls = [ParsedCall(places.get(call.name, -1), call.name, call.arguments) for call in reply.tool_calls]
    return encode(ParsedCalls(reply.content or "", calls))


def named(text: Processor, kind: str, name: str, own: Any) -> Any:
    """Return a parser by name: a built-in one, or the server's `own`. A request never makes it import other code.

    Raises:
        RequestError: There is none of this name.
    """
    registry, planned = installed(), text.planned(kind)
    param = {"reasoning_parser": "reasoning_parser", "tool_parser": "tool_call_parser"}[kind]
    try:
        record = registry.resolve(kind, name)
    except PluginError:
        record = None
    if record is not None and record.builtin:
        parser = import_planned(as_planned(record))()
        bind = bound_reasoning if kind == "reasoning_parser" else bound_tools
        return bind(parser, text.template)
    if (
        planned is not None
        and own is not None
        and (
            name == planned.qualified
            or normalise(kind, name) == normalise(kind, planned.name)
            or (record is not None and record.qualified == planned.qualified)  # by an alias
        )
    ):
        return own
    mine = [] if planned is None else [planned.name]
    known = ", ".join(sorted({*mine, *(r.name for r in registry.of_kind(kind) if r.builtin and r.usable)}))
    why = f"{param} {name!r} is neither a built-in parser nor this server's own; possible: {known}"
    raise RequestError(why, param=param, code="invalid_value")


@cache
def installed() -> Registry:
    """Return what is installed."""
    return Registry.scan()
