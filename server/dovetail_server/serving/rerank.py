"""`/v1/rerank`, `/v1/score` of two texts and `/v1/classify`: how well texts go together, and labels of one.

A cross encoder reads both texts at once and gives a score; an embedding model's vectors are multiplied; a model that
answers in words is asked for "yes" or "no", and its next token's probabilities are compared (`processing/tasks.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.errors import RequestError
from dovetail.messages import SamplingParams, TokenLogprob
from dovetail.processing.reranker import sigmoid
from dovetail_server import errors
from dovetail_server.native.score import ScoreRequest
from dovetail_server.openai.embeddings import EmbeddingUsage, PooledFields
from dovetail_server.openai.rerank import (
    Classes,
    Classified,
    ClassifyRequest,
    Document,
    PairScore,
    PairScores,
    Ranked,
    RankedDocument,
    Reranked,
    RerankRequest,
)
from dovetail_server.serving.generation import Choice, Generation
from dovetail_server.serving.pooled import PARAMS, check_lengths, generation_of, most_tokens, read_texts
from dovetail_server.serving.prompts import Prompt, Prompts
from dovetail_server.serving.score import last_rows

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.serving.context import ServingContext


@dataclass(slots=True, kw_only=True)
class Job:
    """A prepared request, and its prompts."""

    request: PooledFields
    model: str
    generation: Generation
    made: Prompts

    @property
    def usage(self) -> EmbeddingUsage:
        """Tokens of all prompts."""
        num = sum(choice.num_prompt for choice in self.generation.choices)
        return EmbeddingUsage(prompt_tokens=num, total_tokens=num)


def is_pair(request: ScoreRequest) -> bool:
    """Whether a body of `/v1/score` is vLLM's: it has nothing of SGLang's."""
    return request.query is None and request.items is None and request.label_token_ids is None


def read_rerank(text: Processor, request: RerankRequest) -> Prompts:
    """Check and tokenize.

    Raises:
        RequestError: A text is too long, or the model compares none.
    """
    text.tasks.check("score")
    documents = [one.text if isinstance(one, Document) else one for one in request.documents]
    kept = documents
    if (most := request.max_tokens_per_doc) is not None:
        kept = [_shortened(document, most, f"documents[{at}]", text) for at, document in enumerate(documents)]
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
    if len(firsts) not in (1, len(seconds)):
        why = f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}; give one, or as many"
        raise RequestError(why, param="text_1", code="invalid_value")
    made = _read(text, request, (firsts, seconds), ("text_1", "text_2"), None)
    return Prompts(prompts=made, is_batch=len(firsts) > 1)


def _read(
    text: Processor,
    request: RerankRequest | ScoreRequest,
    texts: tuple[list[str], list[str]],
    names: tuple[str, str],
    instruction: str | None,
) -> list[Prompt]:
    """Make a prompt of each pair, or where vectors are compared of each text: the first ones, then the second ones."""
    firsts, seconds = texts
    most = most_tokens(request.truncate_prompt_tokens, text)
    if text.tasks.way == "cosine":
        made = []
        for some, name in zip(texts, names, strict=True):
            found = [Prompt(text.encode_text(one, _at(name, i, some), most=most)) for i, one in enumerate(some)]
            check_lengths(found, text, name)
            made += found
        return made
    pairs = zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True)
    made = [_pair(text, pair, (names[0], _at(names[1], i, seconds)), most, instruction) for i, pair in enumerate(pairs)]
    check_lengths(made, text, names[1])
    return made


def _at(name: str, at: int, some: Sequence[str]) -> str:
    return name if len(some) == 1 and name != "documents" else f"{name}[{at}]"


def _pair(
    text: Processor, pair: tuple[str, str], params: tuple[str, str], most: int | None, instruction: str | None
) -> Prompt:
    """Make one prompt of two texts; where it is cut, in words only the second text is."""
    first, second = (text.clipped(one, param, most) for one, param in zip(pair, params, strict=True))
    if not text.reranker.in_words:
        joined, place = text.tokenizer.encode_within(first, second, most=most)
        return Prompt(joined, "", place)
    ids = _asked(text, first, second, params[1], instruction)
    if most is not None and len(ids) > most:
        room = most - len(_asked(text, first, "", params[1], instruction))
        if room < 1:
            why = f"{params[0]} leaves no room for {params[1]} in {most} tokens"
            raise RequestError(why, param="truncate_prompt_tokens", code="invalid_value")
        ids = _asked(text, first, _shortened(second, room, params[1], text), params[1], instruction)[:most]
    if text.tasks.way == "yes_no" and len(ids) >= text.limits.context_len:
        raise errors.prompt_too_long(len(ids), text.limits.context_len, params[1])
    return Prompt(ids)


def _asked(text: Processor, first: str, second: str, param: str, instruction: str | None) -> list[int]:
    asked = text.reranker.asked(first, second, instruction, text.template)
    return text.encode(asked, param, add_special_tokens=False)


def _shortened(one: str, most: int, param: str, text: Processor) -> str:
    """Return the beginning of a text, of so many tokens."""
    return text.tokenizer.beginning(text.clipped(one, param, most), most)


def read_classify(text: Processor, request: ClassifyRequest) -> Prompts:
    """Check and tokenize.

    Raises:
        RequestError: An input is empty or too long, or the model scores no labels.
    """
    text.tasks.check("classify")
    special, most = request.add_special_tokens is not False, most_tokens(request.truncate_prompt_tokens, text)
    return Prompts(prompts=read_texts(request.input, text, special=special, most=most))


def prepare(
    state: ServingContext, request: RerankRequest | ScoreRequest | ClassifyRequest, model: str, made: Prompts | None
) -> Job:
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
    if isinstance(request, ClassifyRequest):
        text.tasks.check("classify")
        made, prefix, what = made or read_classify(text, request), "classify", "input"
    elif isinstance(request, RerankRequest):
        text.tasks.check("score")
        made, prefix, what = made or read_rerank(text, request), "rerank", "documents"
    else:
        text.tasks.check("score")
        made, prefix, what = made or read_score(text, request), "score", "text_2"
    way = "labels" if isinstance(request, ClassifyRequest) else text.tasks.way
    if way == "cosine":
        text.embedder.check(None, state.info.hidden_size)
    pool = {"cosine": text.embedder.pool, "labels": state.info.pool}.get(way or "")
    params = PARAMS if pool is not None else _question(text)
    generation = generation_of(state, request, made.prompts, prefix, pool=pool, params=params, what=what)
    return Job(request=request, model=model, generation=generation, made=made)


def _question(text: Processor) -> SamplingParams:
    """Ask for the log probabilities of both answers.

    Raises:
        RequestError: One of them is several tokens.
    """
    answers = (text.reranker.no, text.reranker.yes)
    if min(answers) < 0:
        why = "the model's tokenizer has no single tokens for yes and no, so it cannot be asked"
        raise RequestError(why, param="model", code="unsupported_model")
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, logprobs=0, logprob_token_ids=answers)


async def reply(job: Job) -> bytes:
    """Run and return the scores."""
    rows = await last_rows(job.generation)
    return await asyncio.to_thread(_written, job, rows)


def _written(job: Job, rows: dict[int, TokenLogprob]) -> bytes:
    """Build the reply; CPU work."""
    head: dict[str, Any] = {"id": job.generation.request_id, "model": job.model, "usage": job.usage}
    request = job.request
    if isinstance(request, ClassifyRequest):
        classes = [_class(job, choice) for choice in job.generation.choices]
        return msgspec.json.encode(Classes(created=int(time.time()), data=classes, **head))
    scores = _scores(job, rows)
    if isinstance(request, RerankRequest):
        return msgspec.json.encode(Reranked(results=_ranked(job, request, scores), **head))
    data = [PairScore(index=at, score=score) for at, score in enumerate(scores)]
    return msgspec.json.encode(PairScores(created=int(time.time()), data=data, **head))


def _ranked(job: Job, request: RerankRequest, scores: Sequence[float]) -> list[Ranked]:
    """Order documents by their scores, equal ones as they were sent."""
    shown = job.made.prompts[len(job.made.prompts) - len(scores) :]
    order = sorted(range(len(scores)), key=lambda at: -scores[at])[: request.top_n or None]
    hides = request.return_documents is False
    return [
        Ranked(
            index=at,
            relevance_score=scores[at],
            document=msgspec.UNSET if hides else RankedDocument(text=shown[at].text),
        )
        for at in order
    ]


def _class(job: Job, choice: Choice) -> Classified:
    """Name the best of an input's labels."""
    reranker = job.generation.state.text.reranker
    numbers = _numbers(choice)
    probs = numbers if job.request.use_activation is False else reranker.scaled(numbers)
    best = max(range(len(probs)), key=probs.__getitem__)
    return Classified(index=choice.index, label=reranker.labels[best], probs=probs, num_classes=len(probs))


