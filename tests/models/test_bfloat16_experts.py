"""In bfloat16, models of experts compute what transformers' do with the same routing.

Where two experts score nearly alike, rounding chooses the one here and the other there, and then all else differs; so
Dovetail's routers are given what transformers' have chosen, token by token and layer by layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from parity import prompt, recorded, run
from torch import Tensor

from dovetail.contracts.layers import RMSScale
from dovetail.sdk.layers.moe import Router
from dovetail.sdk.layers.ops.reference import rms_norm
from dovetail_testing.engine import make_core

KINDS = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "minimax_m2",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "ernie4_5_moe",
    "llama4_text",
]
Choice = tuple[Tensor, Tensor]


def watch(model: Any, choices: list[Choice], *, gives: bool = False) -> None:
    """Note what each layer's router of transformers chooses, ids and shares `[T, K]`; or give it that in turn."""

    def of_experts(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        if gives:
            ids, shares = choices.pop(0)
            return given[0], ids, shares.to(given[0].dtype)
        choices.append((given[1], given[2]))
        return given

    def of_router(module: Any, given: tuple[Any, ...], out: Any) -> Any:
        if gives:
            ids, shares = choices.pop(0)
            return torch.zeros_like(out[0]).scatter_(1, ids, shares.to(out[0].dtype)), out[1]
        shares, ids = out[0].topk(module.top_k, dim=-1)
        choices.append((ids, shares))
        return out

    for module in model.modules():
        kind = type(module).__name__
        if kind == "Llama4Router":  # its experts are not told
            module.register_forward_hook(of_router)
        elif kind.endswith("Experts") and kind != "Llama4TextExperts":
            module.register_forward_pre_hook(of_experts)


def give(model: Any, choices: list[Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Dovetail's routers choose these, which are asked in the order of the layers."""
    left = list(choices)
    assert len([module for module in model.modules() if isinstance(module, Router)]) == len(left) > 0

    def forward(self: Router, x: Tensor, scale: float = 1.0) -> Choice:
        ids, shares = left.pop(0)
        assert len(ids) == len(x)
        return ids, (shares.float() * scale).to(x.dtype)

    def normed(self: Router, x: Tensor, rms: RMSScale | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        rows = x if rms is None else rms_norm(x, *rms)
        return *forward(self, rows, scale), rows

    monkeypatch.setattr(Router, "forward", forward)
    monkeypatch.setattr(Router, "normed", normed)


def error(got: Tensor, want: Tensor) -> float:
    """Relative, over all tokens."""
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.sampled
@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_logits_with_one_routing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a prompt are as near to float32 with the same choices as transformers' in bfloat16 are."""
    from transformers import AutoModelForCausalLM

    ids = prompt(60, seed=3)
    choices: list[Choice] = []
    exact = make_checkpoint(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    watch(model, choices)
    theirs = model(torch.tensor([ids])).logits[0]
    core = make_core(tmp_path, page_size=4, chunked_prefill_size=4096, dtype="bfloat16", model_impl="dovetail")
    logits = recorded(core)
    give(core.executor.runner.model, choices, monkeypatch)  # type: ignore[attr-defined]
    run(core, [ids], 1, prompt_logprobs=0)
    watch(exact, choices, gives=True)
    want = exact(torch.tensor([ids])).logits[0]
    assert not choices
    ours = error(torch.cat(logits), want)
    assert ours <= 1.3 * error(theirs, want), (ours, error(theirs, want))
