"""Head dims, page sizes, groups, windows, sinks, chunks, prefixes and retraction on a CUDA device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from logprobs_of import assert_same

from dovetail.messages import SamplerParams, TokenDelta
from dovetail.messages.step import DecodeGraph, Ints
from dovetail.runtime.graphs.decode import Decoded, DecodeGraphs
from dovetail_backends.triton import TritonBackend
from dovetail_testing.conformance.attention_qkv import verify_qkv
from dovetail_testing.conformance.attention_world import Case, verify
from dovetail_testing.engine import generate
from dovetail_testing.models import make_model

pytestmark = pytest.mark.gpu
GREEDY = SamplerParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=2)
DECODE = [(7, 1), (0, 1), (200, 1), (64, 1), (1500, 1)]
MIXED = [(70, 1), (129, 1), (0, 90), (33, 40), (300, 170)]


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """No tf32: comparisons are in full float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("dim", "page", "changes"),
    [
        (64, 1, {"num_qo_heads": 14, "num_kv_heads": 2}),
        (64, 16, {"num_qo_heads": 14, "num_kv_heads": 2, "dtype": torch.bfloat16}),
        (80, 16, {"num_qo_heads": 4, "num_kv_heads": 4, "dtype": torch.bfloat16}),
        (96, 64, {"num_qo_heads": 6, "num_kv_heads": 2}),
        (128, 16, {"num_qo_heads": 8, "num_kv_heads": 2, "dtype": torch.bfloat16}),
        (128, 64, {"num_qo_heads": 8, "num_kv_heads": 1, "window": 50}),
        (128, 1, {"num_qo_heads": 8, "num_kv_heads": 1, "sinks": True}),
        (256, 64, {"num_qo_heads": 4, "num_kv_heads": 2, "dtype": torch.bfloat16}),
        (256, 16, {"num_qo_heads": 4, "num_kv_heads": 1, "window": 17, "sinks": True}),
    ],
    ids=str,
)
def test_attention_of_every_shape(dim: int, page: int, changes: dict[str, Any]) -> None:
    """Decode from queries and from the projection, and mixed batches, equal float64 within the dtype's rounding."""
    device = torch.device("cuda")
    for lengths in (DECODE, MIXED):
        verify(TritonBackend, Case(lengths=lengths, head_dim=dim, page_size=page, **changes), device)
    for normed in (True, False):
        assert verify_qkv(
            TritonBackend, Case(lengths=DECODE, head_dim=dim, page_size=page, **changes), device, normed=normed
        )


def test_a_long_prefill_in_large_tiles() -> None:
    """Chunks long enough for the large tiles, with and without prefix, equal float64 in bfloat16."""
    for dim in (64, 96, 128):
        case = Case(lengths=[(0, 700), (333, 650)], head_dim=dim, num_qo_heads=4, num_kv_heads=2, dtype=torch.bfloat16)
        verify(TritonBackend, case, torch.device("cuda"))


@pytest.mark.parametrize(
    ("dim", "page", "changes"),
    [
        (64, 16, {"num_qo_heads": 14, "num_kv_heads": 2, "dtype": torch.bfloat16}),
        (80, 1, {"num_qo_heads": 4, "num_kv_heads": 4, "dtype": torch.bfloat16}),
        (96, 64, {"num_qo_heads": 6, "num_kv_heads": 2}),
        (128, 16, {"num_qo_heads": 16, "num_kv_heads": 8, "dtype": torch.bfloat16}),
        (128, 256, {"num_qo_heads": 32, "num_kv_heads": 8, "dtype": torch.float16, "sinks": True}),
        (128, 16, {"num_qo_heads": 8, "num_kv_heads": 2}),
        (256, 16, {"num_qo_heads": 8, "num_kv_heads": 1, "dtype": torch.bfloat16}),
        (256, 64, {"num_qo_heads": 4, "num_kv_heads": 2}),
    ],
    ids=str,
)
def test_common_prefixes_of_every_shape(dim: int, page: int, changes: dict[str, Any]) -> None:
    """Rows behind two prefixes and one alone: with and without hint, from queries and the projection, as float64."""
    device = torch.device("cuda")
    lengths = [*((1100 + 9 * i, 1) for i in range(21)), *((700 + 70 * i, 1) for i in range(12)), (3, 1)]
    common = [0, *[1100] * 20, 0, *[650] * 11, 0]
    for hint in (True, False):
        case = Case(lengths=lengths, common=common, hint=hint, head_dim=dim, page_size=page, **changes)
        verify(TritonBackend, case, device)
        for normed in (True, False):
            assert verify_qkv(TritonBackend, case, device, normed=normed)


