"""Fields that chat and completion requests share, and the parts their replies share.

Limits here are outer bounds that keep a request finite; what the model can do (context, vocabulary) is checked when the
request is prepared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from dovetail.processing.bounds import (
    BOUNDS,
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_NAMED_IDS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    POSITIVE,
)
from dovetail_server.compat.dialects import OWN, BodyTranslation
from dovetail_server.compat.fields import means_nothing
from dovetail_server.schema.fail_fast import FailFastModel
from dovetail_server.schema.unknown import left_out

MAX_TEXT = 1 << 26

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(max_length=512)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
MAX_PROMPT_IDS = 1 << 24
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_IDS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Bias = Annotated[float, Field(ge=-1e9, le=1e9)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Top = Annotated[
    int,
    Field(ge=-1, le=MAX_TOKEN_ID, description="Up to --max-logprobs, 20 by default; -1 for all where that is -1."),
]

Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Name], Field(max_length=16)]
FreeForm = Annotated[dict[str, Any], Field(max_length=1024)]
Rid = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]


def _known_ids(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Let a plain list of good ids pass: one of 2,000 takes pydantic 1.7 ms among the forms that a prompt may have."""
    is_ids = type(value) is list and 0 < len(value) <= MAX_PROMPT_IDS and set(map(type, value)) == {int}
    return value if is_ids and min(value) >= 0 and max(value) <= MAX_TOKEN_ID else handler(value)


PASS_KNOWN_IDS = WrapValidator(_known_ids)
"""For fields of several forms of which `TokenIds` is one."""


class RequestModel(FailFastModel):
    """Base of request bodies: JSON types are not converted, unknown fields are errors, numbers are finite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def sift_unknown(cls, data: Any) -> Any:
        """Drop fields that ask for nothing, which some clients send, and of other unknown ones all but the first."""
        if not isinstance(data, dict) or cls.model_config.get("extra") != "forbid":
            return data
        known = _field_names(cls)
        if data.keys() <= known:
            return data
        unknown = left_out([k for k, v in data.items() if k not in known and not means_nothing(k, v)])[:1]
        return {k: v for k, v in data.items() if k in known or k in unknown}


@cache
def _field_names(model: type[RequestModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class SentBack(RequestModel):
    """What clients send back of earlier replies, those of other servers too: fields beyond these are ignored."""

    model_config = ConfigDict(extra="ignore")


class StreamOptions(RequestModel):
    """Additional contents of a stream."""

    include_usage: bool | None = Field(None, description="End with a chunk that holds the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Put the usage so far into every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; no padding is ever added.")


def _within(name: str) -> Any:
    """Return the bounds of a number as pydantic takes them."""
    least, most = BOUNDS[name]
    return Field(gt=least, le=most) if name in POSITIVE else Field(ge=least, le=most)


def _is_foreign(data: dict[str, Any], known: frozenset[str]) -> bool:
    """Tell whether a body may hold a field or a value of another dialect; of most a look says that they do not."""
    if not data.keys() <= known:
        return True
    for name in OWN:
        value = data.get(name)
        kind = type(value)
        if not (value is None or (kind is int and value >= 0) or (kind is str and value != "default")):
            return True
    return False


class SamplingFields(RequestModel):
    """Sampling parameters and stop conditions. Defaults come from the model's generation_config.json."""

    temperature: Annotated[float, _within("temperature")] | None = Field(None, description="0: greedy decoding.")
    top_p: Annotated[float, _within("top_p")] | None = Field(None, description="0: greedy decoding.")
    top_k: Annotated[int, _within("top_k")] | None = Field(None, description="-1 and 0: off.")
    min_p: Annotated[float, _within("min_p")] | None = None
    frequency_penalty: Annotated[float, _within("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, _within("presence_penalty")] | None = None
    repetition_penalty: Annotated[float, _within("repetition_penalty")] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = Field(None, description="Minimum number of tokens before a stop.")
    n: int | None = Field(None, ge=1, le=128)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    stop_regex: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="Regular expressions that end the output as stop sequences do."
    )
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = Field(None, description="Accepted; text is joined as decoded.")
    no_stop_trim: bool | None = Field(None, description="Keep the matched stop string in the text.")
    include_stop_str_in_output: bool | None = Field(None, description="Another name of `no_stop_trim`.")
    logit_bias: Annotated[dict[Annotated[str, Field(max_length=12)], Bias], Field(max_length=MAX_BIASES)] | None = None
    seed: Annotated[int, _within("seed")] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None = Field(
        None, description="Only these tokens are sampled; the end of the output is not among them unless listed."
    )
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = Field(
        None, description="Texts that are never generated, at the start of a word or within one."
    )
    logits_processors: Annotated[dict[Name, FreeForm], Field(max_length=16)] | None = Field(
        None,
        description="Logits processors by name, each with its parameters: "
        '`{"no-repeat-ngram": {"size": 3}}`. Those that `--logits-processors` names are served.',
    )
    prompt_logprobs: Top | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="wrap")
    @classmethod
    def read_dialects(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Read fields and values of other servers' clients as what they mean here."""
        known = _field_names(cls)
        if not isinstance(data, dict) or not _is_foreign(data, known):
            return handler(data)
        translation = BodyTranslation(data, known)
        try:
            return handler(translation.fields)
        except ValidationError as error:
            raise translation.located(error) from None


class PromptFields(RequestModel):
    """Truncation of a prompt, and the form of tokens in responses."""

    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_NAMED_IDS)] | None = Field(
        None, description="Tokens whose log probabilities follow those of the top alternatives; needs `logprobs`."
    )
    return_tokens_as_token_ids: bool | None = Field(None, description="Log probabilities name tokens `token_id:17`.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_TOKENS, description="Number of prompt tokens to keep; -1: up to the context length."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Side on which the prompt is truncated. Default: left."
    )
    context_length_exceeded_behavior: Literal["truncate", "error"] | None = Field(
        None,
        description="If the maximum number of tokens exceeds the context: `truncate` ends the output there, `error` "
        "rejects the request. Default: `--max-tokens-beyond`.",
    )


