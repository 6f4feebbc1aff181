"""`/v1/embeddings`: request and reply."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from dovetail_server.schema.common import PASS_KNOWN_IDS, Name, Text, TokenIds
from dovetail_server.schema.pooled import MANY, EmbeddingUsage, PooledFields


class EmbeddingRequest(PooledFields):
    """Body of `POST /v1/embeddings`."""

    input: Annotated[
        Text | Annotated[list[Text], MANY] | TokenIds | Annotated[list[TokenIds], MANY],
        PASS_KNOWN_IDS,
    ]
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or float32 in little-endian order as base64."
    )
    dimensions: int | None = Field(
        None, ge=1, le=1 << 20, description="Number of dimensions to keep, for models trained for it."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Side on which an input is truncated. Default: left, for encoders right."
    )
    add_special_tokens: bool | None = Field(None, description="False: the tokenizer adds none to a text.")
    prompt_name: Name | None = Field(
        None,
        description="Name of the model's prompt that precedes each text; empty: none. Default: the model's.",
    )


class EmbeddingObject(msgspec.Struct, frozen=True, kw_only=True):
    """One input's vector; base64 where the request asks for it."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `POST /v1/embeddings`, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
