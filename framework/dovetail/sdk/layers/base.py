"""What every layer with weights shares: it says which tensors of a checkpoint it wants, and puts each in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.contracts.errors import ModelError


@dataclass(frozen=True, slots=True)
class Slot:
    """One piece of a checkpoint that a layer wants.

    Args:
        tensor: Which of the layer's tensors: `weight`, `bias`, a scale.
        part: Of a fused matrix; empty for a whole one.
        expert: Its number, None in a layer without experts.
    """

    tensor: str
    part: str = ""
    expert: int | None = None

    def __str__(self) -> str:
        """As errors name it: `weight[gate, expert 3]`."""
        inside = [self.part] if self.part else []
        inside += [] if self.expert is None else [f"expert {self.expert}"]
        return self.tensor + (f"[{', '.join(inside)}]" if inside else "")


class Layer(nn.Module):
    """A layer that owns parameters and knows how to fill them.

    The loader calls `place` once for every slot that `slots` names and that `is_here`, then `finalize` once.
    """

    suffixes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """How checkpoints spell a tensor behind the module's name; by default `.weight` for `weight`."""

    path: str | None = None
    """Where the layer said it stands, if it was asked for by name: the loader compares."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "place" in vars(cls) and "holds" not in vars(cls):
            cls.holds = None  # type: ignore[assignment, method-assign]  # what becomes of a tensor is not known

    @property
    def holds(self) -> bool | None:
        """Whether a tensor that was placed is kept until `finalize`; the memory of others may be used again.

        None: it may be kept for good, so that each has memory of its own. So it is of a class that says how it places
        tensors and not what it holds.
        """
        return False

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        """What is to be loaded, with the shape that it has in the checkpoint of the whole model."""
        return {Slot(name): tuple(param.shape) for name, param in self.named_parameters(recurse=False)}

    def spellings(self, tensor: str) -> tuple[str, ...]:
        """How checkpoints spell a tensor behind the module's name."""
        return self.suffixes.get(tensor, (f".{tensor}",))

    def is_here(self, slot: Slot) -> bool:
        """Whether this rank may have something of a slot; a tensor of which it has nothing is not read."""
        return True

    def place(self, slot: Slot, tensor: Tensor) -> Tensor | None:
        """Copy a slot's tensor into place, this rank's share of it.

        Args:
            slot: One of `slots`.
            tensor: In the shape given there; a view, of which only what is used is read from disk.

        Returns:
            What was written, as it stands in the parameter; None if this rank needs nothing of it.
        """
        param: Tensor = getattr(self, slot.tensor)
        return param.copy_(tensor)

    def finalize(self) -> None:
        """Repack weights for speed after loading; default nothing."""

    @staticmethod
    def empty(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
        """Make an uninitialised parameter without gradient.

        Raises:
            ModelError: A size is negative: a number of the config is.
        """
        if min(shape, default=0) < 0:
            raise ModelError(f"config.json: a weight would be {list(shape)}; correct the negative number")
        return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)
