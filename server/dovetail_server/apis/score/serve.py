"""`/v1/score`: how likely each label is to follow each item, in one step of the model per item."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from dovetail.contracts.errors import RequestError
from dovetail.messages import SamplerParams, TokenLogprob
from dovetail.processing.sampling import check_token_ids
from dovetail_server.apis.logprobs import finite
from dovetail_server.apis.pooled import PooledJob, generation_of
from dovetail_server.apis.score.schema import ScoreRequest, Scores
from dovetail_server.errors import catalogue as errors
from dovetail_server.schema.common import Usage
from dovetail_server.serving.prompts import Prompt, Prompts

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.serving.context import ServingContext

Part = str | Sequence[int]
MAX_IDS = 1 << 24
"""The query's tokens are repeated before each item."""


def read_prompts(text: Processor, request: ScoreRequest) -> Prompts:
    """Check and tokenize.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    check(request)
    text.tasks.check("generate")
    given, asked = request.items, request.query
    if given is None or asked is None:
        raise missing("query" if asked is None else "items")
    items: list[Any] = [given] if isinstance(given, str) else list(given)
    if isinstance(items[0], str) != isinstance(asked, str):
        why = "query and items must both be text, or both token ids"
        raise RequestError(why, param="items", code="invalid_value")
    query = part_ids(asked, "query", text, is_first=not request.item_first)
    if len(query) * len(items) > MAX_IDS:
        why = f"query has {len(query)} tokens and stands before each of {len(items)} items; together at most {MAX_IDS}"
        raise RequestError(f"{why} are allowed: send several requests", param="items", code="invalid_value")
    return Prompts(prompts=[prompt_of(request, query, item, f"items[{at}]", text) for at, item in enumerate(items)])


def check(request: ScoreRequest) -> None:
    """Refuse fields that do not fit together.

    Raises:
        RequestError: Naming the field.
    """
    for name in ("text_1", "text_2"):
        if getattr(request, name) is not None:
            why = f"{name} does not go with query, items and label_token_ids; give either"
            raise RequestError(why, param=name, code="invalid_value")
    if request.label_token_ids is None:
        raise missing("label_token_ids")
    if request.temperature is not None and not request.apply_softmax:
        raise RequestError("temperature needs apply_softmax: true", param="temperature", code="invalid_value")


def missing(name: str) -> RequestError:
    """Refuse a body that is neither of both."""
    why = f"{name} is missing: give text_1 and text_2, or query, items and label_token_ids"
    return RequestError(why, param=name, code="missing_required_parameter")


def prepare(state: ServingContext, request: ScoreRequest, model: str, made: Prompts | None) -> PooledJob:
    """Check and tokenize; CPU work, called in a worker thread.

    Args:
        state: The server's.
        request: Checked by its schema.
        model: The name that the reply carries.
        made: By `read_prompts`, where that has been done; the request is then without its texts.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    check(request)
    text = state.text
    text.tasks.check("generate")
    made = made or read_prompts(text, request)
    plain = SamplerParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, logprobs=0)
    params = [replace(plain, logprob_token_ids=tuple(row)) for row in read_labels(request, len(made.prompts), text)]
    generation = generation_of(state, request, made.prompts, "score", pool=None, params=params, what="items")
    return PooledJob(request=request, model=model, generation=generation, made=made, write=full_reply)


def read_labels(request: ScoreRequest, count: int, text: Processor) -> list[list[int]]:
    """Return the labels of each item.

    Raises:
        RequestError: Lists that are not one per item, or an id outside the vocabulary.
    """
    given: list[Any] = list(request.label_token_ids or [])
    rows = [given] * count if isinstance(given[0], int) else given
    if len(rows) != count:
        why = f"label_token_ids has {len(rows)} lists, but there are {count} items"
        raise RequestError(why, param="label_token_ids", code="invalid_value")
    for row in rows:
        check_token_ids(row, text.limits.vocab_size, "label_token_ids")
    return rows


def part_ids(part: Part, name: str, text: Processor, *, is_first: bool) -> list[int]:
    """Return the ids of a part; what stands first has the tokenizer's special tokens.

    Raises:
        RequestError: It is too big to look at, or an id is outside the vocabulary.
    """
    if isinstance(part, str):
        return text.encode(part, name, add_special_tokens=is_first)
    check_token_ids(part, text.limits.vocab_size, name)
    return list(part)


def prompt_of(request: ScoreRequest, query: list[int], item: Part, param: str, text: Processor) -> Prompt:
    """Return an item's prompt.

    Raises:
        RequestError: Nothing is in it, it does not fit the context, or see `part_ids`.
    """
    own = part_ids(item, param, text, is_first=bool(request.item_first))
    ids = own + query if request.item_first else query + own
    if not ids:
        raise RequestError(f"query and {param} are empty", param=param, code="invalid_value")
    if len(ids) >= text.limits.context_len:
        raise errors.prompt_too_long(len(ids), text.limits.context_len, param)
    return Prompt(ids)


def full_reply(job: PooledJob, rows: Mapping[int, TokenLogprob]) -> bytes:
    """Build the reply; CPU work."""
    found = [[item.logprob for item in rows[choice.index].named] for choice in job.generation.choices]
    request: ScoreRequest = job.request
    cached = sum(choice.num_cached for choice in job.generation.choices)
    scores = [softmax(row, request.temperature or 1.0) for row in found] if request.apply_softmax else None
    return msgspec.json.encode(
        Scores(
            scores=scores if scores is not None else [[math.exp(value) for value in row] for row in found],
            token_logprobs=[[finite(value) for value in row] for row in found]
            if request.return_token_logprobs
            else msgspec.UNSET,
            model=job.model,
            usage=Usage.of(job.usage.prompt_tokens, 0, cached, 0),
        )
    )


def softmax(row: Sequence[float], temperature: float) -> list[float]:
    """Return weights that add up to 1; labels that cannot follow get 0."""
    best = max(row)
    if best == -math.inf:
        return [1 / len(row)] * len(row)
    weights = [math.exp((value - best) / temperature) for value in row]
    total = sum(weights)
    return [weight / total for weight in weights]
