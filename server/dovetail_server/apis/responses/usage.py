"""Tokens in the words of the Responses API."""

from __future__ import annotations

import msgspec

from dovetail.contracts.replies import ChoiceView
from dovetail_server.apis.responses.objects import InputDetails, OutputDetails, ResponseUsage


def response_usage(choice: ChoiceView) -> ResponseUsage:
    """Return the tokens of a choice in the words of the Responses API."""
    return ResponseUsage(
        input_tokens=choice.num_prompt,
        input_tokens_details=InputDetails(
            cached_tokens=choice.num_cached, image_tokens=choice.num_image or msgspec.UNSET
        ),
        output_tokens=choice.num_completion,
        output_tokens_details=OutputDetails(choice.num_reasoning),
        total_tokens=choice.num_prompt + choice.num_completion,
    )


def sum_of(one: ResponseUsage, other: ResponseUsage) -> ResponseUsage:
    """Return the tokens of two generations together."""
    return ResponseUsage(
        input_tokens=one.input_tokens + other.input_tokens,
        input_tokens_details=InputDetails(
            cached_tokens=one.input_tokens_details.cached_tokens + other.input_tokens_details.cached_tokens,
            image_tokens=(one.input_tokens_details.image_tokens or 0) + (other.input_tokens_details.image_tokens or 0)
            or msgspec.UNSET,
        ),
        output_tokens=one.output_tokens + other.output_tokens,
        output_tokens_details=OutputDetails(
            one.output_tokens_details.reasoning_tokens + other.output_tokens_details.reasoning_tokens
        ),
        total_tokens=one.total_tokens + other.total_tokens,
    )
