"""`/v1/responses`: the request. What comes back is in `response_objects.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, TypeAdapter

from dovetail.processing.bounds import MAX_TOKEN_ID, MAX_TOKENS
from dovetail_server.apis.responses.tool_schema import AnyTool
from dovetail_server.schema.common import (
    Bias,
    FreeForm,
    Name,
    RequestModel,
    Rid,
    StopString,
    Text,
)
from dovetail_server.schema.early import Plain

ItemId = Annotated[str, Field(min_length=1, max_length=128)]
Status = Literal["in_progress", "completed", "incomplete"]
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


class InputPart(RequestModel):
    """A part of a message: `input_text`, `output_text`, `text` or `refusal`; this server reads text only."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(max_length=64)]
    text: Text | None = None
    refusal: Text | None = None


Parts = Annotated[list[InputPart], Field(max_length=4096)]


class MessageItem(RequestModel):
    """A message. An answer of the model is one with the role `assistant`."""

    type: Literal["message"] = "message"
    id: ItemId | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts
    status: Status | None = None
    phase: Annotated[str, Field(max_length=32)] | None = Field(None, description="Accepted; no template here knows it.")


class FunctionCallItem(RequestModel):
    """A call that the model made. `arguments` is JSON text."""

    type: Literal["function_call"]
    id: ItemId | None = None
    call_id: Name
    name: Name
    arguments: Text
    namespace: Name | None = None
    parsed_arguments: FreeForm | None = Field(None, description="As client libraries add them; `arguments` count.")
    status: Status | None = None


class FunctionCallOutputItem(RequestModel):
    """What a call gave."""

    type: Literal["function_call_output"]
    id: ItemId | None = None
    call_id: Name
    output: Text | Parts
    name: Name | None = None
    status: Status | None = None


class CustomCallItem(RequestModel):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    id: ItemId | None = None
    call_id: Name
    name: Name
    input: Text
    namespace: Name | None = None
    status: Status | None = None


class CustomCallOutputItem(RequestModel):
    """What a custom tool gave."""

    type: Literal["custom_tool_call_output"]
    id: ItemId | None = None
    call_id: Name
    output: Text | Parts
    name: Name | None = None
    status: Status | None = None


class ShellCallItem(RequestModel):
    """A command, or several, that the model had the client run."""

    type: Literal["local_shell_call", "shell_call"]
    id: ItemId | None = None
    call_id: Name
    action: FreeForm
    status: Status | None = None


class LocalShellOutputItem(RequestModel):
    """What a command gave. In OpenAI's API `id` is the call's."""

    type: Literal["local_shell_call_output"]
    id: ItemId
    call_id: Name | None = None
    output: Text
    status: Status | None = None


class ShellOutputItem(RequestModel):
    """What commands gave."""

    type: Literal["shell_call_output"]
    id: ItemId | None = None
    call_id: Name
    output: Annotated[list[FreeForm], Field(max_length=1024)]
    max_output_length: int | None = Field(None, ge=0, le=MAX_TOKENS)
    status: Status | None = None


class ApplyPatchCallItem(RequestModel):
    """A change that the model had the client make."""

    type: Literal["apply_patch_call"]
    id: ItemId | None = None
    call_id: Name
    operation: FreeForm
    status: Status | None = None


class ApplyPatchOutputItem(RequestModel):
    """What became of a change."""

    type: Literal["apply_patch_call_output"]
    id: ItemId | None = None
    call_id: Name
    output: Text | None = None
    status: Literal["completed", "failed"]


class WebSearchCallItem(RequestModel):
    """A search that another server made. The model is not told of it: the item has no results."""

    type: Literal["web_search_call"]
    id: ItemId | None = None
    status: Annotated[str, Field(max_length=32)] | None = None
    action: FreeForm | None = None


class AdditionalToolsItem(RequestModel):
    """Tools that stand in the conversation and not in `tools`; the model may call them as it may those."""

    type: Literal["additional_tools"]
    id: ItemId | None = None
    role: Literal["developer", "system"] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=1024)]
    status: Status | None = None


class ReasoningPart(RequestModel):
    """Part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


ReasoningParts = Annotated[list[ReasoningPart], Field(max_length=4096)]


class ReasoningItem(RequestModel):
    """What the model thought, as an earlier reply had it."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: ReasoningParts = Field(default_factory=list)
    content: ReasoningParts | None = None
    encrypted_content: Text | None = Field(None, description="As this server wrote it; read where `content` is absent.")
    status: Status | None = None


class CompactionItem(RequestModel):
    """What `POST /v1/responses/compact` made of an earlier part of the conversation."""

    type: Literal["compaction"]
    id: ItemId | None = None
    encrypted_content: Text = Field(description="As this server wrote it.")
    created_by: Name | None = None


