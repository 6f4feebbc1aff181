"""Parts of replies that several APIs share."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from dovetail.contracts.replies import ChoiceView, Failure, Reply
from dovetail_server.errors.body import ErrorBody, ErrorDetail
from dovetail_server.schema.common import StructuredOutput, Usage

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


def head_of(reply: Reply) -> dict[str, Any]:
    """Return the fields that a reply of OpenAI's and all its chunks carry."""
    return {
        "id": reply.id,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": reply.fingerprint,
    }


def usage_of(reply: Reply) -> Usage:
    """Return the tokens used, in OpenAI's words."""
    tokens = reply.tokens
    return Usage.of(tokens.prompt, tokens.completion, tokens.cached, tokens.reasoning, tokens.image)


def report_fields(choice: ChoiceView) -> bytes:
    """As `report_field`, as part of a stream's last chunk of the choice."""
    report = choice.structured_output
    return b"" if report is None else b',"structured_output":' + encode(report)


def is_cut_by_context(choice: ChoiceView) -> bool:
    """Tell whether a choice ended where the context does, before the most tokens that were asked for."""
    limit = choice.request.limit
    return choice.finish_reason == "length" and limit is not None and choice.max_tokens < limit


def end_fields(choice: ChoiceView) -> bytes:
    """Return what a stream's last chunk of a choice says beside its reason."""
    return report_fields(choice) + (b',"context_exceeded":true' if is_cut_by_context(choice) else b"")


def error_event(failure: Failure) -> bytes:
    """Return the event that tells of an error after the headers are gone."""
    detail = ErrorDetail(message=failure.message, type=failure.kind, param=failure.param, code=failure.code)
    return b"event: error\ndata: " + encode(ErrorBody(detail)) + b"\n\n"


# What replies of all APIs say of a grammar.

PARAMETERS = "function/parameters"
"""Where the chat API has the schema of a tool, in the tool."""
_IN_TOOL = re.compile(rf"^(/tools/\d+/){PARAMETERS}")


def report_field(choice: ChoiceView, parameters: str = PARAMETERS) -> StructuredOutput | msgspec.UnsetType:
    """Return what a full reply says of a choice's grammar; nothing where it has none.

    Args:
        choice: It.
        parameters: Where the schema of a tool stands in the tool, as the request wrote it: places point into that.
    """
    made = choice.structured_output
    if made is None:
        return msgspec.UNSET
    if parameters != PARAMETERS:
        for part in (made, *made.get("tools", ())):
            part["ignored"] = [_IN_TOOL.sub(rf"\g<1>{parameters}", place) for place in part["ignored"]]
    return StructuredOutput(**made)
