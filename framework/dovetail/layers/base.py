"""What every layer with weights shares: it says which parts it expects and takes them one by one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """A layer that owns parameters and knows how to fill them.

    The loader calls `load_weight` once for every `(parameter, slot)` that `expected` names, then `finalize` once.
    """

    def expected(self) -> list[tuple[str, str | None]]:
        """`(parameter name, slot)` pairs to be loaded; slot None is the whole parameter."""
        return [(name, None) for name, _ in self.named_parameters(recurse=False)]

    def load_weight(self, name: str, slot: str | None, tensor: Tensor) -> None:
        """Copy one checkpoint tensor into place.

        Raises:
            ValueError: The shape differs; the message gives both.
        """
        self.copy_part(getattr(self, name), tensor)

    def finalize(self) -> None:
        """Repack weights for speed after loading; default nothing."""

    @staticmethod
    def copy_part(part: Tensor, tensor: Tensor) -> None:
        """Copy `tensor` into `part`, converting dtype and device."""
        if part.shape != tensor.shape:
            raise ValueError(f"shape {list(tensor.shape)} in the checkpoint, {list(part.shape)} expected")
        part.copy_(tensor)

    @staticmethod
    def empty(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
        """Make an uninitialised parameter without gradient."""
        return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)
