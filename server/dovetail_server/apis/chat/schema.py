"""`/v1/chat/completions`: request and reply."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Discriminator, Field, Tag

from dovetail.processing.bounds import MAX_TOKENS, MAX_TOOL_NAME, TOOL_NAME, Effort
from dovetail_server.apis.custom import ToolText
from dovetail_server.apis.dropped import Notes, UnservableTool
from dovetail_server.schema.common import (
    Count,
    FinishReason,
    FreeForm,
    GrammarFields,
    Metadata,
    Name,
    Page,
    PromptFields,
    PromptLogprobs,
    RequestModel,
    SamplingFields,
    ServiceFields,
    StructuredOutput,
    Text,
    TokenIds,
    Top,
    Usage,
)
from dovetail_server.schema.fail_fast import PlainList

JsonObject = dict[str, Any]
Sent = Annotated[JsonObject, Field(max_length=65536)]
"""An object that a client sends where OpenAI has its JSON text."""


class ContentPart(RequestModel):
    """One part of a message's content: a text, or an image where the model sees."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(max_length=64)]
    text: Text | None = None
    image_url: Text | FreeForm | None = Field(
        None, description="Of type `image_url`: the URL, or an object with `url` or `file_id`, and `detail`."
    )


class FunctionCall(RequestModel):
    """A call in the history. `arguments` is JSON text, or its object; fields beyond these are left out."""

    model_config = ConfigDict(extra="allow")

    name: Name
    arguments: Text | Sent | None = ""


class CustomText(RequestModel):
    """A call of a custom tool in the history; fields beyond these are left out."""

    model_config = ConfigDict(extra="allow")

    name: Name
    input: Text


class MessageCustomCall(RequestModel):
    """A call of a custom tool in the history; fields beyond these are left out."""

    model_config = ConfigDict(extra="allow")

    id: Name | None = None
    type: Literal["custom"]
    custom: CustomText


class MessageToolCall(RequestModel):
    """A tool call in the history; fields beyond these are left out."""

    model_config = ConfigDict(extra="allow")

    id: Name | None = None
    type: Literal["function"] | None = "function"
    function: FunctionCall


def _call_kind(call: Any) -> str | None:
    kind = call.get("type") if isinstance(call, dict) else getattr(call, "type", None)
    tags = {None: "function call", "function": "function call", "custom": "custom call"}  # such as no field is called
    return tags.get(kind) if kind is None or isinstance(kind, str) else None


AnyCall = Annotated[
    Annotated[MessageToolCall, Tag("function call")] | Annotated[MessageCustomCall, Tag("custom call")],
    Discriminator(
        _call_kind,
        custom_error_type="call_type",
        custom_error_message="has a type that is not supported; possible: function, custom",
    ),
]


class Message(RequestModel):
    """One message. Fields beyond these reach the chat template unchanged."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[JsonObject], PlainList(ContentPart | Text, most=65536)] | Sent | None = Field(
        None, description="An object as a tool's result only."
    )
    name: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = Field(None, description="Another name of `reasoning_content`.")
    tool_calls: Annotated[list[AnyCall], Field(max_length=1024)] | None = None
    tool_call_id: Name | None = None


Messages = Annotated[list[JsonObject], PlainList(Message, least=1, most=65536)]


class FunctionSpec(RequestModel):
    """A function the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME, pattern=TOOL_NAME)]
    description: Text | None = None
    parameters: FreeForm | None = None
    strict: bool | None = None
    output_schema: FreeForm | None = Field(None, description="JSON schema of its result; reaches the chat template.")


UNSERVABLE = (
    *("builtin_function", "web_search", "web_search_preview", "retrieval", "code_interpreter"),
    *("file_search", "mcp", "image_generation", "openrouter:web_search", "browser_search"),
)
"""Tools that other servers run."""


class Tool(RequestModel):
    """A function."""

    type: Literal["function"]
    function: FunctionSpec


class GrammarText(RequestModel):
    """What a text must match. A regular expression is enforced, a Lark grammar where that is possible."""

    syntax: Literal["lark", "regex"]
    definition: Text


class NestedGrammar(RequestModel):
    """A text that matches a grammar."""

    type: Literal["grammar"]
    grammar: GrammarText


