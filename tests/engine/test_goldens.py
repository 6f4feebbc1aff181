"""What the demo model answers, frozen: greedy and seeded tokens in float32, the same in every schedule.

The tokens stand in `goldens.json`. They change with the model, and with an intended change of sampling only; then
`python tests/engine/test_goldens.py` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.demo import MODEL_DIR
from dovetail.messages import SamplerParams
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_testing.engine import generate, tokens

GOLDENS = Path(__file__).with_name("goldens.json")
NUM_NEW = 28
PROMPTS = (
    "What is the capital of France?",
    "Tell me a joke.",
    "What is 12 + 30?",
    "Tell me a story about a fox and a river, and let it end well.",
    "List three colours.",
    "What is the capital of France? And of Japan?",
)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "filtered": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 12},
    "penalized": {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "banned": {"temperature": 0.7, "min_tokens": 12, "logit_bias": {9: 2.0}, "seed": 13},
}
SCHEDULES: list[dict[str, Any]] = [
    {},
    {"page_size": 3, "chunked_prefill_size": 7},
    {"disable_radix_cache": True, "max_running_requests": 3},
    {"max_total_tokens": 320, "page_size": 4},
    {"overlap_on_cpu": True},
    {"overlap_on_cpu": True, "max_total_tokens": 320, "page_size": 4, "chunked_prefill_size": 13},
]
FEW = (SCHEDULES[1], SCHEDULES[-1])
"""Those that change the most."""


def answers(changes: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Every prompt in every way, all of them at once."""
    tokenizer = Tokenizer.load(MODEL_DIR)
    prompts = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in PROMPTS]
    asked = [(way, prompt) for way in WAYS for prompt in prompts]
    params = [SamplerParams(max_tokens=NUM_NEW, ignore_eos=way != "banned", **WAYS[way]) for way, _ in asked]
    outputs = generate(MODEL_DIR, [prompt for _, prompt in asked], params, num_threads=1, **changes)
    found: dict[str, list[list[int]]] = {way: [] for way in WAYS}
    for (way, _), deltas in zip(asked, outputs, strict=True):
        found[way].append(tokens(deltas))
    return found


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "changes", [each if each in FEW else pytest.param(each, marks=pytest.mark.full) for each in SCHEDULES], ids=str
)
def test_the_demo_says_what_it_said(changes: dict[str, Any]) -> None:
    """Tokens are those that were written down, whatever the pages, the chunks, the cache and the overlap."""
    assert answers(changes) == json.loads(GOLDENS.read_text())


if __name__ == "__main__":
    GOLDENS.write_text(json.dumps(answers({}), separators=(",", ":")) + "\n")
