"""`/v1/responses`: what comes back, whole and as events of a stream.

Events are sent as `event: TYPE` and `data: {…}`; the stream ends after `response.completed`, `response.incomplete` or
`response.failed`. Defined by OpenAI's API reference, Responses and Responses streaming.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dovetail.contracts.replies import ChoiceView
from dovetail_server.apis.chat.schema import TokenInfo
from dovetail_server.apis.dropped import Notes
from dovetail_server.schema.common import Page, StructuredOutput

# Calls among the items of a response.

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class FunctionCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model asks for; `arguments` is JSON text as the model wrote it."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; `input` is text."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class ExecAction(msgspec.Struct, kw_only=True, tag_field="type", tag="exec", forbid_unknown_fields=True):
    """A command: the program and its arguments."""

    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    working_directory: str | None = None
    user: str | None = None


class LocalShellCall(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call"):
    """A command that the client is to run."""

    id: str
    call_id: str
    action: ExecAction
    status: ItemStatus


class ShellAction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Commands for a shell."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCall(msgspec.Struct, kw_only=True, tag_field="type", tag="shell_call"):
    """Commands that the client is to run."""

    id: str
    call_id: str
    action: ShellAction
    status: ItemStatus


class PatchOperation(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A change of a file; `diff` is of one that is created or updated."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        """Have a diff where one belongs.

        Raises:
            ValueError: There is one too many, or too few.
        """
        if (self.type == "delete_file") != (self.diff is msgspec.UNSET):
            raise ValueError("a diff belongs to create_file and update_file")


class ApplyPatchCall(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch_call"):
    """A change that the client is to make."""

    id: str
    call_id: str
    operation: PatchOperation
    status: ItemStatus


ClientCall = LocalShellCall | ShellCall | ApplyPatchCall


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Json = dict[str, Any]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of an answer."""

    text: str
    annotations: list[Json] = []
    logprobs: list[TokenInfo] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """An answer."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """Reasoning that was asked for as a summary."""

    text: str


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning."""

    text: str


class ReasoningOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought."""

    id: str
    status: ItemStatus
    summary: list[SummaryText] = []
    content: list[ReasoningText] | msgspec.UnsetType = msgspec.UNSET
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET


class CompactionOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="compaction"):
    """A summary of the conversation, opaque to clients: see `sealed`. While it is written it has no content."""

    id: str
    encrypted_content: str = ""


WrittenItem = OutputMessage | ReasoningOutput | FunctionCallOutput | CustomCallOutput | ClientCall
OutputItem = WrittenItem | CompactionOutput


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Part of `usage`; writing to the cache is not counted. `image_tokens` where the prompt has images."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET


class OutputDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


NO_USAGE = ResponseUsage(
    input_tokens=0,
    input_tokens_details=InputDetails(),
    output_tokens=0,
    output_tokens_details=OutputDetails(),
    total_tokens=0,
)


class CompactedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `POST /v1/responses/compact`: messages of users, system and developer, and one `compaction` item."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[Json]
    usage: ResponseUsage


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response ended early."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. Fields that echo the request have its values, or what was used where it gave none."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Json
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | msgspec.UnsetType = msgspec.UNSET
    conversation: Json | msgspec.UnsetType = msgspec.UNSET
    structured_output: StructuredOutput | msgspec.UnsetType = msgspec.UNSET
    dovetail: Notes | msgspec.UnsetType = msgspec.UNSET


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `POST /v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ItemList(Page, frozen=True, kw_only=True):
    """A page of a response's input items, or of a stored completion's messages, as they can be sent again."""

    data: list[Json]


class StreamEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    """An event; `sequence_number` counts from 0 and is set when it is sent."""

    sequence_number: int = -1


class LifecycleEvent(StreamEvent, kw_only=True, tag="response.in_progress"):
    """The response has come to another state."""

    response: ResponseObject


class Created(LifecycleEvent, kw_only=True, tag="response.created"):
    """The first event."""


class Queued(LifecycleEvent, kw_only=True, tag="response.queued"):
    """It waits."""


class Completed(LifecycleEvent, kw_only=True, tag="response.completed"):
    """The last event: all is there."""


class Incomplete(LifecycleEvent, kw_only=True, tag="response.incomplete"):
    """The last event: it was cut off."""


class Failed(LifecycleEvent, kw_only=True, tag="response.failed"):
    """The last event: something went wrong, or it was cancelled."""


class ItemAdded(StreamEvent, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class ItemDone(ItemAdded, kw_only=True, tag="response.output_item.done"):
    """An item is complete."""


class ItemEvent(StreamEvent, kw_only=True):
    """Base of events within an item."""

    item_id: str
    output_index: int


class ContentEvent(ItemEvent, kw_only=True):
    """About a part of an item."""

    content_index: int = 0


class SummaryEvent(ItemEvent, kw_only=True):
    """About a part of a summary."""

    summary_index: int = 0


class PartAdded(ContentEvent, kw_only=True, tag="response.content_part.added"):
    """A part of an item begins."""

    part: OutputText | ReasoningText


class PartDone(PartAdded, kw_only=True, tag="response.content_part.done"):
    """A part is complete."""


class TextDelta(ContentEvent, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: list[TokenInfo] = []


class TextDone(ContentEvent, kw_only=True, tag="response.output_text.done"):
    """The text is complete."""

    text: str
    logprobs: list[TokenInfo] = []


class ReasoningTextDelta(ContentEvent, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(ContentEvent, kw_only=True, tag="response.reasoning_text.done"):
    """The reasoning is complete."""

    text: str


class SummaryPartAdded(SummaryEvent, kw_only=True, tag="response.reasoning_summary_part.added"):
    """A summary begins."""

    part: SummaryText


class SummaryPartDone(SummaryPartAdded, kw_only=True, tag="response.reasoning_summary_part.done"):
    """The summary is complete."""


class SummaryDelta(SummaryEvent, kw_only=True, tag="response.reasoning_summary_text.delta"):
    """More of the summary."""

    delta: str


class SummaryDone(SummaryEvent, kw_only=True, tag="response.reasoning_summary_text.done"):
    """The summary's text is complete."""

    text: str


class ArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """The arguments are complete."""

    arguments: str


class InputDelta(ItemEvent, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """More of a custom tool's input."""

    delta: str


class Compacting(ItemEvent, kw_only=True, tag="response.compaction.compacting"):
    """The model writes a summary."""


class InputDone(ItemEvent, kw_only=True, tag="response.custom_tool_call_input.done"):
    """The input is complete."""

    input: str


class ErrorEvent(StreamEvent, kw_only=True, tag="error"):
    """The only event of a stream that failed before there was a response to tell of."""

    code: str | None
    message: str
    param: str | None


# Tokens in the words of the Responses API.


def response_usage(choice: ChoiceView) -> ResponseUsage:
    """Return the tokens of a choice in the words of the Responses API."""
    return ResponseUsage(
        input_tokens=choice.num_prompt,
        input_tokens_details=InputDetails(
            cached_tokens=choice.num_cached, image_tokens=choice.num_image or msgspec.UNSET
        ),
        output_tokens=choice.num_completion,
        output_tokens_details=OutputDetails(choice.num_reasoning),
        total_tokens=choice.num_prompt + choice.num_completion,
    )


def sum_of(one: ResponseUsage, other: ResponseUsage) -> ResponseUsage:
    """Return the tokens of two generations together."""
    return ResponseUsage(
        input_tokens=one.input_tokens + other.input_tokens,
        input_tokens_details=InputDetails(
            cached_tokens=one.input_tokens_details.cached_tokens + other.input_tokens_details.cached_tokens,
            image_tokens=(one.input_tokens_details.image_tokens or 0) + (other.input_tokens_details.image_tokens or 0)
            or msgspec.UNSET,
        ),
        output_tokens=one.output_tokens + other.output_tokens,
        output_tokens_details=OutputDetails(
            one.output_tokens_details.reasoning_tokens + other.output_tokens_details.reasoning_tokens
        ),
        total_tokens=one.total_tokens + other.total_tokens,
    )
