"""Overlapped steps bring what steps one after another bring."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from dovetail.messages import SamplerParams, Submit, TokenDelta
from dovetail_testing.engine import collect, generate, make_client, tokens


def random_params(rng: random.Random) -> SamplerParams:
    """Anything a request may ask for that changes what is drawn or when it ends."""
    choices: dict[str, list[Any]] = {
        "temperature": [0, 0, 0.7, 1.5],
        "top_p": [1, 0.9],
        "top_k": [0, 5],
        "frequency_penalty": [0, 0, 0.8],
        "repetition_penalty": [1, 1, 1.2],
        "logprobs": [None, None, 2],
        "prompt_logprobs": [None, None, None, 1],
        "min_tokens": [0, 4],
        "max_tokens": [1, 2, 9, 30],
        "ignore_eos": [False, True],
    }
    picked = {name: rng.choice(values) for name, values in choices.items()}
    stops = tuple(rng.randrange(190) for _ in range(rng.choice([0, 40])))
    return SamplerParams(seed=rng.randrange(1000), stop_token_ids=stops, **picked)


def flat(deltas: list[TokenDelta]) -> tuple[Any, ...]:
    """What a client sees of a request; numbers rounded, as sums depend on the batch."""
    logprobs = [(p.token_id, round(p.logprob or 0, 3)) for d in deltas for p in d.logprobs or ()]
    prompt = [(p.token_id, round(p.logprob or 0, 3)) for d in deltas for p in d.prompt_logprobs or ()]
    return tokens(deltas), logprobs, prompt, deltas[-1].finish


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 3))])
def test_replies_do_not_depend_on_overlap(seed: int, qwen3: Path, prompts: list[list[int]]) -> None:
    """Mixed requests give the same tokens, log probabilities and ends with and without overlap, retraction included."""
    rng = random.Random(seed)
    asked = [random_params(rng) for _ in prompts]
    changes: dict[str, Any] = {
        "max_total_tokens": rng.choice([300, 4096]),
        "chunked_prefill_size": rng.choice([16, 512]),
        "page_size": rng.choice([1, 4, 16]),
        "max_running_requests": rng.choice([4, 16]),
    }
    plain = generate(qwen3, prompts, asked, **changes)
    overlapped = generate(qwen3, prompts, asked, overlap_on_cpu=True, **changes)
    assert [flat(d) for d in overlapped] == [flat(d) for d in plain]


def test_leaving_while_a_step_is_under_way_frees_everything(qwen3: Path) -> None:
    """Requests that are aborted after any number of tokens leave no page behind, and their neighbour is served."""
    long = SamplerParams(max_tokens=300, temperature=0, ignore_eos=True)

    async def leave(client: Any, number: int) -> None:
        stream = client.submit(Submit(rid=f"r{number}", prompt_ids=[number] * 40, params=long))
        for _ in range(number % 4):
            await anext(stream)
        await stream.aclose()

    async def main() -> dict[str, Any]:
        client = make_client(qwen3, overlap_on_cpu=True, max_total_tokens=1024)
        await client.start()
        stays = collect(client, Submit(rid="stays", prompt_ids=[5] * 9, params=long))
        deltas, *_ = await asyncio.gather(stays, *(leave(client, i) for i in range(24)))
        assert len(tokens(deltas)) == 300
        stats = await client.control("stats")
        await client.close()
        return stats

    stats = asyncio.run(main())
    assert (stats["num_running"], stats["num_queued"], stats["num_used_tokens"]) == (0, 0, 0)
