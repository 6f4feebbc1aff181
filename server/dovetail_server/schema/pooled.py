"""What requests have in common that generate nothing, and their replies."""

from __future__ import annotations

import msgspec
from pydantic import Field

from dovetail.processing.bounds import MAX_TOKENS
from dovetail_server.schema.common import Name, RequestModel, Rid

MANY = Field(min_length=1, max_length=2048)


class PooledFields(RequestModel):
    """What every request has that generates nothing."""

    model: Name | None = Field(None, description="One of the served names; the first if not given.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_TOKENS, description="Keep so many tokens of each input; -1 keeps what the context holds."
    )
    use_activation: bool | None = Field(None, description="False: what the model gives as it is, not scaled.")
    priority: int | None = Field(None, ge=-(1 << 31), le=(1 << 31) - 1, description="Higher goes first.")
    cache_salt: Name | None = Field(None, description="Requests with different salts share no cached prefix.")
    rid: Rid | None = Field(None, description="Identifier to abort the request by.")
    request_id: Rid | None = Field(None, description="Another name of `rid`.")
    user: Name | None = None


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
