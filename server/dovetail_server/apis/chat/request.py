"""`/v1/chat/completions`: from a body to a request."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, Dropped, JsonObject, Names, Request, Tools
from dovetail.processing.refusals import unsupported, wrong
from dovetail_server.apis import fields
from dovetail_server.apis.chat.schema import ChatRequest
from dovetail_server.apis.dropped import check_optional, renamed, servable


def read(body: ChatRequest) -> Request:
    """Return the request that a body makes.

    Raises:
        RequestError: It asks for what is not served here, or its fields contradict each other.
    """
    refuse_unsupported(body)
    tools, names, dropped = tools_of(body)
    return Request(
        prompts=[conversation(body)],
        model=body.model,
        n=body.n or 1,
        sampling=fields.sampling_of(body),
        limit=fields.same_field(body, "max_completion_tokens", "max_tokens"),
        **fields.clamping_of(body, True),
        cut=fields.cut_of(body),
        logprobs=body.top_logprobs or 0 if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        named_ids=body.logprob_token_ids or [],
        tools=tools,
        dropped=dropped,
        grammar=fields.grammar_of(body),
        grammar_backend=body.grammar_backend,
        effort=body.reasoning_effort,
        template_kwargs=template_kwargs(body),
        thinking_budget=fields.same_field(body, "thinking_budget", "thinking_token_budget"),
        separates_reasoning=body.separate_reasoning is not False,
        streams_reasoning=body.stream_reasoning is not False,
        keeps=body.metadata or {} if body.store else None,
        names=names,
        reply=wishes(body),
        **fields.service_of(body),
    )


def conversation(body: ChatRequest) -> Chat:
    """Return what the prompt is made of."""
    return Chat(
        messages=body.messages,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continues=bool(body.continue_final_message),
        input_ids=body.input_ids,
        adds_special_tokens=bool(body.add_special_tokens),
        echoes=bool(body.echo),
    )


def wishes(body: ChatRequest) -> JsonObject:
    """Return what the writer has to know: see `ChatWriter`."""
    given = {
        "is_legacy": body.functions is not None,
        "has_ids": bool(body.return_token_ids),
        "names_ids": bool(body.return_tokens_as_token_ids),
        "hides_reasoning": body.include_reasoning is False,
    }
    return fields.usage_wishes(body) | {name: True for name, is_given in given.items() if is_given}


def template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """Return the chat template's variables.

    Raises:
        RequestError: Two fields say different things of thinking.
    """
    effort = body.reasoning_effort
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        thinks = body.thinking.type == "enabled"
        if effort is not None and (effort != "none") != thinks:
            why = f"thinking is {body.thinking.type} and reasoning_effort is {effort!r}; give one"
            raise wrong(why, "thinking")
        kwargs = {"enable_thinking": thinks, "thinking": thinks, **kwargs}
    if body.verbosity is not None:
        kwargs = {"verbosity": body.verbosity, **kwargs}
    return kwargs


def refuse_unsupported(body: ChatRequest) -> None:
    """Refuse fields that would change the output and that nothing here implements."""
    if body.chat_template is not None:
        raise unsupported("chat_template", "a template in a request is not run; use --chat-template FILE")
    if body.audio is not None and body.modalities != ["text"]:
        raise unsupported("audio", "this server generates text only")
    if body.web_search_options is not None:
        raise unsupported("web_search_options", "this server searches nothing")
    if body.moderation is not None:
        raise unsupported("moderation", "this server judges no content")
    if body.modalities is not None and body.modalities != ["text"]:
        raise unsupported("modalities", 'this server generates text only; send ["text"] or nothing')
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs needs logprobs: true", "top_logprobs")
    fields.refuse_stream_mix(body)


def tools_of(body: ChatRequest) -> tuple[Tools | None, Names, list[Dropped]]:
    """Return the tools that the model may call, what the body calls its fields, and the tools that are left out.

    Raises:
        RequestError: Old and new names are mixed.
    """
    limit = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    names = Names(prompt="messages", limit=limit, logprobs="top_logprobs")
    parallel = body.parallel_tool_calls is not False
    if body.functions is None:
        if body.function_call is not None:
            why = "function_call is only allowed when functions are specified; with tools, send tool_choice"
            raise wrong(why, "function_call")
        if body.tools is None and body.tool_choice is None:
            return None, names, []
        served, dropped = servable(body.tools)
        choice = body.tool_choice
        check_optional(dropped, choice)
        if dropped and not served:
            return None, names, dropped
        tools = [tool.model_dump(exclude_none=True) for _, tool in served]
        return Tools(tools=tools, choice=choice, parallel=parallel), replace(names, renamed=renamed(served)), dropped
    if body.tools is not None:
        raise RequestError("functions is the old name of tools; send one of them", param="functions")
    if body.tool_choice is not None:
        raise wrong("tool_choice belongs to tools; with functions, send function_call", "tool_choice")
    functions = [{"type": "function", "function": f.model_dump(exclude_none=True)} for f in body.functions]
    choice = function_choice(body.function_call)
    made = Names(
        prompt=names.prompt, limit=limit, logprobs=names.logprobs, tools="functions", tool_choice="function_call"
    )
    return Tools(tools=functions, choice=choice, parallel=parallel), made, []


def function_choice(given: Any) -> Any:
    """Return the deprecated `function_call` as a `tool_choice`."""
    if isinstance(given, dict) and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given
