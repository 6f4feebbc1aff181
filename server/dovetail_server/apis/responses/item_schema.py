"""`/v1/responses`: items of a request. Those of a reply are in `objects.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter

from dovetail.processing.bounds import MAX_TOKENS
from dovetail_server.apis.responses.tool_schema import AnyTool
from dovetail_server.schema.common import FreeForm, Name, RequestModel, SentBack, Text
from dovetail_server.schema.fail_fast import PlainList

ItemId = Annotated[str, Field(min_length=1, max_length=128)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(SentBack):
    """A part of a message: `input_text`, `output_text`, `text`, `refusal`, or `input_image`.

    An image has `image_url` (a `data:` URL, or another that the server fetches) or `file_id`, and perhaps `detail`.
    """

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(max_length=64)]
    text: Text | None = None
    refusal: Text | None = None


Parts = Annotated[list[InputPart], Field(max_length=4096)]


class SentItem(SentBack):
    """An item of an input."""

    type: str
    id: ItemId | None = None
    status: Status | None = None


class KeptItem(SentItem):
    """One that is kept as it was sent."""


class ResultItem(SentItem):
    """What a tool gave, as text or parts."""

    call_id: Name
    output: Text | Parts
    name: Name | None = None


class MessageItem(SentItem):
    """A message. An answer of the model is one with the role `assistant`."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts
    phase: Annotated[str, Field(max_length=32)] | None = Field(None, description="Accepted; no template here knows it.")


class FunctionCallItem(KeptItem):
    """A tool call of the model. `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text
    namespace: Name | None = None
    parsed_arguments: FreeForm | None = Field(None, description="As client libraries add them; `arguments` count.")


class FunctionCallOutputItem(ResultItem):
    """The result of a call."""

    type: Literal["function_call_output"]


class CustomCallItem(KeptItem):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: Text
    namespace: Name | None = None


class CustomCallOutputItem(ResultItem):
    """What a custom tool gave."""

    type: Literal["custom_tool_call_output"]


class ShellCallItem(KeptItem):
    """A command, or several, that the model had the client run."""

    type: Literal["local_shell_call", "shell_call"]
    call_id: Name
    action: FreeForm


class LocalShellOutputItem(KeptItem):
    """What a command gave. In OpenAI's API `id` is the call's."""

    type: Literal["local_shell_call_output"]
    id: ItemId
    call_id: Name | None = None
    output: Text


class ShellOutputItem(KeptItem):
    """What commands gave."""

    type: Literal["shell_call_output"]
    call_id: Name
    output: Annotated[list[FreeForm], Field(max_length=1024)]
    max_output_length: int | None = Field(None, ge=0, le=MAX_TOKENS)


class ApplyPatchCallItem(KeptItem):
    """A change that the model had the client make."""

    type: Literal["apply_patch_call"]
    call_id: Name
    operation: FreeForm


class ApplyPatchOutputItem(KeptItem):
    """What became of a change."""

    type: Literal["apply_patch_call_output"]
    call_id: Name
    output: Text | None = None
    status: Literal["completed", "failed"]  # type: ignore[assignment]  # it has words of its own


class WebSearchCallItem(KeptItem):
    """A search that another server made. The model is not told of it: the item has no results."""

    type: Literal["web_search_call"]
    status: Annotated[str, Field(max_length=32)] | None = None  # type: ignore[assignment]  # any of theirs
    action: FreeForm | None = None


class AdditionalToolsItem(RequestModel):
    """Tools that stand in the conversation and not in `tools`; the model may call them as it may those."""

    type: Literal["additional_tools"]
    id: ItemId | None = None
    role: Literal["developer", "system"] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=1024)]
    status: Status | None = None


class ReasoningPart(SentBack):
    """Part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


ReasoningParts = Annotated[list[ReasoningPart], Field(max_length=4096)]


class ReasoningItem(SentItem):
    """What the model thought, as an earlier reply had it."""

    type: Literal["reasoning"]
    summary: ReasoningParts = Field(default_factory=list)
    content: ReasoningParts | None = None
    encrypted_content: Text | None = Field(None, description="As this server wrote it; read where `content` is absent.")


class CompactionItem(SentBack):
    """What this server made of an earlier part of the conversation; that part need not be sent any more."""

    type: Literal["compaction"]
    id: ItemId | None = None
    encrypted_content: Text = Field(description="As this server wrote it.")
    created_by: Name | None = None


class CompactionTriggerItem(KeptItem):
    """The last item of an input that is to be compacted and not answered."""

    type: Literal["compaction_trigger"]


class ItemReference(SentBack):
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


_KINDS: dict[str, type[RequestModel]] = {
    kind: item
    for item in (
        *(MessageItem, ReasoningItem, FunctionCallItem, FunctionCallOutputItem, CustomCallItem, CustomCallOutputItem),
        *(ShellCallItem, LocalShellOutputItem, ShellOutputItem, ApplyPatchCallItem, ApplyPatchOutputItem),
        *(WebSearchCallItem, AdditionalToolsItem, CompactionItem, CompactionTriggerItem, ItemReference),
    )
    for kind in get_args(item.model_fields["type"].annotation)
}
Item: Any = Annotated[
    Union[tuple(Annotated[item, Tag(kind)] for kind, item in _KINDS.items())],  # noqa: UP007  # of a table
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message=f"has a type that is not supported; possible: {', '.join(_KINDS)}",
    ),
]
Items = Annotated[list[dict[str, Any]], PlainList(Item, most=65536)]
item_model = TypeAdapter(Item).validate_python


def item_kind(item: dict[str, Any]) -> str:
    """Return the type of an item that has been checked."""
    return _kind(item)
