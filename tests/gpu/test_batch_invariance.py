"""`--batch-invariant` on a CUDA device: bits of products, of attention, and of an engine's replies."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from logprobs_of import assert_same

from dovetail.demo import MODEL_DIR
from dovetail.messages import SamplerParams
from dovetail_backends.kernels.triton import fixed
from dovetail_backends.triton import TritonBackend
from dovetail_testing.conformance.attention import AttentionBackendConformance
from dovetail_testing.engine import generate
from dovetail_testing.models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
LAST_BIT = 2e-6
"""Of a log probability: logits have the same bits, but torch and the kernel of graphs add up a softmax differently."""
ON = {"device": "cuda", "batch_invariant": True}
WEIGHTS = [(1152, 896), (9728, 896), (896, 4864), (4096, 4096), (28672, 4096), (4096, 14336), (151936, 896)]


class TestBfloat16(AttentionBackendConformance):
    """The kit in the dtype that is served; its checks of bits are among it."""

    plugin_class: ClassVar[Any] = TritonBackend
    dtype: ClassVar[torch.dtype | None] = torch.bfloat16
    page_sizes: ClassVar[tuple[int, ...]] = (16,)


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_a_product_has_the_bits_that_it_has_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Few rows, whose spans are summed apart, and many, where one program goes through all; repeated: no race."""
    n, k = shape
    torch.manual_seed(0)
    weight, x = torch.randn(n, k, device="cuda").to(dtype) / k**0.5, torch.randn(1500, k, device="cuda").to(dtype)
    whole = fixed.linear(x, weight, None)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)
    for num in (1, 2, 17, 64, 65, 128, 129, 512):
        for _ in range(5):
            assert torch.equal(fixed.linear(x[:num], weight, None), whole[:num]), num
    assert torch.equal(fixed.linear(x, weight, None), whole)


@pytest.mark.parametrize("which", ["demo", "wide"])
def test_a_reply_is_the_same_in_any_company(which: str, tmp_path: Path) -> None:
    """Alone, beside 40 others in graphs, in small chunks, behind cached prefixes; greedy, sampled, with penalties."""
    folder = MODEL_DIR
    if which == "wide":
        folder = make_model(
            tmp_path, "Qwen3ForCausalLM", hidden_size=1024, intermediate_size=3072, head_dim=128,
            num_attention_heads=16, num_key_value_heads=8, dtype="bfloat16", initializer_range=0.05,
        )  # fmt: skip
    rng = random.Random(2)
    start = [rng.randrange(5, 190) for _ in range(200)]
    prompts = [start[: rng.randrange(200)] + [rng.randrange(5, 190) for _ in range(1 + 7 * i)] for i in range(40)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "logprobs": 0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 30},
        {"temperature": 0.8, "frequency_penalty": 0.5, "logprobs": 1}, {"temperature": 0, "logprobs": 2},
    ]  # fmt: skip
    params = [SamplerParams(max_tokens=48, seed=i, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(40)]
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 40000, **ON}
    together = generate(folder, prompts, params, **settings)
    chunks = generate(folder, prompts, params, chunked_prefill_size=96, max_running_requests=7, **settings)
    assert_same(chunks, together, atol=LAST_BIT)
    eager = generate(folder, prompts, params, disable_cuda_graph=True, disable_radix_cache=True, **settings)
    assert_same(eager, together, atol=LAST_BIT)
    for i in range(0, 40, 7):
        assert_same(generate(folder, [prompts[i]], [params[i]], **settings), [together[i]], atol=LAST_BIT)
