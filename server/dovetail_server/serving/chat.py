"""`/v1/chat/completions`: from a request to the choices that the engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.errors import RequestError
from dovetail.grammar import schema
from dovetail.text.stream import OutputStream
from dovetail_server import errors
from dovetail_server.openai.chat import ChatRequest
from dovetail_server.serving.chat_events import ChatView
from dovetail_server.serving.common import choice_rid, rid_of, salt_of, submit_of
from dovetail_server.serving.generation import Choice, Generation
from dovetail_server.serving.grammar import ToolWish, chat_constraints, grammar_of
from dovetail_server.serving.params import (
    StopRules,
    check_token_ids,
    fit_output,
    named_ids,
    num_top,
    refuse_stream_mix,
    same_field,
    sampling_params,
    stop_rules,
    truncated,
)
from dovetail_server.serving.prompts import Prompt, Prompts

if TYPE_CHECKING:
    from dovetail_server.serving.context import ServingContext
    from dovetail_server.serving.text import TextTools
    from dovetail_server.storage.completions import CompletionKeeper


TAIL_TOKENS = 64
"""Of a prompt that comes as tokens: enough to see whether thinking has begun."""


@dataclass(slots=True, kw_only=True)
class ChatJob:
    """A prepared request."""

    request: ChatRequest
    model: str
    generation: Generation
    view: ChatView
    is_legacy: bool
    """The request used the deprecated `functions`; so does the reply."""
    echo: str = ""
    """What a reply begins with, of the last message."""
    keeper: CompletionKeeper | None = None
    """Where the reply is stored, and under which id."""

    @property
    def reply_id(self) -> str:
        """What the reply is called."""
        return self.generation.request_id if self.keeper is None else self.keeper.id

    @property
    def num_top(self) -> int:
        """Rivals per token in `logprobs`."""
        return self.generation.choices[0].submit.params.logprobs or 0


def read_prompt(text: TextTools, request: ChatRequest) -> Prompts:
    """Check, render and tokenize a conversation.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    text.tasks.check("generate")
    refuse_unsupported(request)
    grammar_of(request)  # refused here, where large ones do not hold others up
    return _prompt(text, request, tool_wish(request, text), template_kwargs(request, text))


def _prompt(text: TextTools, request: ChatRequest, wish: ToolWish | None, kwargs: Mapping[str, Any]) -> Prompts:
    text.check_size(request.messages)
    rendered = text.template.render(
        request.messages,
        tools=None if wish is None else wish.tools,
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        template_kwargs=kwargs,
    )
    if request.input_ids is None:
        whole = text.encode(rendered.text, "messages", add_special_tokens=bool(request.add_special_tokens))
        tail = rendered.tail
    else:
        check_token_ids(request.input_ids, text.limits.vocab_size, "input_ids")
        whole = request.input_ids
        tail = text.tokenizer.decode(whole[-TAIL_TOKENS:], skip_special_tokens=False)
    ids = truncated(whole, request, same_field(request, "max_completion_tokens", "max_tokens"), text.limits)
    max_tokens(request, len(ids), text)
    return Prompts(prompts=[Prompt(ids, echo_of(request.messages[-1]) if request.echo else "")], tail=tail)


def max_tokens(request: ChatRequest, num_prompt: int, text: TextTools) -> int:
    """Return how many tokens the reply may have.

    Raises:
        RequestError: Context overflow.
    """
    wanted = same_field(request, "max_completion_tokens", "max_tokens")
    names = ("messages", "max_tokens" if request.max_tokens is not None else "max_completion_tokens")
    return fit_output(num_prompt, 1 if wanted == 0 else wanted, None, text.limits, names)


