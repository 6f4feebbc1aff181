"""`/v1/responses`: from a body to a request, which has the fields that the response echoes, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, JsonObject, Names, Request, Sampling, Tools
from dovetail.processing.refusals import wrong
from dovetail_server.apis.fields import same_field
from dovetail_server.apis.responses.items import Item, all_opened, messages_of
from dovetail_server.apis.responses.objects import InputTokens
from dovetail_server.apis.responses.references import ReferencedItems, items_before, items_of
from dovetail_server.apis.responses.schema import (
    CompactRequest,
    InputTokensRequest,
    ResponsesRequest,
    TextFormat,
)
from dovetail_server.apis.responses.tool_schema import ResponsesHostedTool
from dovetail_server.apis.responses.tools import chat_choice, read_tools, tool_echo, tools_in
from dovetail_server.errors import catalogue as errors

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor

encoder = msgspec.json.Encoder()

RENAMED = {
    r"messages(?:\[\d+\][\w.\[\]]*)?": "input",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
NAMES = Names(prompt="messages", limit="max_output_tokens", logprobs="top_logprobs", renamed=RENAMED)
SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("stop", "seed", "logit_bias"),
)
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
NOTHING = ReferencedItems()


@dataclass(frozen=True, slots=True)
class ReadItems:
    """What was read of a body with items: a request whose prompt is token ids, or none, and items to keep, JSON.

    Where the conversation is to be compacted, the request is for its summary, and `plan` says what becomes of that:
    a `Plan`, JSON.
    """

    request: Request | None
    items: bytes
    plan: bytes = b""


def count(text: Processor, body: InputTokensRequest, response_id: str, found: ReferencedItems) -> bytes:
    """Count the tokens of a response's prompt, nothing left out, and return the reply; CPU work.

    Args:
        text: Tokenizer, template and parsers.
        body: Checked by its schema.
        response_id: The response's.
        found: What it refers to.

    Raises:
        RequestError: The prompt cannot be made, or is too big to look at.
    """
    from dovetail.processing.input import Preparation  # loads a tokenizer's library, and help lists this API's options

    request = read(as_response(body), response_id, found)
    return encoder.encode(InputTokens(input_tokens=Preparation(text, request).count()))


def as_response(request: InputTokensRequest | CompactRequest) -> ResponsesRequest:
    """Return the request that would be answered; all of it has been validated, which takes time."""
    fields = {name: getattr(request, name) for name in request.model_fields_set}
    return ResponsesRequest.model_construct(**{**fields, "store": False})


def read(
    body: ResponsesRequest, response_id: str = "", found: ReferencedItems = NOTHING, rows: bytearray | None = None
) -> Request:
    """Return the request that a body makes.

    Args:
        body: Checked by its schema.
        response_id: The response's, which identifiers of items are made of.
        found: What it refers to.
        rows: Gets its own items as they are stored, a list in JSON.

    Raises:
        RequestError: It asks for what is not served here, or its fields contradict each other.
    """
    check(body)
    own = items_of(body.input, response_id, found)
    tools = [(f"tools[{at}]", tool) for at, tool in enumerate(body.tools or ())]
    place = "previous_response_id" if body.conversation is None else "conversation"
    before = tools_in(all_opened(items_before(found), place), place, tools)
    own = tools_in(all_opened(own if rows is None else written_down(own, rows), "input"), "input", tools)
    messages = messages_of(chain(before, own), body.instructions)
    return to_request(body, messages, tools)


def written_down(items: Iterable[Item], rows: bytearray) -> Iterator[Item]:
    """Pass items on, and add each to a list of JSON: as such they take a third of the memory."""
    rows += b"["
    for at, item in enumerate(items):
        if at:
            rows += b","
        encoder.encode_into(item, rows, -1)
        yield item
    rows += b"]"


def check(request: ResponsesRequest) -> None:
    """Refuse what would change the output and is not implemented, and fields that contradict each other.

    Raises:
        RequestError: Naming the field.
    """
    if request.conversation is not None and request.previous_response_id is not None:
        text = "conversation and previous_response_id both say what this goes on with; give one"
        raise RequestError(text, param="conversation", code="invalid_value")
    if request.prompt is not None:
        raise errors.unsupported("prompt", "there are no stored prompts here; send instructions and input")
    if request.moderation is not None:
        raise errors.unsupported("moderation", "this server judges no content")
    if request.reasoning is not None and request.reasoning.context == "current_turn":
        why = "the chat template decides which of the reasoning that it is given the model sees; leave it out"
        raise errors.unsupported("reasoning.context", why)
    if summary_of(request) == "concise":
        why = "nothing here shortens reasoning; ask for auto or detailed, which give it out whole"
        raise errors.unsupported("reasoning.summary", why)
    if request.top_logprobs and not wants_logprobs(request):
        text = f"top_logprobs needs {LOGPROBS!r} in include"
        raise RequestError(text, param="top_logprobs", code="invalid_value")
    if request.background and request.store is False:
        text = "background needs store: the reply is fetched later; leave store out"
        raise RequestError(text, param="background", code="invalid_value")


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Whether text carries the log probabilities of its tokens."""
    return LOGPROBS in (request.include or ())


