"""`/v1/messages`: from a body to a request."""

from __future__ import annotations

from typing import Any

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, Dropped, JsonObject, Names, Request, Sampling, Tools
from dovetail.contracts.tables import table
from dovetail.processing.refusals import unsupported, wrong
from dovetail_server.apis.dropped import check_optional, renamed, servable
from dovetail_server.apis.messages.editing import check_edits, edited
from dovetail_server.apis.messages.errors import NO_THREADS
from dovetail_server.apis.messages.schema import (
    AnthropicTool,
    MessagesPrompt,
    MessagesRequest,
    MessagesThinking,
    ToolChoice,
)
from dovetail_server.apis.messages.turns import chat_messages

CLIENT_TOOLS: dict[str, JsonObject] = table(__file__, "client_tools.json")
"""Tools that Anthropic's API describes and the client runs: shell, editor and memory, by their types.

A model that was not trained on them sees a function with their published input; its call is a `tool_use` as any other.
"""
RENAMED = {
    r"response_format\.json_schema": "output_config.format",
    "response_format": "output_config.format",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
    r"stop(?!_)": "stop_sequences",
}
NAMES = Names(prompt="messages", renamed=RENAMED)
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop_token_ids")


def read(body: MessagesRequest) -> Request:
    """Return the request that a body makes. A reply may end at the context's end before `max_tokens`.

    Raises:
        RequestError: It asks for what is not served here, or its fields contradict each other.
    """
    check_generation(body)
    body, applied = edited(body)
    values = {name: value for name in SAMPLED if (value := getattr(body, name)) is not None}
    thinking = body.thinking
    return Request(
        **prompt_of(body),
        model=body.model,
        rid=body.rid,
        stream=bool(body.stream),
        sampling=Sampling(stop=body.stop_sequences or None, **values),
        limit=body.max_tokens,
        clamps=True,
        grammar_backend=body.grammar_backend,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        reply={
            **({"omits": True} if thinking is not None and thinking.display == "omitted" else {}),
            **({} if applied is None else {"edits": applied}),
        },
    )


def prompt_of(body: MessagesPrompt) -> JsonObject:
    """Return the fields of a request that make up the prompt, of a body that has been checked.

    Raises:
        RequestError: A block stands where it cannot, or a tool is none of the client's.
    """
    messages, config = chat_messages(body), body.output_config
    is_prefill = messages[-1]["role"] == "assistant"
    if is_prefill and messages[-1].get("tool_calls"):
        raise wrong("messages end with a tool_use; send its tool_result", "messages")
    if is_prefill and body.thinking is not None and body.thinking.type == "enabled":
        why = "end with the assistant, which cannot think first; leave out thinking, or that message"
        raise wrong(f"messages {why}", "messages")
    tools, dropped, moved = tools_of(body)
    made: JsonObject = {
        "prompts": [Chat(messages=messages, add_generation_prompt=False if is_prefill else None, continues=is_prefill)],
        "tools": tools,
        "dropped": dropped,
        "effort": None if config is None else config.effort,
        "names": msgspec.structs.replace(NAMES, renamed={**moved, **RENAMED}) if moved else NAMES,
    }
    if config is not None and config.format is not None:
        made["grammar"] = {"response_format": response_format(config.format.schema_)}
    return made | thinking_of(body.thinking, body.chat_template_kwargs or {})


def thinking_of(thinking: MessagesThinking | None, kwargs: JsonObject) -> JsonObject:
    """Return the template's switches and the budget; `disabled` ends thinking at once where the template cannot."""
    if thinking is None:
        return {"template_kwargs": kwargs}
    thinks = thinking.type != "disabled"
    return {
        "template_kwargs": {"enable_thinking": thinks, "thinking": thinks, **kwargs},
        "thinking_budget": thinking.budget_tokens if thinks else None,
        "no_thinking": not thinks,
    }


def tools_of(body: MessagesPrompt) -> tuple[Tools | None, list[Dropped], JsonObject]:
    """Return the tools that the model may call, those that are left out, and how refusals name the former's places.

    Raises:
        RequestError: See `chat_tool` and `chat_choice`.
    """
    choice = body.tool_choice
    served, dropped = servable(body.tools)
    tools = [chat_tool(tool, at) for at, tool in served]
    chosen = chat_choice(choice)
    check_optional(dropped, chosen)
    if not tools and (dropped or chosen is None):
        return None, dropped, {}
    parallel = choice is None or not choice.disable_parallel_tool_use
    return Tools(tools=tools, choice=chosen, parallel=parallel), dropped, renamed(served)


