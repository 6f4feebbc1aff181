"""Latent attention with `--batch-invariant` on a CUDA device: bits of products of heads, attention and replies."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from logprobs_of import assert_same
from torch import Tensor

from dovetail.contracts.attention import Phase
from dovetail.contracts.errors import ConfigError
from dovetail.messages import SamplerParams
from dovetail_backends.triton import TritonBackend
from dovetail_backends.triton.head_products import multiply_heads
from dovetail_testing.conformance.attention_steps import part_of
from dovetail_testing.conformance.attention_world import Case, World, make_backend, make_world
from dovetail_testing.engine import generate
from dovetail_testing.models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
LAST_BIT = 2e-6
"""Of a log probability: see `test_batch_invariance`."""
CUDA = torch.device("cuda")
NOPE, VALUE = 128, 128
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {"n_routed_experts": 8, "num_key_value_heads": 4, "qk_rope_head_dim": 64, "head_dim": 64}
    | {"q_lora_rank": 96},
    "KimiLinearForCausalLM": {"num_local_experts": 8, "num_key_value_heads": 4, "qk_rope_head_dim": 64, "head_dim": 64}
    | {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_heads": 4, "linear_head_dim": 64},
}
SHAPE: dict[str, Any] = {
    **{"hidden_size": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_hidden_layers": 4},
    **{"moe_intermediate_size": 64, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "dtype": "bfloat16", "initializer_range": 0.05, "max_position_embeddings": 2048},
}


@DTYPES
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_a_row_of_heads_has_the_bits_that_it_has_alone(heads: int, dtype: torch.dtype) -> None:
    """Of both products around the attention; repeated: no race."""
    torch.manual_seed(0)
    matrix = (torch.randn(heads, NOPE + VALUE, 512, device=CUDA) / 512**0.5).to(dtype)
    x, found = (torch.randn(700, heads, width, device=CUDA).to(dtype) for width in (NOPE + 64, 512))
    for rows, weight in ((x[..., :NOPE], matrix[:, :NOPE]), (found, matrix[:, NOPE:].transpose(1, 2))):
        whole = rows.new_empty(700, heads, weight.shape[2])
        multiply_heads(rows, weight, whole)
        want = torch.bmm(rows.transpose(0, 1).float(), weight.float()).transpose(0, 1)
        torch.testing.assert_close(whole.float(), want, rtol=2e-2, atol=2e-2)
        for num, at in ((1, 0), (1, 63), (2, 5), (17, 40), (64, 64), (65, 1), (512, 100)):
            for _ in range(3):
                got = whole.new_empty(num, heads, weight.shape[2])
                multiply_heads(rows[at : at + num], weight, got)
                assert torch.equal(got, whole[at : at + num]), (num, at)


def attended(world: World, q: Tensor, heads: Tensor) -> Tensor:
    """Return values of heads `[T, Hq, V]` of a step."""
    backend = make_backend(TritonBackend, world)
    backend.batch_invariant = True
    world.batch.attention = backend
    queries = q.new_full((*q.shape[:2], world.case.head_dim), float("nan"))
    queries[..., world.case.value_dim :] = q[..., NOPE:]
    out = q.new_full((*q.shape[:2], VALUE), float("nan"))
    backend.plan(world.batch, Phase.EAGER)
    backend.plan_in_graph(world.batch)
    backend.write_kv(world.layer, world.k, world.v, world.batch)
    assert backend.forward_latent(q, queries, heads, world.layer, world.batch, out)
    return out


@DTYPES
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
def test_company_and_chunks_change_no_bit(heads: int, cache_dtype: Any, dtype: torch.dtype) -> None:
    """At DeepSeek's widths: requests alone and beside others, chunks, and each token as a decode row."""
    rng = torch.Generator().manual_seed(7)
    shape: dict[str, Any] = {"latent": True, "num_kv_heads": 1, "head_dim": 576, "v_dim": 512, "scale": 0.07}
    shape |= {"num_qo_heads": heads, "dtype": dtype, "cache_dtype": cache_dtype, "page_size": 64}
    matrix = (torch.randn(heads, NOPE + VALUE, 512, generator=rng) / 512**0.5).to(CUDA, dtype)

    def queries(num: int) -> Tensor:
        return torch.randn(num, heads, NOPE + 64, generator=rng).to(CUDA, dtype)

    lengths = ((7, 1), (600, 1), (0, 129), (300, 33), (64, 1))
    world, start = make_world(Case(lengths=lengths, **shape), CUDA), 0
    q = queries(world.batch.num_tokens)
    together = attended(world, q, matrix)
    for number, (cached, new) in enumerate(lengths):
        own = slice(start, start + new)
        alone = attended(part_of(world, number, cached, cached + new), q[own], matrix)
        assert torch.equal(alone, together[own]), number
        start += new
    world, q = make_world(Case(lengths=((0, 700),), **shape), CUDA), queries(700)
    want = attended(world, q, matrix)
    for cuts in ((0, 7, 16, 41, 128, 700), (0, 64, 65, 321, 700)):
        for first, end in itertools.pairwise(cuts):
            assert torch.equal(attended(part_of(world, 0, first, end), q[first:end], matrix), want[first:end])
    for at in (1, 15, 16, 63, 64, 127, 511, 699):
        assert torch.equal(attended(part_of(world, 0, at, at + 1), q[at : at + 1], matrix), want[at : at + 1]), at


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_reply_is_the_same_in_any_company(architecture: str, tmp_path: Path) -> None:
    """Alone, beside 40 others in graphs, in small chunks, behind cached prefixes; greedy and sampled."""
    folder = make_model(tmp_path, architecture, **SHAPE, **ARCHITECTURES[architecture])
    rng = random.Random(2)
    start = [rng.randrange(5, 190) for _ in range(200)]
    prompts = [start[: rng.randrange(200)] + [rng.randrange(5, 190) for _ in range(1 + 7 * i)] for i in range(40)]
    kinds: list[dict[str, Any]] = [{"temperature": 0, "logprobs": 2}, {"temperature": 0.9, "top_p": 0.9, "top_k": 30}]
    params = [SamplerParams(max_tokens=48, seed=i, ignore_eos=True, **kinds[i % 2]) for i in range(40)]
    settings: dict[str, Any] = {"max_total_tokens": 40000, "device": "cuda", "batch_invariant": True}
    try:
        together = generate(folder, prompts, params, **settings)
    except ConfigError as error:
        if "experts on cuda" not in str(error):
            raise
        pytest.skip(str(error))
    chunks = generate(folder, prompts, params, chunked_prefill_size=96, max_running_requests=7, **settings)
    assert_same(chunks, together, atol=LAST_BIT)
    eager = generate(folder, prompts, params, disable_cuda_graph=True, disable_radix_cache=True, **settings)
    assert_same(eager, together, atol=LAST_BIT)
    for i in range(0, 40, 7):
        assert_same(generate(folder, [prompts[i]], [params[i]], **settings), [together[i]], atol=LAST_BIT)
