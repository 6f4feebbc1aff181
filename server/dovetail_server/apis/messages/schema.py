"""`/v1/messages` and `/v1/messages/count_tokens`: the requests, and the whole reply."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Discriminator, Field, Tag

from dovetail.processing.bounds import MAX_TOKEN_ID, MAX_TOKENS
from dovetail_server.apis.dropped import Notes, UnservableTool
from dovetail_server.media.addresses import MAX_URL
from dovetail_server.schema.common import (
    FreeForm,
    Name,
    RequestModel,
    Rid,
    SentBack,
    StopString,
    StructuredOutput,
    Text,
    TokenId,
)
from dovetail_server.schema.fail_fast import PlainList

# `context_management` of `/v1/messages`: what a request may have cleared.

Names = Annotated[list[Name], Field(max_length=1024)]


class NumTokens(RequestModel):
    """A number of tokens; four bytes of JSON count as one."""

    type: Literal["input_tokens"]
    value: int = Field(ge=0, le=MAX_TOKENS)


class NumToolUses(RequestModel):
    """A number of tool uses that have their results."""

    type: Literal["tool_uses"]
    value: int = Field(ge=0, le=MAX_TOKENS)


class Trigger(RequestModel):
    """Either of these."""

    type: Literal["input_tokens", "tool_uses"]
    value: int = Field(ge=0, le=MAX_TOKENS)


class KeptTurns(RequestModel):
    """A number of the model's turns, or all."""

    type: Literal["thinking_turns", "all"]
    value: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Of `thinking_turns`.")


class ClearToolUses(RequestModel):
    """Clear old results of tools: a line of text takes their place."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Trigger | None = Field(None, description="Beyond it. Default: 100,000 input tokens.")
    keep: NumToolUses | None = Field(None, description="Of the last uses. Default: 3.")
    clear_at_least: NumTokens | None = Field(None, description="Else nothing is cleared.")
    exclude_tools: Names | None = Field(None, description="Whose results stay.")
    clear_tool_inputs: bool | Names | None = Field(None, description="Clear the inputs as well, of all tools or some.")


class ClearThinking(RequestModel):
    """Clear old thinking. The first of the edits."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptTurns | None = Field(None, description="Of the last turns with thinking. Default: 1.")


class Compact(RequestModel):
    """Not supported."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["compact_20260112"]


class ContextEdits(RequestModel):
    """What is cleared out of the prompt."""

    edits: Annotated[
        list[Annotated[ClearToolUses | ClearThinking | Compact, Field(discriminator="type")]], Field(max_length=64)
    ] = Field(default_factory=list)


BLOCK_TYPES = (
    *("text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result"),
)
Cached = Annotated[FreeForm | None, Field(description="Accepted; prefixes are always cached.")]


class TextBlock(SentBack):
    """Text."""

    type: Literal["text"]
    text: Text
    cache_control: Cached = None
    citations: Annotated[list[FreeForm], Field(max_length=0)] | None = Field(None, description="Only an empty list.")


class Citations(SentBack):
    """Whether the reply cites a block."""

    enabled: Literal[False] = Field(False, description="Replies cite nothing.")


class PlainSource(SentBack):
    """A document's text."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: Text


class ContentSource(SentBack):
    """A document's text, or its parts."""

    type: Literal["content"]
    content: Text | Annotated[list[TextBlock], Field(max_length=4096)]


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) else ""


DocumentSource = Annotated[
    Annotated[PlainSource, Tag("text")] | Annotated[ContentSource, Tag("content")],
    Discriminator(
        _kind,
        custom_error_type="source_type",
        custom_error_message="must be of type text or content: PDFs and other files are not read here; send their text",
    ),
]


