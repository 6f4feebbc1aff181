"""`--batch-invariant` on a CUDA device: bits of products, experts and attention, and of an engine's replies."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from logprobs_of import assert_same

from dovetail.contracts.layers import RMSScale
from dovetail.demo import MODEL_DIR
from dovetail.messages import SamplerParams
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled
from dovetail_backends.kernels.triton import fixed, fixed_packed
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights
from dovetail_backends.kernels.triton.packed_weight import weight_of
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
FLOAT8 = torch.float8_e4m3fn
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
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
    same_in_any_company(lambda at: fixed.linear(x[at], weight, None), whole)


def same_in_any_company(compute: Callable[[slice], torch.Tensor], whole: torch.Tensor) -> None:
    """The first and the last rows by themselves, and all once more; repeated: no race."""
    for num in (1, 2, 7, 16, 17, 33, 64, 65, 128, 129, 257, 512, len(whole)):
        for at in (slice(0, num), slice(len(whole) - num, len(whole))):
            for _ in range(3):
                assert torch.equal(compute(at), whole[at]), (num, at)


@pytest.mark.parametrize("form", [Scaled(FLOAT8), Scaled(FLOAT8, 128), Scaled(), Int4(128), Int4(32), Mxfp4()], ids=str)
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1152, 896), (2880, 2880)], ids=str)
def test_a_row_of_a_packed_product_has_the_bits_that_it_has_alone(form: Form, shape: tuple[int, int]) -> None:
    """Onto a residual, where inputs are split, and behind a norm with a gate."""
    n, k = shape
    if k % (getattr(form, "group", None) or 32):
        pytest.skip("groups do not divide the inputs")
    torch.manual_seed(0)
    tensors = form.quantise(torch.randn(n, k, device="cuda") / k**0.5)
    weight, plain = weight_of(form, tensors, torch.bfloat16), form.dequantise(tensors, torch.bfloat16)
    x, residual = (torch.randn(1500, size, device="cuda").bfloat16() for size in (k, n))
    rms = RMSScale(torch.randn(k, device="cuda").bfloat16(), 1e-6)
    for options, want in (
        ({"residual": residual}, residual + x @ plain.T),
        ({"norm": rms, "act": "silu_and_mul"}, reference.norm_gate(x, *rms, plain, None)),
    ):

        def compute(at: slice, given: dict[str, Any] = options) -> torch.Tensor:
            cut = {name: one[at] if name == "residual" else one for name, one in given.items()}
            return fixed_packed.linear(x[at], weight, None, **cut)

        whole = compute(slice(None))
        assert (whole.float() - want.float()).norm() <= 2e-2 * want.float().norm()
        same_in_any_company(compute, whole)


@pytest.mark.parametrize("form", [None, Scaled(FLOAT8, 128), Int4(32), Mxfp4()], ids=str)
@pytest.mark.parametrize("shape", [(128, 8, 2048, 768), (32, 4, 2880, 2880)], ids=["30B", "gpt-oss"])
def test_a_row_of_experts_has_the_bits_that_it_has_alone(form: Form | None, shape: tuple[int, int, int, int]) -> None:
    """In shapes of Qwen3-30B-A3B and gpt-oss-20b; how many rows an expert has differs with each number of rows."""
    num, top_k, hidden, inner = shape
    if any(width % (getattr(form, "group", None) or 32) for width in (hidden, inner)):
        pytest.skip("groups do not divide the inputs")
    torch.manual_seed(0)
    shapes = (num, 2 * inner, hidden), (num, hidden, inner)
    up, down = (torch.randn(*each, device="cuda").bfloat16() / each[-1] ** 0.5 for each in shapes)
    up_bias, down_bias = (torch.randn(num, each[1], device="cuda").bfloat16() for each in shapes)
    x, residual = (torch.randn(1500, hidden, device="cuda").bfloat16() for _ in range(2))
    ids = torch.rand(1500, num, device="cuda").topk(top_k).indices
    shares = torch.rand(1500, top_k, device="cuda").bfloat16()
    weights = None
    if form is not None:
        packed_up, packed_down = (weight_of(form, form.quantise(one), torch.bfloat16) for one in (up, down))
        weights = PackedExpertWeights(packed_up, packed_down, up_bias, down_bias, 0, "clamped_silu_and_mul", False)

    def compute(at: slice) -> torch.Tensor:
        given = x[at], ids[at], shares[at]
        if weights is not None:
            return fixed_packed.gated_experts(*given, weights, residual[at])
        how: dict[str, Any] = {"act": "clamped_silu_and_mul", "weigh": "output", "first": 0, "total": num}
        return fixed_packed.experts(*given, up, up_bias, down, down_bias, residual[at], **how)

    whole = compute(slice(None))
    assert whole.isfinite().all()
    same_in_any_company(compute, whole)


def made(which: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return a model's folder, and how it is served."""
    if which == "demo":
        return MODEL_DIR, {}
    name, *quantization = which.split()
    found = make_model(folder, MODELS[name][0], **SIZES | MODELS[name][1])
    if quantization != ["mxfp4"]:
        return found, {"quantization": quantization[0]} if quantization else {}
    config = json.loads((found / "config.json").read_text()) | {"quantization_config": MXFP4}
    (found / "config.json").write_text(json.dumps(config))
    return found, {"load_format": "dummy"}


SIZES: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "num_attention_heads": 16},
    **{"num_key_value_heads": 8, "dtype": "bfloat16", "initializer_range": 0.05},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "wide": ("Qwen3ForCausalLM", {}),
    "experts": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    ),
    "gpt-oss": ("GptOssForCausalLM", {"num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 64}),
}


@pytest.mark.parametrize(
    "which",
    ["demo", "wide", "wide fp8", "wide int4", "experts", "experts fp8", "experts int4", "gpt-oss", "gpt-oss mxfp4"],
)
def test_a_reply_is_the_same_in_any_company(which: str, tmp_path: Path) -> None:
    """Alone, beside 40 others in graphs, in small chunks, behind cached prefixes; greedy, sampled, with penalties."""
    folder, more = made(which, tmp_path)
    rng = random.Random(2)
    start = [rng.randrange(5, 190) for _ in range(200)]
    prompts = [start[: rng.randrange(200)] + [rng.randrange(5, 190) for _ in range(1 + 7 * i)] for i in range(40)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "logprobs": 0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 30},
        {"temperature": 0.8, "frequency_penalty": 0.5, "logprobs": 1}, {"temperature": 0, "logprobs": 2},
    ]  # fmt: skip
    params = [SamplerParams(max_tokens=48, seed=i, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(40)]
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 40000, **more, **ON}
    together = generate(folder, prompts, params, **settings)
    chunks = generate(folder, prompts, params, chunked_prefill_size=96, max_running_requests=7, **settings)
    assert_same(chunks, together, atol=LAST_BIT)
    eager = generate(folder, prompts, params, disable_cuda_graph=True, disable_radix_cache=True, **settings)
    assert_same(eager, together, atol=LAST_BIT)
    for i in range(0, 40, 7):
        assert_same(generate(folder, [prompts[i]], [params[i]], **settings), [together[i]], atol=LAST_BIT)