class SchedulingFields(RequestModel):
    """What a request is called, and how it stands to others."""

    priority: int | None = Field(
        None,
        ge=-(1 << 31),
        le=(1 << 31) - 1,
        description="Higher runs first. The lowest runs only while no other request runs.",
    )
    cache_salt: Name | None = Field(None, description="Requests with different salts share no cached prefix.")
    rid: Rid | None = Field(None, description="Identifier to abort the request by, beside the reply's id.")
    request_id: Rid | None = Field(None, description="Another name of `rid`.")
    user: Name | None = None


class HintFields(RequestModel):
    """Where OpenAI runs a request, and how it caches: accepted, prefixes are always cached."""

    service_tier: Annotated[str, Field(max_length=32)] | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Annotated[str, Field(max_length=32)] | None = None
    prompt_cache_options: FreeForm | None = Field(None, description="Accepted; prefixes are always cached.")


class ServiceFields(SchedulingFields, HintFields):
    """Options that do not change the output."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    extra_key: Name | None = Field(None, description="Another name of `cache_salt`.")
    metadata: Metadata | None = None
    store: bool | None = Field(None, description="Store the response of a chat completion.")
    safety_identifier: Name | None = None
    prediction: FreeForm | None = None


FORMS = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "regex": ("pattern", "regex"),
    "ebnf": ("grammar", "ebnf"),
}
"""The fields of a `response_format` by its type. Those of a `structural_tag` are the backends' affair."""
SCHEMA_FIELDS = ("name", "description", "schema", "schema_", "strict")


def _known_format(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse a field that is read by nobody, or with `--unknown-fields warn` count it."""
    form = value.get("type")
    if not isinstance(form, str) or form not in FORMS:  # refused by its type, or a tag
        return value
    _refuse_unknown(value, ("type", *FORMS[form]), ())
    if isinstance(inner := value.get("json_schema"), dict):
        _refuse_unknown(inner, SCHEMA_FIELDS, ("json_schema",))
    return value


def _refuse_unknown(given: dict[str, Any], known: tuple[str, ...], place: tuple[str, ...]) -> None:
    unknown = left_out([key for key, value in given.items() if key not in known and not means_nothing(key, value)])
    if unknown:
        found = InitErrorDetails(type="extra_forbidden", loc=(*place, unknown[0]), input=given[unknown[0]])
        raise ValidationError.from_exception_data("response_format", [found])


class GrammarFields(RequestModel):
    """Structured output: at most one of these. What they mean is read by `dovetail.grammar.spec.fields`."""

    response_format: Annotated[FreeForm, AfterValidator(_known_format)] | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    json_schema: Text | FreeForm | None = None
    structural_tag: Text | FreeForm | None = None
    structured_outputs: FreeForm | None = None
    grammar_backend: Name | None = Field(None, description="One of the loaded backends. Default: selected per request.")


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a list."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, data: Iterable[Any], ids: Sequence[str], has_more: bool) -> Self:
        """Return the page of `data`, whose identifiers are `ids`."""
        return cls(
            data=list(data), first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=has_more
        )


class ToolEnforcement(msgspec.Struct, frozen=True, kw_only=True):
    """As `StructuredOutput`, for the arguments of one tool; `valid` is null where it was not called."""

    name: str
    enforcement: Literal["full", "approximate", "validate_only"]
    ignored: list[str]
    valid: bool | None


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Enforcement of a request's grammar.

    `full`: every token conforms. `approximate`: all but `ignored` was enforced. `validate_only`: any JSON was allowed.
    Where enforcement was not full, `valid` is the verdict on the finished text; null where it was cut off. `tools` says
    the same of each tool that could be called.
    """

    backend: str
    enforcement: Literal["full", "approximate", "validate_only"]
    ignored: list[str]
    valid: bool | None
    tools: list[ToolEnforcement] | msgspec.UnsetType = msgspec.UNSET


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Part of `usage`; `image_tokens` where a prompt has images."""

    cached_tokens: int = 0
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request, all choices together; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    reasoning_tokens: int

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int, reasoning: int, image: int = 0) -> Usage:
        """Build it from its counts."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached, image or msgspec.UNSET),
            completion_tokens_details=CompletionTokensDetails(reasoning),
            reasoning_tokens=reasoning,
        )


class PromptLogprob(msgspec.Struct, frozen=True):
    """A candidate for a prompt position, keyed by token id. `rank` is known among the most likely only."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