class Base64Source(SentBack):
    """An image in the request. Its first bytes say what it is, whatever `media_type` says."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(max_length=128)]
    data: Text


class UrlSource(SentBack):
    """An image that the server fetches, where its operator allows that."""

    type: Literal["url"]
    url: Annotated[str, Field(max_length=MAX_URL)]


class FileSource(SentBack):
    """An image that was uploaded to `/v1/files`."""

    type: Literal["file"]
    file_id: Name


ImageOrigin = Annotated[
    Annotated[Base64Source, Tag("base64")] | Annotated[UrlSource, Tag("url")] | Annotated[FileSource, Tag("file")],
    Discriminator(_kind, custom_error_type="source_type", custom_error_message="must be of type base64, url or file"),
]


class ImageBlock(SentBack):
    """An image."""

    type: Literal["image"]
    source: ImageOrigin
    cache_control: Cached = None


class DocumentBlock(SentBack):
    """A document of text. PDFs, and those behind an address or an identifier, are not read here."""

    type: Literal["document"]
    source: DocumentSource
    title: Text | None = None
    context: Text | None = None
    citations: Citations | None = None
    cache_control: Cached = None


class SearchResultBlock(SentBack):
    """The results of a search."""

    type: Literal["search_result"]
    source: Text
    title: Text
    content: Annotated[list[TextBlock], Field(max_length=4096)]
    citations: Citations | None = None
    cache_control: Cached = None


class RedactedThinkingBlock(SentBack):
    """Thinking that another server has encrypted. No model can read it here, so the prompt has none of it."""

    type: Literal["redacted_thinking"]
    data: Text


class ThinkingBlock(SentBack):
    """What the model thought, as an earlier reply had it. Where `thinking` is empty, `signature` carries it."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class ToolUseBlock(SentBack):
    """A tool call of the model."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: FreeForm
    cache_control: Cached = None
    caller: FreeForm | None = Field(None, description="Accepted; there is one way of calling.")


class ToolResultBlock(SentBack):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[Block], Field(max_length=4096)] | None = None
    is_error: bool | None = Field(None, description="true puts `Error:` before the content.")
    cache_control: Cached = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        _kind,
        custom_error_type="block_type",
        custom_error_message=f"must have a type that this server reads: {', '.join(BLOCK_TYPES)}; "
        "blocks of server tools are not supported",
    ),
]
Blocks = Annotated[list[Block], Field(min_length=1, max_length=4096)]
TextBlocks = Annotated[list[TextBlock], Field(max_length=4096)]


class AnthropicMessage(SentBack):
    """One turn, or part of one: turns of one role in a row are one."""

    role: Literal["user", "assistant", "system"]
    content: Text | Blocks


SERVERS = (
    *("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_"),
    *("computer_2", "computer_toolset_"),
)
"""Beginnings of types, dates behind them: tools that Anthropic's servers run, and what shows the model pictures."""


class ServerTool(UnservableTool):
    """A tool that Anthropic's servers run, or that needs eyes. Left out, or with `--unservable-tools refuse` a 400."""


class AnthropicTool(RequestModel):
    """A tool that the client runs."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9_.:\-]+$")]
    type: Annotated[str, Field(max_length=64)] | None = None
    description: Text | None = None
    input_schema: FreeForm | None = Field(None, description="Of a tool whose type says it: left out.")
    max_characters: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Of an editor; the client sees to it.")
    strict: bool | None = None
    cache_control: Cached = None
    eager_input_streaming: bool | None = Field(None, description="Accepted; input is always streamed as it comes.")
    allowed_callers: Annotated[list[Name], Field(max_length=16)] | None = Field(None, description='Only ["direct"].')
    defer_loading: bool | None = Field(None, description="Only false.")
    input_examples: Annotated[list[FreeForm], Field(max_length=64)] | None = Field(None, description="Not supported.")


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "server" if isinstance(kind, str) and kind.startswith(SERVERS) else "client"


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("client")] | Annotated[ServerTool, Tag("server")],
    Discriminator(_tool_kind),
]


class ToolChoice(RequestModel):
    """Whether and what the model calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesThinking(RequestModel):
    """Whether the model thinks."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Most tokens of thinking; for `enabled`.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted` sends the thinking in the signature only. Nothing here shortens it."
    )


class OutputFormat(RequestModel):
    """Form of the answer."""

    type: Literal["json_schema"]
    schema_: FreeForm = Field(alias="schema")


class OutputConfig(RequestModel):
    """Effort and form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class AnthropicMetadata(RequestModel):
    """Whom the request is for."""

    user_id: Name | None = None


