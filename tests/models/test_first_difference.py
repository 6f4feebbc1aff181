"""What is said about two engines that differ names the setting, the prompt and the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from delta_models import make_delta
from first_difference import VARIANTS, by_module, difference, outputs, variants

from dovetail.messages import SamplerParams
from dovetail_models.gated_delta import GatedRMSNorm
from dovetail_testing.engine import generate, tokens

OWN: dict[str, Any] = {"model_impl": "dovetail", "max_total_tokens": 512}
PROMPTS = [[(7 * i + j) % 120 + 5 for j in range(60 + 11 * i)] for i in range(2)]
ONCE = SamplerParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of both kinds."""
    made = tmp_path_factory.mktemp("olmo")
    make_delta(made, "olmo_hybrid")
    return made


def test_the_first_module_that_differs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All before it are equal; two runs of one engine are."""
    ids = PROMPTS[0]
    names = [name for name, _ in outputs(folder, ids, OWN)]
    assert {"GatedDeltaNet", "WholeNormAttention", "PostNormLayer"} <= set(names)
    assert all(": 0 at token" in line for line in by_module(folder, ids, OWN, OWN))
    right, calls = GatedRMSNorm.forward, []

    def wrong(self: GatedRMSNorm, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        found = right(self, x, gate)
        if len(x) == len(ids) and sum(num == len(ids) for num in calls) == 2:  # of the second layer
            found[41] *= 1.01
        return found

    monkeypatch.setattr(GatedRMSNorm, "forward", wrong)
    mine = outputs(folder, ids, OWN)
    monkeypatch.undo()
    off = [not torch.equal(got, want) for (_, got), (_, want) in zip(mine, outputs(folder, ids, OWN), strict=True)]
    norms = [i for i, (name, _) in enumerate(mine) if name == "GatedRMSNorm"]
    assert off.index(True) == norms[1]


def test_a_reply_that_differs_is_named_for_each_variant(folder: Path) -> None:
    """How many tokens are the same, how far apart the others are; an engine that fails is a line, too."""
    want = generate(folder, PROMPTS, ONCE, **OWN)
    assert difference(want[0], want[0]) == (3, 0.0, 0)
    other = next(i for i in range(3) if tokens(want[0])[i] != tokens(want[1])[i])
    assert difference(want[0], want[1]).same == other
    lines = variants(folder, PROMPTS, ONCE, want, OWN)
    assert [line.partition(":")[0] for line in lines] == list(VARIANTS)
    assert lines[0] == "as it is: prompt 0 of 60 tokens has 3 tokens the same; prompt 0 differs by 0 in token 0"
    refused = variants(folder, PROMPTS, ONCE, want, {**OWN, "max_total_tokens": -1})
    assert all("Error" in line for line in refused)
