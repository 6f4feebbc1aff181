"""Attention backends are measured on a CUDA device as engines run them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from dovetail.contracts.kernels import PLAIN_KERNELS
from dovetail.runtime.attention.measure import STEPS, MeasuredLayers, measure, measuring_on
from dovetail_backends.triton import TritonBackend
from dovetail_testing.conformance.attention_world import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


class Eager(TritonBackend):
    """The same kernels, whose steps cannot be captured."""

    caps = dataclasses.replace(TritonBackend.caps, graph="none")


@pytest.mark.parametrize("changes", [{}, {"window": 300}, {"num_qo_heads": 32, "head_dim": 128}], ids=str)
def test_every_step_takes_time(changes: dict[str, int], tmp_path: Path) -> None:
    """Steps in graphs and outside of them run and are timed."""
    case = Case(
        lengths=[(1, 1)], dtype=torch.bfloat16, **{"num_qo_heads": 14, "num_kv_heads": 2, "head_dim": 64} | changes
    )  # type: ignore[arg-type]
    world = MeasuredLayers(case.config(), torch.device("cuda"), torch.bfloat16, 16)
    device = torch.device("cuda", torch.cuda.current_device())
    measuring = dataclasses.replace(measuring_on(device, PLAIN_KERNELS, compiles_ahead=True), folder=tmp_path)
    figures = measure({"triton": TritonBackend, "eager": Eager}, world, measuring, str(tmp_path))
    assert not figures.failed
    for name in ("triton", "eager"):
        assert len(figures.times[name]) == len(STEPS)
        assert all(0 < seconds < 1 and math.isfinite(seconds) for seconds in figures.times[name])
    print(figures)
