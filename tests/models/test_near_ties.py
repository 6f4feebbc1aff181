"""Where rounding decides which experts a token goes through, no check asks whether the engine decides alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from delta_models import make_delta
from families import make_checkpoint
from parity import NEAR, Choices, NearTie, check_logits, on_settled_prompts, prompt, reference


@pytest.mark.parametrize(
    ("scores", "is_near"),
    [
        ([0.6, 0.3, 0.3 * (1 - NEAR), 0.1], True),
        ([0.6, 0.6, 0.3, 0.2], False),  # both are chosen
        ([9.0, 1.0, 1.0 - 8 * NEAR, 0.0], True),  # an error is one of the largest
        ([9.0, 1.0, 1.0 - 10 * NEAR, 0.0], False),
        ([0.5, 0.3, float("-inf"), float("-inf")], False),  # groups that are left out
    ],
)
@pytest.mark.parametrize("is_method", [False, True])
def test_a_near_tie_is_seen(scores: list[float], is_near: bool, is_method: bool) -> None:
    """Of the second and the third, where two are chosen, however `topk` is called."""
    found = False
    try:
        with Choices():
            row = torch.tensor([[1.0, 0.5, 0.2, 0.1], scores], dtype=torch.float64)
            row.topk(2, dim=-1) if is_method else torch.topk(row, k=2, dim=-1)
    except NearTie:
        found = True
    assert found == is_near


@pytest.mark.parametrize(("apart", "is_near"), [(8 * NEAR, True), (20 * NEAR, False)])
def test_a_near_tie_of_shares_is_one_of_their_logarithms(apart: float, is_near: bool) -> None:
    """Rounding changes a share in proportion: one of 1e-4 is as exact as one of 0.9."""
    logits = torch.tensor([[10.0, 1.0, 1.0 - apart, 0.0]], dtype=torch.float64)
    found = False
    try:
        with Choices():
            logits.softmax(-1).topk(2)
    except NearTie:
        found = True
    assert found == is_near


def test_all_that_a_model_chooses_is_seen(tmp_path: Path) -> None:
    """A router whose scores are all alike is refused, whose experts are all chosen is not."""
    for num, is_near in ((2, True), (5, False)):
        model = make_checkpoint(tmp_path, "qwen3_moe", num_experts_per_tok=num)
        model.model.layers[1].mlp.gate.weight.zero_()
        if not is_near:
            with Choices():
                reference(model, prompt(9, seed=1))
            continue
        with pytest.raises(NearTie, match="2 of 5 experts, by 0 of"), Choices():
            reference(model, prompt(9, seed=1))


def test_another_prompt_is_taken() -> None:
    """Until one has no near tie; where all have some, the check fails."""
    seen: list[int] = []

    def check(last: int, *, seed: int) -> int:
        seen.append(seed)
        if seed < last:
            raise NearTie("near")
        return seed

    assert on_settled_prompts(check)(2000) == 2000
    assert seen == [0, 1000, 2000]
    with pytest.raises(AssertionError, match="all prompts are near ties"):
        on_settled_prompts(check)(10**9)


def test_the_prompt_that_went_either_way_is_passed_over(tmp_path: Path) -> None:
    """In its second layer the 109th token is near by 1e-7; with AVX2 logits differed by 0.14 from there on."""
    changes = {"layer_types": ["full_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    model = make_delta(tmp_path, "qwen3_next", **changes, rope_parameters=rope)
    with pytest.raises(NearTie, match="2 of 5 experts"):
        check_logits.__wrapped__(tmp_path, model, chunk=100, num_new=12, model_impl="dovetail")  # type: ignore[attr-defined]
