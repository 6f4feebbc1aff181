"""Muon: momentum whose matrix updates are made nearly orthogonal, computed for all matrices of a shape at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Moves the singular values of each matrix of `stack` [matrices, rows, columns] close to one, in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).float()
    return result


class Muon:
    """Updates matrices by orthogonalised momentum, scaled so that a learning rate means what it does for Adam.

    Args:
        parameters: The matrices to train.
        momentum: The decay of the running gradient.
        decay: The weight decay, times the learning rate, per step.
    """

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.1) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        self._groups = list(shapes.values())
        self._running = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self._groups]
        self._momentum, self._decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Applies one update with learning rate `rate` and drops the gradients."""
        for group, running in zip(self._groups, self._running, strict=True):
            gradients = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            running.lerp_(gradients, 1 - self._momentum)
            update = orthogonalise(gradients.lerp(running, self._momentum))
            update *= -rate * 0.2 * math.sqrt(max(group[0].shape))
            matrices: list[Tensor] = list(group)
            torch._foreach_mul_(matrices, 1 - rate * self._decay)
            torch._foreach_add_(matrices, [*update])
            for parameter in group:
                parameter.grad = None
