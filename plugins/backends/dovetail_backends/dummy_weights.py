"""`dummy`: small random numbers in place of weights, for benchmarks without a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.contracts.checkpoint import CheckpointFormat

if TYPE_CHECKING:
    import torch


class DummyWeights(CheckpointFormat):
    """Fills every parameter by its name and dtype."""

    is_filled = True

    def fill(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        """Write numbers with which a model computes something finite."""
        import torch

        if parameter.dtype == torch.uint8 and name.endswith("_scale"):
            parameter.random_(117, 121, generator=generator)  # powers of two, the exponent's bias being 127
        elif not parameter.is_floating_point():
            low = max(torch.iinfo(parameter.dtype).min, -128)
            parameter.random_(low, low + 256, generator=generator)  # bytes may hold several numbers
        elif parameter.dim() == 1 and not name.endswith("bias"):  # biases of one sign would make all tokens alike
            parameter.fill_(1.0)
        elif parameter.element_size() == 1:  # torch draws no numbers of 8 bits
            wide = torch.empty(parameter.shape, device=parameter.device).normal_(0.0, 0.02, generator=generator)
            parameter.copy_(wide)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
