"""`/generate`: request and reply."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field

from dovetail.processing.bounds import MAX_TOKENS
from dovetail_server.schema.common import (
    PASS_KNOWN_IDS,
    Count,
    FreeForm,
    Name,
    RequestModel,
    Rid,
    SamplingFields,
    StructuredOutput,
    Text,
    TokenId,
    TokenIds,
    Top,
)

ANY_MODEL = "unknown"
"""What gateways name where a native request needs no model."""
BATCH = Field(min_length=1, max_length=4096)
IMAGES = Field(max_length=4096)
"""None of them is possible, as a client sends whose prompts may have images."""


class GenerateParams(SamplingFields):
    """`sampling_params` of a native request; other fields mean what they mean in a completion request."""

    max_new_tokens: Count | None = Field(None, description="0 computes the prompt only. Default: 128.")
    min_new_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    sampling_seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    regex: Text | None = None
    ebnf: Text | None = None
    json_schema: Text | FreeForm | None = None
    structural_tag: Text | FreeForm | None = None
    response_format: FreeForm | None = None
    structured_outputs: FreeForm | None = None
    grammar_backend: Name | None = Field(None, description="One of the loaded backends. Default: selected per request.")


class GenerateRequest(RequestModel):
    """Body of `POST /generate`: one prompt, or a batch with one value or a list of values per option."""

    model: Name | None = Field(None, description="One of the served names; gateways send `unknown`.")
    text: Text | Annotated[list[Text], BATCH] | None = None
    input_ids: Annotated[TokenIds | Annotated[list[TokenIds], BATCH] | None, PASS_KNOWN_IDS] = None
    image_data: ImageData | Annotated[list[ImageData | Images | None], IMAGES] | None = Field(
        None,
        description="Images in place of the prompt's placeholders: URLs, or base64. A batch has a list per prompt.",
    )
    sampling_params: GenerateParams | Annotated[list[GenerateParams], BATCH] | None = None
    return_logprob: bool | Annotated[list[bool], BATCH] | None = None
    logprob_start_len: LogprobStart | Annotated[list[LogprobStart], BATCH] | None = Field(
        None, description="First prompt token with a log probability; -1 for none."
    )
    top_logprobs_num: Top | Annotated[list[Top], BATCH] | None = None
    token_ids_logprob: NamedIds | Annotated[list[NamedIds | None], BATCH] | None = Field(
        None, description="Tokens whose log probabilities stand beside those of the text; needs `return_logprob`."
    )
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: Rid | Annotated[list[Rid], BATCH] | None = None
    priority: int | None = Field(None, ge=-(1 << 31), le=(1 << 31) - 1)
    cache_salt: Name | None = None
    extra_key: Name | None = Field(None, description="Another name of `cache_salt`.")


class ImageUrl(RequestModel):
    """An image by its URL."""

    url: Text
    detail: Annotated[str, Field(max_length=16)] | None = None


ImageData = Text | ImageUrl
Images = Annotated[list[ImageData | None], IMAGES]
NamedIds = Annotated[list[TokenId], Field(max_length=4096)]
LogprobStart = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]
GenerateRequest.model_rebuild()


class NativeFinish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why it ended: `stop` with `matched`, `length` with `length`, or `abort` with `message`."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


TokenRow = tuple[float | None, int, str | None]


class MetaInfo(msgspec.Struct, kw_only=True):
    """Facts beside the text. Log probabilities are `[logprob, token_id, text or null]`."""

    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    num_retractions: int
    structured_output: StructuredOutput | msgspec.UnsetType = msgspec.UNSET
    e2e_latency: float | msgspec.UnsetType = msgspec.UNSET
    input_token_logprobs: list[TokenRow] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[TokenRow] | None] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[TokenRow] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[TokenRow] | None] | msgspec.UnsetType = msgspec.UNSET
    input_token_ids_logprobs: list[list[TokenRow] | None] | msgspec.UnsetType = msgspec.UNSET
    output_token_ids_logprobs: list[list[TokenRow] | None] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, kw_only=True):
    """Response of `POST /generate`, and each chunk of its stream, whose text and ids are cumulative."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET


Extra = dict[str, Any]
