"""On the GPU, in captured prefills and eager ones: a token that is not finite ends its request and nobody else's."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.engine.core import EngineCore
from dovetail.messages import Finish, SamplerParams, Submit
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("DOVETAIL_TEST_DEVICE", "cuda")
MARK = 177
"""A token whose embedding is spoilt for some steps: what is captured reads it, too."""
GREEDY = SamplerParams(max_tokens=6, temperature=0, ignore_eos=True)


def embedding(core: EngineCore) -> torch.Tensor:
    """The row of `MARK`."""
    weights = [p for name, p in core.executor.runner.model.named_parameters() if "embed" in name]  # type: ignore[attr-defined]
    row: torch.Tensor = weights[0].data[MARK]
    return row


def step(core: EngineCore, tokens: dict[int, list[int]], finishes: dict[int, Finish], most: int = 200) -> None:
    """Step until all have ended, at most so often."""
    for _ in range(most):
        if not core.has_work:
            break
        for delta in core.step().deltas:
            tokens.setdefault(delta.handle, []).extend(delta.ids)
            if delta.finish is not None:
                finishes[delta.handle] = delta.finish


@pytest.mark.parametrize("changes", [{}, {"disable_cuda_graph": True}, {"chunked_prefill_size": 32}], ids=str)
def test_a_token_that_is_not_finite_ends_its_request_alone(changes: dict[str, Any], tmp_path: Path) -> None:
    """Its followers and neighbours get what they get in a clean engine, and so does a later request with its prompt."""
    folder = make_model(tmp_path, "Qwen3ForCausalLM", head_dim=64)
    prompt = [(7 * i) % 170 for i in range(90)]
    prompt[50] = MARK
    tokens: list[dict[int, list[int]]] = [{}, {}]
    finishes: list[dict[int, Finish]] = [{}, {}]
    for found, ends, spoils in zip(tokens, finishes, (False, True), strict=True):
        core = make_core(folder, device=DEVICE, max_total_tokens=8192, **changes)
        core.handle(Submit(rid="", handle=9, prompt_ids=[3, 4, 5], params=GREEDY))
        step(core, found, ends, most=1)
        row = embedding(core)
        kept = row.clone()
        core.handle(Submit(rid="", handle=1, prompt_ids=prompt, params=GREEDY))
        if spoils:
            with torch.inference_mode():
                row.fill_(math.nan)
            step(core, found, ends, most=6)
            with torch.inference_mode():
                row.copy_(kept)
        step(core, found, ends)
        for handle in (2, 3):
            core.handle(Submit(rid="", handle=handle, prompt_ids=[*prompt, handle], params=GREEDY))
        step(core, found, ends)
        assert not core.has_work
        runner = core.executor.runner
        for layer in range(runner.config.num_layers):
            assert torch.isfinite(runner.pool.layer(layer)).all()
        core.close()
    assert "not finite" in (finishes[1][1].message or "")
    assert not tokens[1][1]
    assert {h: tokens[1][h] for h in (2, 3, 9)} == {h: tokens[0][h] for h in (2, 3, 9)}
