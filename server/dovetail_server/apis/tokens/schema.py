"""`/tokenize` and `/detokenize`: request and reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from dovetail_server.apis.chat.schema import Messages, Tool
from dovetail_server.schema.common import PASS_KNOWN_IDS, FreeForm, Name, RequestModel, Text, TokenId

MANY = Field(max_length=1 << 24)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TokenizeRequest(RequestModel):
    """A text (`prompt`, or `text`), or messages rendered by the chat template."""

    model: Name | None = None
    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=4096)] | None = Field(
        None, description="One text, or several: then the reply has a list for each."
    )
    text: Text | None = Field(None, description="Another name of `prompt`.")
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    chat_template_kwargs: FreeForm | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="Default: true for a text, false for messages, whose template has them."
    )
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    return_token_strs: bool | None = Field(None, description="Also return each token's text.")


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: Name | None = None
    tokens: Annotated[
        Annotated[list[TokenId], MANY] | Annotated[list[Annotated[list[TokenId], MANY]], Field(max_length=4096)],
        PASS_KNOWN_IDS,
    ] = Field(description="Ids of one text, or of several.")
    skip_special_tokens: bool | None = None


class Tokenized(msgspec.Struct, frozen=True):
    """Response of `POST /tokenize`; of several texts each field but the last is a list."""

    tokens: Sequence[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: Sequence[str | list[str]] | msgspec.UnsetType = msgspec.UNSET


class Detokenized(msgspec.Struct, frozen=True):
    """Response of `POST /detokenize`; the text stands under both names that clients read."""

    prompt: str | list[str]
    text: str | list[str]


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `GET /tokenizer_info`."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    added_tokens: dict[str, int]
    chat_template: str | None
