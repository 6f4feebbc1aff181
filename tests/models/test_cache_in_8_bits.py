"""A cache in 8 bits under every kind of attention: windows, sinks, chunks, latent and sparse rows, shared layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import make_checkpoint

from dovetail.messages import SamplerParams, TokenDelta
from dovetail_testing.engine import generate, tokens

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "windows and sinks": ("gpt_oss", {}),
    "windows, heads of 24": ("mistral", {"head_dim": 24}),
    "windows beside others": ("mimo_v2_flash", {}),
    "chunks": ("llama4_text", {}),
    "latent rows": ("deepseek_v3", {}),
    "sparse latent rows": ("deepseek_v32", {}),
    "layers that share": ("gemma4_text", {}),
    "states beside keys": ("falcon_h1", {}),
}
SCHEDULES: list[dict[str, Any]] = [
    {"chunked_prefill_size": 7},
    {"page_size": 3, "disable_radix_cache": True},
    {"overlap_on_cpu": True, "max_total_tokens": 256, "page_size": 4},
]


def prompt(length: int, step: int) -> list[int]:
    """Return ids that differ by their step."""
    return [3 + (step * index * index + 7 * index) % 120 for index in range(length)]


def logprobs(replies: list[list[TokenDelta]]) -> list[float]:
    """Return the log probabilities of all tokens."""
    return [row.logprob for deltas in replies for delta in deltas for row in delta.logprobs or ()]


@pytest.mark.first(4)
@pytest.mark.sampled("name")
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_the_schedule(family: str, name: str, tmp_path: Path) -> None:
    """Chunks, pages, prefixes that are found or not, and retractions, in turn, leave the tokens as they are."""
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path / "model", kind, **changes)
    long = prompt(100, 5)
    prompts = [prompt(1, 1), prompt(60, 2), long[:40] + prompt(5, 3), long[:40] + prompt(9, 4), long]
    greedy = SamplerParams(max_tokens=14, temperature=0, ignore_eos=True, logprobs=0)
    rounded = generate(tmp_path / "model", prompts, greedy, kv_cache_dtype=name)
    assert logprobs(rounded) != logprobs(generate(tmp_path / "model", prompts, greedy)), "nothing is rounded"
    want = [tokens(each) for each in rounded]
    for settings in SCHEDULES[list(FAMILIES).index(family) % len(SCHEDULES) :: len(SCHEDULES)]:
        got = [tokens(each) for each in generate(tmp_path / "model", prompts, greedy, kv_cache_dtype=name, **settings)]
        assert got == want, settings
