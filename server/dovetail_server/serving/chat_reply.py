"""`/v1/chat/completions`: folding a job's steps into a full reply, or turning them into a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dovetail.contracts.output import ContentDelta, TokenizerView
from dovetail.messages import TokenLogprob
from dovetail_server.openai.chat import ChatChoice, ChatCompletion, ChatLogprobs, Function, ReplyMessage, ToolCall
from dovetail_server.serving import logprobs as lp
from dovetail_server.serving.chat import ChatJob
from dovetail_server.serving.chat_chunks import ChatChunks
from dovetail_server.serving.common import (
    check_not_aborted,
    reply_head,
    report_field,
    report_rider,
    usage_of,
    usage_wishes,
)
from dovetail_server.serving.generation import Choice, Step
from dovetail_server.serving.sse import DONE, Chunks

encode = msgspec.json.Encoder().encode


async def reply(job: ChatJob) -> bytes:
    """Run to the end and return the full reply: the fold of what a stream would have carried."""
    choices = job.generation.choices
    rows: list[list[TokenLogprob]] = [[] for _ in choices]
    async for steps in job.generation.steps(whole=True):
        for step in steps:
            rows[step.choice.index] += step.choice.visible(step)
    for choice in choices:
        check_not_aborted(choice)
    return await finished(job, reply_head(job.generation.state, job.reply_id, job.model), rows)


async def finished(job: ChatJob, head: Mapping[str, Any], rows: Sequence[Sequence[TokenLogprob]]) -> bytes:
    """Return the full reply of a job that has ended, and keep it where that was asked for.

    Args:
        job: All its choices have ended.
        head: What a reply and its chunks share.
        rows: Log probabilities of the visible tokens, by choice.
    """
    choices = job.generation.choices
    prompt_rows = choices[0].prompt_logprobs
    tokenizer = job.generation.state.text.tokenizer
    completion = ChatCompletion(
        **head,
        choices=[choice_reply(job, choice, rows[choice.index]) for choice in choices],
        usage=usage_of(choices),
        prompt_logprobs=lp.prompt_logprobs(prompt_rows, tokenizer) if prompt_rows is not None else msgspec.UNSET,
        prompt_token_ids=choices[0].submit.prompt_ids if job.request.return_token_ids else msgspec.UNSET,
    )
    body = encode(completion)
    if job.keeper is not None:
        await job.keeper.finish(body, job.model)
    return body


def choice_reply(job: ChatJob, choice: Choice, rows: Sequence[TokenLogprob]) -> ChatChoice:
    """Build one choice of a full reply."""
    output, legacy = choice.output, job.is_legacy
    reasoning = None if choice.is_dropped else job.view.reasoning(output)
    calls = [ToolCall(id=call.id, function=Function(call.name, call.arguments)) for call in job.view.tool_calls(output)]
    content = "" if choice.is_dropped else output.content
    message = ReplyMessage(
        content=job.echo + (content or "") if job.echo else content,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=calls if calls and not legacy else msgspec.UNSET,
        function_call=calls[0].function if calls and legacy else msgspec.UNSET,
    )
    wants_rows = bool(job.request.logprobs)
    tokenizer = job.generation.state.text.tokenizer
    return ChatChoice(
        index=choice.index,
        message=message,
        logprobs=chat_logprobs(job, rows, tokenizer) if wants_rows else None,
        finish_reason=finish_reason(choice, legacy),
        matched_stop=choice.matched_stop,
        structured_output=report_field(choice),
        token_ids=([] if choice.is_dropped else output.token_ids) if job.request.return_token_ids else msgspec.UNSET,
    )


def chat_logprobs(job: ChatJob, rows: Sequence[TokenLogprob], tokenizer: TokenizerView) -> ChatLogprobs:
    """Write the log probabilities of tokens as the request asks for them."""
    as_ids = bool(job.request.return_tokens_as_token_ids)
    return ChatLogprobs(lp.chat_logprobs(rows, job.num_top, tokenizer, as_ids=as_ids))


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
            logprobs, extra = self._riders()
            extra += report_rider(self.choice)
            result.append(self.chunks.finish(self.choice.index, reason, matched, logprobs, extra, usage))
        return result

    def _riders(self) -> tuple[bytes, bytes]:
        """Return `logprobs` and the token ids gathered since the last chunk."""
        if self.plain:
            return b"null", b""
        logprobs, extra = b"null", b""
        if self.job.request.logprobs and self.rows:
            tokenizer = self.job.generation.state.text.tokenizer
            logprobs = encode(chat_logprobs(self.job, self.rows, tokenizer))
        if self.job.request.return_token_ids:
            extra = b',"token_ids":' + encode(self.ids)
        self.rows, self.ids = [], []
        return logprobs, extra


async def stream(job: ChatJob) -> Chunks:
    """Yield the chunks of a stream, those of one engine step together."""
    generation = job.generation
    wants_usage, continuous = usage_wishes(generation.state, job.request)
    head = reply_head(generation.state, job.reply_id, job.model)
    chunks = ChatChunks(head, has_usage=wants_usage or continuous, is_legacy=job.is_legacy)
    rows: list[list[TokenLogprob]] = [[] for _ in generation.choices]
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
                if job.keeper is not None:
                    rows[step.choice.index] += step.choice.visible(step)
            if parts:
                yield b"".join(parts)
    finally:
        await source.aclose()
    if job.keeper is not None:
        await finished(job, head, rows)
    last = [chunks.usage(encode(usage_of(generation.choices)))] if wants_usage else []
    yield b"".join([*last, DONE])


def opening(job: ChatJob, chunks: ChatChunks, usage: bytes | None) -> list[bytes]:
    """Return the role chunk of every choice; the first carries the prompt's ids if they were asked for."""
    choices = job.generation.choices
    ids = b',"prompt_token_ids":' + encode(choices[0].submit.prompt_ids) if job.request.return_token_ids else b""
    roles = [chunks.role(choice.index, usage, b"" if choice.index else ids) for choice in choices]
    said = chunks.inside(ContentDelta(job.echo)) if job.echo else None
    if said is None:
        return roles
    return roles + [chunks.delta(choice.index, said, b"null", b"", usage) for choice in choices]
