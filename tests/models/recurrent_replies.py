"""Replies, of models with recurrent layers among others: with `--batch-invariant` the same bits however they came."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.messages import SamplerParams, Submit, TokenDelta
from dovetail_testing.engine import generate, serve, tokens

LENGTHS = [63, 64, 65, 129, 321, pytest.param(4097, marks=pytest.mark.full)]
ON: dict[str, Any] = {"batch_invariant": True, "page_size": 4, "model_impl": "dovetail"}


def seen(deltas: list[TokenDelta]) -> tuple[list[int], list[Any]]:
    """Tokens, and log probabilities to the last bit."""
    return tokens(deltas), [logprob for delta in deltas for logprob in delta.logprobs or ()]


def check_reply(
    folder: Path, length: int, *, grid: int = 64, sizes: Sequence[int] = (64, 192, 50), num_others: int = 7, **more: Any
) -> None:
    """It has the same bits cold, behind a cached prefix of so many times `grid`, in other chunks, and beside others."""
    rng = random.Random(length)
    prompt = [rng.randrange(5, 130) for _ in range(length)]
    others = [[rng.randrange(5, 130) for _ in range(11 + 7 * i)] for i in range(num_others)]
    params = SamplerParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    settings = {**ON, "max_total_tokens": 16384, "chunked_prefill_size": 8192, **more}
    [cold] = generate(folder, [prompt], params, **settings)
    again = Submit(rid="b", prompt_ids=prompt, params=params)
    first = Submit(rid="a", prompt_ids=[*prompt[: length - 5], 7, 8, 9], params=params)
    hit = serve(folder, [first, again], max_running_requests=1, **settings)[1]
    assert hit[-1].cached_tokens == (length - 5) // grid * grid
    assert seen(hit) == seen(cold)
    for size in sizes:
        [cut] = generate(folder, [prompt], params, **{**settings, "chunked_prefill_size": size})
        assert seen(cut) == seen(cold), size
    beside = generate(folder, [*others, prompt], params, **{**settings, "chunked_prefill_size": 200})
    assert seen(beside[-1]) == seen(cold)


def check_retracted(folder: Path, **more: Any) -> None:
    """What was decoded is computed again as a prompt, and behind it nothing differs."""
    prompts = [[(7 * i + j) % 120 + 5 for j in range(60)] for i in range(5)]
    params = SamplerParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    tight = generate(folder, prompts, params, max_total_tokens=384, **ON, **more)
    assert max(deltas[-1].num_retractions for deltas in tight) > 0
    roomy = generate(folder, prompts, params, **ON, **more)
    assert [seen(deltas) for deltas in tight] == [seen(deltas) for deltas in roomy]