def _scores(job: Job, rows: dict[int, TokenLogprob]) -> list[float]:
    """Return the score of each pair, in order."""
    text, choices = job.generation.state.text, job.generation.choices
    is_plain = job.request.use_activation is False
    if text.tasks.way == "cosine":
        return _cosines(job)
    if text.tasks.way == "labels":
        found = [_numbers(choice) for choice in choices]
        return [numbers[0] if is_plain else text.reranker.scaled(numbers)[0] for numbers in found]
    odds = [_odds(rows[choice.index]) for choice in choices]
    return odds if is_plain else [sigmoid(number) for number in odds]


def _odds(row: TokenLogprob) -> float:
    """How much likelier yes is than no, as a logarithm."""
    no, yes = (item.logprob for item in row.named)
    return 0.0 if no == yes else max(-1e9, min(1e9, yes - no))


def _numbers(choice: Choice) -> list[float]:
    """What a classifier gave."""
    import numpy as np

    found: list[float] = np.frombuffer(choice.pooled or b"", dtype=np.float32).astype(float).tolist()
    return found


def _cosines(job: Job) -> list[float]:
    """Compare vectors: one first text with all second ones, or each with its own."""
    import numpy as np

    embedder = job.generation.state.text.embedder
    wide = [embedder.finish(c.pooled or b"", normalize=False).astype(np.float64) for c in job.generation.choices]
    vectors = [vector / (float(np.sqrt(vector @ vector)) or 1.0) for vector in wide]
    num_first = len(vectors) // 2 if job.made.is_batch else 1
    firsts = vectors[:num_first] if job.made.is_batch else vectors[:1] * (len(vectors) - 1)
    return [float(first @ second) for first, second in zip(firsts, vectors[num_first:], strict=True)]
