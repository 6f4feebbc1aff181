"""`/v1/chat/completions`: from a request to the choices that the engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.errors import RequestError
from dovetail.processing.constraints import grammar_of
from dovetail.processing.input import Conversation, Prepared, Wanted, chat_prompt, prepare_chat
from dovetail.processing.processor import Processor
from dovetail.processing.refusals import wrong
from dovetail.processing.sampling import fit_output, named_ids, num_top
from dovetail.processing.tools import ToolOptions, tool_options
from dovetail_server import errors
from dovetail_server.openai.chat import ChatRequest
from dovetail_server.openai.common import same_field
from dovetail_server.serving.chat_events import ChatView
from dovetail_server.serving.common import choice_rid, rid_of, salt_of, service_of
from dovetail_server.serving.fields import refuse_stream_mix, truncated
from dovetail_server.serving.generation import Choice, Generation
from dovetail_server.serving.prompts import Prompt, Prompts

if TYPE_CHECKING:
    from dovetail_server.serving.context import ServingContext
    from dovetail_server.storage.completions import CompletionKeeper


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


def read_prompt(text: Processor, request: ChatRequest) -> Prompts:
    """Check, render and tokenize a conversation.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    text.tasks.check("generate")
    refuse_unsupported(request)
    grammar_of(request)  # refused here, where large ones do not hold others up
    return _prompt(text, request, conversation(request, text))


def conversation(request: ChatRequest, text: Processor) -> Conversation:
    """Return what the prompt is made of, and how the reply is divided.

    Raises:
        RequestError: See `tools_of` and `template_kwargs`.
    """
    return Conversation(
        messages=request.messages,
        tools=tools_of(request, text),
        template_kwargs=template_kwargs(request, text),
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        input_ids=request.input_ids,
        add_special_tokens=bool(request.add_special_tokens),
        separate_reasoning=request.separate_reasoning is not False,
        stream_reasoning=request.stream_reasoning is not False,
    )


def _prompt(text: Processor, request: ChatRequest, chat: Conversation) -> Prompts:
    whole, tail = chat_prompt(text, chat, keeps=not salt_of(request))
    ids = truncated(whole, request, same_field(request, "max_completion_tokens", "max_tokens"), text.limits)
    max_tokens(request, len(ids), text)
    return Prompts(prompts=[Prompt(ids, echo_of(request.messages[-1]) if request.echo else "")], tail=tail)


def max_tokens(request: ChatRequest, num_prompt: int, text: Processor) -> int:
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
    asked, chat = grammar_of(request), conversation(request, text)
    made = prompts or _prompt(text, request, chat)
    ids = made.only.ids
    wanted = Wanted(
        fields=request,
        max_tokens=max_tokens(request, len(ids), text),
        logprobs=num_top(request.top_logprobs or 0, text.limits, "top_logprobs") if request.logprobs else None,
        prompt_logprobs=num_top(request.prompt_logprobs, text.limits, "prompt_logprobs"),
        logprob_token_ids=named_ids(request.logprob_token_ids, bool(request.logprobs), text.limits),
        grammar=asked,
        grammar_backend=request.grammar_backend,
        thinking_budget=same_field(request, "thinking_budget", "thinking_token_budget"),
    )
    prepared = prepare_chat(text, wanted, chat, made.tail)
    rid = rid_of(request, "chatcmpl")
    choices = chat_choices(prepared, request, ids, rid, text)
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


def chat_choices(prepared: Prepared, request: ChatRequest, ids: list[int], rid: str, text: Processor) -> list[Choice]:
    """Return what the engine runs for a request."""
    count, service = request.n or 1, service_of(request)
    return [
        Choice(
            index=i,
            submit=prepared.submit(choice_rid(rid, i, count), ids, i, **service),
            output=prepared.output(text),
            route=prepared.constraints.route,
            is_dropped=same_field(request, "max_completion_tokens", "max_tokens") == 0,
        )
        for i in range(count)
    ]


def echo_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message that the reply goes on with: one of the assistant's."""
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def template_kwargs(request: ChatRequest, text: Processor) -> dict[str, Any]:
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


def tools_of(request: ChatRequest, text: Processor) -> ToolOptions | None:
    """Return the tools that the model may call and how, or None.

    Raises:
        RequestError: Old and new names are mixed, or see `tool_options`.
    """
    parallel = request.parallel_tool_calls is not False
    if request.functions is None:
        if request.function_call is not None:
            why = "function_call is only allowed when functions are specified; with tools, send tool_choice"
            raise wrong(why, "function_call")
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        return tool_options(tools, request.tool_choice, text.tools, parallel=parallel, names=("tools", "tool_choice"))
    if request.tools is not None:
        raise RequestError("functions is the old name of tools; send one of them", param="functions")
    if request.tool_choice is not None:
        raise wrong("tool_choice belongs to tools; with functions, send function_call", "tool_choice")
    functions = [{"type": "function", "function": f.model_dump(exclude_none=True)} for f in request.functions]
    choice = function_choice(request.function_call)
    return tool_options(functions, choice, text.tools, parallel=parallel, names=("functions", "function_call"))


def function_choice(given: Any) -> Any:
    """Return the deprecated `function_call` as a `tool_choice`."""
    if isinstance(given, dict) and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given
