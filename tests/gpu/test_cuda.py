"""The engine on a CUDA device: tokens, graphs, draws."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from logprobs_of import Reference, assert_same, check_sane, differences, entries, reported

from dovetail import LLM, SamplingParams, messages
from dovetail.contracts.seeds import row_key
from dovetail.sdk.draws import exponentials
from dovetail_testing.engine import collect, generate, make_client, tokens
from dovetail_testing.models import make_model

pytestmark = pytest.mark.gpu
NUM_NEW = 24
GREEDY = messages.SamplerParams(max_tokens=NUM_NEW, temperature=0, logprobs=5)


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """No tf32: comparisons are in full float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each architecture."""
    folder = tmp_path_factory.mktemp("models")
    changes: dict[str, dict[str, Any]] = {
        "LlamaForCausalLM": {"head_dim": 32},
        "Qwen2ForCausalLM": {"tie_word_embeddings": True, "head_dim": 16},
        "Qwen3ForCausalLM": {"head_dim": 64},
    }
    return {name: make_model(folder / name, name, **change) for name, change in changes.items()}


def prompts() -> list[list[int]]:
    """Mixed lengths, some sharing a prefix."""
    rng = random.Random(0)
    mixed = [[rng.randrange(190) for _ in range(rng.randrange(1, 130))] for _ in range(10)]
    shared = [rng.randrange(190) for _ in range(45)]
    return [*mixed, *([*shared, i] for i in range(3))]


@cache
def reference(folder: Path, prompt: tuple[int, ...]) -> list[int]:
    """Greedy continuation by transformers on the CPU in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=198,
        pad_token_id=0,
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


exact_model = cache(partial(Reference, dtype=torch.float32))


