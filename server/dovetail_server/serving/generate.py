"""`/generate`: one prompt or a batch, replies one by one or streamed with cumulative text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dovetail.errors import RequestError
from dovetail.messages import TokenLogprob
from dovetail.processing.constraints import grammar_of
from dovetail.processing.input import Prepared, Wanted, prepare_text
from dovetail.processing.processor import Processor
from dovetail.processing.sampling import check_token_ids, fit_output, num_top
from dovetail_server import errors
from dovetail_server.native.generate import Generated, GenerateParams, GenerateRequest, MetaInfo, NativeFinish
from dovetail_server.openai.common import same_field
from dovetail_server.serving import logprobs as lp
from dovetail_server.serving.common import choice_rid, new_id, report_field, salt_of, service_of
from dovetail_server.serving.generation import Choice, Generation, Step
from dovetail_server.serving.prompts import Prompt, Prompts, read_one
from dovetail_server.serving.sse import DONE, Chunks

if TYPE_CHECKING:
    from dovetail_server.serving.context import ServingContext

encode = msgspec.json.Encoder().encode
DEFAULT_MAX_TOKENS = 128
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt of a batch with its options."""

    prompt: Prompt
    params: GenerateParams
    rid: str
    num_top: int | None
    """None: no log probabilities."""
    logprob_start: int
    named: Sequence[int] = ()
    """Tokens whose log probabilities it wants."""


@dataclass(slots=True, kw_only=True)
class GenerateJob:
    """A prepared request."""

    generation: Generation
    folds: list[ItemFold]
    is_single: bool
    """One prompt, one choice, not sent as a batch: the reply is an object, not a list."""


def read_prompts(text: Processor, request: GenerateRequest) -> Prompts:
    """Check and tokenize.

    Raises:
        RequestError: No prompt or two, or one that leaves no room in the context.
    """
    text.tasks.check("generate")
    if (request.text is None) == (request.input_ids is None):
        raise RequestError("send one of text and input_ids", param="text", code="invalid_value")
    param = "text" if request.text is not None else "input_ids"
    given: Any = request.text if request.text is not None else request.input_ids
    is_one = isinstance(given, str) or isinstance(given[0], int)
    raw = [given] if is_one else given
    for options in (
        [request.sampling_params]
        if isinstance(request.sampling_params, GenerateParams)
        else request.sampling_params or ()
    ):
        grammar_of(options)  # refused here, where large ones do not hold others up
    keeps = not salt_of(request)
    names = [param] if is_one else [f"{param}[{i}]" for i in range(len(raw))]
    prompts = [read_one(item, text, name, keeps=keeps) for item, name in zip(raw, names, strict=True)]
    for prompt in prompts:
        fit_output(len(prompt.ids), None, DEFAULT_MAX_TOKENS, text.limits, ("text", "max_new_tokens"))
    return Prompts(prompts=prompts, is_batch=not is_one)