def check(body: MessagesPrompt) -> None:
    """Refuse what would change the output and is not implemented, and what contradicts itself.

    Raises:
        RequestError: Naming the field.
    """
    check_edits(body)
    if body.mcp_servers:
        raise unsupported("mcp_servers", "this server calls no other; the client runs the tools")
    if body.thread is not None:
        text = "thread is not supported: no conversation is held here; send all messages"
        raise RequestError(text, param="thread", code=NO_THREADS)
    thinking = body.thinking
    if thinking is None:
        return
    if thinking.type == "between_tools":
        raise unsupported("thinking.type 'between_tools'", "possible: enabled, disabled, adaptive")
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        text = "thinking.budget_tokens is required with type 'enabled'; or send type 'adaptive'"
        raise RequestError(text, param="thinking.budget_tokens", code="missing_required_parameter")
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        raise wrong(f"thinking.budget_tokens has no meaning with type {thinking.type!r}", "thinking.budget_tokens")


def check_generation(body: MessagesRequest) -> None:
    """As `check`, for what only generating needs.

    Raises:
        RequestError: Naming the field.
    """
    check(body)
    for name, why in (
        ("container", "no code is run here"),
        ("inference_geo", "this server is where it is; leave it out"),
        ("diagnostics", "this server compares no requests; usage tells what was cached"),
    ):
        if getattr(body, name) is not None:
            raise unsupported(name, why)
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and budget >= body.max_tokens:
        raise wrong(
            f"max_tokens must be above thinking.budget_tokens, {budget} (given: {body.max_tokens})", "max_tokens"
        )


def chat_tool(tool: AnthropicTool, at: int) -> JsonObject:
    """Return a tool in the chat API's form.

    Raises:
        RequestError: The server would have to run it, or it asks for something that nothing here does.
    """
    param = f"tools[{at}]"
    known = CLIENT_TOOLS.get(tool.type or "")
    if known is None and tool.type not in (None, "custom"):
        why = f"describe it with an input_schema, or send one of custom, {', '.join(CLIENT_TOOLS)}"
        raise unsupported(f"{param}.type {tool.type!r}", why)
    if tool.max_characters is not None and not (tool.type or "").startswith("text_editor_"):
        raise unsupported(f"{param}.max_characters", "only an editor has it")
    if known is not None:
        check_known(tool, known["name"], param)
    elif tool.input_schema is None:
        text = f"{param}.input_schema is required"
        raise RequestError(text, param=f"{param}.input_schema", code="missing_required_parameter")
    if tool.defer_loading:
        raise unsupported(f"{param}.defer_loading", "all tools stand in the prompt")
    if tool.input_examples:
        raise unsupported(f"{param}.input_examples", "no chat template has a place for them; use description")
    if tool.allowed_callers not in (None, ["direct"]):
        raise unsupported(f"{param}.allowed_callers", 'only the model calls here; send ["direct"] or nothing')
    function: JsonObject = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    function |= known or {}
    function["strict"] = tool.strict
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def check_known(tool: AnthropicTool, name: str, param: str) -> None:
    """Refuse to describe a tool that its type describes.

    Raises:
        RequestError: Naming the field.
    """
    if tool.name != name:
        raise wrong(f"{param}.name of the type {tool.type!r} is {name!r} (given: {tool.name!r})", f"{param}.name")
    for field in ("input_schema", "description"):
        if getattr(tool, field) is not None:
            raise wrong(f"{param}.{field} of the type {tool.type!r} is known; leave it out", f"{param}.{field}")


def chat_choice(choice: ToolChoice | None) -> Any:
    """Return `tool_choice` in the chat API's form.

    Raises:
        RequestError: It should name a tool and does not, or the reverse.
    """
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        raise wrong("tool_choice.name belongs to type 'tool', and to no other", "tool_choice.name")
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def response_format(schema: JsonObject) -> JsonObject:
    """Return a schema as the chat API's `response_format`: a format is a promise here, without a `strict`."""
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
