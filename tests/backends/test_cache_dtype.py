"""Triton's attention over a cache in 8 bits against float64 over what was rounded; on CPU in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.contracts.cache import SCALED_DTYPES
from dovetail.testing.conformance.attention import COMMON, COMMON_TOKENS
from dovetail.testing.conformance.attention_graph import padded_prefill, rerun
from dovetail.testing.conformance.attention_qkv import verify_qkv
from dovetail.testing.conformance.attention_world import Case, verify
from dovetail_backends.triton import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DECODE = ((7, 1), (33, 1), (1, 1), (70, 1))
PREFILL = ((0, 9), (0, 1), (5, 4), (31, 2))
MIXED = ((7, 1), (40, 1), (0, 9), (13, 4))
LATENT: dict[str, Any] = {"latent": True, "num_kv_heads": 1, "head_dim": 43, "v_dim": 20, "scale": 0.3}
GRID: list[tuple[Any, dict[str, Any]]] = [
    (DECODE, {"page_size": 3}),
    (PREFILL, {"page_size": 3, "num_qo_heads": 6}),
    (MIXED, {"page_size": 1, "head_dim": 80}),
    (MIXED, {"window": 5, "sinks": True, "soft_cap": 1.5}),
    (DECODE, {"page_size": 3, **LATENT}),
    (MIXED, {"num_qo_heads": 17, **LATENT, "window": 5}),
    (COMMON, {"common": COMMON_TOKENS[1]}),
]
LONG: list[tuple[Any, dict[str, Any]]] = [
    (((600, 1), (3000, 1), (17, 1)), {"head_dim": 128, "num_qo_heads": 32, "num_kv_heads": 8}),
    (((0, 700), (2000, 130), (63, 1)), {"head_dim": 64, "num_qo_heads": 14}),
    (((0, 700), (2000, 130), (63, 1)), {"head_dim": 256, "num_qo_heads": 8}),
    (((600, 1), (3000, 1), (17, 1)), {**LATENT, "head_dim": 576, "v_dim": 512, "num_qo_heads": 16}),
    (((0, 700), (2000, 130), (63, 1)), {**LATENT, "head_dim": 576, "v_dim": 512, "num_qo_heads": 16}),
]


class Interpreted(TritonBackend):
    """Triton where the interpreter runs it."""

    caps = replace(TritonBackend.caps, devices=frozenset({"cpu", "cuda"}))


def of(lengths: Any, changes: dict[str, Any], name: Any, **more: Any) -> Case:
    """Make a case with two KV heads unless it says otherwise."""
    return Case(lengths=lengths, **{"num_kv_heads": 2, "cache_dtype": name, **changes, **more})


@pytest.mark.parametrize("name", SCALED_DTYPES)
@pytest.mark.parametrize(("lengths", "changes"), GRID, ids=str)
def test_rounded_keys_and_values_are_attended(lengths: Any, changes: dict[str, Any], name: str) -> None:
    """Decode rows, prefill with and without prefix, mixes, shared prefixes and latent rows."""
    verify(TritonBackend, of(lengths, changes, name), DEVICE)


@pytest.mark.parametrize("name", SCALED_DTYPES)
@pytest.mark.parametrize("changes", [{}, LATENT], ids=["pairs", "latent"])
def test_graphs_of_a_cache_of_8_bits(changes: dict[str, Any], name: str) -> None:
    """One plan serves other lengths, and padding is written nowhere."""
    rerun(Interpreted, of(DECODE[:2], changes, name), DEVICE)
    if not changes:  # the kit's prefill graphs have queries as wide as values
        padded_prefill(Interpreted, of(PREFILL, changes, name), DEVICE)


def test_the_kernel_from_the_projection_declines() -> None:
    """It attends the new key as it was, which the cache does not hold."""
    assert not verify_qkv(Interpreted, of(DECODE[:2], {}, "int8"), DEVICE, normed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCALED_DTYPES)
@pytest.mark.parametrize(("lengths", "changes"), [*GRID, *LONG], ids=str)
def test_real_widths(lengths: Any, changes: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    """Those of published models, long, in every dtype."""
    verify(TritonBackend, of(lengths, changes, name, dtype=dtype), DEVICE)
