"""How well two texts go together: the ids that a model is given of them, and the scores that its answers are.

A cross encoder reads both texts at once and gives a score; an embedding model's vectors are multiplied; a model that
answers in words is asked for "yes" or "no", and its next token's probabilities are compared. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dovetail.contracts.errors import RequestError
from dovetail.messages import Pool, SamplerParams, TokenDelta, TokenLogprob
from dovetail.processing.refusals import input_too_long, prompt_too_long
from dovetail.processing.reranker import Reranker, sigmoid

if TYPE_CHECKING:
    from dovetail.messages import EngineInfo
    from dovetail.processing.processor import Processor

POOLING = SamplerParams(max_tokens=1, temperature=0.0, seed=0)
"""What a request for hidden states must have; nothing is drawn."""


class TextIds(NamedTuple):
    """A prompt's ids, and where the second of its two texts begins; 0 where it has one, or the model does not care."""

    ids: list[int]
    second: int = 0


class PairResult(NamedTuple):
    """What the engine gave: what it pooled, or the log probabilities of its token."""

    pooled: bytes | None = None
    row: TokenLogprob | None = None


def check_numbers(firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str]) -> None:
    """Refuse lists that cannot be paired: one first text goes with all second ones, more go one by one.

    Raises:
        RequestError: With both numbers.
    """
    if len(firsts) not in (1, len(seconds)):
        why = f"{names[0]} has {len(firsts)} texts and {names[1]} {len(seconds)}; give one, or as many"
        raise RequestError(why, param=names[0], code="invalid_value")


def check_lengths(prompts: Sequence[Sequence[int]], text: Processor, what: str) -> None:
    """Refuse prompts that are longer than the context; nothing follows them, so they may fill it.

    Raises:
        RequestError: Naming the first.
    """
    for at, ids in enumerate(prompts):
        if len(ids) > text.limits.context_len:
            param = what if len(prompts) == 1 else f"{what}[{at}]"
            raise input_too_long(len(ids), text.limits.context_len, param)


def most_tokens(wanted: int | None, text: Processor) -> int | None:
    """Return how many tokens `truncate_prompt_tokens` leaves a prompt; None: it is not cut."""
    if not wanted:
        return None
    context = text.limits.context_len
    return context if wanted < 0 else min(wanted, context)


def read_pairs(
    text: Processor,
    firsts: Sequence[str],
    seconds: Sequence[str],
    names: tuple[str, str],
    *,
    most: int | None = None,
    instruction: str | None = None,
) -> list[TextIds]:
    """Make a prompt of each pair, or where vectors are compared of each text: the first ones, then the second ones.

    Args:
        text: What tokenizes.
        firsts: One for all, or one for each of the second.
        seconds: In order.
        names: Of both, for errors.
        most: Keep so many tokens of each prompt.
        instruction: What is asked of a second text, for models that are told.

    Raises:
        RequestError: A text is too long.
    """
    if text.tasks.comparison == "cosine":
        made = []
        for some, name in zip((firsts, seconds), names, strict=True):
            found = [TextIds(text.encode_text(one, _at(name, i, some), most=most)) for i, one in enumerate(some)]
            check_lengths([one.ids for one in found], text, name)
            made += found
        return made
    pairs = zip(list(firsts) * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True)
    made = [_pair(text, pair, (names[0], _at(names[1], i, seconds)), most, instruction) for i, pair in enumerate(pairs)]
    check_lengths([one.ids for one in made], text, names[1])
    return made


def _at(name: str, at: int, some: Sequence[str]) -> str:
    return name if len(some) == 1 and name != "documents" else f"{name}[{at}]"


def _pair(
    text: Processor, pair: tuple[str, str], params: tuple[str, str], most: int | None, instruction: str | None
) -> TextIds:
    """Make one prompt of two texts; where it is cut, in words only the second text is."""
    first, second = (text.clipped(one, param, most) for one, param in zip(pair, params, strict=True))
    if not text.reranker.in_words:
        ids, at = text.tokenizer.encode_within(first, second, most=most)
        return TextIds(text.embedded(ids, params[1]), at)
    ids = _asked(text, first, second, params[1], instruction)
    if most is not None and len(ids) > most:
        room = most - len(_asked(text, first, "", params[1], instruction))
        if room < 1:
            why = f"{params[0]} leaves no room for {params[1]} in {most} tokens"
            raise RequestError(why, param="truncate_prompt_tokens", code="invalid_value")
        ids = _asked(text, first, beginning(second, room, params[1], text), params[1], instruction)[:most]
    if text.tasks.comparison == "yes_no" and len(ids) >= text.limits.context_len:
        raise prompt_too_long(len(ids), text.limits.context_len, params[1])
    return TextIds(ids)


