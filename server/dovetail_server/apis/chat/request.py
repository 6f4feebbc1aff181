"""`/v1/chat/completions`: from a body to a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, Dropped, JsonObject, Names, Request, Tools
from dovetail.processing.refusals import unsupported, wrong
from dovetail_server.apis import fields
from dovetail_server.apis.chat.schema import UNSERVABLE, ChatRequest, CustomTool, NestedGrammar, Tool
from dovetail_server.apis.custom import CustomTools, check_type, custom_arguments
from dovetail_server.apis.dropped import check_optional, renamed, servable


def read(body: ChatRequest) -> Request:
    """Return the request that a body makes.

    Raises:
        RequestError: It asks for what is not served here, or its fields contradict each other.
    """
    refuse_unsupported(body)
    tools, names, dropped, customs = tools_of(body)
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
        reply=wishes(body) | customs,
        **fields.service_of(body),
    )


def conversation(body: ChatRequest) -> Chat:
    """Return what the prompt is made of."""
    return Chat(
        messages=with_functions(body.messages),
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continues=bool(body.continue_final_message),
        input_ids=body.input_ids,
        adds_special_tokens=bool(body.add_special_tokens),
        echoes=bool(body.echo),
    )


def with_functions(messages: list[JsonObject]) -> list[JsonObject]:
    """Return messages whose calls of custom tools are calls of functions; what has none is as it was."""
    return [
        {**message, "tool_calls": [_as_function(call) for call in calls]}
        if (calls := message.get("tool_calls")) and any(call.get("type") == "custom" for call in calls)
        else message
        for message in messages
    ]


def _as_function(call: JsonObject) -> JsonObject:
    if call.get("type") != "custom":
        return call
    function = {"name": call["custom"]["name"], "arguments": custom_arguments(call["custom"]["input"])}
    others = {key: value for key, value in call.items() if key != "custom"}
    return {**others, "type": "function", "function": function}


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


def tools_of(body: ChatRequest) -> tuple[Tools | None, Names, list[Dropped], JsonObject]:
    """Return the tools that the model may call, the body's words, the tools left out, and what of custom tools is told.

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
            return None, names, [], {}
        served, dropped = servable(body.tools)
        choice = tool_choice(body.tool_choice, {_name_of(tool): tool.type for _, tool in served})
        check_optional(dropped, choice)
        if dropped and not served:
            return None, names, dropped, {}
        tools, customs = functions_of(served)
        made = Tools(tools=tools, choice=choice, parallel=parallel, prefers_grammar=bool(customs.get("preferred")))
        return made, replace(names, renamed=renamed(served, "custom")), dropped, customs
    if body.tools is not None:
        raise RequestError("functions is the old name of tools; send one of them", param="functions")
    if body.tool_choice is not None:
        raise wrong("tool_choice belongs to tools; with functions, send function_call", "tool_choice")
    functions = [{"type": "function", "function": f.model_dump(exclude_none=True)} for f in body.functions]
    choice = function_choice(body.function_call)
    words = Names(
        prompt=names.prompt, limit=limit, logprobs=names.logprobs, tools="functions", tool_choice="function_call"
    )
    return Tools(tools=functions, choice=choice, parallel=parallel), words, [], {}


def functions_of(served: Sequence[tuple[int, Tool | CustomTool]]) -> tuple[list[JsonObject], JsonObject]:
    """Return tools as functions, and what the writer has to know of custom ones: see `ChatWriter`.

    Raises:
        RequestError: A custom tool has another tool's name, so that their calls could not be told apart.
    """
    grammars, customs = CustomTools(), set()
    functions: list[JsonObject] = []
    for at, tool in served:
        if isinstance(tool, Tool):
            functions.append(tool.model_dump(exclude_none=True))
            continue
        given, place = tool.custom, f"tools[{at}].custom"
        inner = given.format.grammar if isinstance(given.format, NestedGrammar) else None
        grammar = None if inner is None else (inner.syntax, inner.definition)
        function = grammars.as_function(given.name, given.description or "", grammar, f"{place}.format")
        functions.append({"type": "function", "function": function})
        customs.add(given.name)
    named = Counter(function["function"]["name"] for function in functions)
    for at, tool in served:
        if isinstance(tool, CustomTool) and named[tool.custom.name] > 1:
            text = f"tools[{at}]: another tool is called {tool.custom.name!r}, too; give each its own name"
            raise wrong(text, f"tools[{at}]")
    if not customs:
        return functions, {}
    grammar_fields = {"customs": sorted(customs), "unenforced": grammars.unenforced, "preferred": grammars.preferred}
    return functions, grammar_fields


def _name_of(tool: Tool | CustomTool) -> str:
    return tool.function.name if isinstance(tool, Tool) else tool.custom.name


def tool_choice(given: Any, types: Mapping[str, str]) -> Any:
    """Return `tool_choice` with functions in place of custom tools.

    Args:
        given: As the body has it.
        types: The types of the tools, by name.

    Raises:
        RequestError: It gives a tool a type that it is not of, or names none.
    """
    if not isinstance(given, dict):
        return given
    allowed = given.get("allowed_tools")
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        return {**given, "allowed_tools": {**allowed, "tools": [tool_choice(tool, types) for tool in allowed["tools"]]}}
    kind = given.get("type", "function")
    if kind in ("allowed_tools", *UNSERVABLE):
        return given
    if kind not in ("function", "custom"):
        why = 'tool_choice must be "none", "auto", "required", or of type function, custom or allowed_tools'
        raise wrong(why, "tool_choice")
    inner = given.get(kind)
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        why = f'tool_choice of type {kind!r} must be {{"type": "{kind}", "{kind}": {{"name": …}}}}'
        raise wrong(why, "tool_choice")
    check_type(name, kind, types)
    return {"type": "function", "function": {"name": name}}


def function_choice(given: Any) -> Any:
    """Return the deprecated `function_call` as a `tool_choice`."""
    if isinstance(given, dict) and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given