class CustomSpec(RequestModel):
    """A tool that is given a text."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME, pattern=TOOL_NAME)]
    description: Text | None = None
    format: Annotated[ToolText | NestedGrammar, Field(discriminator="type")] | None = None


class CustomTool(RequestModel):
    """A custom tool."""

    type: Literal["custom"]
    custom: CustomSpec


class HostedTool(UnservableTool):
    """A tool that other servers run. It is left out, or with `--unservable-tools refuse` a 400."""

    type: Literal[UNSERVABLE]  # type: ignore[valid-type]


def _tool_kind(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if kind in (None, "function", "custom"):
        return f"{kind or 'function'} tool"  # a tag that no field is called
    return "hosted tool" if isinstance(kind, str) and kind in UNSERVABLE else None


AnyTool = Annotated[
    Annotated[Tool, Tag("function tool")]
    | Annotated[CustomTool, Tag("custom tool")]
    | Annotated[HostedTool, Tag("hosted tool")],
    Discriminator(
        _tool_kind,
        custom_error_type="tool_type",
        custom_error_message=f"has a type that is not supported; possible: function, custom, {', '.join(UNSERVABLE)}",
    ),
]


class Thinking(RequestModel):
    """Whether the model thinks, as DeepSeek's API says it."""

    type: Literal["enabled", "disabled"]


class ChatRequest(SamplingFields, PromptFields, ServiceFields, GrammarFields):
    """Body of `POST /v1/chat/completions`."""

    model: Name | None = Field(None, description="One of the served names. Default: the first.")
    messages: Messages
    max_completion_tokens: Count | None = Field(None, description="0 computes the prompt and generates nothing.")
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: Annotated[list[AnyTool], Field(max_length=1024)] | None = None
    tool_choice: Annotated[str, Field(max_length=64)] | FreeForm | None = None
    parallel_tool_calls: bool | None = Field(None, description="false keeps the first tool call only.")
    functions: Annotated[list[FunctionSpec], Field(max_length=1024)] | None = Field(
        None, json_schema_extra={"deprecated": True}
    )
    function_call: Annotated[str, Field(max_length=64)] | FreeForm | None = Field(
        None, json_schema_extra={"deprecated": True}
    )
    reasoning_effort: Effort | None = None
    separate_reasoning: bool | None = Field(None, description="false leaves the reasoning in the content.")
    stream_reasoning: bool | None = Field(None, description="false sends the reasoning in one chunk.")
    thinking_budget: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="Maximum reasoning tokens; then the answer begins."
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="Another name of `thinking_budget`."
    )
    thinking: Thinking | None = Field(None, description="Turns reasoning on or off, as `reasoning_effort` does.")
    input_ids: TokenIds | None = Field(None, description="The prompt as tokens, in place of the rendered messages.")
    echo: bool | None = Field(None, description="Begin the output with the last message, if it is the assistant's.")
    add_special_tokens: bool | None = Field(None, description="true: add them to those of the chat template.")
    include_reasoning: bool | None = Field(None, description="false drops the reasoning from the response.")
    chat_template_kwargs: FreeForm | None = None
    chat_template: Text | None = Field(None, description="Not accepted in a request; see --chat-template.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[FreeForm], Field(max_length=4096)] | None = None
    modalities: Annotated[list[Annotated[str, Field(max_length=16)]], Field(max_length=8)] | None = None
    audio: FreeForm | None = Field(None, description="Not supported.")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Reaches the chat template.")
    web_search_options: FreeForm | None = Field(None, description="Not supported.")
    moderation: FreeForm | None = Field(None, description="Not supported.")


class Function(msgspec.Struct, frozen=True):
    """A called function; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


class Custom(msgspec.Struct, frozen=True):
    """A called custom tool; `input` is the text that it is given."""

    name: str
    input: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in a full reply: of a function, or of a custom tool."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: Function | msgspec.UnsetType = msgspec.UNSET
    custom: Custom | msgspec.UnsetType = msgspec.UNSET


class ReplyMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's answer. Fields that clients read unchecked are null where they have no value."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: Function | msgspec.UnsetType = msgspec.UNSET


class TokenAlternative(msgspec.Struct, frozen=True):
    """A candidate token; `bytes` is its UTF-8 form."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenInfo(TokenAlternative, frozen=True):
    """A generated token and its top alternatives."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of all generated tokens, reasoning included."""

    content: list[TokenInfo] | None
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    matched_stop: int | str | None
    structured_output: StructuredOutput | msgspec.UnsetType = msgspec.UNSET
    context_exceeded: bool | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Of a stored one."""
    dovetail: Notes | msgspec.UnsetType = msgspec.UNSET


class CompletionUpdate(RequestModel):
    """Body of `POST /v1/chat/completions/{id}`: what stands in the place of a stored completion's metadata."""

    metadata: Metadata | None


class CompletionDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `DELETE /v1/chat/completions/{id}`."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: bool = True


class StoredCompletions(Page, frozen=True, kw_only=True):
    """Response of `GET /v1/chat/completions`: stored completions, each with its metadata."""

    data: list[ChatCompletion]
