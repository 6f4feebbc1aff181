"""Pooled hidden states equal transformers' own, whatever the batch, the cache and the chunks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dovetail.messages import Pool, SamplerParams, Submit, TokenDelta
from dovetail_testing.engine import serve

PARAMS = SamplerParams(max_tokens=1, temperature=0)
POOLS: list[Pool] = ["last", "mean"]
BOTH = pytest.mark.parametrize("pool", POOLS)


@cache
def loaded(folder: Path) -> Any:
    return transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def hidden(folder: Path, prompt: tuple[int, ...]) -> Any:
    """Final hidden states by transformers in float32."""
    with torch.inference_mode():
        return loaded(folder)(torch.tensor([prompt])).last_hidden_state[0].numpy()


def wanted(folder: Path, prompt: list[int], pool: Pool) -> Any:
    states = hidden(folder, tuple(prompt))
    return states[-1] if pool == "last" else states.mean(0)


def submits(prompts: list[list[int]], pool: Pool, **fields: Any) -> list[Submit]:
    return [Submit(rid="", prompt_ids=prompt, params=PARAMS, pool=pool, **fields) for prompt in prompts]


def vector(deltas: list[TokenDelta]) -> Any:
    """What one request got: a single delta, with numbers and no token."""
    [delta] = deltas
    assert (delta.ids, delta.finish and delta.finish.reason) == ([], "stop")
    assert delta.pooled is not None
    return np.frombuffer(delta.pooled, dtype=np.float32)


CHANGES: list[dict[str, Any]] = [
    {},
    {"page_size": 3, "chunked_prefill_size": 7},
    {"chunked_prefill_size": -1, "max_prefill_tokens": 100},
    {"disable_radix_cache": True, "chunked_prefill_size": 13},
    {"max_total_tokens": 256, "page_size": 4, "max_running_requests": 3},
    {"overlap_on_cpu": True, "chunked_prefill_size": 13, "page_size": 3, "max_running_requests": 3},
]


@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_pooled_states_equal_transformers(
    architecture: str, changes: dict[str, Any], pool: Pool, prompts: list[list[int]], request: pytest.FixtureRequest
) -> None:
    """Every request of a batch of mixed lengths gets the numbers that transformers computes for it alone."""
    folder = request.getfixturevalue(architecture)
    for prompt, deltas in zip(prompts, serve(folder, submits(prompts, pool), **changes), strict=True):
        np.testing.assert_allclose(vector(deltas), wanted(folder, prompt, pool), atol=2e-5, rtol=2e-5)


@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_they_share_steps_with_requests_that_generate(
    qwen3: Path, prompts: list[list[int]], pool: Pool, overlap: bool
) -> None:
    """Beside them tokens are what they are without, and a prompt in the cache changes no number."""
    generating = [
        Submit(rid="", prompt_ids=prompt, params=SamplerParams(max_tokens=9, temperature=0)) for prompt in prompts
    ]
    alone = serve(qwen3, generating)
    mixed = [one for pair in zip(generating, submits(prompts, pool), strict=True) for one in pair]
    together = serve(qwen3, mixed, chunked_prefill_size=24, page_size=4, overlap_on_cpu=overlap)
    for prompt, before, beside, pooled in zip(prompts, alone, together[::2], together[1::2], strict=True):
        assert [t for d in before for t in d.ids] == [t for d in beside for t in d.ids]
        np.testing.assert_allclose(vector(pooled), wanted(qwen3, prompt, pool), atol=2e-5, rtol=2e-5)


def test_a_mean_takes_nothing_from_the_cache(qwen3: Path) -> None:
    """What is cached has no hidden states: the last token's is computed behind a hit, a mean from the beginning."""
    prompt = [(7 * i) % 190 for i in range(40)]
    for pool, cached in (("last", 32), ("mean", 0)):
        deltas = serve(qwen3, submits([prompt, prompt], pool), max_running_requests=1, page_size=16)  # type: ignore[arg-type]
        assert [delta.cached_tokens for [delta] in deltas] == [0, cached]
        assert np.array_equal(vector(deltas[0]), vector(deltas[1]))


@BOTH
def test_a_prompt_may_fill_context_and_cache(qwen3: Path, pool: Pool) -> None:
    """Nothing follows it, so it may be as long as both; one token more is refused."""
    prompt = [(7 * i) % 190 for i in range(64)]
    sizes = {"context_length": 64, "max_total_tokens": 64, "page_size": 16}
    [deltas, refused] = serve(qwen3, submits([prompt, [*prompt, 1]], pool), **sizes)
    np.testing.assert_allclose(vector(deltas), wanted(qwen3, prompt, pool), atol=2e-5, rtol=2e-5)
    assert refused[-1].finish is not None
    assert "65 tokens" in str(refused[-1].finish.message)
