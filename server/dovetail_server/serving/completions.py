"""`/v1/completions`: preparing a request, and folding its steps into a reply or a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from dovetail.contracts.output import ContentDelta, Event, Malformed
from dovetail.errors import RequestError
from dovetail.processing.constraints import grammar_of
from dovetail.processing.input import Prepared, Wanted, prepare_text
from dovetail.processing.processor import Processor
from dovetail.processing.sampling import fit_output, named_ids, num_top
from dovetail_server.openai.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from dovetail_server.serving import logprobs as lp
from dovetail_server.serving.common import (
    check_not_aborted,
    choice_rid,
    reply_head,
    report_field,
    report_rider,
    rid_of,
    salt_of,
    service_of,
    usage_of,
    usage_wishes,
)
from dovetail_server.serving.fields import refuse_stream_mix, truncated
from dovetail_server.serving.fill_in import fill_in_of, read_between
from dovetail_server.serving.generation import Choice, Generation, Step
from dovetail_server.serving.prompts import Prompt, Prompts, read_each
from dovetail_server.serving.sse import DONE, Chunks

if TYPE_CHECKING:
    from dovetail_server.serving.context import ServingContext

encode = msgspec.json.Encoder().encode
DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True, kw_only=True)
class CompletionJob:
    """A prepared request."""

    request: CompletionRequest
    model: str
    generation: Generation
    prompts: list[Prompt]
    per_prompt: int
    """Choices generated for each prompt: `best_of`, or else `n`."""

    @property
    def state(self) -> ServingContext:
        """The server's."""
        return self.generation.state


def read_prompts(text: Processor, request: CompletionRequest) -> Prompts:
    """Check and tokenize.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    text.tasks.check("generate")
    check(request)
    grammar_of(request)  # refused here, where large ones do not hold others up
    special = request.add_special_tokens is not False
    fill_in = fill_in_of(request, text)
    if fill_in is not None:
        prompts = read_between(request, text, fill_in, special=special)
    else:
        echoes, keeps = bool(request.echo), not salt_of(request)
        prompts = read_each(request.prompt, text, "prompt", has_echo=echoes, special=special, keeps=keeps)
    if request.truncate_prompt_tokens:
        prompts = [cut(prompt, request, text) for prompt in prompts]
    for prompt in prompts:
        max_tokens(request, len(prompt.ids), text)
    return Prompts(prompts=prompts)


def max_tokens(request: CompletionRequest, num_prompt: int, text: Processor) -> int:
    """Return how many tokens a choice may have.

    Raises:
        RequestError: Context overflow.
    """
    wanted = 1 if request.max_tokens == 0 else request.max_tokens
    return fit_output(num_prompt, wanted, DEFAULT_MAX_TOKENS, text.limits, ("prompt", "max_tokens"))


def prepare(
    state: ServingContext, request: CompletionRequest, model: str, made: Prompts | None = None
) -> CompletionJob:
    """Check and tokenize; CPU work, see `serving/prepare.py`.

    Args:
        state: The server's.
        request: Checked by its schema.
        model: The name that the reply carries.
        made: By `read_prompts`, where that has been done; the request is then without its prompts.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    text = state.text
    text.tasks.check("generate")
    check(request)
    asked = grammar_of(request)
    prompts = (made or read_prompts(text, request)).prompts
    per_prompt = request.best_of or request.n or 1
    state.check_choices(len(prompts) * per_prompt)
    echoes = bool(request.echo) and request.logprobs is not None
    needs_scores = per_prompt > (request.n or 1)
    logprobs = num_top(request.logprobs, text.limits, "logprobs")
    prompt_logprobs = num_top(request.prompt_logprobs, text.limits, "prompt_logprobs")
    named = named_ids(request.logprob_token_ids, request.logprobs is not None, text.limits)
    rid, fill_in = rid_of(request, "cmpl"), fill_in_of(request, text)
    service = service_of(request)
    choices: list[Choice] = []

    @cache
    def prepared_for(most: int) -> Prepared:
        wanted = Wanted(
            fields=request,
            max_tokens=most,
            logprobs=logprobs if logprobs is not None else 0 if needs_scores else None,
            prompt_logprobs=logprobs if echoes else prompt_logprobs,
            logprob_token_ids=named,
            grammar=asked,
            grammar_backend=request.grammar_backend,
        )
        found = prepare_text(text, wanted)
        return found if fill_in is None else found.ended_by(fill_in.stop_ids)

    for p, prompt in enumerate(prompts):
        prepared = prepared_for(max_tokens(request, len(prompt.ids), text))
        for k in range(per_prompt):
            name = choice_rid(rid, len(choices), len(prompts) * per_prompt)
            choices.append(
                Choice(
                    index=len(choices),
                    submit=prepared.submit(name, prompt.ids, k, **service),
                    output=prepared.output(text, track_offsets=request.logprobs is not None),
                    prompt_index=p,
                    is_dropped=request.max_tokens == 0,
                    route=prepared.constraints.route,
                )
            )
    return CompletionJob(
        request=request,
        model=model,
        generation=Generation(state=state, request_id=rid, choices=choices),
        prompts=prompts,
        per_prompt=per_prompt,
    )


