"""`/v1/chat/completions`: preparing a request, and folding its steps into a reply or a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.engine.messages import TokenLogprob
from dovetail.errors import RequestError
from dovetail.text.stream import OutputStream
from dovetail_server import errors
from dovetail_server.openai.chat import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Function,
    ReplyMessage,
    ToolCall,
)
from dovetail_server.serving import logprobs as lp
from dovetail_server.serving.chat_chunks import ChatChunks
from dovetail_server.serving.chat_events import ChatView
from dovetail_server.serving.common import check_not_aborted, choice_rid, reply_head, rid_of, submit_of, usage_of
from dovetail_server.serving.generation import Choice, Generation, Step
from dovetail_server.serving.params import (
    fit_output,
    refuse_grammar,
    refuse_stream_mix,
    same_field,
    sampling_params,
    stop_rules,
)
from dovetail_server.serving.sse import DONE, Chunks

if TYPE_CHECKING:
    from dovetail_server.serving.text import TextTools
    from dovetail_server.state import ServerState

encode = msgspec.json.Encoder().encode
NO_THINKING = ("none",)


@dataclass(slots=True, kw_only=True)
class ChatJob:
    """A prepared request."""

    request: ChatRequest
    model: str
    generation: Generation
    view: ChatView
    is_legacy: bool
    """The request used the deprecated `functions`; so does the reply."""

    @property
    def num_top(self) -> int:
        """Rivals per token in `logprobs`."""
        return self.request.top_logprobs or 0


def prepare(state: ServerState, request: ChatRequest, model: str) -> ChatJob:
    """Check, render and tokenize; CPU work, called in a worker thread.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    refuse_unsupported(request)
    tools = tools_of(request, state.text)
    rules = stop_rules(request)
    text = state.text
    messages = [message.model_dump(exclude_unset=True) for message in request.messages]
    text.check_size(messages)
    kwargs = template_switches(request)
    rendered = text.template.render(
        messages,
        tools=tools,
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        template_kwargs=kwargs,
    )
    ids = text.encode(rendered.text, "messages", add_special_tokens=False)
    wanted = same_field(request, "max_completion_tokens", "max_tokens")
    names = ("messages", "max_tokens" if request.max_tokens is not None else "max_completion_tokens")
    params = sampling_params(
        request,
        text.limits,
        max_tokens=fit_output(len(ids), wanted, None, text.limits, names),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    rid = rid_of(request, "chatcmpl")
    count = request.n or 1
    choices = [
        Choice(
            index=i,
            submit=submit_of(
                choice_rid(rid, i, count), ids, params, i, request.priority or 0, request.cache_salt or ""
            ),
            output=OutputStream(
                text.tokenizer,
                reasoning=text.reasoning,
                tools=text.tools if tools else None,
                tool_schemas=tools or (),
                template=text.template,
                template_kwargs=kwargs,
                prompt_tail=rendered.tail,
                separate_reasoning=request.separate_reasoning is not False,
                stream_reasoning=request.stream_reasoning is not False,
                **rules,
            ),
        )
        for i in range(count)
    ]
    view = ChatView(
        include_reasoning=request.include_reasoning is not False,
        parallel_tool_calls=request.parallel_tool_calls is not False,
    )
    generation = Generation(state=state, request_id=rid, choices=choices)
    return ChatJob(
        request=request, model=model, generation=generation, view=view, is_legacy=request.functions is not None
    )


def refuse_unsupported(request: ChatRequest) -> None:
    """Refuse fields that would change the output and that nothing here implements."""
    refuse_grammar(request)
    if request.chat_template is not None:
        raise errors.unsupported("chat_template", "a template in a request is not run; use --chat-template FILE")
    if request.audio is not None:
        raise errors.unsupported("audio", "this server generates text only")
    if request.web_search_options is not None:
        raise errors.unsupported("web_search_options", "this server searches nothing")
    if request.verbosity not in {None, "medium"}:
        raise errors.unsupported("verbosity", "no chat template here knows it; say it in the prompt")
    if request.modalities is not None and request.modalities != ["text"]:
        raise errors.unsupported("modalities", 'this server generates text only; send ["text"] or nothing')
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    refuse_stream_mix(request, request.prompt_logprobs)


def tools_of(request: ChatRequest, text: TextTools) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call, or None.

    Raises:
        RequestError: A choice that cannot be enforced, or tools without a parser for the model's calls.
    """
    if request.functions is not None and request.tools is not None:
        raise RequestError("functions is the old name of tools; send one of them", param="functions")
    if request.functions is not None:
        name, choice = "function_call", request.function_call
        tools: list[dict[str, Any]] = [
            {"type": "function", "function": f.model_dump(exclude_none=True)} for f in request.functions
        ]
    else:
        name, choice = "tool_choice", request.tool_choice
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    if isinstance(choice, dict) or choice == "required":
        if not tools:
            raise RequestError(f"{name} needs tools", param=name, code="invalid_value")
        raise errors.needs_grammar(f"{name} {'required' if choice == 'required' else 'with a named function'}")
    if choice not in {None, "none", "auto"}:
        text_ = f"{name} must be 'none', 'auto', 'required' or an object (given: {choice!r})"
        raise RequestError(text_, param=name, code="invalid_value")
    if not tools or choice == "none":
        return None
    if any(tool["function"].pop("strict", False) for tool in tools):
        raise errors.needs_grammar("strict: true in a tool")
    if text.tools is None:
        why = "the server was started without --tool-call-parser, so it could not recognise the model's calls"
        raise errors.unsupported("tools" if name == "tool_choice" else "functions", why)
    return tools


def template_switches(request: ChatRequest) -> Mapping[str, Any]:
    """Return the template's variables: `chat_template_kwargs`, and what `reasoning_effort` stands for."""
    given = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is None:
        return given
    thinks = effort not in NO_THINKING
    switches: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
    if thinks:
        switches["reasoning_effort"] = effort
    return switches | given


async def reply(job: ChatJob) -> bytes:
    """Run to the end and return the full reply: the fold of what a stream would have carried."""
    choices = job.generation.choices
    rows: list[list[TokenLogprob]] = [[] for _ in choices]
    async for steps in job.generation.steps():
        for step in steps:
            rows[step.choice.index] += step.choice.visible(step)
    for choice in choices:
        check_not_aborted(choice)
    prompt_rows = choices[0].prompt_logprobs
    tokenizer = job.generation.state.text.tokenizer
    completion = ChatCompletion(
        **reply_head(job.generation.state, job.generation.request_id, job.model),
        choices=[choice_reply(job, choice, rows[choice.index]) for choice in choices],
        usage=usage_of(choices),
        prompt_logprobs=lp.prompt_logprobs(prompt_rows, tokenizer) if prompt_rows is not None else msgspec.UNSET,
        prompt_token_ids=choices[0].submit.prompt_ids if job.request.return_token_ids else msgspec.UNSET,
    )
    return encode(completion)


def choice_reply(job: ChatJob, choice: Choice, rows: Sequence[TokenLogprob]) -> ChatChoice:
    """Build one choice of a full reply; absent parts are null."""
    output, legacy = choice.output, job.is_legacy
    reasoning = job.view.reasoning(output)
    calls = [ToolCall(id=call.id, function=Function(call.name, call.arguments)) for call in job.view.tool_calls(output)]
    message = ReplyMessage(
        content=output.content,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=None if legacy else calls or None,
        function_call=(calls[0].function if calls else None) if legacy else msgspec.UNSET,
    )
    wants_rows = bool(job.request.logprobs)
    tokenizer = job.generation.state.text.tokenizer
    return ChatChoice(
        index=choice.index,
        message=message,
        logprobs=ChatLogprobs(lp.chat_logprobs(rows, job.num_top, tokenizer)) if wants_rows else None,
        finish_reason=finish_reason(choice, legacy),
        matched_stop=choice.matched_stop,
        token_ids=output.token_ids if job.request.return_token_ids else msgspec.UNSET,
    )


def finish_reason(choice: Choice, legacy: bool) -> Any:
    """Return OpenAI's word for the end of a choice."""
    reason = choice.finish_reason
    return "function_call" if legacy and reason == "tool_calls" else reason


class ChoiceStream:
    """One choice of a stream."""

    def __init__(self, choice: Choice, job: ChatJob, chunks: ChatChunks) -> None:
        """Start before the first token."""
        self.choice = choice
        self.job = job
        self.chunks = chunks
        self.ids: list[int] = []
        self.rows: list[TokenLogprob] = []
        self.plain = not job.request.logprobs and not job.request.return_token_ids

    def take(self, step: Step, usage: bytes | None) -> list[bytes]:
        """Return the chunks of a step. What belongs to tokens rides on the next chunk there is."""
        if not self.plain:
            self.ids += step.ids
            self.rows += self.choice.visible(step)
        if step.is_last:
            check_not_aborted(self.choice)
        result = []
        for event in self.job.view.events(step.events):
            inside = self.chunks.inside(event)
            if inside is not None:
                result.append(self.chunks.delta(self.choice.index, inside, *self._riders(), usage))
        if step.is_last:
            reason = finish_reason(self.choice, self.job.is_legacy)
            matched = self.choice.matched_stop
            result.append(self.chunks.finish(self.choice.index, reason, matched, *self._riders(), usage))
        return result

    def _riders(self) -> tuple[bytes, bytes]:
        """Return `logprobs` and the token ids gathered since the last chunk."""
        if self.plain:
            return b"null", b""
        logprobs, extra = b"null", b""
        if self.job.request.logprobs and self.rows:
            tokenizer = self.job.generation.state.text.tokenizer
            logprobs = encode(ChatLogprobs(lp.chat_logprobs(self.rows, self.job.num_top, tokenizer)))
        if self.job.request.return_token_ids:
            extra = b',"token_ids":' + encode(self.ids)
        self.rows, self.ids = [], []
        return logprobs, extra


async def stream(job: ChatJob) -> Chunks:
    """Yield the chunks of a stream, those of one engine step together."""
    options = job.request.stream_options
    wants_usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    generation = job.generation
    head = reply_head(generation.state, generation.request_id, job.model)
    chunks = ChatChunks(head, has_usage=wants_usage or continuous, is_legacy=job.is_legacy)
    streams = [ChoiceStream(choice, job, chunks) for choice in generation.choices]
    is_first = True
    source = generation.steps()
    try:
        async for steps in source:
            usage = encode(usage_of(generation.choices)) if continuous else None
            parts = opening(job, chunks, usage) if is_first else []
            is_first = False
            for step in steps:
                parts += streams[step.choice.index].take(step, usage)
            if parts:
                yield b"".join(parts)
    finally:
        await source.aclose()
    last = [chunks.usage(encode(usage_of(generation.choices)))] if wants_usage else []
    yield b"".join([*last, DONE])


def opening(job: ChatJob, chunks: ChatChunks, usage: bytes | None) -> list[bytes]:
    """Return the role chunk of every choice; the first carries the prompt's ids if they were asked for."""
    choices = job.generation.choices
    ids = b',"prompt_token_ids":' + encode(choices[0].submit.prompt_ids) if job.request.return_token_ids else b""
    return [chunks.role(choice.index, usage, b"" if choice.index else ids) for choice in choices]