class MessagesPrompt(RequestModel):
    """What a prompt is made of."""

    model: Name | None = Field(None, description="One of the served names. Default: the first.")
    messages: Annotated[list[dict[str, Any]], PlainList(AnthropicMessage, least=1, most=65536)]
    system: Text | TextBlocks | None = None
    tools: Annotated[list[AnyTool], Field(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: MessagesThinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Cached = None
    speed: Literal["standard"] | None = None
    chat_template_kwargs: FreeForm | None = Field(None, description="Of this server: variables of the chat template.")
    user_profile_id: Name | None = None
    workspace_id: Name | None = None
    context_management: ContextEdits | None = None
    mcp_servers: Annotated[list[FreeForm], Field(max_length=64)] | None = Field(None, description="Not supported.")
    thread: FreeForm | None = Field(None, description="Not supported, and told so that clients send the history.")


class CountTokensRequest(MessagesPrompt):
    """Body of `POST /v1/messages/count_tokens`."""


class MessagesRequest(MessagesPrompt):
    """Body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS, description="As much as the context allows, if that is less.")
    stop_sequences: Annotated[list[StopString], Field(max_length=32)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    container: Name | FreeForm | None = Field(None, description="Not supported.")
    inference_geo: Name | None = Field(None, description="Not supported.")
    diagnostics: FreeForm | None = Field(None, description="Not supported.")

    min_p: float | None = Field(None, ge=0, le=1, description="Of this server, as the fields below.")
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    priority: int | None = Field(None, ge=-(1 << 31), le=(1 << 31) - 1, description="Higher goes first.")
    cache_salt: Name | None = None
    rid: Rid | None = Field(None, description="Identifier to abort the request by, beside the message's id.")
    grammar_backend: Name | None = Field(None, description="One of the loaded backends. Default: selected per request.")


Json = dict[str, Any]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text of the answer. Where the schema has null for no citations, `@ai-sdk/anthropic` takes a list only."""

    text: str
    citations: list[Json] = []


class ThinkingOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The reasoning of the model. The signature is not checked."""

    thinking: str
    signature: str


class DirectCaller(msgspec.Struct, frozen=True, tag_field="type", tag="direct"):
    """Who makes a call: the model itself."""


class ToolUseOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model asks for."""

    id: str
    name: str
    input: Json
    caller: DirectCaller = msgspec.field(default_factory=DirectCaller)


class ThinkingTokens(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    thinking_tokens: int


class DeltaUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens at the end of a stream. The prompt's are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    server_tool_use: None = None


class MessageUsage(DeltaUsage, frozen=True, kw_only=True):
    """Tokens of a message; what this server has not is null."""

    cache_creation: None = None
    inference_geo: None = None
    service_tier: Literal["standard"] = "standard"


class AppliedEdits(msgspec.Struct, frozen=True):
    """What was cleared out of the prompt, of each edit that cleared something. Tokens are estimated."""

    applied_edits: list[Json]


class OriginalTokens(msgspec.Struct, frozen=True):
    """Tokens before anything was cleared."""

    original_input_tokens: int


class MessageReply(msgspec.Struct, kw_only=True):
    """Response of `POST /v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextOutput | ThinkingOutput | ToolUseOutput]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    usage: MessageUsage
    context_management: AppliedEdits | msgspec.UnsetType = msgspec.UNSET
    structured_output: StructuredOutput | msgspec.UnsetType = msgspec.UNSET
    dovetail: Notes | msgspec.UnsetType = msgspec.UNSET


class TokenCount(msgspec.Struct, frozen=True):
    """Response of `POST /v1/messages/count_tokens`."""

    input_tokens: int
    context_management: OriginalTokens | msgspec.UnsetType = msgspec.UNSET


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A served name, as Anthropic's clients read it."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelInfos(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `GET /v1/models` to a request with the header `anthropic-version`."""

    data: list[ModelInfo]
    has_more: bool = False
    first_id: str
    last_id: str


class UnsupportedThread(msgspec.Struct, frozen=True, kw_only=True):
    """How clients learn that no conversation is held here: they go on with the whole history."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: tuple[str, ...] = ("thread",)


class AnthropicErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong. `type` follows from the status; the message names the field at fault."""

    type: str
    message: str
    details: UnsupportedThread | msgspec.UnsetType = msgspec.UNSET


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every error on these routes."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str | None