def check(request: CompletionRequest) -> None:
    """Refuse what is not supported or does not fit together."""
    refuse_stream_mix(request, request.prompt_logprobs)
    n, best_of = request.n or 1, request.best_of or None
    if best_of is not None and best_of < n:
        raise RequestError(f"best_of is {best_of}, below n, which is {n}", param="best_of", code="invalid_value")
    if best_of is not None and best_of > n and request.stream:
        raise RequestError("best_of above n cannot be streamed", param="best_of", code="invalid_value")


def cut(prompt: Prompt, request: CompletionRequest, text: Processor) -> Prompt:
    """Return a prompt as `truncate_prompt_tokens` leaves it."""
    ids = truncated(prompt.ids, request, request.max_tokens, text.limits)
    return prompt if len(ids) == len(prompt.ids) else Prompt(ids, text.tokenizer.decode(ids, skip_special_tokens=False))


def text_of(events: Sequence[Event]) -> str:
    """Join the text of events."""
    return "".join(event.text for event in events if isinstance(event, ContentDelta | Malformed))


class ChoiceFold:
    """One choice; a stream takes its pieces, a full reply the whole."""

    def __init__(self, choice: Choice, job: CompletionJob) -> None:
        """Start with the echoed prompt, if any."""
        self.choice = choice
        self.job = job
        request = job.request
        self.ids: list[int] = []
        self.score = 0.0
        self.num_scored = 0
        self.echo = job.prompts[choice.prompt_index].text if request.echo else ""
        self.echoed = self.echo
        tokenizer = job.state.text.tokenizer
        self.rows = None
        if request.logprobs is not None:
            as_ids = bool(request.return_tokens_as_token_ids)
            offsets = choice.output.text_offsets
            top = choice.submit.params.logprobs or 0
            self.rows = lp.CompletionRows(top, tokenizer, offsets, len(self.echo), as_ids=as_ids)

    def take(self, step: Step) -> str:
        """Add a step and return its text."""
        if step.is_last:
            check_not_aborted(self.choice)
        self.ids += step.ids
        self.score += sum(row.logprob or 0.0 for row in step.logprobs)
        self.num_scored += len(step.logprobs)
        if self.rows is not None:
            if self.echo and self.choice.prompt_logprobs is not None:
                self.rows.take_prompt(self.choice.prompt_logprobs)
            self.rows.take(self.choice.visible(step))
        piece = self.echo + text_of(step.events)
        self.echo = ""
        return piece

    def logprobs(self) -> CompletionLogprobs | None:
        """Return and forget what has been gathered."""
        return None if self.rows is None else self.rows.pop()

    @property
    def mean_logprob(self) -> float:
        """What `best_of` ranks by."""
        return self.score / max(self.num_scored, 1)

    def choice_reply(self, index: int) -> CompletionChoice:
        """Build the choice."""
        job, choice = self.job, self.choice
        rows = choice.prompt_logprobs if job.request.prompt_logprobs is not None else None
        with_ids = bool(job.request.return_token_ids)
        return CompletionChoice(
            index=index,
            text=self.echoed + ("" if choice.is_dropped else choice.output.text),
            logprobs=self.logprobs(),
            finish_reason=choice.finish_reason,  # type: ignore[arg-type]  # `abort` has been raised before
            matched_stop=choice.matched_stop,
            structured_output=report_field(choice),
            prompt_logprobs=msgspec.UNSET if rows is None else lp.prompt_logprobs(rows, job.state.text.tokenizer),
            token_ids=self.ids if with_ids else msgspec.UNSET,
            prompt_token_ids=choice.submit.prompt_ids if with_ids else msgspec.UNSET,
        )


