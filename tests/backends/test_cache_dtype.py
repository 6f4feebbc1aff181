"""Triton's attention over a cache in 8 bits against float64 over what was rounded; on CPU in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.contracts.cache import SCALED_DTYPES
from dovetail.sdk.cache import DTYPES, as_bytes, quantise
from dovetail_backends.triton import TritonBackend
from dovetail_backends.triton.kv import Scales, write_scaled_kv
from dovetail_testing.conformance.attention_cases import COMMON, COMMON_TOKENS
from dovetail_testing.conformance.attention_graph import padded_prefill, rerun
from dovetail_testing.conformance.attention_qkv import verify_qkv
from dovetail_testing.conformance.attention_world import Case, verify

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DECODE = ((7, 1), (33, 1), (1, 1), (70, 1))
PREFILL = ((0, 9), (0, 1), (5, 4), (31, 2))
MIXED = ((7, 1), (40, 1), (0, 9), (13, 4))
LATENT: dict[str, Any] = {"latent": True, "num_kv_heads": 1, "head_dim": 43, "v_dim": 20, "scale": 0.3}
GRID: list[tuple[Any, dict[str, Any]]] = [
    (DECODE, {"page_size": 3}),
    (PREFILL, {"page_size": 3, "num_qo_heads": 6}),
    (MIXED, {"page_size": 1, "head_dim": 80}),
    (MIXED, {"page_size": 3, "head_dim": 8}),
    (MIXED, {"head_dim": 24, "num_qo_heads": 6}),
    (MIXED, {"head_dim": 192, "window": 5, "sinks": True}),
    (MIXED, {"head_dim": 40, "v_dim": 24, "window": 5, "sinks": True}),
    (MIXED, {"head_dim": 16, "v_dim": 72, "page_size": 3, "soft_cap": 1.5}),
    (COMMON, {"head_dim": 24, "v_dim": 16, "common": COMMON_TOKENS[1]}),
    (MIXED, {"window": 5, "sinks": True, "soft_cap": 1.5}),
    (DECODE, {"page_size": 3, **LATENT}),
    (MIXED, {"num_qo_heads": 17, **LATENT, "window": 5}),
    (COMMON, {"common": COMMON_TOKENS[1]}),
]
LONG: list[tuple[Any, dict[str, Any]]] = [
    (((600, 1), (3000, 1), (17, 1)), {"head_dim": 128, "num_qo_heads": 32, "num_kv_heads": 8}),
    (((0, 700), (2000, 130), (63, 1)), {"head_dim": 64, "num_qo_heads": 14}),
    (((0, 700), (2000, 130), (63, 1)), {"head_dim": 256, "num_qo_heads": 8}),
    (((0, 700), (2000, 130), (63, 1)), {"head_dim": 192, "v_dim": 128, "num_qo_heads": 8}),
    (((0, 700), (2000, 130), (63, 1)), {"head_dim": 64, "v_dim": 32, "num_qo_heads": 8}),
    (((0, 700), (2000, 130), (63, 1)), {"head_dim": 128, "v_dim": 64, "num_qo_heads": 8, "window": 100}),
    (((0, 700), (2000, 130), (63, 1)), {"head_dim": 24, "v_dim": 128, "num_qo_heads": 4}),
    (((0, 700), (2000, 130), (63, 1)), {"head_dim": 512, "num_qo_heads": 8}),
    (((600, 1), (3000, 1), (17, 1)), {**LATENT, "head_dim": 576, "v_dim": 512, "num_qo_heads": 16}),
    (((0, 700), (2000, 130), (63, 1)), {**LATENT, "head_dim": 576, "v_dim": 512, "num_qo_heads": 16}),
]


class Interpreted(TritonBackend):
    """Triton where the interpreter runs it."""

    caps = replace(TritonBackend.caps, devices=frozenset({"cpu", "cuda"}))


def of(lengths: Any, changes: dict[str, Any], name: Any, **more: Any) -> Case:
    """Make a case with two KV heads unless it says otherwise."""
    return Case(lengths=lengths, **{"num_kv_heads": 2, "cache_dtype": name, **changes, **more})


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCALED_DTYPES)
@pytest.mark.parametrize(("lengths", "changes"), GRID, ids=str)
def test_rounded_keys_and_values_are_attended(lengths: Any, changes: dict[str, Any], name: str) -> None:
    """Decode rows, prefill with and without prefix, mixes, shared prefixes and latent rows."""
    verify(TritonBackend, of(lengths, changes, name), DEVICE)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCALED_DTYPES)
@pytest.mark.parametrize("changes", [{}, LATENT], ids=["pairs", "latent"])
def test_graphs_of_a_cache_of_8_bits(changes: dict[str, Any], name: str) -> None:
    """One plan serves other lengths, and padding is written nowhere."""
    rerun(Interpreted, of(DECODE[:2], changes, name), DEVICE)
    if not changes:  # the kit's prefill graphs have queries as wide as values
        padded_prefill(Interpreted, of(PREFILL, changes, name), DEVICE)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCALED_DTYPES)
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "padded"])
@pytest.mark.parametrize("changes", [{"page_size": 3}, {"head_dim": 80, "num_qo_heads": 6}, {"window": 5}], ids=str)
def test_decode_from_the_projection(changes: dict[str, Any], name: str, normed: bool) -> None:
    """It attends the new key and value as it stores them."""
    assert verify_qkv(Interpreted, of(DECODE, changes, name), DEVICE, normed=normed)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCALED_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num", "heads", "width"), [(5, 3, 64), (1, 1, 576), (9, 8, 80)])
@pytest.mark.filterwarnings(
    "ignore:invalid value encountered in cast:RuntimeWarning"
)  # NumPy's, of Triton's interpreter
def test_numbers_are_written_as_the_reference_has_them(
    num: int, heads: int, width: int, dtype: torch.dtype, name: str
) -> None:
    """To the bit, of sizes from nothing to the largest, halves between two numbers and what is not a number."""
    rng = torch.Generator().manual_seed(7)
    x = torch.randn(num, heads, width, generator=rng) * 10.0 ** torch.randint(-7, 4, (num, heads, 1), generator=rng)
    x[0, 0] = torch.arange(width) / 16 - 2  # ties
    x[-1, -1, :5] = torch.tensor([0.0, -0.0, 1e-30, 448.0, -448.0]) if dtype != torch.float16 else 0.0
    if num > 5:
        x[1], x[2, 1, 3] = 0.0, float("nan")
    x = x.to(dtype).to(DEVICE)
    kind = DTYPES[name]
    kv = torch.zeros(4, 2, 4, heads, width, dtype=torch.int8, device=DEVICE)
    scales = Scales(*(torch.zeros(4, 4, heads, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"), kind)
    slots = torch.tensor([15, -1, 3, 8, 0, 1, 2, 4, 6][:num], device=DEVICE)
    write_scaled_kv(x, -x, (kv[:, 0], kv[:, 1]), scales, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for half, given, kept in ((0, x, scales.k), (1, -x, scales.v)):
            numbers, scale = quantise(given[token], kind)
            found = kept[slot // 4, slot % 4]
            assert torch.equal(found.nan_to_num(-1), scale.nan_to_num(-1))
            fine = ~scale.isnan()
            assert torch.equal(kv[slot // 4, half, slot % 4][fine], as_bytes(numbers)[fine])
    live = int((slots >= 0).sum())
    assert int((scales.k.flatten(0, 1).nan_to_num(1) != 0).any(-1).sum()) <= live


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [None, *SCALED_DTYPES])
@pytest.mark.parametrize(("lengths", "changes"), [*GRID, *LONG], ids=str)
def test_real_widths(lengths: Any, changes: dict[str, Any], name: str | None, dtype: torch.dtype) -> None:
    """Those of published models, long, in every dtype, with and without 8 bits."""
    verify(TritonBackend, of(lengths, changes, name, dtype=dtype), DEVICE)
