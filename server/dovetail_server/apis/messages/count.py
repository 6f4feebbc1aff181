"""`/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dovetail.contracts.requests import Request
from dovetail.processing.input import Preparation
from dovetail_server.apis.messages.request import check, prompt_of
from dovetail_server.apis.messages.schema import CountTokensRequest, TokenCount

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor


def count_tokens(text: Processor, body: CountTokensRequest) -> bytes:
    """Count the tokens of a prompt as `/v1/messages` would make it, and return the reply; CPU work.

    One beyond the context is counted, too.

    Raises:
        RequestError: The prompt cannot be made, or is too big to look at.
    """
    check(body)
    request = Request(**prompt_of(body))
    body.messages.clear()  # each of a hundred thousand takes as much again as what it became
    return msgspec.json.encode(TokenCount(Preparation(text, request).count()))
