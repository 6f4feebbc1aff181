"""Where two engines differ that should say the same: which of their settings decides it, and which module of a model.

A test that fails on a GPU runs once in a while: its message then says all that a second run would be for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from dovetail.messages import SamplerParams, TokenDelta
from dovetail_testing.engine import generate, tokens

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one at a time": {"max_running_requests": 1},
    "no cached states": {"disable_radix_cache": True},
    "no graphs": {"disable_cuda_graph": True},
    "attention in torch": {"disable_cuda_graph": True, "attention_backend": "torch_native"},
    "kernels in torch": {"disable_cuda_graph": True, "kernels": "plain"},
}
"""What is changed one by one. Plain torch reads on the host which tokens are whose: no graph records it."""


class Difference(NamedTuple):
    """How a reply differs from another.

    Attributes:
        same: Tokens before the first that differs.
        worst: Largest difference of log probabilities of these.
        at: The token in which it is.
    """

    same: int
    worst: float
    at: int


def logprobs_of(deltas: Sequence[TokenDelta]) -> list[float]:
    """Log probabilities of the tokens."""
    return [logprob.logprob for delta in deltas for logprob in delta.logprobs or ()]


def difference(mine: Sequence[TokenDelta], other: Sequence[TokenDelta]) -> Difference:
    """Compare two replies to a prompt; NaN differs from all."""
    pairs = list(zip(tokens(list(mine)), tokens(list(other)), strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    off = [abs(a - b) for a, b in zip(logprobs_of(mine)[:same], logprobs_of(other)[:same], strict=True)]
    off = [one if one == one else float("inf") for one in off]
    worst = max(off, default=0.0)
    return Difference(same, worst, off.index(worst) if off else 0)


def variants(
    folder: Path, prompts: Sequence[list[int]], params: SamplerParams, want: Sequence[Sequence[TokenDelta]],
    settings: Mapping[str, Any],
) -> list[str]:  # fmt: skip
    """Return a line for each variant of `settings`: the reply that differs first, or most, or the error."""
    lines = []
    for name, changes in VARIANTS.items():
        try:
            got = generate(folder, prompts, params, **{**settings, **changes})
        except Exception as error:
            lines.append(f"{name}: {type(error).__name__}: {error}")
            continue
        found = [difference(mine, other) for mine, other in zip(got, want, strict=True)]
        which = min(range(len(found)), key=lambda i: (found[i].same, -found[i].worst))
        most = max(range(len(found)), key=lambda i: found[i].worst)
        lines.append(
            f"{name}: prompt {which} of {len(prompts[which])} tokens has {found[which].same} tokens the same; "
            f"prompt {most} differs by {found[most].worst:.2g} in token {found[most].at}"
        )
    return lines


def outputs(folder: Path, ids: list[int], settings: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return what each module of a model made of a prompt, in the order of their calls, without graphs."""
    found: dict[int, tuple[str, Tensor]] = {}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        del args
        value = output.total() if hasattr(output, "total") else output
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[:1] == (len(ids),):
            found[id(module)] = type(module).__name__, value.detach().to("cpu", torch.float64, copy=True)

    hook = register_module_forward_hook(keep)
    try:
        once = SamplerParams(temperature=0, max_tokens=1, ignore_eos=True)
        generate(folder, [ids], once, **{**settings, "disable_cuda_graph": True, "disable_radix_cache": True})
    finally:
        hook.remove()
    return list(found.values())


def by_module(folder: Path, ids: list[int], settings: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Return a line for each module: how far what it made in one engine is from the other's, and where most.

    Args:
        folder: The checkpoint.
        ids: A prompt of a length that no other step has.
        settings: Of the engine in question.
        others: Of the one that is right.
    """
    lines = []
    for number, ((kind, got), (other, want)) in enumerate(
        zip(outputs(folder, ids, settings), outputs(folder, ids, others), strict=True)
    ):
        if kind != other or got.shape != want.shape:
            return [*lines, f"{number}: {kind} {tuple(got.shape)} here, {other} {tuple(want.shape)} there"]
        off = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp(min=1e-30)
        off = torch.where(off.isnan(), float("inf"), off)
        lines.append(f"{number}: {kind} {tuple(got.shape)}: {float(off.max()):.2g} at token {int(off.argmax())}")
    return lines
