"""`/v1/rerank`, vLLM's `/v1/score`, and `/v1/classify`: requests and replies, as Cohere, Jina and vLLM have them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from dovetail.processing.bounds import MAX_TOKENS
from dovetail_server.schema.common import PASS_KNOWN_IDS, RequestModel, Text, TokenIds
from dovetail_server.schema.pooled import MANY, EmbeddingUsage, PooledFields


class Document(RequestModel):
    """A document as Cohere's first API writes it."""

    text: Text


class RerankRequest(PooledFields):
    """Body of `POST /v1/rerank`."""

    query: Text
    documents: Annotated[list[Text | Document], MANY]
    top_n: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="Number of best documents to return; 0: all. Default: all."
    )
    return_documents: bool | None = Field(None, description="false: omit the documents' texts.")
    max_tokens_per_doc: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Maximum tokens of each document.")
    instruct: Text | None = Field(None, description="Instruction for models that take one.")


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a document."""

    text: str


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A document's score; `index` is its place in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class Reranked(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `POST /v1/rerank`, the best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class PairScore(msgspec.Struct, frozen=True, kw_only=True):
    """The score of two texts."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """What the lists below have in common."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: EmbeddingUsage


class PairScores(ScoreList, frozen=True, kw_only=True):
    """Response of `POST /v1/score` to two texts or lists of them."""

    data: list[PairScore]


class ClassifyRequest(PooledFields):
    """Body of `POST /v1/classify`."""

    input: Annotated[
        Text | Annotated[list[Text], MANY] | TokenIds | Annotated[list[TokenIds], MANY],
        PASS_KNOWN_IDS,
    ]
    add_special_tokens: bool | None = Field(None, description="False: the tokenizer adds none to a text.")


class Classified(msgspec.Struct, frozen=True, kw_only=True):
    """One input's label and the score of every label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(ScoreList, frozen=True, kw_only=True):
    """Response of `POST /v1/classify`, in the order of the inputs."""

    data: list[Classified]
