"""`/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dovetail.contracts.requests import Request
from dovetail.processing.input import Preparation
from dovetail_server.apis.messages.editing import edited
from dovetail_server.apis.messages.request import check, prompt_of
from dovetail_server.apis.messages.schema import CountTokensRequest, OriginalTokens, TokenCount

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor

encode = msgspec.json.encode


def count_tokens(text: Processor, body: CountTokensRequest) -> bytes:
    """Count the tokens of a prompt as `/v1/messages` would make it, and return the reply; CPU work.

    One beyond the context is counted, too.

    Raises:
        RequestError: The prompt cannot be made, or is too big to look at.
    """
    check(body)
    changed, applied = edited(body)
    num = count(text, changed)
    if applied is None:
        return encode(TokenCount(num))
    return encode(TokenCount(num, OriginalTokens(count(text, body) if applied else num)))


def count(text: Processor, body: CountTokensRequest) -> int:
    """Count the tokens of a prompt, and let its messages go.

    Raises:
        RequestError: See `count_tokens`.
    """
    request = Request(**prompt_of(body))
    body.messages.clear()  # each of a hundred thousand takes as much again as what it became
    return Preparation(text, request).count()
