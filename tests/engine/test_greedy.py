"""Greedy tokens equal transformers' own, whatever the batch, the cache and the chunks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dovetail.messages import SamplerParams
from dovetail_testing.engine import generate, tokens
from dovetail_testing.models import make_model

NUM_NEW = 24
GREEDY = SamplerParams(max_tokens=NUM_NEW, temperature=0)


@cache
def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def reference(folder: Path, prompt: tuple[int, ...]) -> list[int]:
    """Greedy continuation by transformers in float32, the matched stop token included."""
    model = loaded(folder)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=198,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


CHANGES: list[dict[str, Any]] = [
    {},
    {"page_size": 1},
    {"page_size": 3, "chunked_prefill_size": 7},
    {"chunked_prefill_size": -1, "max_prefill_tokens": 100},
    {"disable_radix_cache": True},
    {"disable_radix_cache": True, "chunked_prefill_size": 13},
    {"max_running_requests": 3},
    {"max_total_tokens": 400, "schedule_policy": "lpm"},
    {"max_total_tokens": 256, "page_size": 4},
    {"overlap_on_cpu": True},
    {"overlap_on_cpu": True, "max_total_tokens": 256, "page_size": 4},
    {"overlap_on_cpu": True, "chunked_prefill_size": 13, "page_size": 3, "max_running_requests": 3},
]
OFTEN = (CHANGES[0], *CHANGES[3:5], CHANGES[7], CHANGES[-1])
"""With everything that the others have."""


@pytest.mark.first(3)
@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.full) for each in CHANGES], ids=str
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_mixed_batch_equals_transformers(
    architecture: str,
    changes: dict[str, Any],
    prompts: list[list[int]],
    request: pytest.FixtureRequest,
) -> None:
    """Every request of a batch of mixed lengths gets the tokens that transformers generates for it alone."""
    folder = request.getfixturevalue(architecture)
    outputs = generate(folder, prompts, GREEDY, **changes)
    for prompt, deltas in zip(prompts, outputs, strict=True):
        assert tokens(deltas) == reference(folder, tuple(prompt))


def test_one_request_alone_equals_transformers(qwen3: Path, prompts: list[list[int]]) -> None:
    """A request that runs alone gets the same tokens too."""
    for prompt in prompts[:3]:
        [deltas] = generate(qwen3, [prompt], GREEDY)
        assert tokens(deltas) == reference(qwen3, tuple(prompt))


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "attention_factor": 1.2,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r["rope_type"])
def test_every_kind_of_rope_equals_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    """Scaled rotary embeddings give transformers' tokens, with frequencies that differ from the default's."""
    folder = make_model(tmp_path, "LlamaForCausalLM", rope_parameters={**rope, "rope_theta": 5000.0})
    prompt = [(7 * i) % 190 for i in range(200)]
    [deltas] = generate(folder, [prompt], GREEDY)
    assert tokens(deltas) == reference(folder, tuple(prompt))


def test_sliding_window_layers_equal_transformers(tmp_path: Path) -> None:
    """Qwen2 with a window on its upper layers gives transformers' tokens past the window."""
    folder = make_model(
        tmp_path, "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=20, max_window_layers=1, layer_types=None
    )
    prompts = [[(11 * i) % 190 for i in range(n)] for n in (5, 60, 90)]
    outputs = generate(folder, prompts, GREEDY, chunked_prefill_size=32)
    for prompt, deltas in zip(prompts, outputs, strict=True):
        assert tokens(deltas) == reference(folder, tuple(prompt))