def prepare(state: ServingContext, request: ChatRequest, model: str, prompts: Prompts | None = None) -> ChatJob:
    """Check, render and tokenize; CPU work, see `serving/prepare.py`.

    Args:
        state: The server's.
        request: Checked by its schema.
        model: The name that the reply carries.
        prompts: Of `read_prompt`, where that has been done; the request is then without what it was made of.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    text = state.text
    text.tasks.check("generate")
    refuse_unsupported(request)
    asked, front = grammar_of(request), text.grammar.only(request.grammar_backend)
    wish = tool_wish(request, text)
    tools = None if wish is None else wish.tools
    rules = stop_rules(request)
    kwargs = template_kwargs(request, text)
    made = prompts or _prompt(text, request, wish, kwargs)
    ids, tail = made.only.ids, made.tail
    budget = same_field(request, "thinking_budget", "thinking_token_budget")
    constraints = chat_constraints(asked, wish, text, front, budget=budget, template_kwargs=kwargs, tail=tail)
    params = sampling_params(
        request,
        text,
        max_tokens=max_tokens(request, len(ids), text),
        logprobs=num_top(request.top_logprobs or 0, text.limits, "top_logprobs") if request.logprobs else None,
        prompt_logprobs=num_top(request.prompt_logprobs, text.limits, "prompt_logprobs"),
        logprob_token_ids=named_ids(request, bool(request.logprobs), text.limits),
    )
    rid = rid_of(request, "chatcmpl")
    count = request.n or 1
    is_dropped = same_field(request, "max_completion_tokens", "max_tokens") == 0
    submits = [
        submit_of(choice_rid(rid, i, count), ids, params, i, request.priority or 0, salt_of(request), constraints)
        for i in range(count)
    ]
    choices = [
        Choice(
            index=i,
            submit=submit,
            output=make_output(request, text, rules, tools, kwargs, tail),
            route=constraints.route,
            is_dropped=is_dropped,
        )
        for i, submit in enumerate(submits)
    ]
    view = ChatView(
        include_reasoning=request.include_reasoning is not False,
        parallel_tool_calls=request.parallel_tool_calls is not False,
    )
    generation = Generation(state=state, request_id=rid, choices=choices, operation="chat")
    return ChatJob(
        request=request,
        model=model,
        generation=generation,
        view=view,
        is_legacy=request.functions is not None,
        echo=made.only.text,
    )


def echo_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message that the reply goes on with: one of the assistant's."""
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def template_kwargs(request: ChatRequest, text: TextTools) -> dict[str, Any]:
    """Return the chat template's variables.

    Raises:
        RequestError: Two fields say different things of thinking.
    """
    effort = request.reasoning_effort
    kwargs = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        thinks = request.thinking.type == "enabled"
        if effort is not None and (effort != "none") != thinks:
            why = f"thinking is {request.thinking.type} and reasoning_effort is {effort!r}; give one"
            raise RequestError(why, param="thinking", code="invalid_value")
        kwargs = {"enable_thinking": thinks, "thinking": thinks, **kwargs}
    if request.verbosity is not None:
        kwargs = {"verbosity": request.verbosity, **kwargs}
    return text.template_kwargs(effort, kwargs)


def make_output(
    request: ChatRequest,
    text: TextTools,
    rules: StopRules,
    tools: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, Any],
    tail: str,
) -> OutputStream:
    """Make the output of one choice."""
    return OutputStream(
        text.tokenizer,
        reasoning=text.reasoning,
        tools=text.tools if tools else None,
        tool_schemas=tools or (),
        template=text.template,
        template_kwargs=kwargs,
        prompt_tail=tail,
        separate_reasoning=request.separate_reasoning is not False,
        stream_reasoning=request.stream_reasoning is not False,
        **rules,
    )


def refuse_unsupported(request: ChatRequest) -> None:
    """Refuse fields that would change the output and that nothing here implements."""
    if request.chat_template is not None:
        raise errors.unsupported("chat_template", "a template in a request is not run; use --chat-template FILE")
    if request.audio is not None and request.modalities != ["text"]:
        raise errors.unsupported("audio", "this server generates text only")
    if request.web_search_options is not None:
        raise errors.unsupported("web_search_options", "this server searches nothing")
    if request.moderation is not None:
        raise errors.unsupported("moderation", "this server judges no content")
    if request.modalities is not None and request.modalities != ["text"]:
        raise errors.unsupported("modalities", 'this server generates text only; send ["text"] or nothing')
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    refuse_stream_mix(request, request.prompt_logprobs)


