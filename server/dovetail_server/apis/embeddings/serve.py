"""`/v1/embeddings`: a prompt's final hidden states, pooled as the checkpoint says."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail.processing.pairs import most_tokens
from dovetail_server.apis.embeddings.schema import EmbeddingObject, EmbeddingRequest, Embeddings
from dovetail_server.apis.pooled import PooledJob, generation_of, read_texts
from dovetail_server.serving.choice import Choice
from dovetail_server.serving.prompts import Prompts

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.serving.context import ServingContext


def read_prompts(text: Processor, request: EmbeddingRequest) -> Prompts:
    """Check and tokenize.

    Raises:
        RequestError: An input is empty, too long, or has an id outside the vocabulary.
    """
    text.tasks.check("embed")
    special, most = request.add_special_tokens is not False, most_tokens(request.truncate_prompt_tokens, text)
    side, name = request.truncation_side, request.prompt_name
    return Prompts(prompts=read_texts(request.input, text, special=special, most=most, side=side, name=name))


def prepare(state: ServingContext, request: EmbeddingRequest, model: str, made: Prompts | None) -> PooledJob:
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
    text.tasks.check("embed")
    text.embedder.check(request.dimensions, state.info.hidden_size)
    made = made or read_prompts(text, request)
    generation = generation_of(state, request, made.prompts, "embd", pool=text.embedder.pool)
    return PooledJob(request=request, model=model, generation=generation, made=made, write=_written)


def _written(job: PooledJob, _: object) -> bytes:
    data = [EmbeddingObject(index=choice.index, embedding=_vector(job, choice)) for choice in job.generation.choices]
    return msgspec.json.encode(Embeddings(data=data, model=job.model, usage=job.usage))


def _vector(job: PooledJob, choice: Choice) -> list[float] | str:
    if choice.pooled is None:
        raise RequestError("the engine gave no hidden state", code="request_failed", status=500)
    request: EmbeddingRequest = job.request
    embedder = job.generation.state.text.embedder
    found = embedder.finish(choice.pooled, request.dimensions, normalize=request.use_activation)
    if request.encoding_format == "base64":
        return base64.b64encode(found.astype("<f4").tobytes()).decode()
    numbers: list[float] = found.tolist()
    return numbers
