"""What requests have in common that generate nothing, and their replies."""

from __future__ import annotations

import msgspec
from pydantic import Field

from dovetail.processing.bounds import MAX_TOKENS
from dovetail_server.schema.common import Name, SchedulingFields

MANY = Field(min_length=1, max_length=2048)


class PooledFields(SchedulingFields):
    """Fields of every request that generates nothing."""

    model: Name | None = Field(None, description="One of the served names. Default: the first.")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="Number of tokens of each input to keep; -1: up to the context length.",
    )
    use_activation: bool | None = Field(
        None, description="false: return the model's raw output, without its activation."
    )


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
