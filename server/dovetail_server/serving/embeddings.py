"""`/v1/embeddings`: a prompt's final hidden states, pooled as the checkpoint says."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from dovetail.errors import RequestError
from dovetail.messages import SamplingParams, Submit
from dovetail.text.stream import OutputStream
from dovetail_server import errors
from dovetail_server.auth import CALLER
from dovetail_server.openai.embeddings import Embedding, EmbeddingRequest, Embeddings, EmbeddingUsage
from dovetail_server.serving.common import check_not_aborted, choice_rid, new_id
from dovetail_server.serving.generation import Choice, Generation
from dovetail_server.serving.params import same_field
from dovetail_server.serving.prompts import Prompt, Prompts, read_each

if TYPE_CHECKING:
    from dovetail_server.serving.context import ServingContext
    from dovetail_server.serving.text import TextTools

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
"""What the engine's message must have; nothing is drawn."""


@dataclass(slots=True, kw_only=True)
class EmbeddingJob:
    """A prepared request."""

    request: EmbeddingRequest
    model: str
    generation: Generation


def read_prompts(text: TextTools, request: EmbeddingRequest) -> Prompts:
    """Check and tokenize.

    Raises:
        RequestError: An input is empty, too long, or has an id outside the vocabulary.
    """
    prompts = read_each(request.input, text, "input", special=request.add_special_tokens is not False)
    prompts = [cut(prompt, request, text.limits.context_len) for prompt in prompts]
    for at, prompt in enumerate(prompts):
        if len(prompt.ids) > text.limits.context_len:
            param = "input" if len(prompts) == 1 else f"input[{at}]"
            raise errors.input_too_long(len(prompt.ids), text.limits.context_len, param)
    return Prompts(prompts=prompts)


def cut(prompt: Prompt, request: EmbeddingRequest, context_len: int) -> Prompt:
    """Return an input as `truncate_prompt_tokens` leaves it; nothing follows it, so it may fill the context."""
    wanted = request.truncate_prompt_tokens
    if not wanted:
        return prompt
    most = min(context_len, len(prompt.ids) if wanted < 0 else wanted)
    return Prompt(prompt.ids[:most] if request.truncation_side == "right" else prompt.ids[-most:])


def prepare(state: ServingContext, request: EmbeddingRequest, model: str, made: Prompts | None = None) -> EmbeddingJob:
    """Check and tokenize; CPU work, called in a worker thread.

    Args:
        state: The server's.
        request: Checked by its schema.
        model: The name that the reply carries.
        made: By `read_prompts`, where that has been done; the request is then without its texts.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    text = state.text
    text.embedder.check(request.dimensions, state.info.hidden_size)
    prompts = (made or read_prompts(text, request)).prompts
    state.check_choices(len(prompts), "input", "the number of inputs")
    rid = same_field(request, "rid", "request_id") or new_id("embd")
    choices = [
        Choice(
            index=at,
            prompt_index=at,
            submit=Submit(
                rid=choice_rid(rid, at, len(prompts)),
                prompt_ids=prompt.ids,
                params=PARAMS,
                priority=request.priority or 0,
                cache_salt=request.cache_salt or "",
                owner=CALLER.get().owner,
                pool=text.embedder.pool,
            ),
            output=OutputStream(text.tokenizer),
        )
        for at, prompt in enumerate(prompts)
    ]
    generation = Generation(state=state, request_id=rid, choices=choices, operation="embeddings")
    return EmbeddingJob(request=request, model=model, generation=generation)


async def reply(job: EmbeddingJob) -> bytes:
    """Run and return the vectors."""
    async for steps in job.generation.steps(whole=True):
        for step in steps:
            if step.is_last:
                check_not_aborted(step.choice)
    return await asyncio.to_thread(_written, job)


def _written(job: EmbeddingJob) -> bytes:
    """The reply; numbers of 2,048 vectors take a second to write."""
    num = sum(choice.num_prompt for choice in job.generation.choices)
    data = [Embedding(index=choice.index, embedding=_vector(job, choice)) for choice in job.generation.choices]
    return msgspec.json.encode(
        Embeddings(data=data, model=job.model, usage=EmbeddingUsage(prompt_tokens=num, total_tokens=num))
    )


def _vector(job: EmbeddingJob, choice: Choice) -> list[float] | str:
    if choice.pooled is None:
        raise RequestError("the engine gave no hidden state", code="request_failed", status=500)
    request, embedder = job.request, job.generation.state.text.embedder
    found = embedder.finish(choice.pooled, request.dimensions, normalize=request.use_activation)
    if request.encoding_format == "base64":
        return base64.b64encode(found.astype("<f4").tobytes()).decode()
    numbers: list[float] = found.tolist()
    return numbers