def prompts() -> list[list[int]]:
    """Mixed lengths; some continue others, so that a cache finds their prefix."""
    rng = random.Random(3)
    first = [[rng.randrange(190) for _ in range(n)] for n in (3, 17, 64, 130, 201)]
    return [*first, *([*p, *p[:9]] for p in first), first[3][:100] + first[2]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[list[TokenDelta]]]]:
    """By head dim: a tiny model, and what the reference backend answers to each prompt on the same device."""
    found = {}
    for dim, heads, kv_heads in (
        (40, 4, 2),
        (64, 4, 1),
        (80, 4, 4),
        (96, 6, 2),
        (128, 4, 2),
        (192, 2, 1),
        (256, 2, 1),
        (512, 2, 1),
    ):
        folder = tmp_path_factory.mktemp(f"dim{dim}")
        make_model(folder, "Qwen3ForCausalLM", head_dim=dim, num_attention_heads=heads, num_key_value_heads=kv_heads)
        deltas = generate(
            folder, prompts(), GREEDY, device="cuda", attention_backend="torch_native", max_total_tokens=8192
        )
        found[dim] = folder, deltas
    return found


@pytest.mark.parametrize(
    ("dim", "changes"),
    [
        (40, {"page_size": 16}),
        (64, {"page_size": 1}),
        (64, {"page_size": 16, "max_running_requests": 3}),
        (80, {"page_size": 16, "chunked_prefill_size": 31}),
        (96, {"page_size": 64, "disable_cuda_graph": True}),
        (128, {"page_size": 16, "max_total_tokens": 480}),
        (128, {"page_size": 1, "max_total_tokens": 400, "chunked_prefill_size": 50}),
        (128, {"page_size": 64, "disable_radix_cache": True}),
        (192, {"page_size": 16, "chunked_prefill_size": 64}),
        (256, {"page_size": 64, "chunked_prefill_size": 64, "disable_overlap_schedule": True}),
        (512, {"page_size": 16, "chunked_prefill_size": 64}),
    ],
    ids=str,
)
def test_greedy_tokens_equal_the_reference_backend(
    dim: int, changes: dict[str, Any], reference: dict[int, tuple[Path, list[list[TokenDelta]]]]
) -> None:
    """Whatever the page size, the chunks, the cache's size (retractions) and the graphs: the reference's tokens."""
    folder, want = reference[dim]
    settings = {"max_total_tokens": 8192, **changes}
    deltas = generate(folder, prompts(), GREEDY, device="cuda", attention_backend="triton", **settings)
    assert_same(deltas, want)


@pytest.mark.parametrize(("num_prefixes", "heads", "kv_heads"), [(1, 4, 2), (2, 4, 2), (2, 8, 1)])
def test_greedy_tokens_behind_common_prefixes(
    num_prefixes: int, heads: int, kv_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests behind one prefix, or interleaved behind two, get the reference's tokens from graphs that share it."""
    rng = random.Random(7)
    prefixes = [[rng.randrange(190) for _ in range(900)] for _ in range(num_prefixes)]
    asked = [prefixes[i % num_prefixes] + [rng.randrange(190) for _ in range(3 + 5 * i)] for i in range(14)]
    sizes = {"head_dim": 64, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    folder = make_model(tmp_path, "Qwen3ForCausalLM", max_position_embeddings=2048, **sizes)
    settings: dict[str, Any] = {"device": "cuda", "max_total_tokens": 1 << 15, "page_size": 16}
    want = generate(folder, asked, GREEDY, attention_backend="torch_native", **settings)
    used: list[bool] = []
    run = DecodeGraphs.run

    def noting(self: DecodeGraphs, rows: Ints, key: DecodeGraph) -> Decoded:
        used.append(key.shares)
        return run(self, rows, key)

    monkeypatch.setattr("dovetail.runtime.start.capture.START_S", 600.0)  # all are captured at the start
    monkeypatch.setattr(DecodeGraphs, "run", noting)
    deltas = generate(folder, asked, GREEDY, attention_backend="triton", **settings)
    assert_same(deltas, want)
    assert any(used)
