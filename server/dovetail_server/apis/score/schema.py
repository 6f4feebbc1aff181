"""`/v1/score`: request and reply, as SGLang has them for models that generate; and vLLM's request of two texts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from dovetail_server.schema.common import Text, TokenId, Usage
from dovetail_server.schema.pooled import MANY as FEWER
from dovetail_server.schema.pooled import PooledFields

MANY_IDS = Field(max_length=1 << 24)
MANY = Field(min_length=1, max_length=4096)
Labels = Annotated[list[TokenId], Field(min_length=1, max_length=4096)]


class ScoreRequest(PooledFields):
    """Two texts or lists of them to compare; or a query, and items each of which goes on with it, and labels.

    Of the latter texts, or token ids throughout.
    """

    text_1: Text | Annotated[list[Text], FEWER] | None = Field(
        None, description="Compared with `text_2`: one text with each of it, or each with its own."
    )
    text_2: Text | Annotated[list[Text], FEWER] | None = None
    query: Text | Annotated[list[TokenId], MANY_IDS] | None = None
    items: Text | Annotated[list[Text], MANY] | Annotated[list[Annotated[list[TokenId], MANY_IDS]], MANY] | None = None
    label_token_ids: Labels | Annotated[list[Labels], MANY] | None = Field(
        None, description="Tokens that may follow: the same for all items, or a list for each."
    )
    apply_softmax: bool | None = Field(None, description="Scores of an item add up to 1.")
    temperature: float | None = Field(None, gt=0, le=100, description="Divides before the softmax.")
    return_token_logprobs: bool | None = Field(None, description="Also return the log probabilities themselves.")
    item_first: bool | None = Field(None, description="The item comes before the query.")


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `POST /v1/score`: for each item a number per label."""

    object: Literal["scoring"] = "scoring"
    scores: list[list[float]]
    token_logprobs: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    model: str
    usage: Usage
