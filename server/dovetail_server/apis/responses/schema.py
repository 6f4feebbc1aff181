"""`/v1/responses`: the request. What comes back is in `objects.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field

from dovetail.contracts.errors import RequestError
from dovetail.processing.bounds import MAX_TOKEN_ID, MAX_TOKENS
from dovetail_server.apis.responses.item_schema import Item, ItemId, Items
from dovetail_server.apis.responses.tool_schema import AnyTool
from dovetail_server.schema.common import (
    Bias,
    FreeForm,
    HintFields,
    Metadata,
    Name,
    RequestModel,
    SchedulingFields,
    StopString,
    Text,
)
from dovetail_server.schema.fail_fast import PlainList

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextFormat(RequestModel):
    """Form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: FreeForm | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(RequestModel):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Reaches the chat template.")


class ReasoningConfig(RequestModel):
    """How the model thinks, and how much of it is shown."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="`auto` and `detailed` give the reasoning out as its own summary; nothing here shortens it."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Old name of `summary`.", json_schema_extra={"deprecated": True}
    )
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(
        None,
        description="auto, all_turns: the chat template gets all reasoning that is sent, and decides what it shows.",
    )


class ResponseStreamOptions(RequestModel):
    """What a stream carries beside events."""

    include_obfuscation: bool | None = Field(None, description="Accepted; no padding is ever added.")
    include_usage: bool | None = Field(None, description="Accepted; the last event always has the usage.")


class ConversationRef(RequestModel):
    """The conversation that a response goes on with."""

    id: ItemId


PlainRef = BeforeValidator(lambda given: {"id": given} if isinstance(given, str) else given, ItemId | ConversationRef)


class ContextManagement(RequestModel):
    """When the conversation is compacted."""

    type: Literal["compaction"]
    compact_threshold: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Of prompts with more tokens. Default: three quarters of the context.",
    )


class ResponsePrompt(RequestModel):
    """What the prompt of a response is made of, and how it is read."""

    model: Name | None = Field(None, description="One of the served names. Default: the first.")
    input: Text | Items = Field("", description="Left out: an empty message.")
    instructions: Text | None = None
    previous_response_id: ItemId | None = None
    tools: Annotated[list[AnyTool], Field(max_length=1024)] | None = None
    tool_choice: Annotated[str, Field(max_length=64)] | FreeForm | None = None
    parallel_tool_calls: bool | None = Field(None, description="false keeps the first tool call only.")
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto` leaves out the oldest turns that do not fit."
    )
    chat_template_kwargs: FreeForm | None = None
    conversation: Annotated[ConversationRef, PlainRef] | None = Field(
        None,
        description="Its items come before `input`; input and output are added to it. An id, or its object.",
    )


class InputTokensRequest(ResponsePrompt):
    """Body of `POST /v1/responses/input_tokens`."""


class CompactRequest(ResponsePrompt, HintFields):
    """Body of `POST /v1/responses/compact`. What only a reply would need is accepted, as Codex sends it."""

    input: Annotated[
        Text | Items, BeforeValidator(lambda given: [] if given is None else given, Text | Items | None)
    ] = Field(default_factory=list)
    store: Literal[False] | None = Field(None, description="Nothing is stored.")


class ResponsesRequest(ResponsePrompt, SchedulingFields, HintFields):
    """Body of `POST /v1/responses`."""

    type: Literal["response.create"] | None = Field(None, description="Of a WebSocket's messages.")
    generate: bool | None = Field(
        None, description="false computes the prompt and ends without output, so that a continuation starts sooner."
    )
    max_tool_calls: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="Bounds calls of built-in tools, of which there are none."
    )
    max_output_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Needs message.output_text.logprobs in `include`.")
    include: Annotated[list[Includable], Field(max_length=32)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="true: the response can be fetched and continued. Default: true.")
    background: bool | None = Field(None, description="Answer at once and generate afterwards; needs `store`.")
    metadata: Metadata | None = None
    safety_identifier: Name | None = None
    prompt_cache_options: FreeForm | None = Field(None, description="`prewarm: true` is `generate: false`.")
    client_metadata: FreeForm | None = Field(None, description="Accepted: what the client notes for itself.")

    prompt: FreeForm | None = Field(None, description="Not supported.")
    context_management: Annotated[list[ContextManagement], Field(max_length=1)] | None = Field(
        None, description="Compacts a conversation that has grown beyond a number of tokens."
    )
    moderation: FreeForm | None = Field(None, description="Not supported.")

    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID, description="-1 and 0: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: StopString | Annotated[list[StopString], Field(max_length=32)] | None = None
    logit_bias: Annotated[dict[Annotated[str, Field(max_length=12)], Bias], Field(max_length=65536)] | None = None
    thinking_budget: int | None = Field(None, ge=0, le=MAX_TOKENS, description="Maximum reasoning tokens.")
    extra_key: Name | None = Field(None, description="Another name of `cache_salt`.")
    grammar_backend: Name | None = Field(None, description="One of the loaded backends. Default: selected per request.")


# `/v1/conversations`: requests and replies, as OpenAI has them.

MAX_AT_ONCE = 20
"""Items of a request, as at OpenAI."""
NewItems = Annotated[list[dict[str, Any]], PlainList(Item, most=MAX_AT_ONCE)]


class ConversationRequest(RequestModel):
    """Body of `POST /v1/conversations`."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class ConversationUpdate(RequestModel):
    """Body of `POST /v1/conversations/{id}`: what stands in the place of its metadata."""

    metadata: Metadata | None


class ConversationItems(RequestModel):
    """Body of `POST /v1/conversations/{id}/items`."""

    items: NewItems


class ConversationObject(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `DELETE /v1/conversations/{id}`; its items are gone, too."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


def missing(conversation_id: str, param: str = "conversation_id") -> RequestError:
    """Return the 404 of a conversation."""
    text = f"no conversation {conversation_id!r} here: it was deleted, or has been given up as too old"
    return RequestError(text, param=param, code="conversation_not_found", status=404)


def missing_item(item_id: str, conversation_id: str, param: str = "item_id") -> RequestError:
    """Return the 404 of an item."""
    text = f"no item {item_id!r} in the conversation {conversation_id!r}"
    return RequestError(text, param=param, code="item_not_found", status=404)