def prepare(state: ServingContext, request: GenerateRequest, made: Prompts | None = None) -> GenerateJob:
    """Check and tokenize; CPU work, see `serving/prepare.py`.

    Args:
        state: The server's.
        request: Checked by its schema.
        made: By `read_prompts`, where that has been done; the request is then without its prompts.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    text = state.text
    text.tasks.check("generate")
    made = made or read_prompts(text, request)
    items = read_items(request, made.prompts, text)
    state.check_choices(sum(item.params.n or 1 for item in items))
    choices: list[Choice] = []
    folds: list[ItemFold] = []
    shared: dict[tuple[object, ...], Prepared] = {}
    service = service_of(request)
    for p, item in enumerate(items):
        key = item_key(item, text)
        if key not in shared:
            shared[key] = prepared_for(item, text)
        prepared = shared[key]
        count = item.params.n or 1
        for k in range(count):
            submit = prepared.submit(choice_rid(item.rid, k, count), item.prompt.ids, k, **service)
            choice = Choice(
                index=len(choices),
                submit=submit,
                output=prepared.output(text),
                prompt_index=p,
                route=prepared.constraints.route,
                is_dropped=wanted_tokens(item.params) == 0,
            )
            choices.append(choice)
            show_text = bool(request.return_text_in_logprobs)
            folds.append(ItemFold(choice=choice, item=item, text=text, show_text=show_text))
    generation = Generation(state=state, request_id=items[0].rid, choices=choices)
    return GenerateJob(generation=generation, folds=folds, is_single=not made.is_batch and len(choices) == 1)


def item_key(item: Item, text: Processor) -> tuple[object, ...]:
    """Return what `prepared_for` depends on: most prompts of a batch share all of it."""
    num_prompt = len(item.prompt.ids)
    room = text.limits.context_len - num_prompt
    most = min(room, max(wanted_tokens(item.params) or 0, DEFAULT_MAX_TOKENS))
    start = item.logprob_start if item.logprob_start < num_prompt else -1
    return id(item.params), most, item.num_top, start, id(item.named)


def prepared_for(item: Item, text: Processor) -> Prepared:
    """Return how an item's text is made, when it ends, and what it is held to."""
    given = item.params
    if given.prompt_logprobs is not None:
        raise errors.unsupported("sampling_params.prompt_logprobs", "send return_logprob and logprob_start_len")
    seed = same_field(given, "sampling_seed", "seed")
    min_tokens = same_field(given, "min_new_tokens", "min_tokens")
    wanted = wanted_tokens(given)
    wanted = 1 if wanted == 0 else wanted
    wants_prompt = item.num_top is not None and 0 <= item.logprob_start < len(item.prompt.ids)
    names = ("text", "max_new_tokens")
    return prepare_text(
        text,
        Wanted(
            fields=given.model_copy(update={"seed": seed, "min_tokens": min_tokens}),
            max_tokens=fit_output(len(item.prompt.ids), wanted, DEFAULT_MAX_TOKENS, text.limits, names),
            logprobs=item.num_top,
            prompt_logprobs=item.num_top if wants_prompt else None,
            prompt_logprobs_start=item.logprob_start if wants_prompt else 0,
            logprob_token_ids=item.named,
            use_defaults=False,
            grammar=grammar_of(given),
            grammar_backend=given.grammar_backend,
        ),
    )


def wanted_tokens(given: GenerateParams) -> int | None:
    """Return how many tokens are asked for; 0 where only the prompt is to be read."""
    return same_field(given, "max_new_tokens", "max_tokens")  # type: ignore[no-any-return]


def read_items(request: GenerateRequest, prompts: Sequence[Prompt], text: Processor) -> list[Item]:
    """Return the prompts with their options, lists spread over the batch.

    Raises:
        RequestError: A list whose length is not the batch's.
    """
    count = len(prompts)
    wants = spread(request.return_logprob, count, "return_logprob", False)
    tops = spread(request.top_logprobs_num, count, "top_logprobs_num", 0)
    top_counts = [num_top(top, text.limits, "top_logprobs_num") or 0 for top in tops]
    named = read_named(request.token_ids_logprob, wants, text)
    starts = spread(request.logprob_start_len, count, "logprob_start_len", -1)
    params = spread(request.sampling_params, count, "sampling_params", GenerateParams.model_validate({}))
    return [
        Item(
            prompt=prompts[i],
            params=params[i],
            rid=rid,
            num_top=top_counts[i] if wants[i] else None,
            logprob_start=starts[i],
            named=named[i],
        )
        for i, rid in enumerate(read_rids(request.rid, count))
    ]


def read_named(given: Any, wants: Sequence[bool], text: Processor) -> list[Sequence[int]]:
    """Return the tokens that each prompt names for log probabilities; one list is for all.

    Raises:
        RequestError: Nobody asked for log probabilities, or an id is outside the vocabulary.
    """
    if not given:
        return [()] * len(wants)
    several = not isinstance(given[0], int)
    rows: list[Sequence[int]] = (
        [row or () for row in spread(given, len(wants), "token_ids_logprob", None)] if several else [given] * len(wants)
    )
    for row, wanted in zip(rows, wants, strict=True):
        if row and not wanted:
            why = "token_ids_logprob needs return_logprob: true"
            raise RequestError(why, param="token_ids_logprob", code="invalid_value")
        check_token_ids(row, text.limits.vocab_size, "token_ids_logprob")
    return rows


def read_rids(given: str | list[str] | None, count: int) -> list[str]:
    """Return one identifier per prompt."""
    if given is None:
        return [new_id("gen") for _ in range(count)]
    if isinstance(given, str):
        return [choice_rid(given, i, count) for i in range(count)]
    if len(given) != count or len(set(given)) != count:
        text = f"rid must hold {count} different identifiers, one per prompt (given: {len(given)})"
        raise RequestError(text, param="rid", code="invalid_value")
    return given