def check(folder: Path, prompt: Sequence[int], deltas: list[messages.TokenDelta]) -> None:
    """Tokens and log probabilities are transformers'."""
    assert tokens(deltas) == reference(folder, tuple(prompt))
    reply = entries(deltas)
    assert len(reply) == len(tokens(deltas))
    check_sane(reply, is_greedy=True)
    assert differences(reported(reply), exact_model(folder).values(prompt, reply)).max() < 1e-4


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    "changes",
    [
        {"attention_backend": "torch_native"},
        {"attention_backend": "triton", "disable_cuda_graph": True},
        {"attention_backend": "triton"},
        {"attention_backend": "triton", "chunked_prefill_size": 13, "page_size": 4, "max_total_tokens": 512},
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(architecture: str, changes: dict[str, Any], models: dict[str, Path]) -> None:
    """A mixed batch on the GPU gives transformers' tokens, with and without graphs, chunks and a small cache."""
    folder = models[architecture]
    outputs = generate(folder, prompts(), GREEDY, device="cuda", **{"max_total_tokens": 8192, **changes})
    for prompt, deltas in zip(prompts(), outputs, strict=True):
        check(folder, prompt, deltas)


@pytest.mark.parametrize("backend", ["torch_native", "triton"])
@pytest.mark.parametrize("disable_cuda_graph", [False, True])
def test_modules_of_transformers_in_graphs(backend: str, disable_cuda_graph: bool, models: dict[str, Path]) -> None:
    """Transformers' own Llama over the paged cache gives its tokens, its steps captured and not."""
    folder = models["LlamaForCausalLM"]
    changes: dict[str, Any] = {"attention_backend": backend, "max_total_tokens": 8192}
    changes |= {"disable_cuda_graph": disable_cuda_graph, "model_impl": "transformers"}
    outputs = generate(folder, prompts(), GREEDY, device="cuda", **changes)
    for prompt, deltas in zip(prompts(), outputs, strict=True):
        check(folder, prompt, deltas)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_prompts_one_by_one_equal_transformers(architecture: str, models: dict[str, Path]) -> None:
    """Prompts of every length about the buckets' edges, alone and after a cached prefix, through prefill graphs."""
    folder = models[architecture]

    async def main() -> list[list[messages.TokenDelta]]:
        client = make_client(folder, device="cuda", max_total_tokens=8192)
        await client.start()
        found = []
        for i, n in enumerate([1, 15, 16, 17, 63, 64, 65, 130, 200, 200]):
            submit = messages.Submit(rid=str(i), prompt_ids=[(7 * j) % 190 for j in range(n)], params=GREEDY)
            found.append(await collect(client, submit))
        await client.close()
        return found

    for n, found in zip([1, 15, 16, 17, 63, 64, 65, 130, 200, 200], asyncio.run(main()), strict=True):
        check(folder, [(7 * j) % 190 for j in range(n)], found)


def test_the_generator_draws_the_same_on_cpu_and_gpu() -> None:
    """The same seed, position and token give the same number within float32's logarithm."""
    keys = torch.tensor([row_key(seed, 7) for seed in range(50)], dtype=torch.int32)
    ids = torch.arange(10_000, dtype=torch.int32)
    torch.testing.assert_close(exponentials(keys.cuda(), ids.cuda()).cpu(), exponentials(keys, ids))


def test_seeded_sampling_is_the_same_on_cpu_and_gpu_in_any_batch(models: dict[str, Path]) -> None:
    """A seeded request gets the same tokens on the CPU alone and on the GPU in a batch with graphs."""
    mine = messages.SamplerParams(max_tokens=16, temperature=1.0, top_p=0.9, seed=4, logprobs=2)
    other = messages.SamplerParams(max_tokens=16, temperature=1.3)
    folder = models["Qwen3ForCausalLM"]
    [cpu] = generate(folder, [[5, 6, 7]], mine)
    gpu = generate(folder, [[9] * 30, [5, 6, 7], [8]], [other, mine, other], device="cuda", max_total_tokens=8192)
    assert_same([gpu[1]], [cpu])


def test_filters_on_flat_distributions_draw_the_same_on_cpu_and_gpu(models: dict[str, Path]) -> None:
    """Rows that keep nearly the whole vocabulary, beside plain and greedy ones, draw what the CPU draws."""
    hot = [
        messages.SamplerParams(max_tokens=12, temperature=3.0, top_p=0.97, seed=seed, logprobs=1) for seed in range(5)
    ]
    mixed = [*hot, messages.SamplerParams(max_tokens=12, temperature=2.0, seed=9), GREEDY]
    folder = models["LlamaForCausalLM"]
    prompts = [[i + 1, 2, 3] for i in range(len(mixed))]
    gpu = generate(folder, prompts, mixed, device="cuda", max_total_tokens=8192)
    assert_same(gpu, generate(folder, prompts, mixed))


def test_aborts_leave_nothing_behind_under_graphs(models: dict[str, Path]) -> None:
    """Requests that leave in mid-decode free their pages, and the next batch is right."""

    async def main() -> list[int]:
        client = make_client(models["LlamaForCausalLM"], device="cuda", max_total_tokens=8192)
        await client.start()
        long = messages.SamplerParams(max_tokens=300, temperature=0, ignore_eos=True)
        streams = [client.submit(messages.Submit(rid=str(i), prompt_ids=[i + 1] * 20, params=long)) for i in range(9)]
        for stream in streams:
            for _ in range(3):
                await anext(stream)
            await stream.aclose()
        found = tokens(await collect(client, messages.Submit(rid="x", prompt_ids=[3, 4], params=GREEDY)))
        stats = await client.control("stats")
        assert (stats["num_running"], stats["num_used_tokens"]) == (0, 0)
        await client.close()
        return found

    assert asyncio.run(main()) == reference(models["LlamaForCausalLM"], (3, 4))


def test_the_demo_model_answers_on_the_gpu() -> None:
    """In bfloat16 with graphs the demo model gives its right answers, thinking and not."""
    with LLM(device="cuda", reasoning_parser="qwen3", max_total_tokens=65536) as llm:
        ask = [[{"role": "user", "content": f"What is the capital of {c}?"}] for c in ("France", "Japan", "Peru")]
        replies = llm.chat(ask, SamplingParams(temperature=0))
        assert ["Paris" in replies[0].text, "Tokyo" in replies[1].text, "Lima" in replies[2].text] == [True] * 3
        [thought] = llm.chat(
            [{"role": "user", "content": "What is 2^8?"}],
            SamplingParams(temperature=0, max_tokens=300),
            chat_template_kwargs={"enable_thinking": True},
        )
        assert thought.reasoning
        assert "256" in thought.text
