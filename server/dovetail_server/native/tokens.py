"""`/tokenize` and `/detokenize`: request and reply."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field

from dovetail_server.openai.chat import Message, Tool
from dovetail_server.openai.common import FreeForm, Name, RequestModel, Text, TokenId


class TokenizeRequest(RequestModel):
    """A text (`prompt`, or `text`), or messages that go through the chat template."""

    model: Name | None = None
    prompt: Text | None = None
    text: Text | None = Field(None, description="Another name of `prompt`.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=65536)] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    chat_template_kwargs: FreeForm | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="If not given: true for a text, false for messages, whose template has them."
    )


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 24)]
    skip_special_tokens: bool | None = None


class Tokenized(msgspec.Struct, frozen=True):
    """Reply of `POST /tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(msgspec.Struct, frozen=True):
    """Reply of `POST /detokenize`; the text stands under both names that clients read."""

    prompt: str
    text: str