def spread(value: T | list[T] | None, count: int, param: str, default: T) -> list[T]:
    """Return one value per prompt."""
    if isinstance(value, list):
        if len(value) != count:
            text = f"{param} has {len(value)} entries, but there are {count} prompts"
            raise RequestError(text, param=param, code="invalid_value")
        return value
    return [default if value is None else value] * count


@dataclass(slots=True, kw_only=True)
class ItemFold:
    """One choice, folded; asked after each step in a stream, at the end otherwise."""

    choice: Choice
    item: Item
    text: Processor
    show_text: bool
    rows: list[TokenLogprob] = field(default_factory=list)

    def take(self, step: Step) -> None:
        """Add a step."""
        self.rows += step.logprobs

    def generated(self, began: float, index: int | None) -> Generated:
        """Return everything so far."""
        choice = self.choice
        meta = MetaInfo(
            id=choice.submit.rid,
            finish_reason=native_finish(choice),
            prompt_tokens=choice.num_prompt,
            completion_tokens=choice.num_completion,
            cached_tokens=choice.num_cached,
            reasoning_tokens=choice.output.reasoning_tokens,
            num_retractions=choice.num_retractions,
        )
        meta.structured_output = report_field(choice)
        if choice.finish_reason:
            meta.e2e_latency = choice.finished_at - began
        if self.item.num_top is not None:
            self._add_logprobs(meta, self.item.num_top)
        return Generated(
            text="" if choice.is_dropped else choice.output.text,
            output_ids=[] if choice.is_dropped else choice.output.token_ids,
            meta_info=meta,
            index=msgspec.UNSET if index is None else index,
        )

    def _add_logprobs(self, meta: MetaInfo, most: int) -> None:
        text_of_id = self.text.tokenizer.token_text if self.show_text else None
        prompt = self.choice.prompt_logprobs or []
        meta.input_token_logprobs = lp.native_rows(prompt, text_of_id)
        meta.output_token_logprobs = lp.native_rows(self.rows, text_of_id)
        if most:
            meta.input_top_logprobs = lp.native_top(prompt, most, text_of_id)
            meta.output_top_logprobs = lp.native_top(self.rows, most, text_of_id)
        if self.item.named:
            meta.input_token_ids_logprobs = lp.native_named(prompt, text_of_id)
            meta.output_token_ids_logprobs = lp.native_named(self.rows, text_of_id)


def native_finish(choice: Choice) -> NativeFinish | None:
    """Return why a choice ended, or None while it runs."""
    reason = choice.finish_reason
    if not reason:
        return None
    if reason == "length":
        return NativeFinish(type=reason, length=choice.num_completion)
    if reason == "abort":
        return NativeFinish(type=reason, message=choice.abort_message or "aborted")
    return NativeFinish(type=reason, matched=choice.matched_stop)


async def reply(job: GenerateJob) -> bytes:
    """Run to the end and return an object, or a list for a batch."""
    async for steps in job.generation.steps(whole=True):
        for step in steps:
            job.folds[step.choice.index].take(step)
    began = job.generation.began
    check_one_done(job.folds)
    if job.is_single:
        return encode(job.folds[0].generated(began, None))
    return await job.generation.finished(lambda: encode([fold.generated(began, None) for fold in job.folds]))


def check_one_done(folds: Sequence[ItemFold]) -> None:
    """Raise if a lone request failed before its first token; later the reply itself says so."""
    choice = folds[0].choice
    if len(folds) == 1 and choice.finish_reason == "abort" and not choice.num_completion:
        raise errors.aborted(choice.abort_message, choice.abort_code)


async def stream(job: GenerateJob) -> Chunks:
    """Yield a chunk per step and choice, each with all the text so far."""
    began = job.generation.began
    source = job.generation.steps()
    try:
        async for steps in source:
            for step in steps:
                job.folds[step.choice.index].take(step)
            check_one_done(job.folds)
            changed = dict.fromkeys(step.choice.index for step in steps)
            chunks = [job.folds[i].generated(began, None if job.is_single else i) for i in changed]
            yield b"".join([b"data: " + encode(chunk) + b"\n\n" for chunk in chunks])
    finally:
        await source.aclose()
    yield DONE
