"""Serving another API through the chat API: its errors speak of the fields that the client sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dovetail.errors import RequestError
from dovetail.processing.input import chat_prompt
from dovetail.processing.refusals import TOO_LONG
from dovetail_server.errors import from_validation
from dovetail_server.openai.chat import ChatRequest
from dovetail_server.serving.chat import conversation

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor

OVERFLOW = TOO_LONG


def chat_request(fields: Mapping[str, object]) -> ChatRequest:
    """Return a chat request of translated fields; those that are None are left out.

    Raises:
        RequestError: A value that the other API's schema lets through and the chat API refuses.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise from_validation(error, given, list(ChatRequest.model_fields)) from None


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Translate fields' names in errors; `names` maps regular expressions for the chat API's to the client's.

    Raises:
        RequestError: What the block raised, in the client's words.
    """
    try:
        yield
    except RequestError as error:
        param, message = error.param, error.message
        for pattern, name in names.items():
            if param is not None and re.match(rf"{pattern}(?![A-Za-z_])", param):
                param = re.sub(rf"^{pattern}", name, param)
            message = re.sub(rf"(?<![\w.]){pattern}(?![A-Za-z_])", name, message)
        raise RequestError(message, param=param, code=error.code, status=error.status) from error


def prompt_tokens(request: ChatRequest, text: Processor) -> int:
    """Return the tokens of a prompt as a chat request would have it; one beyond the context is counted, too.

    Raises:
        RequestError: The prompt cannot be made, or is too big to look at.
    """
    chat = replace(conversation(request, text), documents=None, input_ids=None, add_special_tokens=False)
    return len(chat_prompt(text, chat)[0])
