"""`/separate_reasoning` and `/parse_function_call`: request and reply, as SGLang has them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field

from dovetail_server.apis.chat.schema import Tool
from dovetail_server.schema.common import Name, RequestModel, Text


class SeparateReasoningRequest(RequestModel):
    """A finished output."""

    text: Text
    reasoning_parser: Name | None = Field(None, description="A built-in parser or the server's. Default: the server's.")
    prompt_tail: Text | None = Field(
        None,
        description="Text of the chat template right before the output, such as `<think>`; decides its first section.",
    )


class ParseFunctionCallRequest(RequestModel):
    """A finished output, and the tools that it may call."""

    text: Text
    tools: Annotated[list[Tool], Field(max_length=1024)] = Field(default_factory=list)
    tool_call_parser: Name | None = Field(None, description="A built-in parser or the server's. Default: the server's.")


class SeparatedReasoning(msgspec.Struct, frozen=True):
    """Response of `POST /separate_reasoning`; an absent part is empty."""

    reasoning_text: str
    text: str


class ParsedCall(msgspec.Struct, frozen=True):
    """A tool call. `tool_index` is its place in the request's `tools`, -1 for none; `parameters` is JSON text."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(msgspec.Struct, frozen=True):
    """Response of `POST /parse_function_call`."""

    normal_text: str
    calls: list[ParsedCall]
