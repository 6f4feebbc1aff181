"""`/v1/completions`: request and reply."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from dovetail_server.schema.common import (
    PASS_KNOWN_IDS,
    FinishReason,
    GrammarFields,
    Name,
    PromptFields,
    PromptLogprobs,
    SamplingFields,
    ServiceFields,
    StructuredOutput,
    Text,
    TokenIds,
    Top,
    Usage,
)


class CompletionRequest(SamplingFields, PromptFields, ServiceFields, GrammarFields):
    """Body of `POST /v1/completions`."""

    model: Name | None = Field(None, description="One of the served names. Default: the first.")
    prompt: Annotated[
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=4096)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=4096)],
        PASS_KNOWN_IDS,
    ]
    suffix: Text | None = Field(None, description="Text after the completion: the model fills the gap.")
    echo: bool | None = Field(None, description="Return the prompt before the completion.")
    best_of: int | None = Field(
        None,
        ge=0,
        le=128,
        description="Number of completions to generate, of which the `n` most likely are returned; 0: off.",
    )
    add_special_tokens: bool | None = Field(None, description="For texts. Default: true.")
    logprobs: Top | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists over tokens; `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion. Choices of several prompts follow each other, `n` per prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    matched_stop: int | str | None
    structured_output: StructuredOutput | msgspec.UnsetType = msgspec.UNSET
    context_exceeded: bool | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
