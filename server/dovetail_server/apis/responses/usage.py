"""Tokens in the words of the Responses API."""

from __future__ import annotations

from dovetail_server.apis.responses.objects import InputDetails, OutputDetails, ResponseUsage
from dovetail_server.serving.choice import Choice
from dovetail_server.serving.common import usage_of


def response_usage(choice: Choice) -> ResponseUsage:
    """Return the tokens of a choice in the words of the Responses API."""
    usage = usage_of([choice])
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(usage.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
