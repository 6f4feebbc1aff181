"""`/v1/embeddings`: the request. There is no reply: see `serving/embeddings.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dovetail_server.openai.common import Name, RequestModel, Text, TokenId

Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20)]


class EmbeddingRequest(RequestModel):
    """Body of `POST /v1/embeddings`."""

    model: Name | None = Field(None, description="One of the served names; the first if not given.")
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=4096)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=4096)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=1 << 20)
    user: Name | None = None