class ItemReference(RequestModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: ItemId


def _kind(item: Any) -> str:
    """Return the tag of an item; a message may come without `type`, and with `null` in it an item reference."""
    if not isinstance(item, dict):
        return getattr(item, "type", "")
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item else "item_reference"
    return str(kind)


ITEM_TYPES = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call"),
    *("apply_patch_call_output", "web_search_call", "additional_tools", "compaction", "item_reference"),
)
Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ShellCallItem, Tag("local_shell_call")]
    | Annotated[LocalShellOutputItem, Tag("local_shell_call_output")]
    | Annotated[ShellCallItem, Tag("shell_call")]
    | Annotated[ShellOutputItem, Tag("shell_call_output")]
    | Annotated[ApplyPatchCallItem, Tag("apply_patch_call")]
    | Annotated[ApplyPatchOutputItem, Tag("apply_patch_call_output")]
    | Annotated[WebSearchCallItem, Tag("web_search_call")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message=f"has a type that is not supported; possible: {', '.join(ITEM_TYPES)}",
    ),
]


Items = Annotated[list[dict[str, Any]], Plain(Item, most=65536)]
item_model = TypeAdapter(Item).validate_python


def item_kind(item: dict[str, Any]) -> str:
    """Return the type of an item that has been checked."""
    return _kind(item)


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


class ConversationRef(RequestModel):
    """The conversation that a response goes on with."""

    id: ItemId


PlainRef = BeforeValidator(lambda given: {"id": given} if isinstance(given, str) else given, ItemId | ConversationRef)


class ResponsePrompt(RequestModel):
    """What the prompt of a response is made of, and how it is read."""

    model: Name | None = Field(None, description="One of the served names; the first if not given.")
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


class CompactRequest(RequestModel):
    """Body of `POST /v1/responses/compact`."""

    model: Name | None = Field(None, description="One of the served names; the first if not given.")
    input: Text | Items | None = None
    instructions: Text | None = None
    previous_response_id: ItemId | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: FreeForm | None = Field(None, description="Accepted; prefixes are cached by themselves.")
    prompt_cache_retention: Annotated[str, Field(max_length=32)] | None = None
    service_tier: Annotated[str, Field(max_length=32)] | None = None


class ResponsesRequest(ResponsePrompt):
    """Body of `POST /v1/responses`."""

    type: Literal["response.create"] | None = Field(None, description="Of a WebSocket's messages.")
    generate: bool | None = Field(
        None, description="false computes the prompt and ends without output, so that what continues it begins sooner."
    )
    max_tool_calls: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Bounds calls of built-in tools, of which there are none."
    )
    max_output_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Needs message.output_text.logprobs in `include`.")
    include: Annotated[list[Includable], Field(max_length=32)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="true if not given: the reply can be fetched and continued.")
    background: bool | None = Field(None, description="Answer at once and generate afterwards; needs `store`.")
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Name], Field(max_length=16)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    service_tier: Annotated[str, Field(max_length=32)] | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Annotated[str, Field(max_length=32)] | None = None
    prompt_cache_options: FreeForm | None = Field(None, description="`prewarm: true` is `generate: false`.")
    client_metadata: FreeForm | None = Field(None, description="Accepted: what the client notes for itself.")

    prompt: FreeForm | None = Field(None, description="Not supported.")
    context_management: Annotated[list[FreeForm], Field(max_length=64)] | None = Field(
        None, description="Not supported."
    )
    moderation: FreeForm | None = Field(None, description="Not supported.")

    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID, description="-1 and 0 switch it off.")
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: StopString | Annotated[list[StopString], Field(max_length=32)] | None = None
    logit_bias: Annotated[dict[Annotated[str, Field(max_length=12)], Bias], Field(max_length=65536)] | None = None
    thinking_budget: int | None = Field(None, ge=0, le=MAX_TOKENS, description="Most tokens of thinking.")
    priority: int | None = Field(
        None,
        ge=-(1 << 31),
        le=(1 << 31) - 1,
        description="Higher goes first; at the lowest, only while nothing else runs.",
    )
    cache_salt: Name | None = Field(None, description="Requests with different salts share no cached prefix.")
    extra_key: Name | None = Field(None, description="Another name of `cache_salt`.")
    rid: Rid | None = Field(None, description="Identifier to abort the request by, beside the response's id.")
    request_id: Rid | None = Field(None, description="Another name of `rid`.")
    grammar_backend: Name | None = Field(None, description="Of the loaded backends; chosen for each request if absent.")