def tool_wish(request: ChatRequest, text: TextTools) -> ToolWish | None:
    """Return the tools that the model may call and how, or None.

    Raises:
        RequestError: A choice that means nothing, or tools without a parser for the model's calls.
    """
    if request.functions is not None and request.tools is not None:
        raise RequestError("functions is the old name of tools; send one of them", param="functions")
    if request.functions is None and request.function_call is not None:
        text_ = "function_call is only allowed when functions are specified; with tools, send tool_choice"
        raise RequestError(text_, param="function_call", code="invalid_value")
    if request.functions is not None and request.tool_choice is not None:
        text_ = "tool_choice belongs to tools; with functions, send function_call"
        raise RequestError(text_, param="tool_choice", code="invalid_value")
    if request.functions is not None:
        name, choice = "function_call", function_choice(request.function_call)
        tools: list[dict[str, Any]] = [
            {"type": "function", "function": f.model_dump(exclude_none=True)} for f in request.functions
        ]
    else:
        name, choice = "tool_choice", request.tool_choice
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    check_schemas(tools, "functions" if request.functions is not None else "tools")
    tools, choice = allowed_tools(tools, choice)
    if isinstance(choice, dict) or choice == "required":
        if not tools:
            raise RequestError(f"{name} needs tools", param=name, code="invalid_value")
    elif choice not in {None, "none", "auto"}:
        text_ = f"{name} must be 'none', 'auto', 'required' or an object (given: {choice!r})"
        raise RequestError(text_, param=name, code="invalid_value")
    if not tools or choice == "none":
        return None
    if text.tools is None:
        why = "no tool-call parser is in use, so calls could not be recognised; start with --tool-call-parser NAME"
        raise errors.unsupported("tools" if name == "tool_choice" else "functions", why)
    strict = any(tool["function"].get("strict") for tool in tools)
    parallel = request.parallel_tool_calls is not False
    return ToolWish(tools=tools, choice=choice or "auto", param=name, parallel=parallel, strict=strict)


def function_choice(given: Any) -> Any:
    """Return the deprecated `function_call` as a `tool_choice`."""
    if isinstance(given, dict) and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given


def named_function(choice: Any) -> Any:
    """Return the name in `{"type": "function", "function": {"name": …}}`, or in the flat form of it."""
    inner = choice.get("function", choice) if isinstance(choice, dict) else None
    return inner.get("name") if isinstance(inner, dict) else None


def check_schemas(tools: Sequence[Mapping[str, Any]], param: str) -> None:
    """Refuse a tool whose parameters are no JSON schema.

    Raises:
        RequestError: With the place of the schema as `param`.
    """
    for place, tool in enumerate(tools):
        try:
            schema.check(tool["function"].get("parameters") or {})
        except RequestError as error:
            where = f"{param}[{place}].parameters" if param == "functions" else f"{param}[{place}].function.parameters"
            raise RequestError(error.message, param=where, code=error.code) from None


def allowed_tools(tools: list[dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], Any]:
    """Resolve OpenAI's `allowed_tools`: a subset of the tools, and whether one of them must be called.

    Raises:
        RequestError: It has another form, or names a tool that is not there.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    inner = choice.get("allowed_tools", choice)
    mode = inner.get("mode", "auto") if isinstance(inner, dict) else None
    listed = inner.get("tools") if isinstance(inner, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list):
        why = 'tool_choice.allowed_tools must be {"mode": "auto" or "required", "tools": […]}'
        raise RequestError(why, param="tool_choice", code="invalid_value")
    names = {name for item in listed if isinstance(name := named_function(item), str)}
    kept = [tool for tool in tools if tool["function"]["name"] in names]
    if len(kept) != len(listed):
        why = "tool_choice.allowed_tools names a function that is not in tools"
        raise RequestError(why, param="tool_choice", code="invalid_value")
    return kept, mode
