"""Where wide random weights let float32 differ from a reference, Dovetail is no farther from float64 than that is."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from parity import PAGE, prompt, recorded, run
from survey import make

from dovetail_testing.engine import make_core


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_zamba2_errs_as_float32_does(seed: int, tmp_path: Path) -> None:
    """The survey has narrower weights for it; with those of the other models both round alike, so nothing is hidden."""
    model = make(tmp_path, "zamba2", seed, initializer_range=0.2)
    core = make_core(
        tmp_path, page_size=PAGE, chunked_prefill_size=7, max_running_requests=4, model_impl="transformers"
    )
    logits, ids = recorded(core), prompt(100, seed=1)
    outcome = run(core, [ids], 8, prompt_logprobs=0)
    got = torch.cat(logits).double().log_softmax(-1)
    tokens = torch.tensor([[*ids, *outcome.tokens[0][:-1]]])
    with torch.inference_mode():
        theirs, exact = (
            one(tokens).logits[0, -len(got) :, : got.shape[1]].double().log_softmax(-1)
            for one in (model, copy.deepcopy(model).double())
        )
    assert (got - exact).abs().max() < 1.5 * (theirs - exact).abs().max()
