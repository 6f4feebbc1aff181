"""Triton's attention over latent rows against attention written out in float64; on CPU it runs in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail_backends.triton import TritonBackend
from dovetail_testing.conformance.attention_world import Case, verify

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DECODE = ((7, 1), (33, 1), (1, 1), (70, 1))
PREFILL = ((0, 9), (0, 1), (5, 4), (31, 2))
MIXED = ((7, 1), (40, 1), (0, 9), (13, 4))
LATENT: dict[str, Any] = {"latent": True, "num_kv_heads": 1, "head_dim": 40, "v_dim": 32, "scale": 0.3}
GRID: list[tuple[Any, dict[str, Any]]] = [
    (DECODE, {"page_size": 3}),
    (PREFILL, {"page_size": 3, "num_qo_heads": 5}),
    (MIXED, {"num_qo_heads": 17, "page_size": 1}),
    (MIXED, {"head_dim": 36, "v_dim": 36, "page_size": 64}),
    (MIXED, {"head_dim": 43, "v_dim": 20, "soft_cap": 1.5, "sinks": True, "window": 5}),
]
LONG: list[tuple[Any, dict[str, Any]]] = [
    (((600, 1), (3000, 1), (17, 1)), {"head_dim": 576, "v_dim": 512, "num_qo_heads": 16}),
    (((0, 700), (2000, 130), (63, 1)), {"head_dim": 576, "v_dim": 512, "num_qo_heads": 16}),
    (((64, 1), (0, 65), (128, 40)), {"head_dim": 576, "v_dim": 512, "num_qo_heads": 128, "page_size": 64}),
    (tuple((n, 1) for n in range(1, 140)), {"head_dim": 160, "v_dim": 96, "num_qo_heads": 20}),
]


@pytest.mark.parametrize(("lengths", "changes"), GRID, ids=str)
def test_latent_rows_equal_float64(lengths: Any, changes: dict[str, Any]) -> None:
    """Decode rows, prefill with and without prefix, and mixes, for widths and heads off powers of two."""
    verify(TritonBackend, Case(lengths=lengths, **{**LATENT, **changes}), DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lengths", "changes"), [*GRID, *LONG], ids=str)
def test_latent_rows_of_real_widths(lengths: Any, changes: dict[str, Any], dtype: torch.dtype) -> None:
    """Those of published models, long and many."""
    verify(TritonBackend, Case(lengths=lengths, **{**LATENT, "dtype": dtype, **changes}), DEVICE)
