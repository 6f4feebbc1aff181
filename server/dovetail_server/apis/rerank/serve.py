"""`/v1/rerank`, `/v1/score` of two texts and `/v1/classify`: how well texts go together, and labels of one.

A cross encoder reads both texts at once and gives a score; an embedding model's vectors are multiplied; a model that
answers in words is asked for "yes" or "no", and its next token's probabilities are compared (`processing/pairs.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail.messages import TokenLogprob
from dovetail.processing.pairs import (
    POOLING,
    PairResult,
    asked_for,
    beginning,
    check_numbers,
    classified,
    most_tokens,
    ranked,
    read_pairs,
    scores_of,
)
from dovetail_server.apis.pooled import PooledJob, generation_of, read_texts
from dovetail_server.apis.rerank import schema as rs
from dovetail_server.apis.score.schema import ScoreRequest
from dovetail_server.serving.choice import Choice
from dovetail_server.serving.prompts import Prompt, Prompts

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.serving.context import ServingContext


def is_pair(request: ScoreRequest) -> bool:
    """Whether a body of `/v1/score` is vLLM's: it has nothing of SGLang's."""
    return request.query is None and request.items is None and request.label_token_ids is None


def read_rerank(text: Processor, request: rs.RerankRequest) -> Prompts:
    """Check and tokenize.

    Raises:
        RequestError: A text is too long, or the model compares none.
    """
    text.tasks.check("score")
    documents = [one.text if isinstance(one, rs.Document) else one for one in request.documents]
    kept = documents
    if (most := request.max_tokens_per_doc) is not None:
        kept = [beginning(document, most, f"documents[{at}]", text) for at, document in enumerate(documents)]
    made = _read(text, request, ([request.query], kept), ("query", "documents"), request.instruct)
    if request.return_documents is False:
        return Prompts(prompts=made)
    first = len(made) - len(documents)
    shown = [Prompt(p.ids, document, p.second) for p, document in zip(made[first:], documents, strict=True)]
    return Prompts(prompts=[*made[:first], *shown])


def read_score(text: Processor, request: ScoreRequest) -> Prompts:
    """Check and tokenize the texts of vLLM's body.

    Raises:
        RequestError: Lists of different lengths, a text that is too long, or the model compares none.
    """
    text.tasks.check("score")
    both = (request.text_1, request.text_2)
    for name, given in zip(("text_1", "text_2"), both, strict=True):
        if given is None:
            why = f"{name} is missing: give text_1 and text_2, or query, items and label_token_ids"
            raise RequestError(why, param=name, code="missing_required_parameter")
    firsts, seconds = ([given] if isinstance(given, str) else list(given or ()) for given in both)
    check_numbers(firsts, seconds, ("text_1", "text_2"))
    made = _read(text, request, (firsts, seconds), ("text_1", "text_2"), None)
    return Prompts(prompts=made, is_batch=len(firsts) > 1)


def _read(
    text: Processor,
    request: rs.RerankRequest | ScoreRequest,
    texts: tuple[list[str], list[str]],
    names: tuple[str, str],
    instruction: str | None,
) -> list[Prompt]:
    """Make the prompts of pairs, as they are compared."""
    most = most_tokens(request.truncate_prompt_tokens, text)
    made = read_pairs(text, *texts, names, most=most, instruction=instruction)
    return [Prompt(one.ids, "", one.second) for one in made]


def read_classify(text: Processor, request: rs.ClassifyRequest) -> Prompts:
    """Check and tokenize.

    Raises:
        RequestError: An input is empty or too long, or the model scores no labels.
    """
    text.tasks.check("classify")
    special, most = request.add_special_tokens is not False, most_tokens(request.truncate_prompt_tokens, text)
    return Prompts(prompts=read_texts(request.input, text, special=special, most=most))


def prepare(
    state: ServingContext,
    request: rs.RerankRequest | ScoreRequest | rs.ClassifyRequest,
    model: str,
    made: Prompts | None,
) -> PooledJob:
    """Check and tokenize; CPU work, called in a worker thread.

    Args:
        state: The server's.
        request: Checked by its schema.
        model: The name that the reply carries.
        made: By `read_rerank` and the others, where that has been done; the request is then without its texts.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    text = state.text
    if isinstance(request, rs.ClassifyRequest):
        text.tasks.check("classify")
        made, prefix, what = made or read_classify(text, request), "classify", "input"
    elif isinstance(request, rs.RerankRequest):
        text.tasks.check("score")
        made, prefix, what = made or read_rerank(text, request), "rerank", "documents"
    else:
        text.tasks.check("score")
        made, prefix, what = made or read_score(text, request), "score", "text_2"
    pool, params = (state.info.pool, POOLING) if what == "input" else asked_for(text, state.info)
    each = [params] * len(made.prompts)
    generation = generation_of(state, request, made.prompts, prefix, pool=pool, params=each, what=what)
    return PooledJob(request=request, model=model, generation=generation, made=made, write=_written)


def _written(job: PooledJob, rows: Mapping[int, TokenLogprob]) -> bytes:
    """Build the reply; CPU work."""
    head: dict[str, Any] = {"id": job.generation.request_id, "model": job.model, "usage": job.usage}
    request = job.request
    if isinstance(request, rs.ClassifyRequest):
        classes = [_class(job, choice) for choice in job.generation.choices]
        return msgspec.json.encode(rs.Classes(created=int(time.time()), data=classes, **head))
    scores = _scores(job, rows)
    if isinstance(request, rs.RerankRequest):
        return msgspec.json.encode(rs.Reranked(results=_ranked(job, request, scores), **head))
    data = [rs.PairScore(index=at, score=score) for at, score in enumerate(scores)]
    return msgspec.json.encode(rs.PairScores(created=int(time.time()), data=data, **head))


def _ranked(job: PooledJob, request: rs.RerankRequest, scores: Sequence[float]) -> list[rs.Ranked]:
    """Order documents by their scores, equal ones as they were sent."""
    shown = job.made.prompts[len(job.made.prompts) - len(scores) :]
    hides = request.return_documents is False
    return [
        rs.Ranked(
            index=at,
            relevance_score=scores[at],
            document=msgspec.UNSET if hides else rs.RankedDocument(text=shown[at].text),
        )
        for at in ranked(scores, request.top_n)
    ]


def _class(job: PooledJob, choice: Choice) -> rs.Classified:
    """Name the best of an input's labels."""
    reranker, is_plain = job.generation.state.text.reranker, job.request.use_activation is False
    label, probs = classified(reranker, PairResult(choice.pooled), is_plain=is_plain)
    return rs.Classified(index=choice.index, label=label, probs=probs, num_classes=len(probs))


def _scores(job: PooledJob, rows: Mapping[int, TokenLogprob]) -> list[float]:
    """Return the score of each pair, in order."""
    text, choices = job.generation.state.text, job.generation.choices
    answers = [PairResult(choice.pooled, rows.get(choice.index)) for choice in choices]
    num_first = len(answers) // 2 if job.made.is_batch else 1
    return scores_of(text, answers, num_first=num_first, is_plain=job.request.use_activation is False)