def only_warms(request: ResponsesRequest) -> bool:
    """Whether the prompt is to be computed, and nothing generated."""
    return request.generate is False or (request.prompt_cache_options or {}).get("prewarm") is True


def summary_of(request: ResponsesRequest) -> str | None:
    """Return the summary of the reasoning that is asked for."""
    if request.reasoning is None:
        return None
    return same_field(request.reasoning, "summary", "generate_summary")  # type: ignore[no-any-return]


def to_request(body: ResponsesRequest, messages: list[JsonObject], tools_given: Sequence[tuple[str, Any]]) -> Request:
    """Return the request that gives this response.

    Raises:
        RequestError: A field has no meaning here.
    """
    if not messages:
        raise wrong("input is empty: a conversation needs at least one message", "input")
    text, reasoning = body.text, body.reasoning
    given = read_tools(tools_given)
    choice = chat_choice(body.tool_choice, given)
    kwargs = dict(body.chat_template_kwargs or {})
    if text is not None and text.verbosity is not None:
        kwargs = {"verbosity": text.verbosity, **kwargs}
    has_tools = bool(given.functions) or choice is not None
    parallel, prefers = body.parallel_tool_calls is not False, bool(given.preferred)
    tools = Tools(tools=given.functions, choice=choice, parallel=parallel, prefers_grammar=prefers)
    return Request(
        prompts=[Chat(messages=messages, drops_turns=body.truncation == "auto")],
        model=body.model,
        rid=same_field(body, "rid", "request_id"),
        stream=bool(body.stream),
        sampling=Sampling(**{name: value for name in SAMPLED if (value := getattr(body, name)) is not None}),
        limit=0 if only_warms(body) else body.max_output_tokens,
        clamps_by_default=True,
        logprobs=body.top_logprobs or 0 if wants_logprobs(body) else None,
        tools=tools if has_tools else None,
        dropped=given.dropped,
        grammar={} if text is None or text.format is None else {"response_format": response_format(text.format)},
        grammar_backend=body.grammar_backend,
        effort=None if reasoning is None else reasoning.effort,
        template_kwargs=kwargs,
        thinking_budget=body.thinking_budget,
        priority=body.priority or 0,
        cache_salt=same_field(body, "cache_salt", "extra_key") or "",
        keeps=None if body.store is False else body.metadata or {},
        names=replace(NAMES, renamed={**found, **RENAMED}) if (found := given.renamed()) else NAMES,
        reply={
            "echo": echo(body),
            "calls": given.calls,
            "unenforced": given.unenforced,
            "preferred": given.preferred,
            "summarises": summary_of(body) is not None,
            "warms": only_warms(body),
            "encrypts": ENCRYPTED in (body.include or ()),
        },
    )


def response_format(given: TextFormat) -> dict[str, Any]:
    """Return `text.format` as the chat API's `response_format`.

    Raises:
        RequestError: A schema without name or schema.
    """
    if given.type != "json_schema":
        return {"type": given.type}
    for name, value in (("name", given.name), ("schema", given.schema_)):
        if value is None:
            param = f"text.format.{name}"
            raise RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    inner: dict[str, Any] = {"name": given.name, "schema": given.schema_, "strict": given.strict}
    return {"type": "json_schema", "json_schema": {k: v for k, v in inner.items() if v is not None}}


def echo(request: ResponsesRequest) -> JsonObject:
    """Return the fields of a response that repeat its request's."""
    shown: JsonObject = {
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": dict(request.metadata or {}),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": None if request.reasoning is None else request.reasoning.effort,
            "summary": summary_of(request),
        },
        "safety_identifier": request.safety_identifier,
        "text": text_config(request),
        "tool_choice": request.tool_choice if request.tool_choice is not None else "auto",
        "tools": [tool_echo(tool) for tool in request.tools or () if not isinstance(tool, ResponsesHostedTool)],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
    }
    if request.user is not None:
        shown["user"] = request.user
    if request.conversation is not None:
        shown["conversation"] = {"id": request.conversation.id}
    return shown


def text_config(request: ResponsesRequest) -> dict[str, Any]:
    """Return `text` as the response shows it."""
    given = None if request.text is None else request.text.format
    verbosity = (None if request.text is None else request.text.verbosity) or "medium"
    if given is None:
        return {"format": {"type": "text"}, "verbosity": verbosity}
    shown = given.model_dump(by_alias=True, exclude_none=True)
    if given.type == "json_schema":
        shown = {"description": None, "strict": False, **shown}
    return {"format": shown, "verbosity": verbosity}