def _asked(text: Processor, first: str, second: str, param: str, instruction: str | None) -> list[int]:
    asked = text.reranker.asked(first, second, instruction, text.template)
    return text.encode(asked, param, add_special_tokens=False)


def beginning(one: str, most: int, param: str, text: Processor) -> str:
    """Return the beginning of a text, of so many tokens."""
    return text.tokenizer.beginning(text.clipped(one, param, most), most)


def asked_for(text: Processor, info: EngineInfo) -> tuple[Pool | None, SamplerParams]:
    """Return what the engine is asked for about each prompt of `read_pairs`.

    Raises:
        RequestError: The checkpoint's embeddings cannot be made, or its answers are several tokens.
    """
    if text.tasks.comparison == "cosine":
        text.embedder.check(None, info.hidden_size)
        return text.embedder.pool, POOLING
    if text.tasks.comparison == "labels":
        return info.pool, POOLING
    answers = (text.reranker.no, text.reranker.yes)
    if min(answers) < 0:
        why = "the model's tokenizer has no single tokens for yes and no, so it cannot be asked"
        raise RequestError(why, param="model", code="unsupported_model")
    return None, SamplerParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, logprobs=0, logprob_token_ids=answers
    )


def scores_of(text: Processor, answers: Sequence[PairResult], *, num_first: int, is_plain: bool = False) -> list[float]:
    """Return the score of each pair, in order.

    Args:
        text: How they are made.
        answers: To the prompts of `read_pairs`.
        num_first: How many first texts there are.
        is_plain: As the model gives them: not brought between 0 and 1.
    """
    if text.tasks.comparison == "cosine":
        return _cosines(text, answers, num_first)
    if text.tasks.comparison == "labels":
        found = [numbers_of(answer) for answer in answers]
        return [numbers[0] if is_plain else text.reranker.scaled(numbers)[0] for numbers in found]
    odds = [_odds(answer.row) for answer in answers]
    return odds if is_plain else [sigmoid(number) for number in odds]


def _odds(row: TokenLogprob | None) -> float:
    """How much likelier yes is than no, as a logarithm."""
    if row is None:
        raise RequestError("the engine gave no log probabilities")
    no, yes = (item.logprob for item in row.named)
    return 0.0 if no == yes else max(-1e9, min(1e9, yes - no))


def numbers_of(answer: PairResult) -> list[float]:
    """What a classifier gave."""
    import numpy as np

    found: list[float] = np.frombuffer(answer.pooled or b"", dtype=np.float32).astype(float).tolist()
    return found


def _cosines(text: Processor, answers: Sequence[PairResult], num_first: int) -> list[float]:
    """Compare vectors: one first text with all second ones, or each with its own."""
    import numpy as np

    wide = [text.embedder.finish(one.pooled or b"", normalize=False).astype(np.float64) for one in answers]
    vectors = [vector / (float(np.sqrt(vector @ vector)) or 1.0) for vector in wide]
    seconds = vectors[num_first:]
    firsts = vectors[:1] * len(seconds) if num_first == 1 else vectors[:num_first]
    return [float(first @ second) for first, second in zip(firsts, seconds, strict=True)]


def places_of(text: Processor, num_first: int, num_second: int) -> list[tuple[int, ...]]:
    """Return which prompts of `read_pairs` each pair is made of."""
    if text.tasks.comparison != "cosine":
        return [(at,) for at in range(num_second)]
    return [(at if num_first > 1 else 0, num_first + at) for at in range(num_second)]


def ranked(scores: Sequence[float], top_n: int | None) -> list[int]:
    """Return the places of documents by their scores, equal ones as they were given; 0 or None: all."""
    return sorted(range(len(scores)), key=lambda at: -scores[at])[: top_n or None]


def classified(reranker: Reranker, answer: PairResult, *, is_plain: bool = False) -> tuple[str, list[float]]:
    """Return the best of a prompt's labels, and the scores of all."""
    numbers = numbers_of(answer)
    probs = numbers if is_plain else reranker.scaled(numbers)
    return reranker.labels[max(range(len(probs)), key=probs.__getitem__)], probs


def pooled_of(delta: TokenDelta) -> bytes:
    """Return what the engine pooled.

    Raises:
        RequestError: It pooled nothing.
    """
    if delta.pooled is None:
        raise RequestError("the engine gave no hidden state")
    return delta.pooled