async def reply(job: CompletionJob) -> bytes:
    """Run to the end and return the full reply."""
    folds = [ChoiceFold(choice, job) for choice in job.generation.choices]
    async for steps in job.generation.steps(whole=True):
        for step in steps:
            folds[step.choice.index].take(step)
    return await job.generation.finished(lambda: full_reply(job, folds))


def full_reply(job: CompletionJob, folds: Sequence[ChoiceFold]) -> bytes:
    """Build the reply; CPU work."""
    n = job.request.n or 1
    kept: list[ChoiceFold] = []
    for p in range(len(job.prompts)):
        own = folds[p * job.per_prompt : (p + 1) * job.per_prompt]
        kept += own if len(own) == n else sorted(own, key=lambda fold: -fold.mean_logprob)[:n]
    completion = Completion(
        **reply_head(job.state, job.generation.request_id, job.model),
        choices=[fold.choice_reply(i) for i, fold in enumerate(kept)],
        usage=usage_of(job.generation.choices),
    )
    return encode(completion)


async def stream(job: CompletionJob) -> Chunks:
    """Yield the chunks of a stream, those of one engine step together."""
    generation = job.generation
    wants_usage, continuous = usage_wishes(generation.state, job.request)
    folds = [ChoiceFold(choice, job) for choice in generation.choices]
    head = {"object": "text_completion", **reply_head(job.state, generation.request_id, job.model)}
    start = b"data: " + encode(head)[:-1] + b',"choices":['
    source = generation.steps()
    try:
        async for steps in source:
            if continuous:
                end = b'],"usage":' + encode(usage_of(generation.choices)) + b"}\n\n"
            else:
                end = b'],"usage":null}\n\n' if wants_usage else b"]}\n\n"
            inner = [part for step in steps for part in chunk_choices(folds[step.choice.index], step)]
            if inner:
                yield b"".join([start + choice + end for choice in inner])
    finally:
        await source.aclose()
    usage = start + b'],"usage":' + encode(usage_of(generation.choices)) + b"}\n\n" if wants_usage else b""
    yield usage + DONE


def chunk_choices(fold: ChoiceFold, step: Step) -> list[bytes]:
    """Return the `choices` entries of a step: its text, and after the last one the finish."""
    text = fold.take(step)
    index = b'{"index":%d,"text":' % fold.choice.index
    result = []
    if text:
        result.append(index + encode(text) + extra_fields(fold) + b',"finish_reason":null}')
    if step.is_last:
        reason, matched = encode(fold.choice.finish_reason), encode(fold.choice.matched_stop)
        result.append(
            index
            + b'""'
            + extra_fields(fold)
            + report_rider(fold.choice)
            + b',"finish_reason":'
            + reason
            + b',"matched_stop":'
            + matched
            + b"}"
        )
    return result


def extra_fields(fold: ChoiceFold) -> bytes:
    """Return `logprobs` and token ids gathered since the last chunk."""
    logprobs = b',"logprobs":' + encode(fold.logprobs())
    ids, fold.ids = fold.ids, []
    return logprobs + b',"token_ids":' + encode(ids) if fold.job.request.return_token_ids else logprobs
